"""Stretches of numbers, as (first, end)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def ranges_of(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """(first, end) of the stretches that are true."""
    edges = np.flatnonzero(np.diff(np.r_[False, mask, False]))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same numbers in as few ranges as possible, in order."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((first, end))
    return found
