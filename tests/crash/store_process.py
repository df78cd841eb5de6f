"""Forks processes that write to a store, each to be killed: imports FAISS once, then obeys JSON on stdin.

{"folder", "config", "seed", "die_at", "after", "kill_after"}: a child performs the history of that seed, or of several,
on the store. It kills itself with SIGKILL just before (or `after`) its `die_at`-th call that touches a file, or is
killed after `kill_after` seconds, if these are given. The answer is a line with the child's exit status, the version
that each operation left, for those that were acknowledged before the end, and the error that stopped it.

Here too: what a history is, and what a store must hold after it (`Model`), for those who look at the survivors.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import mnemic.stores.disk.indexing
import mnemic.stores.disk.store
from mnemic.stores import References, Source, Store, StoreConfig, Where, open_store

DIM = 8
CONFIGS = {
    "exact": StoreConfig(dim=DIM, metric="ip"),
    "inverted": StoreConfig(dim=DIM, keys="float32", index="IVF4,Flat"),
    "codes": StoreConfig(dim=DIM, keys="codes", index="IVF4,PQ4x4fs"),
}
NAMESPACES = ("red", "blue", "green")
EARLY = (  # segments merge, and rows enter an index, at sizes that a history reaches within a few operations
    (mnemic.stores.disk.store, "SMALL", 128),
    (mnemic.stores.disk.store, "MERGED", 512),
    (mnemic.stores.disk.indexing, "UNCOVERED_BYTES", 32 * DIM * 4),
)
FILE_CALLS = {"open", "write", "flush", "fsync", "replace", "unlink", "mkdir", "truncate", "chmod", "listdir", "flock"}


class Row(NamedTuple):
    """A row as it was given to the store."""

    key: NDArray[np.float32]
    value: int
    source: Source
    position: int


Operation = tuple[str, Any]
State = dict[int, Row]


def history(seed: int, length: int = 12) -> list[Operation]:
    """Operations on a store, the same ones for the same seed."""
    rng = np.random.default_rng(seed)
    names, odds = ("add", "delete", "commit", "rows", "compact"), (0.42, 0.12, 0.28, 0.08, 0.10)
    return [(name, _argument(name, rng)) for name in rng.choice(names, length, p=odds).tolist()]


def _argument(name: str, rng: np.random.Generator) -> Any:
    if name == "add":
        sources = [
            Source(f"document {rng.integers(4)}", str(rng.choice(NAMESPACES))) for _ in range(rng.integers(1, 4))
        ]
        count = int(rng.integers(1, 90))
        which = np.sort(rng.integers(0, len(sources), count))
        keys = rng.standard_normal((count, DIM)).astype(np.float16).astype(np.float32)
        return keys, rng.integers(0, 60_000, count), References(sources, which, rng.integers(0, 10_000, count))
    if name == "delete":
        namespace = str(rng.choice(NAMESPACES))
        return Where.of(namespace) if rng.random() < 0.2 else Where.document(f"document {rng.integers(4)}", namespace)
    return None


def perform(store: Store, operation: Operation) -> None:
    """Does to a store what an operation says."""
    name, argument = operation
    steps: dict[str, Callable[[], object]] = {
        "add": lambda: store.add(*argument),
        "delete": lambda: store.delete(argument),
        "commit": lambda: store.commit(),
        "rows": lambda: store.commit(index=False),
        "compact": lambda: store.compact(),
    }
    steps[name]()


@dataclass
class Model:
    """What a store holds: the rows committed, and those that the next commit will leave."""

    committed: State = field(default_factory=dict)
    next_id: int = 0
    coming: State = field(default_factory=dict)
    coming_id: int = 0

    def perform(self, operation: Operation) -> None:
        """Does the same to the model."""
        name, argument = operation
        if name == "add":
            keys, values, references = argument
            for row in range(len(keys)):
                source, position = references[row]
                self.coming[self.coming_id + row] = Row(keys[row], int(values[row]), source, position)
            self.coming_id += len(keys)
        elif name == "delete":
            self.coming = {number: row for number, row in self.coming.items() if row.source not in argument}
        else:
            self.committed, self.next_id = dict(self.coming), self.coming_id

    def drop_pending(self) -> None:
        """What is left when the writer is gone."""
        self.coming, self.coming_id = dict(self.committed), self.next_id


def touches_a_file(function: Any) -> bool:
    """Whether a built-in function that is called works on a file; a text has a `replace` too."""
    return function.__name__ in FILE_CALLS and not isinstance(function.__self__, str)


def die_at(call: int, after: bool) -> None:
    """From now on, kills this process at its `call`-th call that touches a file."""
    seen, moment = 0, "c_return" if after else "c_call"

    def watch(_: object, event: str, function: Any) -> None:
        nonlocal seen
        if event == moment and touches_a_file(function):
            seen += 1
            if seen == call:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(watch)


def write(order: dict[str, Any], acknowledge: int) -> None:
    """The child: performs a history, and says of each operation that it is done."""
    if order.get("die_at"):
        die_at(order["die_at"], order["after"])
    store: Any = open_store(order["folder"], CONFIGS[order["config"]])
    for seed in order["seed"] if isinstance(order["seed"], list) else [order["seed"]]:
        for operation in history(seed):
            perform(store, operation)
            os.write(acknowledge, b"%d\n" % store.version)
    store.close()


def obey(order: dict[str, Any]) -> dict[str, Any]:
    """Forks a child for an order and waits for its end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(2, 1)
            write(order, writing)
            os._exit(0)
        except BaseException as error:
            os.write(writing, f"! {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(1)
    os.close(writing)
    if order.get("kill_after") is not None:
        time.sleep(order["kill_after"])
        os.kill(child, signal.SIGKILL)  # before it is waited for, so that its number is nobody else's
    with open(reading) as acknowledged:
        lines = [line for line in acknowledged if line.endswith("\n")]
    return {
        "status": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]),
        "versions": [int(line) for line in lines if not line.startswith("!")],
        "error": "".join(line for line in lines if line.startswith("!")),
    }


def main() -> None:
    for module, name, value in EARLY:
        setattr(module, name, value)
    for line in sys.stdin:
        print(json.dumps(obey(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
