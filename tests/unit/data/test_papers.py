"""The document rules of the papers' corpora, on small files in their layout and on a hub that is played."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
from typing import Any

import pytest

from mnemic.data import CORPORA, SPLITS, open_corpus, papers, wikipedia
from mnemic.data.papers import is_long
from mnemic.data.wikipedia import articles
from mnemic.errors import DamagedError, UsageError
from tests.unit.data.test_corpora import everything, make, texts

WIKITEXT = [
    " \n",
    " = First Article = \n",
    " \n",
    " It says a = b = c . \n",
    " \n",
    " = = A Section = = \n",
    " \n",
    " Key : Pld \n",
    " = Played , W = \n",
    " Wins . \n",
    " = Points = \n",
    " \n",
    " = Second = Article = \n",
    " \n",
    " Text . \n",
]


def test_an_article_starts_at_a_title_between_blank_lines():
    first, second = articles(WIKITEXT)
    assert (first.id, second.id) == ("First Article", "Second = Article")
    assert first.text == "".join(WIKITEXT[:12])
    assert second.text == "".join(WIKITEXT[12:])


@pytest.mark.parametrize("lines", [[], ["no title at all\n"], [" = Only a title = \n"], WIKITEXT[3:], WIKITEXT[1:]])
def test_no_line_of_wikitext_is_lost(lines):
    assert "".join(document.text for document in articles(lines)) == "".join(lines)


def test_wikitext_from_files(tmp_path, monkeypatch):
    make(tmp_path, {f"wikitext-2/wiki.{split}.tokens": "".join(WIKITEXT) for split in SPLITS})
    monkeypatch.setenv("MNEMIC_DATA", str(tmp_path))
    assert list(texts(open_corpus("wikitext-2"), "valid")) == ["First Article", "Second = Article"]


@pytest.mark.parametrize("given", [".", "enwik8.txt"])
def test_enwik8_is_cut_by_bytes(tmp_path, monkeypatch, given):
    data = ("abcdefghä\n" * 10).encode()[:100]
    (tmp_path / "enwik8.txt").write_bytes(data)
    monkeypatch.setattr(wikipedia, "ENWIK8_BYTES", {"train": (0, 77), "valid": (77, 88), "test": (88, 99)})
    corpus = open_corpus("enwik8", str(tmp_path / given))
    parts = [next(corpus.documents(split)).text.encode() for split in SPLITS]
    assert [len(part) for part in parts] == [77, 11, 11]
    assert b"".join(parts) == data[:99]


def test_a_part_of_enwik8_is_refused(tmp_path):
    make(tmp_path, {"enwik8": "only the beginning"})
    with pytest.raises(UsageError, match="ended after 18: get the whole file"):
        open_corpus("enwik8", str(tmp_path)).documents("train")


def test_github_joins_a_repository_in_directory_order(tmp_path):
    make(
        tmp_path, {"train/repo/b.py": "b", "train/repo/a/z.py": "z\n", "train/repo/.git/x": "x", "train/other/c.c": "c"}
    )
    (tmp_path / "train/repo/logo.png").write_bytes(b"\x89PNG\0")
    assert texts(open_corpus("github", str(tmp_path)), "train") == {"other": "c\n", "repo": "z\nb\n"}


def test_rows_of_one_repository_are_joined(tmp_path):
    rows = [{"repo": repo, "text": text} for repo, text in (("a", "1"), ("a", "2\n"), ("b", "3"))]
    make(tmp_path, {"train.jsonl": "\n".join(map(json.dumps, rows))})
    assert texts(open_corpus("github", str(tmp_path)), "train") == {"a": "1\n2\n", "b": "3\n"}


@pytest.mark.parametrize("name", sorted({*CORPORA} - {"stdlib"}))
@pytest.mark.parametrize("suffix", ["txt", "jsonl", "txt.gz", "jsonl.xz"])
def test_every_named_corpus_reads_files_of_splits(tmp_path, monkeypatch, name, suffix):
    text = "word " * 5000
    data = (json.dumps({"id": 1, "text": text}) if "jsonl" in suffix else text).encode()
    (tmp_path / name).mkdir()
    for split in SPLITS:
        packed = {"gz": gzip.compress, "xz": lzma.compress}.get(suffix.split(".")[-1], bytes)(data)
        (tmp_path / name / f"{split}.{suffix}").write_bytes(packed)
    monkeypatch.setenv("MNEMIC_DATA", str(tmp_path))
    assert open_corpus(name).splits == SPLITS
    assert [document.text.strip() for document in open_corpus(name).documents("valid")] == [text.strip()]


def theory(name: str, *imported: str) -> str:
    return f"(* {name} *)\ntheory {name}\n  imports Main {' '.join(imported)}\nbegin\nend\n"


def test_theories_come_after_what_they_import(tmp_path):
    theories = {
        "train/Entry/A.thy": theory("A", '"sub/C"', '"HOL-Library.Multiset"'),
        "train/Entry/B.thy": theory("B", "A"),
        "train/Entry/sub/C.thy": theory("C"),
        "train/Entry/document/root.tex": "left out",
    }
    make(tmp_path, theories)
    text = texts(open_corpus("isabelle", str(tmp_path)), "train")["Entry"]
    assert text == theories["train/Entry/sub/C.thy"] + theories["train/Entry/A.thy"] + theories["train/Entry/B.thy"]


def test_a_theory_may_import_one_of_its_own_name_from_elsewhere():
    both = {"A.thy": theory("A", '"HOL-Library.A"', "Z"), "Z.thy": theory("Z")}
    assert papers._join_theories(both) == both["Z.thy"] + both["A.thy"]


def test_theories_that_import_each_other_come_by_name():
    both = {"A.thy": theory("A", "B"), "B.thy": theory("B", "A")}
    assert papers._join_theories(both) == both["A.thy"] + both["B.thy"]


def test_c4_keeps_only_long_documents(tmp_path):
    assert is_long("word, " * 2048)
    assert not is_long("word, " * 2047 + "x")
    rows = [{"id": "long", "text": "w " * 4096}, {"id": "short", "text": "w " * 4095}]
    make(tmp_path, {"train.jsonl": "\n".join(map(json.dumps, rows))})
    assert list(texts(open_corpus("c4", str(tmp_path)), "train")) == ["long"]


# The hub


class Rows(list):
    def sort(self, columns: list[str]) -> Rows:  # type: ignore[override]
        return Rows(sorted(self, key=lambda row: [row[column] for column in columns]))


@pytest.fixture
def hub(monkeypatch) -> dict[tuple, Any]:
    """A hub with the tables that a test puts in, by (arguments of load_dataset, split)."""
    tables: dict[tuple, Any] = {}

    def load_dataset(*arguments: Any, split: str, streaming: bool, data_files: str = "") -> Any:
        return tables[(*arguments, *filter(None, [data_files]), split)]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.delenv("MNEMIC_DATA", raising=False)
    return tables


def test_wikitext_from_the_hub_equals_the_file(hub):
    hub["Salesforce/wikitext", "wikitext-103-v1", "validation"] = [
        {"text": "" if line == " \n" else line} for line in WIKITEXT
    ]
    assert list(open_corpus("wikitext-103").documents("valid")) == list(articles(WIKITEXT))


def test_enwik8_from_the_hub_is_checked(hub, monkeypatch):
    monkeypatch.setattr(wikipedia, "ENWIK8_BYTES", {"train": (0, 8), "valid": (8, 10), "test": (10, 12)})
    hub["haukur/enwik9", "train"] = [{"text": line} for line in ("abc", "", "defg", "hijk")]
    with pytest.raises(DamagedError, match="not the published one"):
        open_corpus("enwik8").documents("train")
    monkeypatch.setattr(wikipedia, "ENWIK8_SHA1", hashlib.sha1(b"abc\n\ndefg\nhi").hexdigest())
    assert "".join(next(open_corpus("enwik8").documents(split)).text for split in SPLITS) == "abc\n\ndefg\nhi"


def test_books_and_pages_from_the_hub(hub):
    hub["emozilla/pg19", "test"] = [{"short_book_title": "Emma", "text": "Emma Woodhouse"}]
    hub["allenai/c4", "en", "validation"] = [{"url": "a", "text": "w " * 5000}, {"url": "b", "text": "short"}]
    assert texts(open_corpus("pg19"), "test") == {"Emma": "Emma Woodhouse"}
    assert list(texts(open_corpus("c4"), "valid")) == ["a"]
    with pytest.raises(UsageError, match="c4 has no 'test' split"):
        open_corpus("c4").documents("test")


def proof_pile(hub: dict, part: str, *rows: tuple[dict, str]) -> None:
    files = f"hf://datasets/hoskinson-center/proof-pile/{part}/*.jsonl.gz"
    hub["text", files, "train"] = [{"text": json.dumps({"meta": meta, "text": text})} for meta, text in rows]


def test_mathematics_and_proofs_from_the_hub(hub):
    afp = {name: theory(name, *imported) for name, *imported in (("A", "B"), ("B",), ("C",))}
    meta = {name: {"file": f"formal/afp/Entry{name == 'C'}/{name}.thy"} for name in afp}
    proof_pile(hub, "train", ({"config": "arxiv", "file": "1.tex"}, "paper"), (meta["A"], afp["A"]))
    proof_pile(hub, "dev", (meta["B"], afp["B"]), (meta["C"], afp["C"]))
    proof_pile(hub, "test", ({"file": "formal/afp/EntryTrue/root.tex"}, "left out"), ({"config": "wiki"}, "left out"))
    assert texts(open_corpus("arxiv-math"), "train") == {"1.tex": "paper"}
    assert everything(open_corpus("isabelle")) == {"EntryFalse": afp["B"] + afp["A"], "EntryTrue": afp["C"]}


def test_repositories_from_the_hub(hub):
    rows = [("b", "x", "1"), ("a", "z", "2"), ("b", "a", "3")]
    hub["codeparrot/codeparrot-clean", "train"] = Rows(
        {"repo_name": repo, "path": path, "content": text} for repo, path, text in rows
    )
    assert everything(open_corpus("github")) == {"a": "2\n", "b": "3\n1\n"}


def test_a_hub_out_of_reach_is_said_in_one_sentence(monkeypatch):
    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub\nwith details")

    monkeypatch.setattr("datasets.load_dataset", offline)
    monkeypatch.setattr("datasets.get_dataset_split_names", offline)
    monkeypatch.delenv("MNEMIC_DATA", raising=False)
    with pytest.raises(UsageError, match=r"pg19 could not be loaded .*\(Couldn't reach the Hub\).*pg19/ in the folder"):
        open_corpus("pg19").documents("train")
    with pytest.raises(UsageError, match=r"hf:some/thing could not be loaded .*Couldn't reach"):
        open_corpus("hf:some/thing")


# hf:<dataset>, with datasets' real code on local files


def test_hf_dataset_with_splits(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"id": 5, "content": "one", "lang": "py"}, {"id": 6, "content": "two", "lang": "c"}]
    make(tmp_path / "set", {f"{split}.jsonl": "\n".join(map(json.dumps, rows)) for split in ("train", "test")})
    corpus = open_corpus(f"hf:{tmp_path / 'set'}")
    assert corpus.splits == ("train", "test")
    assert texts(corpus, "test") == {"5": "one", "6": "two"}


def test_hf_dataset_of_one_split_is_divided(tmp_path):
    make(tmp_path, {"train.jsonl": "\n".join(json.dumps({"sentence": f"s{n}", "label": n}) for n in range(100))})
    corpus = open_corpus(f"hf:{tmp_path}")
    assert corpus.splits == SPLITS
    assert len(everything(corpus)) == 100


def test_hf_dataset_without_a_text_column(tmp_path):
    make(tmp_path, {"train.jsonl": json.dumps({"question": "a", "answer": "b"})})
    with pytest.raises(UsageError, match="has the columns question, answer: expected a text column"):
        open_corpus(f"hf:{tmp_path}").documents("train")
    with pytest.raises(UsageError, match="names no dataset"):
        open_corpus("hf:")
