"""The verbs of `mnemic store`, from a corpus to a search, and what they say when something is wrong."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import mnemic
from mnemic.cli import main
from mnemic.cli.store import VERBS
from mnemic.cli.store.opening import bytes_in_words
from mnemic.cli.store.search import in_words, one_line, visible
from mnemic.stores import Source, open_store
from mnemic.stores.context import Context
from tests.unit.cli.conftest import train
from tests.unit.cli.test_main import imported_by
from tests.unit.cli.test_verbs import output


@pytest.fixture(scope="session")
def built(run: Path, corpus: Path, tmp_path_factory: Any) -> Path:
    """A store of the corpus's train split, made by the model with memory tokens."""
    path = tmp_path_factory.mktemp("stores") / "built.store"
    assert main(["store", "build", str(path), str(corpus), "--model", str(run), "--window", "64"]) == 0
    return path


@pytest.fixture
def store(built: Path, tmp_path: Path) -> Path:
    """A store that a test may change."""
    return Path(shutil.copytree(built, tmp_path / "my.store"))


# Help and usage


@pytest.mark.parametrize("verb", VERBS)
def test_help_needs_no_torch_and_teaches_by_example(verb: str) -> None:
    modules, text = imported_by("store", verb, "--help")
    assert not modules & {"torch", "transformers", "datasets", "tokenizers", "faiss", "pymilvus"}
    assert text.startswith(f"usage: mnemic store {verb} ")
    assert f"\nexample:\n  mnemic store {verb} " in text
    assert "--json" in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_overview_names_each_verb(capsys: Any) -> None:
    assert main(["store", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {verb:10}" in text for verb in VERBS)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "the following arguments are required: <verb>"),
        (["serch"], "unknown verb of `mnemic store` 'serch': did you mean 'search'?"),
        (["search", "s"], "the following arguments are required: text"),
        (["search", "no.store", "x"], "no store at no.store"),
        (["search", "no.store", ""], "no text to look for"),
        (["info", "no.store"], "no store at no.store"),
        (["build", "s", "c"], "the following arguments are required: --model"),
        (["build", "s", "c", "--model", "m", "--windw", "3"], "unknown option --windw: did you mean --window?"),
        (
            ["build", "s", "c", "--model", "m", "--metric", "l3"],
            "--metric 'l3': expected one of 'auto', 'l2', 'ip', 'cosine'",
        ),
        (["forget", "s"], "nothing to forget was named"),
        (["build", "ram:", "c", "--model", "m"], "a store in memory is gone when the command ends: give a folder"),
    ],
)
def test_wrong_usage(arguments: list[str], sentence: str, capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["store", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mnemic: ")
    assert captured.err.count("\n") == 1
    assert sentence in captured.err
    assert os.listdir(tmp_path) == []


# Building


def test_build_makes_the_store_that_the_library_makes(built: Path, run: Path, corpus: Path) -> None:
    model, tokenizer = mnemic.load(run / "model"), mnemic.load_tokenizer(run / "model")
    with (
        open_store(built, model=model, tokenizer=tokenizer) as there,
        mnemic.build_store(model, tokenizer, str(corpus), "ram:", window=64) as here,
    ):
        assert len(there) == len(here) > 300
        assert (there.get(range(len(here))).keys == here.get(range(len(here))).keys).all()
        assert there.config.origin["model"] == str(run.resolve()), "found from any folder"


def test_build_again_says_that_it_is_finished(built: Path, run: Path, corpus: Path, capsys: Any) -> None:
    arguments = ["store", "build", str(built), str(corpus), "--model", str(run), "--window", "64", "--json"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "is finished" in captured.err
    assert json.loads(captured.out)["encoded_now"] == 0
    assert main([*arguments, "--no-resume"]) == 2
    assert main([*arguments, "--layer", "output"]) == 2


def test_build_reports_what_it_left_out(run: Path, corpus: Path, tmp_path: Path, capsys: Any) -> None:
    options = ["--model", run, "--max-probability", "0.004"]
    report = json.loads(output(capsys, "store", "build", tmp_path / "a", corpus, *options, "--json"))
    assert report["rows"] + report["dropped"] == report["tokens"]
    assert 0 < report["dropped"] < report["tokens"]
    text = output(capsys, "store", "build", tmp_path / "b", corpus, *options)
    assert f"left out: {report['dropped']:,} rows" in text
    assert f"pays {report['dropped_loss']:.3f} nats" in text


# Searching


def test_search_finds_the_place_a_text_is_from(built: Path, capsys: Any) -> None:
    text = "document 1 of train: abc ab"
    found = json.loads(output(capsys, "store", "search", built, text, "--k", 3, "--json"))
    assert len(found["found"]) == 3
    nearest = found["found"][0]
    assert (nearest["document"], nearest["namespace"], nearest["position"]) == ("1.txt", "default", len(text))
    assert nearest["before"].endswith(text[-20:])
    assert nearest["word"] == "d"
    assert nearest["after"].startswith(" abe.")
    assert abs(nearest["score"]) < 1e-2
    scores = [one["score"] for one in found["found"]]
    assert scores == sorted(scores, reverse=True)


def test_search_in_words(built: Path, capsys: Any) -> None:
    text = output(capsys, "store", "search", built, "document 1 of train: abc ab", "--k", 5)
    head, empty, columns, first, *others = text.splitlines()
    assert head.startswith("5 nearest of ")
    assert "»d«" in head
    assert empty == ""
    assert columns.split("  ")[0].strip() == "distance"
    assert first.split()[:2] == ["0.00", "1.txt:27"]
    assert "abc ab»d« abe." in first
    column = first.index("»")
    assert all(line.index("»") == column for line in others)
    assert all(len(line) <= 118 for line in text.splitlines())


def test_search_reads_stdin_and_is_confined(store: Path, corpus: Path, capsys: Any, monkeypatch: Any) -> None:
    import io
    import sys

    output(capsys, "store", "add", store, corpus / "valid", "--namespace", "alice")
    monkeypatch.setattr(sys, "stdin", io.StringIO("document 1 of valid: ab\n"))
    found = json.loads(output(capsys, "store", "search", store, "-", "--namespace", "alice", "--k", "1000", "--json"))
    assert {one["namespace"] for one in found["found"]} == {"alice"}
    assert found["found"][0]["document"] == "1.txt"
    by_name = output(capsys, "store", "search", store, "x", "--document", "2.txt", "--k", 1000, "--json")
    assert {(one["document"], one["namespace"]) for one in json.loads(by_name)["found"]} == {
        ("2.txt", "alice"),
        ("2.txt", "default"),
    }
    assert "nothing was found" in output(capsys, "store", "search", store, "x", "--namespace", "nobody")


def test_search_with_another_model_is_refused_unless_overridden(
    built: Path, corpus: Path, tmp_path: Path, capsys: Any
) -> None:
    assert train(corpus, tmp_path / "other", "--seed", "1") == 0
    assert main(["store", "search", str(built), "x", "--model", str(tmp_path / "other")]) == 2
    assert "were made by another model" in capsys.readouterr().err
    assert output(capsys, "store", "search", built, "x", "--model", tmp_path / "other", "--override", "model")


def test_a_model_that_moved_is_asked_for(store: Path, run: Path, corpus: Path, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(run, tmp_path / "old")
    assert main(["store", "build", str(tmp_path / "s"), str(corpus), "--model", str(tmp_path / "old")]) == 0
    shutil.move(tmp_path / "old", tmp_path / "new")
    capsys.readouterr()
    assert main(["store", "search", str(tmp_path / "s"), "x"]) == 2
    assert "say where it is now with --model" in capsys.readouterr().err
    assert output(capsys, "store", "search", tmp_path / "s", "x", "--model", tmp_path / "new")


def test_contexts_on_a_line() -> None:
    assert one_line("a\n    b\t c  d\r\n\n e") == "a⏎b c d⏎e"
    assert one_line("\x1b[2Jgone\x07 \u202eback") == "\ufffd[2Jgone\ufffd \ufffdback"
    assert visible("\n") == "⏎"
    assert visible("\x1b") == "\ufffd"
    assert visible("    ") == "␣␣␣␣"
    assert visible(" word") == " word"
    long = Context(0, Source("folder/" * 20 + "name.txt"), 7, "before " * 40, " word", "after " * 40)
    short = Context(1, Source("a"), 9, "x", "y", "z")
    lines = in_words("text", 5, "ip", [long, short], [0.123456, -1.0]).splitlines()[3:]
    assert [len(line) <= 118 for line in lines] == [True, True]
    assert lines[0].index("»word«") == lines[1].index("»y«")
    assert "…" in lines[0]
    assert "name.txt:7" in lines[0]
    assert lines[1].split()[0] == "-1.00"


# Looking after a store


def test_info(built: Path, run: Path, corpus: Path, capsys: Any) -> None:
    facts = json.loads(output(capsys, "store", "info", built, "--json"))
    with open_store(built) as store:
        summary = store.summary()
    assert (facts["rows"], facts["documents"], facts["bytes"]) == (summary.rows, 3, summary.bytes)
    assert facts["origin"]["corpus"]["corpus"] == str(corpus)
    assert facts["index"]["recall"] == 1.0
    text = output(capsys, "store", "info", built)
    for part in (f"{summary.rows:,} of 3 documents", "recall at 32: 1.000", str(run), "split train", "16 numbers"):
        assert part in text


def test_add_and_forget(store: Path, tmp_path: Path, capsys: Any) -> None:
    before = json.loads(output(capsys, "store", "info", store, "--json"))
    (tmp_path / "letter.txt").write_text("a secret zebra")
    added = json.loads(output(capsys, "store", "add", store, tmp_path / "letter.txt", "--namespace", "alice", "--json"))
    assert added["added"] == 15
    assert main(["store", "add", str(store), str(tmp_path / "letter.txt"), "--namespace", "alice"]) == 2
    assert "--replace" in capsys.readouterr().err
    text = output(capsys, "store", "add", store, tmp_path / "letter.txt", "--namespace", "alice", "--replace")
    assert "15 rows of 1 document added in the place of 15" in text
    assert json.loads(output(capsys, "store", "info", store, "--json"))["namespaces"]["alice"] == 15
    text = output(capsys, "store", "forget", store, "--namespace", "alice")
    assert "15 rows forgotten" in text
    assert f"`mnemic store compact {store}`" in text
    assert any(b"letter.txt" in file.read_bytes() for file in store.iterdir())
    output(capsys, "store", "compact", store)
    assert not any(b"letter.txt" in file.read_bytes() for file in store.iterdir())
    after = json.loads(output(capsys, "store", "info", store, "--json"))
    assert (after["rows"], after["namespaces"]) == (before["rows"], before["namespaces"])


def test_forget_a_document_at_once(store: Path, capsys: Any) -> None:
    report = json.loads(output(capsys, "store", "forget", store, "--document", "1.txt", "--compact", "--json"))
    assert report["compacted"]
    assert not any(b"1.txt" in file.read_bytes() for file in store.iterdir())
    with open_store(store) as after:
        assert after.summary().documents == 2
    manifests = sorted(store.glob("manifest-*"))
    assert main(["store", "forget", str(store), "--namespace", "defualt", "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"mnemic: no row of {store} is of that name: its namespaces are default\n"
    assert sorted(store.glob("manifest-*")) == manifests


def test_names_cannot_steer_the_terminal(store: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "letter.txt").write_text("a secret zebra")
    output(capsys, "store", "add", store, tmp_path / "letter.txt", "--namespace", "\x1b[31mred \u202eBøb")
    assert "\\x1b[31mred \\u202eBøb 15" in output(capsys, "store", "info", store)
    assert main(["store", "forget", str(store), "--namespace", "nobody"]) == 1
    assert "\\x1b[31mred \\u202eBøb" in capsys.readouterr().err


def test_a_refused_namespace_does_not_stand_in_the_way(run: Path, corpus: Path, tmp_path: Path, capsys: Any) -> None:
    arguments = ["store", "build", str(tmp_path / "s"), str(corpus), "--model", str(run), "--namespace"]
    assert main([*arguments, ""]) == 2
    assert not (tmp_path / "s").exists()
    assert main([*arguments, "alice"]) == 0


def test_build_says_what_a_split_leaves_out(run: Path, corpus: Path, tmp_path: Path, capsys: Any) -> None:
    arguments = ["store", "build", str(tmp_path / "s"), str(corpus), "--model", str(run)]
    assert main(arguments) == 0
    assert "the split 'train' is read, 33% of its text; with split = 'all' all of it is" in capsys.readouterr().err
    assert main([*arguments[:2], str(tmp_path / "all"), *arguments[3:], "--split", "all"]) == 0
    assert "of its text" not in capsys.readouterr().err


def test_the_help_is_plain_about_codes_and_documents(capsys: Any) -> None:
    assert "a recall at 32 of 0.5 to 0.6" in output(capsys, "store", "build", "--help")
    assert "removed from every\nnamespace" in output(capsys, "store", "forget", "--help")


def test_verify_finds_damage(store: Path, capsys: Any) -> None:
    assert "is whole" in output(capsys, "store", "verify", store)
    file = max(store.glob("rows-*.keys"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert main(["store", "verify", str(store), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert not found["whole"]
    assert len(found["problems"]) == 1
    for manifest in store.glob("manifest-*.json"):
        manifest.write_bytes(b"nonsense")
    assert main(["store", "verify", str(store)]) == 3
    assert "is damaged:" in capsys.readouterr().out
    assert main(["store", "info", str(store)]) == 3


def test_compact_and_rebuild(store: Path, capsys: Any) -> None:
    report = json.loads(output(capsys, "store", "compact", store, "--rebuild", "--json"))
    assert report["rows"] > 300
    assert report["bytes_after"] > 0
    assert "rows" in output(capsys, "store", "compact", store)


def test_prune_says_what_it_costs(store: Path, tmp_path: Path, capsys: Any) -> None:
    arguments = ["store", "prune", store]
    report = json.loads(output(capsys, *arguments, tmp_path / "small", "--closer", "2", "--json"))
    assert 0 < report["rows_after"] < report["rows_before"]
    assert report["held_out"]["contexts"] > 100
    text = output(capsys, *arguments, tmp_path / "again", "--closer", "2")
    assert f"{report['held_out']['recall_before']:.1%} -> {report['held_out']['recall_after']:.1%}" in text
    assert "measured on" not in output(capsys, *arguments, tmp_path / "third", "--no-measure")
    assert output(capsys, "store", "search", tmp_path / "small", "document 1", "--k", 3)


def test_sizes_as_people_write_them() -> None:
    assert [bytes_in_words(n) for n in (0, 999, 1500, 2.5e6, 3e9, 4.2e13)] == [
        "0 bytes",
        "999 bytes",
        "1.5 KB",
        "2.5 MB",
        "3.0 GB",
        "42.0 TB",
    ]
