"""The papers' corpora in their real text, where it is at hand: documents and tokens must be as many as published."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from mnemic.data import SPLITS, DocumentStreams, SlidingWindows, open_corpus, tokenize_corpus, train_tokenizer


@pytest.fixture
def folder(shared_data, monkeypatch):
    monkeypatch.setenv("MNEMIC_DATA", str(shared_data))
    return shared_data


def unpacked(path: Path) -> bytes:
    return lzma.decompress(path.read_bytes())


@pytest.mark.parametrize(
    ("name", "splits", "counts"),
    [
        ("wikitext-2", SPLITS, [600, 60, 60]),
        ("wikitext-103", ("valid", "test"), [60, 60]),
        ("isabelle", SPLITS, [144, 9, 9]),
        ("pg19", SPLITS, [25, 3, 3]),
        ("arxiv-math", SPLITS, [207, 12, 12]),
    ],
)
def test_document_counts(folder, name, splits, counts):
    corpus = open_corpus(name)
    assert [sum(1 for _ in corpus.documents(split)) for split in splits] == counts


def test_wikitext_2_has_the_published_tokens(folder):
    corpus = open_corpus("wikitext-2")
    words = train_tokenizer(corpus.documents("train"), kind="word")
    assert len(words) == 33_278
    for split, tokens in zip(SPLITS, (2_088_628, 217_646, 245_569), strict=True):
        tokenized = tokenize_corpus(corpus.documents(split), words)
        assert tokenized.target_count == tokens
        assert int(tokenized.byte_counts.sum()) == len(unpacked(folder / f"wikitext-2/{split}.txt.xz"))
        assert not (tokenized.tokens >= len(words)).any()
    document = next(corpus.documents("test"))
    assert words.decode(tokenized[0][1:]) == document.text


def test_streams_and_windows_score_every_token_of_wikitext_2(folder):
    corpus = open_corpus("wikitext-2")
    words = train_tokenizer(corpus.documents("valid"), kind="word")
    tokenized = tokenize_corpus(corpus.documents("valid"), words)
    for batches in (DocumentStreams(tokenized, 7, 100, epochs=1), SlidingWindows(tokenized, 300, 100, 16)):
        assert sum(int((batch["targets"] != -100).sum()) for batch in batches) == 217_646


def test_enwik8_is_cut_where_everybody_cuts_it(folder):
    corpus = open_corpus("enwik8")
    valid, test = (next(corpus.documents(split)).text.encode() for split in ("valid", "test"))
    assert (len(valid), len(test)) == (5_000_000, 5_000_000)
    assert unpacked(folder / "enwik8/enwik8.xz")[90_000_000:] == valid + test


def test_isabelle_entries_keep_the_order_of_their_theories(folder):
    rows = [json.loads(line) for line in unpacked(folder / "isabelle-afp/test.jsonl.xz").splitlines()]
    documents = {document.id: document.text for document in open_corpus("isabelle").documents("test")}
    for entry, text in documents.items():
        theories = [row["text"] for row in rows if row["entry"] == entry]
        positions = [text.index(theory) for theory in theories]
        assert positions == sorted(positions)
        assert len(text) - sum(map(len, theories)) <= len(theories)


def test_a_single_file_is_cut(folder):
    corpus = open_corpus(str(folder / "tinyshakespeare/input.txt.xz"))
    parts = [next(corpus.documents(split)).text for split in SPLITS]
    assert "".join(parts).encode() == unpacked(folder / "tinyshakespeare/input.txt.xz")
    assert [len(part) / 1_115_394 for part in parts] == pytest.approx([0.9, 0.05, 0.05], abs=0.001)
