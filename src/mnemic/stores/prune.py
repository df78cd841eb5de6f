"""A smaller store beside a store: rows that only repeat a row near them are left out, and the cost of it is measured.

This is the greedy merging of He et al. (arXiv 2109.04212) with a bound on the distance: in the order of their numbers,
a row is left out if one of its nearest rows has the same token, is no further than `closer` times the usual distance
between neighbours, and has been kept. That one has a single vote where there were several, since a store has no
weights; the report says how much of the answers this changes.

The other kind of pruning, leaving out what the model foresees by itself, is done as a store is built: see
`BuildConfig.max_probability`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mnemic.config import Config, option
from mnemic.errors import UsageError
from mnemic.stores.base import Floats, Found, Ids, References, Rows, Store
from mnemic.stores.context import surviving

BLOCK = 4096  # rows looked at in one go
SAMPLE = 1000  # rows whose neighbours tell what distance is usual
EQUAL = 1e-3  # share of a usual distance below which two keys differ by rounding only
SAMPLED_WINDOWS = 64  # windows of a held-out text from which contexts are taken
KEPT, DROPPED = 1, 2  # and 0 for rows that are not decided on yet


@dataclass(kw_only=True)
class PruneConfig(Config):
    """Which rows are left out, and how the cost of it is measured."""

    closer: float = option(
        0.5, "leave out a row if another of its token is within this share of the usual distance; 0: only equal ones"
    )
    neighbours: int = option(8, "nearest rows among which one to stay for it is looked for")
    k: int = option(16, "nearest rows that vote, where the cost is measured")
    commit_rows: int = option(100_000, "rows after which what is done so far is made durable")

    def check(self) -> None:
        """Refuses settings that cannot work."""
        if not self.closer >= 0:
            raise UsageError(f"closer = {self.closer}: expected 0 or more, a share of the distance between neighbours")
        for name in ("neighbours", "k", "commit_rows"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} = {getattr(self, name)}: expected 1 or more")


@dataclass(frozen=True)
class Sample:
    """Contexts that a store has not seen: their keys (n, dim), and the tokens that really followed, (n,)."""

    keys: Floats
    values: NDArray[np.int64]


@dataclass(frozen=True)
class Pruned:
    """A pruned store, open, and what pruning gained and cost."""

    store: Store
    report: dict[str, Any]


def prune_store(
    store: Store, path: str | Path, config: PruneConfig | None = None, sample: Sample | None = None, **options: Any
) -> Pruned:
    """Writes a store without redundant rows to `path`; the one it is made from stays as it is.

    With a `sample` of held-out contexts (`held_out`) the report says what changed for them.
    """
    from mnemic.stores import open_store
    from mnemic.train.terminal import progress_bar

    if config is not None and options:
        raise UsageError("give prune_store either a PruneConfig or options by name, not both")
    config = config or PruneConfig.from_dict(options)
    if store.config.keys == "codes":
        raise UsageError(f"{store.address} keeps codes instead of keys: prune a store with keys, then compress it")
    if not len(store):
        raise UsageError(f"{store.address} has no rows: there is nothing to prune")
    pruned = open_store(path, store.config)
    try:
        if pruned.next_id:
            raise UsageError(f"{path} has rows already: choose a path where there is no store yet")
        usual = usual_distance(store)
        pending = 0
        with progress_bar(len(store), "row") as bar:
            for rows, seen in _kept_rows(store, config, max(config.closer, EQUAL) * usual):
                if rows.keys is not None and len(rows.values):
                    pruned.add(rows.keys, rows.values, rows.references)
                    pending += len(rows.values)
                bar.update(seen)
                if pending >= config.commit_rows:
                    pruned.commit(index=False)
                    pending = 0
        pruned.commit()
        report = {**_counts(store, pruned), "usual_distance": usual}
        if sample is not None:
            report["held_out"] = cost(store, pruned, sample, config.k)
    except BaseException:
        pruned.close()
        raise
    return Pruned(pruned, report)


def usual_distance(store: Store) -> float:
    """The median distance of a row to the nearest other one that is not equal to it, over a sample of the store."""
    spread = np.unique(np.linspace(0, store.next_id - 1, 4 * SAMPLE).astype(np.int64))
    parts = [(ids, rows.keys) for ids, rows in surviving(store, spread) if rows.keys is not None]
    ids, keys = (np.concatenate([part[column] for part in parts]) for column in (0, 1))
    some = np.linspace(0, len(ids) - 1, min(SAMPLE, len(ids))).astype(np.int64)
    found = store.search(keys[some], 2)
    distances = np.where(found.mask & (found.ids != ids[some, None]), _distances(store, keys[some], found), np.inf)
    nearest = distances.min(1)
    nearest = nearest[np.isfinite(nearest)]
    nearest = nearest[nearest > EQUAL * nearest.max(initial=0.0)]
    return float(np.median(nearest)) if len(nearest) else 0.0


def _kept_rows(store: Store, config: PruneConfig, radius: float) -> Iterator[tuple[Rows, int]]:
    """The rows that stay, block by block, and how many were looked at for each."""
    end = store.next_id
    with tempfile.TemporaryFile() as file:
        file.truncate(end)
        fate = np.memmap(file, np.uint8, "r+", shape=(end,))  # on disk, like all that grows with the store
        for first in range(0, end, BLOCK):
            for ids, rows in surviving(store, np.arange(first, min(first + BLOCK, end))):
                _decide(store, ids, rows, fate, config.neighbours, radius)
                yield _chosen(rows, fate[ids] == KEPT), len(ids)


def _decide(store: Store, ids: Ids, rows: Rows, fate: NDArray[np.uint8], neighbours: int, radius: float) -> None:
    """Decides for each row whether it stays."""
    keys = np.asarray(rows.keys)
    found = store.search(keys, neighbours + 1)
    same = found.mask & (found.values == rows.values[:, None]) & (_distances(store, keys, found) <= radius)
    for number, id in enumerate(ids.tolist()):
        near = found.ids[number][same[number]]
        fate[id] = DROPPED if (fate[near] == KEPT).any() else KEPT


def _distances(store: Store, keys: Floats, found: Found) -> NDArray[np.float64]:
    """How far each found row is from its query."""
    scores = np.where(found.mask, found.scores, 0).astype(np.float64)
    if store.config.metric == "l2":
        squares = -scores
    elif store.config.metric == "cosine":
        squares = 2 - 2 * scores
    else:
        there = np.asarray(store.get(found.ids[found.mask]).keys, np.float64)
        squares = np.zeros(scores.shape)
        squares[found.mask] = ((there - np.repeat(keys, found.mask.sum(1), axis=0)) ** 2).sum(1)
    return np.sqrt(np.maximum(squares, 0))


def _chosen(rows: Rows, chosen: NDArray[np.bool_]) -> Rows:
    which, places = rows.references.which[chosen], rows.references.positions[chosen]
    used, which = np.unique(which, return_inverse=True)
    sources = [rows.references.sources[number] for number in used.tolist()]
    keys = None if rows.keys is None else rows.keys[chosen]
    return Rows(keys, rows.values[chosen], References(sources, which, places))


def _counts(store: Store, pruned: Store) -> dict[str, Any]:
    before, after = store.summary(), pruned.summary()
    return {
        "rows_before": before.rows,
        "rows_after": after.rows,
        "bytes_before": before.bytes,
        "bytes_after": after.bytes,
    }


def cost(store: Store, pruned: Store, sample: Sample, k: int) -> dict[str, Any]:
    """What the k nearest rows say of held-out contexts, before and after.

    recall: share of contexts whose next token is among the k; accuracy: share whose next token gets the most votes,
    weighted by softmax(score) as in kNN-LM; changed: share for which another token gets the most votes than before.
    """
    figures: dict[str, Any] = {"contexts": len(sample.values), "k": k}
    guesses = []
    for one, when in ((store, "before"), (pruned, "after")):
        found = one.search(sample.keys, k)
        right = found.mask & (found.values == sample.values[:, None])
        guesses.append(votes(found))
        figures[f"recall_{when}"] = float(right.any(1).mean())
        figures[f"accuracy_{when}"] = float((guesses[-1] == sample.values).mean())
    figures["changed"] = float((guesses[0] != guesses[1]).mean())
    return figures


def votes(found: Found) -> NDArray[np.int64]:
    """The token that the rows found for each query vote for, each with the weight softmax(score); -1 for none."""
    winners = np.full(len(found.ids), -1, np.int64)
    for query in np.flatnonzero(found.mask.any(1)).tolist():
        there = found.mask[query]
        scores = found.scores[query][there].astype(np.float64)
        tokens, which = np.unique(found.values[query][there], return_inverse=True)
        winners[query] = tokens[np.bincount(which, np.exp(scores - scores.max())).argmax()]
    return winners


def held_out(model: Any, tokenizer: Any, store: Store, corpus: Any, split: str = "valid", rows: int = SAMPLE) -> Sample:
    """About `rows` contexts from all over a split that is not in the store, read as the store's own text was."""
    from mnemic.data import tokenize_corpus
    from mnemic.stores.build import Reading
    from mnemic.stores.config import Origin
    from mnemic.stores.encode import Encoder, KeyWindows, documents_of, encode_group, window_of

    origin = Origin.from_dict(dict(store.config.origin))
    was = Reading.of(origin)
    encoder = Encoder(model, tokenizer, origin.layer)
    window, context = window_of(model, origin.context or None, was.min_context if was else None)
    read, _ = documents_of(corpus, split)
    windows = KeyWindows(tokenize_corpus(read(), tokenizer), window, window - context, 1)
    step = max(1, len(windows) // SAMPLED_WINDOWS)
    each, choose = -(-rows // min(SAMPLED_WINDOWS, len(windows))), np.random.default_rng(0)
    keys, values = [], []
    with encoder.reading():
        for group in islice(windows.groups(), 0, None, step):
            encoded = encode_group(encoder, windows, group, "held out")
            some = choose.permutation(encoded.seen)[:each]
            keys.append(encoded.keys[some])
            values.append(encoded.values[some])
    return Sample(np.concatenate(keys), np.concatenate(values))
