"""What small models are taught first: to look back by content.

From text alone models learn to copy what stood before only after many millions of tokens, and until then no memory is
of use to their attention. Rows that repeat a few random tokens again and again teach it in minutes.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor
from tqdm import tqdm

from mnemic.config import Config, option
from mnemic.files import new_folder
from mnemic.train.terminal import say

WEIGHTS = "model.safetensors"
RECENT = 20
PERIODS = (8, 40)  # tokens after which a row repeats itself


@dataclass(kw_only=True)
class Drill(Config):
    """How long a new model looks back in rows of random tokens before it reads."""

    steps: int = option(0, "steps at most; 0: none")
    until: float = option(0.0, f"the loss, a mean of {RECENT} steps, at which it is learned")
    batch_size: int = option(16, "rows of a step")
    length: int = option(128, "tokens of a row")
    alphabet: int = option(0, "different tokens of a row: from this many up to all, few as often as many; 0: all")
    learning_rate: float = option(1e-3, "that of AdamW after the warm-up")
    warmup: int = option(50, "steps of warm-up")


def drilled(model: Any, drill: Drill, seed: int, folder: Path) -> None:
    """Gives a model the weights in a folder, where they are kept once they are learned."""
    if not folder.is_dir():
        practise(model, drill, seed)
        with new_folder(folder) as made:
            save_model(model, str(made / WEIGHTS))
    load_model(model, str(folder / WEIGHTS))


def practise(model: Any, drill: Drill, seed: int) -> None:
    """Trains a model on rows that repeat themselves; each is a text of its own, so memories have nothing to find."""
    draw, recent = random.Random(seed), deque[float](maxlen=RECENT)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    for step in tqdm(range(drill.steps), desc="drill", disable=None):
        for group in optimizer.param_groups:
            group["lr"] = drill.learning_rate * min(1, (step + 1) / drill.warmup)
        rows = repeating(draw, model.config.vocab_size, drill)
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent.append(loss.item())
        if len(recent) == RECENT and sum(recent) / RECENT < drill.until:
            return
    if drill.until:
        say(f"the drill ended at a loss of {sum(recent) / len(recent):.2f}, above {drill.until}")


def repeating(draw: random.Random, vocabulary: int, drill: Drill) -> Tensor:
    """Rows of random tokens, (batch_size, length), each with a period of its own."""
    rows = []
    for _ in range(drill.batch_size):
        letters = range(vocabulary)
        if drill.alphabet:
            letters = draw.sample(letters, round(drill.alphabet * (vocabulary / drill.alphabet) ** draw.random()))
        period = draw.choices(letters, k=draw.randint(*PERIODS))
        rows.append((period * (drill.length // len(period) + 1))[: drill.length])
    return torch.tensor(rows)
