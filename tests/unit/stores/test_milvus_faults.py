"""The store on a real Milvus server whose client is killed, or which stops itself: nothing is lost or doubled."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mnemic.errors import MnemicError, UsageError
from mnemic.stores import Store, StoreConfig, Where, open_store
from mnemic.stores.milvus import server, store
from mnemic.stores.milvus.server import Server
from tests.contract.milvus_server import skip_without_milvus, start, stop
from tests.contract.stores import rows
from tests.contract.test_store import assert_same_answers
from tests.unit.stores.milvus import DIM, assert_whole, everything, fill, on_server, queries

# Faults of the client


class Killed(BaseException):
    """The client ends here."""


def killed_before(request: int, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Lets so many requests pass, and no further one."""
    call, left = Server._call, itertools.count(request, -1)

    def counted(self: Server, *arguments: Any, **options: Any) -> Any:
        if next(left) <= 0:
            raise Killed
        return call(self, *arguments, **options)

    monkeypatch.setattr(Server, "_call", counted)
    return monkeypatch


def test_killed_before_any_request_of_a_commit_it_is_there_whole_or_not_at_all(
    make: Callable[..., tuple[Store, Store]], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, exact = make()
    fill(one, exact)
    outcomes, finished, number = set(), False, 0
    while not finished:
        number += 1
        writer: Any = open_store(one.address)
        old = (writer.version, len(exact))
        change = rows(np.random.default_rng(number), 10, sources=number % 5 + 1)
        writer.delete("red")
        writer.add(*change)
        with monkeypatch.context() as patch:
            killed_before(number, patch)
            try:
                writer.commit()
                finished = True
            except Killed:
                pass
        writer._server.close()
        with open_store(one.address) as reader:
            committed = reader.version > old[0]
            if committed:
                exact.delete("red")
                exact.add(*change)
                exact.commit()
            outcomes.add(committed)
            assert len(reader) == len(exact)
            assert committed or not finished
            assert_same_answers(reader, exact, queries(), 60)
            assert reader.verify() == []
            assert reader.summary().namespaces == exact.summary().namespaces
    assert outcomes == {True, False}
    assert number > 10
    one.refresh()
    assert on_server(one) == everything(one), "what was left behind is cleared away"


KILLED = """
import os, signal, sys
import numpy as np
from mnemic.stores import References, open_store
from mnemic.stores.milvus import store
store.WAITING_BYTES = 0
one = open_store(sys.argv[1])
for name in ("new", "document 0"):
    one.add(np.ones((5, 8)), range(5), References.of(name, range(5), "red"))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_rows_of_a_killed_process_are_seen_by_no_one_and_cleared_away(
    make: Callable[..., tuple[Store, Store]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REMOVED_AT_ONCE", 7)
    one, exact = make()
    fill(one, exact)
    process = subprocess.run([sys.executable, "-c", KILLED, one.address], check=False)
    assert process.returncode == -signal.SIGKILL
    assert on_server(one) == everything(one) + 10 + 1, "ten rows, and the name of a document"
    with open_store(one.address) as again:
        assert len(again) == 30
        assert again.verify() == []
        assert_same_answers(again, exact, np.ones((1, DIM)), 40)
        assert not again.search(queries(), 40, Where.document("new", "red")).mask.any()
        assert again.delete(Where.document("new", "red")) == 0
        assert again.delete("red") == exact.delete("red")
        fill(again, exact, seed=1)
        assert_same_answers(again, exact, queries(), 60)
        assert_whole(again)


def test_two_writers_are_noticed(make: Callable[..., tuple[Store, Store]], monkeypatch: pytest.MonkeyPatch) -> None:
    one, exact = make()
    fill(one, exact)
    with open_store(one.address) as second:
        second.add(*rows(np.random.default_rng(1), 5))
        fill(one, exact, seed=2)
        for act in (second.commit, second.refresh):
            with pytest.raises(MnemicError, match="another process has committed version 2"):
                act()
    monkeypatch.setattr(store, "WAITING_BYTES", 0)
    with open_store(one.address) as second:
        second.add(*rows(np.random.default_rng(3), 5))
        fill(one, exact, seed=4)
        with pytest.raises(MnemicError, match="another process has committed version 3"):
            second.add(*rows(np.random.default_rng(5), 5))
    with open_store(one.address) as second:
        second.add(*rows(np.random.default_rng(6), 5))
        one.add(*rows(np.random.default_rng(7), 5))
        exact.add(*rows(np.random.default_rng(7), 5))
        with pytest.raises(MnemicError, match="another process has begun to write"):
            second.commit()
        one.commit(), exact.commit()
    assert_same_answers(one, exact, queries(), 200)
    assert_whole(one)


def test_rows_that_another_writer_slipped_in_stop_the_commit(make: Callable[..., tuple[Store, Store]]) -> None:
    one: Any = make()[0]
    fill(one)
    one.add(*rows(np.random.default_rng(1), 5))
    one._begin()
    one._server.write([{**one._snapshot.names._row(0, "x", 9, 9), "id": 31}], "_default", False, lambda: None)
    with pytest.raises(MnemicError, match=r"5 rows were sent .* and 6 are there"):
        one.commit()
    with open_store(one.address) as again:
        assert len(again) == 30
        fill(again, seed=1)
        assert_whole(again)


# Faults of the server


def test_a_request_whose_answer_was_lost_is_not_done_twice(
    make: Callable[..., tuple[Store, Store]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pymilvus import MilvusException

    monkeypatch.setattr(server, "PAUSES", (0.0, 0.0))
    one, exact = make()
    client: Any = one._server._client
    insert, asked = client.insert, []

    def lost(*arguments: Any, **options: Any) -> None:
        insert(*arguments, **options)
        asked.append("insert")
        raise MilvusException(code=2, message="gone")

    monkeypatch.setattr(client, "insert", lost)
    fill(one, exact)
    assert asked == ["insert", "insert"], "names, and rows"
    assert_same_answers(one, exact, queries(), 40)
    assert_whole(one)

    upsert = client.upsert
    monkeypatch.setattr(client, "upsert", lost)
    some = rows(np.random.default_rng(1), 30)
    one.add(*some), exact.add(*some)
    with pytest.raises(MnemicError, match="no Milvus server answers"):
        one.commit()
    monkeypatch.setattr(client, "insert", insert)
    monkeypatch.setattr(client, "upsert", upsert)
    assert one.commit() == 2, "what failed can be tried again"
    exact.commit()
    assert_same_answers(one, exact, queries(), 60)
    assert_whole(one)


def test_no_server_no_package_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_milvus()
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    with pytest.raises(MnemicError, match=r"no Milvus server answers at 127.0.0.1:1: start it, or check the address"):
        open_store("milvus://127.0.0.1:1/name", StoreConfig(dim=DIM))
    assert waited == list(server.PAUSES[:3])
    for address in (
        "milvus:",
        "milvus://host",
        "milvus://host/",
        "milvus://host:port/name",
        "milvus://host/with-dash",
        "milvus://host/9",
        "milvus://user:word@host/name",
        "milvus://host/name/more",
    ):
        with pytest.raises(UsageError, match="expected milvus://host:19530/name"):
            open_store(address, StoreConfig(dim=DIM))
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    with pytest.raises(UsageError, match=r"pip install 'mnemic\[milvus\]'"):
        open_store("milvus://127.0.0.1:1/name", StoreConfig(dim=DIM))


def test_a_server_that_stops_stands_still_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_milvus()
    monkeypatch.setattr(server, "PAUSES", (0.1, 0.1))
    keeper = start(tmp_path / "own", os.getpid())
    place = (tmp_path / "own" / "address").read_text()
    exact = open_store("ram:", StoreConfig(dim=DIM, keys="float32"))
    try:
        one = open_store(f"{place}/own", exact.config)
        fill(one, exact)
        some = rows(np.random.default_rng(1), 20)
        one.add(*some), exact.add(*some)
        process = int((tmp_path / "own" / "process").read_text())

        with open_store(one.address, timeout=2.0) as hasty:
            os.kill(process, signal.SIGSTOP)
            for act in (lambda: hasty.search(queries(), 3), hasty.refresh):
                with pytest.raises(MnemicError, match=r"did not answer within 2 s .* timeout="):
                    act()
            os.kill(process, signal.SIGCONT)

        stop(keeper)
        for act in (lambda: one.search(queries(), 3), one.commit, one.refresh, lambda: one.get([0])):
            with pytest.raises(MnemicError, match="no Milvus server answers at"):
                act()
        monkeypatch.setattr(server, "PAUSES", (1.0,) * 30)
        keeper = start(tmp_path / "own", os.getpid(), int(place.rpartition(":")[2]))
        one.commit(), exact.commit()
        assert_same_answers(one, exact, queries(), 60)
        assert_whole(one)
        one.close()
        with pytest.raises(UsageError, match="is closed: open it again"):
            one.search(queries(), 1)
    finally:
        stop(keeper)
        shutil.rmtree(tmp_path / "own")
