"""The attention memory with caches and masks of all kinds, and when it is saved and loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import mnemic
from mnemic.memories.attention.reading import tokens_that_are_real
from mnemic.models import MnemicDecoderConfig, MnemicDecoderForCausalLM
from tests.contract.architectures import VOCABULARY
from tests.unit.memories.test_attention_edges import memorizing, tokens


def with_xl_cache(architecture: str) -> Any:
    if architecture == "llama":
        return memorizing(xl_length=12, size=40)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "xl_length": 12}
    base = MnemicDecoderForCausalLM(MnemicDecoderConfig(vocab_size=VOCABULARY, **shape))
    return mnemic.augment(base, mnemic.KNNAttention(layers=[0], k=4, size=40)).eval()


XL = pytest.mark.parametrize("model", [with_xl_cache("llama"), with_xl_cache("ours")], ids=["llama", "ours"])


@pytest.mark.parametrize("settings", [{"search": "exact"}, {"search": "lists"}, {"dense": True}])
def test_a_memory_that_is_loaded_takes_no_more_room(settings: dict[str, Any]) -> None:
    model = memorizing(size=600, **settings)
    model.memory.read(tokens(1, 2000))
    for _ in range(3):
        before = model.memory.state()
        model.memory.load_state(before)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.memory.state().items())
        row = model.memory.attention.shared.memories[0].rows[0]
        assert 2 * row.values.numel() * 4 == model.memory.state_bytes(1)


def test_what_an_xl_cache_holds_may_grow() -> None:
    config = MnemicDecoderConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    model = mnemic.augment(MnemicDecoderForCausalLM(config), mnemic.KNNAttention(k=4, size=100)).eval()
    model.config.xl_length = 700
    cache = model.new_cache(1)
    with torch.no_grad():
        for part in tokens(1, 1500).split(100, 1):
            model(part, past_key_values=cache)
    (memory,) = cache.riders[0].memories.values()
    assert memory.rows[0].visible(700) == (700, 800)


@XL
def test_a_session_with_an_xl_cache_goes_on_from_its_tensors(model: Any) -> None:
    cache, ids = model.memory.new_cache(1), tokens(1, 60)
    with torch.no_grad():
        for part in ids[:, :40].split(10, 1):
            model(part, past_key_values=cache)
        loaded = model.memory.new_cache(1)
        loaded.load_tensors(cache.tensors())
        for part in ids[:, 40:].split(10, 1):
            wanted, found = (model(part, past_key_values=one).logits for one in (cache, loaded))
            assert torch.equal(wanted, found)
        for name, tensor in cache.tensors().items():
            assert torch.equal(tensor, loaded.tensors()[name]), name
        again = model.memory.new_cache(1)
        again.load_tensors({name: t for name, t in cache.tensors().items() if not name.startswith("rider.")})
        assert (
            model(part, past_key_values=again).logits - model(part, past_key_values=cache).logits
        ).abs().max() > 1e-4


@XL
def test_a_session_remembers_whatever_a_forward_returns(model: Any) -> None:
    results = []
    for return_dict in (True, False):
        cache = model.memory.new_cache(1)
        with torch.no_grad():
            results += [
                model(part, past_key_values=cache, return_dict=return_dict)[0] for part in tokens(1, 60).split(10, 1)
            ]
        assert len(cache.riders) == 1
    for wanted, found in zip(results[:6], results[6:], strict=True):
        assert torch.equal(wanted, found)


def test_padding_on_the_left_of_what_is_read_takes_no_positions() -> None:
    model, ids = memorizing("gpt2"), tokens(1, 20)
    logits = []
    for pads in (0, 5):
        model.memory.reset()
        padded = torch.nn.functional.pad(ids, (pads, 0))
        model.memory.read(padded, torch.nn.functional.pad(torch.ones_like(ids), (pads, 0)))
        with torch.no_grad():
            logits.append(model(tokens(1, 9, seed=3)).logits)
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mix", ["gate", "joint"])
def test_a_cache_of_fixed_length_changes_nothing(mix: str) -> None:
    model = memorizing(mix=mix)
    model.memory.read(tokens(1, 40))
    how = {"max_new_tokens": 6, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    how |= {"pad_token_id": 0, "eos_token_id": None}
    usual = model.generate(tokens(1, 9, seed=1), **how)
    fixed = model.generate(tokens(1, 9, seed=1), cache_implementation="static", disable_compile=True, **how)
    torch.testing.assert_close(torch.stack(usual.scores), torch.stack(fixed.scores), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["gemma3", "mistral", "llama"])
def test_padded_rows_with_a_cache_of_fixed_length(architecture: str) -> None:
    """`generate` gives 4D masks then, several where a model has windows in some layers."""
    model = memorizing(architecture)
    ids, mask = tokens(2, 9, seed=1), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    how = {"max_new_tokens": 6, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    how |= {"pad_token_id": 0, "eos_token_id": None, "attention_mask": mask}
    model.memory.read(tokens(1, 40))
    usual = model.generate(ids, **how)
    fixed = model.generate(ids, cache_implementation="static", disable_compile=True, **how)
    torch.testing.assert_close(torch.stack(usual.scores), torch.stack(fixed.scores), atol=1e-5, rtol=1e-4)


def test_which_tokens_are_real_is_told_by_masks_of_all_kinds() -> None:
    real = torch.tensor([[False, True, True], [True, True, True]])
    visible = (real[:, None, :] & torch.ones(3, 3, dtype=torch.bool).tril())[:, None]
    wide = torch.nn.functional.pad(visible, (0, 5))
    numbers = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    for mask in (real, real.long(), visible, wide, numbers, {"a": visible[..., :2, :2], "b": wide, "c": None}):
        assert torch.equal(tokens_that_are_real({"attention_mask": mask}, None), real)
    assert tokens_that_are_real({"attention_mask": None}, None) is None
    assert tokens_that_are_real({"attention_mask": {"a": None}}, None) is None
    cache = DynamicCache()
    cache.update(torch.zeros(2, 1, 4, 2), torch.zeros(2, 1, 4, 2), 0)
    later = torch.nn.functional.pad(visible, (4, 1), value=True)
    assert torch.equal(tokens_that_are_real({"attention_mask": later}, cache), real)
