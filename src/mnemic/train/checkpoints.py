"""Checkpoints: whole or not there, checked when read, and without pickle.

    checkpoints/step-00000500/
        model.safetensors      weights and buffers; a tied weight once
        optimizer.safetensors  "parameter/quantity" -> tensor
        carry.safetensors      what each row carries from segment to segment (XL cache)
        random.safetensors     states of the random generators: "rank of the process/generator" -> tensor
        state.json             everything else: step, config, place in the data, names of tied weights
        checksums.json         a checksum for each of the files above

The folder is written under a temporary name and renamed when complete (`mnemic.files`). If the newest checkpoint is
damaged, the one before it is used and a line says so: training is deterministic, so only time is lost, and the run
ends as if nothing had happened. If none is intact, reading is an error.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mnemic.augment import AugmentedModel
from mnemic.errors import DamagedError, UsageError
from mnemic.files import checksum, new_folder, os_errors_of_safetensors, remove_unfinished
from mnemic.train.terminal import say

PARTS = ("model", "optimizer", "carry", "random")


@dataclass
class Checkpoint:
    """What a run needs to go on: named tensors for each of PARTS, and a JSON-able state."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any] = field(default_factory=dict)


def checkpoint_steps(root: Path) -> list[int]:
    """The steps that have a checkpoint under `root`, newest first."""
    found = (re.fullmatch(r"step-(\d+)", item.name) for item in root.glob("step-*"))
    return sorted((int(match[1]) for match in found if match), reverse=True)


def save_checkpoint(root: Path, checkpoint: Checkpoint, keep: int) -> None:
    """Writes a checkpoint durably, then removes all but the newest `keep`."""
    with new_folder(_folder(root, checkpoint.step)) as folder:
        for part in PARTS:
            with os_errors_of_safetensors():
                save_file(_storable(checkpoint.tensors[part]), folder / f"{part}.safetensors")
        (folder / "state.json").write_text(json.dumps({"step": checkpoint.step, **checkpoint.state}))
        sums = {item.name: checksum(item) for item in sorted(folder.iterdir())}
        (folder / "checksums.json").write_text(json.dumps(sums, indent=2))
    for step in checkpoint_steps(root)[keep:]:
        shutil.rmtree(_folder(root, step))


def load_newest(root: Path) -> Checkpoint | None:
    """The newest intact checkpoint, or None where there is none at all; damaged newer ones are removed."""
    remove_unfinished(root)
    damage: list[tuple[int, DamagedError]] = []
    for step in checkpoint_steps(root):
        try:
            checkpoint = load_checkpoint(root, step)
        except DamagedError as error:
            damage.append((step, error))
            continue
        for bad, why in damage:
            say(f"{why}; it is removed, going on from step {step}")
            shutil.rmtree(_folder(root, bad))
        return checkpoint
    if damage:
        raise DamagedError(f"no checkpoint in {root} is intact ({damage[0][1]}): start again in another out folder")
    return None


def load_checkpoint(root: Path, step: int) -> Checkpoint:
    """Reads one checkpoint; DamagedError if a file is missing, altered or not what it should be."""
    folder = _folder(root, step)
    expected = [f"{part}.safetensors" for part in PARTS] + ["state.json"]
    try:
        sums = json.loads((folder / "checksums.json").read_text(encoding="utf-8"))
        for name in expected:
            if checksum(folder / name) != sums[name]:
                raise DamagedError(f"checkpoint {folder} is damaged: {name} is not what was written")
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        tensors = {part: load_file(folder / f"{part}.safetensors") for part in PARTS}
        if state.pop("step") != step:
            raise DamagedError(f"checkpoint {folder} is damaged: it was written for another step")
    except (FileNotFoundError, KeyError, TypeError, ValueError, AttributeError, SafetensorError) as error:
        raise DamagedError(f"checkpoint {folder} is damaged: {type(error).__name__}: {error}") from error
    return Checkpoint(step, tensors, state)


def model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A model's weights and buffers, each shared one under its first name only, and other name -> first name."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in model.state_dict().items():
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in first:
            tied[name] = first[place]
        else:
            first[place] = name
            tensors[name] = tensor
    return tensors, tied


def load_model_tensors(model: nn.Module, tensors: dict[str, Tensor], tied: dict[str, str]) -> None:
    """The inverse of `model_tensors`; UsageError if the model has other parameters or shapes."""
    full = {**tensors, **{name: tensors[original] for name, original in tied.items()}}
    own = model.state_dict()
    for name in sorted(own.keys() | full.keys()):
        here, there = (tuple(side[name].shape) if name in side else "nothing" for side in (own, full))
        if here != there:
            raise UsageError(
                f"the checkpoint belongs to another model: at {name!r} it has {there}, {type(model).__name__} has "
                f"{here}; give the model the run was started with, or another out folder"
            )
    model.load_state_dict(full)


def model_settings(model: Any) -> dict[str, Any]:
    """The settings of a model and its memories, without what loading and saving change and arithmetic does not need."""
    settings: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    bookkeeping = ("_name_or_path", "architectures", "dtype", "transformers_version")
    found = {key: value for key, value in settings.items() if key not in bookkeeping}
    for memory in model.memory.configs if isinstance(model, AugmentedModel) else []:
        own = {f"{memory.memory()}.{key}": value for key, value in memory.to_dict().items() if key != "external"}
        found |= json.loads(json.dumps(own))
    return found


def _folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def _storable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as safetensors takes them: contiguous, no two in the same storage."""
    storages: set[int] = set()
    storable = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        tensor = tensor.detach().contiguous()
        storable[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return storable
