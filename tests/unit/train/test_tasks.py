"""Learning tasks: losses against one row at a time, exact resume, heads for encoders, and the settings of Table 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import mnemic
from mnemic.data.examples import ExampleBatches, TokenizedExamples, rows_of
from mnemic.data.tasks import Task
from mnemic.errors import UsageError
from mnemic.train.config import TrainConfig
from mnemic.train.objectives import make_objective, model_kind
from mnemic.train.tasks import Classification, Spans
from tests.unit.tasks import colours, counts, make_encoder, questions, reader, word_tokenizer
from tests.unit.train.test_resume import Stop, stop_at

KINDS = ["bert", "distilbert", "roberta"]
TASKS = {"colours": colours, "counts": counts, "questions": questions}
LENGTH = 14  # some questions need several windows of it


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


def model_for(task: Task, name: str, tokenizer: Any, memory: bool = False, **options: Any) -> Any:
    heads = {"classification": "ForSequenceClassification", "spans": "ForQuestionAnswering"}
    labels = {"num_labels": len(task.labels) or 1} if task.kind == "classification" else {}
    model = make_encoder(name, tokenizer, heads[task.kind], **labels, **options)
    return mnemic.augment(model, mnemic.MemoryTokens(count=2)) if memory else model


def rows(task: Task, tokenizer: Any) -> TokenizedExamples:
    return TokenizedExamples.of(rows_of(list(task.examples("train")), task, tokenizer, LENGTH, 4))


def naive_loss(model: Any, task: Task, made: TokenizedExamples, number: int) -> list[float]:
    """The loss of one row, alone and without padding."""
    ids = torch.from_numpy(made.tokens[made.slice(number)].astype("int64"))[None]
    kinds = torch.from_numpy(made.kinds[made.slice(number)].astype("int64"))[None]
    out = model(input_ids=ids, **({"token_type_ids": kinds} if model.config.model_type == "bert" else {}))
    target = made.targets[number]
    if task.kind == "spans":
        both = zip((out.start_logits, out.end_logits), target, strict=True)
        return [-logits[0].log_softmax(-1)[place].item() for logits, place in both]
    if task.labels:
        return [-out.logits[0].log_softmax(-1)[target].item()]
    return [(out.logits[0, 0].item() - float(target)) ** 2]


@pytest.mark.parametrize("memory", [False, True], ids=["plain", "memory"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TASKS)
@torch.no_grad()
def test_the_loss_is_the_sum_over_rows_however_they_are_batched(name, kind, memory, tokenizer):
    task = TASKS[name]()
    model = model_for(task, kind, tokenizer, memory).double().eval()
    objective = make_objective("auto", model, tokenizer, 0)
    assert isinstance(objective, Spans if name == "questions" else Classification)
    made = rows(task, tokenizer)
    naive = [naive_loss(model, task, made, number) for number in range(len(made))]
    for size in (1, 5):
        total = count = 0
        for batch in ExampleBatches(made, size, LENGTH, epochs=1):
            ready = objective.prepare(batch, 1)
            loss, targets = objective.loss(ready, None)
            total, count = total + loss.item(), count + targets
            own = [loss for number in batch["row"].tolist() if number >= 0 for loss in naive[number]]
            assert objective.losses(ready, None)[batch["row"] >= 0].flatten().tolist() == pytest.approx(own, rel=1e-6)
        assert total == pytest.approx(sum(map(sum, naive)), rel=1e-6)
        assert count == made.targets.size


@pytest.mark.parametrize("name", TASKS)
def test_rows_without_an_example_change_no_gradient(name, tokenizer):
    task = TASKS[name]()
    model, made = model_for(task, "bert", tokenizer).double().eval(), rows(task, tokenizer)

    def gradients(size: int) -> dict[str, torch.Tensor]:
        model.zero_grad()
        objective = make_objective("auto", model, tokenizer, 0)
        for batch in ExampleBatches(made, size, LENGTH, epochs=1, shuffle=False):
            objective.loss(objective.prepare(batch, 1), None)[0].backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    alone, together = gradients(1), gradients(7)
    assert len(made) % 7
    for parameter, gradient in alone.items():
        torch.testing.assert_close(together[parameter], gradient, rtol=1e-7, atol=1e-10)


def test_the_model_is_told_what_is_padding_and_which_text_is_which(tokenizer):
    task = colours()
    made = rows(task, tokenizer)
    for kind, told in (("bert", {"token_type_ids"}), ("distilbert", set()), ("roberta", set())):
        model = model_for(task, kind, tokenizer, pad_token_id=3)
        objective: Any = make_objective("auto", model, tokenizer, 0)
        alike, various = (next(ExampleBatches(made, size, LENGTH)) for size in (1, 8))
        assert objective.inputs(objective.prepare(alike, 1)).keys() == {"input_ids"} | told
        inputs = objective.inputs(objective.prepare(various, 1))
        assert inputs.keys() == {"input_ids", "attention_mask"} | told
        padding = inputs["attention_mask"] == 0
        assert padding.any()
        assert set(inputs["input_ids"][padding].tolist()) == {3}


# Training


def learned(
    name: str, kind: str, memory: bool, tokenizer: Any, out: Path, **options: Any
) -> tuple[Any, mnemic.train.Run]:
    task = TASKS[name]()
    model = model_for(task, kind, tokenizer, memory, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    usual = {"learning_rate": 1e-2, "warmup": 5, "schedule": "constant", "segment_length": LENGTH, "stride": 4}
    settings = {**usual, "batch_size": 8, "log_every": 5, "out": str(out), **options}
    return model, mnemic.train(model, tokenizer, task, TrainConfig(**settings))


@pytest.mark.parametrize(
    ("name", "kind", "memory", "figures"),
    [
        ("colours", "bert", False, {"accuracy": 1.0, "f1": 1.0, "matthews": 1.0}),
        ("colours", "roberta", True, {"accuracy": 1.0, "f1": 1.0, "matthews": 1.0}),
        ("counts", "bert", True, {"pearson": 1.0, "spearman": 0.95}),
        ("questions", "bert", True, {"exact_match": 1.0, "f1": 1.0}),
        ("questions", "distilbert", False, {"exact_match": 1.0, "f1": 1.0}),
    ],
)
def test_a_tiny_model_learns_a_task_and_is_measured_by_what_suits_it(name, kind, memory, figures, tokenizer, tmp_path):
    model, run = learned(name, kind, memory, tokenizer, tmp_path / "run", steps=150)
    first, last = run.losses[0][1], run.losses[-1][1]
    assert last < 0.2 * first
    found = mnemic.evaluate(model, tokenizer, TASKS[name](), split="train", window=LENGTH, stride=4)
    assert {figure: found[figure] for figure in figures} == pytest.approx(figures, abs=0.03 if name == "counts" else 0)


@pytest.mark.parametrize("name", TASKS)
def test_stopped_and_resumed_is_never_stopped(name, tokenizer, tmp_path, monkeypatch):
    task = TASKS[name]()

    def train(out: str, resume: bool = False) -> mnemic.train.Run:
        model = model_for(task, "bert", tokenizer, memory=True)  # with dropout
        settings = {"steps": 9, "batch_size": 8, "accumulate": 2, "segment_length": LENGTH, "stride": 4}
        often = {"log_every": 1, "checkpoint_every": 2, "evaluate_every": 4, "warmup": 2}
        return mnemic.train(
            model, tokenizer, task, TrainConfig(**settings, **often, out=str(tmp_path / out), resume=resume)
        )

    straight = train("straight")
    for last in (3, 6):
        with monkeypatch.context() as patch:
            stop_at(patch, last)
            with pytest.raises(Stop):
                train("stopped", resume=True)
    stopped = train("stopped", resume=True)
    assert stopped.losses == straight.losses
    for file in ("log.jsonl", "model/model.safetensors", "best/model.safetensors"):
        assert (stopped.out / file).read_bytes() == (straight.out / file).read_bytes()


def test_base_freezes_the_memory_and_memory_the_base(tokenizer, tmp_path):
    for trainable in ("base", "memory"):
        before = model_for(colours(), "bert", tokenizer, memory=True).state_dict()
        model, _ = learned("colours", "bert", True, tokenizer, tmp_path / trainable, steps=2, trainable=trainable)
        changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
        assert changed
        assert {name.startswith("memory.") for name in changed} == {trainable == "memory"}
    with pytest.raises(
        UsageError, match="trainable = 'base', but BertForSequenceClassification has no parameters of a"
    ):
        learned("colours", "bert", False, tokenizer, tmp_path / "plain", steps=2, trainable="base")


def test_what_does_not_fit_is_refused(tokenizer, tmp_path, corpus):
    out = str(tmp_path / "run")
    bert, score = (model_for(task, "bert", tokenizer) for task in (colours(), counts()))
    masked = make_encoder("bert", tokenizer, "ForMaskedLM")
    gpt2 = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2))
    for model, task, message in (
        (gpt2, colours(), "colours is a task, and GPT2LMHeadModel a language model without a head for it"),
        (masked, colours(), "colours is a task, and BertForMaskedLM a language model without a head for it"),
        (
            bert,
            questions(),
            "questions is a task of spans and BertForSequenceClassification is made for classification",
        ),
        (bert, corpus, "tiny is not a task, as BertForSequenceClassification learns"),
        (bert, counts(), "counts has a score, which is one output, and BertForSequenceClassification has 2"),
        (score, colours(), "colours has 2 labels, and BertForSequenceClassification has 1"),
    ):
        for act in (
            mnemic.evaluate,
            lambda *given: mnemic.train(*given, TrainConfig(steps=1, out=out, segment_length=16)),
        ):
            with pytest.raises(UsageError, match=message):
                act(model, tokenizer, task)
    with pytest.raises(UsageError, match="batching = 'similar' is of texts"):
        mnemic.train(bert, tokenizer, colours(), TrainConfig(batching="similar", out=out, segment_length=16))
    with pytest.raises(UsageError, match="segment_length = 65, but BertForSequenceClassification has 64 positions"):
        mnemic.train(bert, tokenizer, colours(), TrainConfig(segment_length=65, out=out))
    with pytest.raises(UsageError, match="objective 'spans' is for spans models"):
        mnemic.train(bert, tokenizer, colours(), TrainConfig(objective="spans", out=out, segment_length=16))
    bert.config.pad_token_id = None
    with pytest.raises(UsageError, match="does not say which token is padding"):
        make_objective("auto", bert, tokenizer, 0)


def test_a_causal_model_with_a_head_of_its_own_reads_to_its_last_token(tokenizer):
    torch.manual_seed(0)
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "pad_token_id": tokenizer.pad_token_id}
    model = hf.GPT2ForSequenceClassification(hf.GPT2Config(vocab_size=len(tokenizer), num_labels=2, **shape)).eval()
    assert model_kind(model) == "classification"
    found = [mnemic.evaluate(model, tokenizer, colours(), batch_size=size)["accuracy"] for size in (1, 7)]
    assert found[0] == found[1]


# The settings of Table 3


def test_the_settings_are_those_of_table_3():
    glue = mnemic.fine_tuning(colours(70), out="o", seed=4)
    got = (glue.learning_rate, glue.batch_size, glue.steps, glue.warmup, glue.weight_decay, glue.segment_length)
    assert got == (2e-5, 32, 30, 2, 0.1, 128)
    assert (glue.schedule, glue.out, glue.seed) == ("linear", "o", 4)
    squad = mnemic.fine_tuning(questions(70))
    got = (squad.learning_rate, squad.batch_size, squad.steps, squad.warmup, squad.weight_decay, squad.segment_length)
    assert got == (5e-5, 32, 9, 1, 0.01, 384)
    assert squad.stride == 128


def test_the_settings_can_be_changed():
    config = mnemic.fine_tuning(colours(70), epochs=2, batch_size=10, learning_rate=1e-3, split="valid")
    assert (config.steps, config.warmup, config.batch_size, config.learning_rate) == (8, 1, 10, 1e-3)
    assert mnemic.fine_tuning(colours(), steps=7, warmup=3).steps == 7
    assert mnemic.fine_tuning(colours(64), epochs=0.5).steps == 1
    with pytest.raises(UsageError, match="epochs = 0: expected more than 0"):
        mnemic.fine_tuning(colours(), epochs=0)
    with pytest.raises(UsageError, match="did you mean 'batch_size'"):
        mnemic.fine_tuning(colours(), batchsize=3)
    with pytest.raises(UsageError, match=r"takes a task, as from mnemic.open_task, not str"):
        mnemic.fine_tuning("glue/cola")  # type: ignore[arg-type]


# Heads


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_pretrained_encoder_gets_the_head_of_a_task(kind, name, tokenizer, tmp_path):
    task = TASKS[name]()
    masked = make_encoder(kind, tokenizer, "ForMaskedLM")
    masked.save_pretrained(tmp_path)
    for model in (mnemic.with_head(str(tmp_path), task), mnemic.with_head(masked, task)):
        assert model_kind(model) == task.kind
        if task.kind == "classification":
            assert list(model.config.id2label.values()) == list(task.labels or ("score",))
        weights = model.base_model.state_dict()
        for part, tensor in masked.base_model.state_dict().items():
            assert torch.equal(weights[part], tensor)


@pytest.mark.parametrize("saved", [False, True], ids=["object", "folder"])
def test_memories_go_with_the_encoder(saved, tokenizer, tmp_path):
    model = mnemic.augment(make_encoder("bert", tokenizer, "ForMaskedLM"), mnemic.MemoryTokens(count=3))
    with torch.no_grad():
        for parameter in model.memory.parameters():
            parameter.normal_()
    given = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "saved")
    tuned = mnemic.with_head(tmp_path / "saved" if saved else model, colours())
    assert model_kind(tuned) == "classification"
    weights = tuned.state_dict()
    shared = weights.keys() & given.keys()
    assert {name for name in shared if name.startswith("memory.")}
    assert {name for name in given if name.startswith(("memory.", "bert."))} <= shared
    assert all(torch.equal(weights[name], given[name]) for name in shared)
    tuned.save_pretrained(tmp_path / "tuned")
    again = mnemic.load(tmp_path / "tuned")
    batch = tokenizer(["red is blue", "sun"], padding=True, return_tensors="pt")
    assert torch.equal(again.eval()(**batch).logits, tuned.eval()(**batch).logits)


def test_a_head_that_fits_is_kept_and_another_is_new(tokenizer, tmp_path):
    model = make_encoder("bert", tokenizer, num_labels=2)
    head = model.classifier.weight.clone()
    model.save_pretrained(tmp_path)
    assert mnemic.with_head(model, colours()) is model
    assert torch.equal(mnemic.with_head(tmp_path, colours()).classifier.weight, head)
    three = Task("three", {"train": reader([])}, ("a", "b", "c"))
    for given in (tmp_path, model):
        assert mnemic.with_head(given, three).classifier.weight.shape == (3, 16)


def test_what_can_have_no_head_is_refused(tokenizer, tmp_path):
    gpt2 = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, eos_token_id=3))
    gpt2.save_pretrained(tmp_path / "gpt2")
    for given in (gpt2, tmp_path / "gpt2"):
        with pytest.raises(UsageError, match=r"is a causal language model .*give a model such as BERT"):
            mnemic.with_head(given, colours())
    with pytest.raises(UsageError, match=r"no encoder .* could be loaded for colours"):
        mnemic.with_head(tmp_path, colours())
    deep = make_encoder("bert", tokenizer, "ForMaskedLM")
    deep.save_pretrained(tmp_path / "deep")
    config = (tmp_path / "deep/config.json").read_text()
    (tmp_path / "deep/config.json").write_text(config.replace('"num_hidden_layers": 1', '"num_hidden_layers": 2'))
    with pytest.raises(UsageError, match=r"lacks weights of its encoder \(encoder.layer.1"):
        mnemic.with_head(tmp_path / "deep", colours())
