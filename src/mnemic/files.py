"""Atomic writes, locks, checksums and safe paths: the only code of the library that renames files.

The protocol, everywhere: write to a temporary name in the same folder, fsync the file, rename it over the
target, fsync the folder. Whoever is killed leaves either the old content or the new, never a mixture.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import xxhash

from mnemic.errors import MnemicError, UsageError

TEMPORARY = ".mnemic-tmp-"


@contextlib.contextmanager
def clear_os_errors(path: Path) -> Iterator[None]:
    """Turns a full disk or a missing permission into one sentence that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise MnemicError(f"the disk is full while writing {path}: free some space and run again") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise MnemicError(f"no permission to write {path}: choose another folder or change its rights") from error
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            raise UsageError(f"{path} cannot be written: a part of that path is a file, not a folder") from error
        raise


def fsync(path: Path) -> None:
    """Makes a file's or folder's content durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: str | Path, data: bytes) -> None:
    """Replaces a file atomically and durably."""
    path = Path(path)
    with clear_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        fsync(path.parent)


def write_text(path: str | Path, text: str) -> None:
    """Replaces a text file atomically and durably."""
    write_bytes(path, text.encode("utf-8"))


@contextlib.contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yields a temporary folder that becomes `path`, whole, when the block ends without an error.

    A folder already at `path` is replaced; what a killed process left unfinished beside it is removed.
    """
    path = Path(path)
    with clear_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(path.parent)
        temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=path.parent))
        try:
            yield temporary
            for item in sorted(temporary.rglob("*")):
                fsync(item)
            os.chmod(temporary, 0o755)
            fsync(temporary)
            if path.exists():
                old = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=path.parent))
                os.replace(path, old)
                os.replace(temporary, path)
                shutil.rmtree(old)
            else:
                os.replace(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        fsync(path.parent)


def remove_unfinished(folder: Path) -> None:
    """Removes temporary files and folders that a killed process left in `folder`."""
    for item in folder.glob(TEMPORARY + "*"):
        if item.is_dir():
            shutil.rmtree(item, ignore_errors=True)
        else:
            item.unlink(missing_ok=True)


@contextlib.contextmanager
def lock(path: str | Path, what: str) -> Iterator[None]:
    """Holds an exclusive `flock` on `path`; `what` names the thing in the error when another process has it."""
    path = Path(path)
    with clear_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MnemicError(f"{what} is in use by another process: wait for it or stop it") from None
        yield


def checksum(path: str | Path) -> str:
    """The xxh3-128 checksum of a file, read in pieces; it finds damage, it is no protection against forgery."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def safe_join(root: str | Path, name: str) -> Path:
    """`root/name`, refused if it would leave `root`."""
    root = Path(root).resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise UsageError(f"{name!r} points outside of {root}")
    return path
