"""Memory tokens among others, stopped in mid-forward, with copies of an encoder's output, and with odd shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

import mnemic
from mnemic.errors import UsageError
from tests.contract.architectures import ARCHITECTURES, VOCABULARY, build

OURS = "mnemic-encoder-decoder"


def ids(batch: int = 2, length: int = 7, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def made(architecture: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    return mnemic.augment(build(architecture), mnemic.MemoryTokens(count=3, **settings)).eval()


def pair() -> dict[str, Tensor]:
    return {"input_ids": ids(), "decoder_input_ids": ids(seed=1)}


def stop(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("part", ["model", "encoder"])
def test_a_forward_that_is_stopped_by_hand_leaves_nothing_behind(part: str) -> None:
    model = made(OURS, variant="control", gated=True)
    with torch.no_grad():
        before = model(**pair()).logits
        hook = model.model.encoder.layers[1].register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model(**pair()) if part == "model" else model.get_encoder()(input_ids=ids())
        hook.remove()
        assert torch.equal(model(**pair()).logits, before)
        base = model.memory.detach().eval()
        assert torch.equal(base(**pair()).logits, build(OURS)(**pair()).logits)


def test_a_layer_that_runs_again_within_another_models_forward_knows_its_own_memory() -> None:
    def gradient(nested: bool) -> Tensor:
        model, other = made("bert", variant="control").train(), made("bert")
        other.memory.change("tokens", count=5)
        model.gradient_checkpointing_enable()
        loss = model(input_ids=ids()).logits.square().sum()
        if not nested:
            loss.backward()
        else:
            other.bert.encoder.layer[0].register_forward_pre_hook(lambda *_: loss.backward())
            other(input_ids=ids())
        return model.memory.tokens.layer.vectors.grad

    torch.testing.assert_close(gradient(True), gradient(False))


@pytest.mark.parametrize("place", ["decoder", "both"])
@pytest.mark.parametrize("architecture", [OURS, "t5"])
def test_an_output_memory_goes_with_a_decoders_tokens_in_either_order(architecture: str, place: str) -> None:
    tokens, output = mnemic.MemoryTokens(count=3, place=place), mnemic.OutputMemory()
    found = []
    for memories in ((tokens, output), (output, tokens)):
        torch.manual_seed(0)
        model = mnemic.augment(build(architecture), *memories).eval()
        with torch.no_grad():
            found.append(model(**pair()).logits)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("variant", ["bottleneck", "bottleneck-skip"])
def test_a_bottleneck_goes_with_no_attention_memory(variant: str) -> None:
    tokens, attention = mnemic.MemoryTokens(count=3, variant=variant), mnemic.KNNAttention(size=32, k=2, layers=[0])
    model = build(OURS)
    with pytest.raises(mnemic.errors.MnemicError):
        mnemic.augment(model, tokens, attention)
    with pytest.raises(UsageError, match="one of the two"):
        mnemic.augment(model, attention, tokens)
    assert torch.equal(model(**pair()).logits, build(OURS)(**pair()).logits), "what was begun is undone"
    later = mnemic.augment(model, tokens)
    before = later(**pair()).logits
    with pytest.raises(mnemic.errors.MnemicError):
        mnemic.augment(later, attention)
    assert torch.equal(later(**pair()).logits, before)
    assert list(later.memory.handles) == ["tokens"]


def test_product_keys_that_no_sequence_would_reach_are_refused() -> None:
    skip = mnemic.MemoryTokens(count=3, variant="bottleneck-skip")
    small = {"slots": 16, "heads": 2, "k": 2, "key_dim": 8}
    for memories in (
        (skip, mnemic.ProductKeys(layers=[0], **small)),
        (mnemic.ProductKeys(layers=[0], **small), skip),
    ):
        with pytest.raises(UsageError, match="Put them into the decoder's, 2 and later"):
            mnemic.augment(build(OURS), *memories)
    model = mnemic.augment(build(OURS), skip, mnemic.ProductKeys(layers=[3], **small)).train()
    model(**pair()).logits.square().sum().backward()
    assert all(p.grad is not None for p in model.memory.product_keys.parameters())


def test_heads_that_do_not_divide_the_width() -> None:
    tokenizer = mnemic.train_tokenizer([], "byte")
    end = tokenizer.eos_token_id
    config = hf.T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=6, decoder_start_token_id=end,
        pad_token_id=end, eos_token_id=end,
    )  # fmt: skip
    model = mnemic.augment(
        hf.T5ForConditionalGeneration(config).eval(), mnemic.MemoryTokens(count=3, variant="control")
    )
    assert mnemic.attention_maps(model, tokenizer, "Hallo", target="Hi")["encoder"].weights.shape[1] == 6


@pytest.mark.parametrize("architecture", [OURS, "t5", "bart"])
def test_by_its_mask_a_copy_of_an_encoders_output_is_known_to_have_the_memory_in_it(architecture: str) -> None:
    model = made(architecture, gated=True)
    with torch.no_grad():
        model.memory.tokens.layer.gate.copy_(torch.tensor([0.5, 1e-20, 2.0]))
        encoded = model.get_encoder()(input_ids=ids()).last_hidden_state.clone()
        given = {"decoder_input_ids": ids(seed=1), "attention_mask": torch.ones_like(ids())}
        got = model(encoder_outputs=BaseModelOutput(last_hidden_state=encoded), **given).logits
        torch.testing.assert_close(got, model(**pair()).logits)


@pytest.mark.parametrize("architecture", ["t5", "bart", OURS])
@pytest.mark.parametrize("beams", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}])
def test_beams_read_a_gated_memory_as_a_forward_does(architecture: str, beams: dict[str, Any]) -> None:
    """Of an encoder's output each beam reads a copy; without a mask nothing else would tell what the memory is."""
    model = made(architecture, gated=True)
    for gate in (None, 0.5):
        if gate is not None:
            model.memory.tokens.layer.gate.data.fill_(gate)
        options = {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True, **beams}
        with torch.no_grad():
            scores = model.generate(ids(), **options).scores[0].softmax(-1)
            start = torch.full((2, 1), model.generation_config.decoder_start_token_id)
            expected = model(input_ids=ids(), decoder_input_ids=start).logits[:, -1].softmax(-1)
        torch.testing.assert_close(scores, expected.repeat_interleave(len(scores) // 2, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", [OURS, "t5", "bart"])
def test_masks_of_four_dimensions_are_the_bases_affair_while_the_memory_is_off(architecture: str) -> None:
    mask = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    mask[0, ..., -2:] = False
    model, given = made(architecture), pair() | {"attention_mask": mask}
    with torch.no_grad():
        expected = build(architecture)(**given).logits
        with model.memory.disabled():
            assert torch.equal(model(**given).logits, expected)
    with pytest.raises(UsageError, match=r"must be \(batch, length\)"):
        model(**given)


def test_hidden_states_have_what_the_controller_made() -> None:
    base = build(OURS)
    base(**pair(), output_hidden_states=True)  # after which transformers leaves its recorders in the layers
    model = mnemic.augment(base, mnemic.MemoryTokens(count=3, variant="control"))
    seen: list[Tensor] = []
    model.model.encoder.layers[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    states = model(**pair(), output_hidden_states=True).encoder_hidden_states
    assert torch.equal(states[1], seen[0])


def test_a_change_keeps_what_is_frozen_frozen_and_nothing_is_made_anew_without_need() -> None:
    model = made("bert", gated=True)
    model.memory.requires_grad_(False)
    vectors = model.memory.tokens.layer.vectors
    model.memory.change("tokens", count=3, gated=True, variant="plain")
    assert model.memory.tokens.layer.vectors is vectors
    model.memory.change("tokens", count=4)
    assert not any(p.requires_grad for p in model.memory.parameters())


@pytest.mark.parametrize("architecture", ["gpt2", "mistral", "mnemic-rotary"])
@pytest.mark.parametrize("variant", ["plain", "control"])
def test_a_model_without_its_memory_writes_as_its_base(architecture: str, variant: str) -> None:
    """A lesion to no token at all: with a KV cache too."""
    model = mnemic.augment(build(architecture), mnemic.MemoryTokens(count=3, variant=variant)).eval()
    model.memory.change("tokens", count=0)
    given = {"input_ids": torch.arange(3, 9)[None], "attention_mask": torch.ones(1, 6, dtype=torch.long)}
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    written = model.generate(**given, **how)
    assert torch.equal(written, build(architecture).eval().generate(**given, **how))


@pytest.mark.parametrize("architecture", ["mnemic-encoder-decoder", "t5", "bart"])
@pytest.mark.parametrize("place", ["encoder", "decoder", "both"])
def test_a_translation_without_its_memory_is_that_of_its_base(architecture: str, place: str) -> None:
    model = mnemic.augment(build(architecture), mnemic.MemoryTokens(count=3, place=place)).eval()
    model.memory.change("tokens", count=0)
    given = {"input_ids": torch.arange(3, 9)[None], "attention_mask": torch.ones(1, 6, dtype=torch.long)}
    for beams in (1, 3):
        how = {"max_new_tokens": 6, "num_beams": beams, "do_sample": False, "pad_token_id": 0, "eos_token_id": 1}
        assert torch.equal(model.generate(**given, **how), build(architecture).eval().generate(**given, **how))


@pytest.mark.parametrize("variant", ["plain", "control"])
def test_an_encoder_without_its_decoder_gives_the_length_of_the_input(variant: str) -> None:
    config = hf.T5Config.from_dict(ARCHITECTURES["t5"][1].to_dict() | {"num_labels": 3})
    torch.manual_seed(0)
    model: Any = mnemic.augment(hf.T5ForTokenClassification(config), mnemic.MemoryTokens(count=4, variant=variant))
    tokens = torch.randint(3, VOCABULARY, (2, 7))
    outputs = model(input_ids=tokens, labels=tokens % 3, output_hidden_states=True)
    assert outputs.logits.shape == (2, 7, 3)
    assert {states.shape[1] for states in outputs.hidden_states} == {7}
    assert len(model.memory.tokens.controllers) == (variant == "control")  # after the second layer nobody reads it
    outputs.loss.backward()
    assert all(part.grad is not None and part.grad.any() for part in model.memory.tokens.parameters())


def test_a_base_whose_inputs_are_expanded_by_a_static_method_generates() -> None:
    base = build("t5")

    class Other(type(base)):  # type: ignore[misc]
        @staticmethod
        def _expand_inputs_for_generation(*args: Any, **kwargs: Any) -> Any:
            return hf.GenerationMixin._expand_inputs_for_generation(None, *args, **kwargs)

    base.__class__ = Other
    model = mnemic.augment(base.eval(), mnemic.MemoryTokens(count=3, gated=True))
    options = {"max_new_tokens": 5, "num_beams": 2, "do_sample": False}
    found = model.generate(ids(), **options)
    with model.memory.disabled():
        assert torch.equal(model.generate(ids(), **options), found)


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "mistral"])
def test_padding_on_the_left_stays_out_of_the_way_with_a_cache(architecture: str) -> None:
    """Without position_ids, in one forward and in two."""
    model, text = made(architecture), ids(1, 9)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), text], 1)
    mask = (torch.arange(13) >= 4).long()[None]
    with torch.no_grad():
        expected = model(input_ids=text).logits
        torch.testing.assert_close(model(input_ids=padded, attention_mask=mask).logits[:, 4:], expected)
        first = model(input_ids=padded[:, :9], attention_mask=mask[:, :9], use_cache=True)
        given = {"past_key_values": first.past_key_values, "attention_mask": mask, "use_cache": True}
        torch.testing.assert_close(model(input_ids=padded[:, 9:], **given).logits, expected[:, 5:])
