"""What small models are taught first: to look back by content.

From text alone models learn to copy what stood before only after many millions of tokens, and until then no memory is
of use to their attention. Rows that repeat a few random tokens again and again teach it in minutes: first to go by the
last token, and then, where rows have so few different tokens that each stands in many places, by several.

Biases for distances let a model look at the token before, by which it finds what followed a token, in rows of any
length. Models without them, as GPT-2, learn it in short rows.
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
from mnemic.errors import UsageError
from mnemic.files import new_folder
from mnemic.train.terminal import say

WEIGHTS = "model.safetensors"
RECENT = 20
PERIODS = (1 / 16, 5 / 16)  # of a row's length: after so many tokens it repeats itself
FEWEST = 4  # different tokens of a row


@dataclass(kw_only=True)
class Drill(Config):
    """How long a new model looks back in rows of random tokens before it reads."""

    steps: int = option(4000, "steps of a lesson at most")
    letters: list[int] = option([0], f"for each lesson the most different tokens of a row, {FEWEST} at least; 0: all")
    until: list[float] = option([0.0], f"the loss, a mean of {RECENT} steps, at which each is learned")
    batch_size: int = option(16, "rows of a step")
    length: int = option(128, "tokens of a row")
    learning_rate: float = option(1e-3, "that of AdamW after the warm-up")
    warmup: int = option(50, "steps of warm-up of each lesson")

    def check(self) -> None:
        """Raises an error for lessons of no steps, or of which it is not said when they are learned."""
        if self.steps < 1:
            raise UsageError(f"a drill of {self.steps} steps: expected 1 or more, or no drill")
        if len(self.letters) != len(self.until):
            raise UsageError(f"a drill of {len(self.letters)} lessons needs as many losses: until = {self.until}")


def drilled(model: Any, drill: Drill, seed: int, folder: Path) -> None:
    """Gives a model the weights in a folder, where they are kept once they are learned."""
    if not folder.is_dir():
        practise(model, drill, seed)
        with new_folder(folder) as made:
            save_model(model, str(made / WEIGHTS))
    load_model(model, str(folder / WEIGHTS))


def practise(model: Any, drill: Drill, seed: int) -> None:
    """Trains a model on rows that repeat themselves; each is a text of its own, so memories have nothing to find."""
    draw = random.Random(seed)
    model.train()
    for number, (letters, until) in enumerate(zip(drill.letters, drill.until, strict=True), 1):
        recent = deque[float](maxlen=RECENT)
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
        for step in tqdm(range(drill.steps), desc=f"drill, lesson {number}", disable=None):
            for group in optimizer.param_groups:
                group["lr"] = drill.learning_rate * min(1, (step + 1) / drill.warmup)
            rows = repeating(draw, model.config.vocab_size, letters, drill)
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            recent.append(loss.item())
            if len(recent) == RECENT and sum(recent) / RECENT < until:
                break
        say(f"drill, lesson {number}: loss {sum(recent) / len(recent):.2f} after {step + 1} steps, expected {until}")


def repeating(draw: random.Random, vocabulary: int, letters: int, drill: Drill) -> Tensor:
    """Rows of random tokens, (batch_size, length), each with a period and with letters of its own."""
    rows, most = [], letters or vocabulary
    for _ in range(drill.batch_size):
        own = draw.sample(range(vocabulary), round(FEWEST * (most / FEWEST) ** draw.random()))  # few as often as many
        period = draw.choices(own, k=draw.randint(*(round(drill.length * share) for share in PERIODS)))
        rows.append((period * (drill.length // len(period) + 1))[: drill.length])
    return torch.tensor(rows)
