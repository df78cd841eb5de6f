"""The training loop: gradients, precision, what it writes, and what it refuses."""

from __future__ import annotations

import itertools
import json
import math
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import mnemic
from mnemic.errors import MnemicError, UsageError
from mnemic.files import lock
from mnemic.train.checkpoints import checkpoint_steps, load_newest
from mnemic.train.loop import Loop
from mnemic.train.schedules import learning_rate


def log_of(out: str) -> list[dict]:
    return [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]


def gradients(loop: Loop, steps: int) -> list[dict[str, torch.Tensor]]:
    """The gradients with which the optimiser was called, step by step."""
    seen: list[dict[str, torch.Tensor]] = []
    loop.optimizer.register_step_pre_hook(
        lambda *_: seen.append({name: p.grad.clone() for name, p in loop.parameters.items()})
    )
    loop.model.train()
    for _ in range(steps):
        loop.step(next(loop.stream))
    return seen


@pytest.mark.parametrize("kind", ["decoder", "gpt2", "bert"])
def test_accumulation_gives_the_gradient_of_the_whole_batch(corpus, tokenizer, make_model, settings, kind, tmp_path):
    """Rows differ in their number of targets, so a mean of means would be wrong; the XL cache is cut along."""
    still = {"dropout": 0.0} if kind == "decoder" else {}
    seen = []
    for accumulate in (1, 2, 4):
        model = make_model(kind, **still).double()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        config = settings(accumulate=accumulate, clip=0.0, out=str(tmp_path / f"{accumulate}"))
        seen.append(gradients(Loop(model, tokenizer, corpus, config), steps=4))
    for other in seen[1:]:
        for one, two in zip(seen[0], other, strict=True):
            for name in one:
                torch.testing.assert_close(two[name], one[name], rtol=1e-5, atol=1e-8)


def test_the_gradient_is_that_of_the_mean_over_targets_of_documents_apart(corpus, tokenizer, make_model, settings):
    model = make_model("gpt2").double()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    loop = Loop(model, tokenizer, corpus, settings(clip=0.0))
    state = loop.stream.state_dict()
    batch = next(loop.stream)
    loop.stream.load_state_dict(state)
    losses = []
    for ids, targets, starts in zip(batch["input_ids"], batch["targets"], batch["document_starts"], strict=True):
        cuts = sorted({0, len(ids), *starts.nonzero().flatten().tolist()})
        for first, after in itertools.pairwise(cuts):  # each document of a row is read alone
            scores = model(ids[None, first:after]).logits[0].log_softmax(-1)
            losses += [-score[t] for score, t in zip(scores, targets[first:after], strict=True) if t != -100]
    expected = torch.autograd.grad(torch.stack(losses).mean(), list(loop.parameters.values()))
    (seen,) = gradients(loop, steps=1)
    for got, right in zip(seen.values(), expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-8)


def test_clipping(corpus, tokenizer, make_model, settings, tmp_path):
    for clip, name in ((0.05, "clipped"), (0.0, "free")):
        loop = Loop(make_model("gpt2"), tokenizer, corpus, settings(clip=clip, out=str(tmp_path / name)))
        (seen,) = gradients(loop, steps=1)
        norm = math.sqrt(sum(float(g.square().sum()) for g in seen.values()))
        assert loop.norm > 0.05  # what is logged is the norm before clipping
        assert norm == pytest.approx(clip or loop.norm, rel=1e-4)


def test_it_learns_and_says_so(corpus, tokenizer, make_model, settings):
    config = settings(steps=40, evaluate_every=20, log_every=10, checkpoint_every=20, seed=3, learning_rate=2e-2)
    run = mnemic.train(make_model(), tokenizer, corpus, config)
    report = json.loads((run.out / "report.json").read_text())
    assert report == run.report
    assert report["status"] == "finished"
    assert (report["step"], report["seed"], report["data"]) == (40, 3, "tiny")
    assert report["config"] == config.to_dict()
    assert report["versions"]["torch"] == torch.__version__
    assert report["parameters"]["all"] == report["parameters"]["trained"] == make_model().num_parameters()
    assert report["tokens_per_second"] == pytest.approx(report["tokens"] / report["seconds"])
    assert [step for step, _ in run.losses] == [10, 20, 30, 40]
    assert run.losses[-1][1] < run.losses[0][1] - 1
    assert [entry["step"] for entry in report["evaluations"]] == [20, 40]
    assert report["losses"][-1]["tokens"] == report["tokens"]
    for step, entry in zip((10, 20, 30, 40), report["losses"], strict=True):
        assert entry["learning_rate"] == learning_rate(step, config)
    for name in ("model", "best"):
        model = AutoModelForCausalLM.from_pretrained(run.out / name)
        assert model.num_parameters() == make_model().num_parameters()
        assert AutoTokenizer.from_pretrained(run.out / name)("abc")["input_ids"] == tokenizer("abc")["input_ids"]


def test_a_line_of_the_log_is_the_mean_over_the_targets_since_the_line_before(
    corpus, tokenizer, make_model, settings, tmp_path
):
    every = mnemic.train(make_model(), tokenizer, corpus, settings(out=str(tmp_path / "1"))).report["losses"]
    third = mnemic.train(make_model(), tokenizer, corpus, settings(out=str(tmp_path / "3"), log_every=3)).losses
    counts = [now["tokens"] - before for now, before in zip(every, [0, *(e["tokens"] for e in every)], strict=False)]
    sums = [entry["loss"] * count for entry, count in zip(every, counts, strict=True)]
    assert [loss for _, loss in third] == pytest.approx(
        [sum(sums[:3]) / sum(counts[:3]), sum(sums[3:]) / sum(counts[3:])], rel=1e-9
    )


def test_evaluation_between_steps_changes_nothing(corpus, tokenizer, make_model, settings, tmp_path):
    runs = [
        mnemic.train(make_model(), tokenizer, corpus, settings(evaluate_every=every, out=str(tmp_path / str(every))))
        for every in (0, 1)
    ]
    assert runs[0].losses == runs[1].losses
    assert len(runs[1].report["evaluations"]) == 6


def test_the_best_model_is_the_one_with_the_lowest_loss(corpus, tokenizer, make_model, settings):
    rising = {"schedule": "constant", "learning_rate": 1.0, "warmup": 12, "steps": 12}
    config = settings(**rising, evaluate_every=1, checkpoint_every=1, keep=50)
    run = mnemic.train(make_model("gpt2"), tokenizer, corpus, config)
    losses = [entry["loss"] for entry in run.report["evaluations"]]
    best = 1 + losses.index(min(losses))
    assert 1 < best < 12  # the rate becomes too large
    kept = load_file(run.out / "best" / "model.safetensors")
    step = load_file(run.out / "checkpoints" / f"step-{best:08d}" / "model.safetensors")
    shared = kept.keys() & step.keys()
    assert shared
    assert all(torch.equal(kept[name], step[name]) for name in shared)


@pytest.mark.parametrize("kind", ["decoder", "bert"])
def test_bf16(corpus, tokenizer, make_model, settings, kind, tmp_path):
    seen = {}
    for precision in ("float32", "bf16"):
        model = make_model(kind)
        config = settings(precision=precision, out=str(tmp_path / precision))
        seen[precision] = [loss for _, loss in mnemic.train(model, tokenizer, corpus, config).losses]
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert seen["bf16"] != seen["float32"]
    assert seen["bf16"] == pytest.approx(seen["float32"], rel=0.02)


def test_an_output_memory_is_evaluated_in_bf16(corpus, tokenizer, make_model, settings, tmp_path):
    model = mnemic.augment(make_model(), mnemic.OutputMemory())
    run = mnemic.train(model, tokenizer, corpus, settings(steps=2, precision="bf16", evaluate_every=1))
    assert all(entry["loss"] < 10 for entry in run.report["evaluations"])


def test_tensorboard_gets_what_the_log_has(corpus, tokenizer, make_model, settings):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = mnemic.train(make_model(), tokenizer, corpus, settings(trackers=["tensorboard"], evaluate_every=3))
    events = EventAccumulator(str(run.out / "tracking"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(s, pytest.approx(v)) for s, v in run.losses]
    assert [e.step for e in events.Scalars("valid_loss")] == [3, 6]


def test_a_tracker_that_is_not_installed(corpus, tokenizer, make_model, settings, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"'wandb' is not installed: pip install 'mnemic\[track\]'"):
        mnemic.train(make_model(), tokenizer, corpus, settings(trackers=["wandb"]))


def test_only_the_memory_is_trained(corpus, tokenizer, make_model, settings):
    model = make_model("gpt2")
    model.memory = torch.nn.Module()
    model.memory.bias = torch.nn.Parameter(torch.zeros(len(tokenizer)))
    model.lm_head.register_forward_hook(lambda module, given, out: out + model.memory.bias)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = mnemic.train(model, tokenizer, corpus, settings(trainable="memory"))
    changed = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert changed == ["memory.bias"]
    assert run.report["parameters"]["trained"] == len(tokenizer)
    checkpoint = load_newest(run.out / "checkpoints")
    assert checkpoint is not None
    assert all(name.startswith("memory.bias/") for name in checkpoint.tensors["optimizer"])


def test_the_model_is_left_in_the_mode_it_was_in(corpus, tokenizer, make_model, settings):
    model = make_model().eval()
    model.model.layers[0].train()
    before = [module.training for module in model.modules()]
    mnemic.train(model, tokenizer, corpus, settings())
    assert [module.training for module in model.modules()] == before


def test_options_by_name_or_a_config_but_not_both(corpus, tokenizer, make_model, settings, tmp_path):
    options = {"steps": 1, "batch_size": 2, "segment_length": 8, "out": str(tmp_path / "x")}
    assert mnemic.train(make_model(), tokenizer, corpus, **options).report["step"] == 1
    with pytest.raises(UsageError, match="not both"):
        mnemic.train(make_model(), tokenizer, corpus, settings(), steps=3)


def test_a_segment_longer_than_the_model_has_positions(corpus, tokenizer, make_model, settings):
    with pytest.raises(UsageError, match="segment_length = 40, but GPT2LMHeadModel has 32 positions"):
        mnemic.train(make_model("gpt2"), tokenizer, corpus, settings(segment_length=40))


def test_a_loss_that_is_no_number_stops_the_run_and_spares_the_checkpoint(corpus, tokenizer, make_model, settings):
    model, config = make_model("gpt2"), settings(steps=9)
    calls = iter(range(100))
    model.lm_head.register_forward_hook(lambda module, given, out: out * (float("nan") if next(calls) == 4 else 1.0))
    with pytest.raises(MnemicError, match=r"broke down at step 5.*the checkpoint of step 3"):
        mnemic.train(model, tokenizer, corpus, config)
    checkpoint = load_newest(Path(config.out) / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.step == 3
    assert all(tensor.isfinite().all() for tensor in checkpoint.tensors["model"].values())
    assert [entry["step"] for entry in log_of(config.out)] == [1, 2, 3, 4]
    assert json.loads((Path(config.out) / "report.json").read_text())["status"] == "broken down"


def test_ctrl_c_ends_the_step_saves_and_says_how_to_go_on(corpus, tokenizer, make_model, settings, monkeypatch, capsys):
    config, before, step = settings(steps=9), signal.getsignal(signal.SIGINT), Loop.step

    def interrupted_step(self: Loop, batch: dict[str, torch.Tensor]) -> None:
        if self.progress.step == 4:
            assert signal.getsignal(signal.SIGINT) is not before
            signal.raise_signal(signal.SIGINT)
        step(self, batch)

    monkeypatch.setattr(Loop, "step", interrupted_step)
    with pytest.raises(
        KeyboardInterrupt, match=r"stopped at step 5 of 9; all is saved in .*: go on with resume = true"
    ):
        mnemic.train(make_model(), tokenizer, corpus, config)
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopping after this step" in capsys.readouterr().err
    assert checkpoint_steps(Path(config.out) / "checkpoints") == [5, 3]
    assert json.loads((Path(config.out) / "report.json").read_text())["status"] == "interrupted"


def test_one_process_at_a_time(corpus, tokenizer, make_model, settings):
    config = settings()
    with lock(Path(config.out) / "lock", "the run"), pytest.raises(MnemicError, match="in use by process"):
        mnemic.train(make_model(), tokenizer, corpus, config)


def test_a_full_disk_at_the_start_and_later(corpus, tokenizer, make_model, settings, small_disk):
    with pytest.raises(MnemicError, match="the disk is full"):
        mnemic.train(make_model(num_hidden_layers=40), tokenizer, corpus, settings(out=str(small_disk / "big")))
    config = settings(out=str(small_disk / "run"), keep=50, checkpoint_every=1, steps=60)
    with pytest.raises(MnemicError, match="the disk is full"):
        mnemic.train(make_model(), tokenizer, corpus, config)
    checkpoint = load_newest(small_disk / "run" / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.step > 0


def test_a_folder_that_cannot_be_written(corpus, tokenizer, make_model, settings, read_only_disk):
    with pytest.raises(MnemicError, match="no permission to write"):
        mnemic.train(make_model(), tokenizer, corpus, settings(out=str(read_only_disk / "run")))
