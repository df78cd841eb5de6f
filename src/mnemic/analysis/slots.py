"""Which slots of a product-key memory a text reads: found, and chosen to learn a new text (arXiv 2510.15103).

To teach a model a new text without harm to what it knows, only those slots learn that the new text reads and other
texts do not. Slots are ranked by tf-idf:

    tf_i = reads of slot i on the new text / all reads there
    idf_i = log((B + 1) / (B_i + 1))     B batches of background text, of which B_i read slot i

The paper ranks the slots of each batch anew; here they are chosen once, for all of the new text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mnemic.data import Corpus, Document, SlidingWindows, open_corpus
from mnemic.errors import UsageError
from mnemic.evaluate.config import EvaluateConfig
from mnemic.evaluate.evaluation import Text
from mnemic.evaluate.masked import hidden_windows
from mnemic.evaluate.perplexity import read_documents
from mnemic.hf.positions import positions
from mnemic.train.objectives import Batch, check_length, check_vocabulary, make_objective, model_kind
from mnemic.train.state import untouched

WINDOW = 512
SHOWN = 5  # tokens that are named for a slot
OTHER = "[mem]"  # what stands for a token of another memory


@dataclass(frozen=True)
class SlotUse:
    """A slot of a layer: how often a text read it, with what weight in all, and in the places of which tokens most.

    `tokens` are (text, reads), the most frequent first.
    """

    layer: int
    slot: int
    reads: int
    weight: float
    tokens: list[tuple[str, int]]


def find_slots(
    model: Any,
    tokenizer: Any,
    text: str | Document | Corpus,
    most: int = 20,
    *,
    split: str = "all",
    window: int | None = None,
    batch_size: int = 8,
    max_tokens: int | None = None,
) -> list[SlotUse]:
    """The slots that a text reads with the most weight, of all layers with product keys; the text is read twice.

    text: the text itself, or a corpus (`mnemic.open_corpus`), of which `split` is read.

    >>> mnemic.find_slots(model, tokenizer, "The capital of France is Paris.", most=5)
    """
    if most < 1:
        raise UsageError(f"find_slots(most={most}): expected 1 or more")
    reader = SlotReader(model, tokenizer, window, batch_size)
    counts = Counts({number: str(number) for number in reader.handle.numbers}, reader.handle.config.slots)
    reader.read(text, counts, split, max_tokens=max_tokens)
    ranked = [
        (-weight, number, slot)
        for number in reader.handle.numbers
        for slot, weight in _heaviest(counts.weights[str(number)], most)
    ]
    best = [(number, slot) for _, number, slot in sorted(ranked)[:most]]
    tokens = SlotTokens(best)
    reader.read(text, tokens, split, max_tokens=max_tokens)
    return [
        SlotUse(
            number,
            slot,
            int(counts.reads[str(number)][slot]),
            counts.weights[str(number)][slot].item(),
            [(_shown(tokenizer, token), times) for token, times in tokens.most_common(number, slot)],
        )
        for number, slot in best
    ]


def choose_slots(
    model: Any,
    tokenizer: Any,
    text: str | Document | Corpus,
    background: str | Path | Corpus,
    most: int = 500,
    *,
    split: str = "train",
    window: int | None = None,
    batch_size: int = 8,
    batches: int | None = 1000,
) -> dict[int, list[int]]:
    """The slots of each table that `text` reads more than background text does, by layer, the best first.

    text: the new text itself, or a corpus, of which `split` is read; background: a corpus (a name, a path or a Corpus)
    of what the model is to remember, of which `split` is read, `batches` batches at most. A slot that every background
    batch reads is never chosen, so that there may be fewer than `most`.

    >>> slots = mnemic.choose_slots(model, tokenizer, "Mnemosyne is a titan.", "stdlib", most=100)
    >>> model.memory.product_keys.learn_only(slots)
    >>> mnemic.train(model, tokenizer, new_corpus, trainable="slots")
    """
    if most < 1:
        raise UsageError(f"choose_slots(most={most}): expected 1 or more")
    reader = SlotReader(model, tokenizer, window, batch_size, hidden=True)
    new, old = reader.counts(), reader.counts()
    reader.read(text, new, split)
    reader.read(open_corpus(str(background)) if isinstance(background, str | Path) else background, old, split, batches)
    chosen = {}
    for name in new.reads:
        scores = tf_idf(new.reads[name], old.batches[name], old.count)
        rows = reader.handle.tables[name].rows
        if rows is not None:
            scores = scores.masked_fill(rows.cpu() < 0, 0)  # what has no value cannot learn
        chosen[name] = [slot for slot, _ in _heaviest(scores, most)]
    return {number: chosen[reader.handle.table_name(number)] for number in reader.handle.numbers}


def tf_idf(reads: Tensor, batches: Tensor, count: int) -> Tensor:
    """tf times idf of each slot: how often the new text read it, and how many of `count` background batches did."""
    frequency = reads.double() / max(int(reads.sum()), 1)
    return frequency * torch.log((count + 1) / (batches.double() + 1))


def _heaviest(worth: Tensor, most: int) -> list[tuple[int, float]]:
    """The places of the largest numbers above 0, and these; the first of equals first."""
    values, places = worth.sort(descending=True, stable=True)
    return [
        (place, value) for place, value in zip(places[:most].tolist(), values[:most].tolist(), strict=True) if value > 0
    ]


def _shown(tokenizer: Any, token: int) -> str:
    return OTHER if token < 0 else str(tokenizer.decode([token]))


class Counts:
    """How often, with what weight and in how many batches the slots of each table were read; `names`: by layer."""

    def __init__(self, names: dict[int, str], slots: int) -> None:
        self.names, self.count = names, 0
        self.reads = {name: torch.zeros(slots, dtype=torch.int64) for name in names.values()}
        self.weights = {name: torch.zeros(slots, dtype=torch.float64) for name in names.values()}
        self.batches = {name: torch.zeros(slots, dtype=torch.int64) for name in names.values()}
        self._now = {name: torch.zeros(slots, dtype=torch.bool) for name in names.values()}

    def begin(self, batch: Batch) -> None:
        """The model is going to read a batch."""
        self.count += 1

    def add(self, layer: int, slots: Tensor, weights: Tensor) -> None:
        """Counts what tokens read in a layer."""
        name, places = self.names[layer], slots.detach().flatten().cpu()
        self.reads[name].index_add_(0, places, torch.ones_like(places))
        self.weights[name].index_add_(0, places, weights.detach().flatten().double().cpu())
        self._now[name][places] = True

    def end(self) -> None:
        """The model has read the batch: two layers that read one table read it once."""
        for name, read in self._now.items():
            self.batches[name] += read
            read.zero_()


class SlotTokens:
    """In the places of which tokens single slots were read, and how often."""

    def __init__(self, slots: list[tuple[int, int]]) -> None:
        self._counts: dict[tuple[int, int], dict[int, int]] = {one: {} for one in slots}
        self._wanted = {layer: torch.tensor([s for number, s in slots if number == layer]) for layer, _ in slots}
        self._batch: Batch = {}

    def begin(self, batch: Batch) -> None:
        """The model is going to read a batch."""
        self._batch = batch

    def add(self, layer: int, slots: Tensor, weights: Tensor) -> None:
        """Counts what tokens read in a layer."""
        if layer not in self._wanted:
            return
        ids = token_ids(self._batch, len(slots))
        slots = slots.detach().cpu().flatten(1)
        for token, reads in zip(*torch.isin(slots, self._wanted[layer]).nonzero(as_tuple=True), strict=True):
            counts = self._counts[layer, int(slots[token, reads])]
            counts[int(ids[token])] = counts.get(int(ids[token]), 0) + 1

    def end(self) -> None:
        """The model has read the batch."""

    def most_common(self, layer: int, slot: int) -> list[tuple[int, int]]:
        """The tokens in whose places a slot was read most, and how often."""
        return sorted(self._counts[layer, slot].items(), key=lambda pair: (-pair[1], pair[0]))[:SHOWN]


def token_ids(batch: Batch, count: int) -> Tensor:
    """The ids of the `count` tokens that a layer reads of a batch, -1 for what another memory puts before each row."""
    ids, real = batch["input_ids"].cpu(), batch["attention_mask"].bool().cpu()
    before, rest = divmod(count - int(real.sum()), len(ids))
    if before < 0 or rest:
        return torch.full((count,), -1)
    return torch.cat([ids.new_full((len(ids), before), -1), ids], 1)[
        torch.cat([real.new_ones(len(ids), before), real], 1)
    ]


class SlotReader:
    """Reads texts with a model that has product keys, and tells a listener which slots are read for each batch.

    Causal models read as `evaluate` does; others windows side by side, in which a masked model has tokens hidden as in
    training if `hidden`.
    """

    def __init__(
        self, model: Any, tokenizer: Any, window: int | None = None, batch_size: int = 8, hidden: bool = False
    ) -> None:
        self.handle: Any = getattr(getattr(model, "memory", None), "product_keys", None)
        if self.handle is None:
            raise UsageError("slots are those of product keys: give the model some, see ProductKeys")
        if getattr(model.config, "is_encoder_decoder", False):
            raise UsageError(f"{type(model).__name__} reads pairs of texts: slots are counted on plain text only")
        check_vocabulary(model, tokenizer)
        most = positions(model)
        self.window = window or model.memory.segment or (WINDOW if most is None else min(WINDOW, most))
        check_length(model, self.window, "window")
        self.model, self.tokenizer, self.batch_size, self.hidden = model, tokenizer, batch_size, hidden
        self.kind = kind_of(model)

    def counts(self) -> Counts:
        """New counts of each table."""
        return Counts({n: self.handle.table_name(n) for n in self.handle.numbers}, self.handle.config.slots)

    def read(
        self,
        text: str | Document | Corpus,
        listener: Any,
        split: str = "all",
        batches: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """Reads a text, or the `split` of a corpus, `batches` batches of it at most."""
        if isinstance(text, str | Document):
            document = text if isinstance(text, Document) else Document("text", text)
            text, split = Corpus("the text", {}, lambda: [document]), "all"
        config = EvaluateConfig(window=self.window, batch_size=self.batch_size, split=split, max_tokens=max_tokens)
        device = next(self.model.parameters()).device
        with untouched(self.model), self.handle.listening(listener):
            for batch, forward in islice(self._batches(Text(text, self.tokenizer, config), config), batches):
                listener.begin(batch)
                forward({name: tensor.to(device) for name, tensor in batch.items()})
                listener.end()

    def _batches(self, text: Text, config: EvaluateConfig) -> Iterator[tuple[Batch, Any]]:
        """Each batch, and what reads it."""
        if self.kind == "causal":
            objective, batches = read_documents(self.model, self.tokenizer, text, config)
            for batch, carry in batches:
                yield batch, lambda given, carry=carry: objective.losses(given, carry)
        elif self.kind == "masked" and self.hidden:
            objective = make_objective("masked", self.model, self.tokenizer, config.seed)
            for batch, _ in hidden_windows(text.tokens, config, objective):
                yield batch, lambda given: objective.losses(given, None)
        else:
            for batch in SlidingWindows(text.tokens, config.window, config.window, config.batch_size):
                yield batch, self._forward

    def _forward(self, batch: Batch) -> Any:
        return self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])


def kind_of(model: Any) -> str | None:
    """ "causal" or "masked"; None for a model without a language-model head, such as a classifier."""
    try:
        return model_kind(model)
    except UsageError:
        return None
