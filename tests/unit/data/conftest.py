"""Small corpora and tokenizers, and the real text where it is at hand."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mnemic.data import Document, TokenizedCorpus, tokenize_corpus, train_tokenizer


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    return train_tokenizer([], kind="byte")


@pytest.fixture(scope="session")
def toy(byte_tokenizer: Any) -> Callable[[list[int]], TokenizedCorpus]:
    """Makes a corpus of random letters whose document i has lengths[i] of them, hence lengths[i] + 1 targets."""

    def make(lengths: list[int]) -> TokenizedCorpus:
        random = np.random.default_rng(len(lengths))
        texts = ["".join(map(chr, random.integers(97, 123, length))) for length in lengths]
        return tokenize_corpus([Document(f"d{i}", text) for i, text in enumerate(texts)], byte_tokenizer)

    return make


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real text: MNEMIC_DATA, or `shared/data` beside the repository."""
    folder = Path(os.environ.get("MNEMIC_DATA") or Path(__file__).parents[4] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip("the real text is not here: set MNEMIC_DATA to its folder")
    return folder
