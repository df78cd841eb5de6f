"""Files: writes that survive a kill, locks between processes, paths that cannot leave their root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from mnemic import files
from mnemic.errors import MnemicError, UsageError


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A process of its own that runs `code` and says "ready" when it has begun."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


WRITE_FOR_EVER = """
import sys
from mnemic.files import new_folder, write_bytes
path, kind, number = sys.argv[1], sys.argv[2], 0
print("ready", flush=True)
while True:
    content = bytes([number % 256]) * 200_000
    if kind == "file":
        write_bytes(path, content)
    else:
        with new_folder(path) as folder:
            for name in "abc":
                (folder / name).write_bytes(content)
    number += 1
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_kill_at_any_moment_leaves_the_old_or_the_new(tmp_path, kind: str) -> None:
    path, generator = tmp_path / "target", np.random.default_rng(0)
    for _ in range(12):
        process = start(WRITE_FOR_EVER, path, kind)
        while not path.exists():
            time.sleep(0.001)
        time.sleep(generator.uniform(0, 0.03))
        kill(process)
        parts = [path] if kind == "file" else sorted(path.iterdir())
        assert len(parts) == (1 if kind == "file" else 3)
        content = b"".join(part.read_bytes() for part in parts)
        assert len(content) == 200_000 * len(parts)
        assert len(set(content)) == 1, "a mixture of two writes"
    files.remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


HOLD_NEW_FOLDER = """
import sys, time
from mnemic.files import new_folder
with new_folder(sys.argv[1]) as folder:
    (folder / "a").write_text("half")
    print("ready", flush=True)
    time.sleep(600)
"""


def test_cleaning_up_spares_what_a_living_process_is_writing(tmp_path) -> None:
    process = start(HOLD_NEW_FOLDER, tmp_path / "other")
    try:
        with files.new_folder(tmp_path / "mine") as folder:
            (folder / "b").write_text("whole")
        (unfinished,) = tmp_path.glob(files.TEMPORARY + "*")
        assert (unfinished / "a").read_text() == "half"
    finally:
        kill(process)
    files.remove_unfinished(tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == ["mine"]


def test_new_folder_replaces_whole_and_an_error_keeps_the_old(tmp_path) -> None:
    target = tmp_path / "target"
    for content in ("first", "second"):
        with files.new_folder(target) as folder:
            (folder / content).write_text(content)

    def fail_half_way() -> None:
        with files.new_folder(target) as folder:
            (folder / "third").write_text("third")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert [(item.name, item.read_text()) for item in target.iterdir()] == [("second", "second")]
    assert list(tmp_path.iterdir()) == [target]


def test_new_folder_without_an_atomic_exchange_still_replaces(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(files.ctypes, "CDLL", lambda *_, **__: object())
    test_new_folder_replaces_whole_and_an_error_keeps_the_old(tmp_path)


def test_new_folder_through_a_link_writes_where_it_leads(tmp_path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with files.new_folder(tmp_path / "link") as folder:
        (folder / "a").write_text("x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "a").read_text() == "x"


def test_additions_keep_what_is_there_and_move_the_witness_last(tmp_path, monkeypatch) -> None:
    for name in ("a", "kept"):
        (tmp_path / name).write_text("old")
    moved, real = [], os.replace
    monkeypatch.setattr(files.os, "replace", lambda source, target: (moved.append(target.name), real(source, target)))
    with files.additions(tmp_path, last="a") as folder:
        for name in ("a", "z", "b"):
            (folder / name).write_text("new")
    assert moved == ["b", "z", "a"]
    content = {item.name: item.read_text() for item in tmp_path.iterdir()}
    assert content == {"a": "new", "b": "new", "z": "new", "kept": "old"}


def test_additions_that_fail_change_nothing(tmp_path) -> None:
    (tmp_path / "a").write_text("old")

    def fail_half_way() -> None:
        with files.additions(tmp_path, last="a") as folder:
            (folder / "a").write_text("new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert {item.name: item.read_text() for item in tmp_path.iterdir()} == {"a": "old"}


def test_write_is_readable_by_others_and_leaves_nothing_beside(tmp_path) -> None:
    files.write_text(tmp_path / "new/folder/a.txt", "é")
    assert (tmp_path / "new/folder/a.txt").read_bytes() == "é".encode()
    assert (tmp_path / "new/folder/a.txt").stat().st_mode & 0o777 == 0o644
    assert os.listdir(tmp_path / "new/folder") == ["a.txt"]


@pytest.mark.parametrize("target", ["file/below.txt", "file/deep/below.txt"])
def test_a_path_below_a_file_is_one_sentence(tmp_path, target: str) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UsageError, match="a part of that path is a file, not a folder"):
        files.write_text(tmp_path / target, "x")
    with (
        pytest.raises(UsageError, match="a part of that path is a file, not a folder"),
        files.new_folder(tmp_path / target),
    ):
        pass
    assert (tmp_path / "file").read_text() == "kept"


def test_a_file_over_a_folder_and_a_folder_over_a_file_are_refused(tmp_path) -> None:
    (tmp_path / "folder/inside").mkdir(parents=True)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UsageError, match="a folder of that name is there"):
        files.write_text(tmp_path / "folder", "x")
    with pytest.raises(UsageError, match="it is a file"), files.new_folder(tmp_path / "file"):
        pass
    assert (tmp_path / "file").read_text() == "kept"
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_a_full_disk_is_one_sentence_and_keeps_the_old(small_disk: Path) -> None:
    from safetensors.numpy import save_file

    files.write_text(small_disk / "a", "old")
    with pytest.raises(MnemicError, match="the disk is full while writing"):
        files.write_bytes(small_disk / "a", bytes(10_000_000))
    with (
        pytest.raises(MnemicError, match="the disk is full while writing"),
        files.new_folder(small_disk / "b") as folder,
    ):
        save_file({"x": np.zeros(10_000_000, np.uint8)}, folder / "model.safetensors")
    assert (small_disk / "a").read_text() == "old"
    assert os.listdir(small_disk) == ["a"]


def test_a_read_only_disk_is_one_sentence(read_only_disk: Path) -> None:
    with pytest.raises(MnemicError, match="no permission to write"):
        files.write_text(read_only_disk / "a", "x")


HOLD_LOCK = """
import sys, time
from mnemic.files import lock
with lock(sys.argv[1], "the store"):
    print("ready", flush=True)
    time.sleep(600)
"""


def test_lock_between_processes(tmp_path) -> None:
    process = start(HOLD_LOCK, tmp_path / "deep/lock")
    try:
        with (
            pytest.raises(MnemicError, match="the store is in use by process"),
            files.lock(tmp_path / "deep/lock", "the store"),
        ):
            pass
    finally:
        kill(process)
    with files.lock(tmp_path / "deep/lock", "the store"):  # the kernel frees the lock of the dead
        pass


def test_a_lock_can_be_waited_for(tmp_path) -> None:
    process = start(HOLD_LOCK, tmp_path / "lock")
    taken = threading.Event()

    def take() -> None:
        with files.lock(tmp_path / "lock", "it", wait=True):
            taken.set()

    thread = threading.Thread(target=take)
    thread.start()
    try:
        assert not taken.wait(0.2)
    finally:
        kill(process)
        thread.join()
    assert taken.is_set()


def test_lock_is_free_again_after_an_error(tmp_path) -> None:
    with pytest.raises(ZeroDivisionError), files.lock(tmp_path / "lock", "it"):
        raise ZeroDivisionError
    with files.lock(tmp_path / "lock", "it"), pytest.raises(MnemicError), files.lock(tmp_path / "lock", "it"):
        pass


@given(data=st.binary(max_size=100), flip=st.integers(0, 10**9))
def test_checksum_is_the_whole_files_and_sees_a_flipped_bit(tmp_path_factory, data: bytes, flip: int) -> None:
    path = tmp_path_factory.mktemp("checksum") / "a"
    path.write_bytes(data)
    before = files.checksum(path)
    assert before == xxhash.xxh3_128_hexdigest(data)
    if data:
        changed = bytearray(data)
        changed[flip % len(data)] ^= 1 << flip % 8
        path.write_bytes(changed)
        assert files.checksum(path) != before


def test_checksum_of_a_file_larger_than_one_piece(tmp_path) -> None:
    data = np.random.default_rng(0).bytes((1 << 20) * 2 + 17)
    (tmp_path / "a").write_bytes(data)
    assert files.checksum(tmp_path / "a") == xxhash.xxh3_128_hexdigest(data)


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../outside",
        "a/../../outside",
        "/etc/passwd",
        "//etc/passwd",
        "link/secret",
        "link/../x",
        "chain/secret",
        "null\x00byte",
        "loop/a",
        "../root-sibling/a",
        "./../root/../x",
    ],
)
def test_safe_join_refuses_what_leaves_the_root(tmp_path, name: str) -> None:
    root = tmp_path / "root"
    for folder in (root / "a", tmp_path / "secret-place/deep", tmp_path / "root-sibling"):
        folder.mkdir(parents=True)
    (root / "link").symlink_to(tmp_path / "secret-place/deep")
    (root / "chain").symlink_to("link")
    (root / "loop").symlink_to("loop")
    with pytest.raises(UsageError):
        files.safe_join(root, name)


@pytest.mark.parametrize("name", ["a", "a/b.txt", "a/../b", "...", "~", "a b", "é😀", "-rf", "%2e%2e", "..a"])
def test_safe_join_gives_what_stays_inside(tmp_path, name: str) -> None:
    assert files.safe_join(tmp_path, name) == Path(os.path.normpath(tmp_path / name))


@given(st.lists(st.sampled_from(["..", ".", "a", "b", "", "/"]), max_size=6).map("/".join))
def test_safe_join_agrees_with_the_lexical_rule(tmp_path_factory, name: str) -> None:
    """Without links the answer can be found by text alone: the normal form must begin with the root."""
    root = tmp_path_factory.getbasetemp().resolve() / "safe-join-root"
    normal = Path(os.path.normpath(os.path.join(root, name)))
    if normal.is_relative_to(root):
        assert files.safe_join(root, name) == normal
    else:
        with pytest.raises(UsageError, match="points outside"):
            files.safe_join(root, name)


def test_a_folder_that_cannot_be_made_is_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"/proc/x/a cannot be written \(No such file or directory\)"):
        files.write_text("/proc/x/a", "text")
