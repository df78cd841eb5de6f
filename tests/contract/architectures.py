"""A tiny random model of every supported architecture: two layers, the real modelling code."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedModel

from mnemic import models as ours

VOCABULARY, PAD, EOS, START = 48, 0, 1, 2

_SMALL = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": START}
_LLAMA = _SMALL | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_HEADS = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}
_BERT = _HEADS | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BART = _SMALL | {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": START,
    "forced_eos_token_id": None,
    "dropout": 0.0,
    "tie_word_embeddings": True,
}

_OURS = _SMALL | {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}

ARCHITECTURES: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "gpt2": (
        hf.GPT2LMHeadModel,
        hf.GPT2Config(
            **_SMALL, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        ),
    ),
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**_LLAMA)),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig(**_LLAMA, sliding_window=8)),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config(**_LLAMA)),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**_LLAMA, head_dim=8)),
    "gemma3": (
        hf.Gemma3ForCausalLM,
        hf.Gemma3TextConfig(
            **_LLAMA,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    "gpt_neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**_HEADS, rotary_pct=0.5)),
    "opt": (
        hf.OPTForCausalLM,
        hf.OPTConfig(
            **_SMALL,
            hidden_size=32,
            word_embed_proj_dim=16,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            dropout=0.0,
        ),
    ),
    "phi": (hf.PhiForCausalLM, hf.PhiConfig(**_LLAMA)),
    "olmo2": (hf.Olmo2ForCausalLM, hf.Olmo2Config(**_LLAMA)),
    "bloom": (hf.BloomForCausalLM, hf.BloomConfig(**_SMALL, hidden_size=32, n_layer=2, n_head=4)),
    "falcon": (
        hf.FalconForCausalLM,
        hf.FalconConfig(**_SMALL, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    ),
    "falcon-alibi": (
        hf.FalconForCausalLM,
        hf.FalconConfig(**_SMALL, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True),
    ),
    "bert": (hf.BertForMaskedLM, hf.BertConfig(**_BERT)),
    "roberta": (hf.RobertaForMaskedLM, hf.RobertaConfig(**_BERT)),
    "distilbert": (
        hf.DistilBertForMaskedLM,
        hf.DistilBertConfig(
            vocab_size=VOCABULARY,
            pad_token_id=PAD,
            dim=32,
            hidden_dim=48,
            n_layers=2,
            n_heads=4,
            max_position_embeddings=64,
            dropout=0.0,
            attention_dropout=0.0,
        ),
    ),
    "electra": (hf.ElectraForMaskedLM, hf.ElectraConfig(**_BERT, embedding_size=16)),
    "modernbert": (
        hf.ModernBertForMaskedLM,
        hf.ModernBertConfig(
            **_HEADS, cls_token_id=START, sep_token_id=EOS, local_attention=8, global_attn_every_n_layers=2
        ),
    ),
    "t5": (
        hf.T5ForConditionalGeneration,
        hf.T5Config(
            vocab_size=VOCABULARY,
            pad_token_id=PAD,
            eos_token_id=EOS,
            decoder_start_token_id=PAD,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
        ),
    ),
    "bart": (hf.BartForConditionalGeneration, hf.BartConfig(**_BART)),
    "marian": (hf.MarianMTModel, hf.MarianConfig(**_BART, scale_embedding=True)),
    **{
        f"mnemic-{position}": (
            ours.MnemicDecoderForCausalLM,
            ours.MnemicDecoderConfig(**_OURS, num_hidden_layers=2, position=position),
        )
        for position in ("t5", "xl", "rotary", "sinusoidal")
    },
    "mnemic-adaptive": (
        ours.MnemicDecoderForCausalLM,
        ours.MnemicDecoderConfig(**_OURS, num_hidden_layers=2, adaptive_cutoffs=[16, 32], adaptive_factor=2),
    ),
    "mnemic-sru": (
        ours.MnemicSRUForCausalLM,
        ours.MnemicSRUConfig(**_SMALL, hidden_size=32, num_hidden_layers=2, attention_size=16, attention_start=1.0),
    ),
    "mnemic-encoder-decoder": (
        ours.MnemicEncoderDecoderForConditionalGeneration,
        ours.MnemicEncoderDecoderConfig(**_OURS, encoder_layers=2, decoder_layers=2, decoder_start_token_id=START),
    ),
}


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """A tiny model whose weights are spread widely enough for its outputs to differ by position and token."""
    kind, config = ARCHITECTURES[name]
    torch.manual_seed(seed)
    model = kind(type(config).from_dict(config.to_dict()))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.requires_grad:
                parameter.normal_(0, 0.25)
    if model.can_generate():
        model.generation_config.pad_token_id = PAD
        model.generation_config.eos_token_id = EOS
    return model.eval()
