"""The encoder-decoder as a Hugging Face model, against a version written out with torch's own attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from mnemic.errors import UsageError
from mnemic.models import MnemicEncoderDecoderConfig, MnemicEncoderDecoderForConditionalGeneration
from mnemic.models.blocks import Block
from tests.unit.models.naive_decoder import sinusoid

SOURCE = torch.randint(3, 61, (3, 9), generator=torch.Generator().manual_seed(1))
TARGET = torch.randint(3, 61, (3, 7), generator=torch.Generator().manual_seed(2))
CLOSE = {"rtol": 1e-8, "atol": 1e-8}


def tiny(norm: str, **options: Any) -> MnemicEncoderDecoderForConditionalGeneration:
    settings = {
        "vocab_size": 61,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "intermediate_size": 24,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "decoder_start_token_id": 2,
        **options,
    }
    torch.manual_seed(0)
    return (
        MnemicEncoderDecoderForConditionalGeneration(MnemicEncoderDecoderConfig(norm=norm, **settings)).double().eval()
    )


@pytest.fixture(params=["post", "pre"])
def norm(request: pytest.FixtureRequest) -> str:
    return request.param


def heads(states: Tensor) -> Tensor:
    return states.view(-1, 2, 8).transpose(0, 1)


def attended(queries: Tensor, keys: Tensor, values: Tensor, causal: bool) -> Tensor:
    scores = heads(queries) @ heads(keys).transpose(1, 2) / 8**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
    return (scores.softmax(-1) @ heads(values)).transpose(0, 1).reshape(-1, 16)


def naive_block(block: Block, states: Tensor, source: Tensor | None, post: bool) -> Tensor:
    def own(x: Tensor) -> Tensor:
        queries, keys, values = block.self_attn.qkv_proj(x).chunk(3, dim=-1)
        return block.self_attn.o_proj(attended(queries, keys, values, source is not None))

    def other(x: Tensor) -> Tensor:
        keys, values = block.cross_attn.kv_proj(source).chunk(2, dim=-1)
        return block.cross_attn.o_proj(attended(block.cross_attn.q_proj(x), keys, values, False))

    def fed(x: Tensor) -> Tensor:
        return block.mlp.down_proj(F.relu(block.mlp.up_proj(x)))

    parts = [(own, block.self_attn_norm), (fed, block.mlp_norm)]
    if source is not None:
        parts.insert(1, (other, block.cross_attn_norm))
    for sublayer, normalise in parts:
        states = normalise(states + sublayer(states)) if post else states + sublayer(normalise(states))
    return states


@torch.no_grad()
def test_logits_are_those_of_the_written_out_transformer(norm: str) -> None:
    model = tiny(norm)
    found = model(SOURCE, decoder_input_ids=TARGET).logits

    def embedded(ids: Tensor) -> Tensor:
        places = torch.stack([sinusoid(place, 16) for place in range(len(ids))])
        return model.lm_head.weight[ids] * 4 + places

    for row in range(3):
        source, target = embedded(SOURCE[row]), embedded(TARGET[row])
        for block in model.model.encoder.layers:
            source = naive_block(block, source, None, norm == "post")
        source = model.model.encoder.norm(source)
        for block in model.model.decoder.layers:
            target = naive_block(block, target, source, norm == "post")
        expected = model.lm_head(model.model.decoder.norm(target))
        torch.testing.assert_close(found[row], expected, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(norm: str, side: str) -> None:
    """Padding of the source and of the target."""
    model = tiny(norm)
    source, target = torch.zeros(1, 9, dtype=torch.long), torch.zeros(1, 7, dtype=torch.long)
    masks = [torch.zeros_like(source), torch.zeros_like(target)]
    here, there = (slice(4, 9), slice(3, 7)) if side == "left" else (slice(0, 5), slice(0, 4))
    source[:, here], target[:, there] = SOURCE[:1, :5], TARGET[:1, :4]
    masks[0][:, here], masks[1][:, there] = 1, 1
    found = model(source, attention_mask=masks[0], decoder_input_ids=target, decoder_attention_mask=masks[1]).logits
    expected = model(SOURCE[:1, :5], decoder_input_ids=TARGET[:1, :4]).logits
    torch.testing.assert_close(found[:, there], expected, **CLOSE)
    assert found.isfinite().all()


def test_labels_become_the_decoders_input(norm: str) -> None:
    model, labels = tiny(norm), TARGET.clone()
    labels[0, 4:] = -100
    outputs = model(SOURCE, labels=labels)
    shifted = model.prepare_decoder_input_ids_from_labels(labels)
    assert shifted[0].tolist() == [2, *labels[0, :4].tolist(), 0, 0]
    logits = model(SOURCE, decoder_input_ids=shifted).logits
    torch.testing.assert_close(outputs.logits, logits, **CLOSE)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(outputs.loss, expected, rtol=1e-10, atol=0)
    counted = model(SOURCE, labels=labels, num_items_in_batch=9).loss
    torch.testing.assert_close(counted * 9, expected * (labels != -100).sum(), rtol=1e-10, atol=0)


@torch.no_grad()
def test_incremental_decoding_equals_full(norm: str) -> None:
    model = tiny(norm)
    mask = torch.ones_like(SOURCE)
    mask[0, :4] = mask[1, 7:] = 0
    own = torch.ones_like(TARGET)
    own[2, :2] = 0
    full = model(SOURCE, attention_mask=mask, decoder_input_ids=TARGET, decoder_attention_mask=own).logits
    encoded, cache, pieces = model.get_encoder()(SOURCE, attention_mask=mask), None, []
    for low, high in ((0, 2), (2, 3), (3, 7)):
        outputs = model(
            encoder_outputs=encoded,
            attention_mask=mask,
            decoder_input_ids=TARGET[:, low:high],
            decoder_attention_mask=own[:, :high],
            past_key_values=cache,
            use_cache=True,
        )
        cache = outputs.past_key_values
        pieces.append(outputs.logits)
    torch.testing.assert_close(torch.cat(pieces, 1)[own == 1], full[own == 1], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [{"do_sample": False}, {"do_sample": True}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}],
)
def test_generation_with_and_without_cache(norm: str, options: dict[str, Any]) -> None:
    model, mask = tiny(norm), torch.ones_like(SOURCE)
    mask[0, :4] = 0

    def generated(**more: Any) -> Tensor:
        torch.manual_seed(3)
        return model.generate(SOURCE, attention_mask=mask, max_new_tokens=8, **options, **more)

    assert torch.equal(generated(use_cache=True), generated(use_cache=False))


@torch.no_grad()
def test_ways_to_call_it(norm: str) -> None:
    model = tiny(norm)
    full = model(SOURCE, decoder_input_ids=TARGET)
    embeds = model.get_input_embeddings()(SOURCE)
    torch.testing.assert_close(model(inputs_embeds=embeds, decoder_input_ids=TARGET).logits, full.logits, **CLOSE)
    targets = model.get_decoder().embed_tokens(TARGET)
    torch.testing.assert_close(model(SOURCE, decoder_inputs_embeds=targets).logits, full.logits, **CLOSE)
    encoded = model.get_encoder()(SOURCE)
    for given in (encoded, encoded.to_tuple()):
        torch.testing.assert_close(model(encoder_outputs=given, decoder_input_ids=TARGET).logits, full.logits, **CLOSE)
    moved = model.get_encoder()(SOURCE, position_ids=torch.arange(9)[None]).last_hidden_state
    torch.testing.assert_close(moved, encoded.last_hidden_state, **CLOSE)
    moved = model.get_encoder()(SOURCE, position_ids=torch.arange(1, 10)[None]).last_hidden_state
    assert (moved - encoded.last_hidden_state).abs().max() > 1e-3
    outputs = model(SOURCE, decoder_input_ids=TARGET, output_hidden_states=True)
    assert (len(outputs.encoder_hidden_states), len(outputs.decoder_hidden_states)) == (3, 4)
    model.set_attn_implementation("eager")
    outputs = model(SOURCE, decoder_input_ids=TARGET, output_attentions=True)
    assert [tuple(weights.shape) for weights in outputs.cross_attentions] == [(3, 2, 7, 9)] * 3
    assert (len(outputs.encoder_attentions), len(outputs.decoder_attentions)) == (2, 3)
    torch.testing.assert_close(outputs.logits, full.logits, **CLOSE)


def test_gradient_checkpointing_changes_nothing(norm: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = tiny(norm).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(SOURCE, labels=TARGET).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tied", [True, False])
def test_saved_and_loaded(norm: str, tied: bool, tmp_path: Path) -> None:
    model = tiny(norm, tie_word_embeddings=tied)
    one = model.lm_head.weight is model.model.encoder.embed_tokens.weight
    assert one is (model.model.decoder.embed_tokens.weight is model.model.encoder.embed_tokens.weight) is tied
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    for one, other in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])
    logits = [each(SOURCE, decoder_input_ids=TARGET).logits for each in (model, loaded)]
    torch.testing.assert_close(*logits, rtol=1e-12, atol=1e-12)


def test_parameters_are_counted_as_in_the_paper() -> None:
    """The Memory Transformer's small baseline: d_model 128, d_ff 512, h 8, here with 4 layers on each side."""
    d, ff, vocabulary, layers = 128, 512, 1000, 4
    attention, feed = 4 * d * d + 4 * d, 2 * d * ff + ff + d
    expected = layers * (attention + feed + 2 * 2 * d) + layers * (2 * attention + feed + 3 * 2 * d) + vocabulary * d
    config = MnemicEncoderDecoderConfig(vocab_size=vocabulary, hidden_size=d, num_attention_heads=8)
    assert MnemicEncoderDecoderForConditionalGeneration(config).num_parameters() == expected


def test_embeddings_can_be_resized(norm: str) -> None:
    model = tiny(norm)
    with torch.no_grad():
        before = model(SOURCE, decoder_input_ids=TARGET).logits
        model.resize_token_embeddings(70, mean_resizing=False)
        after = model(SOURCE, decoder_input_ids=TARGET).logits
    torch.testing.assert_close(after[..., :61], before, **CLOSE)
    assert model.model.decoder.embed_tokens.num_embeddings == 70


def test_wrong_inputs_are_refused(norm: str) -> None:
    model = tiny(norm)
    with pytest.raises(UsageError, match="exactly one"):
        model(SOURCE)
    with pytest.raises(UsageError, match="need decoder_start_token_id"):
        tiny(norm, decoder_start_token_id=None)(SOURCE, labels=TARGET)
