"""What a plan says: indexes that stores really make, the recall of each, and an answer in seconds for any width."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mnemic.cli import main
from mnemic.errors import UsageError
from mnemic.stores import StoreConfig
from mnemic.stores import plan as plans
from mnemic.stores.disk.index import choose
from mnemic.stores.milvus.index import choose as choose_on_milvus
from mnemic.stores.plan import CLUSTER, CODES, WIDEST_MEASURED, Rates, best, measure, plan

RATES = Rates(compared=1e10, scanned=1e10, whole=5e9, codes=2e10, encoded=1e8, written=1e9, memory=10**10, disk=10**13)


def changed(**rates: float) -> Rates:
    return Rates(**{**vars(RATES), **rates})


@pytest.mark.parametrize(("rows", "dim"), [(10**6, 128), (10**7, 1024), (10**9, 768), (10**12, 4096), (10**6, 7)])
def test_the_indexes_are_those_that_stores_make(rows: int, dim: int) -> None:
    found = {one.kind: one for one in plan(rows, dim, RATES)}
    by_itself = choose(StoreConfig(dim=dim), rows)
    if not by_itself:
        assert [(one.kind, one.index, one.setting) for one in found.values()] == [("exact", "", "")]
        return
    assert [one.index for one in found.values() if not one.setting] == [by_itself]
    for one in found.values():
        if one.kind != CLUSTER:
            option, _, value = one.setting.removeprefix("--").partition(" ")
            assert choose(StoreConfig(dim=dim, **({option: value} if option else {})), rows) == one.index


def test_the_cluster_is_what_a_store_on_milvus_makes() -> None:
    rows, dim = 10**9, 1024
    cluster = plan(rows, dim, RATES)[-1]
    assert cluster.kind == CLUSTER
    assert cluster.index == choose_on_milvus(StoreConfig(dim=dim), rows) == "IVF1024,Flat"
    keys = rows * dim * 4
    assert keys < cluster.memory < 1.1 * keys + 48 * rows + keys / 2**29 * 1024 * dim * 4, "whole float32 keys"
    machines = int(cluster.verdict.split()[2].replace(",", ""))
    assert machines * 0.5 * RATES.memory >= cluster.memory > (machines - 1) * 0.5 * RATES.memory
    assert cluster.search > rows / machines / 32 * dim / RATES.whole, "32 of 1024 lists on each machine"


def test_codes_only_are_chosen_where_the_keys_do_not_fit() -> None:
    found = plan(10**6, 128, RATES)
    assert all(one.verdict == "fits" for one in found)
    assert min(found, key=lambda one: one.search).kind == CODES
    assert best(found).kind == "4-bit codes, keys kept"
    without_room = plan(10**6, 128, changed(disk=10**8))
    assert {one.verdict for one in without_room if one.kind != CODES} == {"more disk than is free here"}
    assert best(without_room).kind == CODES


def test_each_kind_says_what_recall_to_expect() -> None:
    recall = {one.kind: one.recall for one in plan(10**9, 1024, RATES)}
    assert recall.pop(CODES) == "0.5 to 0.6"
    assert recall.pop("exact") == "1"
    assert set(recall.values()) == {f"{StoreConfig(dim=1).recall}"}
    assert CLUSTER in recall


def test_where_not_even_milvus_will_do_there_is_no_best() -> None:
    assert best(plan(10**12, 32768, RATES)).kind == CLUSTER
    assert best(plan(10**12, 65536, RATES)) is None


@pytest.mark.parametrize(("rows", "dim"), [("nan", 8), ("inf", 8), ("0.5", 8), ("0", 8), ("1e13", 8), ("5", 0)])
def test_wrong_arguments_are_refused_before_anything_is_measured(
    rows: str, dim: int, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(plans, "measure", lambda dim: pytest.fail("measured"))
    with pytest.raises(UsageError, match="expected"):
        plan(float(rows), dim)
    assert main(["store", "plan", "--rows", rows, "--dim", str(dim)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "expected" in captured.err
    assert "measuring" not in captured.err


def test_wide_keys_are_measured_at_a_width_that_takes_seconds(monkeypatch: Any) -> None:
    import faiss

    made, factory = [], faiss.index_factory
    monkeypatch.setattr(faiss, "index_factory", lambda dim, text: made.append(dim) or factory(dim, text))
    rates = measure(65536)
    assert set(made) == {WIDEST_MEASURED}
    assert all(rate > 0 for rate in vars(rates).values())


@pytest.mark.parametrize("dim", [1, 3, 16])
def test_narrow_keys_can_be_measured(dim: int) -> None:
    assert all(rate > 0 for rate in vars(measure(dim)).values())


def test_the_verb_says_why_codes_only_are_not_the_best(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(plans, "measure", lambda dim: RATES)
    assert main(["store", "plan", "--rows", "1e6", "--dim", "128"]) == 0
    text = capsys.readouterr().out
    (line,) = [line for line in text.splitlines() if line.endswith("<- best")]
    assert line.startswith("4-bit codes, keys kept")
    assert "take them only where the keys do not fit" in text
    assert main(["store", "plan", "--rows", "1e12", "--dim", "65536"]) == 0
    text = capsys.readouterr().out
    assert "<- best" not in text
    assert "choose a narrower layer" in text
    assert main(["store", "plan", "--rows", "10", "--dim", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"] == "exact"
