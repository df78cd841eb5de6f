"""Looks over the shoulder of code that is given something hostile: which files it touches, and what it costs."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LONGEST = 30  # seconds, after which we call it a hang
LARGEST = 2 << 30  # bytes more than before, which we call too much

_TOUCHING = ("open", "os.", "shutil.", "subprocess.", "socket.", "glob.", "tempfile.")
_HARMLESS = ("os.putenv", "os.unsetenv", "socket.gethostname", "os.fork")
_touched: list[str] | None = None
_watching = False


class Hung(BaseException):
    """It does not end; not an Exception, so that nobody takes it for an error of the system."""


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _touched is not None and event.startswith(_TOUCHING) and not event.startswith(_HARMLESS):
        _touched.extend(
            f"{event} {os.fsdecode(one)}" for one in arguments if isinstance(one, str | bytes | os.PathLike)
        )


@contextlib.contextmanager
def confined(folder: Path) -> Iterator[None]:
    """Asserts that the block touches no file outside of a folder, takes no huge memory, and ends."""
    global _touched, _watching
    if not _watching:  # a hook stays for good, and sleeps
        sys.addaudithook(_audit)
        _watching = True
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, _hung)
    resource.setrlimit(resource.RLIMIT_AS, (used + LARGEST, before[1]))
    signal.alarm(LONGEST)
    _touched = []
    try:
        yield
    finally:
        touched, _touched = _touched, None
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGALRM, handler)
    outside = [one for one in touched if not _inside(one.partition(" ")[2], folder)]
    assert outside == []


def _hung(*_: object) -> None:
    raise Hung


def _inside(path: str, folder: Path) -> bool:
    """Whether a path is the folder's, or Python's own (a module that is imported late, a mode of `open`)."""
    own = (str(folder), "/proc/self/", sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]))
    return path.startswith(own) or "/" not in path
