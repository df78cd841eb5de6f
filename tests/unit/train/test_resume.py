"""Going on with a run: exactly, only with the same settings, and never over someone's work.

Processes that are killed are in tests/crash; here runs stop in all the gentler ways.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mnemic
from mnemic.data import Document, train_tokenizer
from mnemic.data.documents import Corpus
from mnemic.errors import DamagedError, UsageError
from mnemic.train.checkpoints import checkpoint_steps
from mnemic.train.loop import Loop


@pytest.fixture
def run_settings(settings):
    """The fixture `settings` under a name that does not hide hypothesis'."""
    return settings


class Stop(Exception):
    """Stands for whatever ends a process."""


def stop_at(monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    step = Loop.step

    def stopping(self: Loop, batch: dict[str, torch.Tensor]) -> None:
        if self.progress.step == last:
            raise Stop
        step(self, batch)

    monkeypatch.setattr(Loop, "step", stopping)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stops=st.lists(st.integers(0, 11), max_size=4), every=st.integers(1, 5), keep=st.integers(1, 3))
def test_stopped_anywhere_and_resumed_is_never_stopped(
    stops, every, keep, tmp_path, corpus, tokenizer, make_model, run_settings
):
    for name in ("straight", "stopped"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    options = {"steps": 12, "log_every": 2, "checkpoint_every": every, "keep": keep, "evaluate_every": 5}
    straight = run_settings(**options, out=str(tmp_path / "straight"))
    expected = mnemic.train(make_model(), tokenizer, corpus, straight)
    stopped = run_settings(**options, out=str(tmp_path / "stopped"), resume=True)
    for last in stops:
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, last)
            try:
                mnemic.train(make_model(), tokenizer, corpus, stopped)
            except Stop:
                torch.rand(7)  # another process has other generators
    got = mnemic.train(make_model(), tokenizer, corpus, stopped)
    assert got.losses == expected.losses
    for name in ("log.jsonl", "model/model.safetensors", "best/model.safetensors"):
        assert (got.out / name).read_bytes() == (expected.out / name).read_bytes()
    assert checkpoint_steps(got.out / "checkpoints") == checkpoint_steps(expected.out / "checkpoints")
    assert len(checkpoint_steps(got.out / "checkpoints")) <= keep


def test_a_run_is_not_overwritten(corpus, tokenizer, make_model, run_settings):
    config = run_settings()
    mnemic.train(make_model(), tokenizer, corpus, config)
    before = contents(Path(config.out))
    with pytest.raises(UsageError, match=r"already holds a run \(newest checkpoint: step 6\).*resume = true"):
        mnemic.train(make_model(), tokenizer, corpus, config)
    assert contents(Path(config.out)) == before


def test_a_model_folder_of_something_else_is_not_overwritten(corpus, tokenizer, make_model, run_settings):
    config = run_settings(resume=True)
    mine = Path(config.out) / "model"
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="would be replaced"):
        mnemic.train(make_model(), tokenizer, corpus, config)
    assert contents(Path(config.out)) == {"model/thesis.txt": b"years of work"}


def test_resuming_a_finished_run_changes_nothing_and_gives_the_trained_model(
    corpus, tokenizer, make_model, run_settings
):
    trained = make_model()
    first = mnemic.train(trained, tokenizer, corpus, run_settings())
    before = contents(first.out)
    model = make_model()
    again = mnemic.train(model, tokenizer, corpus, run_settings(resume=True))
    assert contents(first.out) == before
    assert again.report == first.report
    for left, right in zip(model.parameters(), trained.parameters(), strict=True):
        assert torch.equal(left, right)


def test_a_finished_run_can_go_on_if_its_schedule_does_not_look_ahead(
    corpus, tokenizer, make_model, run_settings, tmp_path
):
    options = {"schedule": "inverse-sqrt"}
    mnemic.train(make_model(), tokenizer, corpus, run_settings(**options, steps=4))
    longer = mnemic.train(make_model(), tokenizer, corpus, run_settings(**options, steps=9, resume=True))
    straight = run_settings(**options, steps=9, out=str(tmp_path / "straight"))
    assert longer.losses == mnemic.train(make_model(), tokenizer, corpus, straight).losses
    assert contents(longer.out / "model") == contents(tmp_path / "straight" / "model")


def test_other_settings_are_refused_by_name(corpus, tokenizer, make_model, run_settings):
    mnemic.train(make_model(), tokenizer, corpus, run_settings())
    before = contents(Path(run_settings().out))
    for other, message in (
        ({"learning_rate": 0.5}, r"learning_rate = 0.5 \(was 0.01\)"),
        ({"steps": 8}, r"steps = 8 \(was 6\)"),
        ({"seed": 4, "accumulate": 2}, r"accumulate = 2 \(was 1\), seed = 4 \(was 0\)"),
    ):
        with pytest.raises(UsageError, match=message):
            mnemic.train(make_model(), tokenizer, corpus, run_settings(resume=True, **other))
    with pytest.raises(UsageError, match=r"the model's dropout = 0.3 \(was 0.1\)"):
        mnemic.train(make_model(dropout=0.3), tokenizer, corpus, run_settings(resume=True))
    after = contents(Path(run_settings().out))
    assert after == before


def test_another_model_corpus_or_tokenizer_is_refused(corpus, tokenizer, make_model, run_settings):
    documents = list(corpus.documents("train"))
    mnemic.train(make_model(), tokenizer, corpus, run_settings(steps=4))
    resumed = run_settings(steps=4, resume=True)
    with pytest.raises(UsageError, match=r"other settings: .*hidden_size"):
        mnemic.train(make_model(hidden_size=32), tokenizer, corpus, resumed)
    more = Corpus("tiny", {"train": lambda: [*documents, Document("new", "one more")]})
    with pytest.raises(UsageError, match="resume with the same corpus"):
        mnemic.train(make_model(), tokenizer, more, resumed)
    words = train_tokenizer(documents, "word")
    with pytest.raises(UsageError, match="resume with the same corpus"):
        mnemic.train(make_model(), words, corpus, resumed)


def test_a_damaged_checkpoint_costs_time_only(corpus, tokenizer, make_model, run_settings, capsys):
    first = mnemic.train(make_model(), tokenizer, corpus, run_settings())
    log = (first.out / "log.jsonl").read_bytes()
    shutil.rmtree(first.out / "model")
    damaged = first.out / "checkpoints" / "step-00000006" / "optimizer.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 64
    damaged.write_bytes(bytes(data))
    again = mnemic.train(make_model(), tokenizer, corpus, run_settings(resume=True))
    assert "step-00000006 is damaged" in capsys.readouterr().err
    assert again.losses == first.losses
    assert (first.out / "log.jsonl").read_bytes() == log
    for step in checkpoint_steps(first.out / "checkpoints"):
        (first.out / "checkpoints" / f"step-{step:08d}" / "state.json").write_text("{}")
    with pytest.raises(DamagedError, match=r"no checkpoint in .* is intact"):
        mnemic.train(make_model(), tokenizer, corpus, run_settings(resume=True))


def test_a_finished_run_without_its_model_gets_it_back(corpus, tokenizer, make_model, run_settings):
    first = mnemic.train(make_model(), tokenizer, corpus, run_settings())
    model = contents(first.out / "model")
    shutil.rmtree(first.out / "model")  # as if killed between the last checkpoint and the saving of the model
    again = mnemic.train(make_model(), tokenizer, corpus, run_settings(resume=True))
    assert contents(first.out / "model") == model
    assert again.losses == first.losses


def test_half_a_line_in_the_log_is_cut_off_and_other_damage_reported(corpus, tokenizer, make_model, run_settings):
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 5)
        with pytest.raises(Stop):
            mnemic.train(make_model(), tokenizer, corpus, run_settings())
    log = Path(run_settings().out) / "log.jsonl"
    log.write_text(log.read_text() + '{"step": 5, "lo')
    run = mnemic.train(make_model(), tokenizer, corpus, run_settings(resume=True))
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6] == [step for step, _ in run.losses]
    log.write_text("not JSON\n" + log.read_text())
    with pytest.raises(DamagedError, match=r"log\.jsonl is damaged"):
        mnemic.train(make_model(), tokenizer, corpus, run_settings(resume=True))
