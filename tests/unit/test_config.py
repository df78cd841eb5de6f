"""Configs: strict keys and types, and exact round trips through JSON and TOML."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mnemic.config import Config, describe, option
from mnemic.errors import UsageError


@dataclasses.dataclass(kw_only=True)
class Example(Config):
    """One option of each type that configs use."""

    name: str = option("plain", "a text")
    count: int = option(1, "a whole number")
    rate: float = option(0.5, "a number")
    on: bool = option(False, "a switch")
    kind: Literal["a", "b", 3] = option("a", "a choice")
    layers: list[int] | None = option(None, "a list or nothing")
    nested: list[list[float]] = option([[1.0]], "lists in a list")
    table: dict[str, float] = option({}, "names with numbers")
    words: list[str] = option([], "texts")


def same(left: Any, right: Any) -> bool:
    """Equality in which nan equals nan, -0.0 differs from 0.0 and 1 from 1.0: `repr` tells them all apart."""
    return repr(left) == repr(right)


numbers = st.floats(allow_nan=True, allow_infinity=True)
texts = st.text() | st.sampled_from(
    ["\x7f", "\x00\x1f", '"', "\\", "'''", '"""', "a\nb\r\n", "\u2028", "😀", "#", "nan"]
)
examples = st.builds(
    Example,
    name=texts,
    count=st.integers(),
    rate=numbers,
    on=st.booleans(),
    kind=st.sampled_from(["a", "b", 3]),
    layers=st.none() | st.lists(st.integers()),
    nested=st.lists(st.lists(numbers, max_size=3), max_size=3),
    table=st.dictionaries(texts, numbers, max_size=3),
    words=st.lists(texts, max_size=3),
)


@given(examples)
def test_toml_round_trip(config: Example) -> None:
    values = tomllib.loads(config.to_toml())
    assert same(Example.from_dict(values), config)


@given(examples)
def test_json_round_trip(config: Example) -> None:
    assert same(Example.from_dict(json.loads(json.dumps(config.to_dict()))), config)


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_files_round_trip(tmp_path, suffix: str) -> None:
    config = Example(
        name="tab\t del\x7f nul\x00 \u00e9 😀", rate=math.inf, nested=[[], [1.5, -0.0]], table={"😀 \x7f": math.nan}
    )
    config.save(tmp_path / f"deep/er/config{suffix}")
    assert same(Example.load(tmp_path / f"deep/er/config{suffix}"), config)


def test_toml_shows_the_help_above_each_option_and_leaves_none_as_a_comment() -> None:
    lines = Example().to_toml().splitlines()
    assert lines[lines.index("count = 1") - 1] == "# a whole number"
    assert lines[lines.index("# layers =") - 1] == "# a list or nothing"


def test_an_unknown_key_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown option of Example 'cuont': did you mean 'count'\?"):
        Example.from_dict({"cuont": 3})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"count": "3"}, "a whole number"),
        ({"count": True}, "a whole number"),
        ({"count": 3.0}, "a whole number"),
        ({"rate": "fast"}, "a number"),
        ({"rate": True}, "a number"),
        ({"on": 1}, "true or false"),
        ({"kind": "c"}, "one of 'a', 'b', 3"),
        ({"kind": 3.0}, "one of 'a', 'b', 3"),
        ({"layers": [1, "2"]}, "a list of whole numbers or nothing"),
        ({"layers": "12"}, "a list of whole numbers or nothing"),
        ({"nested": [1.0]}, "a list of list of numbers"),
        ({"table": {"a": "b"}}, "dict"),
        ({"name": None}, "a text"),
    ],
)
def test_a_wrong_type_is_refused_with_what_was_expected(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        Example.from_dict(values)
    ((key, value),) = values.items()
    assert f"Example.{key} = {value!r}: expected" in str(caught.value)
    assert expected in str(caught.value)


def test_a_whole_number_is_taken_where_a_number_is_expected_and_tuples_become_lists() -> None:
    config = Example(rate=2, layers=(1, 2), nested=((1,),), table={"a": 1})
    assert same((config.rate, config.layers, config.nested, config.table), (2.0, [1, 2], [[1.0]], {"a": 1.0}))


def test_defaults_are_not_shared_even_deep_inside() -> None:
    Example().nested[0].append(2.0)
    assert Example().nested == [[1.0]]


def test_another_schema_is_refused() -> None:
    with pytest.raises(UsageError, match="schema 99 was written by another version"):
        Example.from_dict({"schema": 99})


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.toml", b"count = ", "is not valid toml"),
        ("a.json", b"{", "is not valid json"),
        ("a.json", b"[1]", "expected a table of options, found list"),
        ("a.toml", b"\xff\xfe\x00", "is not valid toml"),
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=sentence):
        Example.load(tmp_path / name)


def test_a_missing_file_and_a_folder_are_one_sentence(tmp_path) -> None:
    with pytest.raises(UsageError, match="no such config file"):
        Example.load(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        Example.load(tmp_path)


def test_describe_speaks_plainly() -> None:
    assert describe(list[int] | None) == "a list of whole numbers or nothing"
    assert describe(Literal["x", "y"]) == "one of 'x', 'y'"
