"""What a store was made from, and whether it fits what it is to be used with."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import xxhash

from mnemic.errors import UsageError, unknown_name
from mnemic.stores.base import Store
from mnemic.stores.config import Origin

CHECKED = ("model", "tokenizer")


def origin_of(model: Any, tokenizer: Any, **more: Any) -> Origin:
    """The names and fingerprints of a model and a tokenizer; either may be None."""
    found: dict[str, Any] = {}
    if model is not None:
        from mnemic.hf.fingerprint import fingerprint

        found |= {"model": model.config._name_or_path, "model_fingerprint": fingerprint(model)}
        found["memory_fingerprint"] = memory_fingerprint(model)
    if tokenizer is not None:
        from mnemic.data import tokenizer_fingerprint

        found |= {"tokenizer": tokenizer.name_or_path, "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer)}
    return Origin(**found, **more)


def memory_fingerprint(model: Any) -> str:
    """A checksum of those memories in a model on which keys depend, as on any weight; "" if there are none."""
    memory = getattr(model, "memory", None)
    handles = {name: handle for name, handle in memory.handles.items() if handle.changes_keys} if memory else {}
    if not handles:
        return ""
    from torch import nn

    from mnemic.hf.fingerprint import fingerprint

    settings = json.dumps({name: handle.config.for_keys() for name, handle in handles.items()}, sort_keys=True)
    return xxhash.xxh3_128_hexdigest((fingerprint(nn.ModuleDict(handles)) + settings).encode())


def check_origin(store: Store, model: Any, tokenizer: Any, override: Iterable[str]) -> None:
    """Refuses a store whose rows another model or tokenizer made, but for those that `override` names."""
    override = [override] if isinstance(override, str) else list(override)
    for name in override:
        if name not in CHECKED:
            raise unknown_name("thing to override", name, CHECKED)
    there = Origin.from_dict(dict(store.config.origin))
    asked = origin_of(None if "model" in override else model, None if "tokenizer" in override else tokenizer)
    for what in CHECKED:
        made, wanted = (getattr(origin, f"{what}_fingerprint") for origin in (there, asked))
        if made and wanted and made != wanted:
            raise UsageError(
                f"the rows of {store.address} were made by another {what} ({getattr(there, what) or 'unnamed'}, "
                f"fingerprint {made[:12]}) than this one ({getattr(asked, what) or 'unnamed'}, {wanted[:12]}): what it "
                f'finds would be wrong. Build a store with this {what}, or open it with override=["{what}"]'
            )
    if asked.model_fingerprint and there.model_fingerprint and asked.memory_fingerprint != there.memory_fingerprint:
        raise UsageError(
            f"the rows of {store.address} were made with other memories in the model than it has now: what it finds "
            'would be wrong. Give the model as it was, or override=["model"]'
        )
