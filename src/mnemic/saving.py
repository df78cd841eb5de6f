"""An augmented model on disk.

memory.json          schema, library version, each memory's settings, the base and its fingerprint, checksums
model*.safetensors   the memories' weights; the base's too if they were trained or can be had nowhere else
config.json, ...     what transformers writes beside the base's weights, only if those are here
README.md            the model card
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

import mnemic
from mnemic import models
from mnemic.errors import DamagedError, MnemicError, UsageError
from mnemic.files import additions, checksum, os_errors_of_safetensors, safe_join, write_text
from mnemic.hf.fingerprint import MEMORY, fingerprint
from mnemic.memories import registry
from mnemic.memories.config import MemoryConfig
from mnemic.pages import large_empty

SCHEMA = 1
RECORD, WEIGHTS, CARD = "memory.json", "model.safetensors", "README.md"


def save(model: Any, folder: Path, save_whole: Callable[..., None], **options: Any) -> None:
    """Writes an augmented model; `save_whole` is transformers' own save_pretrained."""
    for name, instead in (("push_to_hub", "use model.push_to_hub(name)"), ("variant", "leave it out")):
        if options.pop(name, None):
            raise UsageError(f"save_pretrained({name}=...) does not go with a memory: {instead}")
    if folder.is_file():
        raise UsageError(f"{folder} is a file: save_pretrained() needs a folder")
    state = options.pop("state_dict", None) or model.state_dict()
    if {name for name in state if not name.startswith(MEMORY)} != model.memory.base_names:
        raise UsageError(
            "the base has other parts than when it got its memory (an adapter?): put them in or take them out first, "
            "for PEFT with merge_and_unload(), and save then"
        )
    base = describe_base(model)
    base["included"] = not recoverable(model, base, folder)
    with additions(folder, last=RECORD) as temporary:
        if base["included"]:
            save_whole(temporary, state_dict=state, **options)
        else:
            memory = {name: tensor.contiguous() for name, tensor in state.items() if name.startswith(MEMORY)}
            with os_errors_of_safetensors():
                save_file(memory, temporary / WEIGHTS, metadata={"format": "pt"})
        record = {
            "schema": SCHEMA,
            "mnemic": mnemic.__version__,
            "transformers": transformers.__version__,
            "memories": [{"memory": config.memory(), **config.saved()} for config in model.memory.configs],
            "anatomy": model.memory.anatomy and model.memory.anatomy.to_dict(),
            "base": base,
            "checksums": {file.name: checksum(file) for file in sorted(temporary.glob("*.safetensors"))},
        }
        write_text(temporary / CARD, card(model, record))
        write_text(temporary / RECORD, json.dumps(record, indent=2) + "\n")
        written = {item.name for item in temporary.iterdir()}
    # what an earlier save left would be taken for a part of this one
    for pattern in ("model*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json"):
        for item in folder.glob(pattern):
            if item.name not in written:
                item.unlink()


def describe_base(model: Any) -> dict[str, Any]:
    """What is needed to have the base again: class, source, settings, precision, and the fingerprint of its weights."""
    source = model.config._name_or_path
    return {
        "class": type(model).__name__,
        "name_or_path": str(Path(source).resolve()) if source and Path(source).is_dir() else source,
        "fingerprint": fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
        "config": model.config.to_dict(),
    }


def recoverable(model: Any, base: dict[str, Any], folder: Path) -> bool:
    """Whether the base's weights, as they are now, can be loaded again from where they came from.

    That is tried, once for each model: a base that was changed before it got its memory looks just like its source.
    """
    source = base["name_or_path"]
    if not source or base["fingerprint"] != model.memory.base_fingerprint or Path(source) == folder.resolve():
        return False
    if model.memory.base_recoverable is None:
        try:
            found = load_base(folder, base | {"included": False}, local_files_only=True)
            model.memory.base_recoverable = fingerprint(found) == base["fingerprint"]
        except (MnemicError, OSError, ValueError, RuntimeError):
            model.memory.base_recoverable = False
    return model.memory.base_recoverable


def read_record(folder: Path) -> dict[str, Any]:
    """The content of memory.json."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{folder} holds no augmented model ({RECORD} is missing): give a folder that save_pretrained() wrote"
        ) from None
    except ValueError as error:
        raise DamagedError(f"{folder / RECORD} is damaged ({error}): save the model again") from None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise UsageError(f"{folder / RECORD} was written by another version of mnemic: this one reads schema {SCHEMA}")
    if missing := {"memories", "base", "anatomy", "checksums"} - record.keys():
        raise DamagedError(f"{folder / RECORD} is damaged ({', '.join(sorted(missing))} missing): save the model again")
    return record


def check_files(folder: Path, record: dict[str, Any]) -> None:
    """Raises DamagedError if a file of weights is not what was saved."""
    for name, expected in record["checksums"].items():
        path = safe_join(folder, name)
        if not path.is_file() or checksum(path) != expected:
            raise DamagedError(f"{path} is missing or was altered since it was saved: save the model again")


def read_configs(record: dict[str, Any]) -> list[MemoryConfig]:
    """The settings of each memory in a record."""
    configs = []
    for values in record["memories"]:
        values = dict(values)
        configs.append(registry().load(values.pop("memory")).from_dict(values))
    return configs


def load_base(folder: Path, base: dict[str, Any], **options: Any) -> PreTrainedModel:
    """The base model, from the folder or from where it first came from; with the settings it had."""
    name = base["class"]
    kind = getattr(transformers, name, None) or getattr(models, name, None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise UsageError(f"there is no model class {name!r} in this transformers: use load(folder, base=model)")
    quiet = {"_keys_to_ignore_on_load_unexpected": [rf"^{MEMORY}"], "__module__": kind.__module__}
    ours: Any = type(name, (kind,), quiet)
    source = folder if base["included"] else base["name_or_path"]
    config = kind.config_class.from_dict(base["config"])  # type: ignore[union-attr]
    precision = getattr(torch, base["dtype"])
    try:
        model = ours.from_pretrained(
            source, config=config, dtype=precision, attn_implementation=base["attention"], **options
        )
    except OSError as error:
        raise UsageError(
            f"the base model {source} of {folder} could not be loaded ({str(error).splitlines()[0]}): "
            "make it available or pass it, load(folder, base=model)"
        ) from None
    model.__class__ = kind
    model.config._name_or_path = str(base["name_or_path"])
    return model


def load_memory(model: Any, folder: Path, record: dict[str, Any], check_base: bool, mapped: bool) -> None:
    """Fills an augmented model's memories from a folder, after checking that its base is the one recorded.

    mapped: what is large stays in its file.
    """
    if check_base and model.memory.base_fingerprint != record["base"]["fingerprint"]:
        raise UsageError(
            f"the memories in {folder} were trained with other base weights ({record['base']['class']} from "
            f"{record['base']['name_or_path'] or folder}): pass the right base, or check_base=False to go on regardless"
        )
    state: dict[str, torch.Tensor] = {}
    for name in record["checksums"]:
        with safe_open(safe_join(folder, name), framework="pt") as file:
            state |= {key: file.get_tensor(key) for key in file.keys() if key.startswith(MEMORY)}  # noqa: SIM118
    own = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(MEMORY)}
    if own.keys() != state.keys():
        raise DamagedError(
            f"{folder}: the weights of {', '.join(sorted(own.keys() ^ state.keys()))} do not fit {RECORD}"
        )
    # a model that was made narrower (model.to(torch.bfloat16)) computes as before only with all that it had
    large = {name: tensor for name, tensor in state.items() if own[name].is_meta or own[name].dtype != tensor.dtype}
    if wrong := [name for name, tensor in large.items() if tensor.shape != own[name].shape]:
        raise DamagedError(f"{folder}: the weights of {wrong[0]} do not have the shape that {RECORD} says")
    model.load_state_dict({name: tensor for name, tensor in state.items() if name not in large}, strict=False)
    taken = large if mapped else {name: copied(tensor, model.device) for name, tensor in large.items()}
    model.load_state_dict(taken, strict=False, assign=True)


def copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on a device, in large pages where there are some."""
    return large_empty(*tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor)


def card(model: Any, record: dict[str, Any]) -> str:
    """The model card, filled in."""
    base = record["base"]
    count = {True: 0, False: 0}
    for name, parameter in model.named_parameters():
        count[name.startswith(MEMORY)] += parameter.numel()
    settings = "\n".join(
        f"| {values['memory']} | {key} | {value} | {config.help()[key]} |"
        for values, config in zip(record["memories"], model.memory.configs, strict=True)
        for key, value in values.items()
        if key not in ("memory", "schema")
    )
    link = f"base_model: {base['name_or_path']}\n" if base["name_or_path"] and not base["included"] else ""
    return f"""---
library_name: mnemic
{link}tags:
- mnemic
{"".join(f"- {values['memory']}{chr(10)}" for values in record["memories"])}---

# {base["class"]} with a memory

`{base["class"]}` ({base["name_or_path"] or "made from a config"}), given a memory with mnemic {record["mnemic"]}.

| memory | setting | value | meaning |
|---|---|---|---|
{settings}

- Parameters: {count[True]:,} in the memory, {count[False]:,} in the base.
- The base's weights are {"in this folder" if base["included"] else "not here: they were not trained"}.
- Fingerprint of the base: `{base["fingerprint"]}`.

```python
import mnemic

model = mnemic.load("path/to/this/folder")
```
"""
