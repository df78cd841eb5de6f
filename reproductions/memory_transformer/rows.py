"""What the rows of Memory Transformer share: its models for translation."""

from __future__ import annotations

from typing import Any

from tables.models import Trained

TRANSFORMER = Trained("transformer", batching="documents")


def memory(count: int, variant: str = "plain") -> Trained:
    """A Transformer that is trained with so many memory tokens."""
    settings: dict[str, Any] = {"count": count} | ({} if variant == "plain" else {"variant": variant})
    return Trained(f"{variant}{count}", batching="documents", tokens=settings)


def grown(start: Trained, count: int) -> Trained:
    """A trained model that goes on with so many tokens."""
    return Trained(f"{start.name}-{count}", batching="documents", tokens={"count": count}, start=start)


def longer(start: Trained) -> Trained:
    """A trained model without memory that goes on."""
    return Trained(f"{start.name}-on", batching="documents", start=start)
