"""SRU++: against the written-out oracle, from segment to segment, and in every way a model of transformers is used."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import mnemic
from mnemic.cli import main
from mnemic.data import Document, train_tokenizer
from mnemic.data.documents import Corpus
from mnemic.errors import UsageError
from mnemic.models import MnemicSRUConfig, MnemicSRUForCausalLM, MnemicSRUModel
from mnemic.train.config import TrainConfig
from mnemic.train.loop import Loop
from tests.unit.models.naive_sru import (
    CLOSE,
    LENGTH,
    ROWS,
    VOCABULARY,
    as_starts,
    model_of,
    naive_logits,
    tiny_sru,
    tokens,
)


def in_segments(model: MnemicSRUForCausalLM, ids: Tensor, starts: Tensor | None, cuts: list[int]) -> Tensor:
    cache, logits = model.new_cache(ids.shape[0]), []
    for low, high in itertools.pairwise([0, *cuts, ids.shape[1]]):
        part = None if starts is None else starts[:, low:high]
        logits.append(model(ids[:, low:high], past_key_values=cache, document_starts=part).logits)
    return torch.cat(logits, dim=1)


cuts = st.sets(st.integers(1, LENGTH - 1), max_size=5).map(sorted)
documents = st.lists(st.sets(st.integers(0, LENGTH - 1), max_size=3), min_size=ROWS, max_size=ROWS)


# -- against the oracle ------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("heads", [1, 2])
def test_logits_are_those_of_the_oracle(heads: int, attention: str) -> None:
    model, ids = tiny_sru(num_attention_heads=heads, attn_implementation=attention), tokens(1)
    starts = as_starts([{5}, {0, 3, 4, 13}])
    for given_starts in (starts, torch.zeros_like(starts)):
        found = model(ids, document_starts=given_starts if given_starts.any() else None).logits
        for row in range(ROWS):
            torch.testing.assert_close(found[row], naive_logits(model, ids[row], given_starts[row]), **CLOSE)


def test_gradients_are_those_of_the_steps_one_by_one() -> None:
    """The whole model's gradient against finite differences along a random direction of each parameter."""
    model, ids = tiny_sru(), tokens(2, length=6)
    targets = tokens(3, length=6)
    starts = as_starts([{2}, set()])[:, :6]

    def loss() -> Tensor:
        return model.token_losses(targets, input_ids=ids, document_starts=starts, use_cache=False)[0].sum()

    loss().backward()
    for name, parameter in model.named_parameters():
        direction = torch.randn_like(parameter)
        with torch.no_grad():
            parameter += 1e-6 * direction
            above = loss().item()
            parameter -= 2e-6 * direction
            below = loss().item()
            parameter += 1e-6 * direction
        slope = (parameter.grad * direction).sum().item()
        assert (above - below) / 2e-6 == pytest.approx(slope, rel=1e-4, abs=1e-6), name
        assert abs(slope) > 1e-6, name


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cuts=cuts, rows=documents, seed=st.integers(0, 99))
@torch.no_grad()
def test_segments_equal_one_long_forward(cuts: list[int], rows: list[set[int]], seed: int) -> None:
    model, ids, starts = model_of(), tokens(seed), as_starts(rows)
    whole = model(ids, document_starts=starts, use_cache=False).logits
    torch.testing.assert_close(in_segments(model, ids, starts, cuts), whole, **CLOSE)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(limit=st.integers(1, 8), cuts=cuts, rows=documents, seed=st.integers(0, 99))
@torch.no_grad()
def test_a_short_memory_limits_attention_but_not_the_state(
    limit: int, cuts: list[int], rows: list[set[int]], seed: int
) -> None:
    model, ids, starts = model_of(limit), tokens(seed), as_starts(rows)
    found = in_segments(model, ids, starts, cuts)
    begin = torch.tensor([max([0, *[cut for cut in cuts if cut <= i]]) for i in range(LENGTH)])
    seen = torch.arange(LENGTH)[None, :] >= begin[:, None] - limit
    for row in range(ROWS):
        torch.testing.assert_close(found[row], naive_logits(model, ids[row], starts[row], seen), **CLOSE)


@torch.no_grad()
def test_documents_back_to_back_are_documents_apart() -> None:
    model, ids = model_of(), tokens(4)
    for border in range(1, LENGTH):
        together = model(ids, document_starts=as_starts([{border}, {LENGTH - border}])).logits
        for row, cut in enumerate((border, LENGTH - border)):
            for part in (slice(0, cut), slice(cut, LENGTH)):
                alone = model(ids[row : row + 1, part]).logits
                torch.testing.assert_close(together[row : row + 1, part], alone, **CLOSE)
    packed = torch.tensor([[*range(5), *range(9)]])
    apart = model(ids, document_starts=as_starts([{5}, {5}])).logits
    torch.testing.assert_close(model(ids, position_ids=packed, use_cache=False).logits, apart, **CLOSE)
    assert (apart - model(ids).logits)[:, 5:].abs().max() > 1e-3


@torch.no_grad()
def test_nothing_flows_back_in_time() -> None:
    model, ids = model_of(), tokens(5)
    before = model(ids).logits
    for t in range(LENGTH):
        changed = ids.clone()
        changed[:, t] = (changed[:, t] + 1) % VOCABULARY
        after = model(changed).logits
        torch.testing.assert_close(after[:, :t], before[:, :t], **CLOSE)
        assert (after[:, t:] - before[:, t:]).abs().amax((0, 2)).min() > 1e-9


# -- padding -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str, attention: str) -> None:
    model, ids = tiny_sru(attn_implementation=attention), tokens(6)
    padded, mask = torch.zeros(2, 11, dtype=torch.long), torch.ones(2, 11, dtype=torch.long)
    where = slice(5, 11) if side == "left" else slice(0, 6)
    padded[0, where], padded[1] = ids[0, :6], ids[1, :11]
    mask[0] = 0
    mask[0, where] = 1
    cache = model.new_cache(2)
    found = model(padded, attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(found[:1, where], model(ids[:1, :6]).logits, **CLOSE)
    torch.testing.assert_close(found[1:], model(ids[1:, :11]).logits, **CLOSE)
    rest = model(ids[:, 11:], past_key_values=cache).logits
    row = torch.cat([ids[:1, :6], ids[:1, 11:]], dim=1)
    torch.testing.assert_close(rest[:1], model(row).logits[:, 6:], **CLOSE)
    torch.testing.assert_close(rest[1:], model(ids[1:]).logits[:, 11:], **CLOSE)


@torch.no_grad()
def test_a_start_on_padding_starts_nothing() -> None:
    model, ids = model_of(), tokens(6)
    mask = torch.ones_like(ids)
    mask[0, 4:9] = 0
    starts = torch.zeros_like(ids, dtype=torch.bool)
    expected = model(ids, attention_mask=mask, document_starts=starts).logits
    starts[0, 6] = True
    assert torch.equal(model(ids, attention_mask=mask, document_starts=starts).logits, expected)


# -- a model of transformers -------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}])
def test_cached_generation_equals_uncached(how: dict[str, int]) -> None:
    model, ids = model_of(), tokens(12, length=8)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    common = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, **how}
    cached = model.generate(ids, **common)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **common))
    alone = model.generate(ids[:1, 3:], **{**common, "attention_mask": mask[:1, 3:]})
    assert cached[0, 8 : 8 + alone.shape[1] - 5].tolist() == alone[0, 5:].tolist()


@torch.no_grad()
def test_saved_and_loaded_by_name(tmp_path: Path) -> None:
    model, ids = tiny_sru(), tokens(13)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert type(loaded) is MnemicSRUForCausalLM
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    config = AutoConfig.from_pretrained(tmp_path)
    assert {name: getattr(config, name) for name in config.help()} == {
        name: getattr(model.config, name) for name in model.config.help()
    }
    stack = AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert type(stack) is MnemicSRUModel
    assert torch.equal(stack(ids).last_hidden_state, model.model(ids).last_hidden_state)


@torch.no_grad()
def test_losses_are_of_probabilities_that_add_up_to_one() -> None:
    model, ids = model_of(), tokens(14)
    logits = model(ids).logits
    torch.testing.assert_close(logits.softmax(-1).sum(-1), torch.ones(ROWS, LENGTH, dtype=torch.float64))
    targets = ids.roll(-1, dims=1)
    targets[0, 4] = -100
    losses, outputs = model.token_losses(targets, input_ids=ids)
    expected = -logits.log_softmax(-1).gather(2, targets.clamp(min=0)[..., None])[..., 0] * (targets != -100)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-6)
    assert outputs.last_hidden_state.shape == (ROWS, LENGTH, 12)
    assert model(ids, labels=ids).loss.item() == pytest.approx(
        -logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).mean().item(), rel=1e-6
    )
    torch.testing.assert_close(model(ids, logits_to_keep=1).logits, logits[:, -1:], **CLOSE)


@torch.no_grad()
def test_hidden_states_and_attention_maps_can_be_had() -> None:
    model, ids = tiny_sru(attn_implementation="eager"), tokens(15)
    outputs = model(ids, output_hidden_states=True, output_attentions=True)
    assert [tuple(states.shape) for states in outputs.hidden_states] == [(ROWS, LENGTH, 12)] * 3
    for weights in outputs.attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(ROWS, 1, LENGTH, dtype=torch.float64))


@torch.no_grad()
def test_the_start_of_the_weights() -> None:
    model = MnemicSRUForCausalLM(MnemicSRUConfig(hidden_size=64, num_hidden_layers=2, vocab_size=50))
    for block in model.model.layers:
        assert block.self_attn.alpha.item() == 0
        assert (block.recurrence.reset_bias == -2).all()
        assert not block.recurrence.forget_bias.any()
        bound = (6 / (16 + 3 * 64)) ** 0.5
        assert 0.9 * bound < block.recurrence.out_proj.weight.abs().max() <= bound
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.1)


@torch.no_grad()
def test_half_precision_keeps_a_precise_state() -> None:
    model, ids = tiny_sru().float(), tokens(16)
    cache = model.new_cache(ROWS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(ids, past_key_values=cache).logits
    assert (found - model(ids).logits).abs().max() < 0.3
    assert all(state.dtype == torch.float32 for state in cache.states)
    assert model.to(torch.bfloat16)(ids, past_key_values=cache).logits.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_size": 10, "num_attention_heads": 4}, "attention_size 10 does not divide"),
        ({"xl_length": 0}, "xl_length = 0: expected at least 1"),
        ({"num_hidden_layer": 2}, "did you mean 'num_hidden_layers'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        MnemicSRUConfig(**options)
    assert message in str(caught.value)


def test_settings_are_documented() -> None:
    assert all(text.endswith(".") and len(text) > 15 for text in MnemicSRUConfig.help().values())
    assert "intermediate_size" not in MnemicSRUConfig.help()
    assert MnemicSRUConfig(hidden_size=64).attention_size == 16


# -- trained -----------------------------------------------------------------------------------------------------------


def test_the_loss_falls_on_a_real_text_and_attention_opens() -> None:
    text = Path(textwrap.__file__).read_bytes()[: 8 * 257]
    model = MnemicSRUForCausalLM(
        MnemicSRUConfig(vocab_size=256, hidden_size=64, num_hidden_layers=2, attention_size=32, xl_length=32)
    ).train()
    ids = torch.tensor(list(text)).view(8, 257)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(5):
        cache = model.new_cache(8)
        for low in range(0, 256, 32):
            targets = ids[:, low + 1 : low + 33]
            loss = model.token_losses(targets, input_ids=ids[:, low : low + 32], past_key_values=cache)[0].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[0] > 5.3
    assert losses[-1] < 2.5
    assert all(block.self_attn.alpha.abs().item() > 1e-3 for block in model.model.layers)


def test_trained_and_evaluated_from_the_command_line(tmp_path: Path, capsys: Any) -> None:
    for split in ("train", "valid", "test"):
        (tmp_path / "corpus" / split).mkdir(parents=True)
        for number in range(3):
            text = f"document {number} of {split}: " + "abc abd abe. " * 10
            (tmp_path / "corpus" / split / f"{number}.txt").write_text(text)
    corpus, out = str(tmp_path / "corpus"), tmp_path / "run"
    small = ["--tokenizer", "byte", "--batch-size", "2", "--segment-length", "16", "--warmup", "1"]
    sizes = "sru:hidden_size=16,num_hidden_layers=1,xl_length=24"
    assert main(["train", corpus, "--model", sizes, "--out", str(out), "--steps", "4", *small]) == 0
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    assert (type(model), model.config.xl_length) == (MnemicSRUForCausalLM, 24)
    capsys.readouterr()
    assert main(["evaluate", str(out), corpus, "--window", "16", "--json"]) == 0, capsys.readouterr().err
    assert '"perplexity"' in capsys.readouterr().out


def test_a_stopped_run_goes_on_exactly_and_any_batch_gives_the_same_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [Document(str(n), "a memory keeps what was read " * (n % 4 + 1)) for n in range(8)]
    corpus, tokenizer = Corpus("tiny", {"train": lambda: texts, "valid": lambda: texts}), train_tokenizer([], "byte")
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "xl_length": 8, "attention_start": 0.5}

    def trained(name: str) -> Any:
        torch.manual_seed(0)
        model = MnemicSRUForCausalLM(MnemicSRUConfig(vocab_size=len(tokenizer), **shape))
        often = {"checkpoint_every": 2, "log_every": 1, "resume": True, "out": str(tmp_path / name)}
        config = TrainConfig(steps=6, batch_size=2, segment_length=12, warmup=1, learning_rate=1e-2, **often)
        return mnemic.train(model, tokenizer, corpus, config)

    expected, step = trained("straight"), Loop.step

    def stopping(self: Loop, batch: dict[str, Tensor]) -> None:
        if self.progress.step == 3:
            raise KeyboardInterrupt
        step(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "step", stopping)
        with pytest.raises(KeyboardInterrupt):
            trained("stopped")
    got = trained("stopped")
    assert got.losses == expected.losses
    weights = "model/model.safetensors"
    assert (got.out / weights).read_bytes() == (expected.out / weights).read_bytes()
    model = AutoModelForCausalLM.from_pretrained(got.out / "model")
    figures = [
        mnemic.evaluate(model, tokenizer, corpus, window=window, batch_size=rows, split="valid")["perplexity"]
        for window, rows in ((12, 1), (12, 3), (12, 8))
    ]
    assert figures[1:] == pytest.approx(figures[:1] * 2, rel=1e-6)


@torch.no_grad()
def test_a_memory_token_is_attended_to_but_leaves_the_state_alone() -> None:
    model, ids = tiny_sru(), tokens(17)
    plain = model(ids, use_cache=False).logits
    cache = model.new_cache(ROWS)
    mnemic.augment(model, mnemic.MemoryTokens(count=3)).double()
    with_memory = model(ids, use_cache=False).logits
    assert (with_memory - plain).abs().max() > 1e-3
    parts = [model(ids[:, part], past_key_values=cache).logits for part in (slice(0, 5), slice(5, LENGTH))]
    torch.testing.assert_close(torch.cat(parts, dim=1), with_memory, **CLOSE)
    mnemic_free = model.memory.detach()
    for block in mnemic_free.model.layers:
        block.self_attn.alpha.zero_()
    without_attention = mnemic_free(ids, use_cache=False).logits
    mnemic.augment(model, mnemic.MemoryTokens(count=3)).double()
    torch.testing.assert_close(model(ids, use_cache=False).logits, without_attention, **CLOSE)
