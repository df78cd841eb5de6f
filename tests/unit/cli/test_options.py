"""Options made from configs: read back as they were written, refused with the nearest one named."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest
from hypothesis import given as sampled
from hypothesis import strategies as st

from mnemic.cli.options import (
    Parser,
    _text,
    add_config_options,
    given,
    read_memory,
    read_settings,
    read_value,
    split,
    write_memory,
)
from mnemic.config import Config, option
from mnemic.errors import UsageError
from mnemic.memories.output.config import OutputMemory


@dataclasses.dataclass(kw_only=True)
class Example(Config):
    """One option of each type."""

    steps: int = option(10, "how many, 100% documented")
    rate: float = option(0.5, "how fast")
    name: str = option("x", "what it is called")
    resume: bool = option(False, "go on")
    kind: Literal["a", "b"] = option("a", "which kind")
    stride: int | None = option(None, "how far")
    layers: list[int] = option([1, 2], "which layers")


def parse(*arguments: str) -> Example:
    parser = Parser("mnemic example", "An example.", "example:\n  mnemic example")
    add_config_options(parser, Example, "example")
    return Example.from_dict(given(parser.parse_args(list(arguments)), Example))


def test_nothing_typed_is_all_defaults() -> None:
    assert parse() == Example()


examples = st.builds(
    Example,
    steps=st.integers(),
    rate=st.floats(allow_nan=False),
    name=st.text().filter(lambda text: not text.startswith("-")),
    resume=st.booleans(),
    kind=st.sampled_from(["a", "b"]),
    stride=st.none() | st.integers(),
    layers=st.lists(st.integers()),
)


@sampled(examples)
def test_what_is_typed_is_what_the_config_gets(config: Example) -> None:
    words = ["--resume" if config.resume else "--no-resume"]
    words += [f"--{name}={_text(getattr(config, name))}" for name in Example.types() if name != "resume"]
    assert parse(*words) == config


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--step", "3"], "unknown option --step: did you mean --steps? (try 'mnemic example --help')"),
        (["--stpes=3"], "unknown option --stpes=3: did you mean --steps? (try 'mnemic example --help')"),
        (["--zzzzzz"], "unknown option --zzzzzz: (try 'mnemic example --help')"),
        (["extra"], "unexpected argument 'extra' (try 'mnemic example --help')"),
        (["--steps", "many"], "--steps 'many': expected a whole number"),
        (["--steps", "1.5"], "--steps '1.5': expected a whole number"),
        (["--rate", "fast"], "--rate 'fast': expected a number"),
        (["--kind", "c"], "--kind 'c': expected one of 'a', 'b'"),
        (["--stride", "far"], "--stride 'far': expected a whole number or nothing"),
        (["--layers", "1,x"], "--layers '1,x': expected a list of whole numbers"),
        (["--steps"], "argument --steps: expected one argument (try 'mnemic example --help')"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(*words)
    assert str(caught.value) == sentence


def test_help_shows_each_option_with_its_line_and_default() -> None:
    parser = Parser("mnemic example", "An example.", "example:\n  mnemic example")
    add_config_options(parser, Example, "settings")
    text = " ".join(parser.format_help().split())
    assert text.startswith("usage: mnemic example [options] An example.")
    for name, line in Example.help().items():
        assert f"--{name}" in text
        assert line in text
    assert "how many, 100% documented (default: 10)" in text
    assert "which layers (default: 1,2)" in text


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("[8,12]", list[int], [8, 12]),
        ("", list[int], []),
        ("none", int | None, None),
        ("12", int | str, 12),
        ("twelve", int | str, "twelve"),
        ("a=1,b=2.5", dict[str, float], {"a": 1.0, "b": 2.5}),
        ("True", bool, True),
        ("1_000", int, 1000),
    ],
)
def test_read_value(text: str, kind: Any, value: Any) -> None:
    assert read_value(text, kind) == value


def test_split_leaves_brackets_whole() -> None:
    assert split("layers=[4,8],k=32, size=5") == ["layers=[4,8]", "k=32", "size=5"]


def test_settings_with_lists() -> None:
    kinds = {"layers": list[int] | None, "k": int}
    assert read_settings("--memory", "attention", "layers=[4,8],k=32", kinds) == {"layers": [4, 8], "k": 32}


def test_a_memory_from_its_text() -> None:
    from mnemic.memories.attention.config import KNNAttention
    from mnemic.memories.tokens.config import MemoryTokens

    assert read_memory("tokens") == MemoryTokens()
    assert read_memory("tokens:count=3,gated=true") == MemoryTokens(count=3, gated=True)
    assert read_memory("attention.as_context:k=4,size=9") == KNNAttention.as_context(k=4, size=9)
    assert read_memory("attention.pretrained") == KNNAttention.pretrained() != KNNAttention()


@pytest.mark.parametrize(
    "memory",
    [
        OutputMemory(),
        OutputMemory(long=4, external="a.store", namespaces=["x", "y"], recent_weight=0.25),
        OutputMemory.knn("b.store", weight=1 / 3, temperature=1e-7),
    ],
)
def test_a_memory_that_is_written_is_read_as_it_was(memory: OutputMemory) -> None:
    assert read_memory(write_memory("output", memory)) == memory


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tokns:count=3", "unknown memory 'tokns': did you mean 'tokens'?"),
        ("tokens:cuont=3", "unknown setting of tokens 'cuont': did you mean 'count'?"),
        ("tokens:count=lots", "--memory tokens:count 'lots': expected a whole number"),
        ("tokens:count", "the setting 'count' has no value; write tokens:count=..."),
        ("attention.as_context:k", "the setting 'k' has no value; write attention.as_context:k=..."),
        ("attention.as_contxt:k=3", "unknown start of attention 'as_contxt': did you mean 'as_context'?"),
        ("tokens:count=-1", "MemoryTokens.count = -1: expected 0 or more"),
    ],
)
def test_a_mistake_in_a_memory_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_memory(text)
    assert sentence in str(caught.value)
