"""Editing by chosen slots, LoRA or all weights: runs in its smoke setting, goes on where it stopped, makes a table."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mnemic.cli.loading import load_model, read_new_model
from mnemic.errors import UsageError
from tests.reproductions.runner import HERE, imported, runner

EDITING = HERE / "product_keys" / "editing"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reproductions")
    shutil.copytree(EDITING, folder / "product_keys" / "editing", ignore=shutil.ignore_patterns("results"))
    return folder


def run(root: Path) -> dict[str, Any]:
    runner.run(root, ["product_keys", "editing", "smoke", "--runs", str(root / "runs")])
    return json.loads((root / "product_keys" / "editing" / "results" / "smoke.json").read_text())


def test_editing_runs_in_its_smoke_setting_and_goes_on_where_it_stopped(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = run(root)
    found, rates = results["seeds"]["0"], results["settings"]["rates"]
    assert [(t["way"], t["rate"]) for t in found["trials"]] == [
        (w, rate) for w, tried in rates.items() for rate in tried
    ]
    for losses in (found["before"], *found["trials"]):
        assert all(math.isfinite(losses[split][text]) for split in ("valid", "test") for text in ("home", "other"))
    numbers = {trial["way"]: trial["numbers"] for trial in found["trials"]}
    assert numbers["slots"] == 20 * 16
    assert 0 < numbers["lora"] < numbers["full"]
    valid = {trial["rate"]: trial["valid"]["other"] for trial in found["trials"] if trial["way"] == "full"}
    assert valid[found["best"]["full"]] == min(valid.values())
    (report,) = (root / "runs").glob("editing-*/report.json")
    report.unlink()
    shutil.rmtree(next((root / "runs").glob("editing-*/checkpoints")))  # nothing is trained again without noticing
    again = run(root)["seeds"]["0"]
    assert again == found
    assert not (report.parent / "checkpoints").exists()
    imported(EDITING / "run.py").table(root / "product_keys" / "editing", "smoke")
    lines = (root / "product_keys" / "editing" / "README.md").read_text().splitlines()
    (row,) = [line for line in lines if line.startswith("| chosen slots | -11%")]
    trial = found["trials"][-1]["test"]
    rose = trial["home"] - found["before"]["test"]["home"]
    assert row == f"| chosen slots | -11% | 320 | {trial['other']:.3f} | {trial['home']:.3f} | {rose:+.3f} |"
    assert sum(line.startswith(("| all weights", "| LoRA", "| chosen")) for line in lines) == 3 + len(found["trials"])


def test_each_way_changes_what_it_is_to_change(root: Path) -> None:
    run(root)
    module = imported(EDITING / "run.py")
    pupil = module.Pupil(module.Editing.load(EDITING / "smoke.toml"), 0, root / "runs")
    model, tokenizer = pupil.load()
    ids = torch.arange(20)[None]
    before = model(input_ids=ids).logits
    module.lora(pupil, model, tokenizer)
    assert torch.equal(model(input_ids=ids).logits, before)
    learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert learning
    assert all("lora_" in name and not name.startswith("memory.") for name in learning)
    for part in ("self_attn", "mlp"):
        assert any(part in name for name in learning), learning
    model, tokenizer = load_model(str(pupil.folder))
    module.chosen_slots(pupil, model, tokenizer)
    assert int(model.memory.product_keys.tables["1"].learning.sum()) == 20


@pytest.mark.parametrize("size", ["smoke", "small", "paper"])
def test_settings_of_all_sizes_can_be_read(size: str) -> None:
    settings = imported(EDITING / "run.py").Editing.load(EDITING / f"{size}.toml")
    assert read_new_model(settings.model) is not None
    assert settings.evaluate["window"] == settings.learn["segment_length"] == settings.train["segment_length"]


def test_rates_are_needed_for_each_way() -> None:
    module = imported(EDITING / "run.py")
    smoke = module.Editing.load(EDITING / "smoke.toml").to_dict()
    with pytest.raises(UsageError, match="rates are of full, lora, slots"):
        module.Editing.from_dict({**smoke, "rates": {"full": [0.1]}})


def test_what_the_readme_shows_is_what_was_measured(tmp_path: Path) -> None:
    if not (EDITING / "results" / "small.json").exists():
        assert "Not run yet" in (EDITING / "README.md").read_text()
        return
    shutil.copytree(EDITING, tmp_path / "editing")
    imported(EDITING / "run.py").table(tmp_path / "editing", "small")
    assert (tmp_path / "editing" / "README.md").read_text() == (EDITING / "README.md").read_text()
