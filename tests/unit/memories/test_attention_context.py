"""A memory that a pretrained model looks into as into its context."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mnemic
from mnemic.errors import UsageError
from tests.contract.architectures import VOCABULARY, build
from tests.unit.memories.test_attention import tokens

PLAIN = ["gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt_neox", "opt", "phi", "olmo2"]
PLAIN += ["mnemic-rotary", "mnemic-sinusoidal"]
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}


def llama(layers: int = 1, rope: dict[str, Any] | None = None) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 1000.0},
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.4)
    return model.double().eval()


@pytest.mark.parametrize("rope", [None, YARN], ids=["usual", "scaled"])
@pytest.mark.parametrize("distance", [0, 1, 40])
def test_what_is_remembered_is_as_context_at_a_distance(rope: dict[str, Any] | None, distance: int) -> None:
    """In one layer keys and values depend on no context: the model itself can read the same at those positions."""
    model, text, last = llama(rope=rope), tokens(1, 9), tokens(1, 1, seed=1)
    together = torch.cat([text, last], 1)
    places = torch.tensor([[*[0] * 9, distance]])
    with torch.no_grad():
        expected = model(together, attention_mask=torch.ones_like(together), position_ids=places).logits[:, -1]
        memory = mnemic.KNNAttention.as_context(layers=[0], k=20, size=20, distance=distance)
        mnemic.augment(model, memory)
        model.memory.double().read(text)
        got = model(last).logits[:, -1]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)  # the memory keeps float32


@pytest.mark.parametrize("architecture", PLAIN)
def test_scores_of_the_memory_are_those_of_the_context(architecture: str) -> None:
    """A token that is remembered too, at no distance, has half of what a token has that is alone with itself."""
    model = build(architecture).eval()
    memory = mnemic.KNNAttention.as_context(layers=[1], k=4, size=20, distance=0)
    one = tokens(1, 1)
    with torch.no_grad():
        before = model(one).logits
        mnemic.augment(model, memory)
        model.memory.read(one)
        with model.memory.attention.observing() as seen:
            after = model(one).logits
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)  # both are the same value
    torch.testing.assert_close(seen[0]["shares"], torch.full_like(seen[0]["shares"], 0.5), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("depth", "expected"), [(1, [0]), (2, [1]), (4, [1, 2, 3]), (30, list(range(8, 30)))])
def test_the_usual_layers_are_the_upper_three_quarters(depth: int, expected: list[int]) -> None:
    memory = mnemic.KNNAttention.as_context(size=20)
    assert memory.usual_layers(depth) == expected
    if depth < 5:
        model = mnemic.augment(llama(layers=depth), memory)
        model.memory.read(tokens(1, 9))
        assert model.memory.attention.indices == expected


def test_settings_that_stay_as_they_are_may_be_named_again() -> None:
    model = mnemic.augment(llama(layers=2), mnemic.KNNAttention.as_context(size=20))
    model.memory.change("attention", **mnemic.KNNAttention.starts["as_context"] | {"size": 30})
    assert model.memory.attention.config == mnemic.KNNAttention.as_context(size=30)
    with pytest.raises(UsageError, match="distance of an attention memory that has learned cannot be changed"):
        model.memory.change("attention", distance=5, mix="joint")


def test_keys_too_large_for_narrow_numbers_stay_numbers() -> None:
    model = llama().float()
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.normal_(0, 3e4)
        model.model.layers[0].self_attn.v_proj.weight.normal_(0, 3e5)
    mnemic.augment(model, mnemic.KNNAttention.as_context(size=20, dtype="float16"))
    model.memory.read(tokens(1, 12))
    row = model.memory.attention.shared.memories[0].rows[0]
    keys, values = row.pairs()
    assert keys.abs().max() == values.abs().max() == torch.finfo(torch.float16).max
    with torch.no_grad():
        assert model(tokens(1, 4)).logits.isfinite().all()
