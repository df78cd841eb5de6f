"""Text in, batches out: corpora of documents, tokenizers, tokenised corpora, document streams, sliding windows.

The public names are loaded on first use, so that importing this package needs neither torch nor datasets.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "Document": "documents",
    "Corpus": "documents",
    "SPLITS": "documents",
    "CORPORA": "corpora",
    "open_corpus": "corpora",
    "Task": "tasks",
    "TASKS": "tasks",
    "open_task": "tasks",
    "load_tokenizer": "tokenizers",
    "train_tokenizer": "tokenizers",
    "tokenizer_fingerprint": "tokenizers",
    "TokenizedCorpus": "tokenized",
    "tokenize_corpus": "tokenized",
    "DocumentStreams": "streams",
    "ConsecutiveSegments": "consecutive",
    "SimilarSegments": "similar",
    "SlidingWindows": "windows",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'mnemic.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mnemic.data.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_PUBLIC)
