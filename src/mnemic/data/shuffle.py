"""A random order of any number of things that takes no memory."""

from __future__ import annotations

_MASK = (1 << 64) - 1
_ROUNDS = 6


def shuffled(place: int, count: int, seed: int, epoch: int) -> int:
    """Which of `count` things comes at `place` in the order that `seed` and `epoch` give.

    A Feistel network permutes the numbers of an even number of bits; one that falls outside of `count` is permuted
    again until it falls inside (cycle walking), which keeps it a permutation.
    """
    half = max(((count - 1).bit_length() + 1) // 2, 1)
    key = _mixed(_mixed(seed & _MASK) ^ epoch)
    while True:
        left, right = place >> half, place & ((1 << half) - 1)
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mixed(key + (turn << 58) + right) & ((1 << half) - 1))
        place = left << half | right
        if place < count:
            return place


def _mixed(value: int) -> int:
    """The finaliser of SplitMix64: every bit of the input moves every bit of the output."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
