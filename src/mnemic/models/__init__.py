"""Our own backbones: ordinary Hugging Face models, known to the Auto classes once this package is imported."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from mnemic.models.cache import XLCache
from mnemic.models.config import MnemicDecoderConfig, MnemicEncoderDecoderConfig
from mnemic.models.decoder import MnemicDecoderForCausalLM, MnemicDecoderModel
from mnemic.models.encoder_decoder import MnemicEncoderDecoderForConditionalGeneration, MnemicEncoderDecoderModel
from mnemic.models.masks import EVERY, PADDING, visibility
from mnemic.models.sru import MnemicSRUForCausalLM, MnemicSRUModel
from mnemic.models.sru_cache import SRUCache
from mnemic.models.sru_config import MnemicSRUConfig

__all__ = [
    "EVERY",
    "PADDING",
    "MnemicDecoderConfig",
    "MnemicDecoderForCausalLM",
    "MnemicDecoderModel",
    "MnemicEncoderDecoderConfig",
    "MnemicEncoderDecoderForConditionalGeneration",
    "MnemicEncoderDecoderModel",
    "MnemicSRUConfig",
    "MnemicSRUForCausalLM",
    "MnemicSRUModel",
    "SRUCache",
    "XLCache",
    "visibility",
]

for _config, _base, _auto, _model in (
    (MnemicDecoderConfig, MnemicDecoderModel, AutoModelForCausalLM, MnemicDecoderForCausalLM),
    (MnemicSRUConfig, MnemicSRUModel, AutoModelForCausalLM, MnemicSRUForCausalLM),
    (
        MnemicEncoderDecoderConfig,
        MnemicEncoderDecoderModel,
        AutoModelForSeq2SeqLM,
        MnemicEncoderDecoderForConditionalGeneration,
    ),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _base, exist_ok=True)
    _auto.register(_config, _model, exist_ok=True)
