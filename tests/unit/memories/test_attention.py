"""A model that reads with an attention memory: against naive attention, full attention, and itself in other pieces."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import mnemic
from mnemic.errors import UsageError
from mnemic.hf.losses import token_losses
from mnemic.memories.attention.search import ListedKeys
from mnemic.memories.attention.state import State
from mnemic.models import MnemicDecoderConfig, MnemicDecoderForCausalLM
from tests.contract.architectures import VOCABULARY, build

EVERYTHING = {"size": 1000, "search": "exact"}


def decoder(position: str = "t5", xl_length: int = 0, **memory: Any) -> Any:
    torch.manual_seed(0)
    config = MnemicDecoderConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=2,
        position=position,
        xl_length=xl_length,
    )
    model = MnemicDecoderForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
    model = mnemic.augment(model, mnemic.KNNAttention(**{"layers": [1], "k": 3, **EVERYTHING, **memory}))
    with torch.no_grad():
        for mix in model.memory.attention.layers.values():
            mix.gate.copy_(0.1 * torch.randn(4, generator=torch.Generator().manual_seed(1)))
    return model.double().eval()


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


class Reader:
    """Reads pieces of a text one after the other, and gives the losses of their next tokens."""

    def __init__(self, model: Any, rows: int = 1) -> None:
        self.model, self.state = model, model.memory.new_state(rows)
        self.cache = model.new_cache(rows) if model.config.xl_length else None

    def __call__(self, ids: Tensor, starts: Tensor | None = None, **more: Any) -> Tensor:
        if self.cache is not None:
            more |= {"past_key_values": self.cache, "use_cache": True}
        targets = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=5)
        return token_losses(
            self.model, targets, input_ids=ids, document_starts=starts, memory_state=self.state, **more
        )[0]


@pytest.mark.parametrize("position", ["t5", "rotary", "sinusoidal"])
@pytest.mark.parametrize("normalise", ["all", "memory"])
def test_the_layer_is_the_papers(position: str, normalise: str) -> None:
    """Read in two segments: the second one's attention at the memory's layer, computed pair by pair."""
    model, k = decoder(position, normalise=normalise), 3
    attention = model.model.layers[1].self_attn
    seen: list[tuple[Tensor, Tensor]] = []
    attention.register_forward_hook(lambda _, args, output: seen.append((args[0], output[0])))
    terms: list[Any] = []
    attention.register_forward_pre_hook(
        lambda _, args, kwargs: terms.append((args[1], kwargs["position_terms"])), with_kwargs=True
    )
    read = Reader(model)
    with torch.no_grad():
        for n in range(2):
            read(tokens(1, 6, seed=n))
    mix, (first, _), (second, output) = model.memory.attention.layers["1"], *seen

    def states(hidden: Tensor) -> tuple[Tensor, ...]:
        return tuple(part[0].transpose(0, 1) for part in attention.qkv_proj(hidden).unflatten(2, (3, 4, 8)).unbind(2))

    def unit(v: Tensor) -> Tensor:
        return v / v.norm()

    (_, old_keys, old_values), (queries, keys, values) = states(first), states(second)
    bias, rotation = terms[1]
    heads = []
    for h in range(4):
        scale, gate = mix.log_scale[h].exp(), mix.bias()[h].sigmoid()
        rows = []
        for t in range(6):
            q, local_scores = queries[h, t], []
            for j in range(t + 1):
                a, b = q, keys[h, j]
                if position == "rotary":
                    a, b = turned(a, rotation, t), turned(b, rotation, j)
                score = unit(a) @ unit(b) * scale if normalise == "all" else a @ b / math.sqrt(8)
                local_scores.append(score + (bias[0, h, t, j] if position == "t5" else 0.0))
            local = torch.stack(local_scores).softmax(0) @ values[h, : t + 1]
            scores = torch.stack([unit(q) @ unit(key) * scale for key in old_keys[h]])
            best = scores.topk(k)
            memory = best.values.softmax(0) @ old_values[h, best.indices]
            rows.append(gate * memory + (1 - gate) * local)
        heads.append(torch.stack(rows))
    expected = attention.o_proj(torch.stack(heads, 1).flatten(1))
    torch.testing.assert_close(output[0], expected, rtol=1e-5, atol=1e-5)  # the memory keeps float32


def turned(v: Tensor, rotation: tuple[Tensor, Tensor], t: int) -> Tensor:
    cos, sin = (term[0, t, 0, 0] for term in rotation)
    a, b = v.chunk(2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin])


@pytest.mark.parametrize("pieces", [[5, 5, 5, 5], [1] * 20, [3, 7, 1, 9], [20], [11, 9]])
@pytest.mark.parametrize("xl_length", [1, 4, 30])
def test_cache_and_memory_together_hold_every_token_once(pieces: list[int], xl_length: int) -> None:
    """One softmax over context and whole memory, in every layer, is full attention, in whatever pieces a text comes."""
    model = decoder("sinusoidal", xl_length, layers=[0, 1], mix="joint", dense=True)
    with torch.no_grad():
        for mix in model.memory.attention.layers.values():
            mix.gate.zero_()
    text = tokens(2, 20)
    whole = Reader(model, 2)(text)
    read = Reader(model, 2)
    with torch.no_grad():
        got = [read(piece) for piece in text.split(pieces, 1)]
    ends = [sum(pieces[: n + 1]) - 1 for n in range(len(pieces))]
    got_losses = torch.cat(got, 1)
    inner = [t for t in range(20) if t not in ends]  # a piece does not know what follows its last token
    torch.testing.assert_close(got_losses[:, inner], whole[:, inner], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("xl_length", [0, 3, 8])
@pytest.mark.parametrize("mix", ["gate", "joint"])
@pytest.mark.parametrize("dense", [False, True])
def test_documents_back_to_back_are_documents_apart(xl_length: int, mix: str, dense: bool) -> None:
    """Wherever the border falls, in a row's segments or between them; each row has its own."""
    length, segment = 18, 6
    model = decoder("rotary", xl_length, mix=mix, dense=dense)
    text = tokens(2, length)
    for border in range(1, length):
        borders = (border, length - border)
        starts = torch.zeros(2, length, dtype=torch.bool)
        for row, at in enumerate(borders):
            starts[row, at] = starts[row, 0] = True
        read = Reader(model, 2)
        with torch.no_grad():
            pieces = zip(text.split(segment, 1), starts.split(segment, 1), strict=True)
            together = torch.cat([read(ids, begin) for ids, begin in pieces], 1)
            for row, at in enumerate(borders):
                alone = Reader(model)
                cuts = [at, *range(at - at % segment + segment, length, segment), length]
                for a, b in itertools.pairwise(cuts):  # what follows the last token of a piece is not known to it
                    got = alone(text[row : row + 1, a:b])
                    torch.testing.assert_close(together[row : row + 1, a : b - 1], got[:, :-1], rtol=1e-6, atol=1e-6)


def test_more_segments_are_remembered_and_the_oldest_go() -> None:
    model = decoder(size=7)
    read = Reader(model)
    with torch.no_grad():
        for n in range(4):
            read(tokens(1, 5, seed=n))
        (row,) = read.state["attention"].memories[1].rows
        assert row.visible(0) == (13, 20)
        changed = Reader(model)
        for n in range(4):
            ids = tokens(1, 5, seed=n)
            changed(torch.full_like(ids, 4) if n < 2 else ids)  # what is out of the memory cannot matter
        changed_losses, losses = changed(tokens(1, 5, seed=9)), read(tokens(1, 5, seed=9))
    torch.testing.assert_close(changed_losses, losses)


def test_padding_is_not_read() -> None:
    model = decoder("rotary")
    text = tokens(1, 10)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), text[:, :6]], 1)
    mask = torch.tensor([[0] * 3 + [1] * 6])
    plain, filled = Reader(model), Reader(model)
    with torch.no_grad():
        plain(text[:, :6])
        filled(padded, attention_mask=mask)
        torch.testing.assert_close(filled(text[:, 6:]), plain(text[:, 6:]))
    assert filled.state["attention"].memories[1].rows[0].count == 10


def test_nothing_flows_back_in_time_through_the_memory() -> None:
    model = decoder("rotary", xl_length=2)
    text = tokens(1, 24)

    def losses(ids: Tensor) -> Tensor:
        read = Reader(model)
        with torch.no_grad():
            return torch.cat([read(piece) for piece in ids.split(6, 1)], 1)

    before = losses(text)
    for t in range(1, 24):
        changed = text.clone()
        changed[0, t] = (changed[0, t] + 1) % VOCABULARY
        after = losses(changed)
        torch.testing.assert_close(after[:, : t - 1], before[:, : t - 1], rtol=0, atol=0)
        assert (after[:, t:] - before[:, t:]).abs().max() > 1e-6


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("architecture", ["mnemic-t5", "llama", "gpt2"])
def test_activation_checkpointing_reads_the_same_and_writes_once(architecture: str, dense: bool) -> None:
    found = []
    for checkpoints in (False, True):
        model = mnemic.augment(build(architecture), mnemic.KNNAttention(layers=[1], k=3, dense=dense, **EVERYTHING))
        model = model.double().train()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        state = model.memory.new_state(2)
        losses = []
        for n in range(3):
            ids = tokens(2, 8, seed=n)
            loss = token_losses(model, tokens(2, 8, seed=n + 9), input_ids=ids, memory_state=state, use_cache=False)[0]
            loss.sum().backward()
            losses.append(loss.detach())
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append((losses, gradients, [row.count for row in state["attention"].memories[1].rows]))
    (losses, gradients, counts), (again, same, counts_again) = found
    assert counts == counts_again == [24, 24]
    for one, other in zip(losses, again, strict=True):
        torch.testing.assert_close(one, other)
    assert gradients.keys() == same.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, same[name], msg=name)


def test_a_failed_forward_leaves_the_memory_as_it_was() -> None:
    model = decoder()
    read = Reader(model)
    with torch.no_grad():
        read(tokens(1, 5))
        with pytest.raises(IndexError):
            read(tokens(1, 5) + 1000)
    assert read.state["attention"].memories[1].rows[0].count == 5


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_remembers_what_leaves_the_xl_cache(beams: int) -> None:
    """The tokens that left the cache ride in it, one memory a beam: the same as reading the text in the same pieces."""
    model = decoder("rotary", xl_length=4)
    prompt = tokens(2, 9)
    how = {"do_sample": False, "max_new_tokens": 14, "min_new_tokens": 14, "pad_token_id": 0}
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), num_beams=beams, **how)
    assert out.shape == (2, 23)
    for row in range(2):
        model.memory.reset()
        alone = model.generate(prompt[row : row + 1], attention_mask=torch.ones(1, 9), num_beams=beams, **how)
        assert torch.equal(alone[0], out[row])
    if beams == 1:
        cache, step, ids = model.new_cache(2), prompt, prompt
        with torch.no_grad():
            for _ in range(14):
                logits = model(input_ids=step, past_key_values=cache, use_cache=True).logits
                step = logits[:, -1:].argmax(-1)
                ids = torch.cat([ids, step], 1)
        assert torch.equal(ids, out)
        (state,) = (rider for rider in cache.riders if isinstance(rider, State))
        assert [row.count for row in state.memories[1].rows] == [22, 22]
        assert [row.visible(4) for row in state.memories[1].rows] == [(0, 18)] * 2


def test_what_was_read_serves_every_row_or_each_its_own() -> None:
    model = decoder("rotary")
    texts, question = tokens(2, 30), tokens(4, 6, seed=3)
    with torch.no_grad():
        model.memory.read(texts[:1])
        one = model(question).logits
        for row in range(4):
            torch.testing.assert_close(model(question[row : row + 1]).logits[0], one[row])
        model.memory.reset()
        model.memory.read(texts)
        own = model(question).logits
        torch.testing.assert_close(own[:2], one[:2])
        assert (own[2:] - one[2:]).abs().max() > 1e-3
        with pytest.raises(UsageError, match="has read 2 texts and the batch has 3 rows"):
            model(question[:3])


def test_reading_on_is_reading_at_once() -> None:
    model, text = decoder("rotary"), tokens(1, 24)
    model.memory.read(text)
    whole = model.memory.state()
    model.memory.reset()
    model.memory.read(text)
    model.memory.reset()
    for piece in text.split(8, 1):
        model.memory.read(piece)
    apart = model.memory.state()
    assert whole["attention.1.lengths"].tolist() == apart["attention.1.lengths"].tolist() == [24]
    torch.testing.assert_close(whole["attention.1.values"][:, :, :8], apart["attention.1.values"][:, :, :8])


def test_a_layer_that_is_not_there_and_a_doubled_one_are_refused() -> None:
    with pytest.raises(UsageError, match="layers 0 to 1"):
        mnemic.augment(build("llama"), mnemic.KNNAttention(layers=[2]))
    with pytest.raises(UsageError, match="name each once"):
        mnemic.KNNAttention(layers=[1, 1])


def test_the_usual_layer_is_the_ninth_of_twelve() -> None:
    model = MnemicDecoderForCausalLM(
        MnemicDecoderConfig(vocab_size=20, hidden_size=8, num_attention_heads=2, num_hidden_layers=12)
    )
    assert mnemic.augment(model, mnemic.KNNAttention(size=8)).memory.attention.indices == [8]


def test_the_room_that_a_memory_takes_is_told_and_a_memory_without_room_refused() -> None:
    model = decoder(size=1000, layers=[0, 1])
    pair = 2 * 4 * 32  # key and value of all heads, in float32
    assert 2 * 3 * 1000 * pair <= model.memory.state_bytes(3) < 2 * 3 * 4000 * pair
    half = mnemic.augment(build("llama"), mnemic.KNNAttention(layers=[1], size=100_000, dtype="float16"))
    assert half.memory.state_bytes(1) == pytest.approx(100_000 * 2 * 2 * 16, rel=0.05)  # two key/value heads of 8
    huge = mnemic.augment(build("llama"), mnemic.KNNAttention(size=10**12))
    with pytest.raises(UsageError, match="GB are free: lower size"):
        huge.memory.new_state(1)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_memory_of_no_pairs_generates_with_an_xl_cache(beams: int) -> None:
    model, prompt = decoder("rotary", xl_length=4, size=0), tokens(2, 9)
    how = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0, "num_beams": beams}
    assert model.generate(prompt, attention_mask=torch.ones_like(prompt), **how).shape == (2, 15)


@pytest.mark.parametrize(
    "memory", [mnemic.KNNAttention(layers=[1], k=4, size=64), mnemic.OutputMemory(long=32, training="none")], ids=str
)
def test_a_row_of_a_cache_that_is_reset_remembers_nothing(memory: Any) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "position": "rotary"}
    base = MnemicDecoderForCausalLM(MnemicDecoderConfig(vocab_size=50, xl_length=4, **shape))
    model = mnemic.augment(base, memory).eval()
    texts = torch.randint(50, (3, 2, 12))
    cache, fresh = model.new_cache(2), model.new_cache(2)
    with torch.no_grad():
        for text in texts[:2]:
            model(text, past_key_values=cache)
        cache.reset([1])
        found, expected = (model(texts[2], past_key_values=one).logits for one in (cache, fresh))
    torch.testing.assert_close(found[1], expected[1])
    assert (found[0] - expected[0]).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("size", "search", "listed"), [(8192, "auto", False), (8193, "auto", True), (9, "lists", True)]
)
def test_lists_are_for_large_memories(size: int, search: str, listed: bool) -> None:
    memory = decoder(size=size, search=search).memory.new_state(1)["attention"].memories[1]
    assert isinstance(memory.rows[0].keys, ListedKeys) == listed
