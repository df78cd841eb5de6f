"""Forks processes that train a tiny model, each to be killed: imports torch once, then obeys orders (see killing)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import mnemic.train.loop
from mnemic.data import Document, train_tokenizer
from mnemic.data.documents import Corpus
from mnemic.models import MnemicDecoderConfig, MnemicDecoderForCausalLM
from mnemic.train.config import TrainConfig
from tests.crash.killing import obey

STEPS = 14
GPT2 = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 256, "eos_token_id": 256}


def documents(first: int, last: int) -> list[Document]:
    sentence = "memory reads what the segment before wrote and forgets it at the end of a document"
    words = sentence.split()
    return [
        Document(str(n), " ".join(words[(n * i) % len(words)] for i in range(3 + n % 7))) for n in range(first, last)
    ]


def make_model(kind: str, vocabulary: int) -> Any:
    torch.manual_seed(0)
    if kind == "decoder":
        config = MnemicDecoderConfig(
            vocab_size=vocabulary,
            hidden_size=16,
            num_attention_heads=2,
            num_hidden_layers=2,
            xl_length=12,
            dropout=0.2,
            attention_dropout=0.1,
        )
        return MnemicDecoderForCausalLM(config)
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(**GPT2, vocab_size=vocabulary))
    return BertForMaskedLM(
        BertConfig(
            vocab_size=vocabulary, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
        )
    )


def train(kind: str, out: str) -> None:
    tokenizer = train_tokenizer([], "byte")
    corpus = Corpus("crash", {"train": lambda: documents(0, 30), "valid": lambda: documents(30, 34)})
    config = TrainConfig(
        steps=STEPS,
        batch_size=4,
        segment_length=10,
        warmup=3,
        learning_rate=5e-3,
        accumulate=2 if kind == "decoder" else 1,
        optimizer="adafactor" if kind == "bert" else "adamw",
        schedule="rsqrt" if kind == "bert" else "cosine",
        out=out,
        checkpoint_every=3,
        evaluate_every=4,
        log_every=2,
        resume=True,
    )
    mnemic.train.loop.train(make_model(kind, len(tokenizer)), tokenizer, corpus, config)


def main() -> None:
    torch.set_num_threads(1)
    obey(train)


if __name__ == "__main__":
    main()
