"""Forks processes that train, each to be killed: imports torch once, then obeys lines of JSON on stdin.

{"kind", "out", "die_at", "kill_after"}: a child trains a tiny model of that kind into `out`, resuming what is there.
It kills itself with SIGKILL at its `die_at`-th operation on the file system, or is killed after `kill_after` seconds,
if these are given. The answer is a line with the child's exit status.

The kill comes from here, the child's parent, before the child is waited for: until then its process id cannot pass to
another process, so that a child that has ended already is not mistaken for someone else's.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import mnemic.train.loop
from mnemic.data import Document, train_tokenizer
from mnemic.data.documents import Corpus
from mnemic.models import MnemicDecoderConfig, MnemicDecoderForCausalLM
from mnemic.train.config import TrainConfig

FILE_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.scandir", "shutil.rmtree"}
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


def die_at(operation: int) -> None:
    seen = 0

    def hook(event: str, _: object) -> None:
        nonlocal seen
        if event in FILE_EVENTS:
            seen += 1
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                os.dup2(2, 1)
                if order["die_at"]:
                    die_at(order["die_at"])
                train(order["kind"], order["out"])
                os._exit(0)
            finally:
                os._exit(1)
        if order["kill_after"] is not None:
            time.sleep(order["kill_after"])
            os.kill(child, signal.SIGKILL)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
