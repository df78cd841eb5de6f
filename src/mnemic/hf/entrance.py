"""What goes into a model's stack: vectors put before the input, or around it, and the borders of documents.

The vectors before it (a prefix) are taken out of the output again, and stay in the KV cache as its first entries, so
that beams and batches carry them along like any other token. The sequence keeps its own positions: by position_ids the
prefix stands before position 0 (rotary) or shares the first position (absolute tables, whose room it does not use);
where positions follow the place in the input, distances between tokens do not change. Vectors behind the input (a
suffix) read all of it, go on from the last token's position in the same way, and leave nothing behind.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from mnemic.errors import UsageError
from mnemic.hf import masks, reading
from mnemic.hf.anatomy import Places
from mnemic.hf.caches import pin
from mnemic.hf.positions import prefix_positions, separates_documents, sequence_positions, suffix_positions
from mnemic.hf.prefix import Prefix, Vectors, check_nothing_kept, check_right_padded, check_room
from mnemic.hf.xl import OpenSegment, open_segment

MARK = "mnemic_prefix"  # set on a KV cache or an encoder's output: how many of its first entries are the prefix

_BLIND_TO_PACKING = ("opt", "falcon")  # their masks do not look at position_ids


class Entrance:
    """The hooks on a model's stack (and on the decoder that reads an encoder's output)."""

    def __init__(self, places: Places, around: Entrance | None = None) -> None:
        masks.install()
        self.places = places
        self._around = around  # that of the whole model, if this is a decoder's own
        self._of_decoder: Entrance | None = None
        self.prefix: Prefix | None = None
        self._slides = _slides(places.stack.config)
        self._parameters = list(inspect.signature(places.stack.forward).parameters)
        self._native = "document_starts" in self._parameters
        stack = places.stack
        self._hooks = [
            stack.register_forward_pre_hook(self._enter, with_kwargs=True),
            stack.register_forward_hook(self._leave, with_kwargs=True, always_call=True, prepend=around is not None),
        ]
        if isinstance(pooler := getattr(stack, "pooler", None), nn.Module):
            self._hooks.append(pooler.register_forward_pre_hook(self._pool))
        if "position_ids" not in self._parameters and isinstance(
            table := getattr(stack, "embed_positions", 0), nn.Module
        ):
            self._hooks.append(table.register_forward_pre_hook(self._place, with_kwargs=True))
        if places.decoder is not None:
            self._decoder_parameters = list(inspect.signature(places.decoder.forward).parameters)
            self._hooks += [
                places.decoder.register_forward_pre_hook(self._enter_decoder, with_kwargs=True),
                places.decoder.register_forward_hook(self._leave_decoder, with_kwargs=True, always_call=True),
            ]

    def of_decoder(self) -> Entrance:
        """The entrance of a decoder's own input, within this one's."""
        self._of_decoder = self._of_decoder or Entrance(self.places.of_decoder(), around=self)
        return self._of_decoder

    def remove(self) -> None:
        """Takes the hooks off again."""
        for hook in self._hooks:
            hook.remove()
        if self._of_decoder is not None:
            self._of_decoder.remove()
        self._forget_stopped()

    # -- the stack ---------------------------------------------------------------------------------------------------

    def _enter(self, stack: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        kwargs = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        cache = self._cache(kwargs)
        streams = hasattr(cache, "prefix")  # our own XL cache: it keeps no prefix, so each segment brings its own
        past = cache.get_seq_length() if cache is not None and not streams else 0
        stored = getattr(cache, MARK, 0) if past else 0
        starts = self._starts(kwargs, past)
        rows = self._vectors(kwargs, starts) if past == 0 else None
        added = 0 if rows is None else rows.columns
        if streams and not self._native:
            return (), self._stream_foreign(kwargs, starts, added, cache)
        if rows is not None and rows.behind and not streams:
            check_nothing_kept(kwargs)
        if not added + stored and (starts is None or self._native):
            return (), self._as_it_is(kwargs, starts, past)
        check_room(kwargs, cache, added)
        return (), self._widened(kwargs, starts, rows, cache if streams else None, past, stored)

    def _starts(self, kwargs: dict[str, Any], past: int) -> torch.Tensor | None:
        """Where documents start: as this forward was told, or the whole model, or by transformers' sign for it."""
        starts = kwargs.pop("document_starts", None)
        starts = reading.starts_being_read() if starts is None else starts
        if starts is None and self.prefix is not None and not past:
            starts = self._packed(kwargs)
        return None if starts is None else starts.bool()

    def _as_it_is(self, kwargs: dict[str, Any], starts: torch.Tensor | None, past: int) -> dict[str, Any]:
        """The inputs of a forward with nothing around them."""
        if past and self.prefix is not None and self.prefix.rows(len(_inputs(kwargs)), None).columns:
            raise UsageError(
                "this KV cache was filled without the memory: start a new one, or read on within disabled()"
            )
        self._begin(None, kwargs)
        return kwargs | ({"document_starts": starts} if self._native else {})

    def _widened(
        self,
        kwargs: dict[str, Any],
        starts: torch.Tensor | None,
        rows: Vectors | None,
        xl_cache: Any,
        past: int,
        stored: int,
    ) -> dict[str, Any]:
        """The inputs with what is put around them, and with room in mask and positions for what a cache keeps of it."""
        added, behind = (0, 0) if rows is None else (rows.columns, rows.behind)
        if added and self.places.anatomy.positions == "relative":
            check_right_padded(kwargs.get("attention_mask"), type(self.places.stack).__name__)
        inputs = _inputs(kwargs)
        batch, length = inputs.shape[:2]
        if xl_cache is None:
            seen = past - stored
            kwargs["position_ids"] = sequence_positions(self.places, kwargs, starts, batch, length, seen, inputs.device)
            if kwargs.get("attention_mask") is None and not past:  # or transformers would look for packed rows
                kwargs["attention_mask"] = inputs.new_ones(batch, length, dtype=torch.long)
        if (mask := kwargs.get("attention_mask")) is not None:
            kwargs["attention_mask"] = torch.nn.functional.pad(mask, (added + stored, behind), value=1)
        if rows is not None:
            self._surround(kwargs, rows, batch)
        if xl_cache is not None:
            change = self._streaming(kwargs, starts, batch, rows, xl_cache)
        else:
            change = self._mask_change(starts, batch, added or stored, past, inputs.device, rows)
        self._begin(change, kwargs, rows, xl_cache, batch)
        if self.prefix is not None and self.prefix.by_key:
            kwargs["attention_mask"] = kwargs["attention_mask"][:, None, None].bool()
        if "position_ids" not in self._parameters:
            kwargs.pop("position_ids", None)
        if self.prefix is not None and self.prefix.fixed:
            kwargs["fixed_memory"] = True
        return kwargs

    def _leave(self, stack: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        call = self._end()
        if call is not None and isinstance(getattr(output, "past_key_values", None), OpenSegment):
            output.past_key_values = call.xl_cache
        if call is None or not call.prefix or output is None:
            return output
        if self.places.decoder is not None:
            # the decoder of a sequence-to-sequence model reads the memory beside the sequence
            setattr(output[0], MARK, call.prefix)
            return output
        cache = getattr(output, "past_key_values", None)
        if cache is not None and call.xl_cache is None:
            setattr(cache, MARK, call.prefix)
        if self.prefix is not None and self.prefix.outputs is not None:
            self.prefix.outputs(output[0][:, : call.prefix])
        if call.suffix and self.prefix is not None and self.prefix.written is not None:
            self.prefix.written(output[0][:, -call.suffix :])
        return _without(output, call.prefix, call.suffix)

    def _begin(
        self,
        change: masks.MaskChange | None,
        kwargs: dict[str, Any],
        vectors: Vectors | None = None,
        xl_cache: Any = None,
        batch: int = 0,
    ) -> None:
        self._forget_stopped()
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        token = masks.begin(change) if self._around is None else masks.begin(change, *masks.active())
        outer = reading.current.get()
        shape = (0, 0, 1) if vectors is None else (vectors.columns, vectors.behind, vectors.groups)
        reading.current.set(reading.Call(self, token, outer, *shape, batch, positions, xl_cache, mask))

    def _forget_stopped(self) -> None:
        """Ends a forward of this stack that was stopped by hand: at its beginning and end none is under way."""
        if reading.prefix_read_by(self) is not None:
            reading.current.set(None)
            masks.put_back(())

    def _end(self) -> reading.Call | None:
        call = reading.current.get()
        if call is None or call.entrance is not self:  # refused before it began
            return None
        reading.current.set(call.outer)
        masks.end(call.mask_token)
        if call.xl_cache is not None:
            call.xl_cache.prefix = call.xl_cache.suffix = 0
        return call

    def _vectors(self, kwargs: dict[str, Any], starts: torch.Tensor | None) -> Vectors | None:
        """What is put around the inputs of this forward."""
        if self.prefix is None:
            return None
        return self.prefix.rows(len(_inputs(kwargs)), starts)

    def _surround(self, kwargs: dict[str, Any], rows: Vectors, batch: int) -> None:
        places, m = self.places, rows.before.shape[-2]
        embeds = kwargs.pop("inputs_embeds", None)
        if embeds is None:
            # some stacks scale after looking up and would leave given embeddings unscaled
            embeds = places.embeddings(kwargs["input_ids"]) * (1.0 if places.scales_given else places.scale)
        scale = places.scale if places.scales_given else 1.0
        around = [part if part is None else (part / scale).to(embeds) for part in (rows.prefix, rows.after)]
        before, after = (embeds[:, :0] if part is None else part.expand(batch, -1, -1) for part in around)
        kwargs["input_ids"] = None
        kwargs["inputs_embeds"] = torch.cat([before, embeds, after], dim=1)
        if (kinds := kwargs.get("token_type_ids")) is not None:
            kwargs["token_type_ids"] = torch.nn.functional.pad(kinds, (rows.columns, rows.behind))
        if (positions := kwargs.get("position_ids")) is not None:
            first = prefix_positions(places, m, positions.device).repeat(rows.groups)
            parts = [first.expand(len(positions), -1), positions]
            if rows.behind:  # the mask has a column for each vector around the input
                mask = kwargs.get("attention_mask")
                real = embeds.new_ones(embeds.shape[:2]) if mask is None else mask[:, rows.columns : -rows.behind]
                parts.append(suffix_positions(places, positions, real, rows.behind))
            kwargs["position_ids"] = torch.cat([part.expand(batch, -1) for part in parts], dim=1)

    def _cache(self, kwargs: dict[str, Any]) -> Any:
        """The KV cache of this forward; one that must make room for the prefix is made or prepared here."""
        cache = kwargs.get("past_key_values")
        if self.prefix is None or self.places.anatomy.kind != "causal":
            return cache
        config: Any = self.places.stack.config
        xl_length = getattr(config, "xl_length", 0)
        cached = config.use_cache if kwargs.get("use_cache") is None else kwargs["use_cache"]
        if cache is None and cached and (self._slides or xl_length):
            rows = len(_inputs(kwargs))
            cache = self.places.stack.new_cache(rows) if xl_length else DynamicCache(config=config)  # type: ignore
            kwargs["past_key_values"] = cache
        if cache is not None and self._slides and cache.get_seq_length() == 0:
            pin(cache, self.prefix.rows(len(_inputs(kwargs)), None).columns)
        return cache

    def _packed(self, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Where documents start by transformers' sign for packed rows: positions that jump, without mask and cache."""
        config: Any = self.places.stack.config
        positions = kwargs.get("position_ids")
        if positions is None or config.model_type in _BLIND_TO_PACKING or not separates_documents(self.places):
            return None
        cached = config.use_cache if kwargs.get("use_cache") is None else kwargs["use_cache"]
        if cached or kwargs.get("past_key_values") is not None or kwargs.get("attention_mask") is not None:
            return None
        starts = torch.nn.functional.pad(positions.diff(dim=-1) != 1, (1, 0), value=True)
        return starts.expand(len(_inputs(kwargs)), -1) if starts[:, 1:].any() else None

    # -- the masks ---------------------------------------------------------------------------------------------------

    def _streaming(
        self, kwargs: dict[str, Any], starts: torch.Tensor | None, batch: int, rows: Vectors | None, cache: Any
    ) -> masks.MaskChange | None:
        """With an XL cache the model keeps documents apart by itself; the prefix stands behind the cached keys."""
        rows = rows or Vectors(torch.empty(0, 0))
        cache.prefix, cache.suffix, cache.groups = rows.columns, rows.behind, rows.groups
        begun = None
        if starts is not None:
            kwargs["document_starts"] = torch.nn.functional.pad(starts, (rows.columns, rows.behind))
            begun = kwargs["document_starts"].cumsum(1) > 0 if rows.begun is not None else None
        bias = self._bias(rows.columns, _inputs(kwargs).device)
        if bias is None and begun is None:
            return None
        return masks.MaskChange(self.places.stack.config, rows.columns, bias, first=cache.length, begun=begun)

    def _stream_foreign(
        self, kwargs: dict[str, Any], starts: torch.Tensor | None, added: int, cache: Any
    ) -> dict[str, Any]:
        """The inputs of a stack of transformers that is given our XL cache."""
        if added:
            raise UsageError("memory tokens do not go with an XL cache in this model: leave xl_length at 0")
        stack = self.places.stack
        if stack.training and any(getattr(part, "gradient_checkpointing", False) for part in stack.modules()):
            raise UsageError("gradient checkpointing leaves this model without its cache: set xl_length = 0")
        given = dict(kwargs)
        documents = open_segment(cache, kwargs, starts)
        self._begin(masks.MaskChange(self.places.stack.config, documents=documents), given, xl_cache=cache)
        return kwargs

    def _mask_change(
        self,
        starts: torch.Tensor | None,
        batch: int,
        prefix: int,
        past: int,
        device: torch.device,
        rows: Vectors | None,
    ) -> masks.MaskChange | None:
        bias = self._bias(prefix, device)
        if bias is None and starts is None and not (prefix and self._slides):
            return None
        documents, behind = None, 0 if rows is None else rows.behind
        if starts is not None:
            if past:
                raise UsageError("document_starts needs an empty KV cache: begin with a new one at each segment")
            numbers = starts.cumsum(1)
            last = numbers[:, -1:].expand(-1, behind)
            documents = torch.cat([numbers.new_full((batch, prefix), -1), numbers, last], dim=1)
        begun = documents > 0 if documents is not None and rows is not None and rows.begun is not None else None
        bidirectional = self.places.anatomy.kind != "causal"
        return masks.MaskChange(
            self.places.stack.config,
            prefix,
            bias,
            begun=begun,
            suffix=behind if self._slides else 0,
            documents=documents,
            bidirectional=bidirectional,
        )

    def _bias(self, prefix: int, device: torch.device) -> torch.Tensor | None:
        """What is added to the scores of the prefix: its gates' logarithm, or what hides it while it is off."""
        if not prefix:
            return None
        if self.prefix is None:
            return torch.full((prefix,), -torch.inf, device=device)
        bias = self.prefix.bias()
        return None if bias is None else bias.repeat(prefix // len(bias))

    # -- inside the stack --------------------------------------------------------------------------------------------

    def _place(self, table: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        call = reading.current.get()
        if call is None or call.entrance is not self or call.positions is None:
            return None
        return args, {**kwargs, "position_ids": call.positions[0]}

    def _pool(self, pooler: nn.Module, args: tuple) -> tuple | None:
        call = reading.current.get()
        if call is None or call.entrance is not self or not call.prefix:
            return None
        return (args[0][:, call.prefix :], *args[1:])

    # -- the decoder of a sequence-to-sequence model -----------------------------------------------------------------

    def _enter_decoder(self, decoder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        kwargs = {**dict(zip(self._decoder_parameters, args, strict=False)), **kwargs}
        source, mask = kwargs.get("encoder_hidden_states"), kwargs.get("encoder_attention_mask")
        prefix = 0
        if source is not None:
            marked = getattr(source, MARK, 0)  # the very tensor that left the encoder has a mark; copies need a mask
            prefix = marked if mask is None or mask.ndim != 2 else source.shape[1] - mask.shape[1]
        if prefix and mask is not None:
            check_room({"attention_mask": mask}, None, prefix)
            kwargs["encoder_attention_mask"] = torch.cat([mask.new_ones(len(mask), prefix), mask], dim=1)
        bias = self._bias(prefix, source.device) if source is not None else None
        config: Any = decoder.config
        self._begin(None if bias is None else masks.MaskChange(config, prefix, bias, cross=True), kwargs)
        return (), kwargs

    def _leave_decoder(self, decoder: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        self._end()
        return output


def _slides(config: Any) -> bool:
    """Whether some layers see only a window."""
    kinds = getattr(config, "layer_types", None)
    return "sliding_attention" in kinds if kinds else bool(getattr(config, "sliding_window", None))


def _inputs(kwargs: dict[str, Any]) -> torch.Tensor:
    """The ids (B, T) or embeddings (B, T, d) that a stack is given."""
    found: torch.Tensor = kwargs["input_ids"] if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    return found


def _without(output: Any, first: int, last: int = 0) -> Any:
    """The output of a stack without its first and last positions, so many of each; attention maps keep them."""

    def kept(states: torch.Tensor) -> torch.Tensor:
        return states[:, first : states.shape[1] - last]

    if isinstance(output, tuple):
        hidden = (
            tuple(map(kept, part)) if isinstance(part, tuple) and part and part[0].ndim == 3 else part
            for part in output[1:]
        )
        return (kept(output[0]), *hidden)
    output["last_hidden_state"] = kept(output["last_hidden_state"])
    if output.get("hidden_states") is not None:
        output["hidden_states"] = tuple(map(kept, output["hidden_states"]))
    return output
