"""The settings of what is done with the slots of product keys; importing it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from mnemic.config import Config, option
from mnemic.errors import UsageError


@dataclass(kw_only=True)
class PruneSlotsConfig(Config):
    """Which slots are dropped, and on what text that is decided and measured."""

    reads: int = option(1, "drop slots that are read less often than this")
    weight: float = option(1.0, "of the others keep only the heaviest, as few as have this share of all weight")
    split: str = option("train", "the part of the corpus on which slots are counted: train, valid, test or all")
    held_out: str | None = option("valid", "the part on which the loss is measured before and after; none: it is not")
    window: int | None = option(None, "tokens that the model reads at once; unset: 512, or as many as it has positions")
    batch_size: int = option(8, "windows at once")
    max_tokens: int | None = option(
        None, "of each part stop after the document that brings the number of tokens to this or more"
    )

    def check(self) -> None:
        """Refuses settings that cannot work."""
        for name in ("reads", "window", "batch_size", "max_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"PruneSlotsConfig.{name} = {value}: expected 1 or more")
        if not 0 < self.weight <= 1:
            raise UsageError(f"PruneSlotsConfig.weight = {self.weight}: expected a share above 0, up to 1")
        if self.held_out is not None and self.split in (self.held_out, "all"):
            raise UsageError(
                f"PruneSlotsConfig.held_out = {self.held_out!r} is where slots are counted (split = {self.split!r}): "
                "measure on another part, or on none"
            )
