"""A smaller product-key memory: slots that a corpus does not read are dropped, and what that costs is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from mnemic.analysis.config import PruneSlotsConfig
from mnemic.analysis.slots import SlotReader
from mnemic.data import open_corpus
from mnemic.errors import UsageError
from mnemic.evaluate.config import EvaluateConfig
from mnemic.evaluate.evaluation import evaluate

METRIC = {"causal": "perplexity", "masked": "masked_loss"}


def prune_slots(
    model: Any, tokenizer: Any, corpus: Any, config: PruneSlotsConfig | None = None, **options: Any
) -> dict[str, Any]:
    """Drops the slots of a model's product keys that a corpus (a name, a path or a Corpus) reads seldom or never.

    The model is changed: wherever it reads only slots that were kept it computes what it did, and others add nothing.
    The report says how many slots and bytes there were and are, and the loss on a part of the corpus that was not
    counted, in nats per token, before and after; None where a model has no such loss.

    >>> report = mnemic.prune_slots(model, tokenizer, "stdlib", weight=0.99)
    >>> model.save_pretrained("smaller")
    """
    if config is not None and options:
        raise UsageError("give prune_slots either a PruneSlotsConfig or options by name, not both")
    config = config or PruneSlotsConfig.from_dict(options)
    corpus = open_corpus(str(corpus)) if isinstance(corpus, str | Path) else corpus
    reader = SlotReader(model, tokenizer, config.window, config.batch_size, hidden=True)
    counts, handle = reader.counts(), reader.handle
    reader.read(corpus, counts, config.split, max_tokens=config.max_tokens)
    kept = {
        name: chosen(counts.reads[name], counts.weights[name], config, table.rows)
        for name, table in handle.tables.items()
    }
    size, loss = _size(handle), _loss(reader, corpus, config)
    handle.keep_only({number: kept[handle.table_name(number)].nonzero()[:, 0] for number in handle.numbers})
    sizes = {"before": size, "after": _size(handle)}
    return {
        "corpus": corpus.name,
        "counted": config.split,
        **{f"{what}_{when}": size[what] for what in ("slots", "bytes") for when, size in sizes.items()},
        "tables": {name: {when: size["tables"][name] for when, size in sizes.items()} for name in handle.tables},
        "held_out": config.held_out,
        "loss_before": loss,
        "loss_after": _loss(reader, corpus, config),
    }


def chosen(reads: Tensor, weights: Tensor, config: PruneSlotsConfig, rows: Tensor | None = None) -> Tensor:
    """Which slots of a table stay, (slots,); `rows`: those of a table that was pruned before."""
    stays = reads >= config.reads
    if rows is not None:
        stays &= rows.cpu() >= 0
        weights = weights.masked_fill(rows.cpu() < 0, 0)
    if not stays.any():
        raise UsageError(f"no slot was read {config.reads} times: count on more text, or ask for fewer reads")
    if config.weight < 1:
        order = weights.sort(descending=True, stable=True).indices
        lighter = weights[order].cumsum(0) - weights[order] >= config.weight * weights.sum()
        stays[order[lighter]] = False
    return stays


def _size(handle: Any) -> dict[str, Any]:
    """Slots that have a value, in all and by table, and the bytes of the values and of what leads to them."""
    tensors = [(table.weight, table.rows) for table in handle.tables.values()]
    return {
        "slots": sum(len(values) for values, _ in tensors),
        "bytes": sum(part.nbytes for both in tensors for part in both if part is not None),
        "tables": {name: len(table.weight) for name, table in handle.tables.items()},
    }


def _loss(reader: SlotReader, corpus: Any, config: PruneSlotsConfig) -> float | None:
    """The loss on the held-out part, in nats per token."""
    if reader.kind not in METRIC or config.held_out is None:
        return None
    how = EvaluateConfig(
        metrics=[METRIC[reader.kind]],
        split=config.held_out,
        window=reader.window,
        batch_size=config.batch_size,
        max_tokens=config.max_tokens,
    )
    found = evaluate(reader.model, reader.tokenizer, corpus, how)
    loss: float | None = found["nll"] / found["tokens"] if reader.kind == "causal" else found["masked_loss"]
    return loss
