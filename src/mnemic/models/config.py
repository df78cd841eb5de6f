"""The settings of our own backbones, one line of documentation each."""

# No postponed annotations here: the fields' types are checked, and those of transformers' own class cannot be resolved.

import dataclasses
import difflib
import itertools
from typing import Any, ClassVar, Literal

from transformers import GenerationConfig, PreTrainedConfig

from mnemic.config import checked, option
from mnemic.errors import UsageError

Position = Literal["t5", "xl", "rotary", "sinusoidal"]


class BackboneConfig(PreTrainedConfig):
    """What every backbone of ours has; values of a wrong type and near misses of an option's name are refused."""

    vocab_size: int = option(8192, "Number of tokens in the vocabulary.")
    hidden_size: int = option(256, "Width of the hidden states (d_model).")
    num_attention_heads: int = option(4, "Number of attention heads (h).")
    head_dim: int | None = option(None, "Width of one attention head; nothing means hidden_size / num_attention_heads.")
    intermediate_size: int | None = option(
        None, "Width of the feed-forward layer (d_ff); nothing means 4 x hidden_size."
    )
    activation: Literal["gelu", "relu"] = option("gelu", "Activation of the feed-forward layer.")
    dropout: float = option(0.0, "Dropout on the embeddings and on what each sublayer adds to the residual stream.")
    attention_dropout: float = option(0.0, "Dropout on attention weights; on a CPU any value above 0 costs speed.")
    layer_norm_eps: float = option(1e-5, "Added to the variance in layer normalisation.")
    initializer_range: float = option(0.02, "Standard deviation of freshly made weight matrices.")
    tie_word_embeddings: bool = option(True, "Whether the output layer uses the input embeddings' weights.")
    use_cache: bool = option(True, "Whether a forward in evaluation mode returns a key-value cache.")
    bos_token_id: int | None = option(None, "Id of the token that begins a text.")
    eos_token_id: int | list[int] | None = option(None, "Id (or ids) of the token that ends a text.")
    pad_token_id: int | None = option(None, "Id of the padding token.")

    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    def __post_init__(self, **kwargs: Any) -> None:
        own = self.help()
        for name in kwargs:
            if not _belongs_to_transformers(name) and (near := difflib.get_close_matches(name, own, n=1, cutoff=0.7)):
                raise UsageError(f"{type(self).__name__} has no option {name!r}: did you mean {near[0]!r}?")
        super().__post_init__(**kwargs)
        for field in dataclasses.fields(self):
            if field.name in own:
                value = checked(type(self).__name__, field.name, getattr(self, field.name), field.type)
                setattr(self, field.name, value)
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise UsageError(
                    f"hidden_size {self.hidden_size} does not divide by num_attention_heads "
                    f"{self.num_attention_heads}: change one of them or give head_dim"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        self.check()

    def check(self) -> None:
        """Raises UsageError where values do not make sense; subclasses add to it."""
        positive = {name: getattr(self, name) for name in self._positive()}
        for name, value in positive.items():
            if value < 1:
                raise UsageError(f"{type(self).__name__}.{name} = {value}: expected at least 1")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{type(self).__name__}.{name} = {getattr(self, name)}: expected 0 or more, below 1")

    @staticmethod
    def _positive() -> tuple[str, ...]:
        return "vocab_size", "hidden_size", "num_attention_heads", "head_dim", "intermediate_size"

    @classmethod
    def help(cls) -> dict[str, str]:
        """The line of documentation of each option of ours, in order."""
        return {f.name: f.metadata["help"] for f in dataclasses.fields(cls) if "help" in f.metadata}


class MnemicDecoderConfig(BackboneConfig):
    """Settings of the decoder: a pre-norm causal language model with a choice of positions and an XL cache."""

    model_type: ClassVar[str] = "mnemic-decoder"

    num_hidden_layers: int = option(4, "Number of transformer blocks.")
    position: Position = option(
        "rotary", "How positions enter: T5's relative bias, Transformer-XL's relative terms, rotary, or sinusoidal."
    )
    relative_buckets: int = option(32, "Number of distance buckets of the T5 bias.")
    relative_max_distance: int = option(128, "Distance from which on all share the last bucket of the T5 bias.")
    rotary_base: float = option(10000.0, "Base of the rotary frequencies (theta).")
    xl_length: int = option(0, "Tokens of earlier segments that the XL cache keeps; 0 for no XL cache.")
    adaptive_cutoffs: list[int] = option(
        [], "Ids at which the bands of the adaptive input and softmax end (without the vocabulary's); empty for none."
    )
    adaptive_factor: int = option(4, "Each band of the adaptive input and softmax is this many times narrower.")

    def check(self) -> None:
        super().check()
        if self.position in ("rotary", "xl", "sinusoidal"):
            width = self.head_dim if self.position == "rotary" else self.hidden_size
            if width is not None and width % 2:
                raise UsageError(f"position {self.position!r} needs an even width, but it is {width}")
        if self.position == "t5" and not 2 <= self.relative_buckets // 2 < self.relative_max_distance:
            raise UsageError(
                f"relative_buckets {self.relative_buckets} and relative_max_distance {self.relative_max_distance}: "
                "expected at least 4 buckets, and a distance above half their number"
            )
        if self.xl_length < 0:
            raise UsageError(f"xl_length = {self.xl_length}: expected 0 (no XL cache) or a number of tokens")
        bounds = [0, *self.adaptive_cutoffs, self.vocab_size]
        if any(low >= high for low, high in itertools.pairwise(bounds)):
            raise UsageError(
                f"adaptive_cutoffs {self.adaptive_cutoffs}: expected rising numbers between 0 and the vocabulary's "
                f"size, {self.vocab_size}"
            )
        if self.hidden_size // self.adaptive_factor ** len(self.adaptive_cutoffs) < 1:
            raise UsageError(
                f"adaptive_cutoffs {self.adaptive_cutoffs} with adaptive_factor {self.adaptive_factor}: the last band "
                f"would have no width left of hidden_size {self.hidden_size}; use fewer cutoffs or a smaller factor"
            )

    @staticmethod
    def _positive() -> tuple[str, ...]:
        return *BackboneConfig._positive(), "num_hidden_layers", "adaptive_factor"


class MnemicEncoderDecoderConfig(BackboneConfig):
    """Settings of the encoder-decoder: the original Transformer, arXiv 1706.03762, with sinusoidal positions."""

    model_type: ClassVar[str] = "mnemic-encoder-decoder"
    attribute_map: ClassVar[dict[str, str]] = {"d_model": "hidden_size", "num_hidden_layers": "decoder_layers"}

    encoder_layers: int = option(4, "Number of blocks of the encoder.")
    decoder_layers: int = option(4, "Number of blocks of the decoder.")
    norm: Literal["post", "pre"] = option(
        "post", "Layer normalisation after each sublayer, as in the paper, or before it."
    )
    activation: Literal["gelu", "relu"] = option("relu", "Activation of the feed-forward layer.")
    decoder_start_token_id: int | None = option(None, "Id of the token the decoder starts with; needed for labels.")
    is_encoder_decoder: bool = option(True, "Tells transformers that this model has two sides.")

    def check(self) -> None:
        super().check()
        if self.hidden_size % 2:
            raise UsageError(f"sinusoidal positions need an even hidden_size, but it is {self.hidden_size}")

    @staticmethod
    def _positive() -> tuple[str, ...]:
        return *BackboneConfig._positive(), "encoder_layers", "decoder_layers"


def _belongs_to_transformers(name: str) -> bool:
    return name.startswith("_") or hasattr(PreTrainedConfig, name) or hasattr(GenerationConfig(), name)
