"""Attention maps are what the model attends with, cut where its memory ends, and the model is left as it was."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mnemic
from mnemic.analysis.attention import AttentionMaps, StackMaps
from mnemic.data import train_tokenizer
from mnemic.errors import UnsupportedModel, UsageError
from tests.contract.architectures import ARCHITECTURES

TEXT, TARGET, COUNT = "the treaty", "der Vertrag", 4
ONE_STACK = ["bert", "gpt2", "llama", "mistral", "mnemic-t5", "mnemic-xl", "mnemic-rotary", "mnemic-sinusoidal"]
TWO_STACKS = ["t5", "bart", "mnemic-encoder-decoder"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([], "byte")


def make(architecture: str, tokenizer: Any, **memory: Any) -> Any:
    """A tiny model with the vocabulary of the tokenizer and memory tokens."""
    kind, config = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    model = kind(type(config).from_dict({**config.to_dict(), "vocab_size": len(tokenizer)}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.requires_grad:
                parameter.normal_(0, 0.25)
    return mnemic.augment(model.eval(), mnemic.MemoryTokens(**{"count": COUNT, **memory}))


def check_rows(maps: AttentionMaps) -> None:
    for stack in maps.stacks.values():
        sums = stack.weights.sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums))


@pytest.mark.parametrize("architecture", ONE_STACK)
def test_maps_of_a_model_of_one_stack(architecture: str, tokenizer: Any) -> None:
    model = make(architecture, tokenizer)
    before = model.config._attn_implementation
    maps = mnemic.attention_maps(model, tokenizer, TEXT)
    assert model.config._attn_implementation == before
    assert list(maps.stacks) == ["self"]
    stack, length = maps["self"], len(TEXT) + 1 + (architecture == "bert") + COUNT
    assert stack.weights.shape == (2, 4, length, length)
    assert (stack.memory_queries, stack.memory_keys) == (COUNT, COUNT)
    assert stack.keys[:COUNT] == ["[mem 1]", "[mem 2]", "[mem 3]", "[mem 4]"]
    assert "".join(stack.keys[COUNT + 1 :]).startswith(TEXT)
    check_rows(maps)
    assert stack.causal == (architecture != "bert")
    if stack.causal:
        assert (stack.blocks["write"] == 0).all()
        assert {name for layer in stack.operations() for name in layer} <= {"read", "none"}
        assert "cannot see it" in maps.notes()[0]
    else:
        assert (stack.blocks["write"] > 0).any()
        assert maps.notes() == []


@pytest.mark.parametrize("architecture", TWO_STACKS)
@pytest.mark.parametrize("target", [TARGET, None])
def test_maps_of_an_encoder_and_a_decoder(architecture: str, target: str | None, tokenizer: Any) -> None:
    model = make(architecture, tokenizer)
    maps = mnemic.attention_maps(model, tokenizer, TEXT, target)
    assert list(maps.stacks) == ["encoder", "decoder", "cross"]
    encoder, decoder, cross = maps.stacks.values()
    source, read = COUNT + len(TEXT) + 1, len(decoder.queries)
    assert encoder.weights.shape == (2, 4, source, source)
    assert decoder.weights.shape == (2, 4, read, read)
    assert cross.weights.shape == (2, 4, read, source)
    assert (cross.memory_queries, cross.memory_keys, decoder.memory_keys) == (0, COUNT, 0)
    assert (cross.queries, cross.keys) == (decoder.queries, encoder.keys)
    check_rows(maps)
    assert list(maps.summary()) == ["encoder", "cross"]
    assert [row["write"] for row in maps.summary()["cross"]] == [None, None]
    share = cross.weights[..., :COUNT].sum(-1).mean((1, 2))
    assert [row["read"] for row in maps.summary()["cross"]] == pytest.approx(share.tolist(), rel=1e-5)
    if target is not None:
        assert "".join(decoder.queries[1:]) == TARGET
        return
    ids = torch.tensor([[*tokenizer(TEXT).input_ids, tokenizer.eos_token_id]])
    how = {"do_sample": False, "max_new_tokens": min(128, 63), "eos_token_id": tokenizer.eos_token_id}
    written = model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0].tolist()
    assert list(decoder.queries)[:10] == [tokenizer.decode([id]) for id in written][:10]


def naive(query: Tensor, key: Tensor, heads: int, causal: bool) -> Tensor:
    """softmax(q k / sqrt(d)) for (T, width) and (K, width), one head, one query and one key after another."""
    width, length = query.shape[1] // heads, len(key)
    found = torch.zeros(heads, len(query), length, dtype=torch.float64)
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        for row, asked in enumerate(query[:, part]):
            scores = [(asked @ known).item() / width**0.5 for known in key[: row + 1 if causal else length, part]]
            weights = torch.tensor(scores, dtype=torch.float64).exp()
            found[head, row, : len(scores)] = weights / weights.sum()
    return found


def test_maps_are_what_the_projections_of_the_model_give(tokenizer: Any) -> None:
    """In float64, for our encoder-decoder: from what enters each attention, by hand."""
    model = make("mnemic-encoder-decoder", tokenizer).double()
    entered: dict[str, tuple[Tensor, ...]] = {}
    for name, module in model.named_modules():
        if name.endswith(("self_attn", "cross_attn")):
            module.register_forward_pre_hook(lambda _, args, name=name: entered.__setitem__(name, args))
    maps = mnemic.attention_maps(model, tokenizer, TEXT, TARGET)
    assert entered["model.encoder.layers.0.self_attn"][0].shape[1] == COUNT + len(TEXT) + 1
    for layer in range(2):
        for name in ("encoder", "decoder"):
            attention = getattr(model.model, name).layers[layer].self_attn
            states = entered[f"model.{name}.layers.{layer}.self_attn"][0][0]
            query, key, _ = attention.qkv_proj(states).chunk(3, dim=-1)
            expected = naive(query, key, 4, causal=name == "decoder")
            torch.testing.assert_close(maps[name].weights[layer], expected, rtol=1e-9, atol=1e-12)
        attention = model.model.decoder.layers[layer].cross_attn
        states, source = (part[0] for part in entered[f"model.decoder.layers.{layer}.cross_attn"][:2])
        key, _ = attention.kv_proj(source).chunk(2, dim=-1)
        expected = naive(attention.q_proj(states), key, 4, causal=False)
        torch.testing.assert_close(maps["cross"].weights[layer], expected, rtol=1e-9, atol=1e-12)


def test_a_gate_that_is_closed_is_not_read(tokenizer: Any) -> None:
    maps = mnemic.attention_maps(make("bert", tokenizer, gated=True), tokenizer, TEXT)
    assert maps["self"].measures["read"].max() < 1e-15
    maps = mnemic.attention_maps(make("t5", tokenizer, gated=True), tokenizer, TEXT, TARGET)
    assert maps["cross"].measures["read"].max() < 1e-15


def test_the_model_is_left_as_it_was(tokenizer: Any) -> None:
    model = make("t5", tokenizer).train()
    model.encoder.config._attn_implementation = "eager"  # an implementation of its own
    configs = [model.config, model.encoder.config, model.decoder.config]
    before = [config._attn_implementation for config in configs]
    mnemic.attention_maps(model, tokenizer, TEXT, TARGET)
    assert model.training
    assert [config._attn_implementation for config in configs] == before == ["sdpa", "eager", "sdpa"]
    seen = []

    def fail(*_: Any) -> None:
        seen.extend(config._attn_implementation for config in configs)
        raise ZeroDivisionError

    model.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        mnemic.attention_maps(model, tokenizer, TEXT, TARGET)
    assert seen == ["eager"] * 3
    assert [config._attn_implementation for config in configs] == before


def test_with_other_memories(tokenizer: Any) -> None:
    model = make("llama", tokenizer)
    mnemic.augment(model, mnemic.KNNAttention(layers=[1], k=2, size=50), mnemic.ProductKeys(layers=[0], slots=64))
    maps = mnemic.attention_maps(model, tokenizer, TEXT)
    assert len(maps["self"].weights) == 2
    check_rows(maps)


def test_narrow_numbers_are_shown_as_float32(tokenizer: Any) -> None:
    maps = mnemic.attention_maps(make("bert", tokenizer).bfloat16(), tokenizer, TEXT)
    assert maps["self"].weights.dtype == torch.float32


def test_what_cannot_be_shown(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("gpt2", tokenizer)
    with pytest.raises(UsageError, match="target is for sequence-to-sequence"):
        mnemic.attention_maps(model, tokenizer, TEXT, TARGET)
    with pytest.raises(UsageError, match="the text is empty"):
        mnemic.attention_maps(model, tokenizer, " \n")
    with pytest.raises(UsageError, match="of one text, not of a list"):
        mnemic.attention_maps(model, tokenizer, [TEXT, TEXT])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"71 tokens and .* 64 positions"):
        mnemic.attention_maps(model, tokenizer, "a" * 70)
    with pytest.raises(UsageError, match=r"outside of disabled\(\)"), model.memory.disabled():
        mnemic.attention_maps(model, tokenizer, TEXT)
    with pytest.raises(UsageError, match=r"GPT2LMHeadModel has none.*MemoryTokens\(count=10\)"):
        mnemic.attention_maps(model.memory.detach(), tokenizer, TEXT)
    with pytest.raises(UsageError, match="has none"):
        mnemic.attention_maps(mnemic.augment(model, mnemic.KNNAttention(layers=[1])), tokenizer, TEXT)
    model.memory.detach()
    mnemic.augment(model, mnemic.MemoryTokens(count=COUNT)).memory.change("tokens", count=0)
    with pytest.raises(UsageError, match="has none"):
        mnemic.attention_maps(model, tokenizer, TEXT)
    bart = make("bart", tokenizer)
    bart.generation_config = bart.config.decoder_start_token_id = None
    monkeypatch.setattr(type(bart), "can_generate", lambda self: False)
    with pytest.raises(UsageError, match="does not write a target by itself"):
        mnemic.attention_maps(bart, tokenizer, TEXT)
    monkeypatch.setattr("mnemic.analysis.attention.MOST_WEIGHTS", 1000)
    with pytest.raises(UsageError, match="give a shorter text"):
        mnemic.attention_maps(make("bert", tokenizer), tokenizer, TEXT)


def test_a_model_that_shows_no_weights(tokenizer: Any) -> None:
    model = make("bert", tokenizer)
    model.register_forward_hook(lambda module, args, output: setattr(output, "attentions", (None, None)))
    with pytest.raises(UnsupportedModel, match="does not show its attention weights"):
        mnemic.attention_maps(model, tokenizer, TEXT)
    assert model.config._attn_implementation == "sdpa"


# maps from elsewhere


def made_by_hand() -> AttentionMaps:
    """Two layers of two heads over three memory tokens and two words; a decoder of two words."""
    weights = torch.full((2, 2, 5, 5), 0.2)
    weights[1, :, :3] = torch.eye(5)[:3]
    memory, words = ["[mem 1]", "[mem 2]", "[mem 3]"], ["$x$\n", "Vertrag"]
    encoder = StackMaps(weights, memory + words, memory + words, 3, 3)
    cross = StackMaps(torch.eye(5)[:2].expand(2, 2, 2, 5), words, memory + words, 0, 3)
    decoder = StackMaps(torch.eye(2).expand(2, 2, 2, 2), words, words, 0, 0, causal=True)
    return AttentionMaps({"encoder": encoder, "decoder": decoder, "cross": cross})


def test_maps_are_made_of_plain_tensors() -> None:
    maps = made_by_hand()
    assert maps["encoder"].operations() == [["none", "none"], ["store", "store"]]
    first, second = maps.summary()["encoder"]
    assert (first["write"], first["process"], first["read"]) == pytest.approx((0.4, 0.6, 0.6))
    assert (second["operation"], second["process"], second["operations"]["store"]) == ("store", 1, 1)
    assert [row["operation"] for row in maps.summary()["cross"]] == ["read", "read"]
    assert maps.notes() == []  # the decoder is causal, but sees no memory


def test_maps_that_do_not_fit_are_refused() -> None:
    even, labels = torch.full((1, 1, 3, 4), 0.25), ["a", "b", "c", "d"]
    with pytest.raises(UsageError, match=r"expected \(layers, heads, queries, keys\)"):
        StackMaps(even, labels, labels, 1, 1)
    with pytest.raises(UsageError, match=r"expected \(layers, heads, queries, keys\)"):
        StackMaps(even[0], labels[:3], labels, 1, 1)
    with pytest.raises(UsageError, match="as many of both"):
        StackMaps(even, labels[:3], labels, 1, 2)
    with pytest.raises(UsageError, match="give all of their rows"):
        StackMaps(even, labels[:3], labels, 4, 4)
    with pytest.raises(UsageError, match="did you mean 'encoder'"):
        made_by_hand()["encodr"]


@pytest.mark.parametrize("stack", [None, "encoder", "decoder", "cross"])
def test_maps_are_drawn(stack: str | None, tmp_path: Path) -> None:
    made_by_hand().plot(tmp_path / "maps.svg", stack=stack)
    drawn = (tmp_path / "maps.svg").read_text()
    assert drawn.startswith("<?xml")
    legend = {"decoder": ["update"], "cross": ["read", "source", "[mem 2]"]}
    blocks = legend.get(str(stack), ["process", "write", "read", "update", "[mem 2]"])
    for comment in ("layer 1, head 1", "Vertrag", r"$x$\n", *blocks):
        assert f"<!-- {comment}" in drawn


def test_long_texts_are_drawn_without_labels(tmp_path: Path) -> None:
    labels = [f"word{number}" for number in range(120)]
    weights = torch.full((1, 2, 120, 120), 1 / 120)
    AttentionMaps({"self": StackMaps(weights, labels, labels, 20, 20)}).plot(tmp_path / "maps.svg")
    drawn = (tmp_path / "maps.svg").read_text()
    assert "<!-- memory -->" in drawn
    assert "word7" not in drawn


def test_a_summary_is_drawn(tmp_path: Path) -> None:
    maps = made_by_hand()
    maps.plot_summary(tmp_path / "summary.svg")
    drawn = (tmp_path / "summary.svg").read_text()
    for comment in ("store", "read: the text to memory tokens", "encoder: the memory and the source"):
        assert f"<!-- {comment}" in drawn
    causal = StackMaps(torch.eye(5).expand(1, 1, 5, 5), maps["encoder"].keys, maps["encoder"].keys, 3, 3, causal=True)
    AttentionMaps({"self": causal}).plot_summary(tmp_path / "causal.svg")
    assert "<!-- (causal: the memory cannot see the text)" in (tmp_path / "causal.svg").read_text()
    with pytest.raises(UsageError, match="none of these stacks sees a memory"):
        AttentionMaps({"decoder": maps["decoder"]}).plot_summary(tmp_path / "x.svg")


def test_the_example_in_the_readme_of_memory_tokens_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(mnemic.__file__).parent / "memories/tokens/README.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    (example,) = (block for block in blocks if "attention_maps" in block)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(example, page.name, "exec"), names)
    assert names["maps"]["encoder"].blocks["write"].shape == (2, 4, 10, 12)  # as the page says
    assert (tmp_path / "encoder.png").exists()
    assert (tmp_path / "summary.png").exists()


@pytest.mark.parametrize("variant", ["control", "control-shared", "bottleneck", "bottleneck-skip"])
def test_layers_of_the_memorys_own_show_what_they_attend_to(variant: str, tokenizer: Any) -> None:
    """Memory rows are the controllers'; in a bottleneck the sequence sees the memory alone, or each itself."""
    model = make("mnemic-encoder-decoder", tokenizer, count=3, variant=variant)
    seen: list[torch.Tensor] = []
    for controller in model.memory.tokens.controllers:
        attention = controller.attention
        controller.register_forward_pre_hook(
            lambda _, args, attention=attention: seen.append(attention.weights(*args)), prepend=True
        )
    encoder = mnemic.attention_maps(model, tokenizer, "a b c d", "b a")["encoder"]
    assert encoder.weights.shape[0] == 2
    torch.testing.assert_close(encoder.weights.sum(-1), torch.ones(encoder.weights.shape[:3]))
    for layer, expected in zip(encoder.weights, seen, strict=True):
        torch.testing.assert_close(layer[:, :3], expected[0].detach())
    if variant == "bottleneck":
        assert encoder.blocks["update"].abs().max() == 0
        assert encoder.blocks["read"].std() > 0
    if variant == "bottleneck-skip":
        length = len(encoder.queries) - 3
        assert torch.equal(encoder.blocks["update"], torch.eye(length).expand(2, 4, -1, -1))


@pytest.mark.parametrize("place", ["decoder", "both"])
def test_a_decoders_own_memory_is_in_its_maps(place: str, tokenizer: Any) -> None:
    model = make("mnemic-encoder-decoder", tokenizer, count=3, place=place)
    maps = mnemic.attention_maps(model, tokenizer, "a b c d", "b a")
    assert maps["decoder"].memory_keys == maps["decoder"].memory_queries == 3
    assert maps["cross"].memory_keys == maps["encoder"].memory_keys == (3 if place == "both" else 0)
    assert maps["decoder"].weights.shape[-1] == len(maps["decoder"].keys)
    assert maps["decoder"].causal
