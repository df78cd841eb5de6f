"""The terminal during a long job: a progress bar on stderr, single lines beside it, and ctrl-C between steps."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm


def progress_bar(total: int | None, what: str, initial: int = 0, shown: bool = True) -> tqdm:
    """A bar with speed and time left on stderr, where stderr is a terminal."""
    disable = None if shown else True
    return tqdm(total=total, initial=initial, unit=what, file=sys.stderr, disable=disable, dynamic_ncols=True)


def say(line: str) -> None:
    """A line on stderr that leaves a progress bar whole."""
    tqdm.write(line, file=sys.stderr)


@contextlib.contextmanager
def no_other_bars() -> Iterator[None]:
    """Keeps transformers from drawing progress bars of its own into ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def interrupts(shown: bool = True) -> Iterator[threading.Event]:
    """Yields an event that the first ctrl-C sets, so that a step can end in peace; the second one raises as ever."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield pressed
        return
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        pressed.set()
        if shown:
            say("stopping after this step (ctrl-C again to stop at once)")

    signal.signal(signal.SIGINT, handle)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
