"""Keys read off a model: for each token of a text, what enters one of its modules there (hf/keys.py).

A causal model reads documents in windows. A model that translates reads whole pairs, and the tokens are those of the
targets: the key of one is that of its source and of the target before it, as in kNN-MT (arXiv 2010.00710).

An XL cache is not used: a key looks back on its window, and on nothing that another key of the same token would not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mnemic.data import CORPORA, Corpus, Document, TokenizedCorpus, open_corpus, tokenize_corpus
from mnemic.data.documents import WHOLE
from mnemic.data.pair_batches import PairBatches, TokenizedPairs, tokenize_pairs
from mnemic.data.pairs import Pair
from mnemic.data.streams import IGNORED
from mnemic.data.windows import SlidingWindows, Window
from mnemic.errors import UsageError
from mnemic.hf.positions import positions
from mnemic.stores.base import Floats, References, Source

if TYPE_CHECKING:
    import torch

# torch, and what imports it, is imported inside of functions: opening a store must not need it.

USUAL_WINDOW = 512
BETWEEN = "|||"  # source and target, where both are in one text


class _Heard(Exception):
    """Ends a forward pass whose key has been read: what comes after is not needed."""


class Encoder:
    """Reads keys off a model, and on request how well the model foresaw each next token."""

    def __init__(self, model: Any, tokenizer: Any, layer: str) -> None:
        from mnemic.hf.keys import module_path
        from mnemic.train.objectives import make_objective, model_kind

        kind = model_kind(model)
        if kind not in ("causal", "seq2seq"):
            raise UsageError(
                f"{type(model).__name__} does not predict next tokens: a store is made by a causal or a "
                "sequence-to-sequence model"
            )
        self.model, self.layer = model, module_path(model, layer)
        self.translates = kind == "seq2seq"
        self._module = model.get_submodule(self.layer)
        self._at_head = self._module is model.get_output_embeddings()
        if self.translates and not self._at_head and self._module not in set(model.get_decoder().modules()):
            raise UsageError(f"layer = {layer!r} is not in the decoder, which reads the targets: choose a part of it")
        if (memory := getattr(model, "memory", None)) is not None and memory.segment:
            raise UsageError(
                "the rows of a store are of windows that are read alone, and recurrent memory tokens give others where "
                "they go from segment to segment: build the store with a model that has none, and ask it by that model"
            )
        self._objective = make_objective("auto", model, tokenizer, seed=0)

    def width(self) -> int:
        """How many numbers a key has."""
        import torch

        one = torch.ones(1, 1, dtype=torch.long)
        batch = {"input_ids": one * 0, "targets": one * IGNORED, "document_starts": one.bool(), "attention_mask": one}
        with self.reading():
            return self(batch)[0].shape[-1]

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Within this context keys are read; afterwards the model is as it was, what its memory holds included."""
        from mnemic.train.state import untouched

        memory = getattr(self.model, "memory", None)
        state = memory.state() if memory is not None else {}
        try:
            with untouched(self.model), memory.keys_only() if memory is not None else contextlib.nullcontext():
                yield
        finally:
            if memory is not None:
                memory.reset()
                memory.load_state(state)

    def __call__(
        self, batch: dict[str, torch.Tensor], losses: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The keys (B, T, width) of a batch of windows or pairs; with `losses` also -log p of each target, (B, T)."""
        from mnemic.hf.keys import by_token

        if (memory := getattr(self.model, "memory", None)) is not None:
            memory.reset()
        device = next(self.model.parameters()).device
        batch = {name: tensor.to(device) for name, tensor in self._objective.prepare(batch, 0).items()}
        rows, length = batch["targets"].shape
        if hasattr(self._module, "pairs_read"):
            with self._module.pairs_read() as pairs:
                paid = self._objective.losses(batch, None)
            return pairs[-1], paid if losses else None
        found = None
        with self._listening(stop=not losses) as heard, contextlib.suppress(_Heard):
            found = self._objective.losses(batch, None)
        return by_token(heard[0], rows, length), found

    @contextlib.contextmanager
    def _listening(self, stop: bool) -> Iterator[list[torch.Tensor]]:
        heard: list[torch.Tensor] = []

        def hear(states: torch.Tensor) -> None:
            heard.append(states)
            if stop:
                raise _Heard

        if self._at_head and (self.translates or hasattr(self.model, "token_losses")):
            # our own models may call their head by halves, and T5 scales what the decoder gives it
            stack = self.model.get_decoder() if self.translates else self.model.base_model
            hook = stack.register_forward_hook(lambda _, __, output: hear(output[0]))
        else:
            hook = self._module.register_forward_pre_hook(
                lambda _, args, named: hear((*args, *named.values())[0]), with_kwargs=True
            )
        try:
            yield heard
        finally:
            hook.remove()
        if not heard:
            raise UsageError(f"layer = {self.layer!r} was not run when the model read a text: choose another module")


class KeyWindows(SlidingWindows):
    """The windows of a corpus, group by group, and where the rows of a group come from."""

    @property
    def total(self) -> int:
        """The rows of all groups."""
        return self.corpus.target_count

    @property
    def fingerprint(self) -> str:
        """A checksum of what is read."""
        return self.corpus.fingerprint

    def groups(self, skipped: int = 0) -> Iterator[list[Window]]:
        """The windows of each batch, in order, without reading any token; the first `skipped` left out."""
        windows = islice(self._windows(), skipped * self.batch_size, None)
        while group := list(islice(windows, self.batch_size)):
            yield group

    def references(self, group: list[Window], namespace: str) -> References:
        """The document and position of each row of a group."""
        return _references(self.corpus, group, namespace)


class KeyPairs:
    """Pairs, group by group, as KeyWindows gives windows: each is one window over the whole of its target.

    Pairs with more than `window` tokens on a side are left out. The shortest come first.
    """

    def __init__(self, pairs: TokenizedPairs, window: int, batch_size: int) -> None:
        self.corpus = pairs.target
        self.fingerprint = pairs.fingerprint
        self.window = self.stride = window
        self._lengths = pairs.lengths[:, 1]
        self._batches = PairBatches(pairs, batch_size, window, shuffle=False, epochs=1)
        self._plan = self._batches.plan(0)
        self.left_out = len(pairs) - sum(map(len, self._plan))

    @property
    def total(self) -> int:
        """The rows of all groups."""
        return int(sum(self._lengths[numbers].sum() for numbers in self._plan))

    def groups(self, skipped: int = 0) -> Iterator[list[Window]]:
        """The pairs of each batch, in order, without reading any token; the first `skipped` left out."""
        for numbers in self._plan[skipped:]:
            yield [(number, 0, 0, int(self._lengths[number])) for number in numbers.tolist()]

    def batch(self, group: list[Window]) -> dict[str, torch.Tensor]:
        """The batch of some pairs, as PairBatches gives it."""
        return self._batches.batch(np.array([number for number, *_ in group]))

    def references(self, group: list[Window], namespace: str) -> References:
        """The target and the position in it of each row of a group."""
        return _references(self.corpus, group, namespace)


def _references(corpus: TokenizedCorpus, group: list[Window], namespace: str) -> References:
    documents = list(dict.fromkeys(document for document, *_ in group))
    numbers = {document: number for number, document in enumerate(documents)}
    counts = [end - first for _, _, first, end in group]
    which = np.repeat([numbers[document] for document, *_ in group], counts)
    positions = np.concatenate([np.arange(first, end) for _, _, first, end in group])
    return References([Source(corpus.id(document), namespace) for document in documents], which, positions)


def key_windows(
    model: Any,
    tokenizer: Any,
    corpus: Corpus | str | Path,
    split: str,
    window: int | None,
    min_context: int | None,
    batch_size: int,
    folder: str | Path | None = None,
) -> tuple[KeyWindows | KeyPairs, str]:
    """What of a corpus a model makes rows of: windows of its documents, or its pairs; and the name of the corpus.

    What the tokenizer makes of the text is kept in `folder`, if one is given.
    """
    from mnemic.train.objectives import model_kind

    if model_kind(model) == "seq2seq":
        return _key_pairs(model, tokenizer, corpus, split, window, min_context, batch_size, folder)
    window, min_context = window_of(model, window, min_context)
    opened = open_corpus(str(corpus)) if isinstance(corpus, str | Path) else corpus
    tokens = tokenize_corpus(opened.documents(split), tokenizer, folder)
    return KeyWindows(tokens, window, window - min_context, batch_size), opened.name


def _key_pairs(
    model: Any,
    tokenizer: Any,
    corpus: Corpus | str | Path,
    split: str,
    window: int | None,
    min_context: int | None,
    batch_size: int,
    folder: str | Path | None,
) -> tuple[KeyPairs, str]:
    from mnemic.train.objectives import check_length
    from mnemic.train.seq2seq import check_parallel
    from mnemic.train.terminal import say

    if min_context:
        raise UsageError(f"min_context = {min_context}: a pair is read whole, leave it unset")
    opened = check_parallel(open_corpus(str(corpus)) if isinstance(corpus, str | Path) else corpus)
    window = _usual_window(model) if window is None else window
    check_length(model, window, "window")
    pairs = tokenize_pairs(lambda: opened.pairs(split), tokenizer, folder)
    windows = KeyPairs(pairs, window, batch_size)
    if windows.left_out:
        say(f"{windows.left_out:,} of {len(pairs):,} pairs are left out: longer than window = {window} tokens")
    return windows, opened.name


def row_count(group: list[Window]) -> int:
    """The rows of a group, before any is left out."""
    return sum(end - first for _, _, first, end in group)


@dataclass(frozen=True)
class EncodedRows:
    """The rows of one batch, and what was left out of them."""

    keys: Floats
    values: NDArray[np.int64]
    references: References
    seen: int  # rows before any was left out
    dropped_loss: float = 0.0  # what the model pays for the tokens of those left out, in nats


def encode_group(
    encoder: Encoder, windows: KeyWindows | KeyPairs, group: list[Window], namespace: str, max_probability: float = 1.0
) -> EncodedRows:
    """The rows of one batch: the key at each position, the token after it, and where that is."""
    batch = windows.batch(group)
    keys, losses = encoder(batch, losses=max_probability < 1)
    real = batch["targets"] != IGNORED
    rows = keys[real.to(keys.device)].float().cpu().numpy()
    values, references = batch["targets"][real].numpy(), windows.references(group, namespace)
    if losses is None:
        return EncodedRows(rows, values, references, len(rows))
    paid = losses[real.to(losses.device)].double().cpu().numpy()
    kept = paid >= -np.log(max_probability)
    references = References(references.sources, references.which[kept], references.positions[kept])
    return EncodedRows(rows[kept], values[kept], references, len(rows), float(paid[~kept].sum()))


def encode_text(encoder: Encoder, tokenizer: Any, text: str, context: int) -> Floats:
    """The key of the end of a text, (1, width), which is read as the beginning of a document, its last part if long.

    A model that translates reads "source ||| beginning of its translation", or the source alone.
    """
    import torch

    from mnemic.data.encoding import start_and_end

    if encoder.translates:
        return _encode_pair(encoder, tokenizer, text, context)
    start, _ = start_and_end(tokenizer)
    tokens = [start, *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
    ids = torch.tensor([tokens[-context:] if context else tokens])
    batch = {
        "input_ids": ids,
        "targets": torch.full_like(ids, IGNORED),
        "document_starts": torch.zeros_like(ids, dtype=torch.bool),
        "attention_mask": torch.ones_like(ids),
    }
    with encoder.reading():
        return encoder(batch)[0][:, -1].float().cpu().numpy()


def _encode_pair(encoder: Encoder, tokenizer: Any, text: str, context: int) -> Floats:
    source, _, target = text.partition(BETWEEN)
    pair = Pair(Document("source", source.strip()), Document("target", target.strip()))
    pairs = tokenize_pairs(lambda: [pair], tokenizer)
    longest = int(pairs.lengths.max())
    if context and longest > context:
        raise UsageError(f"the text has {longest} tokens on a side, and the store was made of {context} at most")
    batch = PairBatches(pairs, 1, longest, epochs=1).batch(np.array([0]))
    with encoder.reading():
        return encoder(batch)[0][:, -1].float().cpu().numpy()  # what predicts the end token has read all before it


def what_is_left_out(corpus: Corpus | str | Path, split: str) -> str:
    """A sentence if a split of a plain file or folder is not all of its text, which its owner may not expect."""
    source = str(corpus)
    if split == WHOLE or not isinstance(corpus, str | Path) or source in CORPORA:
        return ""
    if not Path(source).expanduser().exists():
        return ""
    if type(opened := open_corpus(source)) is not Corpus:  # of several languages: each text is there twice
        return ""
    whole = sum(len(document.text) for document in opened.documents(WHOLE))
    read = sum(len(document.text) for document in opened.documents(split))
    if read >= whole:
        return ""
    return f"{source}: the split {split!r} is read, {read / whole:.0%} of its text; with split = 'all' all of it is"


def window_of(model: Any, window: int | None, min_context: int | None) -> tuple[int, int]:
    """The window and the context that are asked for, or what suits the model."""
    from mnemic.train.objectives import check_length, model_kind

    if model_kind(model) == "seq2seq":
        raise UsageError(f"{type(model).__name__} translates: it reads pairs, not windows of a text")
    window = _usual_window(model) if window is None else window
    check_length(model, window, "window")
    context = window // 2 if min_context is None else min_context
    if context >= window:
        raise UsageError(f"min_context = {context}: expected less than window = {window}")
    return window, context


def _usual_window(model: Any) -> int:
    return min(USUAL_WINDOW, positions(model) or USUAL_WINDOW)
