"""Where things are in a model: embeddings, blocks, attention, feed-forward and head, for each known architecture."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from mnemic.config import Config, option
from mnemic.errors import UnsupportedModel


@dataclass(kw_only=True)
class Anatomy(Config):
    """The paths inside `model.base_model`; describe a model that mnemic does not know with one of these."""

    kind: Literal["causal", "masked", "seq2seq"] = option("causal", "what the model does with a sequence")
    stack: str = option("", "path of the module that takes inputs_embeds (seq2seq: the encoder); '' is base_model")
    decoder: str | None = option(None, "path of the decoder stack of a seq2seq model")
    blocks: str = option("layers", "path, inside the stack, of the list of blocks")
    attention: str = option("self_attn", "path, inside a block, of its self-attention")
    feed_forward: list[str] = option(
        ["mlp"],
        "paths, inside a block, of the modules that make up its feed-forward: its input enters the first, and what "
        "leaves the last is added to the residual stream",
    )
    positions: Literal["rotary", "absolute", "relative", "alibi", "recurrent"] = option(
        "rotary",
        "how tokens get positions: rotary and absolute by position_ids, relative and alibi by their place in the "
        "input; a recurrent model needs none but the 0 at which a document starts",
    )


_LLAMA = Anatomy()
_BERT = Anatomy(
    kind="masked",
    blocks="encoder.layer",
    attention="attention",
    feed_forward=["intermediate", "output.dense"],
    positions="absolute",
)
_BART = Anatomy(kind="seq2seq", stack="encoder", decoder="decoder", feed_forward=["fc1", "fc2"], positions="absolute")

ARCHITECTURES: dict[str, Anatomy] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma3_text": _LLAMA,
    "olmo2": _LLAMA,
    "phi": _LLAMA,
    "gpt2": Anatomy(blocks="h", attention="attn", positions="absolute"),
    "gpt_neox": Anatomy(attention="attention"),
    "opt": Anatomy(stack="decoder", feed_forward=["fc1", "fc2"], positions="absolute"),
    "bloom": Anatomy(  # whose feed-forward adds the residual stream by itself
        blocks="h",
        attention="self_attention",
        feed_forward=["mlp.dense_h_to_4h", "mlp.dense_4h_to_h"],
        positions="alibi",
    ),
    "falcon": Anatomy(blocks="h", attention="self_attention"),
    "bert": _BERT,
    "roberta": _BERT,
    "electra": _BERT,
    "distilbert": Anatomy(
        kind="masked",
        blocks="transformer.layer",
        attention="attention",
        feed_forward=["ffn"],
        positions="absolute",
    ),
    "modernbert": Anatomy(kind="masked", attention="attn"),
    "t5": Anatomy(
        kind="seq2seq",
        stack="encoder",
        decoder="decoder",
        blocks="block",
        attention="layer.0.SelfAttention",
        feed_forward=["layer.-1.DenseReluDense"],
        positions="relative",
    ),
    "bart": _BART,
    "marian": _BART,
    "mnemic-decoder": _LLAMA,
    # SRU++ has no feed-forward of its own. Its recurrence is what follows attention; it is given what attention found,
    # normalised, which is the natural key of a context.
    "mnemic-sru": Anatomy(feed_forward=["recurrence"], positions="recurrent"),
    "mnemic-encoder-decoder": Anatomy(kind="seq2seq", stack="encoder", decoder="decoder"),
}


@dataclass(frozen=True)
class Places:
    """The modules of one model in which memories are put."""

    anatomy: Anatomy
    stack: nn.Module
    decoder: nn.Module | None
    embeddings: nn.Module
    blocks: list[nn.Module]
    attention: list[nn.Module]
    feed_forward: list[list[nn.Module]]
    head: nn.Module | None
    text_head: list[nn.Module] | None  # the modules that label whole texts by what the stack gives, if the model does

    @torch.no_grad()
    def sample_inputs(self, count: int = 1024) -> torch.Tensor:
        """The input vectors of the first tokens of the vocabulary, (count, width), scaled as the stack sees them."""
        weight = next(self.embeddings.parameters())
        size: int = self.stack.config.vocab_size  # type: ignore
        vectors = self.embeddings(torch.arange(min(count, size), device=weight.device)[None])[0]
        return vectors.float() * self.scale

    @property
    def scale(self) -> float:
        """What a stack multiplies its embeddings with."""
        return getattr(self.stack, "embed_scale", 1.0)

    @property
    def scales_given(self) -> bool:
        """Whether it does so with embeddings that it is given, too: Marian's decoder does, and its encoder does not."""
        kind: str = self.stack.config.model_type  # type: ignore[union-attr, assignment]
        return kind == "marian" and self.anatomy.kind == "causal"

    @property
    def predicting_feed_forward(self) -> list[list[nn.Module]]:
        """The feed-forward of each block of the stack that predicts tokens: the decoder, if there is one."""
        if self.decoder is None:
            return self.feed_forward
        blocks = list(_at(self.decoder, self.anatomy.blocks, "blocks", self.decoder))
        return [[_at(b, path, "feed_forward", self.decoder) for path in self.anatomy.feed_forward] for b in blocks]

    @property
    def every_feed_forward(self) -> list[list[nn.Module]]:
        """The feed-forward of each block, a decoder's on from its encoder's."""
        return self.feed_forward + ([] if self.decoder is None else self.predicting_feed_forward)

    def of_decoder(self) -> Places:
        """The decoder of a sequence-to-sequence model as a causal stack of its own."""
        decoder: Any = self.decoder
        blocks = list(_at(decoder, self.anatomy.blocks, "blocks", decoder))
        return Places(
            anatomy=dataclasses.replace(self.anatomy, kind="causal", stack="", decoder=None),
            stack=decoder,
            decoder=None,
            embeddings=decoder.get_input_embeddings(),
            blocks=blocks,
            attention=[_at(block, self.anatomy.attention, "attention", decoder) for block in blocks],
            feed_forward=self.predicting_feed_forward,
            head=self.head,
            text_head=None,
        )

    @property
    def positions_by_id(self) -> bool:
        """Whether a token's position is what position_ids say, wherever it stands in the input."""
        return self.anatomy.positions in ("rotary", "absolute", "recurrent")


def find(model: PreTrainedModel, anatomy: Anatomy | None = None) -> Places:
    """The places of `model`, by its architecture or by the description given."""
    described = anatomy or _known(model)
    base = model.base_model
    stack = _at(base, described.stack, "stack", model)
    decoder = None
    if described.decoder is not None and hasattr(base, described.decoder.split(".")[0]):
        decoder = _at(base, described.decoder, "decoder", model)
    blocks = list(_at(stack, described.blocks, "blocks", model))
    if not blocks:
        raise UnsupportedModel(f"{type(model).__name__}: {described.blocks!r} holds no blocks to put a memory in")
    embeddings = stack.get_input_embeddings() if isinstance(stack, PreTrainedModel) else model.get_input_embeddings()
    return Places(
        anatomy=described,
        stack=stack,
        decoder=decoder,
        embeddings=embeddings,
        blocks=blocks,
        attention=[_at(block, described.attention, "attention", model) for block in blocks],
        feed_forward=[[_at(b, path, "feed_forward", model) for path in described.feed_forward] for b in blocks],
        head=model.get_output_embeddings(),
        text_head=_text_head(model, stack),
    )


def _text_head(model: PreTrainedModel, stack: Any) -> list[nn.Module] | None:
    if not any(kind.__name__.endswith("ForSequenceClassification") for kind in type(model).__mro__):
        return None
    pooler = getattr(stack, "pooler", None)
    outside = [module for module in model.children() if module is not model.base_model]
    return [pooler, *outside] if isinstance(pooler, nn.Module) else outside


def _known(model: PreTrainedModel) -> Anatomy:
    kind = getattr(model.config, "model_type", None)
    if kind not in ARCHITECTURES:
        raise UnsupportedModel(
            f"mnemic does not know the architecture {kind!r} ({type(model).__name__}): it looks for the stack that "
            "takes inputs_embeds, its list of blocks, and each block's attention and feed-forward. Describe them: "
            "augment(model, ..., anatomy=mnemic.Anatomy(kind='causal', stack='', blocks='layers', "
            "attention='self_attn', feed_forward=['mlp'], positions='rotary')), paths as in print(model.base_model). "
            f"Known: {', '.join(sorted(ARCHITECTURES))}"
        )
    anatomy = ARCHITECTURES[kind]
    if kind == "falcon" and model.config.alibi:
        return Anatomy.from_dict({**anatomy.to_dict(), "positions": "alibi"})
    return anatomy


def _at(root: nn.Module, path: str, what: str, model: nn.Module) -> Any:
    """The module at a dotted path (a number indexes a list), or an error that says what is there."""
    module: Any = root
    for name in filter(None, path.split(".")):
        try:
            module = module[int(name)] if name.lstrip("-").isdigit() else getattr(module, name)
        except (AttributeError, IndexError, TypeError):
            there = ", ".join(child for child, _ in module.named_children()) or "nothing"
            raise UnsupportedModel(
                f"{type(model).__name__}: looked for its {what} at {path!r} inside {type(root).__name__}, but "
                f"{type(module).__name__} has no {name!r} (it has: {there}); give augment() an anatomy that fits"
            ) from None
    return module
