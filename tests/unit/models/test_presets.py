"""The presets have the paper's sizes: parameters are counted without making them, deviations are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mnemic.cli.loading import new_model, read_new_model
from mnemic.data import train_tokenizer
from mnemic.errors import UsageError
from mnemic.models import (
    MnemicDecoderConfig,
    MnemicDecoderForCausalLM,
    MnemicEncoderDecoderConfig,
    MnemicEncoderDecoderForConditionalGeneration,
    MnemicSRUConfig,
    MnemicSRUForCausalLM,
)
from mnemic.models.presets import PRESETS, preset

MODELS: dict[type, Any] = {
    MnemicDecoderConfig: MnemicDecoderForCausalLM,
    MnemicEncoderDecoderConfig: MnemicEncoderDecoderForConditionalGeneration,
    MnemicSRUConfig: MnemicSRUForCausalLM,
}


def parameters(name: str) -> int:
    """How many parameters the preset has; tied ones count once."""
    config = preset(name)
    with torch.device("meta"):
        model = MODELS[type(config)](config)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "millions", "paper"),
    [
        ("trime-247m", 245.9, 247),
        ("trime-150m", 148.5, 150),
        ("trime-7m", 7.1, 7),
        ("trime-38m", 38.0, 38),
        ("trime-39m", 39.5, 39),
        ("trime-sru-42m", 42.1, 42),
    ],
)
def test_parameters_are_those_of_the_paper(name: str, millions: float, paper: int) -> None:
    count = parameters(name) / 1e6
    assert round(count, 1) == millions
    assert abs(count / paper - 1) < 0.015


def test_the_largest_lacks_only_the_square_matrix_that_fairseq_has() -> None:
    assert round((parameters("trime-247m") + 1024**2) / 1e6) == 247


def test_the_middle_one_needs_bands_of_full_width() -> None:
    with torch.device("meta"):
        narrowing = MnemicDecoderForCausalLM(preset("trime-150m", adaptive_factor=4))
    narrowing.tie_weights()
    assert round(sum(parameter.numel() for parameter in narrowing.parameters()) / 1e6) == 56


def test_sizes_are_those_of_table_9() -> None:
    table = {
        "trime-247m": (16, 1024, 4096, 8),
        "trime-150m": (16, 410, 2100, 10),
        "trime-7m": (8, 128, 512, 4),
        "trime-38m": (12, 512, 2048, 8),
        "trime-39m": (6, 512, 1024, 4),
    }
    for name, sizes in table.items():
        config: Any = preset(name)
        found = (config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads)
        assert found == sizes
    assert preset("trime-39m").encoder_layers == 6  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "millions"), [("memorizing", 200), ("memorizing-1b", 1200), ("memorizing-8b", 8000)])
def test_memorizing_transformers_are_about_as_large_as_the_papers(name: str, millions: int) -> None:
    assert abs(parameters(name) / 1e6 / millions - 1) < 0.1
    config: Any = preset(name)
    assert (config.position, config.head_dim) == ("t5", 128)


@pytest.mark.parametrize(("name", "millions"), [("small", 2.9), ("base", 48.3)])
def test_translation_is_of_the_sizes_of_memory_transformer(name: str, millions: float) -> None:
    config: Any = preset(f"memory-transformer-{name}", vocab_size=8192)
    sizes = (config.encoder_layers, config.decoder_layers, config.hidden_size, config.intermediate_size)
    assert sizes == {"small": (4, 4, 128, 512), "base": (6, 6, 512, 2048)}[name]
    assert (config.num_attention_heads, config.dropout) == (8, 0.1)
    with torch.device("meta"):
        model = MnemicEncoderDecoderForConditionalGeneration(config)
    model.tie_weights()
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == millions


@pytest.mark.parametrize("name", [name for name in PRESETS if "small" in name])
def test_small_ones_are_small(name: str) -> None:
    assert 0 < parameters(name) < 6e6


def test_presets_can_be_changed_and_misspelt() -> None:
    assert preset("trime-38m", dropout=0.1, hidden_size=64).hidden_size == 64
    assert preset("trime-38m").hidden_size == 512
    with pytest.raises(UsageError, match="unknown preset 'trime-38': did you mean 'trime-38m'"):
        preset("trime-38")


def test_new_models_from_the_command_line() -> None:
    tokenizer = train_tokenizer([], "byte")
    model = new_model(tokenizer, *read_new_model("preset:small-sru,hidden_size=32,xl_length=7"))
    assert isinstance(model, MnemicSRUForCausalLM)
    assert (model.config.hidden_size, model.config.xl_length, model.config.attention_size) == (32, 7, 64)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    config, settings = read_new_model("preset:trime-38m")
    assert config(**settings).to_dict() == preset("trime-38m").to_dict()
    assert PRESETS["small-sru"][1]["hidden_size"] == 256  # what was typed changed the table not
    translation = new_model(tokenizer, *read_new_model("preset:small-translation"))
    assert isinstance(translation, MnemicEncoderDecoderForConditionalGeneration)
    assert read_new_model("gpt2") is None
    for text, message in (
        ("preset:trime-39", "did you mean 'trime-39m'"),
        ("preset:small,hiden_size=3", "did you mean 'hidden_size'"),
        ("sru:xl_length=0", "expected at least 1"),
        ("sru:rotary_base=3", "unknown setting of sru 'rotary_base'"),
    ):
        with pytest.raises(UsageError, match=message):
            read_new_model(text)
