"""Every architecture's places are found; anything else gets an error that teaches."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import nn

import mnemic
from mnemic.errors import UnsupportedModel
from mnemic.hf.anatomy import ARCHITECTURES as KNOWN
from mnemic.hf.anatomy import find
from tests.contract.architectures import ARCHITECTURES, VOCABULARY, build


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_places_are_found(name: str) -> None:
    model = build(name)
    places = find(model)
    assert len(places.blocks) == len(places.attention) == len(places.feed_forward) == 2
    assert places.embeddings(torch.tensor([[3, 4]])).shape[:2] == (1, 2)
    assert places.head is model.get_output_embeddings()
    assert (places.decoder is not None) == model.config.is_encoder_decoder
    for attention in places.attention:
        assert any(isinstance(part, nn.Linear) or "Conv1D" in type(part).__name__ for part in attention.modules())
    inside = {
        id(p)
        for module in [*places.attention, *(m for ff in places.feed_forward for m in ff)]
        for p in module.parameters()
    }
    linear = {id(p) for block in places.blocks for p in block.parameters() if p.ndim == 2}
    cross = {id(p) for n, p in model.named_parameters() if "cross" in n or "EncDec" in n}
    assert linear - cross <= inside


def test_the_contract_covers_every_known_architecture() -> None:
    covered = {config.model_type for _, config in ARCHITECTURES.values()}
    assert covered == set(KNOWN)


def test_a_headless_and_a_classifying_model() -> None:
    ids = torch.randint(3, VOCABULARY, (2, 7))
    config = build("bert").config
    for kind in (hf.BertModel, hf.BertForSequenceClassification):
        model = kind(config).eval()
        shape = {k: v.shape for k, v in model(ids).items()}
        mnemic.augment(model, mnemic.MemoryTokens(count=3, gated=True))
        with torch.no_grad():
            got = model(ids)
            with model.memory.disabled():
                expected = model(ids)
        assert {k: v.shape for k, v in got.items()} == shape
        for key in expected:
            torch.testing.assert_close(got[key], expected[key], rtol=1e-4, atol=1e-4)


def test_an_unknown_architecture_can_be_described() -> None:
    config = hf.StableLmConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, pad_token_id=0,
    )  # fmt: skip
    model = hf.StableLmForCausalLM(config).eval()
    with pytest.raises(UnsupportedModel, match=r"does not know the architecture 'stablelm'.*anatomy=mnemic.Anatomy"):
        mnemic.augment(model, mnemic.MemoryTokens())
    assert not hasattr(model, "memory")
    ids = torch.randint(3, VOCABULARY, (2, 7))
    before = model(ids).logits
    mnemic.augment(model, mnemic.MemoryTokens(count=3, gated=True), anatomy=mnemic.Anatomy())
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-4)


def test_a_wrong_description_says_what_is_there() -> None:
    with pytest.raises(
        UnsupportedModel, match=r"looked for its blocks at 'h' inside LlamaModel.*it has: embed_tokens, layers"
    ):
        mnemic.augment(build("llama"), mnemic.MemoryTokens(), anatomy=mnemic.Anatomy(blocks="h"))
