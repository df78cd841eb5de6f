"""Manifests made to do harm: refused with a reason, or without effect; no crash, no hang, no file outside touched.

Half of them have bytes changed at random. The others are well-formed, with the right checksum, and lie: numbers that
are wrong, huge or no numbers, entries that are missing, double or nested without end, names that lead elsewhere.

MNEMIC_MANIFESTS sets how many are tried (20,000 by default).
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from mnemic.errors import DamagedError, MnemicError, UsageError
from mnemic.stores import open_store
from mnemic.stores.disk import manifest as manifests

from .stores import CONFIGS, DIM, QUERIES, Victim, rows
from .watch import confined

MANIFESTS = int(os.environ.get("MNEMIC_MANIFESTS", "20000"))
DEEP = "@deep@"

NUMBERS = [-1, 0, 1, 2, 7, 255, 2**31, 2**32 - 1, 2**48, 2**48 + 1, 2**63 - 1, 2**64, -(2**63), 10**30, 0.5, 1e308]
NO_NUMBERS = [None, True, False, float("nan"), float("inf"), float("-inf"), "1", [], {}, [[]], [1], {"a": 1}]
TEXTS = ["", "x", "\x00", "\ud800", "é" * 5, "a" * 100_000, "../../victim", "/etc/passwd", "rows-00000001.keys", DEEP]
INDEXES = [
    "auto",
    "exact",
    "Flat",
    "HNSW32",
    "IVF1,Flat",
    "IVF4,PQ8x4fs",
    "IVF1000000000,Flat",
    "PQ3",
    "OPQ4,PQ4",
    "%s",
]
SETTINGS = ["l2", "ip", "cosine", "float16", "float32", "codes", "opq", "pca", 1, 4, 8, 9, 16, 65536, 0.01, 1.0]


@pytest.fixture(params=CONFIGS)
def victim(request: pytest.FixtureRequest, tmp_path: Path) -> Victim:
    return Victim(tmp_path / "a.store", request.param)


def body_of(victim: Victim) -> dict[str, Any]:
    return json.loads(victim.files[name_of(victim)].partition(b"\n")[2])


def name_of(victim: Victim) -> str:
    return manifests.path_of(Path(), victim.version).name


def put(victim: Victim, data: bytes) -> None:
    (victim.folder / name_of(victim)).write_bytes(data)


def sealed(text: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(text).encode() + b"\n" + text + b"\n"


def is_sealed(data: bytes) -> bool:
    return data == sealed(data.partition(b"\n")[2].removesuffix(b"\n"))


def test_sealing_here_is_sealing_there(victim: Victim) -> None:
    text = json.dumps(body_of(victim), indent=1, ensure_ascii=False).encode()
    assert sealed(text) == manifests.sealed(body_of(victim)) == victim.files[name_of(victim)]


# Bytes changed at random


def garbled(data: bytes, draw: random.Random) -> bytes:
    """The same bytes with one to three changes: a byte, a piece gone, doubled, moved or made anew."""
    for _ in range(draw.randrange(1, 4)):
        first, last = sorted(draw.randrange(len(data) + 1) for _ in range(2))
        piece = data[first:last]
        data = draw.choice(
            [
                data[:first] + bytes([draw.randrange(256)]) + data[first + 1 :],
                data[:first] + data[last:],
                data[:first],
                data[:last] + piece + data[last:],
                data[:first] + draw.randbytes(min(len(piece), 50)) + data[last:],
                data[:first] + bytes(len(piece)) + data[last:],
                data + draw.randbytes(draw.randrange(10)),
            ]
        )
    return data


def test_garbled_manifests_are_refused(victim: Victim) -> None:
    draw, refused = random.Random(1), 0
    for number in range(MANIFESTS // 2 // len(CONFIGS)):
        whole = victim.files[name_of(victim)]
        data = garbled(whole, draw)
        if draw.random() < 0.3:
            data = sealed(data.partition(b"\n")[2].removesuffix(b"\n"))
        put(victim, data)
        with confined(victim.folder):
            answers = victim.ask()
        assert_answers_hold_together(victim, answers, f"number {number}")
        if data != whole and not is_sealed(data):
            refused += 1
            assert isinstance(answers["opening"], DamagedError), f"number {number} was taken"
            assert name_of(victim) in str(answers["opening"])
    assert refused > MANIFESTS / 2 / len(CONFIGS) / 2


# Lies with the right checksum


def places(node: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all entries below a node."""
    inside = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [place for key, value in inside for place in ((*way, key), *places(value, (*way, key)))]


def at(body: Any, way: tuple[Any, ...]) -> Any:
    for key in way:
        body = body[key]
    return body


def lie(body: dict[str, Any], draw: random.Random) -> None:
    """Changes one entry."""
    way = draw.choice(places(body))
    owner, key = at(body, way[:-1]), way[-1]
    value = owner[key]
    near = [value + 1, value - 1, value * 2, value // 2, value + 2**33] if type(value) is int else []
    kind = draw.randrange(10)
    if kind == 0:
        del owner[key]
    elif kind == 1 and isinstance(owner, dict):
        owner[draw.choice(TEXTS[:-1])] = draw.choice([0, value])
    elif kind == 1 or (kind == 2 and isinstance(value, list)):
        (owner if kind == 1 else value).append(copy.deepcopy(draw.choice([value, 0, *NO_NUMBERS])))
    elif kind == 2:
        owner[key] = copy.deepcopy(at(body, draw.choice(places(body))))
    else:
        owner[key] = copy.deepcopy(
            draw.choice(draw.choice([near or NUMBERS, near or SETTINGS, NUMBERS, NO_NUMBERS, TEXTS, INDEXES, SETTINGS]))
        )


def lying(body: dict[str, Any], draw: random.Random) -> bytes:
    """A manifest with the right checksum that says something else."""
    body = copy.deepcopy(body)
    for _ in range(draw.choice([1, 1, 2, 3])):
        lie(body, draw)
    text = json.dumps(body, indent=1)
    deep = draw.choice([10, 900, 100_000])
    text = text.replace(f'"{DEEP}"', "[" * deep + "]" * deep)
    if draw.random() < 0.05:  # an entry twice
        line = draw.choice(text.split("\n")[1:-1])
        text = text.replace(line, line.rstrip(",") + ",\n" + line, 1)
    return sealed(text.encode())


def assert_answers_hold_together(victim: Victim, answers: dict[str, Any], what: str) -> None:
    """Whatever a lie makes of the answers: what is found are rows, with their own values."""
    known = dict(zip(victim.ids, victim.answers["rows"][1], strict=True))
    for question, answer in answers.items():
        if isinstance(answer, Exception):
            assert isinstance(answer, DamagedError | UsageError), f"{what}: {question}"
            assert len(str(answer)) < 1000, f"{what}: {question}"
        elif " nearest of " in question:
            ids, scores, values, mask = map(np.array, answer)
            assert ids.shape == scores.shape == values.shape == mask.shape == (len(QUERIES), int(question.split()[0]))
            assert (ids >= 0).all(), what
            assert np.isneginf(scores[~mask]).all(), what
            assert not np.isnan(scores).any(), what
            for number, value in zip(ids[mask].tolist(), values[mask].tolist(), strict=True):
                assert known.get(number, value) == value, f"{what}: {question}"


def test_lying_manifests_do_no_harm(victim: Victim, tmp_path: Path) -> None:
    draw, body, refused, harmless = random.Random(2), body_of(victim), 0, 0
    for number in range(MANIFESTS // 2 // len(CONFIGS)):
        put(victim, lying(body, draw))
        with confined(victim.folder):
            answers = victim.ask()
        assert_answers_hold_together(victim, answers, f"number {number}")
        refused += isinstance(answers["opening"], MnemicError)
        harmless += answers == victim.answers
        if answers["opening"] is None and number % 5 == 0:
            shutil.copytree(victim.folder, tmp_path / "copy.store")
            with confined(tmp_path / "copy.store"):
                write_to(tmp_path / "copy.store", draw)
            shutil.rmtree(tmp_path / "copy.store")
    assert refused > MANIFESTS / 2 / len(CONFIGS) / 2
    assert harmless > 0


def write_to(folder: Path, draw: random.Random) -> None:
    """Adds, deletes and compacts; errors with a reason are fine, and so is too little memory for marks of rows whose
    numbers begin where the lie said."""
    with contextlib.suppress(MnemicError, MemoryError), open_store(folder) as store:
        if store.config.dim == DIM:
            store.add(*rows(np.random.default_rng(0), 30, range(3)))
        if draw.random() < 0.5:
            store.delete("red")
        store.commit()
        store.compact()


# Lies worth a name


@pytest.mark.parametrize("schema", [2, 99, 0, -1, "1", None, [1], 1.5])
def test_a_newer_schema_is_refused_and_says_what_to_install(victim: Victim, schema: Any) -> None:
    put(victim, manifests.sealed({**body_of(victim), "schema": schema, "library": "7.8.9"}))
    with pytest.raises(DamagedError, match=r"reads schema 1: install mnemic '7\.8\.9' or newer"):
        open_store(victim.folder)


def test_a_damaged_manifest_names_the_version_before(victim: Victim) -> None:
    put(victim, b"")
    with pytest.raises(DamagedError, match=rf"the version before is {victim.version - 1}: open_store"):
        open_store(victim.folder)
    with open_store(victim.folder, version=victim.version - 1) as store:
        assert len(store) > len(victim.ids)


LIES: dict[str, Any] = {
    "a number below those of its rows": lambda body: body.update(next_id=body["index"]["end"]),
    "an index of another width": lambda body: body["config"].update(dim=16),
    "an index of another metric": lambda body: body["config"].update(
        metric={"l2": "ip", "ip": "l2"}[body["config"]["metric"]]
    ),
    "an index with fewer rows": lambda body: body["index"].update(rows=body["index"]["rows"] - 1),
    "candidates without end": lambda body: body["index"].update(curve=[[1, 2**40, 1.0]]),
    "infinite lists": lambda body: body["index"].update(curve=[[float("inf"), 1, 1.0]]),
    "undefined recall": lambda body: body["index"].update(curve=[[1, 1, float("nan")]]),
    "a billion lists": lambda body: body["config"].update(index="IVF1000000000,Flat"),
    "a billion of something else": lambda body: body["config"].update(index="LSH1000000000"),
    "a version of 10 MB": lambda body: body.update(version="x" * 10_000_000),
    "a name of 10 MB": lambda body: body.update({"x" * 10_000_000: 1}),
    "two ranges that overlap": lambda body: body.update(deleted=[[3, 2], [4, 2]]),
    "many ranges that overlap": lambda body: body.update(deleted=[[0, 1]] * 100_000),
}


@pytest.mark.parametrize("what", LIES)
def test_a_lie_is_refused(victim: Victim, what: str) -> None:
    body = body_of(victim)
    LIES[what](body)
    put(victim, manifests.sealed(body))
    with confined(victim.folder):
        answers = victim.ask()
        errors = [answer for answer in answers.values() if isinstance(answer, Exception)]
        assert errors or answers == victim.answers
        assert_answers_hold_together(victim, answers, what)
        write_to(victim.folder, random.Random(0))


def test_more_rows_than_memory_has_bytes(victim: Victim) -> None:
    """A store may have had ever so many rows: what counts is those that are left."""
    put(victim, manifests.sealed({**body_of(victim), "next_id": 2**47}))
    with confined(victim.folder):
        answers = victim.ask()
        assert_answers_hold_together(victim, answers, "")
        assert (answers["rows"], answers["length"]) == (victim.answers["rows"], victim.answers["length"])
        with open_store(victim.folder) as store:
            store.delete("red")
            store.commit()
            store.compact()


def test_candidates_whose_keys_are_not_kept(tmp_path: Path) -> None:
    victim = Victim(tmp_path / "a.store", "codes")
    body = body_of(victim)
    body["index"]["curve"] = [[1, 64, 1.0]]
    put(victim, manifests.sealed(body))
    with pytest.raises(DamagedError, match="keys"):
        open_store(victim.folder)
