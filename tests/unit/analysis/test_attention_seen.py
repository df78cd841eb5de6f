"""What each row of an attention map could have attended to is what the model lets it see."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mnemic
from mnemic.analysis.attention import StackMaps
from mnemic.data import train_tokenizer
from tests.unit.analysis.test_attention import COUNT, TARGET, TEXT, make

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("bert", {}),
    ("bert", {"variant": "control"}),
    ("llama", {}),
    ("llama", {"variant": "control"}),
    ("llama", {"segment": 8}),
    ("mnemic-encoder-decoder", {"place": "both"}),
    ("mnemic-encoder-decoder", {"variant": "control-shared"}),
    ("mnemic-encoder-decoder", {"variant": "bottleneck"}),
    ("mnemic-encoder-decoder", {"variant": "bottleneck-skip"}),
    ("mistral", {}),
    ("gemma3", {"variant": "control"}),
    ("modernbert", {}),
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([], "byte")


@pytest.mark.parametrize(("architecture", "memory"), MODELS)
def test_a_row_sees_what_it_has_weight_for(architecture: str, memory: dict[str, Any], tokenizer: Any) -> None:
    model = make(architecture, tokenizer, **memory)
    maps = mnemic.attention_maps(model, tokenizer, TEXT, *([TARGET] if model.config.is_encoder_decoder else []))
    for name, stack in maps.stacks.items():
        shown = (stack.weights > 0).any(1)
        if stack.variant == "bottleneck-skip":
            shown[:, COUNT:] = False  # what stays as it is would be drawn as seeing itself
        assert torch.equal(shown, stack.seen > 0), name
        assert ((stack.seen == 2).any() == stack.behind).item()


@pytest.mark.parametrize(("architecture", "memory"), MODELS)
def test_attention_that_is_even_is_no_operation(architecture: str, memory: dict[str, Any], tokenizer: Any) -> None:
    stacks = mnemic.attention_maps(make(architecture, tokenizer, **memory), tokenizer, TEXT).stacks.values()
    for stack in (one for one in stacks if one.memory_keys):
        even = (stack.seen / stack.seen.sum(-1, keepdim=True).clamp(min=1))[:, None].expand_as(stack.weights)
        same: Any = {"causal": stack.causal, "behind": stack.behind, "variant": stack.variant}
        found = StackMaps(even, stack.queries, stack.keys, stack.memory_queries, stack.memory_keys, **same)
        assert max(value.max().item() for value in found.strengths.values()) == pytest.approx(0, abs=1e-6)


def test_a_short_segment_of_an_even_model_copies_nothing(tokenizer: Any) -> None:
    """A memory token sees those before it twice, and those after it once."""
    model = make("llama", tokenizer, segment=8, count=20)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
    stack = mnemic.attention_maps(model, tokenizer, TEXT)["self"]
    assert stack.operations() == [["none"] * 4] * 2
    assert stack.measures["copy"].max() < 1e-6


@pytest.mark.parametrize("place", ["decoder", "both"])
def test_rows_of_the_decoders_memory_are_left_out_where_it_reads_the_source(place: str, tokenizer: Any) -> None:
    model = make("t5", tokenizer, place=place)
    cross, end = mnemic.attention_maps(model, tokenizer, TEXT, TARGET)["cross"], tokenizer.eos_token_id
    assert "".join(cross.queries[1:]) == TARGET
    model.set_attn_implementation("eager")
    source = torch.tensor([[*tokenizer(TEXT).input_ids, end]])
    read = torch.tensor([[model.config.decoder_start_token_id, *tokenizer(TARGET).input_ids]])
    with torch.no_grad():
        found = model(input_ids=source, decoder_input_ids=read, output_attentions=True).cross_attentions
    torch.testing.assert_close(torch.cat(found)[:, :, COUNT:], cross.weights)
