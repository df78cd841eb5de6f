"""Parallel corpora: which folders are one, what their pairs are, and batches that hold each pair once."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mnemic.data import Document, open_corpus, train_tokenizer
from mnemic.data.pair_batches import PairBatches, SimilarPairs, TokenizedPairs, tokenize_pairs
from mnemic.data.pairs import Pair, ParallelCorpus
from mnemic.errors import UsageError

PACKED: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".xz": lzma.compress, ".gz": gzip.compress}


def make(folder: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        packing = next(suffix for suffix in (".xz", ".gz", "") if name.endswith(suffix))
        (folder / name).write_bytes(PACKED[packing](text.encode()))
    return str(folder)


def texts(corpus: Any, split: str = "train") -> list[tuple[str, str]]:
    return [(pair.source.text, pair.target.text) for pair in corpus.pairs(split)]


@pytest.mark.parametrize("packing", PACKED)
def test_a_folder_of_pairs_is_a_parallel_corpus(tmp_path, packing):
    files = {"train.de": "ein Hund\nzwei\r\n", "train.en": "a dog\ntwo", "val.de": "drei", "val.en": "three"}
    folder = make(tmp_path, {name + packing: text for name, text in files.items()})
    corpus = open_corpus(folder)
    assert isinstance(corpus, ParallelCorpus)
    assert (corpus.languages, corpus.splits, corpus.name) == (("de", "en"), ("train", "valid"), folder)
    assert texts(corpus) == [("ein Hund", "a dog"), ("zwei", "two")]
    assert [document.id for document in corpus.documents("train")] == [
        "train.de:1", "train.en:1", "train.de:2", "train.en:2",
    ]  # fmt: skip
    turned = open_corpus(f"{folder}:en-de")
    assert texts(turned, "dev") == [("three", "drei")]
    assert turned.name == f"{folder}:en-de"


def test_other_folders_are_not(tmp_path):
    names = ["train.txt", "train.jsonl", "train.py", "train.sh", "train.md", "notes.de", "notes.en", "train.en"]
    rows = dict.fromkeys(names, json.dumps({"text": "words"}))
    assert not isinstance(open_corpus(make(tmp_path, rows)), ParallelCorpus)


def test_of_several_languages_two_are_chosen(tmp_path):
    folder = make(tmp_path, {f"train.{language}": language for language in ("cs", "de", "en", "src", "tgt")})
    with pytest.raises(UsageError, match=r"has files in cs, de, en: say .* as in .*:cs-de"):
        open_corpus(folder)
    assert texts(open_corpus(f"{folder}:en-cs")) == [("en", "cs")]
    assert texts(open_corpus(f"{folder}:src-tgt")) == [("src", "tgt")]
    with pytest.raises(UsageError, match=r"no files such as train.en and train.xx: open it without ':en-xx'"):
        open_corpus(f"{folder}:en-xx")


def test_a_split_may_have_a_longer_name_and_the_plain_one_wins(tmp_path):
    years = {f"test_{year}.{language}": f"{year}" for year in (2016, 2017) for language in ("de", "en")}
    folder = make(tmp_path, years)
    assert texts(open_corpus(folder), "test") == [("2016", "2016")]
    make(tmp_path, {"test.de": "plain", "test.en": "plain"})
    assert texts(open_corpus(folder), "test") == [("plain", "plain")]


@pytest.mark.parametrize("name", ["wmt14", "iwslt14"])
def test_corpora_of_translations_are_known_by_name(name, tmp_path, monkeypatch):
    monkeypatch.setenv("MNEMIC_DATA", str(tmp_path))
    if name == "iwslt14":
        with pytest.raises(UsageError, match="give their folder as path="):
            texts(open_corpus(name), "train")
    (tmp_path / name).mkdir()
    make(tmp_path / name, {f"{stem}.{side}": side for stem in ("train", "valid", "test") for side in ("de", "en")})
    assert texts(open_corpus(name), "valid") == [("de", "en")]
    assert texts(open_corpus(f"{name}:en-de", str(tmp_path / name)), "test") == [("en", "de")]


def test_pairs_from_the_hub(monkeypatch):
    """Rows have a column for each language, or one with both."""
    both = {"de": " ein Haus ", "en": "a house"}
    for name, dataset, row in (
        ("multi30k", ("bentrevett/multi30k",), both),
        ("wmt14", ("wmt/wmt14", "de-en"), {"translation": both}),
    ):
        asked = []

        def rows(*arguments, split, asked=asked, row=row):
            asked.append((arguments[1:], split))
            return [row]

        monkeypatch.setattr("mnemic.data.pairs.paper_rows", rows)
        assert texts(open_corpus(name), "valid") == [("ein Haus", "a house")]
        assert set(asked) == {(dataset, "validation")}


def test_the_named_corpus(tmp_path, monkeypatch):
    (tmp_path / "multi30k").mkdir()
    make(
        tmp_path / "multi30k",
        {f"{stem}.{side}": side for stem in ("train", "test_2016_flickr") for side in ("de", "en", "fr")},
    )
    monkeypatch.setenv("MNEMIC_DATA", str(tmp_path))
    assert texts(open_corpus("multi30k"), "test") == [("de", "en")]
    assert texts(open_corpus("multi30k:en-fr"), "test") == [("en", "fr")]
    with pytest.raises(UsageError, match="nothing in both 'de' and 'xx': it has de, en, fr"):
        open_corpus("multi30k:de-xx")
    with pytest.raises(UsageError, match="stdlib has no files such as"):
        open_corpus("stdlib:de-en")


def test_blank_lines_take_their_translation_with_them(tmp_path):
    corpus = open_corpus(make(tmp_path, {"train.de": "eins\n\ndrei\nvier\n", "train.en": "one\ntwo\n \nfour\n"}))
    assert texts(corpus) == [("eins", "one"), ("vier", "four")]
    assert [pair.target.id for pair in corpus.pairs("train")] == ["train.en:1", "train.en:4"]


@pytest.mark.parametrize("longer", ["de", "en"])
def test_files_of_different_length_are_refused(tmp_path, longer):
    shorter = {"de": "en", "en": "de"}[longer]
    corpus = open_corpus(make(tmp_path, {f"train.{longer}": "1\n2\n3\n", f"train.{shorter}": "1\n2\n"}))
    with pytest.raises(UsageError, match=f"has 2 lines in '{shorter}' and more in '{longer}'"):
        list(corpus.pairs("train"))


def test_pairs_are_read_one_at_a_time():
    read = []

    def side(name: str) -> Iterator[Document]:
        for number in range(100):
            read.append(name)
            yield Document(f"{name}{number}", f"{name}{number}")

    corpus = ParallelCorpus("c", {"train": {s: lambda s=s: side(s) for s in ("a", "b")}}, ("a", "b"))
    pairs = corpus.pairs("train")
    assert [next(pairs).target.text for _ in range(3)] == ["b0", "b1", "b2"]
    assert len(read) <= 8


def corpus_of(pairs: list[tuple[str, str]]) -> Callable[[], list[Pair]]:
    return lambda: [Pair(Document(f"s{n}", s), Document(f"t{n}", t)) for n, (s, t) in enumerate(pairs)]


def test_token_ids_of_both_sides(tmp_path, byte_tokenizer):
    end = byte_tokenizer.eos_token_id
    pairs = tokenize_pairs(corpus_of([("ab", "c"), ("é", "def")]), byte_tokenizer, tmp_path / "tokens")
    for opened in (pairs, TokenizedPairs.open(tmp_path / "tokens")):
        assert [[side.tolist() for side in opened[number]] for number in range(2)] == [
            [[*b"ab", end], [*b"c", end]],
            [[*"é".encode(), end], [*b"def", end]],
        ]
        assert opened.lengths.tolist() == [[3, 2], [3, 4]]
        assert (len(opened), opened.target_count, opened.fingerprint) == (2, 6, pairs.fingerprint)


def test_a_start_token_of_its_own_stays():
    tokenizer = train_tokenizer([], "byte")
    tokenizer.bos_token = tokenizer.mask_token
    start, end = tokenizer.mask_token_id, tokenizer.eos_token_id
    source, target = tokenize_pairs(corpus_of([("a", "bc")]), tokenizer)[0]
    assert (source.tolist(), target.tolist()) == ([start, 97, end], [start, 98, 99, end])


def test_targets_are_cut_as_targets(byte_tokenizer, monkeypatch):
    modes = ["input"]
    monkeypatch.setattr(byte_tokenizer, "_switch_to_target_mode", lambda: modes.append("target"), raising=False)
    monkeypatch.setattr(byte_tokenizer, "_switch_to_input_mode", lambda: modes.append("input"), raising=False)
    read_in = []

    def read() -> list[Pair]:
        read_in.append((modes[-1], byte_tokenizer._in_target_context_manager))
        return corpus_of([("a", "b")])()

    tokenize_pairs(read, byte_tokenizer)
    assert read_in == [("input", False), ("target", True)]
    assert (modes, byte_tokenizer._in_target_context_manager) == (["input", "target", "input"], False)


# Batches


@pytest.fixture(scope="session")
def toy_pairs(byte_tokenizer) -> Callable[[list[tuple[int, int]]], TokenizedPairs]:
    """Pairs with so many letters on each side, all different in their first two."""

    def make(lengths: list[tuple[int, int]]) -> TokenizedPairs:
        def text(number: int, length: int) -> str:
            return (chr(97 + number % 26) + chr(65 + number // 26) + "x" * length)[:length]

        return tokenize_pairs(corpus_of([(text(n, s), text(n, t)) for n, (s, t) in enumerate(lengths)]), byte_tokenizer)

    return make


def one_epoch(pairs: TokenizedPairs, *sizes: int, **options: Any) -> list[dict[str, torch.Tensor]]:
    return list(PairBatches(pairs, *sizes, **{"epochs": 1, **options}))


def numbers(batches: list[dict[str, torch.Tensor]]) -> list[list[int]]:
    return [[number for number in batch["pair"].tolist() if number >= 0] for batch in batches]


def flat(lists: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


some_lengths = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=40)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=some_lengths, rows=st.integers(1, 4), longest=st.integers(8, 13), seed=st.integers(0, 9), by=st.booleans()
)
def test_each_pair_that_fits_is_in_one_batch(toy_pairs, lengths, rows, longest, seed, by):
    pairs = toy_pairs(lengths)
    fit = [number for number, sides in enumerate(lengths) if max(sides) + 1 <= longest]
    if not fit:
        with pytest.raises(UsageError, match="set segment_length to more"):
            PairBatches(pairs, rows, longest)
        return
    order = np.random.default_rng(seed).permutation(len(pairs)) if by else None
    batches = one_epoch(pairs, rows, longest, seed=seed, order=order)
    assert sorted(flat(numbers(batches))) == fit
    assert sum((batch["pair"] < 0).sum() for batch in batches) < rows
    for batch in batches:
        count = len(batch["pair"])
        assert count % rows == 0
        assert count * max(batch["input_ids"].shape[1], batch["targets"].shape[1]) <= rows * longest
        for row, number in enumerate(batch["pair"].tolist()):
            real = batch["attention_mask"][row].bool()
            kept = batch["targets"][row] != -100
            assert (real.sort(descending=True)[0] == real).all(), "padding is on the right"
            if number < 0:
                assert real.sum() == 1
                assert not kept.any()
                continue
            source, target = pairs[number]
            assert batch["input_ids"][row][real].tolist() == source.tolist()
            assert batch["targets"][row].tolist() == target.tolist() + [-100] * int((~kept).sum())


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_share_the_rows_of_one_batch(toy_pairs, world_size):
    pairs = toy_pairs([(n % 7 + 1, n % 5 + 1) for n in range(31)])
    whole = one_epoch(pairs, 6, 9)
    parts = [one_epoch(pairs, 6 // world_size, 9, rank=rank, world_size=world_size) for rank in range(world_size)]
    for together, *own in zip(whole, *parts, strict=True):
        for name, tensor in together.items():
            assert torch.equal(torch.cat([part[name] for part in own]), tensor)


def test_pairs_of_similar_length_are_together(toy_pairs):
    random = np.random.default_rng(0)
    pairs = toy_pairs([(int(n), int(n) + 1) for n in random.integers(1, 30, 200)])

    def size(batches: list[dict[str, torch.Tensor]]) -> int:
        return sum(batch["targets"].numel() for batch in batches)

    assert size(one_epoch(pairs, 4, 32)) < 1.15 * pairs.target_count
    assert size(one_epoch(pairs, 4, 32, order=np.arange(200))) > 1.3 * pairs.target_count


def test_epochs_and_seeds_have_their_own_order(toy_pairs):
    pairs = toy_pairs([(3, 3)] * 12 + [(5, 5)] * 12)

    def epochs(seed: int) -> tuple[list[list[int]], list[list[int]]]:
        batches = numbers(one_epoch(pairs, 2, 6, seed=seed, epochs=2))
        return batches[: len(batches) // 2], batches[len(batches) // 2 :]

    first, second = epochs(seed=0)
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(24))
    assert first != second
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in second}
    assert epochs(seed=0) == (first, second)
    assert epochs(seed=1)[0] != first


def test_a_given_order_says_which_pairs_share_a_batch(toy_pairs):
    pairs = toy_pairs([(3, 3)] * 30)
    order = np.random.default_rng(1).permutation(30)
    plain = numbers(one_epoch(pairs, 4, 4, order=order, shuffle=False))
    assert flat(plain) == order.tolist()
    mixed = numbers(one_epoch(pairs, 4, 4, order=order))
    assert plain != mixed
    assert sorted(plain) == sorted(mixed)
    by_epoch = numbers(one_epoch(pairs, 4, 4, order=lambda epoch: np.roll(order, epoch), shuffle=False, epochs=2))
    assert flat(by_epoch) == [*order, *np.roll(order, 1)]
    for wrong in (order[1:], np.append(order, 0), order + 1):
        with pytest.raises(UsageError, match="each number from 0 to 29 once"):
            PairBatches(pairs, 4, 4, order=wrong)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=some_lengths, read=st.integers(0, 30), given_order=st.booleans())
def test_it_goes_on_where_it_stopped(toy_pairs, lengths, read, given_order):
    pairs = toy_pairs(lengths)
    options = {"order": np.arange(len(pairs))[::-1].copy() if given_order else None}
    straight = PairBatches(pairs, 2, 13, seed=3, **options)
    for _ in range(read):
        next(straight)
    state = json.loads(json.dumps(straight.state_dict()))
    resumed = PairBatches(pairs, 2, 13, seed=3, **options)
    resumed.load_state_dict(state)
    for _ in range(5):
        one, other = next(straight), next(resumed)
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_other_settings_and_pairs_are_refused(toy_pairs):
    pairs = toy_pairs([(2, 2), (3, 3)])
    state = PairBatches(pairs, 2, 8).state_dict()
    PairBatches(pairs, 1, 8, rank=1, world_size=2).load_state_dict(state)
    others = (
        PairBatches(pairs, 4, 8),
        PairBatches(pairs, 2, 9),
        PairBatches(pairs, 2, 8, seed=1),
        PairBatches(pairs, 2, 8, order=np.arange(2)),
        PairBatches(toy_pairs([(2, 2), (3, 4)]), 2, 8),
    )
    for other in others:
        with pytest.raises(UsageError, match="resume with the same corpus and settings"):
            other.load_state_dict(state)
    for bad in ({"batch_size": 0}, {"epochs": 0}, {"rank": 1}):
        with pytest.raises(UsageError, match=f"{next(iter(bad))} = "):
            PairBatches(pairs, **{"batch_size": 1, "segment_length": 9, **bad})


def test_pairs_that_are_too_long_are_said_to_be_left_out(toy_pairs, caplog):
    pairs = toy_pairs([(2, 2), (9, 2), (2, 9)])
    assert numbers(one_epoch(pairs, 2, 8)) == [[0]]
    PairBatches(pairs, 2, 8)
    assert caplog.messages == ["2 of 3 pairs are left out: longer than 8 tokens"]


# Batches of similar targets

TOPICS = 6


@pytest.fixture(scope="session")
def topics(byte_tokenizer) -> TokenizedPairs:
    """Pairs 0, 6, 12, ... have targets of one topic, 1, 7, 13, ... of the next; their sources are of other topics."""
    random, letters = np.random.default_rng(3), ["abc", "def", "ghi", "jkl", "mno", "pqr"]

    def text(topic: int) -> str:
        return "".join(random.choice(list(letters[topic]), random.integers(3, 9)))

    return tokenize_pairs(corpus_of([(text(n // 5 % TOPICS), text(n % TOPICS)) for n in range(90)]), byte_tokenizer)


def purity(batches: list[list[int]]) -> float:
    """The share of neighbours in a batch whose targets are of one topic."""
    same = [one % TOPICS == other % TOPICS for batch in batches for one, other in pairwise(batch)]
    return sum(same) / len(same)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_targets_of_a_batch_have_much_in_common(topics, seed):
    similar = numbers(list(SimilarPairs(topics, 4, 10, seed=seed, epochs=1)))
    random = numbers(one_epoch(topics, 4, 10, seed=seed, order=np.random.default_rng(seed).permutation(90)))
    assert sorted(flat(similar)) == sorted(flat(random)) == list(range(90))
    assert purity(similar) > 0.9
    assert purity(random) < 0.3


def test_each_epoch_lays_another_chain_and_long_pairs_are_left_out(topics):
    batches = numbers(list(SimilarPairs(topics, 4, 7, epochs=2)))
    fit = [number for number in range(90) if topics.lengths[number].max() <= 7]
    ends = next(end for end in range(len(batches)) if sum(map(len, batches[:end])) == len(fit))
    first, second = batches[:ends], batches[ends:]
    assert sorted(flat(first)) == sorted(flat(second)) == fit
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in second}
    assert numbers(list(SimilarPairs(topics, 4, 7, epochs=2))) == batches
    assert numbers(list(SimilarPairs(topics, 4, 7, epochs=2, seed=1))) != batches


def test_processes_share_a_batch_of_similar_targets(topics):
    whole = list(SimilarPairs(topics, 6, 9, epochs=1))
    parts = [list(SimilarPairs(topics, 3, 9, epochs=1, rank=rank, world_size=2)) for rank in range(2)]
    for together, *own in zip(whole, *parts, strict=True):
        for name, tensor in together.items():
            assert torch.equal(torch.cat([part[name] for part in own]), tensor)


@pytest.mark.parametrize("read", [0, 3, 40, 61])
def test_similar_targets_go_on_where_they_stopped(topics, read):
    straight = SimilarPairs(topics, 2, 9, seed=3)
    for _ in range(read):
        next(straight)
    state = json.loads(json.dumps(straight.state_dict()))
    resumed = SimilarPairs(topics, 2, 9, seed=3)
    resumed.load_state_dict(state)
    for _ in range(50):
        one, other = next(straight), next(resumed)
        assert all(torch.equal(one[name], other[name]) for name in one)
    for wrong in (SimilarPairs(topics, 2, 9, seed=3, k=1), PairBatches(topics, 2, 9, seed=3)):
        with pytest.raises(UsageError, match="resume with the same corpus and settings"):
            wrong.load_state_dict(state)


def test_multi30k(shared_data):
    if not (shared_data / "multi30k").is_dir():
        pytest.skip("Multi30k is not here")
    corpus = open_corpus(str(shared_data / "multi30k"))
    counts = [sum(1 for _ in corpus.pairs(split)) for split in ("train", "valid", "test")]
    assert counts == [29_000, 1_014, 1_000]
    first = next(corpus.pairs("test"))
    assert first.source.text == "Ein Mann mit einem orangefarbenen Hut, der etwas anstarrt."
    assert first.target.text == "A man in an orange hat starring at something."
