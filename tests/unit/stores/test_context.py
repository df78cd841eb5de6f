"""References lead back to the text: what stands around a row, read from the rows beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mnemic.data import Document, train_tokenizer
from mnemic.errors import UsageError
from mnemic.stores import References, Store, StoreConfig, Where, open_store
from mnemic.stores.context import contexts, surviving
from tests.unit.stores.building import BYTES, TEXTS, built, corpus, everything, small, tokens_of


def store_of(texts: dict[str, list[int]], leave_out: tuple[int, ...] = ()) -> Store:
    """A store of token sequences; the positions of `leave_out` have no row."""
    store = open_store("ram:", StoreConfig(dim=1))
    for name, tokens in texts.items():
        places = np.array([place for place in range(len(tokens) - 1) if place not in leave_out])
        store.add(np.zeros((len(places), 1)), np.array(tokens)[places + 1], References.of(name, places))
    store.commit()
    return store


def around(store: Store, id: int, tokenizer: Any = BYTES, **options: Any) -> str:
    return str(contexts(store, [id], tokenizer, **options)[0])


def test_every_row_of_a_build_shows_the_text_around_it() -> None:
    store = built(small())
    _, values, places = everything(store)
    found = contexts(store, np.arange(len(store)), BYTES, before=5, after=3)
    for context, value, (_, document, position) in zip(found, values, places, strict=True):
        shown = [*TEXTS[document], "<eos>"]
        assert (context.source.document, context.position) == (document, position)
        assert context.word == shown[position] == BYTES.decode([value])
        assert context.before == "…" * (position > 5) + "".join(shown[max(0, position - 5) : position])
        assert context.after == "".join(shown[position + 1 : position + 4]) + "…" * (position + 4 < len(shown))


def test_neighbours_of_another_document_are_not_shown() -> None:
    store = store_of({"a": tokens_of("one"), "b": tokens_of("two")})
    assert around(store, 3) == "one»<eos>«"
    assert around(store, 4) == "»t«wo<eos>"


def test_missing_rows_show_as_gaps() -> None:
    tokens = tokens_of("the quick brown fox")
    store = store_of({"a": tokens}, leave_out=(4, 5, 6, 7, 12))
    row = next(n for n in range(len(store)) if store.get([n]).references[0][1] == 10)
    assert around(store, row) == "the …k »b«r…wn fox<eos>"
    assert around(store, row, before=2, after=4) == "…k »b«r…wn…"
    assert around(store, row, before=0, after=0) == "…»b«…"


def test_forgotten_neighbours_show_as_gaps_and_forgotten_rows_are_refused() -> None:
    store = store_of({"a": tokens_of("abc"), "b": tokens_of("xyz"), "c": tokens_of("uvw")})
    store.delete(Where.document("b"))
    store.commit()
    assert around(store, 3) == "abc»<eos>«"
    assert around(store, 8) == "»u«vw<eos>"
    for id in (5, 99):
        with pytest.raises(UsageError, match=f"no row has the number {id}"):
            around(store, id)
    assert contexts(store, [], BYTES) == []
    assert [ids.tolist() for ids, _ in surviving(store, np.arange(3, 10))] == [[3], [8, 9]]


def test_rows_added_in_any_order_never_show_a_wrong_text() -> None:
    store = open_store("ram:", StoreConfig(dim=1))
    order = np.random.default_rng(0).permutation(11)
    store.add(np.zeros((11, 1)), np.array(list(b"hello world"))[order], References.of("a", order))
    store.commit()
    for row, place in enumerate(order.tolist()):
        (context,) = contexts(store, [row], BYTES, before=20, after=20)
        assert (context.before.replace("…", ""), context.word) == ("hello world"[:place], "hello world"[place])


def test_spaces_and_broken_characters() -> None:
    """Tokens that mean something else alone than together: words with the space before them, halves of a letter."""
    text = "the café has the tea"
    words = train_tokenizer([Document("a", text)], "word")
    ids = words(text)["input_ids"]
    store = store_of({"a": [0, *ids]})
    assert around(store, 1, words) == " the» café« has the tea…"
    letters = store_of({"a": tokens_of("café!")})
    assert around(letters, 2) == "ca»f«é!<eos>"
    first, second = around(letters, 3), around(letters, 4)
    assert first.startswith("caf»")
    assert first.endswith("!<eos>")
    assert second.startswith("caf")
    assert second.endswith("«!<eos>")
    assert around(letters, 5, before=1) == "…»!«<eos>", "half a letter at the edge is not shown"


def test_a_whole_corpus_is_read_back() -> None:
    store = built(small(), max_probability=1.0)
    for name in TEXTS:
        first = next(n for n, (_, document, _) in enumerate(everything(store)[2]) if document == name)
        (context,) = contexts(store, [first], BYTES, before=0, after=200)
        assert context.word + context.after == TEXTS[name] + "<eos>"
    assert len(corpus().splits) == 1
