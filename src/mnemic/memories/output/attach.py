"""The output memory listens to the keys of a model's contexts and takes part in its softmax."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from mnemic.errors import UnsupportedModel, UsageError
from mnemic.hf.anatomy import Places
from mnemic.hf.entrance import Entrance
from mnemic.hf.keys import OUTPUT, Ear, by_token
from mnemic.hf.losses import IGNORED
from mnemic.hf.reading import starts_being_read
from mnemic.memories.base import Handle, Masses, Reading
from mnemic.memories.output import layer, logits
from mnemic.memories.output.config import OutputMemory
from mnemic.memories.output.gate import Gate
from mnemic.memories.output.gathering import whole_batch
from mnemic.memories.output.layer import NOTHING, Mass, Own, precise
from mnemic.memories.output.searching import Search, SearchedStore, followed, nearest
from mnemic.memories.output.state import LongTerm, Previous, Riding
from mnemic.memories.output.testing import Grid, Piece, Seen, Survey

_SIMILARITY = {"ip": "dot", "l2": "distance"}  # of what a store compares by


class Attached(Handle):
    """An output memory in one model."""

    config: OutputMemory
    changes_keys = False

    def __init__(self, config: OutputMemory, places: Places) -> None:
        super().__init__(config)
        self._key_ear = Ear.at_key(places, config.key)
        self._head_ear = Ear.at_key(places, OUTPUT)
        self._head_part = (places.head,)  # in a tuple, or torch would make it a part of the memory
        self._stack_part = (places.stack if places.decoder is None else places.decoder,)
        self._decoder_ear = Ear.at_decoder(places.decoder) if places.decoder is not None else None
        self._on, self._plain = True, False
        self._survey: tuple[Grid, list[Survey]] | None = None
        self.gate = Gate() if config.retrieve < 1 else None
        self._store: SearchedStore | None = None

    @classmethod
    def attach(cls, config: OutputMemory, places: Places, entrance: Entrance) -> Self:  # type: ignore[override]
        if places.anatomy.kind == "masked" or places.head is None:
            raise UnsupportedModel(
                "an output memory stores contexts with the tokens that followed them, and this model predicts none: "
                "use a causal or a sequence-to-sequence model with its head"
            )
        if places.decoder is not None and (config.long or config.training in ("previous", "consecutive")):
            raise UsageError(
                "pairs do not go on from one to the next: for a model that translates set long = 0 and training to "
                "local, batch or none"
            )
        return cls(config, places)

    @property
    def connected(self) -> bool:
        return self._store is not None

    def connect(self, store: SearchedStore) -> None:
        """Gives the memory the store that its config names."""
        similarity, metric = self.config.similarity, store.config.metric
        if metric not in _SIMILARITY:
            raise UsageError(f"the store compares by {metric!r}: OutputMemory needs one with metric = 'ip' or 'l2'")
        if similarity not in ("auto", _SIMILARITY[metric]):
            wanted = "ip" if similarity == "dot" else "l2"
            raise UsageError(
                f"the store compares by {metric!r} and OutputMemory by {similarity!r}: set similarity = "
                f"{_SIMILARITY[metric]!r}, or build a store with metric = {wanted!r}"
            )
        if self.config.follow and store.config.keys == "codes":
            raise UsageError(
                "the store keeps codes in place of keys, and rows that are followed are compared by their keys: set "
                "follow = 0, or build it with keys = 'float16'"
            )
        self.config, self._store = self.config.changed(similarity=_SIMILARITY[metric]), store

    def _checkpoints(self) -> bool:
        (stack,) = self._stack_part
        return any(getattr(part, "gradient_checkpointing", False) for part in stack.modules())

    def switch(self, on: bool) -> None:
        self._on = on

    def detach(self) -> None:
        self.switch(False)
        for ear in (self._key_ear, self._head_ear, self._decoder_ear):
            if ear is not None:
                ear.close()

    def check_training(self, config: Any, kind: str) -> None:
        memory = self.config
        if memory.external is not None:
            raise UsageError(
                "a store's rows are of the weights as they are, and training changes these: train without `external`, "
                "then build a store and give the model a memory with it"
            )
        if memory.training in ("local", "previous", "consecutive") and not memory.local:
            raise UsageError(
                f"OutputMemory.local = False leaves training = {memory.training!r} without memory: set local = True, "
                "or training = 'batch' or 'none'"
            )
        if memory.training == "consecutive" and not (config.batching == "consecutive" and config.consecutive > 1):
            raise UsageError(
                "OutputMemory.training = 'consecutive' needs the earlier segments of a text in the batch: train with "
                "batching = consecutive and consecutive = 4, say"
            )
        if memory.training == "previous" and config.batching != "documents":
            raise UsageError(
                "OutputMemory.training = 'previous' needs rows that read on from batch to batch: train with "
                "batching = documents"
            )

    def begin_step(self, step: int, steps: int) -> None:
        self._plain = step <= self.config.plain_start * steps

    def new_state(self, rows: int) -> LongTerm | Previous | None:
        (head,) = self._head_part
        device = next(head.parameters()).device  # type: ignore[union-attr]
        if self.training:
            return Previous(rows, device) if self.config.training == "previous" else None
        return LongTerm(self.config.long, rows, device) if self.config.long else None

    # The losses of given targets

    def token_losses(self, masses: Masses, reading: Reading) -> tuple[Tensor, Any]:
        if not self._on or (self.training and (self._plain or self.config.training == "none")):
            losses, _, outputs = masses(**reading.inputs)
            return losses, outputs
        searches: list[Search] = []
        begin = None if self.training else lambda states: searches.append(self._begin_search(states, reading.targets))
        with self._key_ear.listening(begin) as heard:
            losses, normalisers, outputs = masses(**reading.inputs)
        piece = self._piece(by_token(heard[-1], *reading.targets.shape), reading)
        if self.training and losses.requires_grad and not piece.keys.requires_grad and self._checkpoints():
            raise UsageError(
                "gradient checkpointing gives the memory no gradient as it is: "
                "model.gradient_checkpointing_enable({'use_reentrant': False})"
            )
        if self.training:
            losses = layer.joint_loss(losses, normalisers, self._mass_in_training(piece, reading))
        else:
            losses = self._tested(losses, normalisers, piece, searches[-1], reading)
        return losses.masked_fill(reading.targets == IGNORED, 0), outputs

    def _piece(self, keys: Tensor, reading: Reading) -> Piece:
        """The tokens of a batch: what follows each is its target, or the next token of the same document."""
        targets, starts = reading.targets, reading.document_starts
        starts = torch.zeros_like(targets, dtype=torch.bool) if starts is None else starts.bool()
        values = targets
        if self._decoder_ear is None and (ids := reading.inputs.get("input_ids")) is not None:
            mask = reading.inputs.get("attention_mask")
            values = torch.where(targets == IGNORED, _following(ids, mask, starts), targets)
        return Piece(keys, values.masked_fill(values == IGNORED, NOTHING), starts.long().cumsum(1))

    def _mass_in_training(self, piece: Piece, reading: Reading) -> Mass:
        config, targets, documents = self.config, reading.targets, piece.documents
        pairs = piece if config.memory_gradient else dataclasses.replace(piece, keys=piece.keys.detach())
        if config.training == "batch":
            texts = 1
            pairs, sight = whole_batch(pairs, config.local_dropout if config.local else 1.0)
        else:
            together = 1
            if config.training == "consecutive" and reading.streams is not None:
                together = _rows_together(reading.streams)
                last = documents[:, -1].view(-1, together).cumsum(1) - documents[:, -1].view(-1, together)
                documents = documents + last.reshape(-1, 1)
            texts = len(documents) // together
            sight = Own(documents.reshape(texts, -1))
        queries, keys = layer.comparable(piece.keys, pairs.keys, config.similarity)
        queries, keys = (t.reshape(texts, -1, t.shape[-1]) for t in (queries, keys))
        found = layer.mass(queries, keys, targets.reshape(texts, -1), pairs.values.reshape(texts, -1), sight)
        found = Mass(found.all.view_as(targets), found.target.view_as(targets))
        if config.training == "previous" and (state := (reading.state or {}).get("output")) is not None:
            found = found + state.mass(piece.keys, targets, documents, config.similarity)
            state.replace(piece.keys, piece.values, documents)
        return found

    def _begin_search(self, states: Tensor, targets: Tensor) -> Search:
        """Asks the store as soon as the keys are known."""
        keys = precise(by_token(states, *targets.shape))
        asked = self._worth_asking(keys, targets != IGNORED)
        store, config = self._store, self.config
        if store is None or not (config.joint or config.weight or self._survey):
            return Search(asked, lambda: None, overlap=False)
        return Search(asked, lambda: followed(store, config, keys, asked, targets), config.overlap)

    def _tested(self, losses: Tensor, normalisers: Tensor, piece: Piece, search: Search, reading: Reading) -> Tensor:
        """The losses with the memories of testing: local, long-term and external."""
        state, targets = (reading.state or {}).get("output"), reading.targets
        documents = piece.documents if state is None else piece.documents + state.document[:, None]
        piece = Piece(precise(piece.keys), piece.values, documents)
        scored, overlap = targets != IGNORED, _leading(targets == IGNORED)
        seen = Seen(self.config, piece, targets, scored, overlap, state, search)
        if self._survey is not None:
            grid, surveys = self._survey
            surveys.append(Survey.of(seen, losses, normalisers, grid))
        else:
            losses = self._combined(losses, normalisers, seen)
        if state is not None:
            state.append(piece.keys, piece.values, documents, _new(reading, overlap))
        return losses

    @contextlib.contextmanager
    def surveying(self, grid: Grid) -> Iterator[list[Survey]]:
        """Within this context all that is read when testing is surveyed; the losses are the model's own."""
        config, surveys = self.config, list[Survey]()
        self.config = config.changed(long=max(grid.longs, default=0), k=max(grid.ks))
        self._survey = grid, surveys
        try:
            yield surveys
        finally:
            self.config, self._survey = config, None

    def _combined(self, losses: Tensor, normalisers: Tensor, seen: Seen) -> Tensor:
        config, tau, mix_tau = self.config, self.config.temperature, self.config.mix_temperature
        if config.joint and (memory := layer.together(seen.recent(tau), seen.external(tau))) is not None:
            losses = layer.joint_loss(losses, normalisers, memory)
        if config.weight:
            apart = config.recent_weight is not None and self.connected and config.recent_temperature
            memory = layer.together(seen.recent(apart or mix_tau), seen.external(mix_tau), config.recent_weight)
            if memory is not None:
                losses = layer.mixed_loss(losses, memory, config.weight)
        return losses

    def _worth_asking(self, keys: Tensor, scored: Tensor) -> Tensor:
        """For which of the scored tokens (B, T) the store is searched; for a survey, which teaches the gate, all."""
        if self.gate is None or self._survey is not None or not self.connected:
            return scored
        return scored & self.gate(keys)

    # The logits of a forward

    def outputs(self, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        if not self._on:
            return forward(**inputs)
        inputs = dict(inputs)
        labels, tuples = inputs.get("labels"), inputs.pop("return_dict", None) is False
        if self._decoder_ear is None:  # an encoder-decoder makes its inputs of them
            inputs.pop("labels", None)
        with self._key_ear.listening() as keys, self._head_ear.listening() as hidden, self._reading(inputs) as tokens:
            result = forward(**inputs)
        if not tokens:
            raise UsageError("an output memory stores tokens, which embeddings do not tell: give the model input_ids")
        shape = tokens[-1].shape
        normalisers = self._normalisers(result.logits, by_token(hidden[-1], *shape))
        result.logits = self._with_memory(result, normalisers, by_token(keys[-1], *shape), tokens[-1], inputs)
        if labels is not None:
            result.loss = _mean_loss(result.logits, labels, self._decoder_ear is None, inputs.get("num_items_in_batch"))
        return result.to_tuple() if tuples else result

    @contextlib.contextmanager
    def _reading(self, inputs: dict[str, Any]) -> Iterator[list[Tensor]]:
        """The tokens of which each next one is predicted, once the model has read them."""
        if self._decoder_ear is None:
            yield [inputs["input_ids"]] if inputs.get("input_ids") is not None else []
        else:
            with self._decoder_ear.listening() as heard:
                yield heard

    def _normalisers(self, scores: Tensor, hidden: Tensor) -> Tensor:
        """The logarithm of the softmax's normaliser, (B, T); that of its head if the softmax is adaptive."""
        (head,) = self._head_part
        if hasattr(head, "normalisers"):
            return head.normalisers(hidden[:, -scores.shape[1] :])  # type: ignore
        return precise(scores).logsumexp(-1)

    def _with_memory(
        self, result: Any, normalisers: Tensor, keys: Tensor, tokens: Tensor, inputs: dict[str, Any]
    ) -> Tensor:
        """The logits of a forward, which may be of the last tokens only, with what the memory holds."""
        mask = inputs.get("attention_mask" if self._decoder_ear is None else "decoder_attention_mask")
        starts = starts_being_read()
        starts = torch.zeros_like(tokens, dtype=torch.bool) if starts is None else starts.bool()
        piece = Piece(keys, _following(tokens, mask, starts, last=0), starts.long().cumsum(1))
        pairs, documents = self._with_past(piece, tokens, inputs.get("past_key_values"), result)
        kept = result.logits.shape[1]
        queries = precise(keys[:, -kept:])
        found = []
        if self.config.local:
            found.append(logits.of_recent(queries, documents[:, -kept:], pairs, self.config.similarity))
        if self._store is not None:
            asked = self._worth_asking(queries, torch.ones_like(documents[:, -kept:], dtype=torch.bool))
            found.append(logits.of_store(asked, nearest(self._store, self.config, queries[asked])))
        return logits.with_memory(result.logits, normalisers, found, self.config)

    def _with_past(self, piece: Piece, tokens: Tensor, cache: Any, result: Any) -> tuple[Piece, Tensor]:
        """What was read before, from the KV cache, and the piece, which is added to it; the documents of the piece."""
        pairs, documents, riding = piece, piece.documents, Riding.of(cache)
        if riding is not None and riding.get_seq_length():
            past = riding.past(tokens[:, 0])
            documents = documents + past[2][:, -1:]
            new = (piece.keys, piece.values, documents)
            pairs = Piece(*(torch.cat([old, more], 1) for old, more in zip(past, new, strict=True)))
        if (riding := Riding.join(result.get("past_key_values"))) is not None:
            riding.keep(piece.keys, piece.values, documents)
        return pairs, documents


def _following(ids: Tensor, mask: Tensor | None, starts: Tensor, last: int = NOTHING) -> Tensor:
    """The token after each, (B, T); NOTHING after padding and at a document's end. After the last one comes `last`."""
    values = F.pad(ids[:, 1:], (0, 1), value=last)
    ends = F.pad(starts[:, 1:], (0, 1), value=False)
    if mask is not None and mask.ndim == 2:
        real = mask[:, -ids.shape[1] :].bool()
        ends = ends | ~real | ~F.pad(real[:, 1:], (0, 1), value=True)
    return values.masked_fill(ends, NOTHING)


def _leading(marks: Tensor) -> Tensor:
    """How many of the first marks of each row are true, (B,)."""
    return marks.long().cumprod(1).sum(1)


def _new(reading: Reading, overlap: Tensor) -> Tensor:
    """Which tokens were not read before, as context of another window, and are no padding: (B, T)."""
    places = torch.arange(reading.targets.shape[1], device=overlap.device)
    new = places >= overlap[:, None]
    mask = reading.inputs.get("attention_mask")
    return new if mask is None else new & mask.bool()


def _rows_together(streams: Tensor) -> int:
    """How many rows belong to each stream: the same number for each, one after the other."""
    together = int((streams == streams[0]).sum())
    if len(streams) % together or not (streams.view(-1, together) == streams.view(-1, together)[:, :1]).all():
        raise UsageError("a batch of consecutive segments has the same number of rows of each text, in order")
    return together


def _mean_loss(scores: Tensor, labels: Tensor, shift: bool, items: Any) -> Tensor:
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED) if shift else labels
    losses = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return losses / (items if items is not None else (targets != IGNORED).sum())
