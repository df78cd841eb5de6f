"""Product keys go beside the feed-forward of single layers, or in its place."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from mnemic.errors import UnsupportedModel, UsageError
from mnemic.hf.anatomy import Places
from mnemic.hf.entrance import Entrance
from mnemic.hf.feed_forward import FeedForwardHook
from mnemic.memories.base import Handle, weights_follow
from mnemic.memories.product_keys.config import ProductKeys
from mnemic.memories.product_keys.layer import ProductKeyLayer, ValueTable, repeated
from mnemic.memories.product_keys.selecting import quick_best_pairs
from mnemic.memories.product_keys.usage import Usage
from mnemic.memories.product_keys.watch import Watch
from mnemic.pages import large_empty

SHARED = "shared"

Slots = Mapping[int, Sequence[int] | Tensor]
"""Numbers of slots by layer."""


class Listener(Protocol):
    """What is told which slots tokens read, as `Usage` is."""

    def add(self, layer: int, slots: Tensor, weights: Tensor) -> None:
        """Slots and weights (N, heads, k) of the tokens that a layer has read."""


class Attached(Handle):
    """Product keys in one model: `layers` find slots, `tables` hold values, `renewed` are new feed-forwards."""

    config: ProductKeys

    def __init__(self, config: ProductKeys, numbers: list[int], width: int, norms: list[str], like: Tensor) -> None:
        super().__init__(config)
        self.numbers = numbers
        self.layers, self.tables, self.renewed = nn.ModuleDict(), nn.ModuleDict(), nn.ModuleDict()
        sizes = {"slots": config.slots, "heads": config.heads, "k": config.k, "key_dim": config.key_dim}
        for number, norm in zip(numbers, norms, strict=True):
            layer = ProductKeyLayer(width, **sizes, norm=norm, cosine=config.cosine, gated=config.gated)
            layer.select = quick_best_pairs
            self.layers[str(number)] = layer
        exact = like.dtype == torch.float64
        self.layers.to(like.device, torch.float64 if exact else torch.float32)
        where: dict[str, Any] = {"device": "meta" if weights_follow() else like.device}
        where["dtype"] = torch.float64 if exact else getattr(torch, config.dtype)
        names = [SHARED] if config.shared else list(self.layers)
        config.check_tables(len(names))
        kept: Sequence[int | None] = config.kept or [None] * len(names)
        for name, rows in zip(names, kept, strict=True):
            self.tables[name] = ValueTable(config.slots, width, config.start == "zeros", rows, large_empty, **where)
        self._counting: list[Listener] = []
        self._watch: Watch | None = None  # while it is trained
        self._places: list[LayerPlace] = []

    @classmethod
    def attach(cls, config: ProductKeys, places: Places, entrance: Entrance) -> Self:  # type: ignore[override]
        check(places)
        blocks = places.every_feed_forward
        numbers = config.layers or config.usual_layers(len(blocks))
        if outside := [number for number in numbers if not 0 <= number < len(blocks)]:
            raise UsageError(
                f"ProductKeys.layers = {config.layers}: {type(places.stack).__name__} has the layers 0 to "
                f"{len(blocks) - 1}, and not {outside[0]}"
            )
        auto = config.query_norm == "auto"
        norms = [usual_norm(number, places) if auto else config.query_norm for number in numbers]
        width: int = places.stack.config.hidden_size  # type: ignore[union-attr, assignment]
        handle = cls(config, numbers, width, norms, next(places.blocks[0].parameters()))
        for number in numbers:
            handle._put_into(number, blocks[number], places)
        return handle

    def _put_into(self, number: int, modules: list[nn.Module], places: Places) -> None:
        instead: list[nn.Module] | None = None
        if self.config.feed_forward == "replace":
            instead = []
        elif self.config.feed_forward == "renew":
            instead = [renewed(module, places.stack) for module in modules]
            self.renewed[str(number)] = nn.ModuleList(instead)
        self._places.append(LayerPlace(self, number, modules, instead))

    def switch(self, on: bool) -> None:
        for place in self._places:
            place.hook.switch(on)

    def table(self, number: int) -> ValueTable:
        """The values that a layer reads."""
        table: Any = self.tables[self.table_name(number)]
        return table

    def table_name(self, number: int) -> str:
        """What the table of a layer is called."""
        return SHARED if self.config.shared else str(number)

    def read_slots(self, number: int, states: Tensor, real: Tensor | None) -> Tensor:
        """PKM(x) for the input (..., d) of a layer's feed-forward; 0 where a token is padding."""
        layer: Any = self.layers[str(number)]
        flat = states.reshape(-1, states.shape[-1])
        tokens = (flat if real is None else flat[real]).to(layer.keys.dtype)
        slots, weights = layer.find(tokens)
        if not repeated():
            for usage in self._listeners():
                usage.add(number, slots, weights)
        found = layer.finish(self.table(number)(slots, weights), tokens).to(flat.dtype)
        if real is not None:
            found = torch.zeros_like(flat).masked_scatter(real[:, None], found)
        return found.view_as(states)

    def _listeners(self) -> list[Listener]:
        return self._counting + ([self._watch] if self._watch is not None and self.training else [])

    def begin_step(self, step: int, steps: int) -> None:
        self._watch = self._watch or Watch(self.config.slots)
        self._watch.begin_step()

    def tell(self) -> tuple[dict[str, float], list[str]]:
        return ({}, []) if self._watch is None else self._watch.tell()

    def end_training(self) -> None:
        self._watch = None

    def check_training(self, config: Any, kind: str) -> None:
        if (rate := config.learning_rate * config.values_rate) > 1:
            raise UsageError(
                f"values would be trained at a rate of {rate:g} (learning_rate x values_rate), by Adam whatever the "
                f"optimizer is: set values_rate to {1e-3 / config.learning_rate:g} for the paper's 1e-3"
            )

    def unused(self) -> list[nn.Parameter]:
        return [parameter for place in self._places for parameter in place.hook.unused()]

    @contextlib.contextmanager
    def counting(self) -> Iterator[Usage]:
        """Within this context counts which slots are read, how often and with what weight: see `Usage`."""
        usage = Usage(self.numbers, self.config.heads, self.config.slots)
        with self.listening(usage):
            yield usage

    @contextlib.contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Within this context tells `listener` which slots tokens read."""
        self._counting.append(listener)
        try:
            yield
        finally:
            self._counting.remove(listener)

    def learn_only(self, slots: Slots | None) -> None:
        """Lets only these slots of each layer learn, and no others; None lets all learn again.

        They go with `mnemic.train(..., trainable="slots")`, which freezes everything else (arXiv 2510.15103).
        """
        masks: Any = dict.fromkeys(self.tables) if slots is None else self._masks(slots)
        tables: dict[str, Any] = dict(self.tables.items())
        for name, chosen in masks.items():
            rows = tables[name].rows
            if chosen is not None and rows is not None and (chosen & (rows < 0)).any():
                gone = int((chosen & (rows < 0)).nonzero()[0])
                raise UsageError(f"slot {gone} cannot learn: it was pruned, and has no value any more")
        for name, chosen in masks.items():
            tables[name].learning = chosen

    def keep_only(self, slots: Slots) -> None:
        """Drops the values of all other slots, which add nothing from then on; the settings say how many are left."""
        masks = self._masks(slots)
        if empty := [name for name, kept in masks.items() if not kept.any()]:
            raise UsageError(f"no slot of table {empty[0]} would be left: keep one at least of each")
        self.learn_only(None)
        tables: dict[str, Any] = dict(self.tables.items())
        for name, kept in masks.items():
            tables[name].keep(kept)
        self.config = dataclasses.replace(self.config, kept=[len(table.weight) for table in tables.values()])

    def _masks(self, slots: Slots) -> dict[str, Tensor]:
        """Which slots of each table are among those of the layers that read it, (slots,)."""
        device = next(self.parameters()).device
        masks = {name: torch.zeros(self.config.slots, dtype=torch.bool, device=device) for name in self.tables}
        for number, some in slots.items():
            if number not in self.numbers:
                raise UsageError(f"layer {number} has no product keys: they are in {', '.join(map(str, self.numbers))}")
            numbers = torch.as_tensor(some, dtype=torch.long, device=device)
            if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < self.config.slots:
                raise UsageError(f"layer {number} has the slots 0 to {self.config.slots - 1}, others were given")
            masks[self.table_name(number)][numbers] = True
        return masks


class LayerPlace:
    """One layer with a memory."""

    def __init__(
        self, handle: Attached, number: int, modules: list[nn.Module], instead: list[nn.Module] | None
    ) -> None:
        self.handle, self.number = handle, number
        self.hook = FeedForwardHook(modules, self.add, instead)

    def add(self, states: Tensor, real: Tensor | None) -> Tensor:
        return self.handle.read_slots(self.number, states, real)


def check(places: Places) -> None:
    """UnsupportedModel if a model has no feed-forward that a memory could be put beside."""
    name, config = type(places.stack).__name__, places.stack.config
    if places.anatomy.positions == "recurrent":
        raise UnsupportedModel(f"{name} has no feed-forward layers, beside which product keys are put")
    if getattr(config, "chunk_size_feed_forward", 0):
        raise UnsupportedModel(
            f"{name} cuts what goes through its feed-forward into chunks, which hides where padding is: set "
            "config.chunk_size_feed_forward = 0"
        )


def usual_norm(number: int, places: Places) -> str:
    """How the queries of a layer are normalised by default: each alone where a token must not see later ones."""
    in_decoder = places.decoder is not None and number >= len(places.feed_forward)
    return "layer" if places.anatomy.kind == "causal" or in_decoder else "batch"


def renewed(module: nn.Module, stack: Any) -> nn.Module:
    """A copy with new weights, drawn as the model draws them, and without the hooks of others."""
    hooks = (value for part in module.modules() for name, value in vars(part).items() if "_hooks" in name)
    copied = copy.deepcopy(module, {id(value): OrderedDict() for value in hooks}).requires_grad_(True)
    for tensor in copied.parameters():
        tensor._is_hf_initialized = False  # type: ignore[attr-defined]
    for part in reversed(list(copied.modules())):  # some draw again what their parts have drawn
        vars(part).pop("forward", None)  # put there by someone else for the old one
        part._is_hf_initialized = False  # type: ignore[assignment]
        stack._init_weights(part)
    return copied
