"""`mnemic generate`: the model's own words, with memories that are put in, without them, and side by side."""

from __future__ import annotations

import json
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

import mnemic
from mnemic.cli import main
from mnemic.cli.generate import SAME, far_back, read_file, to_text
from mnemic.cli.loading import load_model
from mnemic.data import Document, train_tokenizer
from mnemic.data.encoding import start_and_end
from tests.unit.cli.conftest import DECODER, train
from tests.unit.cli.test_faults import fails, plain_model
from tests.unit.cli.test_verbs import output

PROMPT, ANSWER = "the red key ", "opens the cellar, the blue one the attic"
WAYS = {"greedy": ["--greedy"], "sampling": ["--seed", "5"], "beams": ["--beams", "3"]}


@pytest.fixture(scope="module")
def plain(corpus: Path, tmp_path_factory: Any) -> Path:
    """The folder of a run without memory."""
    out = tmp_path_factory.mktemp("runs") / "plain"
    assert train(corpus, out) == 0
    return out


@pytest.fixture(scope="module")
def notes(plain: Path, tmp_path_factory: Any) -> Path:
    """A store with a text that the model without memory has never seen."""
    folder = tmp_path_factory.mktemp("notes")
    (folder / "notes.txt").write_text(PROMPT + ANSWER)
    build = ["store", "build", folder / "notes.store", folder / "notes.txt", "--model", plain, "--split", "all"]
    assert main(list(map(str, [*build, "--keys", "float32", "--window", "64"]))) == 0
    return folder / "notes.store"


def by_heart(store: Path) -> str:
    """A memory that says what followed the nearest context of a store, and hardly ever anything else."""
    return f"output:external={store},k=4,weight=0.99,mix_temperature=1e-6,joint=false,training=none,local=false"


def test_generate_continues_the_prompt_the_same_each_time(run: Path, capsys) -> None:
    arguments = ["generate", run, "abc ", "--max-new-tokens", 12, "--seed", 3]
    texts = {output(capsys, *arguments) for _ in range(2)}
    assert len(texts) == 1
    assert texts.pop().startswith("abc ")
    assert output(capsys, *arguments) != output(capsys, *arguments[:-1], 4)


def test_generate_greedy_is_the_models_own_greedy(run: Path, capsys) -> None:
    model, tokenizer = mnemic.load(run / "model").eval(), mnemic.load_tokenizer(run / "model")
    ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer("abc ")["input_ids"]]])
    expected = []
    for _ in range(8):  # one token at a time, without any cache
        token = (
            model(input_ids=torch.cat([ids, torch.tensor([expected], dtype=torch.long)], dim=1)).logits[0, -1].argmax()
        )
        expected.append(int(token))
    if tokenizer.eos_token_id in expected:
        expected = expected[: expected.index(tokenizer.eos_token_id)]
    printed = json.loads(output(capsys, "generate", run, "abc ", "--greedy", "--max-new-tokens", 8, "--json"))
    assert printed["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert printed["prompt"] == "abc "


def test_generate_reads_stdin_and_takes_beams_and_no_memory(run: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO("abd "))
    assert output(capsys, "generate", run, "-", "--beams", 2, "--max-new-tokens", 4).startswith("abd ")
    assert output(capsys, "generate", run, "", "--no-memory", "--max-new-tokens", 4)


# --memory, --no-memory, --compare


@pytest.mark.parametrize("way", WAYS)
def test_a_model_writes_what_it_finds_in_a_store(plain: Path, notes: Path, capsys: Any, way: str) -> None:
    arguments = ["generate", plain, PROMPT, "--memory", by_heart(notes), *WAYS[way]]
    assert output(capsys, *arguments) == PROMPT + ANSWER + "\n"


@pytest.mark.parametrize("way", WAYS)
def test_comparing_is_writing_without_and_then_with_the_memories(
    plain: Path, notes: Path, capsys: Any, way: str
) -> None:
    how = [PROMPT, "--max-new-tokens", 12, *WAYS[way]]
    memory = by_heart(notes).replace("weight=0.99", "weight=0.5")
    without = json.loads(output(capsys, "generate", plain, *how, "--json"))
    one = json.loads(output(capsys, "generate", plain, *how, "--memory", memory, "--json"))
    both = json.loads(output(capsys, "generate", plain, *how, "--memory", memory, "--compare", "--json"))
    assert (without["memory"], "text_without_memory" in one) == ([], False)
    assert both == one | {"text_without_memory": without["text"]}
    assert one["text"] != without["text"]
    (written,) = both["memory"]
    assert "weight=0.5" in written
    assert json.loads(output(capsys, "generate", plain, *how, "--memory", written, "--json")) == one
    shown = output(capsys, "generate", plain, *how, "--memory", memory, "--compare")
    expected = f"=== without memory ===\n{PROMPT}{without['text']}\n\n=== with {written} ===\n{PROMPT}{one['text']}\n"
    assert shown == expected


def test_several_memories_are_put_in_and_all_are_switched_off(plain: Path, run: Path, capsys: Any) -> None:
    how = ["abc ", "--greedy", "--max-new-tokens", 12, "--json"]
    memories = ["--memory", "tokens:count=3", "--memory", "output:weight=0.9,mix_temperature=0.01"]
    both = json.loads(output(capsys, "generate", plain, *how, *memories, "--compare"))
    assert [text.partition(":")[0] for text in both["memory"]] == ["tokens", "output"]
    assert both["text_without_memory"] == json.loads(output(capsys, "generate", plain, *how))["text"] != both["text"]
    own = json.loads(output(capsys, "generate", run, *how, "--compare"))
    off = json.loads(output(capsys, "generate", run, *how, "--no-memory"))
    assert (own["memory"], off["memory"]) == (["tokens:count=2"], [])
    assert own["text_without_memory"] == off["text"]
    model, tokenizer = mnemic.load(run / "model"), mnemic.load_tokenizer(run / "model")
    ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer("abc ")["input_ids"]]])
    base = model.memory.detach().generate(ids, do_sample=False, max_new_tokens=12, pad_token_id=tokenizer.pad_token_id)
    assert off["text"] == tokenizer.decode(base[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_memory_that_changes_nothing_is_told(plain: Path, capsys: Any) -> None:
    arguments = ["generate", plain, "abc ", "--memory", "output:local=false", "--compare", "--max-new-tokens", 4]
    assert main(list(map(str, arguments))) == 0
    printed, said = capsys.readouterr()
    assert SAME in said
    assert SAME not in printed


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--memory", "outptu"], "unknown memory 'outptu': did you mean 'output'?"),
        (["--memory", "output:wieght=0.3"], "unknown setting of output 'wieght': did you mean 'weight'?"),
        (["--memory", "output:weight=1.5"], "OutputMemory.weight = 1.5: expected 0 or more and less than 1"),
        (["--memory", "output:external=no.store"], "no store at no.store"),
        (["--memory", "output", "--no-memory"], "--no-memory does not go with --memory or --compare: leave it out"),
        (["--compare", "--no-memory"], "--no-memory does not go with --memory or --compare: leave it out"),
        (["--compare"], "has no memory to compare with: give it one, as in --memory output:"),
    ],
)
def test_mistakes(
    plain: Path, tmp_path: Path, capsys: Any, monkeypatch: Any, arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    fails(capsys, 2, sentence, arguments=["generate", plain, "abc", *arguments])


def test_a_store_that_another_model_made(corpus: Path, notes: Path, tmp_path: Path, capsys: Any) -> None:
    assert train(corpus, tmp_path / "other", "--seed", "1") == 0
    arguments = ["generate", tmp_path / "other", "abc", "--memory", by_heart(notes)]
    fails(capsys, 2, f"the rows of {notes} were made by another model", arguments=arguments)


def test_a_masked_model_does_not_generate(tmp_path: Path, capsys: Any) -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    folder = plain_model(tmp_path / "bert", BertForMaskedLM, BertConfig(vocab_size=259, **shape))
    for more in ([], ["--memory", "output"], ["--memory", "tokens:count=2", "--compare"]):
        sentence = "BertForMaskedLM does not continue a text: give a causal model, or one that translates"
        fails(capsys, 2, sentence, arguments=["generate", folder, "abc", *more])


@pytest.mark.parametrize("kind", ["word", "bpe", "byte"])
def test_words_that_the_vocabulary_lacks_are_seen_and_marks_are_not(kind: str) -> None:
    tokenizer = train_tokenizer([Document("a", "to be or not to be")], kind, None if kind == "byte" else 262)
    start, end = start_and_end(tokenizer)
    ids = [start, *tokenizer(" to be zebra", add_special_tokens=False)["input_ids"], end]
    assert to_text(tokenizer, ids, {start, end}).split() == ["to", "be", "<unk>" if kind == "word" else "zebra"]


@pytest.fixture(scope="module", params=[0, 32], ids=["segments", "xl-cache"])
def reader(corpus: Path, tmp_path_factory: Any, request: pytest.FixtureRequest) -> Path:
    """The folder of a run with an attention memory."""
    out = tmp_path_factory.mktemp("runs") / "reader"
    model = f"{DECODER},xl_length={request.param}"
    assert train(corpus, out, "--memory", "attention:size=500,k=4,layers=[0]", "--model", model) == 0
    return out


def test_a_text_is_read_before_the_prompt_is_continued(reader: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "long.txt").write_text((PROMPT + ANSWER + " ") * 30)
    model, tokenizer = load_model(str(reader))
    ids = torch.tensor([tokenizer(PROMPT).input_ids])
    with torch.no_grad():
        plain = model(ids).logits
        read_file(model, tokenizer, str(tmp_path / "long.txt"))
        assert (model(ids).logits - plain).abs().max() > 1e-5
    common = ["generate", reader, PROMPT, "--greedy", "--max-new-tokens", 10]
    assert output(capsys, *common, "--read", tmp_path / "long.txt").startswith(PROMPT)
    long_prompt = output(capsys, "generate", reader, PROMPT * 60, "--max-new-tokens", 5)
    assert long_prompt.startswith(PROMPT * 60)
    both = output(capsys, "generate", reader, PROMPT * 60, "--max-new-tokens", 5, "--compare")
    assert both.startswith("=== without memory ===\n" + PROMPT * 60)
    assert output(capsys, "generate", reader, PROMPT * 60, "--no-memory").startswith(PROMPT * 60)


def test_recurrent_memory_tokens_read_whole_segments_before_the_last(corpus: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "recurrent"
    assert train(corpus, out, "--memory", "tokens.recurrent:count=3", "--model", DECODER, "--segments", "2") == 0
    model, tokenizer = load_model(str(out))
    segment = model.memory.segment
    ids = torch.tensor([tokenizer(PROMPT * 20).input_ids])
    with far_back(model, ids, {"max_new_tokens": 5}) as (rest, _):
        whole, last = divmod(ids.shape[1] - 1, segment)
        assert torch.equal(rest, ids[:, whole * segment :])
        assert rest.shape[1] == last + 1
        assert model.memory.tokens.shared is not None
    assert model.memory.tokens.shared is None
    (tmp_path / "long.txt").write_text((PROMPT + ANSWER + " ") * 30)
    common = ["generate", out, PROMPT, "--greedy", "--max-new-tokens", 10]
    assert output(capsys, *common, "--read", tmp_path / "long.txt").startswith(PROMPT)
    assert output(capsys, "generate", out, PROMPT * 60, "--no-memory").startswith(PROMPT * 60)


def test_reading_needs_a_memory_that_keeps_it_and_a_text(
    plain: Path, reader: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "text.txt").write_text("a text")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xfa")
    text = ["--read", tmp_path / "text.txt"]
    fails(capsys, 2, "with a memory that keeps what was read", arguments=["generate", plain, "a", *text])
    for path in ("missing.txt", "bytes"):
        text = ["--read", tmp_path / path]
        fails(capsys, 2, "give a file of UTF-8 text", arguments=["generate", reader, "a", *text])


def test_a_memory_that_has_learned_looks_into_a_store_of_a_text(reader: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "book.txt").write_text((PROMPT + ANSWER + " ") * 30)
    store = tmp_path / "book.store"
    built = [
        "store",
        "build",
        store,
        tmp_path / "book.txt",
        "--split",
        "all",
        "--model",
        reader,
        "--layer",
        "attention",
    ]
    output(capsys, *built)
    asked = ["generate", reader, PROMPT, "--greedy", "--max-new-tokens", 10, "--json"]
    answer = json.loads(output(capsys, *asked, "--memory", f"attention:external={store},k=8"))
    assert answer["memory"] == [f"attention:layers=[0],k=8,size=500,external={store}"]
    mistake = ["generate", reader, "a", "--memory", "attention:mix=joint"]
    fails(capsys, 2, "mix of an attention memory that has learned cannot be changed", arguments=mistake)


def test_what_a_memory_found_is_shown(reader: Path, plain: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "book.txt").write_text((PROMPT + ANSWER + " ") * 30)
    asked = ["trace", reader, tmp_path / "book.txt", "--window", 16, "--most", 3]
    found = json.loads(output(capsys, *asked, "--json"))
    assert (found["memory"], found["smaller"]) == (500, 0)
    assert len(found["best"]) == 3
    written = output(capsys, *asked, "--smaller", 32, "--plots", tmp_path / "plots")
    assert written.count("\ntoken ") == 3
    assert "with 500 pairs" in written
    assert " back, weight " in written
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"loss-delta.png", "distance.png", "shares.png"}
    fails(capsys, 2, "give the model one", arguments=["trace", plain, tmp_path / "book.txt"])
    fails(capsys, 2, "give a file of UTF-8 text", arguments=["trace", reader, tmp_path / "missing.txt"])
    fails(capsys, 2, "expected 1 or more", arguments=["trace", reader, tmp_path / "book.txt", "--window", 0])
