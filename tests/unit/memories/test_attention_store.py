"""A text that is read once: its pairs in a store, for another process and many sessions to look into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mnemic
from mnemic.data import Document, train_tokenizer
from mnemic.data.documents import Corpus
from mnemic.errors import UsageError
from mnemic.models import MnemicDecoderConfig, MnemicDecoderForCausalLM

TEXT = "the treaty of the two rivers was signed by Ansgar the Elder in a tent of red felt. " * 3


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([], "byte")


@pytest.fixture
def corpus() -> Corpus:
    documents = [Document("treaty", TEXT), Document("short", "a tent")]
    return Corpus("treaties", {"train": lambda: documents, "valid": list, "test": list})


def make(tokenizer: Any, **memory: Any) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "position": "rotary"}
    model = MnemicDecoderForCausalLM(MnemicDecoderConfig(vocab_size=len(tokenizer), **shape))
    settings = {"layers": [0, 2], "k": 4, "size": 500, **memory}
    return mnemic.augment(model, mnemic.KNNAttention(**settings)).eval()


@pytest.mark.parametrize("search", ["exact", "lists"])
def test_a_stored_text_serves_as_one_that_was_just_read(
    tokenizer: Any, corpus: Corpus, tmp_path: Path, search: str
) -> None:
    writer = make(tokenizer, search=search)
    how = {"layer": "attention", "window": 64, "min_context": 0, "batch_size": 1, "keys": "float32"}
    store = mnemic.build_store(writer, tokenizer, corpus, tmp_path / "treaty.store", **how)
    assert len(store) == sum(len(tokenizer(d.text).input_ids) + 1 for d in corpus.documents("train"))
    store.close()

    question = torch.tensor([tokenizer("signed by Ansgar").input_ids])
    reader = make(tokenizer, search=search, external=str(tmp_path / "treaty.store"), size=20)
    with torch.no_grad():
        stored = reader(question).logits
        plain = writer(question).logits
    assert (stored - plain).abs().max() > 1e-3

    memory = reader.memory.attention.stored.memories[2].rows[0]
    assert memory.count == len(store)
    reader.memory.reset()
    with torch.no_grad():
        assert torch.equal(reader(question).logits, stored)
        beams = reader.generate(question, max_new_tokens=5, num_beams=2, do_sample=False)
        both = reader(question.repeat(3, 1)).logits
    assert beams.shape == (1, question.shape[1] + 5)
    torch.testing.assert_close(both, stored.expand(3, -1, -1))


def test_what_a_model_read_piece_by_piece_is_what_the_store_holds(
    tokenizer: Any, corpus: Corpus, tmp_path: Path
) -> None:
    """Windows without overlap are the segments that `read` reads, but for what deeper layers found in the memory."""
    writer = make(tokenizer, layers=[2])
    how = {"layer": "attention", "window": 64, "min_context": 0, "batch_size": 1, "keys": "float32"}
    with mnemic.build_store(writer, tokenizer, corpus, tmp_path / "s", **how) as store:
        rows = torch.from_numpy(store.get(range(150)).keys)
        values = store.get(range(150)).values
    ids = torch.tensor([tokenizer(TEXT).input_ids])
    start = torch.tensor([[tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id]])
    read = torch.cat([start, ids], 1)
    assert values.tolist() == ids[0, :150].tolist()
    writer.memory.read(read[:, :150], segment_length=64)
    state = writer.memory.state()
    keys = state["attention.2.keys"][0].transpose(0, 1).flatten(1)
    torch.testing.assert_close(rows[:, :32], keys, rtol=1e-4, atol=1e-4)


def test_stores_of_other_models_and_layers_are_refused(tokenizer: Any, corpus: Corpus, tmp_path: Path) -> None:
    writer = make(tokenizer)
    mnemic.build_store(writer, tokenizer, corpus, tmp_path / "a", layer="attention").close()
    with pytest.raises(UsageError, match="other memories"):
        make(tokenizer, layers=[1], external=str(tmp_path / "a"))
    mnemic.build_store(writer, tokenizer, corpus, tmp_path / "b", layer="ffn").close()
    with pytest.raises(UsageError, match="layer = 'attention'"):
        make(tokenizer, external=str(tmp_path / "b"))
    plain = make(tokenizer).memory.detach()
    with pytest.raises(UsageError, match="no attention memory"):
        mnemic.build_store(plain, tokenizer, corpus, tmp_path / "c", layer="attention")
    other = make(tokenizer)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.add_(0.1)
    store = mnemic.stores.open_store(tmp_path / "a")
    base = other.memory.detach()
    with pytest.raises(UsageError, match="another model"):
        mnemic.augment(base, mnemic.KNNAttention(layers=[0, 2], external=store))


def test_a_model_is_saved_with_its_store(tokenizer: Any, corpus: Corpus, tmp_path: Path) -> None:
    mnemic.build_store(make(tokenizer), tokenizer, corpus, tmp_path / "a", layer="attention").close()
    model = make(tokenizer, external=str(tmp_path / "a"))
    question = torch.tensor([tokenizer("a tent of").input_ids])
    model.save_pretrained(tmp_path / "saved")
    loaded = mnemic.load(tmp_path / "saved").eval()
    with torch.no_grad():
        assert torch.equal(loaded(question).logits, model(question).logits)


def test_a_memory_that_has_learned_is_given_a_store_and_another_size(
    tokenizer: Any, corpus: Corpus, tmp_path: Path
) -> None:
    model = make(tokenizer)
    with torch.no_grad():
        model.memory.attention.layers["2"].gate.fill_(2.0)
    mnemic.build_store(model, tokenizer, corpus, tmp_path / "a", layer="attention").close()
    question = torch.tensor([tokenizer("a tent of").input_ids])
    with torch.no_grad():
        without = model(question).logits
        model.memory.change("attention", external=str(tmp_path / "a"), size=70, k=3)
        assert (model(question).logits - without).abs().max() > 1e-3
    assert model.memory.attention.config.size == 70
    assert model.memory.attention.layers["2"].gate.tolist() == [2.0] * 4

    stored = model.memory.attention.stored
    mnemic.build_store(model, tokenizer, corpus, tmp_path / "b", layer="ffn").close()
    with pytest.raises(UsageError, match="layer = 'attention'"):
        model.memory.change("attention", external=str(tmp_path / "b"), size=9)
    config = model.memory.attention.config
    assert (config.external, config.size) == (str(tmp_path / "a"), 70)
    assert model.memory.attention.stored.tensors().keys() == stored.tensors().keys()
    with pytest.raises(UsageError, match="layers, mix of an attention memory that has learned"):
        model.memory.change("attention", mix="tanh", layers=[1])
    with pytest.raises(UsageError, match="memory of this model"):
        model.memory.change("output", k=3)
    with torch.no_grad():
        model.memory.change("attention", external=None)
        assert torch.equal(model(question).logits, without)
