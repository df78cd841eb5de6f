"""The decoder as a Hugging Face model: against the written-out oracle, and in every way it can be called."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache, GPT2Config, GPT2LMHeadModel

from mnemic.errors import UsageError
from mnemic.models import MnemicDecoderConfig, MnemicDecoderForCausalLM, MnemicDecoderModel, XLCache, visibility
from tests.unit.models.conftest import tiny_decoder
from tests.unit.models.naive_decoder import naive_hidden, naive_logits

IDS = torch.randint(2, 61, (3, 11), generator=torch.Generator().manual_seed(1))
CLOSE = {"rtol": 1e-8, "atol": 1e-8}


@torch.no_grad()
def test_logits_are_those_of_the_oracle(position: str) -> None:
    model = tiny_decoder(position)
    found = model(IDS).logits
    for row in range(3):
        expected = naive_logits(model, IDS[row], torch.zeros(11, dtype=torch.bool))
        torch.testing.assert_close(found[row], expected, **CLOSE)


@torch.no_grad()
def test_documents_in_a_row_are_those_of_the_oracle(position: str) -> None:
    model = tiny_decoder(position)
    starts = torch.zeros(3, 11, dtype=torch.bool)
    starts[0, [0, 5]] = starts[1, [2, 3, 10]] = True
    found = model(IDS, document_starts=starts).logits
    for row in range(3):
        torch.testing.assert_close(found[row], naive_logits(model, IDS[row], starts[row]), **CLOSE)
    alone = model(IDS[:1, 5:]).logits
    torch.testing.assert_close(found[:1, 5:], alone, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("second", [[5, 9, 9, 0, 100, 7], [40, 41, 42, 43, 44, 45]])
def test_given_positions_and_a_given_mask_are_used_as_they_are(position: str, second: list[int]) -> None:
    """Negative, uneven or rising positions, different in each row, and a mask that lets tokens see ahead."""
    model = tiny_decoder(position)
    positions = torch.tensor([[-2, -1, 0, 1, 2, 3], second])
    sees = torch.rand(2, 6, 6) < 0.6
    sees |= torch.eye(6, dtype=torch.bool)
    mask = torch.zeros(2, 1, 6, 6, dtype=torch.float64).masked_fill(~sees.unsqueeze(1), torch.finfo(torch.float64).min)
    found = model(IDS[:2, :6], position_ids=positions, attention_mask=mask).logits
    for row in range(2):
        embeds = model.model.embed_tokens(IDS[row, :6])
        expected = model.lm_head(naive_hidden(model, embeds, positions[row].tolist(), sees[row]))
        torch.testing.assert_close(found[row], expected, **CLOSE)


@torch.no_grad()
def test_a_given_mask_is_added_to_the_scores(position: str) -> None:
    """Shifting all scores of a query changes nothing, shifting those of one key does."""
    model, order = tiny_decoder(position), torch.arange(11)[None]
    mask = visibility(torch.zeros_like(order), torch.zeros_like(order), order, order, torch.float64)
    plain = model(IDS[:1]).logits
    torch.testing.assert_close(model(IDS[:1], attention_mask=mask).logits, plain, **CLOSE)
    torch.testing.assert_close(model(IDS[:1], attention_mask=mask + 2.5).logits, plain, **CLOSE)
    mask[..., 3] += 2.5
    assert (model(IDS[:1], attention_mask=mask).logits - plain)[:, 4:].abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(position: str, side: str) -> None:
    model = tiny_decoder(position)
    short = IDS[:1, :6]
    padded, mask = torch.zeros(2, 11, dtype=torch.long), torch.ones(2, 11, dtype=torch.long)
    where = slice(5, 11) if side == "left" else slice(0, 6)
    padded[0, where], padded[1] = short[0], IDS[1]
    mask[0] = 0
    mask[0, where] = 1
    found = model(padded, attention_mask=mask).logits
    torch.testing.assert_close(found[0, where], model(short).logits[0], **CLOSE)
    torch.testing.assert_close(found[1:], model(IDS[1:2]).logits, **CLOSE)


@torch.no_grad()
def test_packed_rows_are_kept_apart_as_by_other_models(position: str) -> None:
    """transformers' convention: positions that restart, without a mask, mean packed documents."""
    model = tiny_decoder(position).train()  # no cache
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]])
    found = model(IDS[:1], position_ids=positions).logits
    torch.testing.assert_close(found[:, 4:], model(IDS[:1, 4:]).logits, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("cuts", [(3, 4, 9), (10,), tuple(range(1, 11))])
def test_incremental_decoding_equals_full(position: str, cuts: tuple[int, ...]) -> None:
    """With transformers' own cache, left padding included."""
    model = tiny_decoder(position)
    mask = torch.ones_like(IDS)
    mask[1, :2] = 0
    full = model(IDS, attention_mask=mask).logits
    cache, pieces, bounds = DynamicCache(), [], [0, *cuts, 11]
    for low, high in itertools.pairwise(bounds):
        outputs = model(IDS[:, low:high], attention_mask=mask[:, :high], past_key_values=cache, use_cache=True)
        pieces.append(outputs.logits)
    torch.testing.assert_close(torch.cat(pieces, 1)[mask == 1], full[mask == 1], **CLOSE)


@torch.no_grad()
def test_memory_before_left_padding_keeps_its_distance(position: str) -> None:
    """Vectors at positions -2 and -1, then padding, then text, then one token more by the cache."""
    model = tiny_decoder(position)
    memory = torch.randn(1, 2, 16, dtype=torch.float64)
    embeds = torch.cat([memory, model.model.embed_tokens(IDS[:1])], dim=1)
    expected = model(inputs_embeds=embeds, position_ids=torch.arange(-2, 11)[None]).logits[:, -1]
    gap = torch.zeros(1, 3, 16, dtype=torch.float64)
    padded = torch.cat([memory, gap, embeds[:, 2:]], dim=1)
    positions = torch.cat([torch.tensor([[-2, -1, 0, 0, 0]]), torch.arange(11)[None]], dim=1)
    mask = torch.ones(1, 16, dtype=torch.long)
    mask[:, 2:5] = 0
    cache = DynamicCache()
    common = {"past_key_values": cache, "use_cache": True}
    model(inputs_embeds=padded[:, :-1], position_ids=positions[:, :-1], attention_mask=mask[:, :-1], **common)
    found = model(inputs_embeds=padded[:, -1:], position_ids=positions[:, -1:], attention_mask=mask, **common).logits
    torch.testing.assert_close(found[:, -1], expected, **CLOSE)


@torch.no_grad()
def test_ways_to_call_it(position: str) -> None:
    model = tiny_decoder(position)
    full = model(IDS).logits
    by_vectors = model(inputs_embeds=model.get_input_embeddings()(IDS)).logits
    torch.testing.assert_close(by_vectors, full, **CLOSE)
    torch.testing.assert_close(model(IDS, logits_to_keep=2).logits, full[:, -2:], **CLOSE)
    torch.testing.assert_close(model(IDS, logits_to_keep=torch.tensor([0, 4])).logits, full[:, [0, 4]], **CLOSE)
    assert torch.equal(model(IDS, return_dict=False)[0], full)
    outputs = model(IDS, output_hidden_states=True)
    assert [tuple(states.shape) for states in outputs.hidden_states] == [(3, 11, 16)] * 3
    model.set_attn_implementation("eager")
    weights = model(IDS, output_attentions=True).attentions
    assert len(weights) == 2
    torch.testing.assert_close(weights[1].sum(-1), torch.ones(3, 2, 11, dtype=torch.float64), **CLOSE)
    assert not weights[0].triu(1).any()


def test_labels_are_shifted_and_scored_as_by_gpt2(position: str) -> None:
    model = tiny_decoder(position)
    labels = IDS.clone()
    labels[0, :5] = -100
    outputs = model(IDS, labels=labels)
    expected = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(outputs.loss, expected, rtol=1e-10, atol=0)
    counted = model(IDS, labels=labels, num_items_in_batch=7).loss
    torch.testing.assert_close(counted * 7, expected * (labels[:, 1:] != -100).sum(), rtol=1e-10, atol=0)
    reference = GPT2LMHeadModel(
        GPT2Config(vocab_size=61, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
    )
    logits = torch.randn(3, 11, 61)
    theirs = reference.loss_function(logits, labels, vocab_size=61)
    torch.testing.assert_close(theirs, F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


@pytest.mark.parametrize("tied", [True, False])
def test_token_losses_are_those_of_the_logits(position: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mnemic.models.decoder.ROWS", 7)
    targets = IDS.roll(-1, 1)
    targets[2, 4:] = -100
    found = []
    for whole in (True, False):
        model = tiny_decoder(position, tie_word_embeddings=tied)
        if whole:
            logits = model(IDS).logits
            losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(3, 11)
        else:
            losses, outputs = model.token_losses(targets=targets, input_ids=IDS)
            assert outputs.last_hidden_state.shape == (3, 11, 16)
        losses.sum().backward()
        found.append((losses, [parameter.grad for parameter in model.parameters()]))
    torch.testing.assert_close(found[0][0], found[1][0], **CLOSE)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_nothing_flows_back_in_time(position: str) -> None:
    model = tiny_decoder(position)
    embeds = model.get_input_embeddings()(IDS).detach().requires_grad_()
    model(inputs_embeds=embeds).logits[:, 4].sum().backward()
    touched = embeds.grad.abs().sum(-1) > 0
    assert touched.tolist() == [[place <= 4 for place in range(11)]] * 3


def test_gradient_checkpointing_changes_nothing(position: str) -> None:
    gradients = []
    for arguments in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model = tiny_decoder(position).train()
        if arguments:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
        model(IDS, labels=IDS).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, *others in zip(*gradients, strict=True):
        for other in others:
            torch.testing.assert_close(plain, other, rtol=1e-10, atol=1e-12)


def test_an_ordinary_cache_is_not_written_twice_under_checkpointing(position: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = tiny_decoder(position).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        cache = DynamicCache()
        model(IDS, labels=IDS, past_key_values=cache, use_cache=True).loss.backward()
        assert cache.get_seq_length() == (0 if checkpointing else 11)
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_dropout_acts_in_training_only(position: str) -> None:
    model = tiny_decoder(position, dropout=0.3, attention_dropout=0.3)
    assert torch.equal(model(IDS).logits, model(IDS).logits)
    model.train()
    first, second = model(IDS).logits, model(IDS).logits
    assert (first - second).abs().max() > 1e-3
    first.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@torch.no_grad()
def test_bfloat16_runs_and_is_near(position: str) -> None:
    model = tiny_decoder(position, initializer_range=0.05)
    expected = model(IDS).logits
    found = model.to(torch.bfloat16)(IDS).logits
    assert found.dtype == torch.bfloat16
    assert (found.double() - expected).abs().max() < 0.1


def test_training_under_autocast(position: str) -> None:
    model = tiny_decoder(position, xl_length=8).float().train()
    cache, mask = model.new_cache(3), torch.ones_like(IDS)
    mask[0, :3] = mask[1, 7:] = mask[2] = 0
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inputs = {"input_ids": IDS, "attention_mask": mask, "past_key_values": cache}
            losses, _ = model.token_losses(targets=IDS, **inputs)
        assert losses.isfinite().all()
        losses.mean().backward()
    assert losses.dtype == torch.float32
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


GENERATION: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True, "top_k": 5},
    {"num_beams": 3},
    {"num_beams": 2, "num_return_sequences": 2, "do_sample": True},
]


@torch.no_grad()
@pytest.mark.parametrize("options", GENERATION)
def test_generation_with_and_without_cache(position: str, options: dict[str, Any]) -> None:
    model = tiny_decoder(position)
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0

    def generated(**more: Any) -> Tensor:
        torch.manual_seed(3)
        return model.generate(IDS, attention_mask=mask, max_new_tokens=7, **options, **more)

    assert torch.equal(generated(use_cache=True), generated(use_cache=False))


@torch.no_grad()
def test_generation_in_a_batch_equals_one_at_a_time(position: str) -> None:
    model = tiny_decoder(position)
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    together = model.generate(IDS, attention_mask=mask, max_new_tokens=7, do_sample=False, num_beams=2)
    alone = model.generate(IDS[:1, 4:], max_new_tokens=7, do_sample=False, num_beams=2)
    length = alone.shape[1] - 7
    assert torch.equal(together[0, 11 : 11 + alone.shape[1] - length], alone[0, length:])


@pytest.mark.parametrize("options", [{}, {"adaptive_cutoffs": [20]}, {"tie_word_embeddings": False}, {"xl_length": 4}])
def test_saved_and_loaded(position: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_decoder(position, **options)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is MnemicDecoderForCausalLM
    assert loaded.dtype == torch.float64
    for one, other in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-12, atol=1e-12)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is MnemicDecoderModel
    states = [backbone(IDS).last_hidden_state for backbone in (base, model.model)]
    torch.testing.assert_close(*states, rtol=1e-12, atol=1e-12)


def test_parameters_are_counted_as_in_the_paper() -> None:
    """Per block 4 d^2 + 2 d d_ff weights with their biases and two norms; GPT-2's count without learned positions."""
    layers, d, ff, heads, vocabulary = 3, 32, 64, 4, 61
    block = 4 * d * d + 4 * d + 2 * d * ff + ff + d + 4 * d
    body = layers * block + 2 * d + vocabulary * d
    expected = {"rotary": body, "sinusoidal": body, "t5": body + 32 * heads, "xl": body + layers * (d * d + 2 * d)}
    for position, count in expected.items():
        config = MnemicDecoderConfig(
            vocab_size=vocabulary,
            hidden_size=d,
            intermediate_size=ff,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            position=position,
        )
        assert MnemicDecoderForCausalLM(config).num_parameters() == count
    settings = {"n_embd": d, "n_inner": ff, "n_layer": layers, "n_head": heads, "n_positions": 16}
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, bos_token_id=1, eos_token_id=1, **settings))
    assert gpt2.num_parameters() - 16 * d == body


def test_weights_begin_as_they_should(position: str) -> None:
    model = tiny_decoder(position, hidden_size=64, num_hidden_layers=8, initializer_range=0.02)
    layer = model.model.layers[3]
    assert layer.self_attn.qkv_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert layer.mlp.down_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
    assert layer.self_attn.o_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model(IDS, labels=IDS).loss.item() == pytest.approx(torch.tensor(61.0).log().item(), rel=0.15)


@torch.no_grad()
def test_caches_that_a_forward_makes_by_itself() -> None:
    assert isinstance(tiny_decoder("rotary")(IDS).past_key_values, DynamicCache)
    assert isinstance(tiny_decoder("rotary", xl_length=4)(IDS).past_key_values, XLCache)
    assert tiny_decoder("rotary")(IDS, use_cache=False).past_key_values is None
    assert tiny_decoder("rotary").train()(IDS).past_key_values is None
    starts = torch.zeros(3, 11, dtype=torch.bool)
    assert tiny_decoder("rotary")(IDS, document_starts=starts).past_key_values is None


def test_embeddings_can_be_resized() -> None:
    model = tiny_decoder("rotary")
    with torch.no_grad():
        before = model(IDS).logits
        model.resize_token_embeddings(70, mean_resizing=False)
        after = model(IDS).logits
    assert after.shape[-1] == model.config.vocab_size == 70
    torch.testing.assert_close(after[..., :61], before, **CLOSE)


def test_wrong_inputs_are_refused() -> None:
    model = tiny_decoder("rotary")
    with pytest.raises(UsageError, match="exactly one"):
        model()
    with pytest.raises(UsageError, match="exactly one"):
        model(IDS, inputs_embeds=model.get_input_embeddings()(IDS))
    with pytest.raises(UsageError, match=r"labels of shape \(3, 4\)"):
        model(IDS, labels=IDS[:, :4])
    with pytest.raises(UsageError, match="targets of shape"):
        model.token_losses(IDS[:, :4], input_ids=IDS)
