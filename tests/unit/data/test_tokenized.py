from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mnemic.data import Document, TokenizedCorpus, encoding, tokenize_corpus, tokenized, train_tokenizer
from mnemic.data.tokenized import FILES, MANIFEST, count_words
from mnemic.errors import DamagedError, MnemicError, UsageError

TEXTS = ["hello world\n", "", "naïve 日本語 <eos> text", "a  b\n\n c " * 50]
DOCUMENTS = [Document(f"name\n{i}", text) for i, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def bpe() -> Any:
    return train_tokenizer(DOCUMENTS, kind="bpe", vocab_size=280)


@pytest.fixture(scope="module")
def word() -> Any:
    return train_tokenizer(DOCUMENTS, kind="word")


def numbers(highest: int) -> Any:
    """A tokenizer of the words 0 to `highest`, each its own id."""
    backend = Tokenizer(models.WordLevel({str(n): n for n in range(highest + 1)}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="0")


@pytest.mark.parametrize("folder", [False, True])
def test_documents_are_start_text_end(tmp_path, bpe, folder):
    corpus = tokenize_corpus(iter(DOCUMENTS), bpe, tmp_path / "tokens" if folder else None)
    assert len(corpus) == len(DOCUMENTS)
    for index, document in enumerate(DOCUMENTS):
        ids = bpe(document.text, split_special_tokens=True)["input_ids"]
        expected = [bpe.eos_token_id, *ids, bpe.eos_token_id]
        assert corpus[index].tolist() == expected
        assert corpus[index].dtype == np.int64
        assert corpus.length(index) == len(expected)
        assert corpus.slice(index, 1, 3).tolist() == expected[1:3]
        assert corpus.slice(index, 1, 10**6).tolist() == expected[1:]
        assert corpus.id(index) == document.id
    assert bpe.decode(corpus[2][1:-1]) == TEXTS[2]
    assert corpus.byte_counts.tolist() == [len(text.encode()) for text in TEXTS]
    assert corpus.word_counts.tolist() == [len(text.split()) for text in TEXTS]
    assert corpus.target_count == sum(len(ids) - 1 for ids in corpus)
    assert corpus[-1].tolist() == corpus[3].tolist()
    with pytest.raises(IndexError):
        corpus[4]


def test_what_a_call_left_set_in_the_tokenizer_changes_nothing(bpe):
    expected = tokenize_corpus(DOCUMENTS, bpe)
    bpe("a b c d", truncation=True, padding="max_length", max_length=2)
    assert same(tokenize_corpus(DOCUMENTS, bpe), expected)


def test_a_line_end_that_is_the_end_token_is_not_doubled(word):
    corpus = tokenize_corpus([Document("a", "hello world\n"), Document("b", "hello")], word)
    end, hello, world = word.convert_tokens_to_ids(["<eos>", "hello", "world"])
    assert corpus[0].tolist() == [end, hello, world, end]
    assert corpus[1].tolist() == [end, hello, end]


@pytest.mark.parametrize(("highest", "dtype"), [(32_768, "uint16"), (65_535, "uint16"), (65_536, "uint32")])
def test_ids_do_not_overflow(highest, dtype):
    corpus = tokenize_corpus([Document("a", f"1 32767 32768 {highest}")], numbers(highest))
    assert corpus.tokens.dtype == dtype
    assert corpus[0].tolist() == [0, 1, 32767, 32768, highest, 0]


def test_start_token_is_bos_if_there_is_one():
    tokenizer = numbers(9)
    tokenizer.bos_token = "7"
    assert tokenize_corpus([Document("a", "1 2")], tokenizer)[0].tolist() == [7, 1, 2, 0]


def test_bert_uses_cls_and_sep_and_no_end_at_all_is_refused():
    tokenizer = numbers(9)
    tokenizer.eos_token, tokenizer.cls_token, tokenizer.sep_token = None, "3", "4"
    assert tokenize_corpus([Document("a", "1 2")], tokenizer)[0].tolist() == [3, 1, 2, 4]
    tokenizer.cls_token = tokenizer.sep_token = None
    with pytest.raises(UsageError, match=r"set tokenizer\.eos_token"):
        tokenize_corpus([Document("a", "1 2")], tokenizer)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(alphabet=" \n\r\t'sabé.1\u00a0\x1c\x85<eos>", max_size=60), min_size=1, max_size=4))
@pytest.mark.parametrize("kind", ["bpe", "word", "byte"])
def test_pieces_give_the_ids_of_the_whole(monkeypatch, bpe, word, byte_tokenizer, kind, texts):
    tokenizer = {"bpe": bpe, "word": word, "byte": byte_tokenizer}[kind]
    documents = [Document(str(i), text) for i, text in enumerate(texts)]
    monkeypatch.setattr(encoding, "PIECE", 3)
    monkeypatch.setattr(encoding, "BATCH", 10)
    corpus = tokenize_corpus(documents, tokenizer)
    for index, text in enumerate(texts):
        ids = tokenizer(text, split_special_tokens=True)["input_ids"]
        end = [] if ids[-1:] == [tokenizer.eos_token_id] else [tokenizer.eos_token_id]
        assert corpus[index].tolist() == [tokenizer.eos_token_id, *ids, *end]


def test_long_documents_are_really_cut_and_unknown_tokenizers_are_not(monkeypatch, bpe):
    monkeypatch.setattr(encoding, "PIECE", 10)
    document = Document("a", "1 2 3 " * 100)
    assert sum(1 for _ in encoding.encode([document], bpe)) > 30
    assert sum(1 for _ in encoding.encode([document], numbers(9))) == 1


@given(st.text(alphabet=" \na\u3000"), st.integers(1, 5))
def test_words_are_counted_as_split_does(text, piece):
    assert count_words(text, piece) == len(text.split())


# Using it again


def counting(monkeypatch) -> list[str]:
    """The ids of the documents that are encoded from now on."""
    seen: list[str] = []
    real = tokenized.encode

    def spy(documents: Any, tokenizer: Any) -> Iterator:
        for document, ids, last in real(documents, tokenizer):
            if last:
                seen.append(document.id)
            yield document, ids, last

    monkeypatch.setattr(tokenized, "encode", spy)
    return seen


def same(first: TokenizedCorpus, second: TokenizedCorpus) -> bool:
    return first.fingerprint == second.fingerprint and [a.tolist() for a in first] == [b.tolist() for b in second]


def test_the_same_corpus_is_not_tokenised_twice(tmp_path, monkeypatch, bpe):
    first = tokenize_corpus(DOCUMENTS, bpe, tmp_path / "t")
    seen = counting(monkeypatch)
    assert same(tokenize_corpus(iter(DOCUMENTS), bpe, tmp_path / "t"), first)
    assert seen == []


@pytest.mark.parametrize(
    ("changed", "encoded"),
    [
        ([*DOCUMENTS, Document("new", "more")], ["new"]),
        (DOCUMENTS[:2], []),
        ([DOCUMENTS[0], Document(DOCUMENTS[1].id, "text"), *DOCUMENTS[2:]], [d.id for d in DOCUMENTS[1:]]),
        ([DOCUMENTS[0], Document("renamed", TEXTS[1]), *DOCUMENTS[2:]], ["renamed", *(d.id for d in DOCUMENTS[2:])]),
        (DOCUMENTS[::-1], [d.id for d in DOCUMENTS[::-1]]),
    ],
)
def test_a_changed_corpus_is_tokenised_from_the_change_on(tmp_path, monkeypatch, bpe, changed, encoded):
    tokenize_corpus(DOCUMENTS, bpe, tmp_path / "t")
    fresh = tokenize_corpus(changed, bpe)
    seen = counting(monkeypatch)
    again = tokenize_corpus(iter(changed), bpe, tmp_path / "t")
    assert seen == encoded
    assert same(again, fresh)
    assert [again.id(i) for i in range(len(again))] == [d.id for d in changed]
    assert same(TokenizedCorpus(tmp_path / "t"), fresh)


def test_another_tokenizer_makes_it_anew(tmp_path, monkeypatch, bpe, word):
    tokenize_corpus(DOCUMENTS, bpe, tmp_path / "t")
    seen = counting(monkeypatch)
    tokenize_corpus(DOCUMENTS, word, tmp_path / "t")
    assert seen == [d.id for d in DOCUMENTS]


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_noticed_and_mended(tmp_path, caplog, bpe, name, damage):
    whole = tokenize_corpus(DOCUMENTS, bpe)
    tokenize_corpus(DOCUMENTS, bpe, tmp_path / "t")
    path = tmp_path / "t" / name
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        middle = len(data) // 2
        rest = b"" if damage == "cut" else bytes([data[middle] ^ 1]) + data[middle + 1 :]
        path.write_bytes(data[:middle] + rest)
    with pytest.raises(DamagedError, match="delete it and tokenise again"):
        TokenizedCorpus(tmp_path / "t")
    assert same(tokenize_corpus(DOCUMENTS, bpe, tmp_path / "t"), whole)
    assert "made anew" in caplog.text


def test_every_digit_of_the_manifest_counts(tmp_path, bpe):
    tokenize_corpus(DOCUMENTS, bpe, tmp_path / "t")
    path = tmp_path / "t" / MANIFEST
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "end_token": manifest["end_token"] + 1}))
    with pytest.raises(DamagedError, match=r"manifest\.json was altered"):
        TokenizedCorpus(tmp_path / "t")


def test_a_failure_leaves_what_was_there(tmp_path, bpe):
    before = tokenize_corpus(DOCUMENTS, bpe, tmp_path / "t")

    def broken() -> Iterator[Document]:
        yield Document("other", "text")
        raise UsageError("binary file")

    with pytest.raises(UsageError, match="binary file"):
        tokenize_corpus(broken(), bpe, tmp_path / "t")
    assert same(TokenizedCorpus(tmp_path / "t"), before)
    assert [item.name for item in tmp_path.iterdir()] == ["t"]


def test_other_peoples_folders_are_left_alone(tmp_path, bpe):
    (tmp_path / "precious.txt").write_text("precious")
    with pytest.raises(UsageError, match=r"holds other files \(precious\.txt\)"):
        tokenize_corpus(DOCUMENTS, bpe, tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        tokenize_corpus(DOCUMENTS, bpe, tmp_path / "precious.txt")
    assert (tmp_path / "precious.txt").read_text() == "precious"


def test_nothing_to_tokenise(tmp_path, bpe):
    with pytest.raises(UsageError, match="no documents"):
        tokenize_corpus([], bpe, tmp_path / "t")
    with pytest.raises(UsageError, match="no such file or folder"):
        TokenizedCorpus(tmp_path / "t")


def test_a_corpus_outlives_its_files(tmp_path, bpe):
    corpus = tokenize_corpus(DOCUMENTS, bpe, tmp_path / "t")
    expected = [ids.tolist() for ids in corpus]
    shutil.rmtree(tmp_path / "t")
    assert [ids.tolist() for ids in corpus] == expected


def test_a_full_disk_is_said_in_one_sentence(small_disk, bpe):
    with pytest.raises(MnemicError, match="the disk is full"):
        tokenize_corpus([Document("a", "abc " * 10**6)], bpe, small_disk / "t")
    assert not (small_disk / "t").exists()
