"""The vector by which a context is compared: what enters one of a model's modules, for each token.

Which module, by name:

    ffn       The last block's feed-forward. Both kNN-LM (arXiv 1911.00172) and TRIME (arXiv 2205.12674, section 3)
              found its input the best key.
    ffn:3     The feed-forward of block 3, counted from 0; ffn:-2 is that of the last block but one.
    output    The head: the final hidden state, from which the model itself predicts.
    attention The keys and values of the attention memory, of all its layers and heads.
    a path    Any module, as in `model.get_submodule`: "transformer.h.3.ln_1".

What a feed-forward gets depends on the block. Most normalise the residual stream after attention and give it that: the
key kNN-LM means. OLMo 2 normalises behind its feed-forward instead, so the key is the residual stream as it is. The
blocks of Falcon, Phi and GPT-NeoX run attention and feed-forward beside each other on the same input: there the key is
the normalised input of the block, which the attention of the last block has not touched.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from mnemic.errors import UnsupportedModel, UsageError
from mnemic.hf.anatomy import Places, find
from mnemic.hf.reading import before_suffix

OUTPUT, FEED_FORWARD, ATTENTION = "output", "ffn", "attention"

_Heard = tuple[list[torch.Tensor], Callable[[torch.Tensor], None] | None]


def module_path(model: Any, layer: str) -> str:
    """The path, in `model`, of the module whose input is the key."""
    name, _, number = layer.partition(":")
    if layer == OUTPUT:
        module = model.get_output_embeddings()
        if module is None:
            raise UsageError(f"{type(model).__name__} has no head: load it with AutoModelForCausalLM, or name a module")
    elif name == FEED_FORWARD:
        module = _feed_forward(model, number)
    elif layer == ATTENTION:
        if not hasattr(getattr(model, "memory", None), ATTENTION):
            raise UsageError(f"layer = {ATTENTION!r}: {type(model).__name__} has no attention memory, see KNNAttention")
        return f"memory.{ATTENTION}"
    else:
        return _existing(model, layer)
    return next(path for path, part in model.named_modules() if part is module and not path.startswith("memory."))


def _feed_forward(model: Any, number: str) -> Any:
    try:
        places = find(model, getattr(getattr(model, "memory", None), "anatomy", None))
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{error}; or name the module itself, as in layer='transformer.h.11.mlp'") from None
    blocks = places.predicting_feed_forward
    try:
        return blocks[int(number or -1)][0]
    except (ValueError, IndexError):
        raise UsageError(
            f"layer = 'ffn:{number}': {type(model).__name__} has the blocks 0 to {len(blocks) - 1}"
        ) from None


def _existing(model: Any, path: str) -> str:
    try:
        model.get_submodule(path)
    except AttributeError as error:
        raise UsageError(
            f"layer = {path!r}: expected ffn, ffn:<block>, output, or the path of a module, and this is none ({error})"
        ) from None
    return path


class Ear:
    """Hears what passes a place in a model, in the thread that listens."""

    def __init__(self) -> None:
        self._heard: ContextVar[_Heard | None] = ContextVar("mnemic_heard", default=None)
        self._hook: Any = None

    @classmethod
    def at_key(cls, places: Places, layer: str) -> Ear:
        """Hears what enters a module; of the head, what the stack below it puts out."""
        ear = cls()
        if layer == OUTPUT:  # our own models may call their head by halves
            stack = places.stack if places.decoder is None else places.decoder
            ear._hook = stack.register_forward_hook(ear._output)
        else:
            ear._hook = _module(places, layer).register_forward_pre_hook(ear._input, with_kwargs=True)
        return ear

    @classmethod
    def at_decoder(cls, decoder: nn.Module) -> Ear:
        """Hears the tokens that a decoder reads."""
        ear = cls()
        # before memory tokens make embeddings of them
        ear._hook = decoder.register_forward_pre_hook(ear._tokens, with_kwargs=True, prepend=True)
        return ear

    def _output(self, _: nn.Module, __: tuple, output: Any) -> None:
        self._hear(output[0])

    def _input(self, _: nn.Module, args: tuple, named: dict[str, Any]) -> None:
        self._hear(before_suffix((*args, *named.values())[0]))

    def _tokens(self, _: nn.Module, args: tuple, named: dict[str, Any]) -> None:
        self._hear(named.get("input_ids", args[0] if args else None))

    def _hear(self, states: torch.Tensor | None) -> None:
        if states is not None and (listener := self._heard.get()) is not None:
            heard, then = listener
            heard.append(states)
            if then is not None:
                then(states)

    @contextlib.contextmanager
    def listening(self, then: Callable[[torch.Tensor], None] | None = None) -> Iterator[list[torch.Tensor]]:
        """Within this context all that passes is added to the list, and `then` is called with it."""
        heard: list[torch.Tensor] = []
        token = self._heard.set((heard, then))
        try:
            yield heard
        finally:
            self._heard.reset(token)

    def close(self) -> None:
        """Takes the hook off again."""
        self._hook.remove()

    def __deepcopy__(self, copies: dict[int, Any]) -> Ear:
        twin = copies[id(self)] = Ear()
        twin._hook = copy.deepcopy(self._hook, copies)
        return twin


def _module(places: Places, layer: str) -> nn.Module:
    name, _, number = layer.partition(":")
    blocks = places.predicting_feed_forward
    try:
        if name != FEED_FORWARD:
            raise ValueError
        return blocks[int(number or -1)][0]
    except (ValueError, IndexError):
        raise UsageError(
            f"key = {layer!r}: expected output, ffn, or ffn:<block> with a block from 0 to {len(blocks) - 1}"
        ) from None


def by_token(states: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """What a module got, as (rows, length, d).

    OPT's feed-forward gets all tokens in one long row; what a memory puts before a sequence is no part of it.
    """
    tokens = states.shape[:-1].numel()
    if states.ndim not in (2, 3) or tokens % rows or tokens < rows * length:
        raise UsageError(
            f"the module of the key takes an input of shape {tuple(states.shape)}: "
            "choose one that takes a vector for each token"
        )
    return states.reshape(rows, -1, states.shape[-1])[:, -length:]
