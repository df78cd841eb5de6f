"""Models with product keys are trained: by our loop, by transformers' Trainer, by accelerate, with adapters on top."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments

import mnemic
from mnemic.errors import UsageError
from mnemic.train.checkpoints import checkpoint_steps
from mnemic.train.rows import AdamW
from tests.contract.architectures import VOCABULARY, build
from tests.unit.train.test_resume import Stop, stop_at

SIZES: dict[str, Any] = {"layers": [0], "slots": 64, "heads": 2, "k": 4, "key_dim": 8}


def with_keys(model: Any, **settings: Any) -> Any:
    torch.manual_seed(5)
    return mnemic.augment(model, mnemic.ProductKeys(**SIZES | settings))


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def masking_tokenizer(tokenizer: Any) -> Any:
    masking = copy.deepcopy(tokenizer)
    masking.add_special_tokens({"mask_token": "[MASK]"})
    return masking


@pytest.mark.parametrize("case", ["causal", "masked", "narrow"])
def test_a_run_goes_on_to_the_last_bit(case, tmp_path, corpus, tokenizer, masking_tokenizer, make_model, settings):
    kind, options = {
        "causal": ("gpt2", {"gated": True, "cosine": True}),
        "masked": ("bert", {"feed_forward": "renew"}),
        "narrow": ("bert", {"dtype": "bfloat16", "shared": True}),
    }[case]
    tokenizer = tokenizer if kind == "gpt2" else masking_tokenizer

    def model() -> Any:
        made = make_model(kind)
        made.resize_token_embeddings(len(tokenizer))
        return with_keys(made, **options)

    how = {"steps": 9, "log_every": 2, "checkpoint_every": 3, "evaluate_every": 4}  # stops between lines of the log too
    straight = mnemic.train(model(), tokenizer, corpus, settings(**how, out=str(tmp_path / "straight")))
    again = settings(**how, out=str(tmp_path / "stopped"), resume=True)
    for last in (4, 8):
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, last)
            with pytest.raises(Stop):
                mnemic.train(model(), tokenizer, corpus, again)
    got = mnemic.train(model(), tokenizer, corpus, again)
    assert got.losses == straight.losses
    names = ["log.jsonl", "model/model.safetensors", "best/model.safetensors"]
    newest = checkpoint_steps(got.out / "checkpoints")[0]
    names += [f"checkpoints/step-{newest:08d}/{part}.safetensors" for part in ("model", "optimizer")]
    for name in names:
        assert (got.out / name).read_bytes() == (straight.out / name).read_bytes(), name


def test_only_the_memory_learns_and_only_the_rows_it_reads(corpus, tokenizer, make_model, settings):
    model = with_keys(make_model("gpt2"), slots=4096)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with model.memory.product_keys.counting() as usage:
        config = settings(steps=4, trainable="memory", weight_decay=0.5, clip=0.01, log_every=100)
        mnemic.train(model, tokenizer, corpus, config)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {f"memory.{name}" for name, _ in model.memory.named_parameters()}
    name = "memory.product_keys.tables.0.weight"
    rows = (model.state_dict()[name] != before[name]).any(1)
    read = usage.layers[0].reads.sum(0) > 0
    assert not rows[~read].any()
    assert 0.5 * read.sum() < rows.sum() <= read.sum() < 4096  # what nothing depends on reads too, and teaches nothing


def test_pieces_of_a_batch_add_up(corpus, tokenizer, make_model, settings, tmp_path):
    trained = []
    for pieces in (1, 2):
        model = with_keys(make_model("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).double())
        mnemic.train(model, tokenizer, corpus, settings(steps=3, accumulate=pieces, out=str(tmp_path / str(pieces))))
        trained.append(model.state_dict())
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-8, atol=1e-9)


def test_a_run_does_not_go_on_with_another_memory(corpus, tokenizer, make_model, settings):
    mnemic.train(with_keys(make_model("gpt2")), tokenizer, corpus, settings(steps=2, schedule="constant"))
    again = settings(steps=4, schedule="constant", resume=True)
    for other in ({"k": 2}, {"feed_forward": "replace"}):
        model = with_keys(make_model("gpt2"), **other)
        with pytest.raises(UsageError, match=rf"product_keys\.{next(iter(other))}"):
            mnemic.train(model, tokenizer, corpus, again)


def test_values_are_not_trained_at_the_rate_of_adafactor(corpus, tokenizer, make_model, settings):
    how = settings(optimizer="adafactor", schedule="rsqrt", learning_rate=1.0)
    with pytest.raises(UsageError, match=r"set values_rate to 0\.001"):
        mnemic.train(with_keys(make_model("gpt2")), tokenizer, corpus, how)


def test_a_memory_of_which_little_is_used_is_told_of(corpus, tokenizer, make_model, settings, capsys):
    """All tokens ask the same, and so all read the same slots."""
    model = with_keys(make_model("gpt2"), slots=4096, query_norm="none")
    query = model.memory.product_keys.layers["0"].query
    torch.nn.init.zeros_(query.weight)
    torch.nn.init.ones_(query.bias)
    mnemic.train(model, tokenizer, corpus, settings(steps=6, log_every=1, learning_rate=0.0, weight_decay=0.0))
    said = [line for line in capsys.readouterr().err.splitlines() if "use few of their slots" in line]
    assert len(said) == 1
    assert "feed_forward = 'keep'" in said[0]
    handle = model.memory.product_keys
    model.train()(input_ids=tokens(2, 9))
    assert handle.tell() == ({}, [])  # what is read after training is nobody's business


def test_one_model_is_trained_by_one_loop_after_the_other(corpus, tokenizer, make_model, settings, tmp_path):
    model = with_keys(make_model("gpt2"), slots=1024)
    table = model.memory.product_keys.table(0).weight

    def changed(train: Any) -> int:
        before = table.detach().clone()
        train()
        return int((table != before).any(1).sum())

    for number in range(2):
        assert changed(trainer(model, tmp_path / str(number), 2).train) > 10
    assert changed(lambda: mnemic.train(model, tokenizer, corpus, settings(steps=2))) > 10


# Other training loops


def rows() -> list[dict[str, torch.Tensor]]:
    counted = [torch.arange(start, start + 12) % 40 + 3 for start in range(16)]
    return [{"input_ids": row, "labels": row} for row in counted]


def trainer(model: Any, folder: Path, steps: int, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=8, report_to=[], max_grad_norm=0,
        lr_scheduler_type="constant", logging_steps=1, use_cpu=True, disable_tqdm=True, save_steps=5,
        dataloader_pin_memory=False, **options,
    )  # fmt: skip
    optimizer = (AdamW, {"lr": 5e-3, "rows_rate": 4.0, "clip": 1.0, "weight_decay": 0.1})
    return Trainer(model=model, args=arguments, train_dataset=rows(), optimizer_cls_and_kwargs=optimizer)


def test_transformers_trainer_trains_and_resumes(tmp_path: Path) -> None:
    def fresh() -> Any:
        return with_keys(build("bert"), slots=1024)

    straight, first, second = fresh(), fresh(), fresh()
    before = straight.memory.product_keys.table(0).weight.detach().clone()
    run = trainer(straight, tmp_path / "straight", 10)
    with straight.memory.product_keys.counting() as usage:
        run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses[-1] < 0.9 * losses[0]
    unread = usage.layers[0].reads.sum(0) == 0
    assert 0 < unread.sum() < 1024
    assert torch.equal((straight.memory.product_keys.table(0).weight == before).all(1), unread)
    trainer(first, tmp_path / "stopped", 5).train()
    resumed = trainer(second, tmp_path / "stopped", 10)
    resumed.train(resume_from_checkpoint=str(tmp_path / "stopped/checkpoint-5"))
    torch.testing.assert_close(second.state_dict(), straight.state_dict())


def test_accelerate_prepares_and_trains(tmp_path: Path) -> None:
    plain, prepared = with_keys(build("gpt2")).train(), with_keys(build("gpt2")).train()
    accelerator = Accelerator(cpu=True)
    ours, optimizer = AdamW(plain.parameters(), lr=0.01), AdamW(prepared.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(prepared, optimizer)
    ids = tokens(2, 9)

    def steps(count: int) -> None:
        for _ in range(count):
            plain(ids, labels=ids).loss.backward()
            ours.step()
            ours.zero_grad()
            accelerator.backward(model(ids, labels=ids).loss)
            optimizer.step()
            optimizer.zero_grad()

    steps(3)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    steps(2)
    torch.testing.assert_close(dict(prepared.named_parameters()), dict(plain.named_parameters()), rtol=0, atol=0)


@pytest.mark.parametrize("feed_forward", ["keep", "replace", "renew"])
@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_lora_on_top(architecture: str, feed_forward: str) -> None:
    peft = pytest.importorskip("peft")
    targets = {"bert": ["query", "value"], "gpt2": ["c_attn"], "llama": ["q_proj", "down_proj"]}[architecture]
    model, ids = with_keys(build(architecture), feed_forward=feed_forward), tokens(2, 7)
    before = model(ids).logits.detach()
    kind = None if architecture == "bert" else "CAUSAL_LM"
    lora = peft.LoraConfig(target_modules=targets, r=2, task_type=kind, fan_in_fan_out=architecture == "gpt2")
    adapted = peft.get_peft_model(model, lora)
    torch.testing.assert_close(adapted(ids).logits, before)
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_("lora_" in name or ".memory." in name)
    optimizer = AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    assert (model.memory.product_keys.table(0).weight.grad.to_dense().abs().max()) > 0
    after = adapted(ids).logits.detach()
    assert (after - before).abs().max() > 1e-2
    torch.testing.assert_close(adapted.merge_and_unload()(ids).logits, after, rtol=1e-4, atol=1e-4)


def test_lora_on_a_feed_forward_that_is_replaced_adds_nothing() -> None:
    peft = pytest.importorskip("peft")
    model, ids = with_keys(build("bert"), feed_forward="replace"), tokens(2, 7)
    before = model(ids).logits.detach()
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=r".*layer\.0\.(intermediate|output)\.dense", r=2)
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    torch.testing.assert_close(adapted(ids).logits, before)


# Precisions

OPTIONS = [{}, {"gated": True, "cosine": True}, {"feed_forward": "renew"}, {"dtype": "bfloat16"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", ["before", "after", "autocast"])
def test_narrow_models_with_padding(way: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """A narrow base, a model that is made narrow, and narrow arithmetic give what wide ones do, but for rounding."""
    for architecture in ("bert", "gpt2"):
        wide = with_keys(build(architecture), **options, query_norm="layer")
        base = build(architecture).to(dtype if way == "before" else torch.float32)
        model = with_keys(base, **options, query_norm="layer")
        model.memory.load_state_dict(wide.memory.state_dict())
        if way == "after":
            model.to(dtype)
        ids, mask = tokens(3, 8), torch.ones(3, 8, dtype=torch.long)
        mask[0, 5:] = mask[2, 2:] = 0
        results = []
        for each in (wide, model):
            with torch.autocast("cpu", dtype, enabled=way == "autocast" and each is model):
                logits = each(input_ids=ids, attention_mask=mask).logits
            logits[mask.bool()].float().square().mean().backward()
            results.append(logits[mask.bool()].float())
        kept = options.get("dtype", "float32") if way == "before" else None
        assert kept is None or str(model.memory.product_keys.table(0).weight.dtype) == f"torch.{kept}"
        assert (results[0] - results[1]).abs().mean() < 0.1 * results[0].abs().mean()
        for name, parameter in model.memory.named_parameters():
            assert parameter.grad is not None, name
            values = parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
            assert values.isfinite().all()
            assert values.abs().max() > 0, name


def test_the_gradient_reaches_what_is_before_a_frozen_base() -> None:
    model = with_keys(build("gpt2").requires_grad_(False), layers=[0, 1])
    model(tokens(2, 5)).logits.square().sum().backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == {f"memory.{name}" for name, _ in model.memory.named_parameters()}
    vectors = torch.randn(1, 4, 32, requires_grad=True)
    model(inputs_embeds=vectors).logits.sum().backward()
    assert vectors.grad.abs().max() > 0
