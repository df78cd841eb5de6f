"""Work done in forked processes that are killed: both sides of it, the process that forks and the test that orders.

An order is a line of JSON, {"kind", "out", "die_at", "kill_after"}. A child does the work of that kind at `out`, going
on with what is there. It kills itself with SIGKILL at its `die_at`-th operation on the file system, or is killed after
`kill_after` seconds, if these are given. The answer is a line with the child's exit status.

The kill comes from the child's parent, before the child is waited for: until then its process id cannot pass to another
process, so that a child that has ended already is not mistaken for someone else's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

FILE_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.scandir", "shutil.rmtree"}

Outcome = TypeVar("Outcome")


def die_at(operation: int) -> None:
    seen = 0

    def hook(event: str, _: object) -> None:
        nonlocal seen
        if event in FILE_EVENTS:
            seen += 1
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def obey(work: Callable[[str, str], None]) -> None:
    """Forks a child for each order on stdin, to do `work(kind, out)`."""
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                os.dup2(2, 1)
                if order["die_at"]:
                    die_at(order["die_at"])
                work(order["kind"], order["out"])
                os._exit(0)
            finally:
                os._exit(1)
        if order["kill_after"] is not None:
            time.sleep(order["kill_after"])
            os.kill(child, signal.SIGKILL)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


class Forks(Generic[Outcome]):
    """The process of a module that obeys, and the outcome of work that was never stopped, for each kind."""

    def __init__(self, module: str, folder: Path, outcome: Callable[[Path], Outcome]) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"tests.crash.{module}"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"},
        )
        self._outcome = outcome
        self._outcomes: dict[str, Outcome] = {}

    def work(self, kind: str, out: Path, die_at: int = 0, kill_after: float | None = None) -> int:
        """Works in a child, which dies at a file operation or is killed after a time; its exit status."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        order = {"kind": kind, "out": str(out), "die_at": die_at, "kill_after": kill_after}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def never_stopped(self, kind: str) -> Outcome:
        if kind not in self._outcomes:
            out = self.folder / f"never-stopped-{kind}"
            assert self.work(kind, out) == 0
            self._outcomes[kind] = self._outcome(out)
        return self._outcomes[kind]
