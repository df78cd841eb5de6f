"""Examples of tasks as rows of tokens: windows of long texts, answers in them, and batches."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from mnemic.data.examples import ExampleBatches, Row, TokenizedExamples, rows_of, tokenize_task
from mnemic.data.tasks import Answer, Example, Task
from mnemic.errors import DamagedError, UsageError
from tests.unit.tasks import colours, questions, reader, word_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


def text_of(tokenizer: Any, row: Row) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens(row.tokens.tolist()))


def test_pairs_are_cut_to_length_the_longer_text_first(tokenizer):
    long, short = Example("0", "the cat is red", "a dog", 1), Example("1", "sun [SEP]", None, 0)
    task = Task("t", {}, ("no", "yes"))
    one, two = rows_of([long, short], task, tokenizer, 7, 1)
    assert text_of(tokenizer, one) == "[CLS] the cat [SEP] a dog [SEP]"
    assert one.kinds.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert [one.target, two.target, one.example, two.example] == [1, 0, 0, 1]
    # a special token that is written out in a text is text
    assert text_of(tokenizer, two) == "[CLS] sun [UNK] s ##e ##p [SEP]"
    assert len(tokenizer("the cat is red a dog")["input_ids"]) == 8  # the tokenizer itself cuts nothing


def words(answer: str, text: str = "a b c d e f g h i j") -> list[Example]:
    return [Example("0", "who ?", text, answers=(Answer(text.index(answer), answer),))]


def test_windows_move_on_by_the_stride_and_see_every_token(tokenizer):
    rows = list(rows_of(words("f g"), questions(), tokenizer, 9, 3))
    assert [text_of(tokenizer, row) for row in rows] == [
        "[CLS] who ? [SEP] a b c d [SEP]",
        "[CLS] who ? [SEP] d e f g [SEP]",
        "[CLS] who ? [SEP] g h i j [SEP]",
    ]
    assert [row.target for row in rows] == [[0, 0], [6, 7], [0, 0]]
    assert [row.place for row in rows] == [4, 4, 4]
    assert rows[0].kinds.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    text = words("f g")[0].pair
    assert [[text[start:end] for start, end in row.borders] for row in rows] == [
        list("abcd"),
        list("defg"),
        list("ghij"),
    ]
    assert len(list(rows_of(words("f g"), questions(), tokenizer, 9, 100))) == 3  # never further than a window
    assert len(list(rows_of(words("f g"), questions(), tokenizer, 15, 3))) == 1


def test_a_long_question_is_cut_and_no_room_is_an_error(tokenizer):
    example = Example("0", "is " * 70, "a b", answers=(Answer(2, "b"),))
    (row,) = rows_of([example], questions(), tokenizer, 80, 3)
    assert text_of(tokenizer, row) == " ".join(["[CLS]", *["is"] * 64, "[SEP] a b [SEP]"])
    with pytest.raises(UsageError, match="leaves no room beside the question 0"):
        list(rows_of([example], questions(), tokenizer, 67, 3))
    with pytest.raises(UsageError, match="a length of 4 tokens leaves no room for a text: give at least 5"):
        list(rows_of([example], questions(), tokenizer, 4, 3))


def test_an_answer_may_be_a_part_of_a_token_or_none(tokenizer):
    (row,) = rows_of([Example("0", "who ?", "the cat is", answers=(Answer(5, "a"),))], questions(), tokenizer, 20, 9)
    assert row.target == [5, 5]
    (row,) = rows_of([Example("0", "who ?", "the  cat", answers=(Answer(3, " "),))], questions(), tokenizer, 20, 9)
    assert row.target == [0, 0]


def test_examples_without_an_answer_are_refused(tokenizer):
    task = Task("t", {}, ("no", "yes"))
    with pytest.raises(UsageError, match="the example x of t has no label: use a split whose labels are known"):
        list(rows_of([Example("x", "a")], task, tokenizer, 9, 3))
    with pytest.raises(UsageError, match="the question x of questions has no text with an answer"):
        list(rows_of([Example("x", "a", "b")], questions(), tokenizer, 9, 3))
    with pytest.raises(UsageError, match="has the score -100"):
        list(rows_of([Example("x", "a", None, -100.0)], Task("t", {}), tokenizer, 9, 3))
    with pytest.raises(UsageError, match="the 'train' split of t has no example"):
        Task("t", {"train": reader([])}).examples("train")


def test_questions_need_a_fast_tokenizer(tokenizer):
    class Slow:
        is_fast = False

    with pytest.raises(UsageError, match="Slow does not say where in a text its tokens are, which questions needs"):
        list(rows_of(words("f"), questions(), Slow(), 9, 3))  # type: ignore[arg-type]


# Batches


def tokenized(tokenizer: Any, count: int = 11) -> TokenizedExamples:
    task = colours(count)
    return TokenizedExamples.of(rows_of(list(task.examples("train")), task, tokenizer, 16, 1), "colours")


def test_each_row_is_read_once_an_epoch_in_another_order(tokenizer):
    rows = tokenized(tokenizer)
    batches = list(ExampleBatches(rows, 4, 16, seed=3, epochs=2))
    assert len(batches) == 6
    orders = [[number for batch in epoch for number in batch["row"].tolist()] for epoch in (batches[:3], batches[3:])]
    for order in orders:
        assert sorted(order) == [-1, *range(11)]
        assert order[-1] == -1
    assert orders[0] != orders[1]
    for batch in batches:
        for row, number in enumerate(batch["row"].tolist()):
            length = int(batch["attention_mask"][row].sum())
            if number < 0:
                assert (batch["targets"][row].item(), length) == (-100, 1)
                continue
            assert batch["input_ids"][row, :length].tolist() == rows.tokens[rows.slice(number)].tolist()
            assert batch["token_type_ids"][row, :length].tolist() == rows.kinds[rows.slice(number)].tolist()
            assert not batch["input_ids"][row, length:].any()
            assert batch["targets"][row] == rows.targets[number]


def test_processes_divide_the_rows_and_share_their_state(tokenizer):
    rows = tokenized(tokenizer)
    whole = ExampleBatches(rows, 4, 16, seed=3)
    ranks = [ExampleBatches(rows, 2, 16, seed=3, rank=rank, world_size=2) for rank in range(2)]
    for _ in range(5):
        batch, parts = next(whole), [next(rank) for rank in ranks]
        for name in batch:
            assert batch[name].tolist() == parts[0][name].tolist() + parts[1][name].tolist()
        assert whole.state_dict() == ranks[0].state_dict() == ranks[1].state_dict()


def test_a_stream_goes_on_where_its_state_was_taken(tokenizer):
    rows = tokenized(tokenizer)
    stream = ExampleBatches(rows, 4, 16, seed=3)
    for _ in range(4):
        next(stream)
    state = json.loads(json.dumps(stream.state_dict()))
    again = ExampleBatches(rows, 4, 16, seed=3)
    again.load_state_dict(state)
    for _ in range(4):
        assert next(stream)["row"].tolist() == next(again)["row"].tolist()
    with pytest.raises(UsageError, match="saved with seed = 3 and has 4 now"):
        ExampleBatches(rows, 4, 16, seed=4).load_state_dict(state)


def test_rows_are_kept_and_made_again_when_they_must_be(tokenizer, tmp_path, monkeypatch):
    task = colours()
    made = tokenize_task(task, "train", tokenizer, 16, 1, tmp_path)
    monkeypatch.setattr("mnemic.data.examples.rows_of", lambda *_: pytest.fail("tokenised again"))
    kept = tokenize_task(task, "train", tokenizer, 16, 1, tmp_path)
    assert kept.fingerprint == made.fingerprint
    for name, array in made.arrays.items():
        assert np.array_equal(array, TokenizedExamples.open(tmp_path).arrays[name])
    monkeypatch.undo()
    assert tokenize_task(task, "train", tokenizer, 6, 1, tmp_path).lengths.max() == 6
    file = tmp_path / "examples.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    with pytest.raises(DamagedError, match="is not whole"):
        TokenizedExamples.open(tmp_path)
    assert tokenize_task(task, "train", tokenizer, 6, 1, tmp_path).lengths.max() == 6


# Real data
