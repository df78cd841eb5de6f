"""The attention memory takes part in the self-attention of single layers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from mnemic.errors import UnsupportedModel, UsageError
from mnemic.hf.anatomy import Places
from mnemic.hf.attention import AttentionHook, Heads, probe
from mnemic.hf.entrance import Entrance
from mnemic.hf.losses import IGNORED
from mnemic.hf.reading import groups_being_read, prefix_being_read, starts_being_read, suffix_being_read
from mnemic.hf.xl import new_xl_cache
from mnemic.memories.attention import layer as mathematics
from mnemic.memories.attention.config import KNNAttention
from mnemic.memories.attention.layer import MemoryMix, unit
from mnemic.memories.attention.reading import Forward, tokens_that_are_real
from mnemic.memories.attention.rooms import Rooms
from mnemic.memories.attention.state import State
from mnemic.memories.base import Handle, Reading
from mnemic.memories.texts import READ_ON
from mnemic.memories.within import Within

PENDING = 8  # forwards at most whose gradient may still come
NO_BACKWARD = -1  # the number of the backward pass under way, if there is none
CHANGEABLE = {"k", "size", "dtype", "search", "recall", "external"}  # settings that nothing learned depends on
SCALE = 10.0  # of scores of normalised queries and keys, at first
SPARE = 512  # pairs that a row keeps at least beyond its size, for what the context holds


_forward = Within[Forward]("forward")
_heard = Within[list[Tensor]]("heard")
_observed = Within[list[dict[str, Tensor]]]("observed")
_size = Within[int]("size")


class Attached(Handle):
    """An attention memory in one model."""

    config: KNNAttention

    def __init__(self, config: KNNAttention, places: Places) -> None:
        super().__init__(config)
        self._on = True
        self._stack_part = (places.stack,)
        self._pending: list[Forward] = []  # whose layers run again in the backward pass
        self.shared: State | None = None  # what `read` has read, for all to look into
        self.stored: State | None = None  # what a store has kept, likewise
        if config.xl_length:
            new_xl_cache(places, config.xl_length, 1)  # tells if the model cannot have one
        depth = len(places.blocks)
        self.indices = sorted(config.layers) or config.usual_layers(depth)
        if unknown := [index for index in self.indices if not 0 <= index < depth]:
            raise UsageError(
                f"KNNAttention.layers = {config.layers}: the model has layers 0 to {depth - 1}, not {unknown}"
            )
        self._hooks = {index: AttentionHook(places, index, partial(self._attend, index)) for index in self.indices}
        self.layers = nn.ModuleDict()
        try:
            probe(places, list(self._hooks.values()), config.distance)
            if config.mix == "joint" and not all(hook.plain_scores for hook in self._hooks.values()):
                raise UnsupportedModel(
                    f"{type(places.stack).__name__} changes the scores of its attention, which one softmax with the "
                    "memory's would need as they are: set mix to gate or tanh"
                )
        except UnsupportedModel:
            self.detach()
            raise
        weight = next(places.stack.parameters())
        for index, hook in self._hooks.items():
            scale = config.scale or (hook.scaling if config.normalise == "none" else SCALE)
            self.layers[str(index)] = MemoryMix(hook.heads, config.mix, scale).to(weight.device, weight.dtype)

    @classmethod
    def attach(cls, config: KNNAttention, places: Places, entrance: Entrance) -> Self:  # type: ignore[override]
        return cls(config, places)

    @property
    def _device(self) -> torch.device:
        return next(self.parameters()).device

    def switch(self, on: bool) -> None:
        self._on = on
        for hook in self._hooks.values():
            hook.switch(on)

    def detach(self) -> None:
        self._on = False
        for hook in self._hooks.values():
            hook.remove()

    # What is kept of a text

    @property
    def _rooms(self) -> Rooms:
        (stack,) = self._stack_part
        spare = max(SPARE, self.config.xl_length, getattr(stack.config, "xl_length", 0))
        shapes = {index: (hook.kv_heads, hook.width) for index, hook in self._hooks.items()}
        return Rooms(self.config, shapes, spare, self._device)

    def state_bytes(self, rows: int) -> int:
        return self._rooms.bytes(rows, self.size)

    def change(self, **settings: Any) -> None:
        other = {name for name, value in settings.items() if getattr(self.config, name, None) != value}
        if fixed := other - CHANGEABLE:
            raise UsageError(
                f"{', '.join(sorted(fixed))} of an attention memory that has learned cannot be changed, only "
                f"{', '.join(sorted(CHANGEABLE))}: detach() it and put in another"
            )
        self.config = dataclasses.replace(self.config, **settings)
        if settings.keys() & {"size", "dtype", "search"}:
            self.shared = None
        if "external" in settings:
            self.stored = None

    def new_state(self, rows: int) -> State | None:
        """Empty memories for so many rows; UsageError if there is no room for them."""
        return self._empty(rows) if self.size else None

    def _empty(self, rows: int) -> State:
        return self._rooms.state(rows, self.size)

    @property
    def reads(self) -> bool:
        return True

    @contextlib.contextmanager
    def taking_in(self, texts: int, real: Tensor | None) -> Iterator[None]:
        if self.shared is not None and texts != len(next(iter(self.shared.memories.values())).rows):
            raise UsageError(READ_ON)
        state = self.shared or self._empty(texts)
        call = Forward(state, real=None if real is None else real.bool())
        with self._reading(call):
            yield
        call.commit()
        self.shared = state

    @contextlib.contextmanager
    def observing(self) -> Iterator[list[dict[str, Tensor]]]:
        """Within this context, what the first row of each forward finds; see `Forward.observed`."""
        if self.config.dense:
            raise UsageError("dense attention finds nothing in particular: set dense = False to see what is retrieved")
        with _observed.being(self, []) as seen:
            yield seen

    @contextlib.contextmanager
    def sized(self, size: int) -> Iterator[None]:
        """Within this context, new states keep `size` pairs a row."""
        with _size.being(self, size):
            yield

    @property
    def size(self) -> int:
        """How many pairs a row of a new state keeps."""
        found = _size.get(self)
        return self.config.size if found is None else found

    @contextlib.contextmanager
    def pairs_read(self) -> Iterator[list[Tensor]]:
        """Within this context, the pairs of all tokens of each forward, (B, T, width): what a store keeps of them."""
        with _heard.being(self, []) as heard:
            yield heard

    @property
    def connected(self) -> bool:
        return self.stored is not None

    def connect(self, store: Any) -> None:
        """Loads the pairs of a store, which all later forwards may look into."""
        halves = [2 * hook.kv_heads * hook.width for hook in self._hooks.values()]
        if store.config.dim != sum(halves):
            raise UsageError(
                f"the rows of {store.address} have {store.config.dim} numbers and the pairs of this memory "
                f"{sum(halves)}: build a store with layer = 'attention' and this model"
            )
        state = self._rooms.state(1, len(store))
        rows = {index: memory.rows[0] for index, memory in state.memories.items()}
        for block in store.rows():
            kept = torch.from_numpy(block.keys).split(halves, 1)
            for (index, row), both in zip(rows.items(), kept, strict=True):
                hook = self._hooks[index]
                keys, values = both.view(-1, 2, hook.kv_heads, hook.width).permute(1, 2, 0, 3).to(self._device)
                row.append(keys, values)
        self.stored = state

    def recall(self) -> float | None:
        """The share of the true nearest that the last searches of what was read found; None if all are compared."""
        kept = self.shared or self.stored
        return None if kept is None else kept.recall(self.config.k)

    def check_training(self, config: Any, kind: str) -> None:
        if config.segments > PENDING and self._checkpoints():
            raise UsageError(
                f"segments = {config.segments}: with gradient checkpointing an attention memory keeps what the last "
                f"{PENDING} forwards found, read no more segments in a step"
            )
        if kind == "causal" and self.config.size and config.batching != "documents":
            raise UsageError(
                f"batching = {config.batching!r} leaves an attention memory without the past of its documents: train "
                "with batching = documents, in which each row reads one on from batch to batch"
            )
        if kind != "causal" and self.shared is None and self.stored is None:
            raise UsageError(
                f"a {kind} model does not read documents on, so its attention memory is empty and learns nothing: give "
                "it a text first with model.memory.read, or a store with `external`"
            )

    def reset(self) -> None:
        self.shared = None

    def state(self) -> dict[str, Tensor]:
        return {} if self.shared is None else self.shared.tensors()

    def load_state(self, state: dict[str, Tensor]) -> None:
        if not state:
            self.shared = None
            return
        self._rooms.check(state)
        loaded = self._empty(len(next(iter(state.values()))))
        loaded.load_tensors(state)
        self.shared = loaded

    # A forward

    def outputs(self, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        return self.run(forward, inputs, None)

    def run(self, forward: Callable[..., Any], inputs: dict[str, Any], reading: Reading | None) -> Any:
        if not self._on:
            return forward(**inputs)
        call = self._begin(inputs, reading)
        with self._reading(call):
            result = forward(**inputs)
        if call.state is None and reading is None and self.size and (cache := _xl_cache(result)) is not None:
            call.state = self._riding(cache)
        call.commit()
        if (heard := _heard.get(self)) is not None:
            heard.append(call.pairs_by_token())
        if (seen := _observed.get(self)) is not None:
            seen.append(call.observed(self.config.k))
        return result

    def _riding(self, cache: Any) -> State:
        """An empty state that rides in an XL cache from now on."""
        state = self._empty(cache.batch_size)
        cache.riders.append(state)
        return state

    def _begin(self, inputs: dict[str, Any], reading: Reading | None) -> Forward:
        cache: Any = inputs.get("past_key_values")
        state = ((reading and reading.state) or {}).get("attention")
        if state is None:
            state = next((rider for rider in getattr(cache, "riders", []) if isinstance(rider, State)), None)
        if state is None and (saved := getattr(cache, "saved_riders", None)):
            state, cache.saved_riders = self._riding(cache), {}
            state.load_tensors(saved)
        call = Forward(state, [one for one in (self.shared, self.stored) if one], starts=starts_being_read())
        call.real = tokens_that_are_real(inputs, cache)
        if state is not None and hasattr(cache, "limit"):
            call.held = [cache.limit] * cache.batch_size
        elif state is not None and reading is not None and not self.training:
            call.overlap = (reading.targets == IGNORED).long().cumprod(1).sum(1)
            call.held = call.overlap.tolist()
        return call

    @contextlib.contextmanager
    def _reading(self, call: Forward) -> Iterator[None]:
        try:
            with _forward.being(self, call):
                yield
        finally:
            if torch.is_grad_enabled() and self.training and self._checkpoints():
                self._pending = [*self._pending[1 - PENDING :], call]

    def _checkpoints(self) -> bool:
        (stack,) = self._stack_part
        return any(getattr(part, "gradient_checkpointing", False) for part in stack.modules())

    def _current(self, index: int, keys: Tensor) -> Forward | None:
        """The forward that is under way, or the one of which a layer, with these keys, runs again."""
        if (call := _forward.get(self)) is not None or not torch.is_grad_enabled():
            return call
        for call in reversed(self._pending):  # gradients come back in this order
            if index in call.new and index not in call.repeated and torch.equal(call.new[index][0], keys):
                call.repeated.add(index)
                if len(call.repeated) == len(self.indices):
                    self._pending = [one for one in self._pending if one is not call]
                return call
        if torch._C._current_graph_task_id() != NO_BACKWARD:
            raise UsageError(
                f"with gradient checkpointing an attention memory keeps what the last {PENDING} forwards found, and "
                "this gradient is of an earlier one: call backward() after fewer forwards"
            )
        return None

    # The attention of a layer

    def _attend(self, index: int, heads: Heads) -> tuple[Tensor, Tensor | None]:
        mix: MemoryMix = self.layers[str(index)]  # type: ignore[assignment]
        scale = mix.scale().view(-1, 1, 1)
        query, key, scaling = heads.query, heads.key, heads.scaling
        if self.config.normalise == "all":
            query, key, scaling = (unit(query) * scale).to(query.dtype), unit(key).to(key.dtype), 1.0
        local, weights = heads.local(query, key, scaling)
        compared = unit if self.config.normalise != "none" else torch.Tensor.contiguous
        keys = compared(heads.own_keys()).detach()
        if (call := self._current(index, keys)) is None:
            return local, weights
        if index not in call.new:
            call.new[index] = keys, heads.own_values().detach()
            call.prefix, call.groups, call.suffix = prefix_being_read(), groups_being_read(), suffix_being_read()
            call.heads = query.shape[1]
        own = compared(heads.own_queries())
        if self.config.dense:
            found = call.all(index, own * scale)
        else:
            found = call.nearest(index, own, own * scale, self.config.k)
        if found is None:
            return local + 0 * (mix.gate.sum() + mix.log_scale.sum()), weights  # they take part, with no gradient
        memory, mass, there = found

        def local_mass() -> Tensor:
            every = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
            return mathematics.local_mass(query, every, heads.bias, heads.mask, scaling, heads.causal)

        share = mix.share(mass, local_mass)
        if _observed.get(self) is not None:
            call.shares[index] = torch.where(there, share, 0.0).detach()
            call.asked[index] = (own * scale).detach()
        return mathematics.mixed(local.transpose(1, 2), memory, share, there).transpose(1, 2), weights


def _xl_cache(result: Any) -> Any:
    """The XL cache in what a forward returned, if there is one."""
    parts = result if isinstance(result, tuple) else (result,)
    caches = (getattr(part, "past_key_values", part) for part in parts)
    return next((cache for cache in caches if hasattr(cache, "riders")), None)
