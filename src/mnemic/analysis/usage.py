"""Which slots of a product-key memory are used: by layer and head, by class, over checkpoints; and pictures of each.

The figures are those of arXiv 2010.03881: section 3.2 (`Counts.figures`), Figure 2 (`staleness`), Figure 4 (`apart`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mnemic.data import open_corpus
from mnemic.data.tasks import Task
from mnemic.errors import UsageError
from mnemic.evaluate.config import EvaluateConfig
from mnemic.evaluate.evaluation import text_of
from mnemic.evaluate.usage import count_usage
from mnemic.memories.product_keys.usage import Counts, Usage
from mnemic.train.checkpoints import checkpoint_steps, load_checkpoint, load_model_tensors
from mnemic.train.state import untouched

EVERYWHERE = 0.01  # of each distribution that `apart` compares is spread over all slots, or one unused slot is infinity


def usage(model: Any, tokenizer: Any, corpus: Any, config: EvaluateConfig | None = None, **options: Any) -> Usage:
    """Reads a corpus (a name, a path or a Corpus) and counts the slots that it reads, by layer and head.

    >>> mnemic.usage(model, tokenizer, "stdlib", max_tokens=100_000).figures()
    """
    config = config or EvaluateConfig.from_dict(options)
    corpus = open_corpus(str(corpus)) if isinstance(corpus, str | Path) else corpus
    with untouched(model):
        return count_usage(model, tokenizer, text_of(model, tokenizer, corpus, config), config)


def staleness(used: Sequence[Tensor]) -> list[int]:
    """How many slots were last used at each checkpoint, given which were used at each, (slots,); first: those never.

    >>> staleness([torch.tensor([True, True, False]), torch.tensor([True, False, False])])
    [1, 1, 1]
    """
    last = torch.zeros(len(used[0]), dtype=torch.long)
    for number, now in enumerate(used, 1):
        last[now] = number
    return torch.bincount(last, minlength=len(used) + 1).tolist()


def staleness_of_run(
    model: Any, tokenizer: Any, corpus: Any, run: str | Path, config: EvaluateConfig | None = None
) -> dict[str, Any]:
    """When each slot of a run's model was some token's best for the last time, by its checkpoints (Figure 2).

    The model is left with the weights of the last checkpoint.
    """
    root = Path(run) / "checkpoints"
    steps = [step for step in reversed(checkpoint_steps(root)) if step]
    if len(steps) < 2:
        raise UsageError(
            f"{run} has {len(steps)} checkpoints of trained models: train with keep = 5 or more to see when"
        )
    used: dict[int, list[Tensor]] = {layer: [] for layer in model.memory.product_keys.numbers}
    for step in steps:
        checkpoint = load_checkpoint(root, step)
        load_model_tensors(model, checkpoint.tensors["model"], checkpoint.state["tied"])
        found = usage(model, tokenizer, corpus, config)
        for layer, counts in found.layers.items():
            used[layer].append(counts.tops.sum(0) > 0)
    return {"steps": steps, "layers": {layer: staleness(some) for layer, some in used.items()}}


def usage_by_class(
    model: Any, tokenizer: Any, task: Task, config: EvaluateConfig | None = None, **options: Any
) -> dict[str, Usage]:
    """The slots that the examples of each label of a task read; `config`, or options by name, as for `evaluate`."""
    config = config or EvaluateConfig.from_dict(options)
    if not isinstance(task, Task) or not task.labels:
        raise UsageError("usage by class is of a task with labels, as mnemic.open_task('glue/sst2')")
    found = {}
    with untouched(model):
        text = text_of(model, tokenizer, task, config)
        parts = text.parts
        for number, label in enumerate(task.labels):
            own = {part: [one for one in examples if one.label == number] for part, examples in parts.items()}
            if not all(own.values()):
                raise UsageError(f"there is no example with the label {label!r}: read more of them")
            text.parts = own
            found[label] = count_usage(model, tokenizer, text, config)
    return found


def apart(one: Counts, other: Counts) -> dict[str, float]:
    """How differently two classes of text use a layer: KL(one || other) and IOU of their top-1 usage (Figure 4).

    IOU = sum_i min(t_i, t'_i) / sum_i max(t_i, t'_i), as shares of each class's reads.
    """
    shares = [_shares(counts) for counts in (one, other)]
    iou = torch.minimum(*shares).sum() / torch.maximum(*shares).sum()
    first, second = ((1 - EVERYWHERE) * some + EVERYWHERE / len(some) for some in shares)
    return {"kl": (first * (first / second).log()).sum().item(), "iou": iou.item()}


def _shares(counts: Counts) -> Tensor:
    tops = counts.tops.sum(0).double()
    if not tops.sum():
        raise UsageError("a class of which nothing was read cannot be compared: give some text of it")
    return tops / tops.sum()


def plot_usage(found: Usage, path: str | Path) -> None:
    """Draws how reads are spread over slots in each layer: what share of all reads the most used slots have."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for layer, counts in found.layers.items():
        for axes, kind in ((left, counts.reads), (right, counts.tops)):
            ordered = kind.sum(0).double().sort(descending=True).values
            share = torch.cat([torch.zeros(1, dtype=torch.double), ordered.cumsum(0)]) / ordered.sum().clamp(min=1)
            places = torch.linspace(0, len(ordered), min(len(ordered) + 1, 1001)).long()
            axes.plot(places / len(ordered), share[places], label=f"layer {layer}")
    for axes, name in ((left, "read"), (right, "some token's best")):
        axes.plot([0, 1], [0, 1], color="grey", linestyle=":", label="even use")
        axes.set(xlabel=f"slots, most {name} first" if axes is left else f"slots, most often {name} first")
        axes.set(ylabel="share of all", xlim=(0, 1), ylim=(0, 1))
    left.legend()
    figure.savefig(path)


def plot_staleness(found: dict[str, dict[str, Any]], path: str | Path) -> None:
    """Draws how many slots were last used at each checkpoint, for several models by name (Figure 2)."""
    from matplotlib.figure import Figure

    layers = list(next(iter(found.values()))["layers"])
    figure = Figure(figsize=(5 * len(layers), 4), layout="constrained")
    for axes, layer in zip(figure.subplots(1, len(layers), squeeze=False)[0], layers, strict=True):
        for number, (name, one) in enumerate(found.items()):
            width, slots = 0.8 / len(found), one["layers"][layer]
            axes.bar([place + number * width for place in range(len(slots))], slots, width, label=name)
        axes.set_xticks(range(len(slots)), ["never", *map(str, one["steps"])])
        axes.set(title=f"layer {layer}", xlabel="checkpoint of the last use", ylabel="slots")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(path)


def plot_apart(found: dict[str, dict[int, dict[str, float]]], path: str | Path) -> None:
    """Draws KL and IOU between two classes in each layer, for several models by name (Figure 4)."""
    from matplotlib.figure import Figure

    figure, width = Figure(figsize=(9, 4), layout="constrained"), 0.8 / len(found)
    for axes, figure_name in zip(figure.subplots(1, 2), ("kl", "iou"), strict=True):
        for number, (name, layers) in enumerate(found.items()):
            places = [place + (number - (len(found) - 1) / 2) * width for place in range(len(layers))]
            axes.bar(places, [one[figure_name] for one in layers.values()], width, label=name)
        axes.set_xticks(range(len(layers)), [f"layer {layer}" for layer in layers])
        axes.set(ylabel=figure_name.upper())
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(path)
