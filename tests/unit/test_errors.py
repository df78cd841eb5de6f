"""Errors: exit codes, and suggestions for mistyped names."""

from __future__ import annotations

import pytest

from mnemic.errors import DamagedError, MnemicError, UnsupportedModel, UsageError, unknown_name


def test_exit_codes() -> None:
    codes = {kind: kind("x").exit_code for kind in (MnemicError, UnsupportedModel, UsageError, DamagedError)}
    assert codes == {MnemicError: 1, UnsupportedModel: 1, UsageError: 2, DamagedError: 3}


def test_a_usage_error_is_a_value_error_too() -> None:
    assert issubclass(UsageError, ValueError)
    assert issubclass(UsageError, MnemicError)


@pytest.mark.parametrize(
    ("name", "known", "sentence"),
    [
        ("stpes", ["steps", "seed"], "unknown option 'stpes': did you mean 'steps'? choose from seed, steps"),
        ("qqqq", ["b", "a"], "unknown option 'qqqq': choose from a, b"),
        (3, [], "unknown option 3: choose from (none)"),
    ],
)
def test_unknown_name(name: object, known: list[str], sentence: str) -> None:
    assert str(unknown_name("option", name, known)) == sentence
