from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from mnemic.data import Document, load_tokenizer, open_corpus, tokenizer_fingerprint, train_tokenizer
from mnemic.data.tokenizers import BYTE_CHARACTERS
from mnemic.errors import UsageError

DOCUMENTS = [Document("a", "the cat sat on the mat .\nthe dog sat .\n"), Document("b", "naïve 日本 the\n  cats\tdon't")]
HARD = st.text() | st.text(alphabet=" \n\r\t'aAé<eos>\u00a0\u3000\x1c1.")


@pytest.fixture(scope="module")
def bpe() -> Any:
    return train_tokenizer(DOCUMENTS, kind="bpe", vocab_size=300)


@given(HARD)
def test_bpe_decodes_to_what_it_encoded(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text


@given(HARD)
def test_bytes_decode_to_what_they_encoded(byte_tokenizer, text):
    assert byte_tokenizer.decode(byte_tokenizer.encode(text)) == text
    assert byte_tokenizer(text, split_special_tokens=True)["input_ids"] == list(text.encode())


def test_byte_vocabulary(byte_tokenizer):
    assert len(byte_tokenizer) == 259
    assert sorted(BYTE_CHARACTERS) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert (byte_tokenizer.eos_token_id, byte_tokenizer.pad_token_id, byte_tokenizer.mask_token_id) == (256, 257, 258)


def test_word_ids_fall_with_frequency_and_line_ends_are_eos():
    words = train_tokenizer([Document("a", " b a a <unk> \n b a c \n")], kind="word")
    assert words.get_vocab() == {"a": 0, "<eos>": 1, "b": 2, "<unk>": 3, "c": 4}
    assert words.encode(" b a zebra \n c") == [2, 0, 3, 1, 4]
    assert words.eos_token_id == words.pad_token_id == 1
    assert words.unk_token_id == 3


@given(st.lists(st.lists(st.sampled_from(["the", "cat", "=", "<unk>", "@-@"]), max_size=5), max_size=6))
def test_words_round_trip_in_wikitext_spacing(lines):
    text = "".join(" " + "".join(f"{word} " for word in line) + "\n" for line in lines)
    words = train_tokenizer([Document("a", "the cat = @-@ <unk> \n")], kind="word")
    assert words.decode(words.encode(text)) == text


def test_word_vocabulary_keeps_the_most_frequent():
    words = train_tokenizer([Document("a", "a a a b b c \n")], kind="word", vocab_size=4)
    assert words.get_vocab() == {"a": 0, "b": 1, "<eos>": 2, "<unk>": 3}
    assert words.encode("c b") == [3, 1]


@pytest.mark.parametrize(("kind", "vocab_size"), [("bpe", 300), ("word", None), ("byte", None)])
def test_training_is_deterministic_and_survives_saving(tmp_path, kind, vocab_size):
    first, second = (train_tokenizer(iter(DOCUMENTS), kind=kind, vocab_size=vocab_size) for _ in range(2))
    first.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    text = DOCUMENTS[0].text + " <eos> <mask> zebra"
    assert first.encode(text) == second.encode(text) == loaded.encode(text)
    assert first.decode(first.encode(text)) == loaded.decode(loaded.encode(text))
    assert loaded.eos_token_id == first.eos_token_id is not None
    assert loaded.pad_token_id == first.pad_token_id is not None
    assert tokenizer_fingerprint(first) == tokenizer_fingerprint(second) == tokenizer_fingerprint(loaded)


def test_fingerprint_tells_tokenizers_apart_but_not_their_calls(bpe, byte_tokenizer):
    before = tokenizer_fingerprint(bpe)
    bpe(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(bpe) == before
    others = [train_tokenizer(DOCUMENTS, vocab_size=280), train_tokenizer(DOCUMENTS, kind="word"), byte_tokenizer]
    assert len({before, *map(tokenizer_fingerprint, others)}) == 4


def test_bpe_shortens_the_text_it_was_trained_on():
    corpus = open_corpus("stdlib")
    documents = [next(corpus.documents("valid"))]
    sizes = [len(train_tokenizer(documents, vocab_size=size).encode(documents[0].text)) for size in (260, 400, 800)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 0.5 * len(documents[0].text)


@pytest.mark.parametrize(
    ("kind", "vocab_size", "message"),
    [
        ("bpe", 100, "vocab_size = 100: byte-level BPE needs at least 259"),
        ("byte", 300, "always has 259"),
        ("word", 2, "needs <eos>, <unk> and at least one word"),
        ("wrod", None, "unknown kind of tokenizer 'wrod': did you mean 'word'"),
    ],
)
def test_bad_arguments(kind, vocab_size, message):
    with pytest.raises(UsageError, match=message):
        train_tokenizer(DOCUMENTS, kind=kind, vocab_size=vocab_size)


def test_no_words_at_all():
    with pytest.raises(UsageError, match="no documents"):
        train_tokenizer([], kind="word")


def test_missing_tokenizers(tmp_path):
    with pytest.raises(UsageError, match="no such file or folder"):
        load_tokenizer(str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no tokenizer .* could be loaded from the folder"):
        load_tokenizer(tmp_path / "empty")


def test_offline_says_what_to_do():
    code = (
        "import mnemic, mnemic.errors\n"
        "for call in (lambda: mnemic.load_tokenizer('nobody/nothing'), "
        "lambda: mnemic.open_corpus('pg19').documents('test')):\n"
        "    try: call()\n"
        "    except mnemic.errors.UsageError as error: print(error)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    tokenizer, corpus = run.stdout.splitlines()
    assert tokenizer.startswith("no tokenizer 'nobody/nothing' could be loaded from the hub or its cache")
    assert corpus.startswith("pg19 could not be loaded from the Hugging Face hub")
    assert "MNEMIC_DATA" in corpus
