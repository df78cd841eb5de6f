"""Objectives: losses against naive loops, masking by seed and step, and which model takes which."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

import mnemic
from mnemic.errors import UsageError
from mnemic.models import MnemicDecoderConfig, MnemicDecoderForCausalLM
from mnemic.train.objectives import Masked, NextToken, check_length, make_objective
from tests.contract.architectures import VOCABULARY, build


class FakeTokenizer(SimpleNamespace):
    def __len__(self) -> int:
        return VOCABULARY


@pytest.fixture
def tokenizer() -> FakeTokenizer:
    return FakeTokenizer(mask_token_id=4, all_special_ids=[0, 1, 2, 3, 4])


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=2, n_head=2)).eval()


def bert() -> BertForMaskedLM:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    return BertForMaskedLM(config).eval()


def batch(rows: int = 3, length: int = 9) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, VOCABULARY, (rows, length + 1), generator=generator)
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[-1, -3:] = 0
    targets = tokens[:, 1:].masked_fill(mask == 0, -100)
    targets[0, 4] = -100
    starts = torch.zeros(rows, length, dtype=torch.bool)
    starts[:, 0] = True
    return {"input_ids": tokens[:, :-1], "targets": targets, "attention_mask": mask, "document_starts": starts}


def test_next_token_is_the_sum_over_targets(tokenizer: FakeTokenizer) -> None:
    model, given = gpt2(), batch()
    total, count = NextToken(model, tokenizer, seed=0).loss(given, None)
    naive, counted = 0.0, 0
    for row in range(3):
        for place in range(9):
            target = given["targets"][row, place]
            if target != -100:
                logits = model(given["input_ids"][row : row + 1, : place + 1]).logits[0, -1].double()
                naive -= logits.log_softmax(-1)[target].item()
                counted += 1
    assert count == counted == 23
    assert total.item() == pytest.approx(naive, rel=1e-5)


def test_the_model_gets_only_what_its_forward_takes(tokenizer: FakeTokenizer) -> None:
    seen: dict[str, object] = {}

    class Model(torch.nn.Module):
        config = SimpleNamespace()

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **others: object):
            seen.update(others, attention_mask=attention_mask)
            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, VOCABULARY))

    class Knowing(Model):
        def forward(self, input_ids: torch.Tensor, document_starts: torch.Tensor | None = None, use_cache: bool = True):
            seen.update(document_starts=document_starts, use_cache=use_cache)
            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, VOCABULARY))

    NextToken(Model(), tokenizer, seed=0).loss(batch(), None)
    assert seen.keys() == {"attention_mask"}
    assert seen["attention_mask"] is not None
    whole = batch()
    whole["attention_mask"][:] = 1
    NextToken(Model(), tokenizer, seed=0).loss(whole, None)
    assert seen["attention_mask"] is None
    NextToken(Knowing(), tokenizer, seed=0).loss(whole, None)
    assert seen["document_starts"] is None  # only where the rows begin: nothing to say
    assert seen["use_cache"] is False
    whole["document_starts"][1, 4] = True
    NextToken(Knowing(), tokenizer, seed=0).loss(whole, None)
    assert seen["document_starts"] is whole["document_starts"]


def test_masking_is_15_80_10_10(tokenizer: FakeTokenizer) -> None:
    given = {
        "input_ids": torch.randint(0, VOCABULARY, (64, 512), generator=torch.Generator().manual_seed(3)),
        "attention_mask": torch.ones(64, 512, dtype=torch.long),
    }
    given["attention_mask"][:, 500:] = 0
    made = Masked(bert(), tokenizer, seed=0).prepare(given, step=1)
    tokens, shown, chosen = given["input_ids"], made["input_ids"], made["targets"] != -100
    free = (tokens > 4) & given["attention_mask"].bool()
    assert not (chosen & ~free).any()
    assert torch.equal(made["targets"][chosen], tokens[chosen])
    assert torch.equal(shown[~chosen], tokens[~chosen])
    share = chosen.sum() / free.sum()
    hidden = (shown[chosen] == 4).float().mean()
    same = (shown[chosen] == tokens[chosen]).float().mean()
    assert share == pytest.approx(0.15, abs=0.01)
    assert hidden == pytest.approx(0.8 + 0.1 / VOCABULARY, abs=0.02)
    assert same == pytest.approx(0.1 + 0.1 / VOCABULARY, abs=0.02)


def test_masking_depends_on_seed_and_step_alone(tokenizer: FakeTokenizer) -> None:
    given = batch(8, 40)

    def shown(seed: int, step: int) -> torch.Tensor:
        torch.rand(3)  # whatever else draws random numbers
        return Masked(bert(), tokenizer, seed).prepare(given, step)["input_ids"]

    assert torch.equal(shown(1, 2), shown(1, 2))
    assert not torch.equal(shown(1, 2), shown(1, 3))
    assert not torch.equal(shown(1, 2), shown(2, 2))


def test_masked_loss_is_that_of_the_hidden_tokens(tokenizer: FakeTokenizer) -> None:
    model = bert()
    objective = Masked(model, tokenizer, seed=0)
    made = objective.prepare(batch(4, 30), step=1)
    total, count = objective.loss(made, None)
    logits = model(input_ids=made["input_ids"], attention_mask=made["attention_mask"]).logits.double().log_softmax(-1)
    places = (made["targets"] != -100).nonzero().tolist()
    naive = -sum(logits[row, place, made["targets"][row, place]].item() for row, place in places)
    assert count == len(places) > 0
    assert total.item() == pytest.approx(naive, rel=1e-5)


def test_auto_takes_what_the_model_was_made_for(tokenizer: FakeTokenizer) -> None:
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    assert isinstance(make_objective("auto", gpt2(), tokenizer, 0), NextToken)
    assert isinstance(make_objective("auto", llama, tokenizer, 0), NextToken)
    assert isinstance(make_objective("auto", bert(), tokenizer, 0), Masked)
    on_the_fly = gpt2()
    on_the_fly.__class__ = type("Augmented", (GPT2LMHeadModel,), {})
    assert isinstance(make_objective("auto", on_the_fly, tokenizer, 0), NextToken)


def test_what_does_not_suit_the_model_is_refused(tokenizer: FakeTokenizer) -> None:
    with pytest.raises(UsageError, match="'next-token' is for causal models"):
        make_objective("next-token", bert(), tokenizer, 0)
    with pytest.raises(UsageError, match="'masked' is for masked models"):
        make_objective("masked", gpt2(), tokenizer, 0)
    with pytest.raises(UsageError, match="no language-model head"):
        make_objective("auto", BertModel(bert().config), tokenizer, 0)
    with pytest.raises(UsageError, match="mask token"):
        make_objective("auto", bert(), FakeTokenizer(mask_token_id=None, all_special_ids=[]), 0)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tokenizer: FakeTokenizer) -> None:
    model = gpt2()
    model.resize_token_embeddings(VOCABULARY - 1)
    sentence = f"the tokenizer has {VOCABULARY} tokens and GPT2LMHeadModel only {VOCABULARY - 1}"
    with pytest.raises(UsageError, match=sentence):
        make_objective("auto", model, tokenizer, 0)
    model.resize_token_embeddings(VOCABULARY + 1)
    assert make_objective("auto", model, tokenizer, 0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "adaptive_cutoffs": [9]}
    with pytest.raises(UsageError, match="MnemicDecoderForCausalLM only 47"):
        make_objective("auto", MnemicDecoderForCausalLM(MnemicDecoderConfig(vocab_size=47, **shape)), tokenizer, 0)


@pytest.mark.parametrize(
    ("kind", "config", "most"),
    [(BertForMaskedLM, BertConfig, 20), (RobertaForMaskedLM, RobertaConfig, 17)],
    ids=["bert", "roberta"],
)
def test_the_longest_input_that_is_allowed_is_the_longest_that_works(kind: Any, config: Any, most: int) -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = kind(config(vocab_size=VOCABULARY, max_position_embeddings=20, pad_token_id=2, **shape))
    check_length(model, most, "window")
    model(input_ids=torch.full((1, most), 7))
    with pytest.raises(UsageError, match=f"has {most} positions: set it to {most} or less"):
        check_length(model, most + 1, "window")
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, most + 1), 7))


def two_documents() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 48, (2, 12), generator=torch.Generator().manual_seed(0))
    starts = torch.zeros(2, 12, dtype=torch.bool)
    starts[:, [0, 6]] = True
    attention_mask = torch.ones_like(ids)
    return {
        "input_ids": ids, "targets": ids.roll(-1, 1), "document_starts": starts, "attention_mask": attention_mask,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "apart"), [("llama", True), ("gpt2", True), ("mistral", True), ("bloom", False)])
def test_a_plain_model_reads_documents_as_one_with_a_memory_does(name: str, apart: bool) -> None:
    plain = build(name)
    objective = NextToken(plain, None, 0)
    assert objective.keeps_documents_apart == apart
    batch = two_documents()
    changed = batch | {"input_ids": batch["input_ids"].clone()}
    changed["input_ids"][:, 2] += 1
    with torch.no_grad():
        losses = objective.losses(batch, None)
        moved = (losses - objective.losses(changed, None)).abs()[:, 6:].max()
        neutral = NextToken(mnemic.augment(build(name), mnemic.MemoryTokens(gated=True)), None, 0)
        torch.testing.assert_close(losses, neutral.losses(batch, None), rtol=1e-4, atol=1e-4)
    assert (moved == 0) == apart == neutral.keeps_documents_apart
    assert not any(module._forward_pre_hooks for module in plain.modules())


@pytest.mark.parametrize("name", ["bert", "modernbert", "bloom"])
def test_a_model_that_cannot_keep_documents_apart_trains_with_a_memory(name: str) -> None:
    model = mnemic.augment(build(name), mnemic.MemoryTokens(count=2))
    objective = make_objective("auto", model, FakeTokenizer(mask_token_id=2, all_special_ids=[0, 1, 2]), 0)
    assert not objective.keeps_documents_apart
    loss, count = objective.loss(two_documents(), None)
    loss.backward()
    assert count == 24
    assert model.memory.tokens.layer.vectors.grad.abs().max() > 0
