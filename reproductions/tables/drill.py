"""What small models are taught first: to look back by content.

From text alone models learn to copy what stood before only after many millions of tokens, and until then no memory is
of use to their attention. Rows that repeat a few random tokens again and again teach it in minutes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor
from tqdm import tqdm

from mnemic.config import Config, option
from mnemic.files import new_folder

WEIGHTS = "model.safetensors"
PERIODS = (8, 40)  # tokens after which a row repeats itself


@dataclass(kw_only=True)
class Drill(Config):
    """How long a new model looks back in rows of random tokens before it reads."""

    steps: int = option(0, "steps; 0: none")
    batch_size: int = option(16, "rows of a step")
    length: int = option(128, "tokens of a row")
    learning_rate: float = option(2e-3, "of AdamW after the warm-up; it falls in the last third")
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
    draw = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    for step in tqdm(range(drill.steps), desc="drill", disable=None):
        for group in optimizer.param_groups:
            falling = 3 * (drill.steps - step) / drill.steps
            group["lr"] = drill.learning_rate * min(1, (step + 1) / drill.warmup, falling)
        rows = repeating(draw, model.config.vocab_size, drill)
        model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def repeating(draw: random.Random, vocabulary: int, drill: Drill) -> Tensor:
    """Rows of random tokens, (batch_size, length), each with a period of its own."""
    rows = []
    for _ in range(drill.batch_size):
        period = draw.choices(range(vocabulary), k=draw.randint(*PERIODS))
        rows.append((period * (drill.length // len(period) + 1))[: drill.length])
    return torch.tensor(rows)
