"""Memory tokens before the input of a sequence-to-sequence model's decoder, or of both sides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mnemic
from mnemic.errors import UnsupportedModel, UsageError
from tests.contract.architectures import VOCABULARY, build

ARCHITECTURES = ["mnemic-encoder-decoder", "t5", "bart", "marian"]
every_place = pytest.mark.parametrize("place", ["decoder", "both"])
every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


def ids(length: int, seed: int, batch: int = 2) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


GIVEN = {"input_ids": ids(9, 0), "decoder_input_ids": ids(6, 1)}


def made(architecture: str, place: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    return mnemic.augment(build(architecture), mnemic.MemoryTokens(count=3, place=place, **settings)).eval()


@torch.no_grad()
def logits(model: Any, **given: Tensor) -> Tensor:
    return model(**GIVEN | given).logits


def test_the_decoder_reads_mem_then_seq() -> None:
    """[X^mem ; X^seq] given to the base's decoder by hand, in float64, is what the memory makes of it."""
    base = build("mnemic-encoder-decoder").double()
    model = made("mnemic-encoder-decoder", "decoder").double()
    vectors = model.memory.tokens.layer.vectors
    with torch.no_grad():
        encoded = base.model.encoder(input_ids=GIVEN["input_ids"]).last_hidden_state
        extended = torch.cat([vectors.expand(2, -1, -1), base.model.decoder.embed_tokens(ids(6, 1))], dim=1)
        positions = torch.arange(-3, 6).expand(2, -1)
        read = base.model.decoder(
            inputs_embeds=extended, encoder_hidden_states=encoded, position_ids=positions, use_cache=False
        ).last_hidden_state
        torch.testing.assert_close(logits(model), base.lm_head(read[:, 3:]), rtol=1e-10, atol=1e-10)


@every_place
@every_architecture
def test_a_closed_gate_changes_nothing_and_an_open_memory_does(architecture: str, place: str) -> None:
    before = logits(build(architecture))
    torch.testing.assert_close(logits(made(architecture, place, gated=True)), before, rtol=1e-4, atol=1e-4)
    model = made(architecture, place)
    assert logits(model).shape == before.shape
    assert (logits(model) - before).abs().max() > 1e-2
    with model.memory.disabled():
        assert torch.equal(logits(model), before)
    model.memory.detach()
    assert torch.equal(logits(model), before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@every_place
@every_architecture
def test_an_open_gate_is_in_self_attention_and_cross_attention_alike(architecture: str, place: str) -> None:
    """A gate of 1 is no gate: with encoder and decoder gated, both changes of the masks are made."""
    model, gated = made(architecture, place), made(architecture, place, gated=True)
    with torch.no_grad():
        for name, parameter in gated.memory.tokens.named_parameters():
            parameter.copy_(
                torch.ones_like(parameter) if name.endswith("gate") else model.memory.tokens.get_parameter(name)
            )
    torch.testing.assert_close(logits(gated), logits(model), rtol=1e-4, atol=1e-4)


@every_place
@every_architecture
def test_nothing_flows_back_in_time(architecture: str, place: str) -> None:
    model = made(architecture, place)
    before = logits(model)
    for t in range(1, 6):
        changed = GIVEN["decoder_input_ids"].clone()
        changed[:, t] = (changed[:, t] + 1) % VOCABULARY
        after = logits(model, decoder_input_ids=changed)
        torch.testing.assert_close(after[:, :t], before[:, :t], rtol=1e-5, atol=1e-5)
        assert (after[:, t:] - before[:, t:]).abs().max() > 1e-4


@every_place
@every_architecture
@pytest.mark.parametrize("beams", [1, 3])
def test_cached_generation_equals_uncached(architecture: str, place: str, beams: int) -> None:
    model = made(architecture, place)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, -3:] = 0
    how = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "num_beams": beams}
    cached, uncached = (model.generate(GIVEN["input_ids"], use_cache=on, **how) for on in (True, False))
    assert torch.equal(cached, uncached)
    alone = model.generate(GIVEN["input_ids"][1:, :6], **how | {"attention_mask": mask[1:, :6]})
    shared = min(alone.shape[1], cached.shape[1])
    assert torch.equal(alone[0, :shared], cached[1, :shared])


def test_with_both_each_side_has_tokens_of_its_own_and_they_come_back(tmp_path: Any) -> None:
    model = made("mnemic-encoder-decoder", "both")
    tokens = model.memory.tokens
    assert not torch.equal(tokens.layer.vectors, tokens.decoder_layer.vectors)
    assert (tokens.layer.vectors - tokens.decoder_layer.vectors).std() > tokens.layer.spread
    model.memory.change("tokens", count=5)
    assert tokens.layer.vectors.shape == tokens.decoder_layer.vectors.shape == (5, 32)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(mnemic.load(tmp_path / "saved").eval()), logits(model))
    model(**GIVEN).logits.square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in model.memory.parameters())


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(UnsupportedModel, match="no decoder beside an encoder"):
        made("gpt2", "decoder")
    with pytest.raises(UsageError, match="are for encoders"):
        mnemic.MemoryTokens(variant="control", place="both")
