"""Lesion and extension: a memory with another number of tokens than it was made with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mnemic
from tests.contract.architectures import ARCHITECTURES, build
from tests.unit.memories.test_tokens_variants import COUNT, ids, made


def test_a_lesion_leaves_the_last_tokens_and_an_extension_keeps_them() -> None:
    model = made("plain", "bert")
    vectors = model.memory.tokens.layer.vectors.detach().clone()
    model.memory.change("tokens", count=5)
    grown = model.memory.tokens.layer.vectors
    assert model.memory.tokens.config.count == 5
    assert torch.equal(grown[-COUNT:], vectors)
    assert torch.pdist(grown.detach()).min() > 1e-3
    assert grown.requires_grad
    spread = model.memory.tokens.layer.spread
    assert 0.3 * spread < grown[:-COUNT].std() < 3 * spread
    model.memory.change("tokens", count=2)
    assert torch.equal(model.memory.tokens.layer.vectors, vectors[-2:])
    model.memory.change("tokens", count=0)
    with torch.no_grad():
        got = model(input_ids=ids()).logits
        assert torch.equal(got, build("bert").double()(input_ids=ids()).logits)


@pytest.mark.parametrize("place", ["encoder", "both"])
def test_stages_of_an_extension_that_are_seeded_alike_draw_other_tokens(place: str) -> None:
    base = build("mnemic-t5" if place == "encoder" else "mnemic-encoder-decoder")
    torch.manual_seed(0)
    model = mnemic.augment(base, mnemic.MemoryTokens(count=3, place=place))
    for count in (6, 3, 5, 9, 6, 12):
        torch.manual_seed(0)
        model.memory.change("tokens", count=count)
    for layer in filter(None, (model.memory.tokens.layer, model.memory.tokens.decoder_layer)):
        assert layer.vectors.shape[0] == 12
        alike = F.cosine_similarity(layer.vectors[:, None], layer.vectors[None], dim=2) - torch.eye(12)
        assert alike.abs().max() < 0.8


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "mnemic-sru"])
def test_tokens_that_stay_stand_where_they_stood(architecture: str) -> None:
    """Tokens whose gates are closed come and go, and nothing changes; a recurrence has no gates."""
    model = mnemic.augment(build(architecture).double(), mnemic.MemoryTokens(count=4, gated=True)).double().eval()
    model.memory.tokens.layer.gate.data[2:] = 0.5
    given = {"input_ids": ids()} | ({"decoder_input_ids": ids(seed=1)} if model.config.is_encoder_decoder else {})
    with torch.no_grad():
        before = model(**given).logits
        for count in (2, 7):
            model.memory.change("tokens", count=count)
            torch.testing.assert_close(model(**given).logits, before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("variant", ["plain", "control", "bottleneck"])
def test_a_changed_memory_is_saved_with_its_new_size(variant: str, tmp_path: Any) -> None:
    model = made(variant).float()
    model.memory.change("tokens", count=6)
    model.save_pretrained(tmp_path / "saved")
    loaded = mnemic.load(tmp_path / "saved").eval()
    assert loaded.memory.tokens.config.count == 6
    with torch.no_grad():
        given = {"input_ids": ids(), "decoder_input_ids": ids(seed=1)}
        assert torch.equal(loaded(**given).logits, model(**given).logits)
