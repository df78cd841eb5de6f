"""Keys: what enters a module of any architecture, each token once, documents apart, the model left as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mnemic
from mnemic.errors import UnsupportedModel, UsageError
from mnemic.hf.anatomy import find
from mnemic.hf.keys import module_path
from mnemic.stores.build_config import Reading
from mnemic.stores.config import Origin
from mnemic.stores.encode import Encoder, encode_text, what_is_left_out
from tests.unit.stores.building import BYTES, CAUSAL, TEXTS, built, corpus, everything, small, tiny, tokens_of

LAST_FEED_FORWARD = {
    "gpt2": "transformer.h.1.mlp",
    "bloom": "transformer.h.1.mlp.dense_h_to_4h",
    "falcon": "transformer.h.1.mlp",
    "falcon-alibi": "transformer.h.1.mlp",
    "gpt_neox": "gpt_neox.layers.1.mlp",
    "opt": "model.decoder.layers.1.fc1",
    "mnemic-sru": "model.layers.1.recurrence",
}


@torch.no_grad()
def seen_by(model: Any, path: str, tokens: list[int]) -> np.ndarray:
    """What enters a module when the model reads these tokens alone, by a hook and nothing else of ours."""
    heard: list[torch.Tensor] = []
    hook = model.get_submodule(path).register_forward_pre_hook(lambda _, args: heard.append(args[0]))
    model(input_ids=torch.tensor([tokens]), use_cache=False)
    hook.remove()
    return heard[0].reshape(-1, heard[0].shape[-1])[-len(tokens) :].numpy()


# What a key is


@pytest.mark.parametrize("name", CAUSAL)
def test_keys_are_what_enters_the_last_feed_forward(name: str) -> None:
    model = tiny(name)
    path = LAST_FEED_FORWARD.get(name, "model.layers.1.mlp")
    store = built(model, window=64)
    assert store.config.origin["layer"] == path
    keys, values, places = everything(store)
    expected = [(seen_by(model, path, tokens_of(text)[:-1]), name) for name, text in TEXTS.items()]
    np.testing.assert_allclose(keys, np.concatenate([rows for rows, _ in expected]), rtol=1e-4, atol=1e-5)
    assert values.tolist() == [token for text in TEXTS.values() for token in tokens_of(text)[1:]]
    assert places == [("default", name, position) for rows, name in expected for position in range(len(rows))]


@pytest.mark.parametrize("name", [name for name in CAUSAL if name != "mnemic-adaptive"])
def test_the_other_key_is_what_enters_the_head(name: str) -> None:
    model = tiny(name)
    store = built(model, window=64, layer="output")
    head = str(store.config.origin["layer"])
    assert model.get_submodule(head) is model.get_output_embeddings()
    expected = np.concatenate([seen_by(model, head, tokens_of(text)[:-1]) for text in TEXTS.values()])
    np.testing.assert_allclose(everything(store)[0], expected, rtol=1e-4, atol=1e-5)
    # with the adaptive softmax and where losses are asked for, the head is not called as a whole
    np.testing.assert_array_equal(
        everything(built(model, window=64, layer="output", max_probability=0.999999))[0][:4], everything(store)[0][:4]
    )


def test_the_adaptive_softmax_gets_the_final_hidden_state() -> None:
    model = tiny("mnemic-adaptive")
    for options in ({}, {"max_probability": 0.999999}):
        keys = everything(built(model, window=64, layer="output", **options))[0]
        with torch.no_grad():
            hidden = model.model(torch.tensor([tokens_of(TEXTS["a.txt"])[:-1]])).last_hidden_state[0].numpy()
        np.testing.assert_allclose(keys[: len(hidden)], hidden, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CAUSAL)
def test_which_blocks_the_last_attention_is_in(name: str) -> None:
    """The documentation says: in all but those whose attention and feed-forward stand side by side."""
    model = tiny(name)
    before = everything(built(model, window=64))[0]
    with torch.no_grad():
        for parameter in find(model).attention[-1].parameters():
            parameter.zero_()
    same = np.array_equal(before, everything(built(model, window=64))[0])
    assert same == (name in ("falcon", "falcon-alibi", "phi", "gpt_neox"))


def test_which_keys_are_normalised() -> None:
    for name, normalised in (("llama", True), ("falcon", True), ("olmo2", False)):
        lengths = np.sqrt((everything(built(tiny(name), window=64))[0] ** 2).mean(1))
        assert np.allclose(lengths, 1, atol=0.05) == normalised


def test_any_layer_by_number_or_path() -> None:
    model = small()
    assert module_path(model, "ffn") == module_path(model, "ffn:1") == module_path(model, "ffn:-1")
    assert module_path(model, "ffn:0") == "model.layers.0.mlp"
    store = built(model, layer="model.layers.1.self_attn_norm")
    expected = seen_by(model, "model.layers.1.self_attn_norm", tokens_of(TEXTS["a.txt"])[:-1])
    np.testing.assert_allclose(everything(store)[0][: len(expected)], expected, rtol=1e-4, atol=1e-5)
    for layer, sentence in (
        ("ffn:2", "has the blocks 0 to 1"),
        ("ffn:x", "has the blocks 0 to 1"),
        ("nowhere", "expected ffn, ffn:<block>, output, or the path of a module"),
        ("model.layers", "was not run"),
    ):
        with pytest.raises(UsageError, match=sentence):
            built(model, layer=layer)


def test_models_that_cannot_make_a_store() -> None:
    from transformers import BertConfig, BertForMaskedLM

    bert = BertForMaskedLM(BertConfig(vocab_size=300, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    with pytest.raises(UsageError, match="does not predict next tokens"):
        built(bert)
    with pytest.raises(UsageError, match=r"window = 65, but .* has 64 positions"):
        built(tiny("gpt2"), window=65)
    unknown = small()
    unknown.config.model_type = "unheard-of"
    with pytest.raises(UnsupportedModel, match="or name the module itself"):
        built(unknown)
    assert len(built(unknown, layer="model.layers.0.mlp"))


# Windows


@pytest.mark.parametrize("batch_size", [1, 3])
def test_each_token_is_encoded_once_with_enough_before_it(batch_size: int) -> None:
    model, window, min_context = tiny("llama"), 10, 6
    keys, values, places = everything(built(model, window=window, min_context=min_context, batch_size=batch_size))
    assert len(set(places)) == len(places) == sum(len(text.encode()) + 1 for text in TEXTS.values())
    for key, value, (_, document, position) in zip(keys, values, places, strict=True):
        tokens = tokens_of(TEXTS[document])
        assert value == tokens[position + 1]
        starts = range(max(0, position + 1 - window), max(0, position - min_context) + 1)
        path = "model.layers.1.mlp"
        assert any(np.allclose(seen_by(model, path, tokens[s : position + 1])[-1], key, atol=1e-5) for s in starts)


def test_documents_do_not_see_each_other() -> None:
    model = tiny("mnemic-rotary")
    together = everything(built(model, window=16, batch_size=5))
    start = 0
    for name, text in TEXTS.items():
        alone = everything(
            mnemic.build_store(model, BYTES, corpus({name: text}), "ram:", window=16, batch_size=1, keys="float32")
        )
        rows = slice(start, start + len(alone[1]))
        np.testing.assert_allclose(together[0][rows], alone[0], rtol=1e-4, atol=1e-5)
        assert together[2][rows] == alone[2]
        start = rows.stop
    assert start == len(together[1])


def test_the_window_that_suits_a_model() -> None:
    assert built(tiny("gpt2")).config.origin["context"] == 64, "it has no more positions"
    store = built(small())
    assert store.config.origin["context"] == 512
    assert Reading.of(Origin.from_dict(dict(store.config.origin))).min_context == 256


# The model


def test_keys_of_a_model_with_a_memory() -> None:
    base = everything(built(tiny("llama"), window=64))[0]
    for name in ("llama", "gpt2", "bloom", "mnemic-xl"):
        model = mnemic.augment(tiny(name), mnemic.MemoryTokens(count=3))
        keys = everything(built(model, window=64))[0]
        path = LAST_FEED_FORWARD.get(name, "model.layers.1.mlp")
        expected = np.concatenate([seen_by(model, path, tokens_of(text)[:-1]) for text in TEXTS.values()])
        np.testing.assert_allclose(keys, expected, rtol=1e-4, atol=1e-5)
        assert name != "llama" or not np.allclose(keys, base, atol=1e-3), "the memory is in the keys"


def test_the_model_is_left_as_it_was() -> None:
    model = mnemic.augment(small(dropout=0.5), mnemic.MemoryTokens(count=2)).train()
    before = torch.get_rng_state()
    hooks = [len(part._forward_pre_hooks) + len(part._forward_hooks) for part in model.modules()]
    first, again = (everything(built(model, layer=layer)) for layer in ("ffn", "ffn"))
    np.testing.assert_array_equal(first[0], again[0])
    assert hooks == [len(part._forward_pre_hooks) + len(part._forward_hooks) for part in model.modules()]
    assert model.training
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_text_gets_the_key_of_its_place_in_a_document() -> None:
    model = small()
    store = built(model)
    encoder = Encoder(model, BYTES, str(store.config.origin["layer"]))
    key = encode_text(encoder, BYTES, "the memory", 512)
    found = store.search(key, 1)
    assert abs(found.scores[0, 0]) < 1e-6
    assert (chr(found.values[0, 0]), store.get(found.ids[0]).references[0][1]) == (" ", 10)
    cut = encode_text(encoder, BYTES, "the memory", 4)
    np.testing.assert_allclose(cut[0], seen_by(model, encoder.layer, [*b"mory"])[-1], atol=1e-5)


# Which text


def test_what_a_split_of_plain_files_leaves_out_is_said(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text("x" * 100)
    read = sum(1 for _ in mnemic.open_corpus(str(tmp_path)).documents("train"))
    assert 0 < read < 20
    said = what_is_left_out(tmp_path, "train")
    assert said == f"{tmp_path}: the split 'train' is read, {read * 5}% of its text; with split = 'all' all of it is"
    for source, split in ((tmp_path, "all"), ("stdlib", "train"), (corpus(), "train")):
        assert what_is_left_out(source, split) == ""
    (tmp_path / "train").mkdir()
    (tmp_path / "train/1.txt").write_text("x" * 100)
    assert "the split 'train' is read, 5% of its text" in what_is_left_out(str(tmp_path), "train")
