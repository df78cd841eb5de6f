"""What small models are taught first: to look back by content.

From text alone models learn to copy what stood before only after many millions of tokens, and until then no memory is
of use to their attention. Texts that repeat a few random tokens again and again teach it in minutes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

from mnemic.data import Corpus, Document
from mnemic.train.config import TrainConfig

PERIODS = (8, 40)  # tokens after which a text repeats itself


def loops(tokenizer: Any, config: TrainConfig) -> Corpus:
    """As many texts as are read, each about as long as a segment."""
    return Corpus("loops", {"train": partial(_loops, tokenizer, config)})


def _loops(tokenizer: Any, config: TrainConfig) -> Iterator[Document]:
    draw = random.Random(config.seed)
    special = set(tokenizer.all_special_ids)
    ids = [number for number in range(len(tokenizer)) if number not in special]
    for number in range(config.steps * config.batch_size):
        period = tokenizer.decode(draw.choices(ids, k=draw.randint(*PERIODS)))
        length = len(tokenizer(period, add_special_tokens=False).input_ids)
        yield Document(f"loop:{number}", period * (config.segment_length // max(length, 1) + 1))
