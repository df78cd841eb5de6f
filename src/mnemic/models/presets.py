"""Backbones by name: the sizes of the TRIME paper (arXiv 2205.12674, Table 9), of Memorizing Transformers (arXiv
2203.08913), of Large Product Key Memory (arXiv 2010.03881, Table 1) and of Memory Transformer (arXiv 2006.11527), and
small ones for two cores.

What the sizes come to, and where they differ from the paper's figure:

    trime-247m   245.9M  fairseq also multiplies the first band's vectors with a square matrix (1024 x 1024)
    trime-150m   148.5M  all bands as wide as the model, as in Transformer-XL, or it would be 56M; the paper rounds
    trime-7m       7.1M
    trime-38m     38.0M
    trime-39m     39.5M  one table for source and target, as large as the two of fairseq's IWSLT'14 (8,848 + 6,632)
    memorizing   183.9M  12 layers of 1024 and a vocabulary of 32,000; the paper says around 200M
    memorizing-1b, -8b   the paper prints no shapes: 24 layers of 2048 are 1.27B, 40 of 4096 are 8.19B
    bert-base    109.5M  with ProductKeys() 514.8M, in place of the feed-forward 505.4M; the paper, counting heads
                         of pretraining, has 110M, 515M and 506M, as we have with them
    bert-large   335.2M  875.2M, 858.4M; the paper: 340M, 876M, 860M
    distilbert    67.0M  472.3M
    memory-transformer-small, -base   for translation; the paper prints no counts: with a vocabulary of 8,192 they are
                         2.9M and 48.3M
    trime-sru-42m 42.1M  the paper says 42M only: 10 layers and d / d' = 4 are those of the published SRU++ of enwik8
"""

from __future__ import annotations

from typing import Any

from transformers import BertConfig, DistilBertConfig, PreTrainedConfig

from mnemic.errors import unknown_name
from mnemic.models.config import MnemicDecoderConfig, MnemicEncoderDecoderConfig
from mnemic.models.sru_config import MnemicSRUConfig

_FAIRSEQ: dict[str, Any] = {"position": "sinusoidal", "activation": "relu"}
_T5: dict[str, Any] = {"position": "t5"}
_WIKITEXT_103 = _FAIRSEQ | {"vocab_size": 267_744, "adaptive_cutoffs": [20_000, 60_000]}

PRESETS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "trime-247m": (
        MnemicDecoderConfig,
        _WIKITEXT_103
        | {"num_hidden_layers": 16, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8},
    ),
    "trime-150m": (
        MnemicDecoderConfig,
        _WIKITEXT_103
        | {"num_hidden_layers": 16, "hidden_size": 410, "intermediate_size": 2100, "num_attention_heads": 10}
        | {"adaptive_factor": 1},
    ),
    "trime-7m": (
        MnemicDecoderConfig,
        _WIKITEXT_103
        | {"num_hidden_layers": 8, "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4},
    ),
    "trime-38m": (
        MnemicDecoderConfig,
        _FAIRSEQ
        | {"num_hidden_layers": 12, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
        | {"vocab_size": 256},
    ),
    "trime-39m": (
        MnemicEncoderDecoderConfig,
        {"encoder_layers": 6, "decoder_layers": 6, "hidden_size": 512, "intermediate_size": 1024}
        | {"num_attention_heads": 4, "vocab_size": 15_480},
    ),
    "trime-sru-42m": (
        MnemicSRUConfig,
        {"num_hidden_layers": 10, "hidden_size": 1920, "attention_size": 480, "vocab_size": 256, "xl_length": 512},
    ),
    "memorizing": (
        MnemicDecoderConfig,
        _T5
        | {"num_hidden_layers": 12, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8}
        | {"vocab_size": 32_000},
    ),
    "memorizing-1b": (
        MnemicDecoderConfig,
        _T5
        | {"num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16}
        | {"vocab_size": 32_000},
    ),
    "memorizing-8b": (
        MnemicDecoderConfig,
        _T5
        | {"num_hidden_layers": 40, "hidden_size": 4096, "intermediate_size": 16_384, "num_attention_heads": 32}
        | {"vocab_size": 32_000},
    ),
    "bert-base": (BertConfig, {}),
    "bert-large": (
        BertConfig,
        {"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16},
    ),
    "distilbert": (DistilBertConfig, {}),
    "memorizing-small": (
        MnemicDecoderConfig,
        _T5
        | {"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
        | {"head_dim": 64, "initializer_range": 0.05},
    ),
    "memorizing-256": (
        MnemicDecoderConfig,
        _T5 | {"num_hidden_layers": 12, "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8},
    ),
    "small": (
        MnemicDecoderConfig,
        _FAIRSEQ | {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4},
    ),
    "small-adaptive": (
        MnemicDecoderConfig,
        _FAIRSEQ
        | {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
        | {"vocab_size": 33_278, "adaptive_cutoffs": [4_000, 12_000]},
    ),
    "small-translation": (
        MnemicEncoderDecoderConfig,
        {"encoder_layers": 2, "decoder_layers": 2, "hidden_size": 128, "intermediate_size": 256},
    ),
    "memory-transformer-small": (
        MnemicEncoderDecoderConfig,
        {"encoder_layers": 4, "decoder_layers": 4, "hidden_size": 128, "intermediate_size": 512}
        | {"num_attention_heads": 8, "dropout": 0.1},
    ),
    "memory-transformer-base": (
        MnemicEncoderDecoderConfig,
        {"encoder_layers": 6, "decoder_layers": 6, "hidden_size": 512, "intermediate_size": 2048}
        | {"num_attention_heads": 8, "dropout": 0.1},
    ),
    "small-sru": (MnemicSRUConfig, {"num_hidden_layers": 4, "hidden_size": 256, "attention_size": 64}),
}


def preset(name: str, **changes: Any) -> PreTrainedConfig:
    """The config of the preset `name`, with some settings changed."""
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    kind, settings = PRESETS[name]
    return kind(**{**settings, **changes})
