"""Product keys and what is not text: padding, layers that run again, later tokens, memory tokens in front."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import mnemic
from mnemic.errors import UsageError
from tests.contract.architectures import EOS, PAD, VOCABULARY
from tests.unit.memories.test_product_keys import CLOSE, SIZES, remembering, tokens


def padded(side: str, pad: int = 3) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Two rows of other lengths, padded on a side; each alone; which positions they get."""
    rows = [tokens(8, seed=1), tokens(5, seed=2)]
    ids, mask = torch.full((2, 8 + pad), PAD), torch.zeros(2, 8 + pad, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(8 + pad - len(row), None) if side == "left" else slice(0, len(row))
        ids[number, place], mask[number, place] = row, 1
    return ids, mask, {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_never_counted_in_batch_statistics(architecture: str, side: str) -> None:
    """However much there is of it, on whichever side: the same statistics, logits and gradients in training."""
    found: list[Any] = []
    for pad in (0, 3, 9):
        model = remembering(architecture, query_norm="batch").train()
        ids, mask, positions = padded(side, pad)
        logits = model(input_ids=ids, attention_mask=mask, **positions).logits[mask.bool()]
        logits.square().sum().backward()
        buffers = {name: tensor.clone() for name, tensor in model.memory.named_buffers()}
        tables = [table.grad.coalesce() for table in model.memory.product_keys.tables.parameters()]
        found.append((logits.detach(), buffers, tables))
    for logits, buffers, tables in found[1:]:
        torch.testing.assert_close(logits, found[0][0], **CLOSE)
        torch.testing.assert_close(buffers, found[0][1])
        for one, other in zip(tables, found[0][2], strict=True):
            assert torch.equal(one.indices(), other.indices())
            torch.testing.assert_close(one.values(), other.values(), rtol=1e-3, atol=1e-4)


def test_running_statistics_are_those_of_the_real_tokens() -> None:
    model = remembering("bert", layers=[0], query_norm="batch").train()
    layer = model.memory.product_keys.layers["0"]
    queries: list[Tensor] = []
    layer.query.register_forward_hook(lambda module, given, output: queries.append(output.detach()))
    means, spreads = layer.norm.running_mean.clone(), layer.norm.running_var.clone()
    ids, mask, _ = padded("right")
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    assert len(queries[0]) == 13
    torch.testing.assert_close(layer.norm.running_mean, 0.9 * means + 0.1 * queries[0].mean(0))
    torch.testing.assert_close(layer.norm.running_var, 0.9 * spreads + 0.1 * queries[0].var(0))
    after = layer.norm.running_mean.clone()
    with torch.no_grad():
        both = model.eval()(input_ids=ids[:, :5]).logits
        torch.testing.assert_close(both[1:], model(input_ids=ids[1:, :5]).logits, **CLOSE)
    assert torch.equal(layer.norm.running_mean, after)


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_a_batch_of_padding_alone(architecture: str) -> None:
    model = remembering(architecture).train()
    before = [tensor.clone() for tensor in model.memory.buffers()]
    logits = model(input_ids=tokens(2, 4), attention_mask=torch.zeros(2, 4, dtype=torch.long)).logits
    logits.nan_to_num().sum().backward()
    assert [table.grad._nnz() for table in model.memory.product_keys.tables.parameters()] == [0, 0]
    assert all(torch.equal(one, other) for one, other in zip(before, model.memory.buffers(), strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("norm", ["batch", "layer"])
@pytest.mark.parametrize("architecture", ["bert", "gpt2", "t5"])
def test_activation_checkpointing_changes_nothing(architecture: str, norm: str, reentrant: bool) -> None:
    found: list[Any] = []
    for checkpoints in (False, True):
        model = remembering(architecture, query_norm=norm).train()
        model.config.use_cache = False
        if checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
        ids, mask, _ = padded("right")
        given = {"input_ids": ids, "attention_mask": mask}
        if architecture == "t5":
            given["decoder_input_ids"] = tokens(2, 6)
        with model.memory.product_keys.counting() as usage:
            first = model(**given).logits.square().mean()
            second = model(**{**given, "attention_mask": torch.ones_like(mask)}).logits.mean()
            (first + second).backward()
        gradients = {name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None}
        rows = [table.grad.coalesce().indices() for table in model.memory.product_keys.tables.parameters()]
        found.append((gradients, rows, dict(model.memory.named_buffers()), usage.layers))
    (gradients, rows, buffers, counts), (again, same_rows, same_buffers, same_counts) = found
    torch.testing.assert_close(again, gradients)
    torch.testing.assert_close(same_buffers, buffers)
    assert all(torch.equal(one, other) for one, other in zip(rows, same_rows, strict=True))
    for number in counts:
        torch.testing.assert_close(dataclasses.asdict(same_counts[number]), dataclasses.asdict(counts[number]), **CLOSE)


def test_a_gradient_that_has_waited_too_long_with_checkpoints_is_told() -> None:
    model = remembering().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    losses = [model(ids).logits.mean() for ids in tokens(9, 1, 12)]
    with pytest.raises(UsageError, match=r"the last 8 forwards, .* call backward\(\) after fewer forwards"):
        sum(losses).backward()  # type: ignore[union-attr]


@pytest.mark.parametrize(("architecture", "layer"), [("gpt2", 1), ("llama", 0), ("t5", 2), ("bart", 3)])
def test_in_training_too_a_later_token_changes_no_earlier_logits(architecture: str, layer: int) -> None:
    model = remembering(architecture, layers=[layer]).train()
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    given = {"input_ids": tokens(3, 6), name: tokens(3, 9)}
    changed = {**given, name: given[name].clone()}
    changed[name][:, -1] = (changed[name][:, -1] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = (model(**inputs).logits for inputs in (given, changed))
    torch.testing.assert_close(after[:, :-1], before[:, :-1], **CLOSE)
    assert not torch.allclose(after[:, -1], before[:, -1])


def test_queries_are_normalised_as_the_model_reads() -> None:
    def kinds(architecture: str, **settings: Any) -> list[str]:
        layers = remembering(architecture, **settings).memory.product_keys.layers.values()
        return [type(layer.norm).__name__ for layer in layers]

    assert kinds("gpt2") == ["HeadLayerNorm"] * 2
    assert kinds("bert") == ["QueryBatchNorm"] * 2
    assert kinds("bart", layers=[0, 3]) == ["QueryBatchNorm", "HeadLayerNorm"]
    assert kinds("gpt2", query_norm="batch") == ["QueryBatchNorm"] * 2
    assert kinds("bart", layers=[3], query_norm="none") == ["NoNorm"]


@pytest.mark.parametrize(("architecture", "norm"), [("gpt2", "layer"), ("gpt2", "batch"), ("llama", "layer")])
def test_rows_generate_together_what_each_does_alone(architecture: str, norm: str) -> None:
    model = remembering(architecture, query_norm=norm, start="normal")
    ids, mask, _ = padded("left", 0)
    how = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": PAD, "eos_token_id": EOS}
    together = model.generate(input_ids=ids, attention_mask=mask, **how)
    for row, real in enumerate(mask.bool()):
        alone = model.generate(input_ids=ids[row : row + 1, real], attention_mask=mask[row : row + 1, real], **how)
        assert torch.equal(together[row, -8:], alone[0, -8:])


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_memory_tokens_in_front_are_real_tokens(architecture: str) -> None:
    ids, mask, positions = padded("right")
    model = mnemic.augment(remembering(architecture), mnemic.MemoryTokens(count=4))
    given = {"input_ids": ids, "attention_mask": mask, **positions}
    with torch.no_grad(), model.memory.product_keys.counting() as usage:
        together = model(**given).logits
    assert {number: figures["reads"] for number, figures in usage.figures().items()} == dict.fromkeys(
        (0, 1), (13 + 2 * 4) * SIZES["heads"] * SIZES["k"]
    )
    with torch.no_grad():
        alone = model(input_ids=ids[1:, :5]).logits
    torch.testing.assert_close(together[1:, :5], alone, **CLOSE)
