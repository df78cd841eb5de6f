"""Tuning an output memory on a development set: every setting from one reading of it.

What a token's loss depends on, besides the model, is the mass of its memory and the part of it that has the right
token, for each temperature, long-term size and number of rows. These are kept of each token, and all settings are
compared afterwards, without the model, the memory or the store.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mnemic.augment import augment
from mnemic.data import open_corpus
from mnemic.errors import UsageError
from mnemic.evaluate.config import EvaluateConfig
from mnemic.evaluate.evaluation import text_of
from mnemic.evaluate.perplexity import read_text, total_loss
from mnemic.memories.output import layer
from mnemic.memories.output.config import OutputMemory
from mnemic.memories.output.gate import Gate
from mnemic.memories.output.testing import Grid, Survey
from mnemic.train.state import untouched
from mnemic.train.terminal import progress_bar

WEIGHTS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7)
SHARES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)


@dataclass(frozen=True)
class Tuned:
    """The best settings found, with the perplexity they give, and that of the model alone and of the memory before."""

    memory: OutputMemory
    perplexity: float
    before: float
    plain: float
    tried: int
    at_the_edge: list[str]  # settings whose best value is the last one that was tried
    gate: Gate | None = None  # what it has learned, if only a share of the tokens is to be searched for

    def put_into(self, model: Any) -> Any:
        """Gives the model the memory that was found, with its gate."""
        augment(model, self.memory)
        if self.gate is not None:
            model.memory.output.gate.load_state_dict(self.gate.state_dict())
        return model


def tune(
    model: Any, tokenizer: Any, corpus: Any, config: EvaluateConfig | None = None, grid: Grid | None = None
) -> Tuned:
    """Finds tau, lambda, tau', K and the long-term size of `model`'s output memory on a corpus.

    Sizes and K up to those of the memory are tried. The memory stays as it is; put what was found in its place with
    `Tuned.put_into`.
    """
    handle = getattr(getattr(model, "memory", None), "output", None)
    if handle is None:
        raise UsageError("only an output memory can be tuned: put one in with mnemic.augment(model, OutputMemory(...))")
    config, grid = config or EvaluateConfig(), including(grid or default_grid(handle.config), handle.config)
    if handle.config.follow and len(grid.ks) > 1:
        raise UsageError(f"ks = {grid.ks}: with follow = {handle.config.follow} give one, as rows lead to other rows")
    text = text_of(model, tokenizer, open_corpus(str(corpus)) if isinstance(corpus, str | Path) else corpus, config)
    with untouched(model), handle.surveying(grid) as surveys:
        objective, batches = read_text(model, tokenizer, text, config)
        total_loss(objective, batches, text.tokens.target_count)
    return best_settings(Survey.joined(surveys), grid, handle.config)


def default_grid(memory: OutputMemory) -> Grid:
    """Temperatures that suit the similarity, and sizes and K up to the memory's own."""
    if memory.similarity == "dot":
        temperatures = tuple(2 ** (step / 2) for step in range(-4, 7))
    else:
        temperatures = tuple(2.0**step for step in range(11))
    longs = sorted({0, *(memory.long // part for part in (8, 4, 2, 1))})
    parts = (1,) if memory.follow else (64, 16, 4, 1)  # which rows are followed depends on all of them
    ks = sorted({max(1, memory.k // part) for part in parts})
    return Grid(temperatures, tuple(longs), tuple(ks))


def including(grid: Grid, memory: OutputMemory) -> Grid:
    """The grid with the memory's own settings in it."""
    temperatures = {*grid.temperatures, memory.temperature, memory.mix_temperature}
    temperatures |= {memory.recent_temperature} - {None}  # type: ignore[arg-type]
    return Grid(tuple(sorted(temperatures)), _with(grid.longs, memory.long), _with(grid.ks, memory.k))


def _with(numbers: tuple[int, ...], one: int) -> tuple[int, ...]:
    return tuple(sorted({*numbers, one}))


def best_settings(survey: Survey, grid: Grid, memory: OutputMemory) -> Tuned:
    """The settings of the grid with the least loss of a survey."""
    plain = survey.losses.double().mean().item()
    before = losses_of(survey, grid, memory).mean().item()
    best, chosen, tried = math.inf, memory, 0
    places = list(itertools.product(range(len(grid.longs)), range(len(grid.ks))))
    if survey.recent is None:
        places = [place for place in places if place[0] == 0]
    if survey.external is None:
        places = [place for place in places if place[1] == len(grid.ks) - 1]
    with progress_bar(len(places), "setting") as bar:
        for long, k in places:
            for loss, settings in _compared(survey, grid, memory, long, k):
                tried += 1
                if loss < best:
                    best, chosen = loss, memory.changed(long=grid.longs[long], k=grid.ks[k], **settings)
            bar.update(1)
    gate = None
    if survey.keys is not None:
        whole, alone = (losses_of(one, grid, chosen) for one in (survey, survey.nothing_found()))
        gate = Gate()
        gate.learn(survey.keys, alone - whole, chosen.retrieve)
        best = torch.where(gate(survey.keys), whole, alone).mean().item()
    return Tuned(chosen, math.exp(best), math.exp(before), math.exp(plain), tried, _edges(chosen, grid), gate)


def _compared(
    survey: Survey, grid: Grid, memory: OutputMemory, long: int, k: int
) -> Iterator[tuple[float, dict[str, float]]]:
    """The mean loss of each setting of temperatures and weights with this memory."""
    bases = [(settings, (-losses.double()).exp()) for settings, losses in _bases(survey, grid, memory, long, k)]
    for settings, probabilities in bases:
        yield _mean(probabilities), {**settings, "weight": 0.0}
    weights = sorted({*WEIGHTS, memory.weight} - {0.0})
    for mixed, part in _own_distributions(survey, grid, memory, long, k):
        empty = part.all == -torch.inf
        own = (part.target - part.all.masked_fill(empty, 0)).double().exp()
        for settings, probabilities in bases:
            change = torch.where(empty, 0, own - probabilities)
            least = math.inf
            for weight in weights:
                loss = _mean(probabilities + weight * change)
                yield loss, {**settings, **mixed, "weight": weight}
                if loss > least:  # it is convex in the weight and only rises from here on
                    break
                least = loss


def _bases(
    survey: Survey, grid: Grid, memory: OutputMemory, long: int, k: int
) -> Iterator[tuple[dict[str, float], Tensor]]:
    """The losses with the memory in the softmax, at each temperature, and of the model alone if it was trained so."""
    parts = [_memory(survey, tau, long, k) if memory.joint else None for tau in range(len(grid.temperatures))]
    for temperature, part in zip(grid.temperatures, parts, strict=True):
        if part is not None:
            yield {"temperature": temperature}, layer.joint_loss(survey.losses, survey.normalisers, part)
    if memory.training == "none":
        yield {"joint": False}, survey.losses
    elif parts[0] is None:
        yield {}, survey.losses


def _own_distributions(
    survey: Survey, grid: Grid, memory: OutputMemory, long: int, k: int
) -> Iterator[tuple[dict[str, float], layer.Mass]]:
    """The memory's own distribution with each temperature; apart, with each share and each pair of temperatures."""
    taus = range(len(grid.temperatures))
    if memory.recent_weight is None or survey.recent is None or survey.external is None:
        for tau in taus:
            if (part := _memory(survey, tau, long, k)) is not None:
                yield {"mix_temperature": grid.temperatures[tau]}, part
        return
    for tau, other, share in itertools.product(taus, taus, sorted({*SHARES, memory.recent_weight})):
        settings = {"mix_temperature": grid.temperatures[tau], "recent_temperature": grid.temperatures[other]}
        part = _memory(survey, tau, long, k, share, other)
        if part is not None:
            yield {**settings, "recent_weight": share}, part


def _memory(
    survey: Survey, tau: int, long: int, k: int, share: float | None = None, recent_tau: int | None = None
) -> layer.Mass | None:
    """Recent and external memory at a temperature; apart, by a `share`, the recent one may have another."""
    recent, external = survey.recent, survey.external
    if recent is not None:
        other = tau if share is None or external is None or recent_tau is None else recent_tau
        recent = layer.Mass(recent.all[other, long], recent.target[other, long])
    if external is not None:
        external = layer.Mass(external.all[tau, k], external.target[tau, k])
    return layer.together(recent, external, share)


def _mean(probabilities: Tensor) -> float:
    return -probabilities.log().mean().item()


def losses_of(survey: Survey, grid: Grid, memory: OutputMemory) -> Tensor:
    """The losses of a survey with the settings of a memory, which are in the grid."""
    recent = memory.recent_temperature or memory.mix_temperature
    taus = (grid.temperatures.index(one) for one in (memory.temperature, memory.mix_temperature, recent))
    tau, mix_tau, recent_tau = taus
    long, k, losses = grid.longs.index(memory.long), grid.ks.index(memory.k), survey.losses
    if memory.joint and (part := _memory(survey, tau, long, k)) is not None:
        losses = layer.joint_loss(losses, survey.normalisers, part)
    if memory.weight and (part := _memory(survey, mix_tau, long, k, memory.recent_weight, recent_tau)):
        losses = layer.mixed_loss(losses, part, memory.weight)
    return losses.double()


def _edges(chosen: OutputMemory, grid: Grid) -> list[str]:
    """The settings that take part and are at an end of what was tried, where more, or less, might be better still."""
    apart = bool(chosen.weight) and chosen.recent_weight is not None
    used = ["temperature"] * chosen.joint + ["mix_temperature"] * bool(chosen.weight) + ["recent_temperature"] * apart
    ends = (grid.temperatures[0], grid.temperatures[-1])
    edges = [name for name in used if getattr(chosen, name) in ends]
    edges += ["recent_weight"] * (apart and chosen.recent_weight in (SHARES[0], SHARES[-1]))
    return edges + ["long"] * (0 < chosen.long == grid.longs[-1]) + ["weight"] * (chosen.weight == WEIGHTS[-1])
