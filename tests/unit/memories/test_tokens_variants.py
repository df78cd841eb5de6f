"""MemCtrl and MemBottleneck against the equations of the paper (arXiv 2006.11527, section 2), written out naively."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mnemic
from mnemic.errors import UnsupportedModel, UsageError
from mnemic.memories.tokens.layer import MemoryController
from mnemic.models import (
    MnemicDecoderConfig,
    MnemicDecoderForCausalLM,
    MnemicEncoderDecoderConfig,
    MnemicEncoderDecoderForConditionalGeneration,
)
from mnemic.models.layout import Layout
from tests.contract.architectures import PAD, VOCABULARY, build

OURS = "mnemic-encoder-decoder"
COUNT = 3


def ids(batch: int = 2, length: int = 7, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def made(variant: str, architecture: str = OURS, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = mnemic.MemoryTokens(count=COUNT, variant=variant, **settings)
    return mnemic.augment(build(architecture).double(), config).double().eval()


def attend(queries: Tensor, states: Tensor, weights: dict[str, tuple[Tensor, Tensor]], heads: int) -> Tensor:
    """MH(Q, X, X), row by row, head by head and query by query."""
    projected = {name: weights[name] for name in ("q", "k", "v")}
    q, k, v = ((queries if name == "q" else states) @ weight.T + bias for name, (weight, bias) in projected.items())
    width = q.shape[-1] // heads
    rows = []
    for row in range(len(q)):
        found = []
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            for query in q[row, :, part]:
                scores = torch.stack([(query * key).sum() / width**0.5 for key in k[row, :, part]])
                found.append((scores.softmax(0)[:, None] * v[row, :, part]).sum(0))
        rows.append(torch.stack(found).view(heads, -1, width).transpose(0, 1).flatten(1))
    weight, bias = weights["o"]
    return torch.stack(rows) @ weight.T + bias


def of_linear(linear: nn.Linear) -> tuple[Tensor, Tensor]:
    return linear.weight, linear.bias


def of_controller(controller: Any) -> dict[str, tuple[Tensor, Tensor]]:
    attention = controller.attention
    weight, bias = of_linear(attention.key_value)
    half = len(weight) // 2
    return {
        "q": of_linear(attention.query),
        "k": (weight[:half], bias[:half]),
        "v": (weight[half:], bias[half:]),
        "o": of_linear(attention.out),
    }


def of_block(block: Any) -> dict[str, tuple[Tensor, Tensor]]:
    weight, bias = of_linear(block.self_attn.qkv_proj)
    third = len(weight) // 3
    parts = {
        name: (weight[at * third : (at + 1) * third], bias[at * third : (at + 1) * third])
        for at, name in enumerate("qkv")
    }
    return {**parts, "o": of_linear(block.self_attn.o_proj)}


def feed(up: nn.Linear, down: nn.Linear, x: Tensor) -> Tensor:
    return down(up(x).clamp(min=0))


def memory_update(controller: Any, memory: Tensor, states: Tensor) -> Tensor:
    found = attend(memory, states, of_controller(controller), controller.attention.heads)
    a = controller.attention_norm(memory + found)
    return controller.norm(a + feed(controller.up, controller.down, a))


def sequence_update(block: Any, sequence: Tensor, states: Tensor) -> Tensor:
    a = block.self_attn_norm(sequence + attend(sequence, states, of_block(block), block.self_attn.heads))
    return block.mlp_norm(a + feed(block.mlp.up_proj, block.mlp.down_proj, a))


def naive_encoder(model: Any, inputs: Tensor, variant: str) -> Tensor:
    """[H^mem ; H^seq] of the last layer, by sections 2.2 to 2.4."""
    encoder, tokens = model.model.encoder, model.memory.tokens
    seq = encoder.embed_tokens(inputs)
    mem = tokens.layer.vectors.expand(len(inputs), -1, -1)
    positions = torch.arange(-COUNT, inputs.shape[1]).expand(len(inputs), -1)
    both = encoder.with_positions(torch.cat([mem, seq], 1), None, 0, positions)
    mem, seq = both[:, :COUNT], both[:, COUNT:]
    for number, block in enumerate(encoder.layers):
        both = torch.cat([mem, seq], 1)
        if variant == "plain":
            mem, seq = sequence_update(block, mem, both), sequence_update(block, seq, both)
            continue
        controller = tokens.controllers[0 if variant == "control-shared" else number]
        mem = memory_update(controller, mem, both)
        if variant.startswith("control"):
            seq = sequence_update(block, seq, both)
        elif variant == "bottleneck":
            seq = sequence_update(block, seq, mem)
    return torch.cat([mem, seq], 1)


VARIANTS = ["plain", "control", "control-shared", "bottleneck", "bottleneck-skip"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_encoder_computes_the_equations(variant: str) -> None:
    model = made(variant)
    with torch.no_grad():
        got = model.get_encoder()(input_ids=ids()).last_hidden_state
        torch.testing.assert_close(got, naive_encoder(model, ids(), variant), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_the_equations(variant: str) -> None:
    model = made(variant)
    chosen = torch.randn(2, COUNT + 7, 32, generator=torch.Generator().manual_seed(3)).double()
    learned = [*model.memory.parameters(), *model.model.encoder.layers.parameters()]

    def slopes(output: Tensor) -> list[Tensor]:
        return [
            torch.zeros_like(parameter) if slope is None else slope
            for parameter, slope in zip(
                learned, torch.autograd.grad((output * chosen).sum(), learned, allow_unused=True), strict=True
            )
        ]

    got = slopes(model.get_encoder()(input_ids=ids()).last_hidden_state)
    for one, other in zip(got, slopes(naive_encoder(model, ids(), variant)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


def test_in_a_bottleneck_nothing_passes_but_through_the_memory() -> None:
    """With the memory's update held fast, a changed token changes no other one; without, it changes all."""
    model = made("bottleneck")
    encoder = model.get_encoder()
    other = ids().clone()
    other[:, 4] = (other[:, 4] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = (encoder(input_ids=given).last_hidden_state[:, COUNT:] for given in (ids(), other))
        assert ((before - after).abs().amax(-1) > 1e-6).all(), "through the memory every token hears of it"
        kept = torch.randn(2, COUNT, 32).double()
        for controller in model.memory.tokens.controllers:
            controller.forward = lambda memory, states, mask=None: kept
        before, after = (encoder(input_ids=given).last_hidden_state[:, COUNT:] for given in (ids(), other))
    moved = (before - after).abs().amax(-1) > 0
    assert moved[:, 4].all()
    assert not moved[:, [0, 1, 2, 3, 5, 6]].any()


def test_a_skipped_sequence_stays_its_embeddings() -> None:
    model = made("bottleneck-skip")
    encoder = model.get_encoder()
    with torch.no_grad():
        got = encoder(input_ids=ids()).last_hidden_state[:, COUNT:]
        embedded = encoder.with_positions(encoder.embed_tokens(ids()), None, 0)
    assert torch.equal(got, embedded)
    unused = {id(p) for p in model.memory.tokens.unused()}
    assert unused == {id(p) for p in encoder.layers.parameters()}
    every = sum(p.numel() for p in model.parameters())
    assert model.memory.count_parameters() == every - sum(p.numel() for p in encoder.layers.parameters())


class Shapes(torch.overrides.TorchFunctionMode):
    """Notes the shapes of all tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_bottleneck_makes_nothing_as_large_as_the_square_of_the_length(implementation: str, padded: bool) -> None:
    model = made("bottleneck")
    model.set_attn_implementation(implementation)
    length = 600
    mask = torch.ones(1, length, dtype=torch.long)
    if padded:
        mask[:, -9:] = 0
    seen = Shapes()
    with torch.no_grad(), seen:
        model.get_encoder()(input_ids=ids(1, length), attention_mask=mask)
    assert 32 * length <= seen.largest < length * length


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_is_never_read(variant: str) -> None:
    model = made(variant)
    short = ids(1, 5)
    with torch.no_grad():
        alone = model.get_encoder()(input_ids=short).last_hidden_state
        for side in ("left", "right"):
            padding, zeros, ones = torch.full((1, 4), PAD), torch.zeros(1, 4).long(), torch.ones(1, 5).long()
            parts = ((padding, short), (zeros, ones)) if side == "left" else ((short, padding), (ones, zeros))
            given, mask = (torch.cat(part, 1) for part in parts)
            got = model.get_encoder()(input_ids=given, attention_mask=mask).last_hidden_state
            real = got[:, [0, 1, 2, *[COUNT + 4 * (side == "left") + i for i in range(5)]]]
            torch.testing.assert_close(real, alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient_checkpointing_gives_the_same_gradients(variant: str) -> None:
    def gradients(checkpointing: bool) -> dict[str, Tensor]:
        model = made(variant).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        mask = torch.ones(2, 7, dtype=torch.long)
        mask[0, -2:] = 0
        model(input_ids=ids(), attention_mask=mask, decoder_input_ids=ids(seed=1)).logits.square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, again = gradients(False), gradients(True)
    assert plain.keys() == again.keys()
    for name, slope in plain.items():
        torch.testing.assert_close(again[name], slope, rtol=1e-9, atol=1e-9)


def test_a_controller_in_bert_reads_the_sequence_and_in_gpt2_only_the_memory() -> None:
    for architecture, reads in (("bert", True), ("gpt2", False)):
        model = made("control", architecture)
        assert len(model.memory.tokens.controllers) == 1, "nobody reads the memory after the last of two layers"
        seen: list[Tensor] = []
        controller: MemoryController = model.memory.tokens.controllers[0]  # type: ignore[assignment]
        controller.register_forward_hook(lambda _, args, output, seen=seen: seen.append(output))
        with torch.no_grad():
            for seed in (0, 1):
                model(input_ids=ids(seed=seed))
        assert (not torch.equal(*seen)) == reads


def test_a_controller_shows_the_weights_that_it_sums_up_with() -> None:
    attention = MemoryController(8, 2, 4, 16).double().attention
    queries, states = (torch.randn(2, n, 8, generator=torch.Generator().manual_seed(n)).double() for n in (3, 5))
    hidden = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 1]]).bool()[:, None, None]
    for mask in (None, hidden, torch.zeros(2, 1, 1, 5).double().masked_fill(~hidden, -torch.inf)):
        value = attention.key_value(states)[..., 8:].unflatten(2, (2, 4)).transpose(1, 2)
        found = (attention.weights(queries, states, mask) @ value).transpose(1, 2).flatten(2)
        torch.testing.assert_close(attention.out(found), attention(queries, states, mask))


def test_a_controller_is_as_wide_and_forgets_as_much_as_the_layers_beside_it() -> None:
    (controller, *_) = made("control").memory.tokens.controllers
    assert controller.up.out_features == build(OURS).config.intermediate_size
    for kept in (0.0, 0.3):
        base = build(OURS)
        base.config.dropout = kept
        of_model = mnemic.augment(type(base)(base.config), mnemic.MemoryTokens(variant="control")).memory.tokens
        assert of_model.controllers[0].dropout == kept
    memory, all_lost = torch.randn(1, 2, 8), MemoryController(8, 2, 4, 16, dropout=1.0).train()
    expected = all_lost.norm(all_lost.attention_norm(memory))
    torch.testing.assert_close(all_lost(memory, memory), expected)


def test_training_goes_through_every_variant() -> None:
    """Loss falls, and what the variant has of its own moves."""
    for variant in VARIANTS:
        torch.manual_seed(0)
        config = MnemicEncoderDecoderConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_attention_heads=4, encoder_layers=2, decoder_layers=1,
            decoder_start_token_id=1, pad_token_id=0,
        )  # fmt: skip
        model = mnemic.augment(
            MnemicEncoderDecoderForConditionalGeneration(config), mnemic.MemoryTokens(count=4, variant=variant)
        ).train()
        before = {name: p.detach().clone() for name, p in model.memory.named_parameters()}
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            loss = model(input_ids=ids(8, 6), labels=ids(8, 6)).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.7 * losses[0], variant
        assert all(not torch.equal(p, before[name]) for name, p in model.memory.named_parameters())


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(UnsupportedModel, match="mnemic's encoder-decoder"):
        made("bottleneck", "t5")
    with pytest.raises(UsageError, match="nothing else to read"):
        mnemic.MemoryTokens(variant="bottleneck", gated=True)
    with pytest.raises(UsageError, match="leave at least one token"):
        made("bottleneck").memory.change("tokens", count=0)
    with pytest.raises(UsageError, match="only their count can be changed"):
        made("plain").memory.change("tokens", variant="control")
    with pytest.raises(UsageError, match="expected 0 or more"):
        mnemic.MemoryTokens(count=-1)


@pytest.mark.parametrize("position", ["t5", "xl"])
def test_fixed_positions_are_those_that_the_first_token_sees(position: str) -> None:
    """With distances written out by hand, cached and uncached, in one piece and in segments of an XL cache."""
    model = made("plain", f"mnemic-{position}", positions="fixed")
    relative = made("plain", f"mnemic-{position}")
    text = ids(2, 12)
    with torch.no_grad():
        got = model(text, use_cache=False).logits
        first = relative(text, use_cache=False).logits
        torch.testing.assert_close(got[:, 0], first[:, 0], rtol=1e-9, atol=1e-9)
        assert (got[:, 5:] - first[:, 5:]).abs().max() > 1e-4
        out, steps = model(text[:, :6], use_cache=True), []
        for t in range(6, 12):
            out = model(text[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
            steps.append(out.logits)
        torch.testing.assert_close(torch.cat(steps, 1), got[:, 6:], rtol=1e-9, atol=1e-9)


def test_distances_of_a_fixed_memory() -> None:
    positions = torch.tensor([[-2, -1, 0, 1, 2]])
    layout = Layout(positions, positions, fixed=True)
    expected = [[0, -1, -2, -3, -4], [1, 0, -1, -2, -3], [2, 1, 0, -1, -2], [2, 1, 1, 0, -1], [2, 1, 2, 1, 0]]
    assert layout.distances()[0].tolist() == expected
    assert not layout.in_step()


@pytest.mark.parametrize("position", ["t5", "xl"])
def test_fixed_positions_hold_from_segment_to_segment(position: str) -> None:
    torch.manual_seed(0)
    config = MnemicDecoderConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_attention_heads=4, num_hidden_layers=2, position=position,
        xl_length=40, initializer_range=0.3,
    )  # fmt: skip
    model = mnemic.augment(
        MnemicDecoderForCausalLM(config).double(), mnemic.MemoryTokens(count=COUNT, positions="fixed")
    ).double()
    text = ids(2, 20)
    with torch.no_grad():
        long = model(text, use_cache=False).logits
        cache = model.new_cache(2)
        pieces = [model(part, past_key_values=cache, use_cache=True).logits for part in text.split([7, 1, 12], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), long, rtol=1e-8, atol=1e-8)


def test_fixed_positions_are_for_relative_ones() -> None:
    for architecture in ("llama", "mnemic-rotary", "mnemic-encoder-decoder"):
        with pytest.raises(UnsupportedModel, match="does not take fixed positions"):
            made("plain", architecture, positions="fixed")
