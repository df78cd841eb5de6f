"""What goes wrong at the edges of an augmented model if nobody looks: caches, nesting, precision, files."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import mnemic
from mnemic.errors import UnsupportedModel, UsageError
from tests.contract.architectures import ARCHITECTURES, VOCABULARY, build
from tests.contract.test_memory import inputs, logits

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def ids(batch: int = 2, length: int = 10, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def augmented(name: str, **settings: Any) -> Any:
    torch.manual_seed(1)
    return mnemic.augment(build(name), mnemic.MemoryTokens(count=4, **settings))


# -- caches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2", "mnemic-rotary"])
def test_a_memory_switched_off_in_mid_text_is_not_read(name: str) -> None:
    """Closed gates and then `disabled()`: all of it is the base."""
    model, text = augmented(name, gated=True), ids(2, 20)
    with torch.no_grad():
        cache = model(text[:, :12], use_cache=True).past_key_values
        with model.memory.disabled():
            rest = model(text[:, 12:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(rest, logits(build(name), input_ids=text)[:, 12:], **CLOSE)


@pytest.mark.parametrize("name", ["t5", "bart", "mnemic-encoder-decoder"])
@pytest.mark.parametrize("masked", [False, True])
def test_an_encoded_source_says_by_itself_whether_the_memory_is_in_it(name: str, masked: bool) -> None:
    model, base = augmented(name, gated=True), build(name)
    given = inputs(base)
    source, target = given["input_ids"], {"decoder_input_ids": given["decoder_input_ids"]}
    if masked:
        target["attention_mask"] = torch.ones_like(source)
    expected = logits(base, **given)
    with torch.no_grad():
        with_memory = model.get_encoder()(source)
        without = base.get_encoder()(source)
        torch.testing.assert_close(model(encoder_outputs=with_memory, **target).logits, expected, **CLOSE)
        torch.testing.assert_close(model(encoder_outputs=without, **target).logits, expected, **CLOSE)
        with model.memory.disabled():
            torch.testing.assert_close(model(encoder_outputs=with_memory, **target).logits, expected, **CLOSE)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "mistral"])
def test_a_cache_that_was_reset_is_empty(name: str) -> None:
    model, cache = augmented(name), hf.DynamicCache()
    first = logits(model, input_ids=ids(), past_key_values=cache)
    cache.reset()
    torch.testing.assert_close(logits(model, input_ids=ids(), past_key_values=cache), first, **CLOSE)


def test_a_cache_filled_without_the_memory_is_refused() -> None:
    model = augmented("llama")
    with model.memory.disabled():
        cache = model(ids(), use_cache=True).past_key_values
    with pytest.raises(UsageError, match="filled without the memory"):
        model(ids(), past_key_values=cache)


def test_an_xl_cache_forgets_the_prefix_when_the_forward_ends() -> None:
    config = ARCHITECTURES["mnemic-rotary"][1]
    base = type(build("mnemic-rotary"))(type(config)(**{**config.to_dict(), "xl_length": 30})).eval()
    plain = copy.deepcopy(base)
    model = mnemic.augment(base, mnemic.MemoryTokens(count=4, gated=True))
    cache = model.new_cache(2)
    with torch.no_grad():
        model(ids(), past_key_values=cache, use_cache=True)
        model.memory.detach()
        rest = model(ids(seed=1), past_key_values=cache, use_cache=True).logits
        long = plain(torch.cat([ids(), ids(seed=1)], 1), use_cache=False).logits
    assert cache.length == 20
    torch.testing.assert_close(rest, long[:, 10:], **CLOSE)


# -- switches, nesting, copies -----------------------------------------------------------------------------------------


def test_disabled_nests() -> None:
    model = augmented("llama")
    on = logits(model, input_ids=ids())
    with model.memory.disabled():
        with model.memory.disabled():
            pass
        assert torch.equal(logits(model, input_ids=ids()), logits(build("llama"), input_ids=ids()))
    assert torch.equal(logits(model, input_ids=ids()), on)


@pytest.mark.parametrize("inner", ["plain mistral", "bert", "t5", "itself"])
def test_a_model_that_runs_inside_another_disturbs_neither(inner: str) -> None:
    outer = augmented("mistral", gated=True)
    other = {"plain mistral": build("mistral"), "itself": outer}.get(inner) or augmented(inner, gated=True)
    given = inputs(other)
    expected = logits(outer, input_ids=ids()), logits(other, **given)
    seen: list[torch.Tensor] = []

    def run_inside(*_: Any) -> None:
        if not seen:
            seen.append(torch.empty(0))
            seen[0] = logits(other, **given)

    hook = outer.model.layers[0].register_forward_hook(run_inside)
    got = logits(outer, input_ids=ids())
    hook.remove()
    assert torch.equal(got, expected[0])
    assert torch.equal(seen[0], expected[1])


def test_a_pickle_is_a_copy() -> None:
    model = augmented("llama")
    twin = pickle.loads(pickle.dumps(model))
    assert type(twin) is type(model)
    assert torch.equal(logits(twin, input_ids=ids()), logits(model, input_ids=ids()))
    twin.memory.detach()
    assert torch.equal(logits(twin, input_ids=ids()), logits(build("llama"), input_ids=ids()))


def test_a_part_and_the_whole_are_not_both_augmented() -> None:
    model = build("llama")
    mnemic.augment(model.model, mnemic.MemoryTokens())
    with pytest.raises(UsageError, match="a part of this LlamaForCausalLM has a memory already"):
        mnemic.augment(model, mnemic.MemoryTokens())


def test_a_memory_that_cannot_be_attached_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from mnemic.memories.tokens.attach import Attached

    def refuse(*_: Any) -> None:
        raise UnsupportedModel("not in this model")

    monkeypatch.setattr(Attached, "attach", refuse)
    model = build("llama")
    with pytest.raises(UnsupportedModel, match="not in this model"):
        mnemic.augment(model, mnemic.MemoryTokens())
    assert type(model) is hf.LlamaForCausalLM
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


# -- precision and attention implementations ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "bert"])
def test_half_precision_stays_finite_and_closed(name: str) -> None:
    model = augmented(name, gated=True).half()
    with model.memory.disabled():
        base = logits(model, **inputs(model))
    torch.testing.assert_close(logits(model, **inputs(model)), base, rtol=0.05, atol=0.05)


def test_other_attention_implementations_are_refused_where_they_would_be_wrong() -> None:
    model = augmented("llama", gated=True)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(UnsupportedModel, match="'flex_attention' does not take the masks"):
        model(ids())
    model.set_attn_implementation("eager")
    torch.testing.assert_close(logits(model, input_ids=ids()), logits(build("llama"), input_ids=ids()), **CLOSE)


# -- generation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_generation_from_embeddings(name: str) -> None:
    model = augmented(name)
    how = {"attention_mask": torch.ones(2, 10, dtype=torch.long), "max_new_tokens": 6, "do_sample": False}
    embeds = model.get_input_embeddings()(ids())
    got = model.generate(inputs_embeds=embeds, eos_token_id=None, pad_token_id=0, **how)
    assert torch.equal(got, model.generate(ids(), eos_token_id=None, pad_token_id=0, **how)[:, 10:])


def test_prompt_lookup_is_right_or_refused() -> None:
    how = {"attention_mask": torch.ones(1, 10, dtype=torch.long), "max_new_tokens": 8, "do_sample": False}
    how |= {"eos_token_id": None, "pad_token_id": 0}
    model = augmented("llama")
    looked_up = model.generate(ids(1), prompt_lookup_num_tokens=3, **how)
    assert torch.equal(looked_up, model.generate(ids(1), **how))
    with pytest.raises(UsageError, match="prompt-lookup decoding do not go with memory tokens"):
        augmented("mistral").generate(ids(1), prompt_lookup_num_tokens=3, **how)


@pytest.mark.parametrize(
    "name", [n for n, (kind, _) in ARCHITECTURES.items() if "CausalLM" in kind.__name__] + ["gpt2"]
)
def test_packed_rows_stay_apart_as_in_the_base(name: str) -> None:
    model, base = augmented(name, gated=True), build(name)
    if not model.memory.separates_documents:
        pytest.skip("ALiBi has no position_ids to pack rows by")
    packed = torch.cat([torch.arange(4), torch.arange(6)])[None]
    given = {"input_ids": ids(), "position_ids": packed, "use_cache": False}
    torch.testing.assert_close(logits(model, **given), logits(base, **given), **CLOSE)


# -- files -------------------------------------------------------------------------------------------------------------


def same_after_loading(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    loaded = mnemic.load(folder).eval()
    given = inputs(model)
    assert torch.equal(logits(loaded, **given), logits(model.eval(), **given))


def test_a_loaded_model_is_saved_where_it_came_from(tmp_path: Path) -> None:
    augmented("llama").save_pretrained(tmp_path / "own")
    loaded = mnemic.load(tmp_path / "own")
    same_after_loading(loaded, tmp_path / "own")
    base = build("llama")
    base.save_pretrained(tmp_path / "base")
    base = hf.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    same_after_loading(mnemic.augment(base, mnemic.MemoryTokens()), tmp_path / "base")


@pytest.mark.parametrize("change", ["weights", "vocabulary", "head"])
def test_a_base_changed_before_it_got_its_memory_is_written(change: str, tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "base")
    kind = hf.LlamaForSequenceClassification if change == "head" else hf.LlamaForCausalLM
    base = kind.from_pretrained(tmp_path / "base")
    if change == "weights":
        base.lm_head.weight.data.add_(0.5)
    if change == "vocabulary":
        base.resize_token_embeddings(VOCABULARY + 4)
    same_after_loading(mnemic.augment(base, mnemic.MemoryTokens()), tmp_path / "saved")
    assert (tmp_path / "saved/config.json").exists()


def test_settings_and_precision_of_the_base_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("mistral").save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    base = hf.MistralForCausalLM.from_pretrained("base", sliding_window=3, dtype=torch.bfloat16)
    model = mnemic.augment(base, mnemic.MemoryTokens())
    model.save_pretrained("saved")
    assert not Path("saved/config.json").exists()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    loaded = mnemic.load("../saved")
    assert (loaded.config.sliding_window, loaded.dtype) == (3, torch.bfloat16)
    assert torch.equal(logits(loaded.eval(), input_ids=ids()), logits(model.eval(), input_ids=ids()))


def test_shards_of_an_earlier_save_do_not_stay(tmp_path: Path) -> None:
    model = augmented("llama")
    for options in ({}, {"max_shard_size": "5KB"}, {}):
        with torch.no_grad():
            model.lm_head.weight += 1
        model.save_pretrained(tmp_path, **options)
        loaded = mnemic.load(tmp_path).eval()
        assert torch.equal(logits(loaded, input_ids=ids()), logits(model, input_ids=ids()))
    assert [p.name for p in tmp_path.glob("model*")] == ["model.safetensors"]


def test_a_memory_under_adapters_is_not_lost_silently(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = augmented("llama")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(UsageError, match="merge_and_unload"):
        model.save_pretrained(tmp_path)
    wrapped = peft.get_peft_model(
        augmented("llama"), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["memory"])
    )
    with pytest.raises(UsageError, match="instead of modules_to_save"):
        wrapped(ids())
    wrapped = peft.get_peft_model(
        augmented("llama"), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["layer"])
    )
    wrapped(ids(), labels=ids()).loss.backward()
    trained = {n for n, p in wrapped.named_parameters() if p.grad is not None and "memory" in n}
    assert trained == {"base_model.model.memory.tokens.layer.modules_to_save.default.vectors"}


def test_a_base_that_does_not_fit_is_left_as_it_was(tmp_path: Path) -> None:
    augmented("llama").save_pretrained(tmp_path)
    other = build("llama", seed=4)
    with pytest.raises(UsageError, match="other base weights"):
        mnemic.load(tmp_path, base=other)
    assert type(other) is hf.LlamaForCausalLM
    assert not hasattr(other, "memory")
