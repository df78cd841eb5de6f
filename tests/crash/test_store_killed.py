"""Writers of a store killed with SIGKILL, again and again: no committed row is lost, and every store opens.

MNEMIC_KILLS sets how many are killed (500 by default).
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from mnemic.errors import MnemicError, UsageError
from mnemic.files import TEMPORARY
from mnemic.stores import Where, open_store

from .store_process import CONFIGS, DIM, EARLY, NAMESPACES, Model, Operation, State, history, perform, touches_a_file

KILLS = int(os.environ.get("MNEMIC_KILLS", "500"))
TRIES_ON_ONE_STORE = 20
CALLS = 500  # that touch a file, in a history, about
CALLS_OF_A_BEGINNING = 40
INTERRUPTIONS = 60
READ_HISTORIES = 8


class Outcome(NamedTuple):
    """Exit status of a writer, the version after each operation that it acknowledged, and its error."""

    status: int
    versions: list[int]
    error: str


class Writers:
    """The process that forks writers."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.store_process"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def start(self, folder: Path, config: str, seed: int | list[int], **death: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"folder": str(folder), "config": config, "seed": seed, **death}) + "\n")
        self.process.stdin.flush()

    def is_done(self) -> bool:
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def outcome(self) -> Outcome:
        assert self.process.stdout is not None
        return Outcome(**json.loads(self.process.stdout.readline()))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: what a process wrote outlives its death there just as well."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def writers() -> Iterator[Writers]:
    made = Writers()
    with made.process:  # closes its stdin at the end, on which it ends too
        yield made
    assert made.process.returncode == 0


def assert_holds(store: Any, state: State) -> None:
    """Row for row what the model has, by number and by search."""
    numbers = np.array(sorted(state), np.int64)
    assert len(store) == len(numbers)
    got = store.get(numbers)
    assert got.values.tolist() == [state[number].value for number in numbers]
    assert [got.references[row] for row in range(len(numbers))] == [
        (state[number].source, state[number].position) for number in numbers
    ]
    keys = np.array([state[number].key for number in numbers]).reshape(-1, DIM)
    if got.keys is not None:
        np.testing.assert_array_equal(got.keys, keys)
    else:
        assert store.config.keys == "codes"
    for where in (None, *NAMESPACES):
        meant = [number for number in numbers if state[number].source in Where.of(where)]
        found = store.search(np.ones((1, DIM), np.float32), len(numbers) + 1, where, recall=1.0)
        assert sorted(found.ids[found.mask].tolist()) == meant
        assert found.values[found.mask].tolist() == [state[number].value for number in found.ids[found.mask]]
        if store.config.keys != "codes":
            rows = keys[np.searchsorted(numbers, found.ids[found.mask])].astype(np.float64)
            true = rows.sum(1) if store.config.metric == "ip" else -((rows - 1) ** 2).sum(1)
            np.testing.assert_allclose(found.scores[found.mask], true, rtol=1e-4, atol=1e-4)


def holds(store: Any, state: State) -> bool:
    try:
        return len(store) == len(state) and store.get(sorted(state)).values.tolist() == [
            state[number].value for number in sorted(state)
        ]
    except UsageError:
        return False


def check_survivor(folder: Path, config: str, model: Model, seed: int, versions: list[int]) -> None:
    """Asserts that the store is as the writer left it at its last acknowledged operation, or one operation later."""
    operations = history(seed)
    for operation in operations[: len(versions)]:
        model.perform(operation)
    with open_store(folder, CONFIGS[config]) as store:
        assert store.version >= (versions[-1] if versions else 0)
        if len(versions) < len(operations) and not holds(store, model.committed):
            model.perform(operations[len(versions)])  # it was just being committed
        assert_holds(store, model.committed)
        for number in {model.next_id, *range(0, model.next_id, 97)} - set(model.committed):
            with pytest.raises(UsageError, match="no row has the number"):
                store.get([number])
        assert store.verify() == []
        assert sum(store.summary().namespaces.values()) == len(model.committed)
    model.drop_pending()


def kill_and_check(writers: Writers, folder: Path, config: str, model: Model, seed: int, **death: Any) -> bool:
    """Starts a writer that is to die and looks at what it left; whether it died."""
    writers.start(folder, config, seed, **death)
    outcome = writers.outcome()
    assert outcome.status in (0, -signal.SIGKILL), outcome.error
    check_survivor(folder, config, model, seed, outcome.versions)
    return outcome.status != 0


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("how", ["at a file", "from outside"])
def test_no_committed_row_is_lost(writers: Writers, disk: Path, config: str, how: str) -> None:
    draw, killed, tried = random.Random(f"{config} {how}"), 0, 0
    while killed < -(-KILLS // 6):
        if tried % TRIES_ON_ONE_STORE == 0:
            folder, model = disk / f"{tried}.store", Model()
        death: dict[str, Any] = {"die_at": draw.randrange(1, CALLS), "after": draw.random() < 0.5}
        if how == "from outside":
            death = {"kill_after": draw.uniform(0.001, 0.1)}
        killed += kill_and_check(writers, folder, config, model, draw.randrange(10**9), **death)
        tried += 1
    assert killed > tried / 3, "most writers should die"


def test_a_store_that_was_just_being_made(writers: Writers, disk: Path) -> None:
    killed = 0
    for call in range(1, CALLS_OF_A_BEGINNING):
        for after in (False, True):
            folder, model = disk / f"{call} {after}" / "new.store", Model()
            killed += kill_and_check(writers, folder, "exact", model, call, die_at=call, after=after)
            assert not kill_and_check(writers, folder, "exact", model, call + 1), "it does not serve any more"
            assert not [name for name in os.listdir(folder) if name.startswith(TEMPORARY)]
    assert killed == 2 * (CALLS_OF_A_BEGINNING - 1)


def test_an_interrupted_writer_goes_on(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a notebook, at any call that touches a file: the same store object serves on."""
    for setting in EARLY:
        monkeypatch.setattr(*setting)
    draw, interrupted = random.Random(0), 0
    for number in range(INTERRUPTIONS):
        config, operations, model = draw.choice(list(CONFIGS)), history(number, 16), Model()
        folder = disk / f"{number}.store"
        with open_store(folder, CONFIGS[config]) as store:
            broken_off = interrupted_at(draw.randrange(1, CALLS), store, operations)
            for operation in operations[:broken_off]:
                model.perform(operation)
            if broken_off < len(operations):
                interrupted += 1
                before, after = copied(model), copied(model)
                after.perform(operations[broken_off])
                # Neither half an operation nor anything that was added before may be lost: whoever says commit gets it.
                store.commit()
                before.perform(("commit", None)), after.perform(("commit", None))
                model = before if holds(store, before.committed) else after
                assert_holds(store, model.committed)
                for operation in [*operations[broken_off + 1 :], ("commit", None)]:
                    perform(store, operation)
                    model.perform(operation)
                    with open_store(folder) as reader:
                        assert reader.verify() == []
            assert_holds(store, model.committed)
    assert interrupted > INTERRUPTIONS / 3


def copied(model: Model) -> Model:
    return Model(dict(model.committed), model.next_id, dict(model.coming), model.coming_id)


def interrupted_at(call: int, store: Any, operations: list[Operation]) -> int:
    """Performs operations until KeyboardInterrupt comes at a call that touches a file; how many were done."""
    seen = 0

    def watch(_: object, event: str, function: Any) -> None:
        nonlocal seen
        if event == "c_call" and touches_a_file(function):
            seen += 1
            if seen == call:
                raise KeyboardInterrupt

    for number, operation in enumerate(operations):
        sys.setprofile(watch)
        try:
            perform(store, operation)
        except KeyboardInterrupt:
            return number
        finally:
            sys.setprofile(None)
    return len(operations)


def test_the_second_writer_is_told_who_holds_the_lock(writers: Writers, disk: Path) -> None:
    folder, rows = disk / "a.store", next(argument for name, argument in history(0) if name == "add")
    with open_store(folder, CONFIGS["exact"]) as first, open_store(folder) as second:
        first.add(*rows)
        for change in (lambda: second.add(*rows), lambda: second.delete("red"), second.compact):
            with pytest.raises(MnemicError, match=f"{folder} is in use by process {os.getpid()} on "):
                change()
        writers.start(folder, "exact", seed=0)
        assert f"MnemicError: the store {folder} is in use by process {os.getpid()} on " in writers.outcome().error
        assert first.commit() == 1
        assert (second.version, second.refresh(), len(second)) == (0, 1, len(first))
    writers.start(folder, "exact", seed=1, die_at=40, after=False)
    assert writers.outcome().status == -signal.SIGKILL
    with open_store(folder) as third:
        third.delete("red")  # the lock of the dead is free


@pytest.mark.parametrize("config", CONFIGS)
def test_readers_are_not_blocked_and_keep_their_version(writers: Writers, disk: Path, config: str) -> None:
    folder, model = disk / "a.store", Model()
    operations = [operation for seed in range(READ_HISTORIES) for operation in history(seed)]
    states = [model.committed]
    for operation in operations:
        model.perform(operation)
        states.append(model.committed)
    writers.start(folder, config, seed=list(range(READ_HISTORIES)))
    seen = 0
    kept: list[tuple[Any, State]] = []
    while not writers.is_done():
        if not folder.exists() or not any(name.startswith("manifest") for name in os.listdir(folder)):
            continue
        store = open_store(folder)
        state = next(state for state in states if holds(store, state))
        assert_holds(store, state)
        seen += 1
        if len(kept) < 5 and all(state is not other for _, other in kept):
            kept.append((store, state))
        else:
            store.close()
    outcome = writers.outcome()
    assert outcome.status == 0, outcome.error
    assert seen > 3
    for store, state in kept:  # their files are gone by now
        assert_holds(store, state)
        assert store.summary().rows == len(state)
        assert store.verify() == []
        store.refresh()
        assert_holds(store, model.committed)
        store.close()
