"""Where the rows of a memory live. Each kind of store is one module here; a new one is found by itself."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from mnemic.errors import UsageError
from mnemic.registry import Registry
from mnemic.stores.base import Found, References, Rows, Source, Store, Where
from mnemic.stores.config import Origin, StoreConfig

__all__ = [
    "Found",
    "Origin",
    "References",
    "Rows",
    "Source",
    "Store",
    "StoreConfig",
    "Where",
    "open_store",
    "registry",
]


@cache
def registry() -> Registry:
    """Kind of store (ram, disk, milvus) -> its class: `ram.py` has a `RamStore`."""
    entries = {}
    for found in pkgutil.iter_modules(__path__):
        name = f"{found.name.capitalize()}Store"
        module = importlib.import_module(f"{__name__}.{found.name}")
        if hasattr(module, name):
            entries[found.name] = f"{module.__name__}:{name}"
    return Registry("kind of store", entries)


def open_store(
    address: str | Path,
    config: StoreConfig | None = None,
    *,
    model: Any = None,
    tokenizer: Any = None,
    override: Iterable[str] = (),
    **options: Any,
) -> Store:
    """Opens a store, or makes it if there is none and `config` is given.

    address: a folder (`wiki.store`), `ram:`, or `milvus://host:19530/name`.
    model, tokenizer: what it is to be used with; a store made by another is refused unless `override` names what
    may differ ("model", "tokenizer").
    options: what the kind of store understands (disk: `version=3` for an older version).
    """
    from mnemic.stores.origin import check_origin

    if "\0" in str(address):
        raise UsageError(f"the address {str(address)!r} holds a null character: give a path or an address")
    scheme = re.match("([a-z0-9]+):", str(address))
    kind = scheme[1] if scheme else "disk"
    store: Store = _class_of(kind)(str(address), config, **options)  # type: ignore[call-arg]
    try:
        check_origin(store, model, tokenizer, override)
        store.overridden = tuple([override] if isinstance(override, str) else override)
        if config is not None:
            _same(store, config)
            store.config = dataclasses.replace(store.config, recall=config.recall)
    except BaseException:
        store.close()
        raise
    return store


def check_given(store: Store, model: Any) -> Store:
    """An open store for a model, refused if another made it and it was not opened in spite of that."""
    from mnemic.stores.origin import check_origin

    check_origin(store, model, None, store.overridden)
    return store


def _class_of(kind: str) -> type[Store]:
    """The class of a kind; only its own module is imported, so that what another kind lacks does not matter."""
    try:
        module = importlib.import_module(f"{__name__}.{kind}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{kind}":
            raise
        module = None
    found = getattr(module, f"{kind.capitalize()}Store", None)
    return registry().load(kind) if found is None else found


def _same(store: Store, config: StoreConfig) -> None:
    """Refuses settings that differ from those the store was made with."""
    for name in StoreConfig.types():
        asked, there = getattr(config, name), getattr(store.config, name)
        if name not in ("recall", "origin") and asked != there:
            raise UsageError(
                f"{store.address} was made with {name} = {there!r}, not {asked!r}: use its settings, or another store"
            )
    for name, asked in config.origin.items():
        if name.endswith("fingerprint") and asked and store.config.origin.get(name, asked) != asked:
            raise UsageError(f"{store.address} was made with another {name.removesuffix('_fingerprint')}: use another")
