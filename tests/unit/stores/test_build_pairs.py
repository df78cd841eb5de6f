"""Stores of translations: a row for each token of each target, keyed by its source and what precedes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

import mnemic
import mnemic.stores.encode
from mnemic.cli import main
from mnemic.data import Document
from mnemic.data.pairs import ParallelCorpus
from mnemic.errors import UsageError
from mnemic.stores import open_store
from mnemic.stores.build import Build, add_to_store
from mnemic.stores.build_config import BuildConfig
from mnemic.stores.context import contexts
from mnemic.stores.encode import Encoder, encode_text
from tests.unit.stores.building import BYTES, assert_same_rows, corpus, everything, small
from tests.unit.train.test_seq2seq import KINDS, build, parallel, some_pairs

PAIRS = [*some_pairs(11), ("é x", "größer als 1")]
FEED_FORWARD = {
    "ours": "model.decoder.layers.0.mlp",
    "marian": "model.decoder.layers.0.fc1",
    "bart": "model.decoder.layers.0.fc1",
    "t5": "decoder.block.0.layer.2.DenseReluDense",
}


def built(model: Any, pairs: list[tuple[str, str]] = PAIRS, path: Any = "ram:", **options: Any) -> Any:
    return mnemic.build_store(model, BYTES, parallel(pairs), path, **{"keys": "float32", **options})


@torch.no_grad()
def seen_by(model: Any, path: str, pair: tuple[str, str]) -> np.ndarray:
    """What enters a module, or leaves the decoder, for each token of a target, read alone; by a hook and no more."""
    end, heard = BYTES.eos_token_id, []
    if path == "decoder":
        hook = model.get_decoder().register_forward_hook(lambda _, __, output: heard.append(output[0]))
    else:
        hook = model.get_submodule(path).register_forward_pre_hook(lambda _, args: heard.append(args[0]))
    source, target = (torch.tensor([[*side.encode(), end]]) for side in pair)
    start = torch.tensor([[model.config.decoder_start_token_id]])
    model(input_ids=source, decoder_input_ids=torch.cat([start, target[:, :-1]], 1), use_cache=False)
    hook.remove()
    return heard[0].reshape(target.shape[1], -1).numpy()


@pytest.mark.parametrize("layer", ["ffn", "output"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_for_each_token_of_each_target(kind: str, layer: str) -> None:
    model = build(kind, BYTES).eval()
    store = built(model, layer=layer, batch_size=3, window=16)
    assert store.config.origin["layer"] == (FEED_FORWARD[kind] if layer == "ffn" else "lm_head")
    keys, values, places = everything(store)
    rows = {place: row for row, place in enumerate(places)}
    assert len(rows) == len(places) == sum(len(target.encode()) + 1 for _, target in PAIRS)
    for number, pair in enumerate(PAIRS):
        own = [rows["default", f"1:{number}", position] for position in range(len(pair[1].encode()) + 1)]
        assert values[own].tolist() == [*pair[1].encode(), BYTES.eos_token_id]
        expected = seen_by(model, FEED_FORWARD[kind] if layer == "ffn" else "decoder", pair)
        np.testing.assert_allclose(keys[own], expected, rtol=1e-4, atol=1e-5)
        assert own == [*range(own[0], own[0] + len(own))], "the tokens of a target lie together"


@torch.no_grad()
def test_tokens_that_the_model_foresees_are_left_out() -> None:
    model = build("marian", BYTES).eval()
    chances = {}
    for number, (source, target) in enumerate(PAIRS):
        labels = torch.tensor([[*target.encode(), BYTES.eos_token_id]])
        logits = model(input_ids=torch.tensor([[*source.encode(), BYTES.eos_token_id]]), labels=labels).logits
        for position, chance in enumerate(logits.softmax(-1)[0].gather(1, labels.mT).flatten().tolist()):
            chances["default", f"1:{number}", position] = chance
    limit = float(np.mean(sorted(chances.values())[20:22]))  # between two of them
    task = Build(model, BYTES, parallel(PAIRS), "ram:", BuildConfig(keys="float32", max_probability=limit))
    kept = everything(task.run())[2]
    assert set(kept) == {place for place, chance in chances.items() if chance <= limit}
    assert (task.report["rows"], task.report["dropped"]) == (len(kept), len(chances) - len(kept))


class Stop(Exception):
    """As if the power had gone."""


def test_stopped_anywhere_and_resumed_gives_the_same_rows(tmp_path: Path, monkeypatch: Any) -> None:
    model, real = build("ours", BYTES).eval(), mnemic.stores.encode.encode_group
    options = {"batch_size": 1, "window": 16, "commit_rows": 20, "tokens": str(tmp_path / "tokens")}

    def counted(path: Path, last: int | None = None) -> int:
        calls = 0

        def counting(*args: Any) -> Any:
            nonlocal calls
            if calls == last:
                raise Stop
            calls += 1
            return real(*args)

        monkeypatch.setattr(mnemic.stores.encode, "encode_group", counting)
        try:
            built(model, path=path, **options).close()
        except Stop:
            assert last is not None
        return calls

    batches = counted(tmp_path / "whole")
    assert batches > 4
    for stop in range(batches):
        assert counted(tmp_path / str(stop), stop) == stop
        rest = counted(tmp_path / str(stop))
        with open_store(tmp_path / str(stop)) as resumed, open_store(tmp_path / "whole") as whole:
            assert_same_rows(resumed, whole)
    assert 0 < rest < batches, "what was committed is not encoded again"
    assert counted(tmp_path / "whole") == 0
    assert sorted(item.name for item in (tmp_path / "tokens").iterdir()) == ["source", "target"]
    with pytest.raises(UsageError, match="the text of pairs is not what it was"):  # the source is a part of the text
        built(model, [("changed", PAIRS[0][1]), *PAIRS[1:]], tmp_path / "whole", **options)


def test_pairs_that_are_too_long_are_said_to_be_left_out(capsys: Any) -> None:
    pairs = [("a", "bc"), ("a" * 40, "b"), ("a", "b" * 40)]
    store = built(build("ours", BYTES), pairs, window=9)
    assert everything(store)[2] == [("default", "1:0", position) for position in range(3)]
    assert "2 of 3 pairs are left out: longer than window = 9 tokens" in capsys.readouterr().err
    assert len(built(build("marian", BYTES), [*pairs, ("a" * 70, "b")])) == 3 + 2 + 41  # it has 64 positions
    assert "1 of 4 pairs are left out: longer than window = 64 tokens" in capsys.readouterr().err
    with pytest.raises(UsageError, match="no pair has 2 tokens or less"):
        built(build("ours", BYTES), pairs, window=2)


def test_the_splits_that_are_read() -> None:
    model, splits = build("ours", BYTES), {"train": "ab", "valid": "c", "test": "def"}

    def side(split: str, language: str) -> Any:
        return lambda: [Document(f"{split}.{language}:{n}", letter) for n, letter in enumerate(splits[split])]

    text = ParallelCorpus("three", {s: {la: side(s, la) for la in ("x", "y")} for s in splits}, ("x", "y"))
    for split, expected in (("valid", ["valid.y:0"]), ("all", ["test.y:0", "test.y:1", "test.y:2", "train.y:0"])):
        store = mnemic.build_store(model, BYTES, text, "ram:", split=split)
        assert sorted({document for _, document, _ in everything(store)[2]})[:4] == expected


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"min_context": 4}, "min_context = 4: a pair is read whole, leave it unset"),
        ({"window": 65}, "window = 65, but MarianMTModel has 64 positions"),
        ({"layer": "model.encoder.layers.0.fc1"}, "is not in the decoder, which reads the targets"),
    ],
)
def test_settings_that_cannot_work(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        built(build("marian", BYTES), **options)


def test_who_reads_what() -> None:
    with pytest.raises(UsageError, match="tiny is not a parallel corpus"):
        mnemic.build_store(build("ours", BYTES), BYTES, corpus(), "ram:")
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    masked = BertForMaskedLM(BertConfig(vocab_size=len(BYTES), **shape))
    with pytest.raises(UsageError, match="a store is made by a causal or a sequence-to-sequence model"):
        mnemic.build_store(masked, BYTES, parallel(PAIRS), "ram:")
    both = mnemic.build_store(small(), BYTES, parallel(PAIRS), "ram:")  # a causal model reads both sides as documents
    assert {document[:2] for _, document, _ in everything(both)[2]} == {"0:", "1:"}


def test_adding_pairs_teaches_their_translation() -> None:
    """A pair that was added is recited, though the model was not trained on it."""
    from mnemic.evaluate.config import EvaluateConfig
    from mnemic.evaluate.evaluation import PairedText
    from mnemic.evaluate.translation import translations

    model, new = build("ours", BYTES).eval(), [("fabe", "decaf"), ("dead", "bee")]
    store = built(model)
    mnemic.augment(model, mnemic.OutputMemory.knn(store, k=4, weight=0.999, temperature=1e-3))
    text, config = PairedText(parallel(new), BYTES, EvaluateConfig()), EvaluateConfig(max_new_tokens=9)
    assert translations(model, BYTES, text.tokens, config) != ["decaf", "bee"]
    names = ParallelCorpus(
        "new", {"train": {"a": lambda: documents(new, 0), "b": lambda: documents(new, 1)}}, ("a", "b")
    )
    before = len(store)
    report = add_to_store(store, model, BYTES, names, namespace="alice")
    assert (report["documents"], report["added"]) == (2, 6 + 4)
    assert store.get([before]).references[0] == (("new 1:1", "alice"), 0)  # the shortest first
    assert translations(model, BYTES, text.tokens, config) == ["decaf", "bee"]
    with pytest.raises(UsageError, match="already has the document 'new 1:"):
        add_to_store(store, model, BYTES, names, namespace="alice")


def documents(pairs: list[tuple[str, str]], side: int) -> list[Document]:
    return [Document(f"new {side}:{number}", pair[side]) for number, pair in enumerate(pairs)]


# What is shown of a row


def test_the_text_around_a_row_is_that_of_its_target() -> None:
    store = built(build("ours", BYTES))
    places = everything(store)[2]
    shown = contexts(store, [places.index(("default", "1:11", 8))], BYTES)[0]
    assert (shown.source.document, shown.position) == ("1:11", 8)
    assert str(shown) == "größer» «als 1<eos>"


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_and_the_beginning_of_its_translation_are_looked_for(kind: str) -> None:
    model = build(kind, BYTES).eval()
    store = built(model)
    keys, values, places = everything(store)
    encoder = Encoder(model, BYTES, str(store.config.origin["layer"]))
    for number, (source, target) in enumerate(PAIRS[:4]):
        for position in range(len(target) + 1):
            text = f"{source} ||| {target[:position]}" if position else source
            key = encode_text(encoder, BYTES, text, 512)
            row = places.index(("default", f"1:{number}", position))
            np.testing.assert_allclose(key[0], keys[row], rtol=1e-3, atol=1e-5)
            assert store.search(key, 1).values[0, 0] == values[row]
    with pytest.raises(UsageError, match="has 11 tokens on a side, and the store was made of 8 at most"):
        encode_text(encoder, BYTES, "a" * 10, 8)


def test_the_command_line(tmp_path: Path, capsys: Any) -> None:
    folder, out, store = tmp_path / "pairs", tmp_path / "run", str(tmp_path / "mt.store")
    folder.mkdir()
    for place, language in enumerate(("de", "en")):
        (folder / f"train.{language}").write_text("\n".join(pair[place] for pair in PAIRS) + "\n")
    model = "encoder-decoder:hidden_size=16,num_attention_heads=2,encoder_layers=1,decoder_layers=1"
    small = ["--vocab-size", "270", "--batch-size", "4", "--segment-length", "32", "--steps", "2", "--warmup", "1"]
    assert main(["train", str(folder), "--model", model, "--out", str(out), *small]) == 0
    assert main(["store", "build", store, str(folder), "--model", str(out), "--keys", "float32"]) == 0
    assert "of 12 documents" in capsys.readouterr().out
    assert main(["store", "search", store, "é x ||| größer", "--k", "1"]) == 0
    assert "train.en:12:" in capsys.readouterr().out
    assert main(["store", "info", store]) == 0
    held = tmp_path / "held"
    held.mkdir()
    for place, language in enumerate(("de", "en")):
        (held / f"valid.{language}").write_text("\n".join(pair[place] for pair in some_pairs(9)) + "\n")
    assert main(["store", "prune", store, str(tmp_path / "small"), "--held-out", str(held)]) == 0
    assert "rows (" in capsys.readouterr().out
