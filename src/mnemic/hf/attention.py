"""A way into the self-attention of single layers, through transformers' attention interface.

The attention module of a layer is given a config of its own, equal to the model's but for the name of the attention
function: the one registered here. The masks are those of the stack, which knows nothing of it.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mnemic.errors import UnsupportedModel
from mnemic.hf.anatomy import Places

NAME = "mnemic"
_HOOK = "mnemic_attention_hook"
_rotation: ContextVar[tuple[Tensor, Tensor] | None] = ContextVar("mnemic_rotation", default=None)
_SCORES = ("softcap", "s_aux")  # by which some models change their scores, or the sum of their exponentials
_ROTATIONS = ("position_embeddings", "position_terms")  # what cos and sin are called: transformers, our own models


@dataclass(frozen=True)
class Heads:
    """What a self-attention is about to attend with: queries (B, H, T, d), keys and values (B, kv heads, K, d).

    The last T keys are the queries' own; those before them come from a cache. `rotation` is the cos and sin, of the
    queries' positions, by which they and these last keys are turned, and `far` those of the distance at which keys
    without rotation are met; `bias` is what the model adds to scores besides the mask, as T5 does.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float
    causal: bool
    rotation: tuple[Tensor, Tensor] | None
    far: tuple[Tensor, Tensor] | None
    bias: Tensor | None
    attention: Callable[..., tuple[Tensor, Tensor | None]]

    def local(self, query: Tensor, key: Tensor, scaling: float) -> tuple[Tensor, Tensor | None]:
        """The attention that the model would do, with these queries and keys: (B, T, H, d), and its weights if any."""
        return self.attention(query, key, self.value, self.mask, scaling=scaling)

    def own_keys(self) -> Tensor:
        """The keys of the queries' own tokens, without rotation: (B, kv heads, T, d)."""
        return turned_back(self.key[:, :, -self.query.shape[2] :], self.rotation)

    def own_queries(self) -> Tensor:
        """The queries as they meet keys without rotation, which seem to be as far away as `probe` was told."""
        queries = turned_back(self.query, self.rotation)
        return queries if self.far is None else turned(queries, *(part.to(queries) for part in self.far))

    def own_values(self) -> Tensor:
        """The values of the queries' own tokens: (B, kv heads, T, d)."""
        return self.value[:, :, -self.query.shape[2] :]


Attend = Callable[[Heads], tuple[Tensor, Tensor | None]]


class AttentionHook:
    """Lets `attend` do the attention of one layer, until it is removed or switched off."""

    def __init__(self, places: Places, layer: int, attend: Attend) -> None:
        self.module = _caller(places.attention[layer])
        self.attend = attend
        self.calls = 0
        self.heads = self.kv_heads = self.width = 0  # known after `probe`
        self.scaling = 0.0  # of scores; after `probe`
        self._stack_config: tuple[Any] = (places.stack.config,)
        self.plain_scores = True  # whether scores are products of queries and keys, but for a bias; after `probe`
        self._same = False  # whether the two tokens that it was probed with were the same to it
        self._turns = True  # whether the layer turns its keys by the rotation that it is given
        self._far: tuple[Tensor, Tensor] | None = None  # see `Heads`; after `probe`; None: at no distance
        self._parameters = list(inspect.signature(self.module.forward).parameters)
        self._own_config = getattr(self.module, "config", places.stack.config)
        self._pre_hook = self.module.register_forward_pre_hook(self._enter, with_kwargs=True)
        setattr(self.module, _HOOK, (self,))
        self.switch(True)

    def switch(self, on: bool) -> None:
        """Takes part, or leaves the layer exactly as it was."""
        config: Any = self._own_config
        if on:
            config = copy.copy(config)
            config._attn_implementation = {"": NAME}  # of this config alone, not of those inside it
        self.module.config = config

    def remove(self) -> None:
        """Takes the hook off again."""
        self.switch(False)
        self._pre_hook.remove()
        delattr(self.module, _HOOK)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given = dict(zip(self._parameters, args, strict=False)) | kwargs
        terms = next((given[name] for name in _ROTATIONS if given.get(name) is not None), None)
        _rotation.set(_cos_sin(terms) if isinstance(terms, tuple) else None)
        if not self.calls:  # while it is probed
            states = next(iter(given.values()))
            self._same = _close(states[:, -2], states[:, -1])

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        self.calls += 1
        self.heads, self.kv_heads, self.width = query.shape[1], key.shape[1], query.shape[3]
        self.plain_scores = all(kwargs.get(name) is None for name in _SCORES)
        (config,) = self._stack_config
        plain = _plain_attention(module, config._attn_implementation)
        scaling = self.scaling = kwargs.pop("scaling", None) or query.shape[-1] ** -0.5

        def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Any:
            return plain(module, query, key, value, mask, scaling=scaling, **kwargs)

        causal = bool(getattr(module, "is_causal", True)) and query.shape[2] > 1
        rotation = _rotation.get() if self._turns else None
        bias = kwargs.get("position_bias")
        far = None if rotation is None else self._far
        return self.attend(Heads(query, key, value, mask, scaling, causal, rotation, far, bias, attention))

    def understood(self, heads: Heads) -> bool:
        """Whether the same input at two positions, which `heads` is of, has the same key once it is turned back."""
        if heads.rotation is not None:
            cos, sin = (part[:, :, -2:-1] for part in heads.rotation)  # memory tokens may stand before the two
            length = _squared_length(cos, sin).sqrt()  # that of the keys too, which are not turned
            self._far = None if (cos == 1).all() else (cos * length, sin * length)
        if heads.rotation is None or not self._same:
            return True
        for keys, self._turns in ((heads.key, False), (heads.own_keys(), True)):
            if _close(keys[:, :, -2], keys[:, :, -1]):
                return True
        return False


def probe(places: Places, hooks: list[AttentionHook], distance: int) -> None:
    """Runs the stack on the same token twice; UnsupportedModel if a hook is not called or cannot turn keys back.

    From then on keys without rotation seem to be `distance` tokens away from every query.
    """
    tokens = torch.ones(1, 2, dtype=torch.long, device=next(places.stack.parameters()).device)
    rotary = places.anatomy.positions == "rotary"
    where = {"position_ids": torch.arange(2, device=tokens.device)[None] + distance} if rotary and distance else {}
    training, attends, understood = places.stack.training, [hook.attend for hook in hooks], []

    def look(hook: AttentionHook, heads: Heads) -> tuple[Tensor, Tensor | None]:
        understood.append(hook.understood(heads))
        return heads.local(heads.query, heads.key, heads.scaling)

    places.stack.eval()
    try:
        for hook in hooks:
            hook.attend = partial(look, hook)
        with torch.no_grad():
            places.stack(input_ids=tokens, attention_mask=tokens, **where)
    finally:
        places.stack.train(training)
        for hook, attend in zip(hooks, attends, strict=True):
            hook.attend = attend
    name = type(places.stack).__name__
    if not all(hook.calls for hook in hooks):
        raise UnsupportedModel(
            f"{name} does not ask transformers' attention interface, by which an attention memory takes part: use an "
            "architecture that does, such as Llama or GPT-2"
        )
    if not all(understood):
        raise UnsupportedModel(
            f"{name} turns its keys by their positions in a way that mnemic cannot undo, and a memory's keys have no "
            "positions: use an architecture that rotates as Llama does"
        )


def _close(first: Tensor, second: Tensor) -> bool:
    return bool((first - second).abs().max() <= 0.01 * first.abs().max())


def turned_back(states: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
    """Queries or keys (B, H, T, d) as they were before they were rotated by their positions."""
    if rotation is None:
        return states
    cos, sin = rotation
    length = _squared_length(cos, sin)
    return turned(states, cos / length, -sin / length)


def turned(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys (B, H, T, d) rotated; what is wider than cos and sin is left as it is."""
    part, rest = states[..., : cos.shape[-1]], states[..., cos.shape[-1] :]
    first, second = part.chunk(2, dim=-1)
    part = part * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([part, rest], dim=-1) if rest.shape[-1] else part


def _squared_length(cos: Tensor, sin: Tensor) -> Tensor:
    """Of the vectors of cos and sin: 1, but for models that scale what they rotate."""
    return cos.square() + sin.square()


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    (hook,) = getattr(module, _HOOK)
    found: tuple[Tensor, Tensor | None] = hook(module, query, key, value, attention_mask, **kwargs)
    return found


AttentionInterface.register(NAME, _attend)


def _plain_attention(module: nn.Module, name: str) -> Callable[..., Any]:
    """The attention function called `name`, as the module itself would choose it."""
    home: Any = sys.modules[type(module).__module__]
    if hasattr(home, "attention_function"):
        return home.attention_function(name)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, home.eager_attention_forward)


def _caller(attention: nn.Module) -> nn.Module:
    """The part of an attention that has a config, by which it chooses its function."""
    return next((part for part in attention.modules() if hasattr(part, "config")), attention)


def _cos_sin(terms: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """cos and sin as (B or 1, 1, T, rotated width), from transformers' or our own."""
    cos, sin = terms
    if cos.ndim == 5:  # ours: (B or 1, T, 1, 1, half)
        cos, sin = (torch.cat([t, t], dim=-1)[:, :, 0, 0] for t in (cos, sin))
    return cos.unsqueeze(1), sin.unsqueeze(1)
