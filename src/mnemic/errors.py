"""The few exceptions of the library; each message says what was wrong and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MnemicError(Exception):
    """Something the user can act on; the command line prints it in one line and exits with `exit_code`."""

    exit_code = 1


class UsageError(MnemicError, ValueError):
    """An argument, option, name or input that cannot be used as given."""

    exit_code = 2


class UnsupportedModel(MnemicError, ValueError):
    """A model in which the place a memory needs was not found, or that cannot honour a request."""


class DamagedError(MnemicError):
    """A file that is incomplete, altered, or belongs to something else."""

    exit_code = 3


def unknown_name(kind: str, name: object, known: Iterable[str]) -> UsageError:
    """The error for a name that is not among `known`: it suggests the nearest one and lists the rest."""
    choices = sorted(known)
    near = difflib.get_close_matches(str(name), choices, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UsageError(f"unknown {kind} {name!r}: {hint}choose from {', '.join(choices) or '(none)'}")
