"""Power loss, simulated: what was not made durable with fsync is lost, or half there, and the store opens all the same.

Every change of a folder and of a file is recorded while a history is performed. Then disks are made as they could be
after a power loss at any moment: of a file, what it held at its last fsync, or some of what was written since; of a
folder, its names at its last fsync with any of the changes since. The fsync of a file says nothing of its name.

MNEMIC_POWER_LOSSES sets how many such disks each kind of store is opened on (400 by default).
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mnemic.stores import open_store

from .store_process import CONFIGS, EARLY, Model, Operation, State, history, perform, touches_a_file
from .test_store_killed import assert_holds, disk, holds  # noqa: F401 (a fixture)

LOSSES = int(os.environ.get("MNEMIC_POWER_LOSSES", "400"))
STORE = "new folder/deep/a.store"

Names = dict[str, int | None]  # name -> file, or None where there is none any more


@dataclass
class Recorder:
    """Writes down what happens to the files below a folder, from what it sees there after each call."""

    root: Path
    events: list[tuple[str, Any, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._files: dict[int, int] = {}  # number of the file system -> ours, which is never used twice
        self._count = 0
        self._seen: dict[int, dict[str, int]] = {}
        self._sizes: dict[int, tuple[int, int]] = {}
        self.look()

    def look(self) -> None:
        """Compares what is there with what was there."""
        here: dict[int, dict[str, int]] = {}
        known, self._files = self._files, {}
        self._walk(self.root, here, known)
        for folder, names in here.items():
            before = self._seen.get(folder, {})
            changes: Names = {name: None for name in before if name not in names}
            changes |= {name: file for name, file in names.items() if before.get(name) != file}
            if changes:
                self._check_single(changes, before)
                self.events.append(("names", folder, changes))
        self._seen = here

    def _walk(self, folder: Path, here: dict[int, dict[str, int]], known: dict[int, int]) -> None:
        names = here[self._number(folder.stat(), known)] = {}
        for item in os.scandir(folder):
            stat = item.stat()
            number = names[item.name] = self._number(stat, known)
            if item.is_dir():
                self._walk(folder / item.name, here, known)
            elif self._sizes.get(number) != (stat.st_size, stat.st_mtime_ns):
                self._sizes[number] = (stat.st_size, stat.st_mtime_ns)
                self.events.append(("content", number, (folder / item.name).read_bytes()))

    def _number(self, stat: os.stat_result, known: dict[int, int]) -> int:
        if stat.st_ino not in self._files:
            if stat.st_ino not in known:
                self._count += 1
            self._files[stat.st_ino] = known.get(stat.st_ino, self._count)
        return self._files[stat.st_ino]

    def _check_single(self, changes: Names, before: dict[str, int]) -> None:
        """A name that came, a name that went, or a file that got another name: else something was not seen."""
        went = [name for name, file in changes.items() if file is None]
        came = [file for file in changes.values() if file is not None]
        assert len(went) <= 1, changes
        assert len(came) <= 1, changes
        assert not (went and came) or before[went[0]] == came[0], changes

    def fsync(self, descriptor: int) -> None:
        self.look()
        _fsync(descriptor)
        self.events.append(("fsync", self._files[os.fstat(descriptor).st_ino], None))

    def profile(self, _: object, event: str, function: Any) -> None:
        if event == "c_return" and touches_a_file(function):
            self.look()


_fsync = os.fsync


@dataclass
class Disk:
    """What is on a disk for certain, and what may be."""

    names: dict[int, dict[str, int]] = field(default_factory=lambda: {1: {}})
    waiting: dict[int, list[Names]] = field(default_factory=dict)
    durable: dict[int, bytes] = field(default_factory=dict)
    content: dict[int, bytes] = field(default_factory=dict)

    def happen(self, event: tuple[str, Any, Any]) -> None:
        what, number, change = event
        if what == "names":
            self.waiting.setdefault(number, []).append(change)
        elif what == "content":
            self.content[number] = change
        elif what == "fsync" and number in self.content:
            self.durable[number] = self.content[number]
        elif what == "fsync":
            for names in self.waiting.pop(number, []):
                self.names[number] = _changed(self.names.get(number, {}), names)

    def write(self, path: Path, draw: random.Random, number: int = 1) -> None:
        """Makes a folder as it could be after a power loss now."""
        path.mkdir()
        names = self.names.get(number, {})
        often = draw.choice([0.0, 0.5, 1.0])  # nothing of what waits is there, some of it, all of it
        for change in self.waiting.get(number, []):
            if draw.random() < often:
                names = _changed(names, change)
        for name, file in names.items():
            if file in self.content:
                (path / name).write_bytes(self._survives(file, draw))
            else:
                self.write(path / name, draw, file)

    def _survives(self, file: int, draw: random.Random) -> bytes:
        content, durable = self.content[file], self.durable.get(file, b"")
        if content == durable:
            return content
        blocks = [content[start : start + 64] for start in range(0, len(content), 64)]
        return draw.choice(
            [
                durable,
                b"",
                bytes(len(content)),
                content,
                content[: draw.randrange(len(content) + 1)],
                b"".join(block if draw.random() < 0.5 else bytes(len(block)) for block in blocks),
            ]
        )


def _changed(names: dict[str, int], changes: Names) -> dict[str, int]:
    return {name: file for name, file in {**names, **changes}.items() if file is not None}


@pytest.fixture
def recorder(disk: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:  # noqa: F811
    for setting in EARLY:
        monkeypatch.setattr(*setting)
    (disk / "recorded").mkdir()
    made = Recorder(disk / "recorded")
    monkeypatch.setattr(os, "fsync", made.fsync)
    return made


def record(recorder: Recorder, config: str, operations: list[Operation]) -> None:
    """Performs operations; the number of each is written down when it is done."""
    sys.setprofile(recorder.profile)
    try:
        store = open_store(recorder.root / STORE, CONFIGS[config])
        recorder.events.append(("done", 0, None))
        for number, operation in enumerate(operations, 1):
            perform(store, operation)
            recorder.events.append(("done", number, None))
        store.close()
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("config", CONFIGS)
def test_no_committed_row_is_lost(recorder: Recorder, tmp_path: Path, config: str, disk: Path) -> None:  # noqa: F811
    operations = [operation for seed in range(5) for operation in history(seed)]
    record(recorder, config, operations)
    model, states = Model(), [dict[int, Any]()]
    for operation in operations:
        model.perform(operation)
        states.append(model.committed)
    sys.setprofile(None)
    os.fsync = _fsync
    draw, done, now = random.Random(config), -1, Disk()
    moments = sorted(draw.choices(range(len(recorder.events)), k=LOSSES))
    for number, event in enumerate(recorder.events):
        while moments and moments[0] == number:
            after = disk / f"{len(moments)}"
            now.write(after, draw)
            check(after / STORE, config, states, done)
            moments.pop(0)
        now.happen(event)
        if event[0] == "done":
            done = event[1]


def check(folder: Path, config: str, states: list[State], done: int) -> None:
    """Asserts that a store holds the rows of its last acknowledged version or of the next one, and serves on."""
    with open_store(folder, CONFIGS[config] if done < 0 else None) as store:
        state, later = states[max(done, 0)], states[min(done + 1, len(states) - 1)]
        if not holds(store, state):
            state = later
        assert_holds(store, state)
        assert store.verify() == []
        name, rows = next(operation for operation in history(0) if operation[0] == "add")
        perform(store, (name, rows))
        store.commit()
        assert len(store) == len(state) + len(rows[0])
        assert store.verify() == []


def test_the_recorder_sees_what_is_lost(recorder: Recorder, disk: Path) -> None:  # noqa: F811
    """A writer that forgets an fsync loses what it wrote on some of the disks."""
    for name, durable in (("careless", False), ("careful", True)):
        sys.setprofile(recorder.profile)
        with open(recorder.root / name, "wb") as file:
            file.write(b"x" * 100)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if durable:
            descriptor = os.open(recorder.root, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        sys.setprofile(None)
    now, draw, found = Disk(), random.Random(0), set()
    for event in recorder.events:
        now.happen(event)
    for number in range(100):
        now.write(disk / f"{number}", draw)
        careless = disk / f"{number}" / "careless"
        found.add(careless.read_bytes() if careless.exists() else None)
        assert (disk / f"{number}" / "careful").read_bytes() == b"x" * 100
    assert {b"", bytes(100), b"x" * 100} < found
