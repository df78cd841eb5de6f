"""Registries: names that import what they stand for only when asked."""

from __future__ import annotations

import sys

import pytest

from mnemic.errors import UsageError
from mnemic.registry import Registry


def test_nothing_is_imported_until_load(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    registry = Registry("poem", {"zen": "this:s"})
    assert list(registry) == ["zen"]
    assert "zen" in registry
    assert "this" not in sys.modules


def test_load_gives_the_attribute_and_register_replaces() -> None:
    registry = Registry("thing", {"b": "math:pi", "a": "math:e"})
    assert list(registry) == ["a", "b"]
    registry.register("b", "math:tau")
    assert registry.load("b") == pytest.approx(6.283185307179586)


def test_registering_does_not_change_the_dictionary_given() -> None:
    entries: dict[str, str] = {}
    Registry("thing", entries).register("a", "math:pi")
    assert entries == {}


def test_an_unknown_name_suggests_the_nearest_and_lists_the_rest() -> None:
    with pytest.raises(UsageError) as caught:
        Registry("memory", {"tokens": "x:y", "attention": "x:y"}).load("tokesn")
    assert str(caught.value) == "unknown memory 'tokesn': did you mean 'tokens'? choose from attention, tokens"
