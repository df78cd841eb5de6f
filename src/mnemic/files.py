"""Atomic writes, locks, checksums and safe paths: the only code of the library that renames files.

The protocol, everywhere: write to a temporary name in the same folder, fsync the file, rename it over the
target, fsync the folder. Whoever is killed leaves either the old content or the new, never a mixture.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import socket
import stat
import tempfile
import time
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
    except Exception as error:
        number = _errno(error)
        if number in (errno.ENOSPC, errno.EDQUOT):
            raise MnemicError(f"the disk is full while writing {path}: free some space and run again") from error
        if number in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise MnemicError(f"no permission to write {path}: choose another folder or change its rights") from error
        if number in (errno.ENOTDIR, errno.EEXIST):
            raise UsageError(f"{path} cannot be written: a part of that path is a file, not a folder") from error
        if number == errno.EISDIR:
            raise UsageError(f"{path} cannot be written: a folder of that name is there, not a file") from error
        if isinstance(error, OSError) and error.filename in map(str, (path, *path.parents)):
            raise UsageError(f"{path} cannot be written ({error.strerror}): choose another folder") from error
        raise


def _errno(error: Exception) -> int | None:
    """The system's number of an error; libraries written in Rust (safetensors) give it only in their text."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


def fsync(path: Path) -> None:
    """Makes a file's or folder's content durable."""
    with clear_os_errors(path):
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
                fcntl.flock(file, fcntl.LOCK_EX)  # says that its writer is alive: see remove_unfinished
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


def made_folder(path: str | Path) -> Path:
    """The folder at `path`, made if it is not there."""
    path = Path(path)
    with clear_os_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yields a temporary folder that becomes `path`, whole, when the block ends without an error.

    A folder already at `path` is replaced; what a killed process left unfinished beside it is removed.
    """
    path = Path(path).resolve() if Path(path).is_symlink() else Path(path)
    with clear_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(path.parent)
        with _temporary_folder(path.parent) as temporary:
            yield temporary
            if path.exists() and not path.is_dir():
                raise UsageError(f"{path} cannot be written: it is a file, and a folder is to be put there")
            for item in sorted(temporary.rglob("*")):
                fsync(item)
            os.chmod(temporary, 0o755)
            fsync(temporary)
            if path.exists():
                _exchange(temporary, path)
            else:
                os.replace(temporary, path)
        fsync(path.parent)


@contextlib.contextmanager
def _temporary_folder(parent: Path) -> Iterator[Path]:
    """A folder that is removed at the end, if it still has its name; locked, so that `remove_unfinished` spares it."""
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=parent))
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield temporary
    finally:
        os.close(descriptor)
        shutil.rmtree(temporary, ignore_errors=True)


def _exchange(first: Path, second: Path) -> None:
    """Swaps two folders in one step, so that at no moment one of the names is missing."""
    at_working_folder, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux's renameat2
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        if libc.renameat2(at_working_folder, os.fsencode(first), at_working_folder, os.fsencode(second), exchange) == 0:
            return
        if (number := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(number, os.strerror(number), str(second))
    # A system or file system without it: two steps, and a kill just between them leaves the old folder beside.
    aside = Path(tempfile.mkdtemp(prefix=second.name + ".old-", dir=second.parent))
    os.replace(second, aside)
    os.replace(first, second)
    os.replace(aside, first)


@contextlib.contextmanager
def additions(path: str | Path, last: str) -> Iterator[Path]:
    """Yields a temporary folder whose files are moved into `path` when the block ends without an error.

    What else is in `path` stays. The file named `last` is moved after all others: it vouches for them.
    """
    path = Path(path)
    with clear_os_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        remove_unfinished(path)
        with _temporary_folder(path) as temporary:
            yield temporary
            for item in sorted(temporary.iterdir(), key=lambda item: item.name == last):
                fsync(item)
                os.replace(item, path / item.name)
        fsync(path)


def remove_unfinished(folder: Path) -> None:
    """Removes temporary files and folders that a killed process left in `folder`; those in use are locked and stay."""
    for item in folder.glob(TEMPORARY + "*"):
        if not item.is_dir() and not stat.S_ISREG(item.stat(follow_symlinks=False).st_mode):
            item.unlink(missing_ok=True)
            continue
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            descriptor = os.open(item, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if item.is_dir():
                    shutil.rmtree(item, ignore_errors=True)
                else:
                    item.unlink(missing_ok=True)
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def lock(path: str | Path, what: str, wait: bool = False) -> Iterator[None]:
    """Holds an exclusive `flock` on `path`; `what` names the thing in the error that says who else has it.

    With `wait` there is no error: it goes on when the other one has let go.
    """
    path = Path(path)
    with clear_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _open_lock(path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(descriptor, 200, 0).decode(errors="replace")
            holder = "".join(letter for letter in text if letter.isprintable()) or "another process"
            raise MnemicError(f"{what} is in use by {holder}: wait for it or stop it") from None
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        with contextlib.suppress(OSError):  # on a full disk the lock still holds
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {since}".encode(), 0)
        try:
            yield
        finally:
            try:  # noqa: SIM105 (when Python ends, contextlib may have gone)
                os.ftruncate(descriptor, 0)
            except OSError:
                pass
    finally:
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    """A descriptor of a lock file, made if it is not there; what is no ordinary file could lead anywhere or block."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no ordinary file", str(path))
    return descriptor


@contextlib.contextmanager
def os_errors_of_safetensors() -> Iterator[None]:
    """Turns safetensors' own error for a failed write into the OSError it stands for, such as a full disk."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        if number := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(number[1]), str(error)) from error
        raise


def checksum(path: str | Path) -> str:
    """The xxh3-128 checksum of a file, read in pieces; it finds damage, it is no protection against forgery."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def safe_join(root: str | Path, name: str) -> Path:
    """`root/name`, refused if it would leave `root` (absolute names, "..", links that lead outside)."""
    root = Path(root).resolve()
    try:
        path = (root / name).resolve()
    except (ValueError, RuntimeError, OSError):  # a null character, a loop of links
        raise UsageError(f"{name!r} is not a usable file name") from None
    if not path.is_relative_to(root):
        raise UsageError(f"{name!r} points outside of {root}")
    return path
