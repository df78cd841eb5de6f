"""Slots of product keys that were dropped, and slots that learn alone: against naive sums, and to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import mnemic
from mnemic.data import Corpus, Document, train_tokenizer
from mnemic.errors import UsageError
from mnemic.memories.product_keys.layer import ProductKeyLayer, ValueTable

TOKENIZER = train_tokenizer([], "byte")
KEYS = {"slots": 64, "heads": 2, "k": 4, "key_dim": 8}
SHAPE = {"vocab_size": len(TOKENIZER), "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
CORPUS = Corpus(
    "tiny",
    {
        "train": lambda: [Document(str(n), f"the {n}th of all the texts there are. " * 2) for n in range(8)],
        "valid": lambda: [Document("v", "QUITE another text, 12345!")],
    },
)


def gpt2(**settings: Any) -> Any:
    torch.manual_seed(0)
    shape = {"vocab_size": len(TOKENIZER), "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=256, eos_token_id=256))
    return mnemic.augment(model, mnemic.ProductKeys(**{"layers": [0, 1], **KEYS, **settings})).eval()


def bert(**settings: Any) -> Any:
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(num_hidden_layers=2, max_position_embeddings=64, **SHAPE))
    return mnemic.augment(model, mnemic.ProductKeys(**{"layers": [1], **KEYS, **settings})).eval()


def ids(text: str) -> torch.Tensor:
    return torch.tensor([list(text.encode())])


@torch.no_grad()
def logits(model: Any, text: str) -> torch.Tensor:
    return model(input_ids=ids(text)).logits


def state(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def train(model: Any, out: Path, **options: Any) -> None:
    how = {"steps": 3, "batch_size": 4, "segment_length": 16, "warmup": 1, "learning_rate": 0.01}
    mnemic.train(model, TOKENIZER, CORPUS, **how, out=str(out), **options)


# The table


def naive(table: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """The sum over all heads and reads, one by one, of what is there."""
    rows = []
    for token in range(len(slots)):
        row = torch.zeros(table.shape[1], dtype=table.dtype)
        for head in range(slots.shape[1]):
            for read in range(slots.shape[2]):
                slot = slots[token, head, read]
                row = row + weights[token, head, read] * table[slot] * there[slot]
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("chosen", [None, [1, 5, 6, 8], []], ids=["all-learn", "some-learn", "none-learn"])
@pytest.mark.parametrize("kept", [None, [0, 2, 5, 8], [7]], ids=["whole", "four-kept", "one-kept"])
def test_a_pruned_table_is_one_with_rows_of_zeros_and_only_chosen_slots_learn(
    kept: list[int] | None, chosen: list[int] | None
) -> None:
    draw = torch.Generator().manual_seed(0)
    table = ValueTable(9, 3).double()
    full = table.weight.detach().clone().requires_grad_()
    there = torch.ones(9, dtype=torch.bool)
    if kept is not None:
        there = torch.isin(torch.arange(9), torch.tensor(kept))
        table.keep(there)
        assert table.weight.shape == (len(kept), 3)
    learns = there.clone()
    if chosen is not None:
        table.learning = torch.isin(torch.arange(9), torch.tensor(chosen, dtype=torch.long))
        learns &= table.learning
    slots = torch.randint(9, (6, 2, 4), generator=draw)
    weights = torch.rand(6, 2, 4, dtype=torch.double, generator=draw).requires_grad_()
    pull = torch.rand(6, 3, dtype=torch.double, generator=draw)
    found = table(slots, weights)
    (found * pull).sum().backward()
    mine, weights.grad = weights.grad, None
    expected = naive(full, slots, weights, there)
    torch.testing.assert_close(found, expected)
    (expected * pull).sum().backward()
    torch.testing.assert_close(mine, weights.grad)
    taught = sorted(set(slots.flatten().tolist()) & set(learns.nonzero().flatten().tolist()))
    grad, rows = table.weight.grad.coalesce(), torch.arange(9) if table.rows is None else table.rows
    assert grad.indices()[0].tolist() == [int(rows[slot]) for slot in taught]  # and none that was not read
    torch.testing.assert_close(grad.values(), full.grad[taught])


def test_a_table_can_be_pruned_again() -> None:
    table = ValueTable(6, 2)
    full = table.weight.detach().clone()
    table.keep(torch.tensor([True, False, True, True, False, True]))
    table.keep(torch.tensor([False, True, True, False, False, True]))  # the second has none any more
    assert table.rows.tolist() == [-1, -1, 0, -1, -1, 1]
    assert torch.equal(table.weight, full[[2, 5]])
    assert table.rows.dtype == torch.int32


def test_a_frozen_norm_of_queries_goes_by_what_it_has_seen() -> None:
    torch.manual_seed(0)
    layer, x = ProductKeyLayer(8, **KEYS, norm="batch").train(), torch.randn(20, 8)
    for _ in range(3):
        layer.find(x)
    seen, count = layer.norm.running_mean.clone(), int(layer.norm.num_batches_tracked)
    layer.requires_grad_(False)
    slots, weights = layer.find(3 * x + 1)
    assert torch.equal(layer.norm.running_mean, seen)
    assert int(layer.norm.num_batches_tracked) == count
    expected = layer.eval().find(3 * x + 1)
    assert torch.equal(slots, expected[0])
    assert torch.equal(weights, expected[1])
    layer.train().requires_grad_(True).find(3 * x + 1)
    assert not torch.equal(layer.norm.running_mean, seen)


# In a model


@pytest.mark.parametrize("shared", [False, True], ids=["own-tables", "shared-table"])
def test_what_reads_kept_slots_only_is_the_same_to_the_last_bit(shared: bool, tmp_path: Path) -> None:
    model, text, other = gpt2(shared=shared), "some words", "0123456789 !?"
    before, foreign = logits(model, text), logits(model, other)
    with model.memory.product_keys.counting() as usage:
        logits(model, text)
    read = {layer: (counts.reads.sum(0) > 0).nonzero()[:, 0] for layer, counts in usage.layers.items()}
    union = torch.cat(list(read.values())).unique()
    expected = [len(union)] if shared else [len(slots) for slots in read.values()]
    model.memory.product_keys.keep_only(read)
    config = model.memory.product_keys.config
    assert config.kept == expected
    assert [len(table.weight) for table in model.memory.product_keys.tables.values()] == expected
    assert torch.equal(logits(model, text), before)
    pruned = logits(model, other)
    assert (pruned - foreign).abs().max() > 1e-3  # it reads slots that are gone
    model.save_pretrained(tmp_path / "saved")
    loaded = mnemic.load(tmp_path / "saved").eval()
    assert loaded.memory.configs == [config]
    assert torch.equal(logits(loaded, text), before)
    assert torch.equal(logits(loaded, other), pruned)
    assert torch.equal(logits(mnemic.load(tmp_path / "saved", mapped=True).eval(), other), pruned)
    with loaded.memory.product_keys.counting() as again:
        logits(loaded, text)
    for layer, counts in usage.layers.items():
        assert torch.equal(counts.reads, again.layers[layer].reads)


def test_dropped_slots_add_nothing() -> None:
    model, zeroed = gpt2(layers=[1]), gpt2(layers=[1])
    kept = torch.arange(0, 64, 3)
    model.memory.product_keys.keep_only({1: kept})
    gone = ~torch.isin(torch.arange(64), kept)
    zeroed.memory.product_keys.tables["1"].weight.data[gone] = 0
    torch.testing.assert_close(logits(model, "any text at all"), logits(zeroed, "any text at all"))


def test_a_pruned_model_is_trained_on(tmp_path: Path) -> None:
    model = gpt2(layers=[1])
    model.memory.product_keys.keep_only({1: list(range(0, 64, 2))})
    before = state(model)
    train(model, tmp_path / "run")
    after = mnemic.load(tmp_path / "run" / "model").state_dict()
    values = "memory.product_keys.tables.1."
    assert not torch.equal(after[values + "weight"], before[values + "weight"])
    assert after[values + "weight"].shape == (32, 16)
    assert torch.equal(after[values + "rows"], before[values + "rows"])


@pytest.mark.parametrize("make", [gpt2, bert], ids=["layer-norm", "batch-norm"])
def test_only_chosen_slots_are_changed_by_training(make: Any, tmp_path: Path) -> None:
    model = make()
    assert ("running_mean" in "".join(model.state_dict())) == (make is bert)
    chosen = [0, *range(1, 64, 2)]
    model.memory.product_keys.learn_only({1: chosen})
    before = state(model)
    train(model, tmp_path / "run", trainable="slots")
    after, values = state(model), "memory.product_keys.tables.1.weight"
    assert [name for name in after if not torch.equal(after[name], before[name])] == [values]
    changed = (after[values] != before[values]).any(1)
    assert not changed[sorted(set(range(64)) - set(chosen))].any()
    assert changed[chosen].sum() > 10
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == [values]
    train(model, tmp_path / "all", trainable="memory")
    model.memory.product_keys.learn_only(None)
    train(model, tmp_path / "more", trainable="memory")
    assert (state(model)[values] != before[values]).any(1).sum() > changed.sum()


def test_slots_of_a_shared_table_learn_if_any_layer_names_them() -> None:
    handle = gpt2(shared=True).memory.product_keys
    handle.learn_only({0: [3], 1: torch.tensor([3, 5])})
    assert handle.tables["shared"].learning.nonzero().flatten().tolist() == [3, 5]


def test_what_cannot_be_is_told(tmp_path: Path) -> None:
    model = gpt2()
    handle = model.memory.product_keys
    with pytest.raises(UsageError, match="no slots of GPT2LMHeadModel were chosen: choose some with"):
        train(model, tmp_path / "a", trainable="slots")
    handle.learn_only({1: []})
    with pytest.raises(UsageError, match="no slots"):
        train(model, tmp_path / "b", trainable="slots")
    with pytest.raises(UsageError, match="layer 2 has no product keys: they are in 0, 1"):
        handle.learn_only({2: [1]})
    for wrong in ([64], [-1]):
        with pytest.raises(UsageError, match="the slots 0 to 63"):
            handle.learn_only({1: wrong})
    with pytest.raises(UsageError, match="no slot of table 0 would be left"):
        handle.keep_only({1: [1]})
    handle.keep_only({0: [1], 1: [1, 2]})
    with pytest.raises(UsageError, match="slot 3 cannot learn: it was pruned"):
        handle.learn_only({0: [1], 1: [1, 3]})
    assert handle.tables["0"].learning is None  # nothing was changed


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kept": [0, 4]}, "0 of 64 slots cannot be kept"),
        ({"kept": [4, 65]}, "65 of 64 slots cannot be kept"),
        ({"kept": [4]}, "expected a number for each of 2 tables"),
        ({"kept": [4, 4], "shared": True}, "expected a number for each of 1 tables"),
    ],
)
def test_settings_that_pruning_cannot_have_left_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        mnemic.ProductKeys(layers=[0, 1], **KEYS, **settings)


def test_tables_are_counted_when_no_layers_are_named() -> None:
    with pytest.raises(UsageError, match="each of 1 tables"):
        gpt2(layers=[], kept=[4, 4])  # the model decides which layers there are
