"""The embedded default: a folder of write-once files with FAISS on top. `docs/store-format.md` is its format."""

from mnemic.stores.disk.store import DiskStore

__all__ = ["DiskStore"]
