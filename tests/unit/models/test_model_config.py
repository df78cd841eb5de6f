"""The configs: checked, documented, and the same after a round trip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from mnemic.errors import UsageError
from mnemic.models import MnemicDecoderConfig, MnemicEncoderDecoderConfig

KINDS = [MnemicDecoderConfig, MnemicEncoderDecoderConfig]


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_is_documented(kind: Any) -> None:
    assert {"vocab_size", "hidden_size", "num_attention_heads", "dropout"} <= set(kind.help())
    assert all(text.endswith(".") and len(text) > 15 for text in kind.help().values())


@pytest.mark.parametrize(
    "config",
    [
        MnemicDecoderConfig(
            position="t5", xl_length=64, adaptive_cutoffs=[100, 1000], head_dim=10, eos_token_id=[1, 2]
        ),
        MnemicEncoderDecoderConfig(norm="pre", hidden_size=128, decoder_start_token_id=3, pad_token_id=0),
    ],
)
def test_round_trip(config: Any, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is type(config)
    assert {name: getattr(loaded, name) for name in config.help()} == {
        name: getattr(config, name) for name in config.help()
    }


def test_sizes_left_out_are_filled_in() -> None:
    config = MnemicDecoderConfig(hidden_size=48, num_attention_heads=3)
    assert (config.head_dim, config.intermediate_size) == (16, 192)
    assert MnemicEncoderDecoderConfig(hidden_size=128).d_model == 128


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position": "alibi"}, "position = 'alibi': expected one of 't5', 'xl', 'rotary', 'sinusoidal'"),
        ({"hidden_size": "wide"}, "hidden_size = 'wide': expected a whole number"),
        ({"num_hidden_layer": 2}, "no option 'num_hidden_layer': did you mean 'num_hidden_layers'"),
        ({"hidden_size": 10, "num_attention_heads": 3}, "does not divide by num_attention_heads 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0: expected at least 1"),
        ({"dropout": 1.0}, "dropout = 1.0: expected 0 or more, below 1"),
        ({"xl_length": -1}, "xl_length = -1"),
        ({"head_dim": 7}, "'rotary' needs an even width, but it is 7"),
        ({"position": "t5", "relative_buckets": 2}, "expected at least 4 buckets"),
        ({"adaptive_cutoffs": [50, 20]}, "expected rising numbers between 0 and the vocabulary's size"),
        ({"adaptive_cutoffs": [20, 9000]}, "expected rising numbers"),
        ({"adaptive_cutoffs": [1, 2, 3, 4, 5]}, "would have no width left of hidden_size 256"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        MnemicDecoderConfig(**options)
    assert message in str(caught.value)


def test_other_settings_of_transformers_pass() -> None:
    config = MnemicDecoderConfig(output_hidden_states=True, num_labels=3, problem_of_mine=7)
    assert (config.output_hidden_states, config.num_labels, config.problem_of_mine) == (True, 3, 7)
