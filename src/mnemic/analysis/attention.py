"""Attention maps of a model with memory tokens: what is written to them, processed in them and read from them.

    >>> maps = mnemic.attention_maps(model, tokenizer, "some text")
    >>> maps.summary()
    >>> maps.plot("maps.png")

What the maps show, and what is made of it, is section 3.2 and appendix A of Memory Transformer (arXiv 2006.11527).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mnemic.analysis import operations
from mnemic.analysis.attention_plots import draw_maps, draw_summary
from mnemic.data import Document
from mnemic.data.encoding import encode
from mnemic.data.pair_batches import tokenize_pairs
from mnemic.data.pairs import Pair
from mnemic.errors import UsageError, unknown_name
from mnemic.evaluate.translation import written_for
from mnemic.hf.anatomy import Places, find
from mnemic.hf.positions import positions
from mnemic.hf.weights import attention_weights
from mnemic.memories.tokens.blocks import watching
from mnemic.train.objectives import check_vocabulary
from mnemic.train.seq2seq import decoder_start
from mnemic.train.state import untouched

MOST_WEIGHTS = 2**28  # a gigabyte
MOST_WRITTEN = 128  # tokens of a target that is generated

CAUSAL = (
    "The memory stands before the text of a causal model and cannot see it: nothing is written, and what memory tokens "
    "do with each other is the same for every text. Only reading is named as the operation of a layer or head."
)
BEHIND = (
    "Recurrent memory tokens stand before a segment and behind it: rows of the memory are those behind, which go "
    "before the next segment, and columns are the sum of both. Of a longer text the last segment is shown."
)


@dataclass(frozen=True)
class StackMaps:
    """The attention of one stack: `weights` (layers, heads, queries, keys), and the text of each query and each key.

    The first `memory_queries` rows and `memory_keys` columns are memory tokens. There are as many of both, or no rows
    where another stack reads the memory, as a decoder does. In a `causal` stack nobody sees what comes after it; a
    memory that stands `behind` the text, too, has the rows it has there, and its columns of both places added up. A
    memory of another `variant` than the plain one sees otherwise, and is seen otherwise: `seen`.
    """

    weights: Tensor
    queries: Sequence[str]
    keys: Sequence[str]
    memory_queries: int
    memory_keys: int
    causal: bool = False
    behind: bool = False
    variant: str = "plain"

    def __post_init__(self) -> None:
        labels = (len(self.queries), len(self.keys))
        if self.weights.ndim != 4 or self.weights.shape[2:] != labels:
            raise UsageError(
                f"weights of shape {tuple(self.weights.shape)} with {labels[0]} queries and {labels[1]} keys: expected "
                "(layers, heads, queries, keys)"
            )
        if not 0 <= self.memory_keys <= labels[1] or self.memory_queries not in (0, self.memory_keys):
            raise UsageError(
                f"{self.memory_queries} memory tokens among {labels[0]} queries and {self.memory_keys} among "
                f"{labels[1]} keys: expected as many of both, or none among the queries"
            )
        if self.memory_queries > labels[0]:
            raise UsageError(f"{self.memory_queries} memory tokens among {labels[0]} queries: give all of their rows")

    @cached_property
    def blocks(self) -> dict[str, Tensor]:
        """The four blocks of Figure 3, by name: update, write, read, process."""
        return operations.blocks(self.weights, self.memory_queries, self.memory_keys)

    @cached_property
    def measures(self) -> dict[str, Tensor]:
        """How much each head does of each operation, (layers, heads) from 0 to 1; see `mnemic.analysis.operations`."""
        return operations.measures(self.weights, self.memory_queries, self.memory_keys, self.seen)

    @property
    def seen(self) -> Tensor:
        """In how many places each query of a layer sees each key, (layers, queries, keys)."""
        queries, keys = self.memory_queries, self.memory_keys
        found = torch.ones(len(self.weights), *self.weights.shape[2:])
        if self.causal:
            found = found.tril()
        if self.behind:  # its keys before the text, and those behind it up to its own
            found[:, :queries] = 1
            found[:, :queries, :keys] += torch.ones(keys, keys).tril()
        elif self.causal and self.variant != "plain":  # a layer of its own reads all of it; after the last nobody does
            found[:-1, :queries, :keys] = 1
        if self.variant == "bottleneck-skip":
            found[:, queries:] = 0
        reached = (self.weights[:, :, queries:, keys:] > 0).any(1)  # not beyond a sliding window, nor in a bottleneck
        found[:, queries:, keys:] *= reached
        return found

    @property
    def blind(self) -> bool:
        """Whether the memory cannot see the sequence."""
        return self.causal and not self.behind

    @cached_property
    def strengths(self) -> dict[str, Tensor]:
        """The five operations, made comparable: (layers, heads) each."""
        return operations.strengths(self.measures)

    def operations(self) -> list[list[str]]:
        """The name of the strongest operation of each layer's heads; "none" where none is clear."""
        layers, heads = self.weights.shape[:2]
        by_name = {name: value.tolist() for name, value in self.strengths.items()}
        return [
            [self._strongest({name: value[layer][head] for name, value in by_name.items()}) for head in range(heads)]
            for layer in range(layers)
        ]

    def summary(self) -> list[dict[str, Any]]:
        """For each layer, means over its heads: the shares write, process and read, and the strongest operation.

        write and process are shares of what memory tokens attend to (None where no memory token is updated), read is
        the memory's share of what the sequence attends to. "operations" are the strengths of the five.
        """
        rows = []
        for layer in range(len(self.weights)):
            share: dict[str, float | None] = {
                name: self.measures[name][layer].mean().item() for name in ("write", "process", "read")
            }
            strength = {name: value[layer].mean().item() for name, value in self.strengths.items()}
            if not self.memory_queries:
                share["write"] = share["process"] = None
            rows.append({"layer": layer, **share, "operation": self._strongest(strength), "operations": strength})
        return rows

    def _strongest(self, strength: dict[str, float]) -> str:
        """The operation there is most of; where the memory is blind only what the text does with it."""
        return operations.strongest({"read": strength["read"]} if self.blind else strength)


@dataclass(frozen=True)
class AttentionMaps:
    """The maps of a model by stack: "encoder", "decoder" and "cross" (decoder to encoder), or "self" if it has one.

    They are made of plain tensors, wherever those come from: AttentionMaps({"encoder": StackMaps(weights, ...)}).
    """

    stacks: dict[str, StackMaps]

    def __getitem__(self, stack: str) -> StackMaps:
        if stack not in self.stacks:
            raise unknown_name("stack", stack, self.stacks)
        return self.stacks[stack]

    @property
    def with_memory(self) -> dict[str, StackMaps]:
        """The stacks that see the memory: of an encoder and a decoder not the decoder's attention to itself."""
        return {name: maps for name, maps in self.stacks.items() if maps.memory_keys}

    def summary(self) -> dict[str, list[dict[str, Any]]]:
        """How much is written, processed and read in each layer of each stack that sees the memory."""
        return {name: maps.summary() for name, maps in self.with_memory.items()}

    def notes(self) -> list[str]:
        """What must be known to read the figures."""
        stacks = self.with_memory.values()
        found = {CAUSAL: any(maps.blind for maps in stacks), BEHIND: any(maps.behind for maps in stacks)}
        return [note for note, holds in found.items() if holds]

    def plot(self, path: str | Path, stack: str | None = None) -> None:
        """Draws the maps of each layer and head of a stack, the first that sees the memory unless one is named."""
        name = next(iter(self.with_memory), next(iter(self.stacks))) if stack is None else stack
        draw_maps(self[name], name, path)

    def plot_summary(self, path: str | Path) -> None:
        """Draws what is written, processed and read by layer, for each stack that sees the memory."""
        if not self.with_memory:
            raise UsageError("none of these stacks sees a memory, so that there is nothing to sum up")
        draw_summary(self.with_memory, path)


def attention_maps(model: Any, tokenizer: Any, text: str, target: str | None = None) -> AttentionMaps:
    """Reads a text with a model that has memory tokens, and keeps what each head of each layer attends to.

    A sequence-to-sequence model reads `text` as the source and also a target: the one given, or what it writes itself,
    always taking the likeliest token. Rows of its decoder are what it has read when it predicts the next token.
    """
    count, places = _memory_count(model), find(model, model.memory.anatomy)
    check_vocabulary(model, tokenizer)
    if not isinstance(text, str):
        raise UsageError(f"attention maps are of one text, not of a {type(text).__name__}: give one at a time")
    if not text.strip():
        raise UsageError("the text is empty: give one for the model to read")
    device = next(model.parameters()).device
    with untouched(model):
        if places.decoder is None:
            if target is not None:
                raise UsageError(f"target is for sequence-to-sequence models, which {type(model).__name__} is not")
            inputs = {"input_ids": _read(tokenizer, text, places.anatomy.kind == "causal")}
        else:
            inputs = _pair(model, tokenizer, text, target)
        if model.memory.tokens.segment:
            return AttentionMaps({"self": _of_last_segment(model, tokenizer, inputs["input_ids"].to(device), places)})
        _check_size(model, inputs, count, len(places.blocks))
        with watching() as own:
            found = attention_weights(model, **{name: ids.to(device) for name, ids in inputs.items()})
    place = model.memory.tokens.config.place
    before = count if place != "decoder" else 0  # the source
    within = count if place != "encoder" else 0  # the target
    memory = _memory_labels(count)
    source = memory[:before] + _labels(tokenizer, inputs["input_ids"])
    if own:
        name = "self" if places.decoder is None else "encoder"
        found = {name: _with_own(found.get(name), own), **{k: v for k, v in found.items() if k != name}}
    stacks = {}
    for name, weights in found.items():
        if name in ("self", "encoder"):
            seen: Any = {"causal": places.anatomy.kind == "causal", "variant": model.memory.tokens.config.variant}
            stacks[name] = StackMaps(weights, source, source, before, before, **seen)
            continue
        read = memory[:within] + _labels(tokenizer, inputs["decoder_input_ids"])
        if name == "decoder":
            stacks[name] = StackMaps(weights, read, read, within, within, causal=True)
        else:  # rows of the target's memory are of no sequence that reads the source's
            stacks[name] = StackMaps(weights[:, :, within:], read[within:], source, 0, before)
    return AttentionMaps(stacks)


def _of_last_segment(model: Any, tokenizer: Any, ids: Tensor, places: Places) -> StackMaps:
    """The maps of the last segment of a text (1, T) that recurrent memory tokens read; they forget it again."""
    tokens, (*earlier, last) = model.memory.tokens, ids.split(model.memory.tokens.segment, dim=1)
    count = tokens.config.count
    _check_size(model, {"input_ids": last}, 2 * count, len(places.blocks))
    with tokens.forgetting():
        for segment in earlier:
            with tokens.taking_in(1, None):
                model(input_ids=segment, use_cache=False)
        with tokens.taking_in(1, None):
            weights = attention_weights(model, input_ids=last)["self"]
    before, text, behind = weights.split([count, last.shape[1], count], dim=-1)
    folded = torch.cat([before + behind, text], dim=-1)
    rows = torch.cat([folded[:, :, -count:], folded[:, :, count:-count]], dim=2)
    labels = _memory_labels(count) + _labels(tokenizer, last)
    return StackMaps(rows, labels, labels, count, count, causal=True, behind=True)


def _with_own(weights: Tensor | None, own: list[Tensor]) -> Tensor:
    """The weights of a stack with those rows that layers of the memory's own attend with, (B, heads, rows, keys) each.

    A causal model's memory sees itself alone: (B, heads, m, m).
    """
    rows = [layer[0].detach().float().cpu() for layer in own]
    if weights is None:
        return torch.stack(rows)
    weights = weights.clone()
    for number, layer in enumerate(rows):
        weights[number, :, : layer.shape[1]] = 0
        weights[number, :, : layer.shape[1], : layer.shape[2]] = layer
    return weights


def _memory_count(model: Any) -> int:
    """How many memory tokens a model has; UsageError if none are there or they are switched off."""
    memory: Any = getattr(model, "memory", None)
    if not hasattr(memory, "tokens") or not memory.tokens.config.count:
        raise UsageError(
            f"attention maps show what memory tokens do, and this {type(model).__name__} has none: give it some, as in "
            "mnemic.augment(model, mnemic.MemoryTokens(count=10)), and train it"
        )
    if not memory.enabled:
        raise UsageError("the memory is switched off: ask for attention maps outside of disabled()")
    return int(memory.tokens.config.count)


def _memory_labels(count: int) -> list[str]:
    return [f"[mem {number}]" for number in range(1, count + 1)]


def _read(tokenizer: Any, text: str, causal: bool) -> Tensor:
    """The tokens of a text as a document, (1, T); of a causal model without the end, after which nothing is said."""
    ids = [id for _, piece, _ in encode([Document("text", text)], tokenizer) for id in piece]
    return torch.tensor([ids[:-1] if causal else ids])


def _pair(model: Any, tokenizer: Any, text: str, target: str | None) -> dict[str, Tensor]:
    """What the encoder and the decoder read."""
    given = text if target is None else target  # a pair has two sides; what is written does not depend on the other
    pairs = tokenize_pairs(lambda: [Pair(Document("source", text), Document("target", given))], tokenizer)
    source, tokens = (torch.from_numpy(side.astype("int64"))[None] for side in pairs[0])
    if target is not None:
        start = tokens.new_full((1, 1), decoder_start(model))
        return {"input_ids": source, "decoder_input_ids": torch.cat([start, tokens[:, :-1]], dim=1)}
    if not model.can_generate():
        raise UsageError(f"{type(model).__name__} does not write a target by itself: give one")
    greedy = {"max_new_tokens": MOST_WRITTEN, "do_sample": False, "num_beams": 1}
    ((_, written),) = written_for(model, tokenizer, pairs, 1, greedy)
    written = written.cpu()
    ended = written.shape[1] > 1 and written[0, -1].item() == pairs.end_token
    return {"input_ids": source, "decoder_input_ids": written[:, :-1] if ended else written}


def _check_size(model: Any, inputs: dict[str, Tensor], count: int, layers: int) -> None:
    """UsageError if a text is longer than the model's positions, or its maps would not fit into memory."""
    longest, most = max(ids.shape[1] for ids in inputs.values()), positions(model)
    if most is not None and longest > most:
        raise UsageError(
            f"the text has {longest:,} tokens and {type(model).__name__} {most:,} positions: give a shorter text"
        )
    weights = layers * getattr(model.config, "num_attention_heads", 1) * (longest + count) ** 2
    if weights > MOST_WEIGHTS:
        raise UsageError(
            f"the maps of a text of {longest:,} tokens are {weights:,} numbers for a stack: give a shorter text, up to "
            f"{int((MOST_WEIGHTS / weights) ** 0.5 * longest):,} tokens"
        )


def _labels(tokenizer: Any, ids: Tensor) -> list[str]:
    """The text of each token by itself."""
    return [str(tokenizer.decode([id])) for id in ids[0].tolist()]
