"""A smaller store beside a store: rows that only repeat a row near them are left out, and the cost of it is measured.

This is the greedy merging of He et al. (arXiv 2109.04212) with a bound on the distance: in the order of their numbers,
a row is left out if one of the nearest rows of its namespace has the same token, is no further than `closer` times the
usual distance between neighbours, and has been kept. That one has a single vote where there were several, since a store
has no weights; the report says how much of the answers this changes.

The other kind of pruning, leaving out what the model foresees by itself, is done as a store is built: see
`BuildConfig.max_probability`.
"""

from __future__ import annotations

import contextlib
import re
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
from mnemic.files import lock, new_folder
from mnemic.stores.base import Floats, Found, Ids, References, Rows, Store, nothing
from mnemic.stores.config import Origin
from mnemic.stores.context import surviving
from mnemic.stores.known import all_rows, documents_in

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
    commit_rows: int = option(100_000, "rows in a part of the new store, if that is a folder")

    def check(self) -> None:
        """Refuses settings that cannot work."""
        if not self.closer >= 0:
            raise UsageError(f"closer = {self.closer}: expected 0 or more, a share of the distance between neighbours")
        for name in ("neighbours", "k", "commit_rows"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} = {getattr(self, name)}: expected 1 or more")


@dataclass(frozen=True)
class Sample:
    """Contexts of a text that a store does not have: keys (n, dim), and the tokens that really followed, (n,).

    left_out: the documents that were passed over, because the store has them.
    """

    keys: Floats
    values: NDArray[np.int64]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pruned:
    """A pruned store, open, and what pruning gained and cost."""

    store: Store
    report: dict[str, Any]


def prune_store(
    store: Store, path: str | Path, config: PruneConfig | None = None, sample: Sample | None = None, **options: Any
) -> Pruned:
    """Writes a store without redundant rows to `path`; the one it is made from stays as it is.

    Killed, it leaves nothing of that name, or, on a server, a store without rows: the same call begins again.
    With a `sample` of held-out contexts (`held_out`) the report says what changed for them.
    """
    if config is not None and options:
        raise UsageError("give prune_store either a PruneConfig or options by name, not both")
    config = config or PruneConfig.from_dict(options)
    if store.config.keys == "codes":
        raise UsageError(f"{store.address} keeps codes instead of keys: prune a store with keys, then compress it")
    if not len(store):
        raise UsageError(f"{store.address} has no rows: there is nothing to prune")
    scheme = re.match("([a-z0-9]+):", str(path))
    if scheme is None or scheme[1] == "disk":
        pruned, usual = _in_a_folder(store, str(path), config)
    else:
        pruned, usual = _elsewhere(store, str(path), config)
    try:
        report = {**_counts(store, pruned), "usual_distance": usual}
        if sample is not None:
            report["held_out"] = cost(store, pruned, sample, config.k)
    except BaseException:
        pruned.close()
        raise
    return Pruned(pruned, report)


def _in_a_folder(store: Store, address: str, config: PruneConfig) -> tuple[Store, float]:
    """The pruned store in a folder, which gets its name when all rows are there, and the usual distance."""
    from mnemic.stores import open_store

    folder = Path(address.removeprefix("disk:"))
    with contextlib.ExitStack() as held:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            with open_store(address, store.config) as there:  # refuses what is no store, or one with other settings
                _check_target(there, store)
                held.enter_context(lock(folder / "lock", f"the store {folder}"))
                there.refresh()
                _check_target(there, store)
        with new_folder(folder) as unfinished, open_store(f"disk:{unfinished}", store.config) as pruned:
            usual = _write(store, pruned, config, config.commit_rows)
    return open_store(address, store.config), usual


def _elsewhere(store: Store, address: str, config: PruneConfig) -> tuple[Store, float]:
    """The same in memory or on a server: all rows in one commit, before which nobody sees any."""
    from mnemic.stores import open_store

    pruned = open_store(address, store.config)
    try:
        _check_target(pruned, store)
        return pruned, _write(store, pruned, config, None)
    except BaseException:
        pruned.close()
        raise


def _check_target(there: Store, store: Store) -> None:
    """Refuses a store that has rows, or that is meant for those of another model, tokenizer or layer."""
    if there.next_id:
        raise UsageError(f"{there.address} has rows already: choose a path where there is no store yet")
    asked, made = (Origin.from_dict(dict(one.config.origin)) for one in (there, store))
    for name in ("model_fingerprint", "memory_fingerprint", "tokenizer_fingerprint", "layer"):
        if getattr(asked, name) != getattr(made, name):
            raise UsageError(
                f"{there.address} is a store for rows with {name} = {getattr(asked, name)!r}, and those of "
                f"{store.address} have {getattr(made, name)!r}: choose a path where there is no store yet"
            )


def _write(store: Store, pruned: Store, config: PruneConfig, commit_rows: int | None) -> float:
    """Puts the rows that stay into `pruned` and commits them; returns the usual distance."""
    from mnemic.train.terminal import progress_bar

    usual, pending = usual_distance(store), 0
    with progress_bar(len(store), "row") as bar:
        for rows, seen in _kept_rows(store, config, max(config.closer, EQUAL) * usual):
            if rows.keys is not None and len(rows.values):
                pruned.add(rows.keys, rows.values, rows.references)
                pending += len(rows.values)
            bar.update(seen)
            if commit_rows is not None and pending >= commit_rows:
                pruned.commit(index=False)
                pending = 0
    pruned.commit()
    return usual


def usual_distance(store: Store) -> float:
    """The median distance of a row to the nearest other one of its namespace that is not equal to it, over a sample."""
    distances, confined = [], _has_several_namespaces(store)
    for ids, rows in surviving(store, _some_ids(store)):
        found = _nearest(store, rows, 2, confined)
        others = found.mask & (found.ids != ids[:, None])
        distances.append(np.where(others, _distances(store, np.asarray(rows.keys), found), np.inf).min(1))
    nearest = np.concatenate(distances)
    nearest = nearest[np.isfinite(nearest)]
    nearest = nearest[nearest > EQUAL * nearest.max(initial=0.0)]
    return float(np.median(nearest)) if len(nearest) else 0.0


def _has_several_namespaces(store: Store) -> bool:
    return len(store.summary().namespaces) > 1


def _some_ids(store: Store) -> Ids:
    """The numbers of about SAMPLE rows that are there, from all over the store, in order."""
    if len(store) <= 4 * SAMPLE:
        everywhere = np.ones((1, store.config.dim), np.float32)
        found = store.search(everywhere, len(store), recall=1.0)
        ids = np.sort(found.ids[found.mask])
    else:
        choose, ids = np.random.default_rng(0), np.empty(0, np.int64)
        while len(ids) < SAMPLE:
            drawn = np.unique(choose.integers(0, store.next_id, 4 * SAMPLE))
            ids = np.unique(np.concatenate([ids, *(some for some, _ in surviving(store, drawn))]))
    return ids[np.linspace(0, len(ids) - 1, min(SAMPLE, len(ids))).astype(np.int64)]


def _nearest(store: Store, rows: Rows, k: int, confined: bool) -> Found:
    """The nearest rows of each row, itself included; `confined`: in its own namespace, as there are several."""
    keys, which = np.asarray(rows.keys), rows.references.which
    if not confined:
        return store.search(keys, k)
    namespaces: dict[str, list[int]] = {}
    for number in np.unique(which).tolist():
        namespaces.setdefault(rows.references.sources[number].namespace, []).append(number)
    found = nothing(len(keys), k)
    for namespace, numbers in namespaces.items():
        here = np.isin(which, numbers)
        part = store.search(keys[here], k, namespace)
        for name in Found._fields:
            getattr(found, name)[here] = getattr(part, name)
    return found


def _kept_rows(store: Store, config: PruneConfig, radius: float) -> Iterator[tuple[Rows, int]]:
    """The rows that stay, block by block, and how many were looked at for each."""
    end, confined = store.next_id, _has_several_namespaces(store)
    with tempfile.TemporaryFile() as file:
        file.truncate(end)
        fate = np.memmap(file, np.uint8, "r+", shape=(end,))  # on disk, like all that grows with the store
        for ids, rows in all_rows(store):
            found = _nearest(store, rows, config.neighbours + 1, confined)
            same = found.mask & (found.values == rows.values[:, None])
            same &= _distances(store, np.asarray(rows.keys), found) <= radius
            _decide(ids, found.ids, same, fate)
            yield _chosen(rows, fate[ids] == KEPT), len(ids)


def _decide(ids: Ids, found: Ids, same: NDArray[np.bool_], fate: NDArray[np.uint8]) -> None:
    """Decides for each row whether it stays; `same`: which of the rows found could stay for it."""
    for number, id in enumerate(ids.tolist()):
        near = found[number][same[number]]
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
        "namespaces": {
            name: {"rows_before": rows, "rows_after": after.namespaces.get(name, 0)}
            for name, rows in before.namespaces.items()
        },
        "bytes_before": before.bytes,
        "bytes_after": after.bytes,
    }


def cost(store: Store, pruned: Store, sample: Sample, k: int) -> dict[str, Any]:
    """What the k nearest rows say of held-out contexts, before and after.

    recall: share of contexts whose next token is among the k; accuracy: share whose next token gets the most votes,
    weighted by softmax(score) as in kNN-LM; changed: share for which another token gets the most votes than before.
    """
    figures: dict[str, Any] = {"contexts": len(sample.values), "k": k, "left_out": list(sample.left_out)}
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
    """About `rows` contexts from all over a split, read as the store's own text was, without documents that it has."""
    from mnemic.stores.build_config import Reading
    from mnemic.stores.encode import Encoder, encode_group, key_windows

    origin = Origin.from_dict(dict(store.config.origin))
    was = Reading.of(origin)
    encoder = Encoder(model, tokenizer, origin.layer)
    how = origin.context or None, was.min_context if was else None, 1
    windows, name = key_windows(model, tokenizer, corpus, split, *how)
    tokens = windows.corpus
    known = documents_in(store, tokens)
    new = [group for group in windows.groups() if known.isdisjoint(document for document, *_ in group)]
    count = len(new)
    if not count:
        raise UsageError(f"{store.address} has all of {name}, split {split}: measure on a text that it does not have")
    each, choose = -(-rows // min(SAMPLED_WINDOWS, count)), np.random.default_rng(0)
    keys, values = [], []
    with encoder.reading():
        for group in islice(new, 0, None, max(1, count // SAMPLED_WINDOWS)):
            encoded = encode_group(encoder, windows, group, "held out")
            some = choose.permutation(encoded.seen)[:each]
            keys.append(encoded.keys[some])
            values.append(encoded.values[some])
    return Sample(np.concatenate(keys), np.concatenate(values), tuple(tokens.id(number) for number in sorted(known)))
