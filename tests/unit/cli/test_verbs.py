"""Each verb does what it says: train, evaluate, list, doctor."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

import mnemic
from mnemic.cli import doctor, main
from mnemic.cli.train import Experiment
from tests.unit.cli.conftest import DECODER, train
from tests.unit.cli.test_faults import fails


def output(capsys, *arguments: object) -> str:
    """What a command that succeeds prints to stdout."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


# train


def test_train_leaves_a_model_that_loads_with_its_memory(run: Path) -> None:
    model = mnemic.load(run / "model")
    assert [config.to_dict() for config in model.memory.configs] == [mnemic.MemoryTokens(count=2).to_dict()]
    assert model.config.hidden_size == 16
    assert json.loads((run / "report.json").read_text())["step"] == 4


def test_train_records_what_was_asked_for(run: Path, corpus: Path) -> None:
    experiment = Experiment.load(run / "experiment.toml")
    assert (experiment.corpus, experiment.model) == (str(corpus), DECODER)
    assert (experiment.memory, experiment.steps, experiment.tokenizer) == (["tokens:count=2"], 4, "byte")


def test_the_same_command_gives_the_same_weights(run: Path, corpus: Path, tmp_path: Path) -> None:
    assert train(corpus, tmp_path / "again", "--memory", "tokens:count=2") == 0
    assert (tmp_path / "again/model/model.safetensors").read_bytes() == (run / "model/model.safetensors").read_bytes()


def test_a_config_file_is_the_base_and_the_command_line_wins(run: Path, tmp_path: Path, capsys) -> None:
    text = output(capsys, "train", "--config", run / "experiment.toml", "--steps", 2, "--print-config")
    (tmp_path / "changed.toml").write_text(text)
    changed, original = Experiment.load(tmp_path / "changed.toml"), Experiment.load(run / "experiment.toml")
    assert changed.steps == 2
    changed.steps = 4
    assert changed == original


def test_resume_needs_only_the_folder_and_ends_like_a_run_that_never_stopped(
    run: Path, corpus: Path, tmp_path: Path, capsys
) -> None:
    out = tmp_path / "stopped"
    assert train(corpus, out, "--memory", "tokens:count=2", "--checkpoint-every", "2", "--keep", "9") == 0
    shutil.rmtree(out / "checkpoints/step-00000004")
    shutil.rmtree(out / "model")
    (out / "report.json").unlink()
    report = json.loads(output(capsys, "train", "--resume", "--out", out, "--json"))
    assert report["step"] == 4
    assert report["losses"] == json.loads((run / "report.json").read_text())["losses"]
    assert (out / "model/model.safetensors").read_bytes() == (run / "model/model.safetensors").read_bytes()


def test_a_saved_model_can_be_trained_further(run: Path, corpus: Path, tmp_path: Path) -> None:
    arguments = [
        "--batch-size",
        "2",
        "--segment-length",
        "16",
        "--warmup",
        "1",
        "--steps",
        "1",
        "--trainable",
        "memory",
    ]
    assert main(["train", str(corpus), "--model", str(run), "--out", str(tmp_path / "further"), *arguments]) == 0
    before, after = mnemic.load(run / "model").state_dict(), mnemic.load(tmp_path / "further/model").state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("memory" in name for name in changed)


def test_without_a_memory_the_model_is_an_ordinary_one(corpus: Path, tmp_path: Path, capsys) -> None:
    from transformers import AutoModelForCausalLM

    assert train(corpus, tmp_path / "plain") == 0
    assert not (tmp_path / "plain/model/memory.json").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain/model")
    assert not hasattr(model, "memory")
    assert output(capsys, "generate", tmp_path / "plain", "abc", "--greedy", "--no-memory").startswith("abc")


# evaluate


def test_evaluate_prints_the_figures_of_every_metric(run: Path, corpus: Path, tmp_path: Path, capsys) -> None:
    output(capsys, "store", "build", tmp_path / "s", corpus, "--model", run)
    metrics = ("--metrics", "retrieval_accuracy,frequency_buckets", "--memory", f"output:external={tmp_path / 's'},k=8")
    found = json.loads(output(capsys, "evaluate", run, corpus, "--window", 32, *metrics, "--json"))
    printed = output(capsys, "evaluate", run, corpus, "--window", 32, *metrics).splitlines()
    lines = dict(line.split("  ", 1) for line in printed)
    lines = {name.strip(): value.strip() for name, value in lines.items()}
    for depth, share in found["retrieval_accuracy"].items():
        assert float(lines[f"retrieval accuracy {depth}"]) == pytest.approx(share, rel=1e-5)
    for bucket, figures in found["frequency_buckets"].items():
        assert lines[f"frequency buckets {bucket} tokens"] == f"{figures['tokens']:,}"


def test_what_tuning_found_is_kept(run: Path, corpus: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """With its gate, and found again from another working directory."""
    monkeypatch.chdir(tmp_path)
    output(capsys, "store", "build", "s", corpus, "--model", run)
    memory = ("--memory", "output:external=s,k=8,retrieve=0.5")
    arguments = ["evaluate", run, corpus, "--window", 32, *memory, "--json", "--tune", "--save", "tuned"]
    found = json.loads(output(capsys, *arguments))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = json.loads(output(capsys, "evaluate", "../tuned", corpus, "--window", 32, "--json"))
    assert again["perplexity"] == pytest.approx(found["perplexity"], rel=1e-6)
    assert output(capsys, "generate", "../tuned", "abc", "--max-new-tokens", 4).startswith("abc")
    fails(capsys, 2, "tuned exists already", arguments=[*arguments[:-1], "../tuned"])
    fails(capsys, 2, "--save keeps the memory that --tune finds", arguments=["evaluate", run, corpus, "--save", "x"])


def test_evaluate_says_that_it_measures_what_it_tuned_on(run: Path, corpus: Path, capsys) -> None:
    for split, said in (("valid", True), ("test", False)):
        how = ["--window", "32", "--split", split, "--memory", "output", "--tune"]
        assert main(["evaluate", str(run), str(corpus), *how]) == 0
        assert ("text that the settings were chosen on" in capsys.readouterr().err) == said


def test_evaluate_tunes_on_valid_and_measures_on_another_split(run: Path, corpus: Path, capsys) -> None:
    reading = ("--window", 32, "--split", "test", "--json")
    assert main(list(map(str, ["evaluate", run, corpus, *reading, "--memory", "output:long=64", "--tune"]))) == 0
    printed, said = capsys.readouterr()
    found = json.loads(printed)
    assert found["tuned"].startswith("output")
    assert found["tuned"] in said
    assert found["valid_perplexity"] <= found["valid_perplexity_plain"]
    again = json.loads(output(capsys, "evaluate", run, corpus, *reading, "--memory", found["tuned"]))
    assert again["nll"] == found["nll"]
    on_valid = json.loads(output(capsys, "evaluate", run, corpus, "--window", 32, "--json", "--memory", found["tuned"]))
    assert on_valid["perplexity"] == pytest.approx(found["valid_perplexity"], rel=1e-4)


def test_evaluate_prints_what_the_library_says(run: Path, corpus: Path, capsys) -> None:
    printed = json.loads(output(capsys, "evaluate", run, corpus, "--window", 32, "--split", "test", "--json"))
    model, tokenizer = mnemic.load(run / "model"), mnemic.load_tokenizer(run / "model")
    assert printed == mnemic.evaluate(model, tokenizer, str(corpus), window=32, split="test")
    assert f"{printed['perplexity']:.6g}" in output(capsys, "evaluate", run, corpus, "--window", 32, "--split", "test")


# list and doctor


def test_list_shows_each_registry(capsys) -> None:
    from mnemic.data import CORPORA
    from mnemic.hf.anatomy import ARCHITECTURES
    from mnemic.memories import registry

    found = json.loads(output(capsys, "list", "--json"))
    assert set(registry()) <= set(found["memories"])
    assert set(CORPORA) <= set(found["corpora"])
    assert set(found["architectures"]) == set(ARCHITECTURES)
    assert "tokens:count=10" in found["memories"]
    assert "decoder:hidden_size=256" in found["decoder"]
    assert all(text for rows in found.values() for text in rows.values()), "a row says nothing"
    assert "tokens" in output(capsys, "list", "memories")


def test_doctor_checks_each_memory_and_is_well(capsys) -> None:
    found = json.loads(output(capsys, "doctor", "--json"))
    assert set(found["checks"].values()) == {"OK"}
    assert found["machine"]["torch"].startswith(torch.__version__.partition("+")[0])


def test_doctor_says_why_faiss_cannot_be_imported(capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.delitem(doctor.CHECKS, "memory: train, save, load, generate")
    assert main(["doctor", "--json"]) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    for answer in (found["machine"]["faiss build"], found["checks"]["faiss: same as numpy"]):
        assert answer.startswith("failed: ModuleNotFoundError: import of faiss")
    assert found["checks"]["files: replace and lock"] == "OK"
    assert "Traceback" not in captured.err


def test_doctor_fails_if_a_check_does(capsys, monkeypatch) -> None:
    import faiss

    monkeypatch.setattr(faiss, "IndexFlatL2", faiss.IndexFlatIP)  # the other sign: neighbours become strangers
    monkeypatch.delitem(doctor.CHECKS, "memory: train, save, load, generate")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "failed: CheckFailed: FAISS and numpy name different neighbours" in out
    assert out.endswith("failed: faiss: same as numpy\n")
