"""Recurrent memory tokens: what they write behind one segment is the memory before the next."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.architectures import VOCABULARY, build
from tests.unit.memories.recurrent import (
    APART,
    CAUSAL,
    CLOSE,
    COUNT,
    EXACT,
    XL,
    Reader,
    every_architecture,
    ids,
    made,
    starting,
)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox", "mnemic-rotary", "mnemic-sinusoidal"])
def test_segments_are_read_as_the_formula_says(architecture: str) -> None:
    """[M_t ; X_t ; M_t] given to the base by hand, in float64; M_{t+1} = M_1 + s H / rms(H), H what comes out."""
    model, base = made(architecture, torch.float64), build(architecture).double()
    layer, text = model.memory.tokens.layer, ids(2, 21)
    reader, memory = Reader(model, 2), layer.vectors.expand(2, -1, -1)
    positions = torch.arange(-COUNT, 7 + COUNT).expand(2, -1)
    if architecture == "gpt2":
        positions = positions.clamp(0, 6)
    with torch.no_grad():
        for begin in (0, 7, 14):
            segment = text[:, begin : begin + 7]
            embedded = base.base_model.get_input_embeddings()(segment)
            everything = torch.cat([memory, embedded, memory], 1)
            given = {"inputs_embeds": everything, "attention_mask": torch.ones(2, 7 + 2 * COUNT)}
            states = base.base_model(**given, position_ids=positions, use_cache=False).last_hidden_state
            logits = base.get_output_embeddings()(states[:, COUNT:-COUNT])
            expected = -logits.log_softmax(-1).gather(2, segment.roll(-1, 1).unsqueeze(2)).squeeze(2)
            torch.testing.assert_close(reader.read(segment), expected, **EXACT)
            written = states[:, -COUNT:]
            torch.testing.assert_close(reader.state.written, written, **EXACT)
            memory = layer.vectors + layer.scale * written / written.square().mean(-1, keepdim=True).sqrt()


@every_architecture
def test_later_segments_know_the_first_and_what_stands_behind_one_changes_nothing_in_it(architecture: str) -> None:
    model, text = made(architecture), ids(2, 24)
    other = text.clone()
    other[:, 2] = (other[:, 2] + 1) % VOCABULARY
    with torch.no_grad():
        first, second = Reader(model, 2), Reader(model, 2)
        plain = model(input_ids=text[:, :8]).logits.float().log_softmax(-1)
        expected = -plain.gather(2, text[:, :8].roll(-1, 1).unsqueeze(2)).squeeze(2)
        torch.testing.assert_close(first.read(text[:, :8]), expected, **CLOSE)
        second.read(other[:, :8])
        for begin in (8, 16):
            piece = slice(begin, begin + 8)
            assert (first.read(text[:, piece]) - second.read(other[:, piece])).abs().max() > 1e-4


@pytest.mark.parametrize("architecture", APART + XL)
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_documents_back_to_back_are_documents_apart(architecture: str, gated: bool) -> None:
    """A document that begins within a segment starts with a new memory, and its own is what goes on."""
    model, text = made(architecture, torch.float64, gated=gated), ids(2, 20)
    if gated:
        model.memory.tokens.layer.gate.data = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    borders = {0: (4, 13), 1: (10,)}
    with torch.no_grad():
        together = Reader(model, 2)
        starts = [starting((2, 10), (0, 0), (1, 0), (0, 4)), starting((2, 10), (0, 3), (1, 0))]
        found = torch.cat([together.read(text[:, i * 10 : i * 10 + 10], starts[i]) for i in (0, 1)], 1)
        for row, inner in borders.items():
            cuts = (0, *inner, 20)
            for begin, end in itertools.pairwise(cuts):
                alone, first = Reader(model, 1), True
                stops = sorted({begin, end, *(stop for stop in (10,) if begin < stop < end)})
                for a, b in itertools.pairwise(stops):
                    losses = alone.read(text[row : row + 1, a:b], starting((1, b - a), (0, 0)) if first else None)
                    kept = slice(0, b - a - 1)  # the last target is another's where a document is cut
                    torch.testing.assert_close(found[row, a:b][kept], losses[0][kept], **CLOSE)
                    first = False


@pytest.mark.parametrize("architecture", CAUSAL + XL[:3])
def test_padding_behind_a_segment_is_not_read(architecture: str) -> None:
    model, text = made(architecture), ids(2, 8)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    mask[0, :] = 1
    with torch.no_grad():
        padded, alone, nothing = Reader(model, 2), Reader(model, 1), Reader(model, 2)
        padded.read(text, mask=mask)
        alone.read(text[1:, :5])
        torch.testing.assert_close(padded.state.written[1:], alone.state.written, **CLOSE)
        nothing.read(text)
        before, absent = nothing.state.written.clone(), torch.tensor([[1] * 8, [0] * 8])
        nothing.read(text, mask=absent)
        assert torch.equal(nothing.state.written[1], before[1])
        assert (nothing.state.written[0] - before[0]).abs().max() > 1e-3


@pytest.mark.parametrize("architecture", ["bloom", "falcon-alibi"])
def test_models_that_cannot_keep_documents_apart_begin_anew_with_the_next_segment(architecture: str) -> None:
    model, text = made(architecture), ids(2, 16)
    with torch.no_grad():
        reader, fresh = Reader(model, 2), Reader(model, 2)
        reader.read(text[:, :8], starting((2, 8), (0, 0), (1, 0), (1, 5)))
        assert reader.state.begun.tolist() == [True, False]
        later, new = reader.read(text[:, 8:], starting((2, 8))), fresh.read(text[:, 8:], starting((2, 8)))
        assert (later[0] - new[0]).abs().max() > 1e-4
        torch.testing.assert_close(later[1], new[1], **CLOSE)
        again = Reader(model, 2)
        again.read(text[:, :8])
        torch.testing.assert_close(again.read(text[:, 8:], starting((2, 8), (0, 0), (1, 0))), new, **CLOSE)


def gradient_of_first(model: Any, text: Tensor, cut: int | None) -> Tensor:
    """What the loss of the third segment has to say of the embeddings of the first."""
    table = model.get_input_embeddings().weight
    model.zero_grad()
    reader = Reader(model, 1)
    for number in range(3):
        if number == cut:
            reader.state.detach()
        loss = reader.read(text[:, number * 6 : number * 6 + 6]).sum()
    loss.backward()
    found: Tensor = table.grad[text[0, :6].unique()]
    return found


@pytest.mark.parametrize("architecture", ["gpt_neox", "llama", "mnemic-rotary", "mnemic-xl+xl"])
def test_the_gradient_goes_back_as_far_as_it_is_let_and_no_further(architecture: str) -> None:
    model = made(architecture)
    first, later = torch.arange(3, 9), torch.arange(9, 21)
    text = torch.cat([first, later])[None]
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        model.get_output_embeddings().weight = torch.nn.Parameter(model.get_output_embeddings().weight.clone())
    assert (gradient_of_first(model, text, cut=None).abs().sum(1) > 1e-6).all()
    for cut in (1, 2):
        assert torch.equal(gradient_of_first(model, text, cut), torch.zeros(6, 32))


def test_the_gradient_through_segments_is_right() -> None:
    model, text = made("mnemic-rotary", torch.float64), ids(2, 18)
    starts = [starting((2, 6), (0, 0), (1, 0)), starting((2, 6), (1, 2)), starting((2, 6))]

    def value() -> Tensor:
        reader = Reader(model, 2)
        return torch.stack([reader.read(text[:, i * 6 : i * 6 + 6], starts[i]) for i in range(3)])[2].sum()

    value().backward()
    for name, parameter in model.memory.named_parameters():
        direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(6)).double()
        slopes = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                parameter += step * direction
                slopes.append(value().item())
                parameter -= step * direction
        expected = (slopes[0] - slopes[1]) / 2e-6
        assert (parameter.grad * direction).sum().item() == pytest.approx(expected, rel=1e-5), name


def test_layers_that_run_again_for_their_gradient_give_the_same() -> None:
    def gradients(checkpoint: bool) -> list[Tensor]:
        model = made("llama", torch.float64).train()
        if checkpoint:
            model.gradient_checkpointing_enable()
        reader, text = Reader(model, 2), ids(2, 12)
        losses = reader.read(text[:, :6]), reader.read(text[:, 6:], starting((2, 6), (1, 3)))
        sum(part.sum() for part in losses).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for found, expected in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("architecture", XL[:3])
def test_the_memory_behind_a_segment_stands_where_it_does_without_a_cache(architecture: str) -> None:
    """As long as an XL cache is empty it changes nothing."""
    model, text = made(architecture, torch.float64), ids(2, 8)
    with torch.no_grad():
        model.memory.tokens.layer.vectors.normal_(generator=torch.Generator().manual_seed(2))
        cached, plain = Reader(model, 2), Reader(model, 2)
        plain.cache = None
        torch.testing.assert_close(cached.read(text), plain.read(text), **EXACT)
        torch.testing.assert_close(cached.state.written, plain.state.written, **EXACT)


@pytest.mark.parametrize("architecture", XL)
def test_an_xl_cache_keeps_nothing_of_the_memory(architecture: str) -> None:
    model, text = made(architecture), ids(2, 16)
    with torch.no_grad():
        reader = Reader(model, 2)
        reader.read(text[:, :8])
        plain = model.memory.new_cache(2)
        model(input_ids=text[:, :8], past_key_values=plain, use_cache=True)
        mine = reader.cache.tensors()
        for name, expected in plain.tensors().items():
            torch.testing.assert_close(mine[name], expected, **CLOSE, msg=name)
