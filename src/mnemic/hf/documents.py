"""Documents in one row are kept apart in models without a memory, too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from mnemic.errors import UnsupportedModel
from mnemic.hf import reading
from mnemic.hf.anatomy import find
from mnemic.hf.entrance import Entrance
from mnemic.hf.positions import separates_documents


@contextlib.contextmanager
def documents_apart(model: Any, document_starts: torch.Tensor) -> Iterator[None]:
    """Within this context the forward of a plain model of a known architecture keeps the documents of a row apart."""
    entrance = Entrance(find(model))
    try:
        with reading.reading(document_starts):
            yield
    finally:
        entrance.remove()


def can_separate_documents(model: Any) -> bool:
    """Whether `documents_apart` can be used with a model."""
    try:
        return separates_documents(find(model))
    except UnsupportedModel:
        return False
