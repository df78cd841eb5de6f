"""Memory tokens against a naive version of the paper's formula, and what they must never do."""

from __future__ import annotations

import math

import pytest
import torch

import mnemic
from mnemic.errors import UsageError
from mnemic.memories.tokens.layer import CLOSED, MemoryTokenLayer
from tests.contract.architectures import VOCABULARY, build


def ids(batch: int = 2, length: int = 9, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_the_model_reads_mem_then_seq(architecture: str) -> None:
    """X^{mem+seq} = [X^mem ; X^seq], written out by hand on the base model, in float64."""
    base = build(architecture).double()
    model = mnemic.augment(build(architecture).double(), mnemic.MemoryTokens(count=3)).double()
    vectors = model.memory.tokens.layer.vectors
    sequence = base.get_input_embeddings()(ids())
    extended = torch.cat([vectors.expand(2, -1, -1), sequence], dim=1)
    before = [0, 0, 0] if architecture == "gpt2" else [-3, -2, -1]
    positions = torch.tensor([before + list(range(9))]).expand(2, -1)
    with torch.no_grad():
        expected = base(
            inputs_embeds=extended, position_ids=positions, attention_mask=torch.ones(2, 12, dtype=torch.long)
        ).logits[:, 3:]
        torch.testing.assert_close(model(ids()).logits, expected, rtol=1e-10, atol=1e-10)


def test_a_gate_multiplies_the_weight_in_the_softmax() -> None:
    """A_ij = g_j exp(s_ij) / (sum over the memory of g exp(s) + sum over the sequence of exp(s))."""
    torch.manual_seed(0)
    layer = MemoryTokenLayer(count=2, width=4, gated=True)
    with torch.no_grad():
        layer.gate.copy_(torch.tensor([0.3, 2.0]))
    scores = torch.randn(5, dtype=torch.float64)
    got = (scores + torch.cat([layer.bias().double(), torch.zeros(3)])).softmax(0)
    weights = [0.3 * math.exp(scores[0]), 2.0 * math.exp(scores[1]), *(math.exp(s) for s in scores[2:])]
    torch.testing.assert_close(got, torch.tensor(weights, dtype=torch.float64) / sum(weights), rtol=1e-6, atol=0)


def test_tokens_are_distinct_at_the_start() -> None:
    vectors = MemoryTokenLayer(count=20, width=16).vectors
    assert torch.pdist(vectors).min() > 0.01


def test_a_closed_gate_opens_when_that_helps() -> None:
    """The gate's gradient at its start is what it is for a gate a little open, and training opens it."""
    model = mnemic.augment(build("gpt2"), mnemic.MemoryTokens(count=2, gated=True))
    model.requires_grad_(False)
    gate = model.memory.tokens.layer.gate.requires_grad_(True)

    def loss() -> torch.Tensor:
        return model(ids(), labels=ids()).loss

    loss().backward()
    closed = gate.grad.clone()
    with torch.no_grad():
        gate.fill_(1e-6)
    gate.grad = None
    loss().backward()
    torch.testing.assert_close(closed, gate.grad, rtol=1e-2, atol=1e-6)
    assert closed.abs().min() > 1e-5
    with torch.no_grad():
        gate.copy_(-closed.sign())
    gate.grad = None
    loss().backward()
    assert torch.equal(model.memory.tokens.layer.bias(), torch.where(closed < 0, 0.0, math.log(CLOSED)))
    assert gate.grad.isfinite().all()
    assert gate.grad[closed > 0].abs().min() > 0, "a gate pushed below zero can still open"


def test_logits_labels_and_hidden_states_have_the_length_of_the_input() -> None:
    model = mnemic.augment(build("llama"), mnemic.MemoryTokens(count=5))
    out = model(ids(), labels=ids(), output_hidden_states=True)
    assert out.logits.shape == (2, 9, VOCABULARY)
    assert {h.shape[1] for h in out.hidden_states} == {9}
    by_hand = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids()[:, 1:].flatten())
    torch.testing.assert_close(out.loss, by_hand)
    assert model(ids(), return_dict=False)[0].shape == (2, 9, VOCABULARY)
    bloom = mnemic.augment(build("bloom"), mnemic.MemoryTokens(count=5))
    parts = bloom(ids(), output_hidden_states=True, use_cache=False, return_dict=False)
    assert {h.shape[1] for h in parts[1]} == {9}


def test_the_kv_cache_is_on_and_holds_the_memory_once() -> None:
    model = mnemic.augment(build("llama"), mnemic.MemoryTokens(count=5))
    out = model(ids(), use_cache=True)
    assert out.past_key_values.get_seq_length() == 9 + 5
    step = model(ids(length=1, seed=1), past_key_values=out.past_key_values, use_cache=True)
    assert step.past_key_values.get_seq_length() == 10 + 5
    whole = model(torch.cat([ids(), ids(length=1, seed=1)], dim=1))
    torch.testing.assert_close(step.logits[:, -1], whole.logits[:, -1], rtol=1e-4, atol=1e-4)


def test_generation_goes_on_from_a_cache_of_an_earlier_turn() -> None:
    model = mnemic.augment(build("llama"), mnemic.MemoryTokens(count=5))
    how = {"do_sample": False, "eos_token_id": None}
    mask = torch.ones(1, 9, dtype=torch.long)
    first = model.generate(ids(1), attention_mask=mask, max_new_tokens=4, return_dict_in_generate=True, **how)
    longer = torch.cat([first.sequences, ids(1, 3, seed=7)], dim=1)
    mask = torch.ones_like(longer)
    again = model.generate(longer, attention_mask=mask, past_key_values=first.past_key_values, max_new_tokens=5, **how)
    assert torch.equal(again, model.generate(longer, attention_mask=mask, max_new_tokens=5, **how))


def test_sliding_windows_do_not_move_past_the_memory() -> None:
    """Far beyond the window the memory is still read, with and without the cache."""
    model = mnemic.augment(build("mistral"), mnemic.MemoryTokens(count=4))
    text = ids(1, 40)
    with torch.no_grad():
        before = model(text).logits
        model.memory.tokens.layer.vectors += 1.0
        after = model(text).logits
        assert (before[:, -1] - after[:, -1]).abs().max() > 1e-3
        out = model(text[:, :20], use_cache=True)
        logits = [out.logits]
        for t in range(20, 40):
            out = model(text[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
            logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), after, rtol=1e-4, atol=1e-4)
    assert out.past_key_values.layers[0].keys.shape[-2] == 4 + 8 - 1


def test_an_absolute_position_table_loses_no_room() -> None:
    model = mnemic.augment(build("gpt2"), mnemic.MemoryTokens(count=10))
    assert model(ids(1, 64)).logits.shape[1] == 64


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(UsageError, match="count = -1: expected 0 or more"):
        mnemic.MemoryTokens(count=-1)
    model = mnemic.augment(build("llama"), mnemic.MemoryTokens(count=2))
    with pytest.raises(UsageError, match=r"attention_mask must be \(batch, length\)"):
        model(ids(), attention_mask=torch.zeros(2, 1, 9, 9))
    with pytest.raises(UsageError, match="static KV cache"):
        model.generate(ids(), cache_implementation="static", max_new_tokens=2, disable_compile=True)
    cache = model(ids(), use_cache=True).past_key_values
    with pytest.raises(UsageError, match="document_starts needs an empty KV cache"):
        model(ids(), past_key_values=cache, document_starts=torch.zeros(2, 9, dtype=torch.bool))


def test_an_error_inside_the_model_leaves_no_trace() -> None:
    model = mnemic.augment(build("llama"), mnemic.MemoryTokens(count=2, gated=True))
    before = model(ids()).logits
    with pytest.raises(IndexError):
        model(torch.full((2, 9), VOCABULARY + 5))
    assert torch.equal(model(ids()).logits, before)
    other = build("llama")
    assert torch.equal(other(ids()).logits, build("llama")(ids()).logits)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("position", ["t5", "xl", "rotary", "sinusoidal"])
def test_segments_through_the_xl_cache_are_one_long_forward(position: str, gated: bool) -> None:
    """The memory is read in every segment, stored in none, and documents stay apart in cache and segment."""
    from mnemic.models import MnemicDecoderConfig, MnemicDecoderForCausalLM

    torch.manual_seed(0)
    config = MnemicDecoderConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_attention_heads=4, num_hidden_layers=2, position=position,
        xl_length=40, initializer_range=0.3,
    )  # fmt: skip
    model = mnemic.augment(
        MnemicDecoderForCausalLM(config).double(), mnemic.MemoryTokens(count=3, gated=gated)
    ).double()
    if gated:
        with torch.no_grad():
            model.memory.tokens.layer.gate.copy_(torch.tensor([0.5, 1.5, 3.0]))
    text = ids(2, 30)
    starts = torch.zeros(2, 30, dtype=torch.bool)
    starts[0, [0, 13]], starts[1, [0, 4, 5, 20]] = True, True
    with torch.no_grad():
        long = model(text, document_starts=starts, use_cache=False).logits
        cache, pieces = model.new_cache(2), []
        for piece, here in zip(text.split([7, 1, 11, 11], 1), starts.split([7, 1, 11, 11], 1), strict=True):
            out = model(piece, past_key_values=cache, use_cache=True, document_starts=here)
            pieces.append(out.logits)
        torch.testing.assert_close(torch.cat(pieces, 1), long, rtol=1e-8, atol=1e-8)
        assert cache.length == 30
        alone = model(text[1:, 5:20], use_cache=False).logits
        torch.testing.assert_close(long[1:, 5:20], alone, rtol=1e-8, atol=1e-8)
        with model.memory.disabled():
            without = model(text, document_starts=starts, use_cache=False).logits
        assert (without - long).abs().max() > 1e-3
    losses, _ = model.token_losses(targets=text, input_ids=text, document_starts=starts, use_cache=False)
    by_hand = torch.nn.functional.cross_entropy(long.flatten(0, 1), text.flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten(), by_hand, rtol=1e-8, atol=1e-8)


def test_padding_on_the_left_does_not_move_documents() -> None:
    """Where a model counts real tokens, it does so too where documents start."""
    mask, starts = torch.ones(2, 10, dtype=torch.long), torch.zeros(2, 10, dtype=torch.bool)
    mask[1, :3], starts[0, 4] = 0, True
    given = {"input_ids": torch.arange(3, 23).view(2, 10), "attention_mask": mask, "document_starts": starts}
    base = build("mnemic-sinusoidal")(**given).logits
    found = mnemic.augment(build("mnemic-sinusoidal"), mnemic.MemoryTokens(count=3, gated=True)).eval()(**given).logits
    real = mask.bool()
    torch.testing.assert_close(found[real], base[real], rtol=1e-4, atol=1e-4)
