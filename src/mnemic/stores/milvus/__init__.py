"""A store on a Milvus server: `milvus://host:19530/name`."""

from mnemic.stores.milvus.store import MilvusStore

__all__ = ["MilvusStore"]
