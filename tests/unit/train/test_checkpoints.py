"""Checkpoints: exact round trips, damage noticed, tied weights, and full or forbidden disks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from mnemic.errors import DamagedError, MnemicError, UsageError
from mnemic.train.checkpoints import (
    PARTS,
    Checkpoint,
    checkpoint_steps,
    load_checkpoint,
    load_model_tensors,
    load_newest,
    model_tensors,
    save_checkpoint,
)
from mnemic.train.state import random_state, set_random_state


def make(step: int, size: int = 8) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    tensors = {part: {"a.b/c": torch.randn(size, generator=generator)} for part in PARTS}
    return Checkpoint(step, tensors, {"seen": step * 10, "nothing": None, "float": 0.1 + step})


def same(left: Checkpoint, right: Checkpoint) -> bool:
    return (
        left.step == right.step
        and left.state == right.state
        and all(
            left.tensors[part].keys() == right.tensors[part].keys()
            and all(torch.equal(left.tensors[part][k], right.tensors[part][k]) for k in left.tensors[part])
            for part in PARTS
        )
    )


def test_round_trip_and_the_newest_are_kept(tmp_path: Path) -> None:
    assert load_newest(tmp_path) is None
    for step in (0, 5, 10, 99_999_999, 100_000_000):
        save_checkpoint(tmp_path, make(step), keep=3)
    assert checkpoint_steps(tmp_path) == [100_000_000, 99_999_999, 10]
    newest = load_newest(tmp_path)
    assert newest is not None
    assert same(newest, make(100_000_000))
    assert same(load_checkpoint(tmp_path, 10), make(10))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_tensors_of_any_kind_and_shape(tmp_path: Path, dtype: torch.dtype) -> None:
    big = (torch.randn(6, 4) * 10).to(dtype)
    tensors = {"whole": big, "view": big[1:3], "turned": big.t(), "scalar": big[0, 0], "empty": big[:0]}
    save_checkpoint(tmp_path, Checkpoint(1, dict.fromkeys(PARTS, tensors)), keep=1)
    back = load_checkpoint(tmp_path, 1).tensors["model"]
    for name, tensor in tensors.items():
        assert back[name].dtype == dtype
        assert torch.equal(back[name], tensor)


@pytest.mark.parametrize("name", [*(f"{part}.safetensors" for part in PARTS), "state.json", "checksums.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "empty"])
def test_damage_is_noticed_and_the_one_before_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture, name: str, harm: str
) -> None:
    save_checkpoint(tmp_path, make(1), keep=2)
    save_checkpoint(tmp_path, make(2), keep=2)
    path = tmp_path / "step-00000002" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if harm == "remove":
        path.unlink()
    else:
        path.write_bytes({"flip": bytes(data), "cut": bytes(data[:-1]), "empty": b""}[harm])
    with pytest.raises(DamagedError, match="step-00000002 is damaged"):
        load_checkpoint(tmp_path, 2)
    newest = load_newest(tmp_path)
    assert newest is not None
    assert same(newest, make(1))
    assert "going on from step 1" in capsys.readouterr().err
    assert checkpoint_steps(tmp_path) == [1]


def test_all_damaged_is_an_error_and_nothing_is_removed(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make(1), keep=2)
    save_checkpoint(tmp_path, make(2), keep=2)
    for step in (1, 2):
        (tmp_path / f"step-{step:08d}" / "state.json").write_text("{}")
    with pytest.raises(DamagedError, match=r"no checkpoint in .* is intact"):
        load_newest(tmp_path)
    assert checkpoint_steps(tmp_path) == [2, 1]


def test_a_checkpoint_copied_to_another_step_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make(3), keep=2)
    (tmp_path / "step-00000003").rename(tmp_path / "step-00000004")
    with pytest.raises(DamagedError, match="another step"):
        load_checkpoint(tmp_path, 4)


def test_a_full_disk_leaves_the_earlier_checkpoint(small_disk: Path) -> None:
    root = small_disk / "checkpoints"
    save_checkpoint(root, make(1, size=10_000), keep=2)
    with pytest.raises(MnemicError, match="the disk is full"):
        save_checkpoint(root, make(2, size=200_000), keep=2)
    assert [item.name for item in root.iterdir()] == ["step-00000001"]
    newest = load_newest(root)
    assert newest is not None
    assert same(newest, make(1, size=10_000))
    save_checkpoint(root, make(2, size=10_000), keep=2)  # there is room again: nothing half-written takes it


def test_a_disk_without_permission(read_only_disk: Path) -> None:
    with pytest.raises(MnemicError, match="no permission to write"):
        save_checkpoint(read_only_disk / "checkpoints", make(1), keep=2)


def tiny(**options: object) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, **options))


def test_tied_weights_are_stored_once_and_stay_tied() -> None:
    torch.manual_seed(0)
    model, other = tiny(), tiny()
    tensors, tied = model_tensors(model)
    assert tied == {"lm_head.weight": "transformer.wte.weight"}
    assert "lm_head.weight" not in tensors
    load_model_tensors(other, {name: tensor.clone() for name, tensor in tensors.items()}, tied)
    assert other.lm_head.weight is other.transformer.wte.weight
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)


def test_untied_weights_that_are_equal_stay_two() -> None:
    model = tiny(tie_word_embeddings=False)
    model.lm_head.weight.data.copy_(model.transformer.wte.weight.data)
    tensors, tied = model_tensors(model)
    assert tied == {}
    assert "lm_head.weight" in tensors


def test_weights_of_another_model_are_refused() -> None:
    tensors, tied = model_tensors(tiny())
    larger = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(UsageError, match="another model"):
        load_model_tensors(larger, tensors, tied)
    deeper = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2))
    with pytest.raises(UsageError, match=r"transformer\.h\.1\..* it has nothing"):
        load_model_tensors(deeper, tensors, tied)


def test_random_generators_go_on_where_they_were() -> None:
    import random

    random.gauss(0, 1)  # leaves a second value waiting, which must be kept too
    np.random.standard_normal()
    tensors, values = random_state()
    values = json.loads(json.dumps(values))

    def draw() -> list[float]:
        return [random.gauss(0, 1), random.random(), np.random.standard_normal(), *torch.rand(2).tolist()]

    first = draw()
    assert draw() != first
    set_random_state(tensors, values)
    assert draw() == first
