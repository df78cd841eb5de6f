"""Tiny models for the tests of the backbones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mnemic.models import MnemicDecoderConfig, MnemicDecoderForCausalLM

KINDS = ["t5", "xl", "rotary", "sinusoidal"]


def tiny_decoder(position: str, **options: Any) -> MnemicDecoderForCausalLM:
    """A decoder whose weights are large enough for mistakes to show, in float64."""
    settings = {
        "vocab_size": 61,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "relative_buckets": 8,
        "relative_max_distance": 12,
        "initializer_range": 0.3,
        "eos_token_id": 1,
        "pad_token_id": 0,
        **options,
    }
    torch.manual_seed(0)
    return MnemicDecoderForCausalLM(MnemicDecoderConfig(position=position, **settings)).double().eval()


@pytest.fixture(params=KINDS)
def position(request: pytest.FixtureRequest) -> str:
    """Each kind of positions in turn."""
    return request.param


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
