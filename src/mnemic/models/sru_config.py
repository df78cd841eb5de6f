"""The settings of SRU++, one line of documentation each."""

# No postponed annotations here, as in config.py.

from typing import Any, ClassVar

from mnemic.config import option
from mnemic.errors import UsageError
from mnemic.models.config import BackboneConfig

_OF_TRANSFORMERS_ONLY = ("head_dim", "intermediate_size", "activation")


class MnemicSRUConfig(BackboneConfig):
    """Settings of SRU++ (arXiv 2102.12459): a recurrence whose inputs come from attention of reduced width."""

    model_type: ClassVar[str] = "mnemic-sru"
    adaptive_cutoffs: ClassVar[list[int]] = []  # as a decoder without adaptive softmax says it

    num_hidden_layers: int = option(4, "Number of SRU++ layers.")
    num_attention_heads: int = option(1, "Number of attention heads; one in the paper.")
    attention_size: int | None = option(None, "Width of the attention (d'); nothing means hidden_size / 4.")
    attention_start: float = option(
        0.0, "What the weight of attention begins at (alpha); with 0 the model begins as a plain recurrence."
    )
    highway_bias: float = option(
        -2.0, "What the bias of the reset gate begins at; below 0 a layer begins by passing on most of its input."
    )
    xl_length: int = option(
        256, "Tokens of earlier segments that attention sees; the recurrent state is carried over with them."
    )

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.attention_size is None:
            self.attention_size = max(self.hidden_size // 4, 1)
        if self.attention_size < 1 or self.attention_size % self.num_attention_heads:
            raise UsageError(
                f"attention_size {self.attention_size} does not divide by num_attention_heads "
                f"{self.num_attention_heads}: change one of them"
            )
        self.head_dim = self.attention_size // self.num_attention_heads

    @staticmethod
    def _positive() -> tuple[str, ...]:
        return *BackboneConfig._positive(), "num_hidden_layers", "xl_length"

    @classmethod
    def help(cls) -> dict[str, str]:
        """The line of documentation of each option of ours, in order; SRU++ has no feed-forward layers."""
        return {name: text for name, text in super().help().items() if name not in _OF_TRANSFORMERS_ONLY}
