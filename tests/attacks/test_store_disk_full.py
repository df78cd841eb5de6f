"""Disks that are full or cannot be written: the old version serves on, and what failed succeeds when there is room."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mnemic.errors import MnemicError
from mnemic.stores import References, open_store
from tests.crash.store_process import CONFIGS, DIM, EARLY, Model, Operation, history, perform, touches_a_file
from tests.crash.test_store_killed import assert_holds, copied, holds

PAGE = 4096
WRITING = {"write", "flush", "fsync", "replace", "mkdir", "truncate"}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of two megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"cannot mount a small disk here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in EARLY:
        monkeypatch.setattr(*setting)


def fill(disk: Path, room: int) -> None:
    """Leaves so many pages free."""
    free = os.statvfs(disk)
    (disk / "ballast").write_bytes(bytes(max(0, free.f_bavail - room) * free.f_frsize))


def make_room(disk: Path) -> None:
    (disk / "ballast").unlink()


def finds_the_disk_full(call: Callable[[], object]) -> bool:
    """Whether it fails for that reason, which it says in one sentence; another error is not caught."""
    try:
        call()
    except MnemicError as error:
        if not re.fullmatch("the disk is full while writing .*: free some space and run again", str(error)):
            raise
        return True
    return False


ADDS = [operation for operation in history(3, 60) if operation[0] == "add"][:8]
DELETE = next(operation for operation in history(4, 60) if operation[0] == "delete")
COMMIT, ROWS, COMPACT = ("commit", None), ("rows", None), ("compact", None)


def many(count: int) -> Operation:
    """So many rows at once."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((count, DIM)).astype(np.float16).astype(np.float32)
    return "add", (keys, rng.integers(0, 60_000, count), References.of("document 1", range(count), "red"))


STAGES: dict[str, tuple[list[Operation], Operation]] = {
    "add": ([*ADDS[:3], COMMIT, *ADDS[3:5]], many(3000)),
    "commit": ([*ADDS[:3], ROWS, *ADDS[3:5], DELETE, *ADDS[5:]], ROWS),
    "index": ([*ADDS, ROWS], COMMIT),
    "extend": ([*ADDS[:5], COMMIT, *ADDS[5:], ROWS], COMMIT),
    "compact": ([*ADDS[:5], COMMIT, *ADDS[5:7], COMMIT, DELETE, COMMIT], COMPACT),
    "all at once": ([*ADDS[:5], COMMIT, *ADDS[5:7], DELETE], COMPACT),
}


@pytest.mark.parametrize(
    ("config", "stage"),
    [(c, stage) for c in CONFIGS for stage in STAGES if c != "exact" or stage not in ("index", "extend")],
)
def test_no_room_for(disk: Path, config: str, stage: str) -> None:
    """With no free page, with one, with two, ... until it succeeds at once."""
    before, operation = STAGES[stage]
    failures = 0
    for room in range(400):
        model, folder = Model(), disk / f"{room}.store"
        with open_store(folder, CONFIGS[config]) as store:
            for done in before:
                perform(store, done)
                model.perform(done)
            fill(disk, room)
            failed = finds_the_disk_full(lambda store=store: perform(store, operation))
            if failed:
                failures += 1
                check_old_version(store, folder, model, operation)
            make_room(disk)
            model.perform(operation)
            if failed:
                perform(store, operation)
            for last in (COMMIT, COMPACT):
                perform(store, last)
                model.perform(last)
                assert_holds(store, model.committed)
            assert store.verify() == []
        shutil.rmtree(folder)
        if not failed:
            break
    assert not failed
    assert failures > 0


def check_old_version(store: Any, folder: Path, model: Model, operation: Operation) -> None:
    """While the disk is full, the version before serves on, or the next one if it was already written."""
    later = copied(model)
    later.perform(operation)
    with open_store(folder) as reader:
        for one in (store, reader):
            state = model.committed if holds(one, model.committed) else later.committed
            assert_holds(one, state)
            assert one.verify() == []


@pytest.mark.parametrize("config", CONFIGS)
def test_what_failed_leaves_no_files(disk: Path, config: str) -> None:
    """A full disk does not get fuller: what a compaction or an index did not finish is gone at once."""
    before, operation = STAGES["compact"]
    with open_store(disk / "a.store", CONFIGS[config]) as store:
        for done in before:
            perform(store, done)
        files = sorted(os.listdir(disk / "a.store"))
        failures = 0
        for room in range(400):
            fill(disk, room)
            failed = finds_the_disk_full(lambda: perform(store, operation))
            make_room(disk)
            if not failed:
                break
            failures += 1
            left = set(os.listdir(disk / "a.store")) - set(files)
            if not any(name.startswith("manifest") for name in left):
                assert left == set()
        assert failures > 0


def test_a_store_is_made_on_a_full_disk(disk: Path) -> None:
    fill(disk, 0)
    with pytest.raises(MnemicError, match="the disk is full while writing") as caught:
        open_store(disk / "a.store", CONFIGS["exact"])
    make_room(disk)
    with open_store(disk / "a.store", CONFIGS["exact"]) as store:  # although someone still holds the error
        perform(store, ADDS[0])
        store.commit()
    assert caught.value


@pytest.mark.parametrize("config", CONFIGS)
def test_a_disk_that_cannot_be_written(disk: Path, config: str) -> None:
    model, folder = Model(), disk / "a.store"
    with open_store(folder, CONFIGS[config]) as store:
        for done in STAGES["compact"][0]:
            perform(store, done)
            model.perform(done)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with open_store(folder, CONFIGS[config]) as store:
        assert_holds(store, model.committed)
        assert store.verify() == []  # type: ignore[attr-defined]
        assert store.commit() == store.refresh() == store.summary().version
        for operation in (ADDS[0], DELETE, COMPACT):
            with pytest.raises(MnemicError, match=r"no permission to write .*: choose another folder or change its"):
                perform(store, operation)
        assert_holds(store, model.committed)
        with pytest.raises(MnemicError, match="no permission to write"):
            open_store(disk / "b.store", CONFIGS[config])
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        for operation in (ADDS[0], DELETE, COMPACT):
            perform(store, operation)
            model.perform(operation)
        assert_holds(store, model.committed)


@pytest.mark.parametrize("config", CONFIGS)
def test_the_disk_fills_up_at_any_call(tmp_path: Path, config: str) -> None:
    """Each call of a history that can fail on a full disk fails once, in one sentence, and is done again."""
    draw, failures = random.Random(config), 0
    for number in range(25):
        operations, model = history(number, 14), Model()
        with open_store(tmp_path / f"{number}.store", CONFIGS[config]) as store:
            for operation in operations:
                if finds_the_disk_full(failing(draw.randrange(1, 40), store, operation)):
                    failures += 1
                    before, after = copied(model), copied(model)
                    after.perform(operation)
                    if not holds(store, after.committed):
                        assert_holds(store, before.committed)
                    perform(store, operation)
                model.perform(operation)
                assert_holds(store, model.committed)
            assert store.verify() == []
    assert failures > 50


def failing(call: int, store: Any, operation: Operation) -> Callable[[], None]:
    """Performs an operation whose `call`-th call that writes to a disk finds it full."""

    def attempt() -> None:
        seen = 0

        def watch(_: object, event: str, function: Any) -> None:
            nonlocal seen
            if event == "c_call" and touches_a_file(function) and function.__name__ in WRITING:
                seen += 1
                if seen == call:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        sys.setprofile(watch)
        try:
            perform(store, operation)
        finally:
            sys.setprofile(None)

    return attempt
