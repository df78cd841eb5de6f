"""Tasks on the command line: train, resume, evaluate, list, and what goes wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import transformers as hf

import mnemic
from mnemic.cli import main
from mnemic.cli.train import Experiment
from mnemic.data import TASKS
from tests.unit.cli.test_faults import fails
from tests.unit.cli.test_verbs import output
from tests.unit.tasks import colours, make_encoder, questions, word_tokenizer, write_own, write_squad

QUICK = ["--segment-length", "16", "--steps", "4", "--log-every", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """An encoder, a causal model, a task of one's own, and SQuAD in small."""
    root, tokenizer = tmp_path_factory.mktemp("tasks"), word_tokenizer()
    make_encoder("bert", tokenizer, "ForMaskedLM").save_pretrained(root / "bert")
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=len(tokenizer), **shape)).save_pretrained(root / "gpt2")
    for name in ("bert", "gpt2"):
        tokenizer.save_pretrained(root / name)
    write_own(root / "colours", colours(70))
    write_squad(root / "squad", questions())
    return root


@pytest.fixture(autouse=True)
def in_folder(folder, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MNEMIC_DATA", str(folder))


@pytest.mark.parametrize(
    "memory",
    [[], ["--memory", "tokens:count=2"], ["--memory", "tokens:count=2,pool=true"]],
    ids=["plain", "memory", "pooled"],
)
def test_train_and_evaluate_a_task(memory, tmp_path, capsys):
    out = tmp_path / "run"
    printed = output(capsys, "train", "task:colours", "--model", "bert", "--out", out, *QUICK, *memory)
    assert printed.startswith("step 4, training loss ")
    found = json.loads(output(capsys, "evaluate", out, "task:colours", "--json"))
    assert found["model"] == "BertForSequenceClassification"
    assert (found["documents"], found["metrics"]) == (35, ["task"])
    shown = output(capsys, "evaluate", out, "task:colours")
    assert f"accuracy        {found['accuracy']:.6g}" in shown
    config = json.loads((out / "model/config.json").read_text())
    assert config["id2label"] == {"0": "other", "1": "same"}
    assert (out / "model/memory.json").exists() == bool(memory)


def test_questions_too_and_a_memory_that_was_learned_before(tmp_path, capsys, folder):
    pretrained = mnemic.augment(hf.BertForMaskedLM.from_pretrained(folder / "bert"), mnemic.MemoryTokens(count=2))
    pretrained.save_pretrained(tmp_path / "pretrained")
    word_tokenizer().save_pretrained(tmp_path / "pretrained")
    how = ["--segment-length", "14", "--stride", "4", "--steps", "2", "--trainable", "base"]
    output(capsys, "train", "squad", "--model", tmp_path / "pretrained", "--out", tmp_path / "run", *how)
    after = mnemic.load(tmp_path / "run/model")
    assert type(after).__name__ == "BertForQuestionAnswering"
    for name, tensor in pretrained.memory.state_dict().items():
        assert tensor.equal(after.memory.state_dict()[name])
    found = json.loads(output(capsys, "evaluate", tmp_path / "run", "squad", "--window", 14, "--stride", 4, "--json"))
    assert 0 <= found["exact_match"] <= found["f1"] <= 1


def test_the_settings_are_those_of_table_3_where_nothing_else_is_said(tmp_path, capsys):
    def settings(*arguments: str) -> Experiment:
        path = tmp_path / "printed.toml"
        path.write_text(output(capsys, "train", *arguments, "--print-config"))
        return Experiment.load(path)

    usual = settings("task:colours", "--model", "bert")
    assert (usual.steps, usual.warmup, usual.learning_rate, usual.schedule) == (30, 2, 2e-5, "linear")
    assert settings("--config", str(tmp_path / "printed.toml")) == usual
    again = settings("--config", str(tmp_path / "printed.toml"), "--epochs", "4")
    assert (again.steps, again.warmup, again.epochs) == (12, 1, 4)
    changed = settings("task:colours", "--epochs", "2", "--batch-size", "10", "--learning-rate", "0.1")
    assert (changed.steps, changed.learning_rate, changed.weight_decay) == (14, 0.1, 0.1)
    (tmp_path / "short.toml").write_text('corpus = "squad"\nbatch_size = 4\n')
    short = settings("--config", str(tmp_path / "short.toml"))
    assert (short.steps, short.learning_rate, short.segment_length, short.weight_decay) == (12, 5e-5, 384, 0.01)
    assert settings("stdlib").learning_rate == Experiment().learning_rate


def test_resume_needs_only_the_folder(tmp_path, capsys):
    for name in ("straight", "stopped"):
        how = ["--checkpoint-every", "2", "--keep", "9", *QUICK]
        output(capsys, "train", "task:colours", "--model", "bert", "--out", tmp_path / name, *how)
    shutil.rmtree(tmp_path / "stopped/checkpoints/step-00000004")
    shutil.rmtree(tmp_path / "stopped/model")
    (tmp_path / "stopped/report.json").unlink()
    output(capsys, "train", "--resume", "--out", tmp_path / "stopped")
    ours, theirs = (tmp_path / name / "model/model.safetensors" for name in ("stopped", "straight"))
    assert ours.read_bytes() == theirs.read_bytes()
    fails(capsys, 2, "epochs = 3", arguments=["train", "--resume", "--out", tmp_path / "stopped", "--epochs", "3"])


def test_list_tasks(capsys):
    rows = json.loads(output(capsys, "list", "tasks", "--json"))["tasks"]
    assert set(rows) == {*TASKS, "task:<folder>"}
    assert all(rows.values())
    help = output(capsys, "train", "--help")
    assert "task:<folder>" in help
    assert "--epochs" in help


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["task:colours"], "task:colours is a task, which a pretrained encoder learns: name one with --model"),
        (["task:colours", "--model", "gpt2"], "gpt2 is a causal language model (GPT2LMHeadModel)"),
        (["glue/colla", "--model", "bert"], "unknown task 'glue/colla': did you mean 'glue/cola'?"),
        (["task:nowhere", "--model", "bert"], "unknown task 'nowhere'"),
        (["stdlib", "--epochs", "3"], "--epochs is for tasks"),
        (["task:colours", "--model", "./nowhere"], "no model folder ./nowhere"),
        (["task:colours", "--model", "bert", "--segment-length", "2"], "leaves no room for a text: give at least 5"),
        (
            ["task:colours", "--model", "bert"],
            "segment_length = 128, but BertForSequenceClassification has 64 positions",
        ),
        (["squad", "--model", "bert", "--split", "test"], "squad has no 'test' split: it has 'train', 'valid'"),
    ],
)
def test_what_goes_wrong_is_one_sentence(arguments, sentence, tmp_path, capsys):
    fails(capsys, 2, sentence, arguments=["train", *arguments, "--out", tmp_path / "run"])


def test_a_task_without_a_train_split_and_labels_that_do_not_fit(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MNEMIC_DATA", str(tmp_path))
    (tmp_path / "glue/QNLI").mkdir(parents=True)
    (tmp_path / "glue/QNLI/dev.tsv").write_text("index\tquestion\tsentence\tlabel\n0\tA?\tB\tperhaps\n")
    train = ["train", "glue/qnli", "--model", "bert", "--out", tmp_path / "run"]
    fails(capsys, 2, "glue/qnli has no 'train' split: it has 'valid'", arguments=train)
    sentence = "dev.tsv, line 2 has the label 'perhaps': expected one of entailment, not_entailment"
    fails(capsys, 2, sentence, arguments=[*train, "--split", "valid"])


def test_evaluate_wants_a_model_with_a_head(tmp_path, capsys):
    for model, name in (("gpt2", "GPT2LMHeadModel"), ("bert", "BertForMaskedLM")):
        sentence = f"task:colours is a task, and {name} a language model".replace("task:", "")
        fails(capsys, 2, sentence, arguments=["evaluate", model, "task:colours"])


def test_a_model_for_a_task_writes_no_text(tmp_path, capsys):
    assert main(["train", "task:colours", "--model", "bert", "--out", str(tmp_path / "run"), *QUICK]) == 0
    fails(capsys, 2, "does not continue a text", arguments=["generate", tmp_path / "run", "abc"])
    store = ["store", "build", tmp_path / "s", "task:colours", "--model", tmp_path / "run"]
    fails(capsys, 2, "does not predict next tokens", arguments=store)
