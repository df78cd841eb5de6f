from __future__ import annotations

import contextlib
import gzip
import json
import lzma
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mnemic.data import CORPORA, SPLITS, Corpus, Document, local, open_corpus
from mnemic.data.documents import divided
from mnemic.errors import UsageError


def texts(corpus: Corpus, split: str) -> dict[str, str]:
    return {document.id: document.text for document in corpus.documents(split)}


def everything(corpus: Corpus) -> dict[str, str]:
    """All documents of all splits that have any; fails where two splits share a document."""
    found: dict[str, str] = {}
    for split in corpus.splits:
        documents = {}
        with contextlib.suppress(UsageError):  # a split may have fallen empty
            documents = texts(corpus, split)
        assert not found.keys() & documents.keys()
        found |= documents
    return found


def make(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8", newline="")
    return root


# Splitting what has no splits


@given(st.sets(st.text(min_size=1, max_size=8), min_size=2, max_size=40))
def test_several_documents_are_split_by_id_and_train_is_never_empty(ids):
    corpus = divided("it", lambda: (Document(id, f"text of {id}") for id in ids))
    assert texts(corpus, "train")
    assert everything(corpus) == {id: f"text of {id}" for id in ids}


def test_a_document_stays_in_its_split_when_others_come():
    few = divided("it", lambda: (Document(str(n), "text") for n in range(300)))
    more = divided("it", lambda: (Document(str(n), "text") for n in reversed(range(600))))
    for split in SPLITS:
        assert texts(few, split).keys() <= texts(more, split).keys()


def test_the_shares_are_about_90_5_5():
    corpus = divided("it", lambda: (Document(str(n), "text") for n in range(4000)))
    shares = [len(texts(corpus, split)) / 4000 for split in SPLITS]
    assert shares == pytest.approx([0.90, 0.05, 0.05], abs=0.015)


def test_train_gets_the_first_document_if_none_hashes_to_it():
    many = divided("it", lambda: (Document(str(n), "text") for n in range(100)))
    ids = [*texts(many, "valid"), *texts(many, "test")]
    corpus = divided("it", lambda: (Document(id, "text") for id in ids))
    assert list(texts(corpus, "train")) == ids[:1]
    assert sorted(everything(corpus)) == sorted(ids)


@given(st.text(alphabet="ab\n", min_size=1, max_size=300))
def test_a_single_document_is_cut_at_line_ends(text):
    corpus = divided("it", lambda: [Document("one", text)])
    if text.isspace():
        with pytest.raises(UsageError, match="empty"):
            corpus.documents("train")
        return
    parts = []
    for split in SPLITS:
        try:
            parts.append(texts(corpus, split)["one"])
        except UsageError:
            parts.append("")
    if all(part for part in parts):
        assert "".join(parts) == text
        assert all(part.endswith("\n") for part in parts[:2])
        assert len(parts[0]) >= 0.9 * len(text) - 1
    assert parts[0].strip() or not text[: int(len(text) * 0.9)].strip()


def test_a_long_document_is_cut_90_5_5(tmp_path):
    lines = [f"line {n}\n" for n in range(1000)]
    path = make(tmp_path, {"a.txt": "".join(lines)}) / "a.txt"
    parts = [texts(open_corpus(str(path)), split)["a.txt"] for split in SPLITS]
    assert "".join(parts) == "".join(lines)
    assert [part.count("\n") for part in parts] == pytest.approx([900, 50, 50], abs=3)


# Files and folders


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".xz", lzma.compress), (".gz", gzip.compress)])
def test_packed_files_are_read_like_plain_ones(tmp_path, suffix, pack):
    rows = [{"text": "one"}, {"id": "b", "text": "two"}]
    for split in ("train", "validation", "test"):
        data = "\n".join(json.dumps(row) for row in rows).encode()
        (tmp_path / f"{split}.jsonl{suffix}").write_bytes(pack(data))
    corpus = open_corpus(str(tmp_path))
    assert corpus.splits == SPLITS
    assert texts(corpus, "val") == {f"validation.jsonl{suffix}:1": "one", "b": "two"}


def test_a_folder_is_read_recursively_and_sorted_without_hidden_files(tmp_path):
    files = {f"{folder}/{name}.txt": f"{folder} {name}" for folder in ("b", "a", "a/c") for name in "yx"}
    make(tmp_path, {**files, ".git/config": "hidden", "empty.txt": "", "blank.txt": " \n"})
    corpus = open_corpus(str(tmp_path))
    assert everything(corpus) == files
    order = [id for id, _ in local.files_under(tmp_path)]
    assert order == ["a/c/x.txt", "a/c/y.txt", "a/x.txt", "a/y.txt", "b/x.txt", "b/y.txt", "blank.txt", "empty.txt"]


def test_sub_folders_are_splits(tmp_path):
    make(tmp_path, {"train/a.txt": "1", "train/b.txt": "2", "dev/c.txt": "3", "README.md": "not a document"})
    corpus = open_corpus(str(tmp_path))
    assert corpus.splits == ("train", "valid")
    assert texts(corpus, "train") == {"a.txt": "1", "b.txt": "2"}
    assert texts(corpus, "valid") == {"c.txt": "3"}
    with pytest.raises(UsageError, match="no 'test' split: it has 'train', 'valid'"):
        corpus.documents("test")


def test_all_of_a_corpus_is_whole(tmp_path):
    files = {"a.txt": "x\n" * 100, "b.txt": "2", "c.txt": " "}
    make(
        tmp_path, {**{f"flat/{name}": text for name, text in files.items()}, "own/dev/d.txt": "4", "own/train.txt": "5"}
    )
    assert texts(open_corpus(str(tmp_path / "flat")), "all") == {"a.txt": files["a.txt"], "b.txt": "2"}
    assert texts(open_corpus(str(tmp_path / "flat/a.txt")), "all") == {"a.txt": files["a.txt"]}  # not cut in three
    assert texts(open_corpus(str(tmp_path / "own")), "all") == {"dev/d.txt": "4", "train.txt": "5"}
    parts = Corpus("parts", {split: lambda split=split: [Document(split, "text")] for split in ("valid", "train")})
    assert [document.id for document in parts.documents("all")] == ["train", "valid"]
    with pytest.raises(UsageError, match="has no document"):
        open_corpus(str(tmp_path / "flat/c.txt")).documents("all")


def test_a_folder_of_tests_among_others_is_no_split(tmp_path):
    make(tmp_path, {"src/a.py": "1", "test/b.py": "2"})
    assert open_corpus(str(tmp_path)).splits == SPLITS
    assert everything(open_corpus(str(tmp_path))) == {"src/a.py": "1", "test/b.py": "2"}


def test_a_path_named_after_an_evaluation_split_is_all_of_it(tmp_path):
    make(tmp_path, {"valid/a.txt": "1", "valid/b.txt": "2", "train.txt": "x\n" * 100})
    corpus = open_corpus(str(tmp_path / "valid"))
    assert corpus.splits == ("valid",)
    assert len(texts(corpus, "valid")) == 2
    assert open_corpus(str(tmp_path / "train.txt")).splits == SPLITS


# What can be wrong


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        ({"books.txt": "a"}, "boks.txt", r"no such file or folder: .*boks\.txt; did you mean .*books\.txt"),
        ({"corpora/books/a.txt": "a"}, "corpra/books", r"no such file or folder: .*corpra; did you mean .*corpora"),
        ({"a.txt": ""}, "a.txt", r"a\.txt is empty"),
        ({"a.txt": " \n\n"}, "a.txt", "is empty"),
        ({"folder/.hidden": "a"}, "folder", "is empty"),
        ({"folder/a.txt": "", "folder/b.txt": ""}, "folder", "is empty"),
        ({"a.jsonl": '{"text": ""}\n'}, "a.jsonl", "is empty"),
        ({"a.jsonl": '{"text": "a"}\n{"id": 1}'}, "a.jsonl", r'a\.jsonl, line 2 has no "text"'),
        ({"folder/a.txt": "a", "folder/b.bin": "b\0"}, "folder", r"b\.bin is not a text file: a NUL byte at byte 1"),
    ],
)
def test_bad_sources_are_named_in_one_sentence(tmp_path, files, source, message):
    make(tmp_path, files)
    with pytest.raises(UsageError, match=message) as caught:
        list(open_corpus(str(tmp_path / source)).documents("train"))
    assert "\n" not in str(caught.value)


def test_unknown_names_and_splits(tmp_path, monkeypatch):
    monkeypatch.chdir(make(tmp_path, {"shakespeare.txt": "a"}))
    with pytest.raises(UsageError, match="did you mean 'wikitext-103'"):
        open_corpus("wikitext103")
    with pytest.raises(UsageError, match=r"did you mean 'shakespeare\.txt'"):
        open_corpus("shakespear.txt")
    with pytest.raises(UsageError, match="no corpus was named"):
        open_corpus("")
    with pytest.raises(UsageError, match="a path goes with the name of a corpus"):
        open_corpus("shakespeare.txt", str(tmp_path))
    with pytest.raises(UsageError, match="unknown split 'trian': did you mean 'train'"):
        open_corpus("stdlib").documents("trian")
    with pytest.raises(UsageError, match="no such file or folder"):
        open_corpus("enwik8", str(tmp_path / "nothing"))


@pytest.mark.parametrize("source", ["x" * 5000, "a\0b", "folder/" + "x" * 5000, "/dev/null"])
def test_impossible_paths(source):
    with pytest.raises(UsageError, match=r"no corpus, file or folder|no such file or folder|is empty"):
        open_corpus(source).documents("train")


def test_folders_that_may_not_be_read(tmp_path, monkeypatch):
    def forbidden(self: Path, **_: object) -> None:  # root may read anything, so the system's word is put in
        raise PermissionError

    monkeypatch.setattr(Path, "iterdir", forbidden)
    with pytest.raises(UsageError, match="no permission to read"):
        open_corpus(str(tmp_path))
    monkeypatch.setattr(Path, "stat", forbidden)
    with pytest.raises(UsageError, match="no permission to read"):
        open_corpus(str(tmp_path))


@pytest.mark.parametrize("text", ["ab\ud800", "ab\udcffc", "\u00e9b\ude00"])
def test_a_lone_surrogate_is_named_with_its_document(text):
    with pytest.raises(UsageError, match=r"document 'd\\ud8001' has a lone surrogate, '\\ud\w+', at character [12]"):
        Document("d\ud8001", text)
    assert Document("d", "ab\U0001f600").text == "ab\U0001f600"


def test_a_split_without_documents_says_so(tmp_path):
    make(tmp_path, {"a.txt": "one line only"})
    with pytest.raises(UsageError, match=r"the 'valid' split of .* has no document"):
        open_corpus(str(tmp_path / "a.txt")).documents("valid")


def test_a_corpus_can_be_read_again_and_again(tmp_path):
    make(tmp_path, {f"{n}.txt": str(n) for n in range(20)})
    corpus = open_corpus(str(tmp_path))
    assert list(corpus.documents("train")) == list(corpus.documents("train"))


# The standard library


def test_stdlib():
    corpus = open_corpus("stdlib")
    documents = everything(corpus)
    assert {"json", "argparse", "collections", "this"} <= documents.keys()
    assert not documents.keys() & {"test", "numpy", "pip"}
    assert documents["json"].index('"""JSON (JavaScript') < documents["json"].index('"""Implementation of JSONDecoder')
    assert "import unittest" not in documents["json"]
    assert documents["argparse"] == Path(__import__("argparse").__file__).read_text(encoding="utf-8")
    assert all(len(texts(corpus, split)) >= 3 for split in SPLITS)


def test_stdlib_leaves_out_tests_and_installed_packages(tmp_path):
    files = {"json/b.py": "b", "json/a/x.py": "x", "this.py": "this", "abc/__init__.py": "abc"}
    others = ["json/tests/t.py", "json/data.txt", "test/t.py", "site-packages/numpy.py", "numpy.py", "abc/test/t.py"]
    make(tmp_path, {**files, **dict.fromkeys(others, "left out")})
    assert everything(open_corpus("stdlib", str(tmp_path))) == {"json": "x\nb\n", "this": "this", "abc": "abc\n"}


def test_every_registered_corpus_opens_without_reading_anything(monkeypatch):
    monkeypatch.delenv("MNEMIC_DATA", raising=False)
    for name in CORPORA:
        corpus = open_corpus(name)
        assert corpus.name == name
        assert "train" in corpus.splits
        assert CORPORA.load(name).__doc__.splitlines()[0].endswith(".")


def test_opening_corpora_imports_neither_torch_nor_datasets():
    code = (
        "import sys, mnemic.data; c = mnemic.data.open_corpus('stdlib'); next(c.documents('train'))\n"
        "print([m for m in ('torch', 'datasets', 'transformers', 'tokenizers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
