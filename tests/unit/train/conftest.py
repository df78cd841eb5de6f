"""A tiny corpus, a tokenizer and tiny models for the tests of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from mnemic.data import Document, train_tokenizer
from mnemic.data.documents import Corpus
from mnemic.models import MnemicDecoderConfig, MnemicDecoderForCausalLM
from mnemic.train.config import TrainConfig


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return train_tokenizer([], "byte")


@pytest.fixture
def corpus() -> Corpus:
    sentence = "a memory keeps what was read and gives it back when it is asked for"
    words = sentence.split()
    texts = [" ".join(words[(n * i) % len(words)] for i in range(2 + n % 6)) for n in range(1, 25)]
    documents = [Document(str(n), text) for n, text in enumerate(texts)]
    return Corpus("tiny", {"train": lambda: documents[:20], "valid": lambda: documents[20:]})


@pytest.fixture
def make_model(tokenizer: Any) -> Callable[..., Any]:
    def make(kind: str = "decoder", **options: Any) -> Any:
        torch.manual_seed(0)
        size = len(tokenizer)
        if kind == "decoder":
            options = {"xl_length": 8, "dropout": 0.1} | options
            shape = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
            return MnemicDecoderForCausalLM(MnemicDecoderConfig(vocab_size=size, **(shape | options)))
        if kind == "gpt2":
            ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
            shape = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
            return GPT2LMHeadModel(GPT2Config(vocab_size=size, **shape, **ends, **options))
        shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        return BertForMaskedLM(BertConfig(vocab_size=size, **shape, **options))

    return make


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., TrainConfig]:
    def make(**options: Any) -> TrainConfig:
        small = {"steps": 6, "batch_size": 4, "segment_length": 12, "warmup": 2, "learning_rate": 1e-2}
        often = {"log_every": 1, "checkpoint_every": 3, "out": str(tmp_path / "run")}
        return TrainConfig(**{**small, **often, **options})

    return make
