"""Evaluation with a store of a million rows against the plain model: time, and how much of exact search's gain is kept.

A model of the paper's 38M parameters is trained for a short while on the bytes of a text and reads a million of them
into stores; then other bytes are scored without and with each store, in turns. What differs is how it is searched.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import RESULTS, machine

CODES, SMALL_CODES = ({"index": f"IVF1024,PQ{parts}x4fs", "keys": "codes"} for parts in (256, 128))
STORES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # settings of the store; of the memory
    "exact": ({"index": "exact"}, {}),
    "usual": ({}, {}),
    "usual, in a thread": ({}, {"overlap": True}),
    "usual, followed for 1 token": ({}, {"follow": 1}),
    "usual, followed for 3 tokens": ({}, {"follow": 3}),
    "usual, for half of the tokens": ({}, {"retrieve": 0.5}),
    "pruned": ({"closer": 1.0}, {}),
    "codes and keys": ({"index": "IVF1024,PQ256x4fs"}, {}),  # found by codes, with a second look at the keys
    "codes": (CODES, {}),
    "codes of half the size": (SMALL_CODES, {}),
}


def main() -> None:
    """Makes what is not there yet, and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, help="a folder with train.txt, valid.txt and test.txt")
    parser.add_argument("--folder", type=Path, default=Path("bench-external"), help="for the model and the stores")
    parser.add_argument("--steps", type=int, default=120, help="training steps of 2048 tokens")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=8_192, help="that are scored in each turn")
    parser.add_argument("--repeats", type=int, default=2, help="turns, of which the fastest counts")
    parser.add_argument("--stores", nargs="*", default=list(STORES), choices=list(STORES))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    trained(options)
    result = {"measured": measure(options), "tokens": options.tokens, "rows": options.rows, **machine()}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "output-external.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def trained(options: argparse.Namespace) -> None:
    """Trains the model, or goes on with it."""
    run = options.folder / "run"
    command = ["train", str(options.text), "--model=preset:trime-38m", "--tokenizer=byte", f"--steps={options.steps}"]
    command += ["--batch-size=4", "--segment-length=512", "--learning-rate=0.0006", f"--warmup={options.steps // 10}"]
    command += ["--checkpoint-every=50", f"--out={run}", "--resume"]
    if not (run / "model").is_dir():
        subprocess.run([sys.executable, "-m", "mnemic", *command], check=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Perplexity and time of the plain model and with each store."""
    import mnemic
    from mnemic.cli.loading import load_model
    from mnemic.evaluate.tuning import default_grid
    from mnemic.memories.output.testing import Grid

    model, tokenizer = load_model(str(options.folder / "run"))
    corpus = mnemic.open_corpus(str(options.text))
    how = {"window": 512, "batch_size": 8}
    valid, test = (mnemic.EvaluateConfig(split=split, max_tokens=options.tokens, **how) for split in ("valid", "test"))
    corpus = beginnings(corpus, options)

    def timed() -> tuple[float, float]:
        start = time.perf_counter()
        found = mnemic.evaluate(model, tokenizer, corpus, test)
        return found["perplexity"], time.perf_counter() - start

    results: dict[str, Any] = {}
    tuned = None
    for name in options.stores:
        settings, memory = STORES[name]
        store = built(model, tokenizer, corpus, options, settings)
        mnemic.augment(model, mnemic.OutputMemory.knn(store, k=1024, **memory))
        if tuned is None or "retrieve" in memory:  # all have the settings that are best with exact search
            grid = Grid(default_grid(model.memory.output.config).temperatures, ks=(1024,))
            found = mnemic.tune(model, tokenizer, corpus, valid, grid)
            if tuned is None:
                tuned = found.memory
            found.put_into(model)
        else:
            mnemic.augment(model, tuned.changed(external=store, **memory))
        times: dict[str, list[float]] = {"plain": [], "memory": []}
        for _ in range(1 if name == "exact" else options.repeats):
            with model.memory.disabled():
                plain, seconds = timed()
            times["plain"].append(seconds)
            perplexity, seconds = timed()
            times["memory"].append(seconds)
        results[name] = {
            "plain_perplexity": plain,
            "perplexity": perplexity,
            "ratio": min(times["memory"]) / min(times["plain"]),
            "seconds": times,
            "rows": store.summary().rows,
            "bytes": store.summary().bytes,
        }
        if "exact" in results:
            gain = plain - results["exact"]["perplexity"]
            results[name]["share_of_gain"] = (plain - perplexity) / gain
        print(name, json.dumps(results[name]), file=sys.stderr, flush=True)
        model.memory.detach()
        store.close()
    results["settings"] = {key: getattr(tuned, key) for key in ("k", "weight", "mix_temperature", "similarity")}
    return results


def beginnings(corpus: Any, options: argparse.Namespace) -> Any:
    """As much of each split as is needed: a byte is a row."""
    from mnemic.data import Corpus, Document

    sizes = {"train": options.rows, "valid": options.tokens, "test": options.tokens}

    def cut(split: str) -> Any:
        document = next(iter(corpus.documents(split)))
        text = document.text.encode()[: sizes[split]].decode(errors="ignore")
        return [Document(document.id, text)]

    return Corpus(corpus.name, {split: lambda split=split: cut(split) for split in sizes})


def built(model: Any, tokenizer: Any, corpus: Any, options: argparse.Namespace, settings: dict[str, Any]) -> Any:
    """A store of the training text; the model reads it once, for the exact store, and others have its rows."""
    import mnemic

    def path(settings: dict[str, Any]) -> Path:
        name = "-".join(str(value).replace(",", "-") for value in settings.values()) or "usual"
        return options.folder / f"{name}.store"

    exact, usual = STORES["exact"][0], STORES["usual"][0]
    if settings == exact:
        return mnemic.build_store(model, tokenizer, corpus, path(settings), window=512, min_context=64, **settings)
    if path(settings).exists() and (store := mnemic.open_store(path(settings))).summary().rows:
        return store
    if "closer" in settings:
        with mnemic.open_store(path(usual)) as whole:
            return mnemic.prune_store(whole, path(settings), **settings).store
    with mnemic.open_store(path(exact)) as source:
        store = mnemic.open_store(path(settings), dataclasses.replace(source.config, **{"index": "auto", **settings}))
        for start in range(0, len(source), 1 << 16):
            rows = source.get(range(start, min(start + (1 << 16), len(source))))
            store.add(rows.keys, rows.values, rows.references)
    store.commit()
    return store


if __name__ == "__main__":
    main()
