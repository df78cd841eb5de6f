"""The eleven rules of a memory, for every registered memory on every architecture.

A new folder under `memories/` is tested by this file the moment it is there. Where a rule cannot apply, the case is
skipped with the reason, and the summary at the end of the run lists it as refused.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

import mnemic
from mnemic.errors import UnsupportedModel
from mnemic.memories import registry
from tests.contract.architectures import ARCHITECTURES, EOS, PAD, VOCABULARY, build

LENGTH = 12
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
SMOOTH = {"product_keys": {"slots": 16, "k": 16}}  # a step that changes which slots are read has no slope


class InDouble(TorchFunctionMode):
    """Keeps float64 what models compute in float32 whatever their weights are, as norms and softmaxes."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if function is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if one is torch.float32 else one for one in args)
            kwargs = {name: torch.float64 if one is torch.float32 else one for name, one in kwargs.items()}
        return function(*args, **kwargs)


MORE = {  # memories with settings that have no name of their own
    "tokens.decoder": {"place": "decoder"},
    "tokens.both": {"place": "both"},
    "tokens.fixed": {"positions": "fixed"},
}


def config_of(memory: str) -> Any:
    """A small memory, or one with a start of its own, as attention.as_context."""
    name, _, start = memory.partition(".")
    kind = registry().load(name)
    return dataclasses.replace(kind.small(layers=2), **MORE.get(memory) or kind.starts.get(start, {}))


MEMORIES = list(registry())
STARTS = [f"{name}.{start}" for name in MEMORIES for start in registry().load(name).starts]
MEMORIES += [memory for memory in STARTS if config_of(memory) != config_of(memory).neutral()] + list(MORE)

every_case = pytest.mark.parametrize(
    ("memory", "architecture"), list(itertools.product(MEMORIES, ARCHITECTURES)), ids=lambda name: name
)


@functools.cache
def refused(memory: str, architecture: str) -> str:
    """Why a memory cannot be in an architecture, if so."""
    try:
        mnemic.augment(build(architecture), config_of(memory))
    except UnsupportedModel as error:
        return str(error)
    return ""


@pytest.fixture(autouse=True)
def possible(request: pytest.FixtureRequest) -> None:
    case = getattr(request.node, "callspec", None)
    if case is not None and (reason := refused(case.params["memory"], case.params["architecture"])):
        pytest.skip(reason)


def augmented(memory: str, architecture: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny model with the memory, its own start, far from neutral."""
    torch.manual_seed(1)
    config = dataclasses.replace(config_of(memory), **changes)
    model = mnemic.augment(build(architecture).to(dtype), config).to(dtype).eval()
    begin(model)
    return model


def begin(model: Any) -> None:
    """Lets the model forget what it read, and read one text, which memories that keep a text look into from then on."""
    model.memory.reset()
    model.memory.read(tokens(1, 24, seed=7))


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def inputs(model: PreTrainedModel, batch: int = 2, length: int = LENGTH, seed: int = 0) -> dict[str, torch.Tensor]:
    given = {"input_ids": tokens(batch, length, seed=seed)}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens(batch, length, seed=seed + 1)
    return given


@torch.no_grad()
def logits(model: PreTrainedModel, **given: Any) -> torch.Tensor:
    return model(**given).logits


def is_causal(model: PreTrainedModel) -> bool:
    return model.can_generate() and not model.config.is_encoder_decoder


def needs_generation(model: PreTrainedModel) -> None:
    if not model.can_generate():
        pytest.skip("a masked model does not generate")


@every_case
def test_rule_01_a_neutral_start_leaves_the_logits_as_they_were(memory: str, architecture: str) -> None:
    model = build(architecture)
    before = logits(model, **inputs(model))
    begin(mnemic.augment(model, config_of(memory).neutral()))
    torch.testing.assert_close(logits(model, **inputs(model)), before, **CLOSE)
    assert (logits(augmented(memory, architecture), **inputs(model)) - before).abs().max() > 1e-2


@every_case
def test_rule_02_disabled_and_detached_are_the_base_bit_for_bit(memory: str, architecture: str) -> None:
    base = build(architecture)
    kind, names, before = type(base), set(base.state_dict()), logits(base, **inputs(base))
    model = augmented(memory, architecture)
    with_memory = logits(model, **inputs(model))
    with model.memory.disabled():
        assert torch.equal(logits(model, **inputs(model)), before)
    assert torch.equal(logits(model, **inputs(model)), with_memory)
    assert model.memory.detach() is model
    assert type(model) is kind
    assert set(model.state_dict()) == names
    assert torch.equal(logits(model, **inputs(model)), before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@every_case
@pytest.mark.parametrize("base_trained", [False, True], ids=["base-elsewhere", "base-included"])
def test_rule_03_a_saved_model_comes_back(memory: str, architecture: str, base_trained: bool, tmp_path: Any) -> None:
    base = build(architecture)
    if not base_trained:
        base.save_pretrained(tmp_path / "base")
        base = type(base).from_pretrained(tmp_path / "base")
    model = mnemic.augment(base, config_of(memory))
    begin(model)
    first, second = inputs(model, seed=3), inputs(model, seed=4)
    logits(model, **first)
    model.save_pretrained(tmp_path / "saved")
    loaded = mnemic.load(tmp_path / "saved").eval()
    assert (tmp_path / "saved" / "config.json").exists() == base_trained
    assert type(loaded) is type(model)
    assert loaded.memory.configs == model.memory.configs
    loaded.memory.load_state(model.memory.state())
    assert torch.equal(logits(loaded, **second), logits(model, **second))


@every_case
def test_rule_04_the_memory_learns_and_its_gradient_is_right(memory: str, architecture: str) -> None:
    model = augmented(memory, architecture, torch.float64, **SMOOTH.get(memory.partition(".")[0], {}))
    learned = list(model.memory.parameters()) or [next(model.memory._places.blocks[0].parameters())]
    model.requires_grad_(False)
    for parameter in learned:  # a memory without parameters passes the gradient on to the model's
        parameter.requires_grad_(True)
    given = inputs(model)
    weights = torch.randn(logits(model, **given).shape, generator=torch.Generator().manual_seed(5)).double()

    def value() -> torch.Tensor:
        searches = memory.partition(".")[0] == "attention"  # whose search is in float32
        with contextlib.nullcontext() if searches else InDouble():
            return (model(**given).logits * weights).mean()

    value().backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == {
        n for n, p in model.named_parameters() if any(p is one for one in learned)
    }
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(6)).double()

        @torch.no_grad()
        def slope(step: float, parameter: torch.Tensor = parameter, direction: torch.Tensor = direction) -> float:
            parameter += step * direction
            above = value()
            parameter -= 2 * step * direction
            below = value()
            parameter += step * direction
            return ((above - below) / (2 * step)).item()

        got = (parameter.grad * direction).sum().item()
        assert abs(got) > 1e-6, name
        # a feed-forward's corner may be within the larger step
        smooth = next((step for step in (3e-6, 3e-7) if abs(slope(step / 3) / slope(step * 3) - 1) < 1e-6), None)
        if smooth is not None:
            assert slope(smooth) == pytest.approx(got, rel=1e-6), name
        else:  # parts are computed in float32 whatever the weights are: the step must stand out from that
            slopes = [slope(step) for step in (1e-5, 1e-4, 1e-3, 1e-2, 3e-2)]
            assert min(abs(s / got - 1) for s in slopes) < 1e-2, (name, got, slopes)


@every_case
@pytest.mark.parametrize("side", ["left", "right"])
def test_rule_05_padding_changes_nothing(memory: str, architecture: str, side: str) -> None:
    base, model = build(architecture), augmented(memory, architecture)
    short, pad = inputs(model, batch=1), 5
    padding, mask = torch.full((1, pad), PAD), torch.ones(1, LENGTH, dtype=torch.long)
    order = (lambda a, b: torch.cat([a, b], 1)) if side == "left" else (lambda a, b: torch.cat([b, a], 1))
    padded = short | {
        "input_ids": order(padding, short["input_ids"]),
        "attention_mask": order(torch.zeros_like(padding), mask),
    }
    by_table = model.memory._places.anatomy.positions == "absolute"
    if by_table and not model.config.is_encoder_decoder and architecture != "roberta":
        padded["position_ids"] = (padded["attention_mask"].cumsum(1) - 1).clamp(min=0)

    def difference(of: PreTrainedModel) -> torch.Tensor:
        got = logits(of, **padded)
        if not of.config.is_encoder_decoder:
            got = got[:, pad:] if side == "left" else got[:, :LENGTH]
        return (got - logits(of, **short)).abs().max()

    if difference(base) > 1e-3:
        pytest.skip("the base model itself places tokens by where they stand, left padding moves them")
    at_encoder = memory.partition(".")[0] == "tokens" and memory != "tokens.decoder"
    if side == "left" and at_encoder and model.memory._places.anatomy.positions == "relative":
        with pytest.raises(UnsupportedModel, match="pad on the right"):
            model(**padded)
        pytest.skip("T5 counts distances by place in the input: padding on the left is an error")
    assert difference(model) < 1e-4


@every_case
def test_rule_06_nothing_flows_back_in_time(memory: str, architecture: str) -> None:
    model = augmented(memory, architecture)
    if not model.can_generate():
        pytest.skip("a masked model reads both ways by design")
    given = inputs(model)
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    before = logits(model, **given)
    for t in range(1, LENGTH):
        changed = given | {name: given[name].clone()}
        changed[name][:, t] = (changed[name][:, t] + 1) % VOCABULARY
        after = logits(model, **changed)
        torch.testing.assert_close(after[:, :t], before[:, :t], rtol=1e-5, atol=1e-5)
        assert (after[:, t:] - before[:, t:]).abs().max() > 1e-4


@every_case
def test_rule_07_rows_do_not_see_each_other(memory: str, architecture: str) -> None:
    model = augmented(memory, architecture)
    given = inputs(model, batch=3)
    together = logits(model, **given)
    for row in range(3):
        begin(model)
        alone = logits(model, **{name: value[row : row + 1] for name, value in given.items()})
        torch.testing.assert_close(together[row : row + 1], alone, **CLOSE)


@every_case
def test_rule_08_documents_back_to_back_are_documents_apart(memory: str, architecture: str) -> None:
    model = augmented(memory, architecture, torch.float64)
    given = inputs(model)
    starts = torch.zeros(2, LENGTH, dtype=torch.bool)
    starts[:, 0] = True
    if not is_causal(model):
        with pytest.raises(UnsupportedModel, match="is not causal"):
            model(**given, document_starts=starts)
        pytest.skip("not causal: one document a row, document_starts is an error")
    if not model.memory._places.positions_by_id:
        with pytest.raises(UnsupportedModel, match="where they stand"):
            model(**given, document_starts=starts)
        pytest.skip("ALiBi counts distances by place in the input: one document a row, document_starts is an error")
    ids = given["input_ids"]
    for border in range(1, LENGTH):
        here = starts.clone()
        here[0, border] = here[1, LENGTH - border] = True
        begin(model)
        together = logits(model, input_ids=ids, document_starts=here)
        for row, cut in ((0, border), (1, LENGTH - border)):
            for part in (slice(0, cut), slice(cut, LENGTH)):
                begin(model)
                alone = logits(model, input_ids=ids[row : row + 1, part])
                torch.testing.assert_close(together[row : row + 1, part], alone, **CLOSE)


@every_case
@pytest.mark.parametrize("beams", [1, 3], ids=["greedy", "beam"])
def test_rule_09_cached_generation_equals_uncached(memory: str, architecture: str, beams: int) -> None:
    model = augmented(memory, architecture)
    needs_generation(model)
    how = {"do_sample": False, "num_beams": beams, "num_return_sequences": beams, "max_new_tokens": 10}
    given = {"input_ids": tokens(2, 7), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    cached = generate(model, given, use_cache=True, **how)
    assert torch.equal(cached, generate(model, given, use_cache=False, **how))


@every_case
@pytest.mark.parametrize("beams", [1, 3], ids=["greedy", "beam"])
def test_rule_09_a_batch_generates_what_each_row_does(memory: str, architecture: str, beams: int) -> None:
    model, base = augmented(memory, architecture), build(architecture)
    needs_generation(model)
    how = {"do_sample": False, "num_beams": beams, "max_new_tokens": 8, "min_new_tokens": 8}
    ids, mask = tokens(2, 7), torch.ones(2, 7, dtype=torch.long)
    side = slice(3, None)
    if model.config.is_encoder_decoder:
        ids[1, -3:], mask[1, -3:], side = PAD, 0, slice(0, 4)
    else:
        ids[1, :3], mask[1, :3] = PAD, 0
    given = {"input_ids": ids, "attention_mask": mask}

    def rows(of: PreTrainedModel) -> bool:
        together = generate(of, given, **how)
        alone = generate(of, {"input_ids": ids[1:, side], "attention_mask": mask[1:, side]}, **how)
        return torch.equal(together[1:, -8:], alone[:, -8:])

    assert rows(base), "the base model itself does not keep rows apart"
    assert rows(model)


@every_case
def test_rule_10_one_token_and_an_empty_memory(memory: str, architecture: str) -> None:
    model = augmented(memory, architecture)
    first = inputs(model, batch=1, length=1)
    assert logits(model, **first).isfinite().all()
    model.memory.reset()
    twice = logits(model, **inputs(model, batch=1, length=1, seed=9))
    fresh = augmented(memory, architecture)
    fresh.memory.reset()
    torch.testing.assert_close(twice, logits(fresh, **inputs(model, batch=1, length=1, seed=9)), **CLOSE)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("memory", [memory for memory in MEMORIES if memory != "attention.as_context"])
def test_rule_11_it_works_together_with_the_others(memory: str, architecture: str) -> None:
    own = memory.partition(".")[0]
    others = [config_of(name) for name in registry() if name != own and not refused(name, architecture)]
    if not others:
        pytest.skip("no other memory can be in this architecture")
    for other in others:
        model = mnemic.augment(build(architecture), config_of(memory).neutral(), other.neutral())
        begin(model)
        given = inputs(model)
        torch.testing.assert_close(logits(model, **given), logits(build(architecture), **given), **CLOSE)


@every_case
def test_copies_are_independent(memory: str, architecture: str) -> None:
    model = augmented(memory, architecture)
    given = inputs(model)
    before = logits(model, **given)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in list(twin.memory.parameters()) or twin.memory._places.blocks[0].parameters():
            parameter += torch.randn_like(parameter)
    assert torch.equal(logits(model, **given), before)
    assert not torch.allclose(logits(twin, **given), before)
    with twin.memory.disabled():
        assert torch.equal(logits(model, **given), before)


def generate(model: PreTrainedModel, given: dict[str, torch.Tensor], **how: Any) -> torch.Tensor:
    if hasattr(model, "memory"):
        begin(model)
    return model.generate(**given, pad_token_id=PAD, eos_token_id=EOS, **how)
