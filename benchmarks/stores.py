"""The disk store against bare FAISS with the same index: search, building, opening, size, and recall on real keys.

The keys are those of a small decoder trained on the Python standard library; queries come from files that are not in
the store. Each part runs in a process of its own; within it, the store and FAISS take turns and minima are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import RESULTS, machine, run_once

PARTS = ("keys", "recall", "search", "search compressed", "build", "build compressed", "large", "open")
QUERIES, DEPTHS = (1, 16, 256, 4096), (1, 32, 1024)


def main() -> None:
    """Runs all parts, or the one that `--part` names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("bench-stores"), help="for keys and stores, some 8 GB")
    parser.add_argument("--part", choices=PARTS, help="only this part, printed as JSON")
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of the large store")
    parser.add_argument("--steps", type=int, default=600, help="training steps of the model that makes the keys")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each measurement, of which the fastest counts")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.part:
        found = globals()["part_" + options.part.replace(" ", "_")](options)
        print(json.dumps({"seconds": 0, **found}))
        return
    arguments = [f"--folder={options.folder}", f"--rows={options.rows}", f"--steps={options.steps}"]
    results: dict[str, Any] = {}
    for part in PARTS:
        command = [sys.executable, __file__, f"--part={part}", f"--repeats={options.repeats}", *arguments]
        results[part] = run_once(command)
        print(part, json.dumps(results[part]), file=sys.stderr, flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "stores.json").write_text(json.dumps({"parts": results, **machine()}, indent=2) + "\n", encoding="utf-8")


def part_keys(options: argparse.Namespace) -> dict[str, Any]:
    """Trains the model and writes the keys of the train split (rows) and of the valid split (queries)."""
    import mnemic

    if (options.folder / "queries.npy").exists():
        return {"kept": True}
    run, keys = options.folder / "run", options.folder / "keys.store"
    model = "decoder:hidden_size=128,num_hidden_layers=4,num_attention_heads=4"
    command = ["train", "stdlib", f"--model={model}", "--vocab-size=4096", f"--steps={options.steps}", f"--out={run}"]
    subprocess.run([sys.executable, "-m", "mnemic", *command, "--learning-rate=0.002", "--batch-size=16"], check=True)
    for path, split in ((str(keys), "train"), (f"{keys}.valid", "valid")):
        command = ["store", "build", path, "stdlib", f"--model={run}", f"--split={split}", "--index=exact"]
        subprocess.run([sys.executable, "-m", "mnemic", *command, "--window=256", "--min-context=128"], check=True)
    for address, name in ((keys, "rows"), (f"{keys}.valid", "queries")):
        with mnemic.open_store(address) as store:
            ids = np.arange(len(store))
            if name == "queries":
                ids = np.sort(np.random.default_rng(0).choice(ids, 4096, replace=False))
            found = np.lib.format.open_memmap(
                options.folder / f"{name}.npy", "w+", np.float16, (len(ids), store.config.dim)
            )
            for start in range(0, len(ids), 1 << 16):
                found[start : start + (1 << 16)] = store.get(ids[start : start + (1 << 16)]).keys
    return {"rows": len(np.load(options.folder / "rows.npy", mmap_mode="r"))}


def rows_of(options: argparse.Namespace) -> tuple[Any, Any]:
    """The keys and the queries, in float32."""
    return tuple(np.load(options.folder / f"{name}.npy").astype(np.float32) for name in ("rows", "queries"))


def built(options: argparse.Namespace, name: str, keys: Any = None, **settings: Any) -> Any:
    """A store of the real keys with these settings, made once."""
    import mnemic
    from mnemic.stores import References, StoreConfig

    path = options.folder / f"{name}.store"
    if path.exists():
        store = mnemic.open_store(path)
        if len(store):
            return store
    keys = rows_of(options)[0] if keys is None else keys
    store = mnemic.open_store(path, StoreConfig(dim=keys.shape[1], **settings))
    for start in range(0, len(keys), 1 << 16):
        some = keys[start : start + (1 << 16)]
        store.add(some, np.arange(len(some)) % 4096, References.of(f"part {start}", range(len(some))))
    store.commit()
    return store


def part_recall(options: argparse.Namespace) -> dict[str, Any]:
    """Recall at 32 at the default dial, of queries that are not in the store, against a look at every row."""
    from mnemic.stores.disk.index import look_at_all

    keys, queries = rows_of(options)
    queries = queries[:1000]
    found = {}
    for name, settings in (("plain", {}), ("compressed", {"index": compressed(len(keys), keys.shape[1])})):
        store = built(options, name, **settings)
        pieces = ((np.arange(s, min(s + 65536, len(keys))), keys[s : s + 65536]) for s in range(0, len(keys), 65536))
        _, scores = look_at_all(store.config, pieces, queries, 32)
        got = store.search(queries, 32)
        recall = float((got.scores >= scores[:, -1:] - 1e-5 * np.abs(scores[:, -1:])).mean())
        summary = store.summary()
        lists, refine = store._snapshot.index.dial(0.95)
        found[name] = {
            "index": summary.index["kind"],
            "rows": len(store),
            "recall_at_32": recall,
            "lists": lists,
            "refine": refine,
            "curve": summary.index["curve"],
        }
        store.close()
    return found


def compressed(rows: int, dim: int) -> str:
    """The index that a store of so many rows would have, had it ten times as many."""
    from mnemic.stores import StoreConfig
    from mnemic.stores.disk.index import choose

    lists = choose(StoreConfig(dim=dim, keys="codes"), rows).partition(",")[0]
    return f"{lists},PQ{dim // 2}x4fs"


def turns(repeats: int, *work: Callable[[], object]) -> list[float]:
    """The least time of each, taken in turns."""
    best = [float("inf")] * len(work)
    for turn in range(repeats):
        order = range(len(work)) if turn % 2 == 0 else reversed(range(len(work)))
        for number in order:
            start = time.perf_counter()
            work[number]()
            best[number] = min(best[number], time.perf_counter() - start)
    return best


def part_search(options: argparse.Namespace) -> dict[str, Any]:
    """Search through the store against FAISS's own search with the same index and lists."""
    import faiss

    store = built(options, "plain")
    queries = rows_of(options)[1]
    index = store._snapshot.index

    made = {k: faiss.SearchParametersIVF(nprobe=index.dial(0.95, k)[0]) for k in DEPTHS}
    return compared(options, store, queries, lambda some, k: index.faiss.search(some, k, params=made[k]))


def part_search_compressed(options: argparse.Namespace) -> dict[str, Any]:
    """The same for 4-bit codes with a second look at true distances, against FAISS's IndexRefine in memory."""
    import faiss

    keys, queries = rows_of(options)
    store = built(options, "compressed", index=compressed(len(keys), keys.shape[1]))
    index = store._snapshot.index
    exact = faiss.IndexScalarQuantizer(keys.shape[1], faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_L2)
    exact.train(keys[:1])
    exact.add(keys)
    both = faiss.IndexRefine(index.faiss, exact)
    del keys

    made = {}
    for k in DEPTHS:
        lists, refine = index.dial(0.95, k)
        made[k] = faiss.IndexRefineSearchParameters(
            k_factor=index.candidates(k, refine) / k, base_index_params=faiss.SearchParametersIVF(nprobe=lists)
        )
    return compared(options, store, queries, lambda some, k: both.search(some, k, params=made[k]))


def compared(
    options: argparse.Namespace, store: Any, queries: Any, raw: Callable[[Any, int], object]
) -> dict[str, Any]:
    """Times of store and FAISS, and their ratio, for each number of queries and results."""
    found = {}
    for count in QUERIES:
        for k in DEPTHS:
            some = queries[:count]
            repeats = options.repeats * (1 if count * k > 100_000 else 20 if count > 1 else 100)
            ours, theirs = turns(
                repeats, lambda some=some, k=k: store.search(some, k), lambda some=some, k=k: raw(some, k)
            )
            found[f"{count} queries, k = {k}"] = {"store": ours, "faiss": theirs, "ratio": ours / theirs}
    return {"searches": found, "largest_ratio": max(one["ratio"] for one in found.values())}


def part_build(options: argparse.Namespace) -> dict[str, Any]:
    """Building against FAISS's train and add, plus the writing of the same bytes."""
    return built_against(options, "plain")


def part_build_compressed(options: argparse.Namespace) -> dict[str, Any]:
    """The same for 4-bit codes."""
    return built_against(options, "compressed")


def built_against(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """One build each, in turns with FAISS alone."""
    import torch  # noqa: F401 (loaded before the clock starts, as it is where keys come from a model)

    from mnemic.stores.disk import index as indexes

    keys = rows_of(options)[0]
    settings = {"index": compressed(*keys.shape)} if name == "compressed" else {}
    store = built(options, name, **settings)
    config, factory = store.config, store.summary().index["kind"]
    files = [path.stat().st_size for path in Path(store.address).iterdir()]
    store.close()

    def ours() -> None:
        shutil.rmtree(options.folder / "again.store", ignore_errors=True)
        built(options, "again", keys, **settings).close()

    def theirs() -> None:
        made = indexes.make(config, factory)
        rng = np.random.default_rng(0)
        rows = np.sort(rng.choice(len(keys), min(indexes.training_rows(made), len(keys)), replace=False))
        indexes.train(made, keys[rows])
        for start in range(0, len(keys), 1 << 16):
            some = keys[start : start + (1 << 16)]
            made.add_with_ids(some, np.arange(start, start + len(some)))

    def writing() -> None:
        piece = os.urandom(1 << 20)
        for number, size in enumerate(files):
            with open(options.folder / f"written-{number}", "wb") as file:
                for _ in range(size >> 20):
                    file.write(piece)
                file.write(piece[: size & ((1 << 20) - 1)])
                file.flush()
                os.fsync(file.fileno())
        for number in range(len(files)):
            (options.folder / f"written-{number}").unlink()

    building, alone, written = turns(4, ours, theirs, writing)
    return {
        "store": building,
        "faiss": alone,
        "writing": written,
        "ratio_without_writing": (building - written) / alone,
        "index": factory,
    }


def part_large(options: argparse.Namespace) -> dict[str, Any]:
    """A large store of codes: real keys over and over, each time moved a little."""
    import mnemic
    from mnemic.stores import References, StoreConfig

    path = options.folder / "large.store"
    keys = np.load(options.folder / "rows.npy", mmap_mode="r")
    if not path.exists():
        store = mnemic.open_store(path, StoreConfig(dim=keys.shape[1], keys="codes"))
        rng, done = np.random.default_rng(0), 0
        while done < options.rows:
            start = done % (len(keys) - (1 << 18))
            some = keys[start : start + min(1 << 18, options.rows - done)].astype(np.float32)
            some += 0.05 * some.std() * rng.standard_normal(some.shape, np.float32)
            store.add(some, np.arange(len(some)) % 50_000, References.of(f"part {done}", range(len(some))))
            done += len(some)
        store.commit()
        store.compact()
        store.close()
    size = sum(file.stat().st_size for file in path.iterdir())
    return {"rows": options.rows, "dim": keys.shape[1], "bytes": size, "bytes_per_row": size / options.rows}


def part_open(options: argparse.Namespace) -> dict[str, Any]:
    """Opening the large store, its first search, and how much memory that takes beyond the index's codes."""
    import mnemic

    queries = np.load(options.folder / "queries.npy").astype(np.float32)
    mnemic.open_store("ram:", mnemic.StoreConfig(dim=4)).close()  # modules are loaded
    import faiss  # noqa: F401

    before = resident()
    start = time.perf_counter()
    store = mnemic.open_store(options.folder / "large.store")
    opened = time.perf_counter() - start
    start = time.perf_counter()
    store.search(queries[:1], 32)
    first = time.perf_counter() - start
    for some in np.array_split(queries, 8):
        store.search(some, 32)
    grown, index = resident() - before, store.summary().index
    codes = store._snapshot.manifest.index.bytes
    return {
        "rows": len(store),
        "open": opened,
        "first_search": first,
        "grown_mb": grown / 2**20,
        "index_mb": codes / 2**20,
        "beyond_index_mb": (grown - codes) / 2**20,
        "index": index["kind"],
    }


def resident() -> int:
    """Bytes of memory in use by this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
