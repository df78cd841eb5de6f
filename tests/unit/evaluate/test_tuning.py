"""Every setting from one reading is what a reading with that setting gives."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

import mnemic
from mnemic.data import Corpus, Document
from mnemic.errors import UsageError
from mnemic.evaluate import EvaluateConfig, tuning
from mnemic.memories.output import layer
from mnemic.memories.output.gate import Gate
from mnemic.memories.output.testing import Grid, Survey
from mnemic.stores import References, StoreConfig, open_store
from tests.unit.stores.building import BYTES

TEXTS = ("the cat sat on the mat and the cat sat on the hat", "a dog", "one two three one two three one two")
CORPUS = Corpus("given", {"valid": lambda: [Document(str(n), text) for n, text in enumerate(TEXTS)]})
READING = EvaluateConfig(window=8, stride=5, batch_size=2)
GRID = Grid((0.5, 1.0, 3.0), (0, 4, 20), (1, 5, 16))


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = mnemic.models.MnemicDecoderConfig(
        vocab_size=len(BYTES), hidden_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    return mnemic.models.MnemicDecoderForCausalLM(config).double().eval()


def store(metric: str = "ip", rows: int = 200) -> Any:
    rng = np.random.default_rng(0)
    made = open_store("ram:", StoreConfig(dim=16, metric=metric, keys="float32"))
    if rows:
        keys = rng.standard_normal((rows, 16)).astype(np.float32)
        made.add(keys, rng.integers(97, 123, rows), References.of("d", range(rows)))
        made.commit()
    return made


MEMORIES = {
    "local": {},
    "long": {"long": 20, "weight": 0.2, "mix_temperature": 3.0},
    "long only": {"long": 20, "local": False},
    "cache": {"joint": False, "training": "none", "weight": 0.3, "long": 4},
    "all": {"long": 20, "k": 16, "external": "ip", "weight": 0.4, "temperature": 0.5},
    "knn": {"k": 5, "external": "l2", "similarity": "distance", "joint": False, "training": "none", "weight": 0.5}
    | {"local": False},
    "knn and cache": {"k": 16, "external": "ip", "joint": False, "training": "none", "weight": 0.5, "long": 4}
    | {"recent_weight": 0.35},
    "knn and cache, apart": {"k": 16, "external": "ip", "joint": False, "training": "none", "weight": 0.93, "long": 4}
    | {"recent_weight": 0.97, "recent_temperature": 0.7},
    "an empty store": {"k": 16, "external": "empty", "weight": 0.5},
    "not trained with": {"k": 16, "external": "ip", "long": 4, "training": "none", "weight": 0.2},
}


def memory_of(name: str) -> mnemic.OutputMemory:
    options = dict(MEMORIES[name])
    kind = options.get("external")
    if kind is not None:
        options["external"] = store("ip", 0) if kind == "empty" else store(kind)
    return mnemic.OutputMemory(**options)


def surveyed(model: Any, memory: mnemic.OutputMemory, grid: Grid) -> Survey:
    mnemic.augment(model, memory)
    before = model.memory.output.config
    with model.memory.output.surveying(grid) as surveys:
        mnemic.evaluate(model, BYTES, CORPUS, READING)
    assert model.memory.output.config is before
    return Survey.joined(surveys)


@pytest.mark.parametrize("name", MEMORIES)
def test_a_survey_tells_what_every_setting_would_give(model: Any, name: str) -> None:
    memory = memory_of(name)
    survey = surveyed(model, memory, GRID)
    assert len(survey) == sum(len(text) + 1 for text in TEXTS)
    longs = GRID.longs if memory.long else (0,)
    ks = GRID.ks if memory.external else (memory.k,)
    grid = tuning.including(GRID, memory)
    survey = surveyed(model, memory, grid)
    for long, k, tau, mix in itertools.product(longs, ks, GRID.temperatures, GRID.temperatures[1:]):
        changed = memory.changed(long=long, k=k, temperature=tau, mix_temperature=mix)
        mnemic.augment(model, changed)
        wanted = mnemic.evaluate(model, BYTES, CORPUS, READING)
        assert tuning.losses_of(survey, grid, changed).mean().item() == pytest.approx(
            wanted["nll"] / wanted["tokens"], rel=1e-9
        )


@pytest.mark.parametrize("name", MEMORIES)
def test_the_best_settings_are_the_best(model: Any, name: str) -> None:
    memory = memory_of(name)
    mnemic.augment(model, memory)
    before, config = mnemic.evaluate(model, BYTES, CORPUS, READING)["perplexity"], model.memory.output.config
    tuned = mnemic.tune(model, BYTES, CORPUS, READING, GRID)
    assert model.memory.output.config is config, "the memory is as it was"
    assert tuned.before == pytest.approx(before, rel=1e-6)
    assert tuned.perplexity <= min(tuned.before, tuned.plain) * (1 + 1e-6)
    tuned.put_into(model)
    found = mnemic.evaluate(model, BYTES, CORPUS, READING)["perplexity"]
    assert found == pytest.approx(tuned.perplexity, rel=1e-6)
    grid = tuning.including(GRID, memory)
    rng = np.random.default_rng(0)
    for _ in range(20):  # no other setting that was tried is better
        settings = {
            "long": int(rng.choice(grid.longs)) if memory.long else memory.long,
            "k": int(rng.choice(grid.ks)) if memory.external else memory.k,
            "temperature": float(rng.choice(grid.temperatures)),
            "mix_temperature": float(rng.choice(grid.temperatures)),
            "weight": float(rng.choice(tuning.WEIGHTS)),
        }
        if memory.recent_weight is not None:
            settings["recent_weight"] = float(rng.choice(tuning.SHARES))
            settings["recent_temperature"] = float(rng.choice(grid.temperatures))
        if memory.training == "none":
            settings["joint"] = bool(rng.choice([memory.joint, False]))
        mnemic.augment(model, memory.changed(**settings))
        other = mnemic.evaluate(model, BYTES, CORPUS, READING)["perplexity"]
        assert other >= tuned.perplexity * (1 - 1e-6), settings


MISLEADING = Survey(  # rows that are near to all tokens and have half of the right ones
    losses=torch.full((8,), math.log(50)),
    normalisers=torch.zeros(8),
    keys=None,
    recent=None,
    external=layer.Mass(
        torch.tensor([12.0, 6.0])[:, None, None].expand(2, 1, 8),
        torch.tensor([12.0, 6.0])[:, None, None] + torch.tensor([math.log(0.5), -torch.inf]).repeat(4)[None, None],
    ),
)


def naive_loss(temperature: float, weight: float, joint: bool) -> float:
    """The mean loss of `MISLEADING` with these settings, by Eq. 6 and 9 as they stand."""
    mass, total = math.exp(12 / temperature), 0.0
    for own in [0.5, 0.0] * 4:
        softmax = (1 / 50 + own * mass) / (1 + mass) if joint else 1 / 50
        total -= math.log((1 - weight) * softmax + weight * own)
    return total / 8


def test_a_model_that_was_trained_without_the_memory_may_have_it_outside_its_softmax() -> None:
    grid = Grid((1.0, 2.0), (0,), (16,))
    losses = {
        (tau, weight, joint): naive_loss(tau, weight, joint)
        for tau, weight, joint in itertools.product((1.0, 2.0), (0.0, *tuning.WEIGHTS), (True, False))
    }
    memory = mnemic.OutputMemory(external="s", k=16, training="none", local=False, temperature=2.0, weight=0.1)
    tuned = tuning.best_settings(MISLEADING, grid, memory)
    assert not tuned.memory.joint
    assert tuned.perplexity == pytest.approx(math.exp(min(losses.values())))
    assert losses[2.0, tuned.memory.weight, False] == min(losses.values())
    assert tuned.before == pytest.approx(math.exp(losses[2.0, 0.1, True]), rel=1e-6)
    assert tuned.plain == pytest.approx(50)
    assert 3 * (1 + 2 * 2) <= tuned.tried <= 3 * (1 + 2 * len(tuning.WEIGHTS)), "higher weights only if they are better"
    assert "temperature" not in tuned.at_the_edge

    trained = tuning.best_settings(MISLEADING, grid, memory.changed(training="local"))
    assert trained.memory.joint
    within = min(loss for (*_, joint), loss in losses.items() if joint)
    assert trained.perplexity == pytest.approx(math.exp(within), rel=1e-6)
    assert "temperature" in trained.at_the_edge


@pytest.mark.parametrize("memory", [{"external": "ip"}, {"long": 4}], ids=str)
def test_every_setting_with_and_without_the_softmax_is_compared(
    model: Any, monkeypatch: pytest.MonkeyPatch, memory: dict[str, Any]
) -> None:
    monkeypatch.setattr(tuning, "WEIGHTS", (0.1, 0.6))
    rows = {"external": store(), "local": False} if "external" in memory else {}
    given = mnemic.OutputMemory(**{**memory, **rows}, k=16, training="none", temperature=0.5)
    grid = Grid((0.5, 1.0), (given.long,), (4, 16) if rows else (16,))
    found = {}
    for joint, tau, mix, weight, k in itertools.product(
        (True, False), grid.temperatures, grid.temperatures, (0.0, 0.1, 0.6), grid.ks
    ):
        settings = {"joint": joint, "temperature": tau, "mix_temperature": mix, "weight": weight, "k": k}
        mnemic.augment(model, given.changed(**settings))
        found[tuple(settings.values())] = mnemic.evaluate(model, BYTES, CORPUS, READING)["perplexity"]
    mnemic.augment(model, given)
    tuned = mnemic.tune(model, BYTES, CORPUS, READING, grid)
    best = min(found, key=found.__getitem__)
    assert tuned.perplexity == pytest.approx(found[best], rel=1e-6)
    assert tuned.memory.joint == best[0]
    assert tuned.before == pytest.approx(found[True, 0.5, 1.0, 0.0, 16], rel=1e-6)


def test_what_is_at_the_edge_of_the_grid_is_said(model: Any) -> None:
    memory = mnemic.OutputMemory(long=4)
    survey = surveyed(model, memory, Grid((1.0,), (4,), (1024,)))
    plain = Survey(survey.losses, survey.normalisers, None, survey.recent, None)
    tuned = tuning.best_settings(plain, Grid((1.0,), (4,), (1024,)), memory)
    assert "temperature" in tuned.at_the_edge
    assert "long" in tuned.at_the_edge


def test_only_an_output_memory_is_tuned(model: Any) -> None:
    with pytest.raises(UsageError, match="only an output memory"):
        mnemic.tune(model, BYTES, CORPUS)


@pytest.mark.parametrize("grid", [{"ks": ()}, {"ks": (8, 1)}, {"longs": (-1,)}, {"temperatures": (0.0,)}])
def test_grids_that_make_no_sense(grid: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected"):
        Grid(**grid)


# Retrieval accuracy and frequency buckets


def test_retrieval_accuracy_is_counted_by_hand(model: Any) -> None:
    rows = store()
    mnemic.augment(model, mnemic.OutputMemory(external=rows, long=4))
    bare = mnemic.models.MnemicDecoderForCausalLM(model.config)
    with pytest.raises(UsageError, match="that of a store"):
        mnemic.evaluate(bare, BYTES, CORPUS, metrics=["retrieval_accuracy"])
    found = mnemic.evaluate(model, BYTES, CORPUS, window=64, metrics=["retrieval_accuracy"])["retrieval_accuracy"]
    hits, total = dict.fromkeys(("1", "8", "64", "1024"), 0), 0
    for text in TEXTS:
        ids = [BYTES.eos_token_id, *BYTES(text)["input_ids"], BYTES.eos_token_id]
        keys = list[Any]()
        block = model.get_submodule(mnemic.hf.keys.module_path(model, "ffn"))
        hook = block.register_forward_pre_hook(lambda _, args, keys=keys: keys.append(args[0]))
        model(torch.tensor([ids[:-1]]))
        hook.remove()
        for key, wanted in zip(keys[0][0], ids[1:], strict=True):
            values = rows.search(key[None].detach().numpy(), 1024)
            near = values.values[0][values.mask[0]].tolist()
            total += 1
            for depth in hits:
                hits[depth] += wanted in near[: int(depth)]
    assert found == pytest.approx({depth: count / total for depth, count in hits.items()})
    assert found["1"] < found["64"] < 1


def test_buckets_hold_each_token_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mnemic.evaluate import frequencies

    monkeypatch.setattr(frequencies, "BUCKETS", {">5": 5, "2-5": 1, "<=1": 0})
    found = mnemic.evaluate(model, BYTES, CORPUS, READING.__class__(metrics=["perplexity", "frequency_buckets"]))
    buckets = found["frequency_buckets"]
    assert sum(bucket["tokens"] for bucket in buckets.values()) == found["tokens"]
    nll = sum(bucket["tokens"] * math.log(bucket["perplexity"]) for bucket in buckets.values() if bucket["tokens"])
    assert nll == pytest.approx(found["nll"])
    ids = [id for text in TEXTS for id in [*BYTES(text)["input_ids"], BYTES.eos_token_id]]
    often = {id for id in ids if ids.count(id) > 5}
    assert buckets[">5"]["tokens"] == sum(id in often for id in ids)
    assert buckets["<=1"]["tokens"] == sum(ids.count(id) == 1 for id in ids)


# The gate


def test_a_gate_lets_through_where_a_search_gains_most() -> None:
    torch.manual_seed(0)
    keys = torch.randn(2000, 8)
    gains = keys @ torch.tensor([0.0, 2.0, 0, 0, -1.0, 0, 0, 0]) + 0.1 * torch.randn(2000) + 5
    gate = Gate()
    with pytest.raises(UsageError, match="has not learned yet"):
        gate(keys)
    for share in (0.0, 0.25, 0.5, 1.0):
        gate.learn(keys, gains, share)
        through = gate(keys)
        assert through.float().mean() == pytest.approx(share, abs=1e-3)
    gate.learn(keys, gains, 0.25)
    best = gains.topk(500).indices
    assert gate(keys)[best].float().mean() > 0.9
    new = torch.randn(4000, 8)
    assert gate(new).float().mean() == pytest.approx(0.25, abs=0.03)


def test_only_the_chosen_tokens_are_searched_for(model: Any) -> None:
    rows, asked = store(), list[int]()
    search = rows.search
    rows.search = lambda queries, *rest: asked.append(len(queries)) or search(queries, *rest)
    memory = mnemic.OutputMemory(external=rows, k=16, weight=0.3, retrieve=0.5)
    mnemic.augment(model, memory)
    with pytest.raises(UsageError, match="has not learned yet"):
        mnemic.evaluate(model, BYTES, CORPUS, READING)
    count = sum(len(text) + 1 for text in TEXTS)
    tuned = mnemic.tune(model, BYTES, CORPUS, READING, Grid(GRID.temperatures, (0,), GRID.ks))
    tuned.put_into(model)
    asked.clear()
    found = mnemic.evaluate(model, BYTES, CORPUS, READING)
    assert sum(asked) == pytest.approx(count / 2, abs=1)
    gate = model.memory.output.gate
    mnemic.augment(model, tuned.memory.changed(retrieve=1.0))
    whole = losses_by_token(model)
    mnemic.augment(model, tuned.memory.changed(retrieve=1.0, external=None))
    without = losses_by_token(model)
    mnemic.augment(model, tuned.memory)
    with model.memory.output.surveying(Grid(ks=(1,))) as surveys:
        losses_by_token(model)
    total = torch.where(gate(Survey.joined(surveys).keys), whole, without).sum().item()
    assert found["nll"] == pytest.approx(total, rel=1e-6)
    assert found["perplexity"] == pytest.approx(tuned.perplexity, rel=1e-6)
    assert total < without.sum().item()


@pytest.mark.parametrize(
    "options", [{}, {"recent_weight": 0.35}, {"recent_weight": 0.35, "recent_temperature": 0.7, "long": 4}]
)
@pytest.mark.parametrize("joint", [True, False])
def test_a_gate_gives_what_tuning_promises(model: Any, joint: bool, options: dict[str, Any]) -> None:
    options = {"k": 16, "weight": 0.3, "retrieve": 0.5, "training": "local" if joint else "none", **options}
    memory = mnemic.OutputMemory(external=store(), joint=joint, **options)
    tuned = mnemic.tune(mnemic.augment(model, memory), BYTES, CORPUS, READING, Grid((0.5, 2.0), (0,), (16,)))
    found = mnemic.evaluate(tuned.put_into(model), BYTES, CORPUS, READING)
    assert found["perplexity"] == pytest.approx(tuned.perplexity, rel=1e-6)


def test_of_rows_that_are_followed_one_number_is_tried(model: Any) -> None:
    memory = mnemic.OutputMemory(external=store(), k=16, follow=2)
    assert tuning.default_grid(memory).ks == (16,)
    assert tuning.default_grid(memory.changed(follow=0)).ks == (1, 4, 16)
    with pytest.raises(UsageError, match="with follow = 2 give one"):
        mnemic.tune(mnemic.augment(model, memory), BYTES, CORPUS, READING, GRID)


def losses_by_token(model: Any) -> torch.Tensor:
    from mnemic.evaluate.evaluation import text_of
    from mnemic.evaluate.perplexity import read_text, token_losses

    with torch.no_grad():
        objective, batches = read_text(model, BYTES, text_of(model, BYTES, CORPUS, READING), READING)
        return torch.cat([losses for losses, _ in token_losses(objective, batches, None)])


def test_a_gate_is_saved_with_the_model(model: Any, tmp_path: Any) -> None:
    with open_store(tmp_path / "s", StoreConfig(dim=16, metric="ip", keys="float32")) as rows:
        rows.add(np.eye(16, dtype=np.float32), np.arange(97, 113), References.of("d", range(16)))
        rows.commit()
        mnemic.augment(model, mnemic.OutputMemory(external=rows, k=4, weight=0.3, retrieve=0.25))
        mnemic.tune(model, BYTES, CORPUS, READING, Grid((1.0,), (0,), (4,))).put_into(model)
        wanted = mnemic.evaluate(model, BYTES, CORPUS, READING)["nll"]
        model.save_pretrained(tmp_path / "saved")
    loaded = mnemic.load(tmp_path / "saved").double()
    assert torch.equal(loaded.memory.output.gate.direction, model.memory.output.gate.direction.to(torch.float64))
    assert mnemic.evaluate(loaded, BYTES, CORPUS, READING)["nll"] == pytest.approx(wanted, rel=1e-6)
