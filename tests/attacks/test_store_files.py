"""Files of a store cut short, exchanged, missing, or replaced by something that is no file."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mnemic.errors import DamagedError, MnemicError, UsageError
from mnemic.stores import StoreConfig, open_store

from .stores import CONFIGS, QUERIES, Victim, rows
from .watch import confined


@pytest.fixture(params=CONFIGS)
def victim(request: pytest.FixtureRequest, tmp_path: Path) -> Victim:
    return Victim(tmp_path / "a.store", request.param)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A file that is none of the store's business."""
    (tmp_path / "outside").write_text("precious")
    return tmp_path / "outside"


def assert_reported_or_harmless(victim: Victim, attacked: set[str]) -> bool:
    """Asserts that each answer is right, or an error that names a file that was attacked; whether there was one."""
    with confined(victim.folder):
        answers = victim.ask()
    errors = {question: answer for question, answer in answers.items() if isinstance(answer, Exception)}
    for question, answer in answers.items():
        if question in errors:
            assert isinstance(answer, DamagedError), attacked
            assert any(name in str(answer) for name in attacked), f"{attacked}: {answer}"
        elif question not in ("opening", "verify"):
            assert answer == victim.answers[question], f"{attacked} changed the answer to {question}"
    return bool(errors)


CUTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "one byte short": lambda data: data[:-1],
    "half": lambda data: data[: len(data) // 2],
    "one byte more": lambda data: data + b"\x00",
    "twice": lambda data: data + data,
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("cut", CUTS)
def test_cut_short_or_too_long(victim: Victim, cut: str) -> None:
    for name in sorted(victim.needed):
        (victim.folder / name).write_bytes(CUTS[cut](victim.files[name]))
        assert assert_reported_or_harmless(victim, {name}), f"nobody missed the end of {name}"
        victim.restore([name])
    assert victim.ask() == victim.answers


def test_exchanged(victim: Victim) -> None:
    """Any two files of the store."""
    for first, second in itertools.combinations(sorted(victim.files), 2):
        if victim.files[first] == victim.files[second]:
            continue
        (victim.folder / first).write_bytes(victim.files[second])
        (victim.folder / second).write_bytes(victim.files[first])
        damaged = assert_reported_or_harmless(victim, {first, second})
        assert damaged == bool({first, second} & victim.needed)
        victim.restore([first, second])
    assert victim.ask() == victim.answers


def test_files_of_another_store(victim: Victim, tmp_path: Path) -> None:
    """Of one that was made in the same way from other rows: one by one, all of rows, and the index."""
    other = Victim(tmp_path / "b.store", victim.kind, seed=1)
    groups = [[name] for name in sorted(victim.needed & other.needed)]
    groups += [
        [name for name in sorted(victim.needed & other.needed) if name.startswith(start)] for start in ("rows-", "i")
    ]
    assert len(groups) > 6
    for group in groups:
        if all(victim.files[name] == other.files[name] for name in group):
            continue
        for name in group:
            (victim.folder / name).write_bytes(other.files[name])
        manifest = {name for name in group if name.startswith("manifest")}
        # A manifest of the other store finds none of its own files here, so that it is they which are named.
        assert assert_reported_or_harmless(victim, victim.needed if manifest else set(group))
        victim.restore(group)
    assert victim.ask() == victim.answers


def test_missing(victim: Victim) -> None:
    for name in sorted(victim.needed):
        (victim.folder / name).unlink()
        if name.startswith("manifest"):
            with open_store(victim.folder) as store:
                assert store.summary().version == victim.version - 1, "without its manifest a version never was"
        elif name.startswith("index") and victim.kind == "kept":
            with open_store(victim.folder) as store:
                with pytest.raises(DamagedError, match=f"{name} is missing: copy it back.*--rebuild"):
                    store.search(QUERIES, 3)
                assert [found for found in store.verify() if name in found]
                store.get(victim.ids)
        else:
            with pytest.raises(DamagedError, match=f"{name} is missing: copy it back"):
                open_store(victim.folder)
        victim.restore([name])
    for name in victim.files:
        if name not in victim.needed:
            (victim.folder / name).unlink()
    assert victim.ask() == victim.answers
    (victim.folder / f"manifest-{victim.version:08d}.json").unlink()
    with pytest.raises(UsageError, match="no store at"):
        open_store(victim.folder)
    with pytest.raises(UsageError, match="files that are no store's"):
        open_store(victim.folder, StoreConfig(dim=8))


NO_FILES: dict[str, Callable[[Path, Path], Any]] = {
    "a link outside": lambda path, outside: path.symlink_to(outside),
    "a link to its own copy": lambda path, outside: path.symlink_to(outside),
    "a link to nowhere": lambda path, outside: path.symlink_to("nowhere"),
    "a link to itself": lambda path, outside: path.symlink_to(path),
    "a folder": lambda path, outside: path.mkdir(),
    "a pipe": lambda path, outside: os.mkfifo(path),
    "a device": lambda path, outside: os.mknod(path, 0o20666, os.makedev(1, 5)),  # /dev/zero, which never ends
}


def replace(path: Path, what: str, outside: Path) -> None:
    try:
        NO_FILES[what](path, outside)
    except PermissionError as error:
        pytest.skip(f"{what} cannot be made here: {error}")


@pytest.mark.parametrize("what", NO_FILES)
def test_replaced_by_no_file(victim: Victim, outside: Path, what: str) -> None:
    for name in sorted(victim.needed):
        (victim.folder / name).unlink()
        if "copy" in what:
            outside.write_bytes(victim.files[name])
        replace(victim.folder / name, what, outside)
        assert assert_reported_or_harmless(victim, {name}), f"{name} was taken"
        victim.restore([name])
    assert victim.ask() == victim.answers


@pytest.mark.parametrize("what", NO_FILES)
@pytest.mark.parametrize(
    "name", ["lock", ".mnemic-tmp-abc", "rows-00000099.values", "index-00000099.faiss", "rows-00000001.strange"]
)
def test_a_writer_meets_no_file(victim: Victim, outside: Path, what: str, name: str) -> None:
    """What is not the store's own is refused or removed, and what it leads to stays as it is."""
    if name in victim.files:
        (victim.folder / name).unlink()
    replace(victim.folder / name, what, outside)
    before = outside.read_text()
    with confined(victim.folder):
        try:
            with open_store(victim.folder) as store:
                store.add(*rows(np.random.default_rng(0), 30, range(3)))
                store.commit()
                store.compact()
        except MnemicError as error:
            refused = str(error)
        else:
            refused = ""
    assert not refused or (name in refused and len(refused) < 1000)
    assert outside.read_text() == before
    if not refused:
        with open_store(victim.folder) as store:
            assert len(store) == victim.answers["length"] + 30
            assert store.verify() == []  # type: ignore[attr-defined]


def test_a_folder_as_long_as_the_file_it_replaces(tmp_path: Path) -> None:
    """4096 bytes is what most file systems say of an empty folder."""
    folder = tmp_path / "a.store"
    with open_store(folder, StoreConfig(dim=8)) as store:
        store.add(*rows(np.random.default_rng(0), 1024, range(3)))
        store.commit()
    (folder / "rows-00000001.values").unlink()
    (folder / "rows-00000001.values").mkdir()
    with pytest.raises(DamagedError, match=r"rows-00000001\.values"):
        open_store(folder)


def test_the_store_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("file", "pipe", "loop", "file/below"):
        for config in (None, StoreConfig(dim=8)):
            with confined(tmp_path), pytest.raises(MnemicError):
                open_store(tmp_path / name, config)
    assert (tmp_path / "file").read_text() == "kept"
