"""One collection on a Milvus server: requests in batches and within limits, repeated where that can help."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mnemic.errors import MnemicError, UsageError
from mnemic.stores.base import Floats, Ids
from mnemic.stores.config import StoreConfig

ROWS, NAMES = "_default", "names"  # the partitions: rows, and the names of documents and namespaces
PROPERTY = "mnemic"
NAME_BYTES = 8192  # of a name of 4096 bytes in hexadecimal digits

MOST_FOUND = 16384  # rows a query: a limit of Milvus, as are the next two
LARGEST_DIM = 32768
EVERY_LIST = 65536  # lists to look into; more than there are means all
MESSAGE_BYTES = 16 << 20  # of a request; servers refuse more than 64 MB
FOUND_AT_ONCE = 1 << 18  # rows in an answer
QUERIES_AT_ONCE = 256
REMOVED_AT_ONCE = 1 << 20  # ids
UNSETTLED = 4096  # rows outside of the index up to which Milvus looks at every one of them
PAGE = 4096

PAUSES = (0.25, 0.5, 1.0, 2.0, 4.0)  # seconds between the tries of a request
POLL, POLLS = 0.5, 1200  # seconds between looks at work that the server does, and how many
# Milvus' numbers for: unavailable, too many requests, collection not loaded, not all of it, recovering, channel away.
PASSING = {2, 8, 101, 103, 106, 503}
METRICS = {"l2": "L2", "ip": "IP", "cosine": "IP"}  # keys come here with length 1 where it is the cosine

_ADDRESS = re.compile(r"milvus://([^/:@\s]+)(?::(\d{1,5}))?/([A-Za-z_][A-Za-z0-9_]{0,199})")


class Nearest(NamedTuple):
    """What Milvus finds: arrays of (queries, limit), the nearest first. The id is -1 where there was nothing more."""

    ids: Ids
    distances: Floats
    values: NDArray[np.int64]


class Server:
    """The requests that a store makes. Errors are sentences that say what to do."""

    def __init__(self, address: str, token: str, timeout: float) -> None:
        parts = _ADDRESS.fullmatch(address)
        if not parts:
            raise UsageError(f"{address!r}: expected milvus://host:19530/name, the name of letters, digits and _")
        if int(parts[2] or 0) > 65535:
            raise UsageError(f"{address!r}: a port is a number up to 65535")
        if not timeout > 0:
            raise UsageError(f"timeout = {timeout!r}: expected a number of seconds")
        self.collection = parts[3]
        self.place = f"{parts[1]}:{parts[2] or 19530}"
        self.timeout = timeout
        self.time: int | None = None  # of the server, at the last write of a commit: None before it, 0 if unknown
        self._client: Any = self._connect(token)

    def _connect(self, token: str) -> Any:
        try:
            import pymilvus
        except ImportError:
            raise UsageError("a store on Milvus needs the package pymilvus: pip install 'mnemic[milvus]'") from None
        for name in ("pymilvus.decorators", "pymilvus.client.connection_manager"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # they print each error that they raise as well
        limit = {"methodConfig": [{"name": [{}], "timeout": f"{self.timeout:.3f}s"}]}
        options = {"grpc.service_config": json.dumps(limit)}
        uri = f"http://{self.place}"
        connect = partial(pymilvus.MilvusClient, uri, token=token, dedicated=True, grpc_options=options)
        return self._patiently("connect", lambda _: connect(), tries=3)

    def close(self) -> None:
        """Ends the connection."""
        if self._client is not None:
            self._client.close()
        self._client = None

    # Asking

    def _call(
        self, method: str, *arguments: Any, again: str = "", before: Callable[[], None] | None = None, **options: Any
    ) -> Any:
        """Makes a request, and `before` each try another one.

        `again` is the method for a second try, where the first may have had its effect.
        """
        if self._client is None:
            raise UsageError("this store is closed: open it again")
        # The tries are counted here: pymilvus itself would repeat an insert, and rows would be there twice.
        options["retry_times"] = 0
        methods = getattr(self._client, method), getattr(self._client, again or method)

        def request(tried: int) -> Any:
            if before is not None:
                before()
            return methods[tried > 0](*arguments, **options)

        return self._patiently(method, request)

    def _patiently(self, what: str, request: Callable[[int], Any], tries: int | None = None) -> Any:
        """Makes a request, several times if the server is not there or not ready."""
        import grpc
        from pymilvus.exceptions import MilvusException

        for tried, pause in enumerate((*PAUSES[:tries], None)):
            try:
                return request(tried)
            except (MilvusException, grpc.RpcError) as error:
                if pause is None or not _passing(error):
                    raise self._explained(what, error) from error
            time.sleep(pause)

    def _explained(self, what: str, error: Any) -> MnemicError:
        code, said = _code(error), str(getattr(error, "message", "") or error)
        if "UNAVAILABLE" in str(code) or code == 2:
            return MnemicError(f"no Milvus server answers at {self.place}: start it, or check the address")
        if "DEADLINE_EXCEEDED" in str(code):
            return MnemicError(
                f"the Milvus server at {self.place} did not answer within {self.timeout:g} s ({what}): look at its "
                "load, or open the store with a longer timeout=..."
            )
        if "UNAUTHENTICATED" in str(code) or code in (1800, 1801):
            return MnemicError(f"the Milvus server at {self.place} does not let us in: give token='user:password'")
        return MnemicError(f"the Milvus server at {self.place} cannot do this ({what}): {said}")

    # The collection

    def manifest(self) -> str | None:
        """The text of the store's manifest; None if there is no collection of that name."""
        if not self._call("has_collection", self.collection):
            return None
        properties = self._call("describe_collection", self.collection)["properties"]
        if PROPERTY not in properties:
            raise UsageError(
                f"the collection {self.collection!r} on {self.place} is no store of mnemic: choose another name"
            )
        return str(properties[PROPERTY])

    def publish(self, manifest: str) -> None:
        """Replaces the manifest."""
        self._call("alter_collection_properties", self.collection, properties={PROPERTY: manifest})

    def create(self, config: StoreConfig, manifest: str) -> None:
        """Makes the collection, with its first manifest."""
        from pymilvus import DataType, MilvusClient

        schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False, description="a store of mnemic")
        schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("key", DataType.FLOAT_VECTOR, dim=config.dim)
        for name in ("value", "position", "source", "space"):
            schema.add_field(name, DataType.INT64)
        schema.add_field("name", DataType.VARCHAR, max_length=NAME_BYTES)
        self._call("create_collection", self.collection, schema=schema, properties={PROPERTY: manifest})

    def prepare(self, config: StoreConfig, index: str) -> None:
        """Makes what is missing before the collection can be searched, which is nothing unless someone was killed."""
        if not self._call("has_partition", self.collection, NAMES):
            self._call("create_partition", self.collection, NAMES)
        if self.index() is None:
            self._make_index(config, index)
        if self._call("get_load_state", self.collection)["state"].name != "Loaded":
            self._call("load_collection", self.collection)

    def index(self) -> str | None:
        """The index that the collection has."""
        found = self._call("describe_index", self.collection, "key")
        if found is None:
            return None
        return "exact" if found["index_type"] == "FLAT" else f"IVF{found['nlist']},Flat"

    def _make_index(self, config: StoreConfig, index: str) -> None:
        lists = re.fullmatch(r"IVF(\d+),Flat", index)
        parameters = self._client.prepare_index_params()
        kind = {"index_type": "IVF_FLAT", "params": {"nlist": int(lists[1])}} if lists else {"index_type": "FLAT"}
        parameters.add_index("key", index_name="key", metric_type=METRICS[config.metric], **kind)
        self._call("create_index", self.collection, parameters, sync=False)

    def settle(self, config: StoreConfig, index: str, anew: bool = False) -> None:
        """Puts all rows into the index, or makes it `anew`, and has them searched there from then on.

        Rows that just came are searched in another way, which is slow and, if they are many, exact only for `exact`.
        """
        self._call("flush", self.collection)
        if anew or self.index() != index:
            self._call("release_collection", self.collection)
            self._call("drop_index", self.collection, "key")
            self._make_index(config, index)
            self._call("load_collection", self.collection)
        while (made := self._call("describe_index", self.collection, "key"))["pending_index_rows"]:
            if made["state"] == "Failed":
                raise MnemicError(f"the Milvus server at {self.place} cannot make the index: look at its log")
            time.sleep(POLL)
        self._call("refresh_load", self.collection)
        for _ in range(POLLS):
            loaded = self._call("list_loaded_segments", self.collection)
            if index == "exact" or all(part.index_id or part.num_rows <= UNSETTLED for part in loaded):
                return
            time.sleep(POLL)
        raise MnemicError(f"the Milvus server at {self.place} does not load the index: look at its log")

    def compact(self) -> None:
        """Has the server rewrite what holds deleted rows, and waits for it."""
        self._call("flush", self.collection)
        job = self._call("compact", self.collection)
        while self._call("get_compaction_state", job) == "Executing":
            time.sleep(POLL)

    # Rows

    def write(self, rows: Sequence[dict[str, Any]], partition: str, again: bool, before: Callable[[], None]) -> None:
        """Adds rows; `again` if some of them may be there already."""
        size = sum(len(value) * 4 if isinstance(value, np.ndarray) else 10 for value in rows[0].values()) if rows else 1
        size += max((len(row["name"]) for row in rows), default=0)
        step = max(1, MESSAGE_BYTES // size)
        for start in range(0, len(rows), step):
            part = list(rows[start : start + step])
            method = "upsert" if again else "insert"
            self._call(method, self.collection, part, partition_name=partition, again="upsert", before=before)
            self._note_time()

    def remove(self, rows: str, end: int, before: Callable[[], None]) -> int:
        """Removes the rows that a filter describes, from all partitions; returns how many there were.

        `end` is beyond most of their ids: they are removed in portions, so that none takes too long.
        """
        removed = left = self.count(rows)
        for _ in range(len(PAUSES)):
            if not left:
                return removed
            for start in range(0, max(end, 1), REMOVED_AT_ONCE):
                low = f"id >= {start}" if start else ""
                high = f"id < {start + REMOVED_AT_ONCE}" if start + REMOVED_AT_ONCE < end else ""
                portion = both(f"({rows})", low, high)
                self._call("delete", self.collection, filter=portion, consistency_level="Strong", before=before)
            left = self.count(rows)
        raise MnemicError(f"{left} deleted rows stay on the Milvus server at {self.place}: look at its log")

    def _note_time(self) -> None:
        try:
            from pymilvus.client.ts_utils import get_collection_ts

            self.time = int(get_collection_ts(self.collection, self.place) or 0)
        except (ImportError, TypeError):  # another pymilvus: without the time, each search asks for the newest state
            self.time = 0

    def count(self, rows: str, partition: str | None = None, since: int = 0) -> int:
        """How many rows a filter describes; `since` is the time whose state must be seen, 0 the newest."""
        partitions = None if partition is None else [partition]
        found = self._call(
            "query",
            self.collection,
            filter=rows,
            output_fields=["count(*)"],
            partition_names=partitions,
            **_consistency(since),
        )
        return int(found[0]["count(*)"])

    def fetch(self, rows: str, fields: Sequence[str], partition: str, since: int) -> list[dict[str, Any]]:
        """The rows that a filter describes, at most as many as Milvus gives."""
        options: dict[str, Any] = {"output_fields": list(fields), "partition_names": [partition], "limit": MOST_FOUND}
        return list(self._call("query", self.collection, filter=rows, **options, **_consistency(since)))

    def pages(self, rows: str, fields: Sequence[str], partition: str, since: int) -> Iterator[list[dict[str, Any]]]:
        """The rows that a filter describes, however many, in the order of their numbers."""
        last = -(2**62)
        options: dict[str, Any] = {"output_fields": ["id", *fields], "partition_names": [partition], "limit": PAGE}
        while True:
            beyond = f"id > {last} and ({rows})"
            page = list(self._call("query", self.collection, filter=beyond, **options, **_consistency(since)))
            if page:
                yield page
            if len(page) < PAGE:
                return
            last = max(row["id"] for row in page)

    def search(self, queries: Floats, limit: int, rows: str, lists: int, since: int) -> Nearest:
        """The nearest rows of each query, in as many lists of the index."""
        shape = (len(queries), limit)
        found = Nearest(np.full(shape, -1, np.int64), np.zeros(shape, np.float32), np.zeros(shape, np.int64))
        step = max(1, min(QUERIES_AT_ONCE, FOUND_AT_ONCE // limit, MESSAGE_BYTES // (4 * queries.shape[1])))
        for start in range(0, len(queries), step):
            answers = self._call(
                "search",
                self.collection,
                data=list(queries[start : start + step]),
                filter=rows,
                limit=limit,
                output_fields=["value"],
                partition_names=[ROWS],
                search_params={"params": {"nprobe": lists}},
                **_consistency(since),
            )
            for query, hits in enumerate(answers, start):
                here = query, slice(len(hits))
                found.ids[here] = [hit["id"] for hit in hits]
                found.distances[here] = [hit["distance"] for hit in hits]
                found.values[here] = [hit["entity"]["value"] for hit in hits]
        return found


def _consistency(since: int) -> dict[str, Any]:
    """The newest state costs a wait of a fifth of a second each time; the state since a time costs nothing later on."""
    if not since:
        return {"consistency_level": "Strong"}
    return {"consistency_level": "Customized", "guarantee_timestamp": since}


def _code(error: Any) -> Any:
    return error.code() if callable(error.code) else error.code


def _passing(error: Any) -> bool:
    """Whether the same request may work in a while."""
    code, text = _code(error), str(error)
    return code in PASSING or "UNAVAILABLE" in str(code) or getattr(error, "retriable", False) or "not ready" in text


def one_of(field: str, numbers: Iterable[int]) -> str:
    """The filter for rows whose field is one of these numbers."""
    return f"{field} in [{','.join(map(str, sorted(numbers)))}]"


def both(*filters: str) -> str:
    """The filter for rows that fit all of these; "" fits any."""
    return " and ".join(filter(None, filters))
