"""Forks processes that build a store, each to be killed: imports torch once, then obeys lines of JSON on stdin.

{"kind", "out", "die_at", "kill_after"}: a child builds a store of that kind at `out`, going on with what is there. It
kills itself with SIGKILL at its `die_at`-th operation on the file system, or is killed after `kill_after` seconds, if
these are given. The answer is a line with the child's exit status.

As in training_process, the kill comes from here, before the child is waited for.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch

import mnemic
from mnemic.data import Document, train_tokenizer
from mnemic.data.documents import Corpus
from mnemic.models import MnemicDecoderConfig, MnemicDecoderForCausalLM
from tests.crash.training_process import die_at

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"index": "IVF4,Flat"},
    "exact": {"keys": "float32", "index": "exact", "commit_rows": 40},
    "dropping": {"max_probability": 0.0039, "metric": "cosine"},
}
SETTINGS = {"window": 12, "batch_size": 3, "commit_rows": 90}


def corpus() -> Corpus:
    words = [
        "the",
        "store",
        "holds",
        "what",
        "the",
        "model",
        "has",
        "seen",
        "and",
        "where",
        "it",
        "was",
        "that",
        "it",
        "saw",
        "it",
    ]
    texts = [" ".join(words[(n * i + n) % len(words)] for i in range(2 + n % 9)) for n in range(30)]
    return Corpus("crash", {"train": lambda: [Document(f"{n}.txt", text) for n, text in enumerate(texts)]})


def build(kind: str, out: str) -> None:
    torch.manual_seed(0)
    tokenizer = train_tokenizer([], "byte")
    shape = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": len(tokenizer)}
    model = MnemicDecoderForCausalLM(MnemicDecoderConfig(**shape))
    mnemic.build_store(model, tokenizer, corpus(), out, **{**SETTINGS, **KINDS[kind]}).close()


def main() -> None:
    torch.set_num_threads(1)
    build("plain", "ram:")  # imports all there is to import: children are killed while they build
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                os.dup2(2, 1)
                if order["die_at"]:
                    die_at(order["die_at"])
                build(order["kind"], order["out"])
                os._exit(0)
            finally:
                os._exit(1)
        if order["kill_after"] is not None:
            time.sleep(order["kill_after"])
            os.kill(child, signal.SIGKILL)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
