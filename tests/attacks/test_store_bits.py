"""Every bit of a store may flip: the damage is reported or harmless, and never changes an answer.

MNEMIC_BIT_FLIPS sets how many flips are tried (10,000 by default).
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import faiss
import pytest
import xxhash

from mnemic.errors import DamagedError

from .stores import Victim

FLIPS = int(os.environ.get("MNEMIC_BIT_FLIPS", "10000"))


KINDS = ("kept", "codes")


@pytest.fixture(params=KINDS)
def victim(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Victim:
    """A store whose index FAISS is given only as long as it is whole."""
    made = Victim(tmp_path / "a.store", request.param)
    whole = {xxhash.xxh3_128_hexdigest(data) for name, data in made.files.items() if name.startswith("index")}
    read = faiss.read_index

    def read_if_whole(path: str, *arguments: Any) -> Any:
        with open(path, "rb") as file:
            assert xxhash.xxh3_128_hexdigest(file.read()) in whole, "FAISS was given a damaged file"
        return read(path, *arguments)

    monkeypatch.setattr(faiss, "read_index", read_if_whole)
    return made


def test_the_store_is_worth_attacking(victim: Victim) -> None:
    assert victim.ask() == victim.answers
    assert not [answer for answer in victim.answers.values() if isinstance(answer, Exception)]
    kinds = {Path(name).suffix for name in victim.needed}
    assert kinds == {".json", ".values", ".positions", ".spans", ".runs", ".sources", ".keys", ".sums", ".faiss"}
    assert len([name for name in victim.needed if name.endswith(".values")]) == 2
    summary = victim.answers["summary"]
    assert 0 < summary["index"]["rows"] < summary["rows"] == len(victim.ids) < victim.ids[-1]


def test_no_flipped_bit_changes_an_answer(victim: Victim) -> None:
    draw, reported, names = random.Random(0), 0, [name for name, data in victim.files.items() if data]
    sizes = [len(victim.files[name]) for name in names]
    for number in range(FLIPS // len(KINDS)):
        name = draw.choice(names) if number % 2 else draw.choices(names, sizes)[0]
        place, bit = draw.randrange(len(victim.files[name])), draw.randrange(8)
        flip(victim.folder / name, place, victim.files[name][place] ^ 1 << bit)
        answers = victim.ask()
        flip(victim.folder / name, place, victim.files[name][place])
        what = f"bit {bit} of byte {place} of {name}"
        damaged = {question for question, answer in answers.items() if isinstance(answer, Exception)}
        for question, answer in answers.items():
            if question in damaged:
                assert isinstance(answer, DamagedError), what
                assert name in str(answer), what
            elif question not in ("opening", "verify"):
                assert answer == victim.answers[question], f"{what} changed the answer to {question}"
        if name in victim.needed:
            assert "opening" in damaged or answers["verify"], f"nobody found {what}"
            reported += 1
        else:
            assert not damaged, what
            assert answers["verify"] == []
    assert reported > FLIPS / len(KINDS) / 3
    assert victim.ask() == victim.answers


def flip(path: Path, place: int, byte: int) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    os.pwrite(descriptor, bytes([byte]), place)
    os.close(descriptor)
