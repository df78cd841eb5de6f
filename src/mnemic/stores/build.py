"""A corpus becomes a store: each position of each document one row, its key, the token that follows and a reference.

Documents are read in windows that overlap, in a fixed order and in fixed batches, so that a build that was killed goes
on at the first batch that was not committed (progress.py) and ends with the same rows, bit for bit on the same machine.
A model that translates reads whole pairs instead; then the documents are the targets.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mnemic.errors import MnemicError, UsageError
from mnemic.stores.build_config import BuildConfig, Reading, suited
from mnemic.stores.config import Origin, StoreConfig
from mnemic.stores.progress import Mark, Progress

if TYPE_CHECKING:
    from mnemic.stores.base import Source, Store
    from mnemic.stores.encode import EncodedRows, Window


def build_store(
    model: Any, tokenizer: Any, corpus: Any, path: str | Path, config: BuildConfig | None = None, **options: Any
) -> Store:
    """Encodes a corpus (a name, a path or a Corpus) into a store at `path`, as `config`, or options by name, say.

    Killed or stopped and called again, it goes on; called on a store that is finished, it only opens it. Returns the
    open store.

    >>> store = mnemic.build_store(model, tokenizer, "stdlib", "python.store", metric="cosine")
    """
    if config is not None and options:
        raise UsageError("give build_store either a BuildConfig or options by name, not both")
    return Build(model, tokenizer, corpus, path, config or BuildConfig.from_dict(options)).run()


class Build:
    """One build: what it reads, with which settings, and what came of it (`report`)."""

    def __init__(self, model: Any, tokenizer: Any, corpus: Any, path: str | Path, config: BuildConfig) -> None:
        from mnemic.stores.encode import Encoder, key_windows, what_is_left_out
        from mnemic.stores.origin import origin_of
        from mnemic.stores.ram import RamStore
        from mnemic.train.terminal import say

        _check_namespace(RamStore("ram:", StoreConfig(dim=1)), config.namespace)
        config = suited(config, model)
        self.model, self.tokenizer, self.path, self.config = model, tokenizer, str(path), config
        self.encoder = Encoder(model, tokenizer, config.layer)
        if left_out := what_is_left_out(corpus, config.split):
            say(left_out)
        how = config.window, config.min_context, config.batch_size, config.tokens
        self.windows, self.corpus = key_windows(model, tokenizer, corpus, config.split, *how)
        window = self.windows.window
        self.reading = Reading(
            corpus=self.corpus,
            split=config.split,
            text=self.windows.fingerprint,
            window=window,
            min_context=window - self.windows.stride,
            batch_size=config.batch_size,
            namespace=config.namespace,
            max_probability=config.max_probability,
        )
        origin = origin_of(
            model, tokenizer, layer=self.encoder.layer, corpus=self.reading.text_for_origin(), context=window
        )
        self.origin = Origin.from_dict({**origin.to_dict(), **config.origin})
        self.total = self.windows.total
        self.report: dict[str, Any] = {}

    def run(self) -> Store:
        """Encodes what is not in the store yet."""
        store = self.open()
        try:
            self.encode(store, self.done(store))
        except BaseException:
            store.close()
            raise
        return store

    def open(self) -> Store:
        """The store, new or found to be one that this build has begun."""
        from mnemic.stores import open_store

        width = self.encoder.width()
        if self.config.dim not in (0, width):
            raise UsageError(f"dim = {self.config.dim}: the keys of {self.encoder.layer} have {width} numbers")
        settings = self.config.store_config(width, self.origin)
        store = open_store(self.path, settings, model=self.model, tokenizer=self.tokenizer)
        try:
            self._check(store)
        except BaseException:
            store.close()
            raise
        return store

    def _check(self, store: Store) -> None:
        """Refuses a store of another build."""
        if store.next_id and not self.config.resume:
            raise UsageError(
                f"{self.path} already holds {len(store):,} rows: go on with resume = true (--resume), or "
                "choose another path"
            )
        there = Origin.from_dict(dict(store.config.origin))
        was, now = Reading.of(there), self.reading
        if was is None:
            raise UsageError(f"{self.path} was not made by a build: add to it with `store add`, or choose another path")
        different = [name for name in Reading.types() if getattr(was, name) != getattr(now, name)]
        if "text" in different and not {"corpus", "split"} & set(different):
            raise UsageError(
                f"the text of {now.corpus} is not what it was when {self.path} was begun: build into another path, "
                "or put the old text back"
            )
        changes = [
            f"{name} = {getattr(now, name)!r} (was {getattr(was, name)!r})" for name in different if name != "text"
        ]
        if there.layer != self.encoder.layer:
            changes.append(f"layer = {self.encoder.layer!r} (was {there.layer!r})")
        if changes:
            raise UsageError(
                f"{self.path} was begun with other settings: {', '.join(changes)}; go on with the old ones, or choose "
                "another path"
            )

    def done(self, store: Store) -> Mark:
        """How much of this build is in the store already."""
        record = Progress(store).read()
        if record is None:
            return self._done_by_rows(store)
        done, planned = record
        if store.next_id < done.next_id:
            raise self._cannot_go_on()
        if store.next_id < planned.next_id:
            return done
        if planned.rows == done.rows:
            return planned
        last = self._place(store, planned.next_id - 1)
        batches = islice(self.windows.groups(done.batches), planned.batches - done.batches)
        return planned if any(self._holds(group, last) for group in batches) else done

    def _done_by_rows(self, store: Store) -> Mark:
        """What the rows say where there is no record, as on a server: the last one must be one of a single batch."""
        from mnemic.stores.encode import row_count

        if store.next_id == 0:
            return Mark()
        everything = self.config.max_probability == 1
        count = min(store.next_id, self.total) if everything else store.next_id
        last, seen, found = self._place(store, count - 1), 0, []
        for number, group in enumerate(self.windows.groups(), start=1):
            seen += row_count(group)
            if self._holds(group, last) and (seen == count or not everything):
                found.append(Mark(number, count, store.next_id, tidy=seen == self.total))
        if len(found) != 1:
            raise self._cannot_go_on()
        return found[0]

    def _place(self, store: Store, number: int) -> tuple[Source, int]:
        """The document and position of a row."""
        try:
            return store.get([number]).references[0]
        except UsageError:  # forgotten in the meantime
            raise self._cannot_go_on() from None

    def _holds(self, group: list[Window], place: tuple[Source, int]) -> bool:
        """Whether the rows of a batch are of this place too."""
        source, position = place
        return source.namespace == self.config.namespace and any(
            self.windows.corpus.id(document) == source.document and first <= position < end
            for document, _, first, end in group
        )

    def _cannot_go_on(self) -> UsageError:
        return UsageError(
            f"{self.path} holds rows that this build has not put there, or lacks some that it has: it cannot go on. "
            "Build into another path"
        )

    def encode(self, store: Store, done: Mark) -> None:
        """Encodes all batches that are not done, committing as it goes; then the store is put in order."""
        from mnemic.stores.encode import encode_group, row_count
        from mnemic.train.terminal import interrupts, progress_bar, say

        config, started, dropped_loss = self.config, time.monotonic(), 0.0
        seen = before = sum(map(row_count, islice(self.windows.groups(), done.batches)))
        if seen == self.total:
            say(f"{self.path} is finished: {len(store):,} rows; nothing to do")
        elif seen:
            say(f"going on with {self.path}: {seen:,} of {self.total:,} tokens are done")
        reached = done = dataclasses.replace(done, next_id=store.next_id)
        with self.encoder.reading(), interrupts() as stopped, progress_bar(self.total, "row", seen) as bar:
            for group in self.windows.groups(done.batches):
                rows = encode_group(self.encoder, self.windows, group, config.namespace, config.max_probability)
                reached = self._added(store, rows, reached)
                seen, dropped_loss = seen + rows.seen, dropped_loss + rows.dropped_loss
                bar.update(rows.seen)
                if stopped.is_set() or (reached.rows - done.rows >= config.commit_rows and seen < self.total):
                    done = self._commit(store, done, reached)
                if stopped.is_set():
                    raise KeyboardInterrupt(f"stopped after {seen:,} of {self.total:,} tokens; the same call goes on")
        if done.tidy:
            store.commit()  # the index, if it is time for it
        else:
            self._commit(store, done, reached, tidy=True)
        self.report = self._report(store, reached.rows, seen - before, time.monotonic() - started, dropped_loss)
        if (recall := self.report["recall"]) is not None and recall < store.config.recall:
            say(
                f"the index of {self.path} finds {recall:.2f} of the true nearest 32 rows, not the "
                f"{store.config.recall:g} that was asked for: keep the keys (float16), or choose another index"
            )

    def _added(self, store: Store, rows: EncodedRows, reached: Mark) -> Mark:
        """How far the build has come once these rows are committed, which are now added."""
        ids = store.add(rows.keys, rows.values, rows.references)
        if len(ids) and ids[0] != reached.next_id:
            raise MnemicError(f"another process has just written to {self.path}: start the build again to go on")
        return Mark(reached.batches + 1, reached.rows + len(ids), reached.next_id + len(ids))

    def _commit(self, store: Store, done: Mark, reached: Mark, tidy: bool = False) -> Mark:
        """Makes durable what was added, and the record of it; `tidy` puts the store in order as well."""
        progress = Progress(store)
        progress.write(done, reached)
        if tidy:
            store.compact()
            reached = dataclasses.replace(reached, tidy=True)
        else:
            store.commit(index=False)
        progress.write(reached, reached)
        return reached

    def _report(self, store: Store, rows: int, seen: int, seconds: float, dropped_loss: float) -> dict[str, Any]:
        summary, dropped = store.summary(), self.total - rows
        report: dict[str, Any] = {
            "store": self.path,
            "rows": summary.rows,
            "bytes": summary.bytes,
            "documents": summary.documents,
            "recall": summary.index.get("recall"),
            "tokens": self.total,
            "encoded_now": seen,
            "seconds": round(seconds, 3),
        }
        if self.config.max_probability < 1:
            report["dropped"] = dropped
            # nats that the model pays for a token that was left out: all that its row could have gained
            report["dropped_loss"] = dropped_loss / dropped if dropped and seen == self.total else None
            report["bytes_saved"] = round(summary.bytes / max(1, summary.rows) * dropped)
        return report


def add_to_store(
    store: Store,
    model: Any,
    tokenizer: Any,
    corpus: Any,
    *,
    namespace: str = "default",
    split: str = "all",
    batch_size: int = 8,
    replace: bool = False,
    override: Iterable[str] = (),
) -> dict[str, Any]:
    """Adds a text to a store, read as the store's own was; all of it in one commit, or nothing.

    A document that the store has already is refused, or with `replace` takes the place of the old one. If this fails
    on the way, the store is closed, so that no later commit makes half of it durable.
    """
    from mnemic.stores.base import Where
    from mnemic.stores.encode import Encoder, encode_group, key_windows
    from mnemic.stores.origin import check_origin
    from mnemic.train.terminal import progress_bar

    _check_namespace(store, namespace)
    check_origin(store, model, tokenizer, override)
    origin = Origin.from_dict(dict(store.config.origin))
    was = Reading.of(origin)
    if not origin.layer:
        raise UsageError(f"{store.address} does not say which layer its keys come from: build it anew to add to it")
    encoder = Encoder(model, tokenizer, origin.layer)
    how = origin.context or None, was.min_context if was else None, batch_size
    windows, name = key_windows(model, tokenizer, corpus, split, *how)
    tokens = windows.corpus
    where = Where(frozenset([namespace]), frozenset(tokens.id(number) for number in range(len(tokens))))
    if not replace:
        _refuse_known(store, where, name)
    added = replaced = 0
    try:
        with encoder.reading(), progress_bar(windows.total, "row") as bar:
            replaced = store.delete(where) if replace else 0
            for group in windows.groups():
                rows = encode_group(encoder, windows, group, namespace, was.max_probability if was else 1.0)
                added += len(store.add(rows.keys, rows.values, rows.references))
                bar.update(rows.seen)
        Progress(store).settle(store)
        store.commit()
    except BaseException:
        store.close()
        raise
    return {"store": store.address, "documents": len(tokens), "added": added, "replaced": replaced, "rows": len(store)}


def _check_namespace(store: Store, namespace: str) -> None:
    """Refuses a namespace that no store takes, by adding nothing to it."""
    import numpy as np

    from mnemic.stores.base import References

    store.add(np.empty((0, store.config.dim)), [], References.of("any", [], namespace))


def _refuse_known(store: Store, where: Any, name: str) -> None:
    """UsageError if the store has rows of any of these documents."""
    import numpy as np

    found = store.search(np.ones((1, store.config.dim), np.float32), 1, where)
    if found.mask.any():
        source, _ = store.get(found.ids[found.mask]).references[0]
        raise UsageError(
            f"{store.address} already has the document {source.document!r} in the namespace {source.namespace!r}: "
            f"replace it (--replace), or add {name} under another namespace"
        )
