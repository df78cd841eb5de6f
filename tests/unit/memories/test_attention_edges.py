"""The attention memory where things meet: threads, checkpoints, frozen models, other texts, odd sizes and positions."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

import mnemic
from mnemic.data import Document, train_tokenizer
from mnemic.data.documents import Corpus
from mnemic.errors import UnsupportedModel, UsageError
from mnemic.hf.anatomy import Anatomy
from mnemic.hf.losses import token_losses
from mnemic.memories.attention.working import Row
from mnemic.models import MnemicDecoderConfig, MnemicDecoderForCausalLM
from tests.contract.architectures import VOCABULARY, build


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def memorizing(architecture: str = "llama", **settings: Any) -> Any:
    torch.manual_seed(0)
    memory = mnemic.KNNAttention(**{"layers": [0], "k": 4, "size": 64, **settings})
    return mnemic.augment(build(architecture), memory).eval()


def in_threads(count: int, work: Any) -> list[BaseException]:
    failed: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def test_a_frozen_model_learns_from_a_document_of_which_nothing_is_known_yet() -> None:
    """Its gate and scale take part in the first forward too, though there is nothing to find."""
    model = memorizing(mix="tanh", normalise="memory").train()
    model.requires_grad_(False)
    model.memory.requires_grad_(True)
    state = model.memory.new_state(1)
    for number, part in enumerate(tokens(3, 1, 9)):
        loss = token_losses(model, part[:, 1:], input_ids=part[:, :-1], use_cache=False, memory_state=state)[0].mean()
        loss.backward()
        gradient = model.memory.attention.layers["0"].gate.grad
        assert bool(gradient.abs().max() > 0) == (number > 0)


def test_threads_do_not_turn_each_others_keys() -> None:
    model = memorizing()
    model.memory.read(tokens(1, 40))
    texts = [tokens(1, 4 + 3 * number, seed=number) for number in range(6)]
    with torch.no_grad():
        expected = [model(text).logits for text in texts]

        def work(number: int) -> None:
            for _ in range(20):
                with torch.no_grad():
                    torch.testing.assert_close(model(texts[number]).logits, expected[number])

        assert not in_threads(6, work)


def test_threads_share_a_memory_that_is_in_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mnemic.memories.attention.search.FEWEST", 64)
    monkeypatch.setattr("mnemic.memories.attention.search.PENDING", 16)
    model = memorizing(search="lists", size=2000)
    model.memory.read(tokens(1, 20))
    (memory,) = model.memory.attention.shared.memories.values()
    heads, _, width = memory.rows[0].values.shape
    torch.manual_seed(0)
    memory.rows[0].append(*torch.randn(2, heads, 1500, width))  # nothing is listed before somebody asks

    def work(number: int) -> None:
        for _ in range(10):
            with torch.no_grad():
                model(tokens(1, 8, seed=number))

    assert model.memory.attention.recall() is None
    assert not in_threads(6, work)
    assert 0.9 < model.memory.attention.recall() <= 1


@pytest.mark.parametrize("other", [True, False])
def test_two_forwards_may_wait_for_one_backward_with_checkpoints(other: bool) -> None:
    gradients = []
    for checkpoints in (False, True):
        model = memorizing().train()
        if checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.memory.read(tokens(1, 40))
        texts = tokens(2, 1, 12, seed=5) if other else tokens(1, 1, 12, seed=5).expand(2, -1, -1)
        losses = []
        for ids in texts:  # the same text finds more the second time
            losses.append(model(ids, labels=ids, use_cache=False).loss)
            model.memory.read(ids)
        with torch.no_grad():
            model(tokens(1, 6))
        sum(losses).backward()  # type: ignore[union-attr]
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        assert not model.memory.attention._pending
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_gradient_that_has_waited_too_long_with_checkpoints_is_told(reentrant: bool) -> None:
    model = memorizing().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.memory.read(tokens(1, 40))
    losses = [model(ids, labels=ids, use_cache=False).loss for ids in tokens(9, 1, 12)]
    with pytest.raises(UsageError, match=r"the last 8 forwards found, .* call backward\(\) after fewer forwards"):
        sum(losses).backward()  # type: ignore[union-attr]


def test_a_dense_memory_sees_what_was_read_before_in_a_documents_first_segment() -> None:
    results = []
    for settings in ({"dense": True}, {"k": 100}):
        model = memorizing(size=90, **settings)
        model.memory.read(tokens(1, 40))
        state, starts = model.memory.new_state(1), torch.zeros(3, 1, 8, dtype=torch.bool)
        starts[0, 0, 0] = starts[2, 0, 3] = True
        with torch.no_grad():
            for part, start in zip(tokens(3, 1, 9, seed=3), starts, strict=True):
                more = {"document_starts": start, "memory_state": state, "use_cache": False}
                results.append(token_losses(model, part[:, 1:], input_ids=part[:, :-1], **more)[0])
    for dense, nearest in zip(results[:3], results[3:], strict=True):
        torch.testing.assert_close(dense, nearest)


def test_a_trace_does_not_take_pairs_of_a_store_for_its_own_documents(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([], "byte")
    torch.manual_seed(0)
    base = mnemic.models.MnemicDecoderForCausalLM(
        mnemic.models.MnemicDecoderConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2)
    )
    model = mnemic.augment(base, mnemic.KNNAttention(layers=[1], k=4, size=64))
    document = Document("a", "a long text of which a store is made, letter by letter. " * 3)
    corpus = Corpus("a", {"train": lambda: [document], "valid": list, "test": list})
    mnemic.build_store(model, tokenizer, corpus, tmp_path / "a", layer="attention").close()
    model.memory.change("attention", external=str(tmp_path / "a"))
    found = mnemic.trace(model, tokenizer, "another text, and not a short one either", window=8, smaller=0)
    assert (found.numbers < -1).any()
    assert (found.distances() > 0).all()
    places = torch.arange(len(found.ids))
    assert all(one.position < token for token in places.tolist() for one in found.retrieved(token, 50))


def test_a_trace_shows_what_a_negative_gate_takes_away() -> None:
    tokenizer = train_tokenizer([], "byte")
    torch.manual_seed(0)
    base = mnemic.models.MnemicDecoderForCausalLM(
        mnemic.models.MnemicDecoderConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2)
    )
    model = mnemic.augment(base, mnemic.KNNAttention(layers=[1], k=4, size=64, mix="tanh"))
    with torch.no_grad():
        model.memory.attention.layers["1"].gate.fill_(-0.1)
    found = mnemic.trace(model, tokenizer, "a text that is read in pieces of eight", window=8, smaller=0)
    assert found.retrieved(20)


@pytest.mark.parametrize("search", ["exact", "lists"])
def test_a_window_longer_than_the_memory_hides_none_of_it(search: str) -> None:
    """The context holds its last tokens; before them the memory has as many pairs as it shall."""
    row: Row = memorizing(size=20, search=search).memory.attention._rooms._row(0, 20)
    keys = torch.randn(2, 1400, 8) if row.values.shape[0] == 2 else torch.randn(row.values.shape[0], 1400, 8)
    keys = keys[..., :1].expand(-1, -1, row.values.shape[2]).contiguous()
    row.append(keys[:, :700], keys[:, :700])
    row.append(keys[:, 700:], keys[:, 700:])
    for held in (680, 600, 0):
        first, end = row.visible(held)
        assert (first, end) == (1400 - held - 20, 1400 - held)
        found = row.find(keys[:, :1], 20, held)
        numbers, values = found.numbers, found.values
        assert sorted(numbers[0, 0].tolist()) == list(range(first, end))
        for place, number in enumerate(numbers[0, 0].tolist()):
            assert torch.equal(values[0, 0, place], keys[0, number])
            assert torch.equal(found.keys[0, 0, place], keys[0, number])


def test_lists_that_are_never_made_do_not_keep_what_is_forgotten() -> None:
    model = memorizing(search="lists", size=1000)
    model.memory.read(tokens(1, 5000))
    (memory,) = model.memory.attention.shared.memories.values()
    assert memory.rows[0].keys.waiting.shape[1] < 1000 + 3 * 512


def test_what_was_read_goes_on_in_a_memory_that_is_searched_in_another_way() -> None:
    model = memorizing(size=500)
    model.memory.read(tokens(1, 300))
    state, ids = model.memory.state(), tokens(1, 9, seed=2)
    with torch.no_grad():
        expected = model(ids).logits
        model.memory.change("attention", k=4, recall=0.9)
        assert torch.equal(model(ids).logits, expected)  # what was read is still there
        model.memory.change("attention", search="lists", size=20_000)
        model.memory.load_state(state)
        torch.testing.assert_close(model(ids).logits, expected)


def test_a_model_that_is_moved_takes_its_memory_along() -> None:
    model = memorizing()
    assert model.memory.attention._device == torch.device("cpu")
    model.to("meta")
    assert model.memory.attention._device == torch.device("meta")
    (memory,) = model.memory.new_state(1)["attention"].memories.values()
    assert memory.rows[0].values.device == torch.device("meta")


@pytest.mark.parametrize("architecture", ["gpt2", "bert"])
def test_models_with_few_positions_read_in_short_pieces(architecture: str) -> None:
    model = memorizing(architecture)
    assert model.config.max_position_embeddings < 600
    model.memory.read(tokens(1, 600))
    with pytest.raises(UsageError, match="reset"):
        model.memory.read(tokens(2, 5))


def test_mistakes_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="dense"):
        mnemic.KNNAttention(dense=True, search="lists")
    model = memorizing()
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Free", (), {"available": 10}))
    with pytest.raises(UsageError, match="are free"):
        model.memory.attention._rooms.state(1, 100_000)


SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LIKE_LLAMA = Anatomy()


def test_keys_that_cannot_be_turned_back_are_refused() -> None:
    model = CohereForCausalLM(CohereConfig(**SHAPE))  # turns neighbouring pairs
    with pytest.raises(UnsupportedModel, match="in a way that mnemic cannot undo"):
        mnemic.augment(model, mnemic.KNNAttention(layers=[1]), anatomy=LIKE_LLAMA)
    assert not hasattr(model, "memory")


def test_one_softmax_with_scores_that_a_model_caps_is_refused() -> None:
    base = Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8, attn_logit_softcapping=5.0))
    with pytest.raises(UnsupportedModel, match=r"Gemma2Model changes the scores .* set mix to gate or tanh"):
        mnemic.augment(base, mnemic.KNNAttention(mix="joint"), anatomy=LIKE_LLAMA)
    mnemic.augment(base, mnemic.KNNAttention(mix="tanh"), anatomy=LIKE_LLAMA)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_one_softmax_takes_in_the_biases_of_t5(implementation: str) -> None:
    model = memorizing("t5", mix="joint", normalise="memory", k=30)
    model.set_attn_implementation(implementation)
    block, mix = model.encoder.block[0].layer[0], model.memory.attention.layers["0"]
    attention = block.SelfAttention
    with torch.no_grad():
        attention.relative_attention_bias.weight.normal_(0, 3)
        mix.gate.normal_(0, 0.1)
    text, ids = tokens(1, 30), tokens(1, 12, seed=1)
    model.memory.read(text)
    heard = []
    handle = attention.register_forward_hook(lambda module, given, result: heard.append(result[0]))
    with torch.no_grad():
        model(input_ids=ids, decoder_input_ids=ids)
    handle.remove()

    def heads(of: torch.Tensor, name: str) -> torch.Tensor:
        states = block.layer_norm(model.shared(of))
        return getattr(attention, name)(states).unflatten(-1, (attention.n_heads, -1))[0].transpose(0, 1).double()

    query, key, value = (heads(ids, name) for name in "qkv")
    past_key, past_value = (heads(text, name) for name in "kv")
    unit = torch.nn.functional.normalize
    near = unit(query, dim=-1) @ unit(past_key, dim=-1).transpose(1, 2) * mix.scale()[:, None, None].double()
    local = query @ key.transpose(1, 2) + attention.compute_bias(12, 12)[0].double()
    weights = torch.cat([local, near + mix.bias()[:, None, None].double()], -1).softmax(-1)
    wanted = (weights @ torch.cat([value, past_value], 1)).transpose(0, 1).flatten(1)
    torch.testing.assert_close(heard[0][0], attention.o(wanted.float()), atol=1e-5, rtol=1e-4)


def test_layers_that_do_not_turn_their_keys_are_left_alone() -> None:
    model = SmolLM3ForCausalLM(SmolLM3Config(**SHAPE, no_rope_layer_interval=2)).eval()
    mnemic.augment(model, mnemic.KNNAttention(layers=[0, 1], k=4, size=32), anatomy=LIKE_LLAMA)
    token = torch.full((1, 6), 7)
    with torch.no_grad(), model.memory.attention.pairs_read() as heard:
        model(token)
    keys = heard[0][0].view(6, -1)
    torch.testing.assert_close(keys, keys[:1].expand(6, -1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"dense": True}, {"mix": "joint"}, {"normalise": "memory", "dense": True}])
@pytest.mark.parametrize("position", ["t5", "rotary"])
def test_narrow_numbers_in_training(position: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = MnemicDecoderConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, position=position)
    model = mnemic.augment(MnemicDecoderForCausalLM(config), mnemic.KNNAttention(k=4, size=64, **settings)).train()
    losses = []
    for narrow in (False, True):
        state = model.memory.new_state(2)
        for part in tokens(3, 2, 11):
            with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                more = {"use_cache": False, "memory_state": state}
                loss = token_losses(model, part[:, 1:], input_ids=part[:, :-1], **more)[0].mean()
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_a_trace_sees_its_own_thread_alone() -> None:
    model, tokenizer = memorizing(), train_tokenizer([], kind="byte")
    model.resize_token_embeddings(len(tokenizer))
    text = "the key of the cellar hangs behind the door of the cellar, and the other one too" * 3
    alone = mnemic.trace(model, tokenizer, text, window=16, smaller=0)
    done = threading.Event()

    def other(number: int) -> None:
        while not done.is_set():
            with torch.no_grad():
                model(tokens(2, 7), use_cache=False)

    def traced(number: int) -> None:
        try:
            for _ in range(5):
                beside = mnemic.trace(model, tokenizer, text, window=16, smaller=0)
                assert torch.equal(beside.numbers, alone.numbers)
                torch.testing.assert_close(beside.gains, alone.gains)
        finally:
            done.set()

    assert not in_threads(2, lambda number: (traced, other)[number](number))


def test_a_memory_that_could_learn_nothing_is_not_trained(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([], kind="byte")
    corpus = Corpus("few", {"train": lambda: [Document("a", "one two three four five six " * 20)]})
    options = {"steps": 1, "batch_size": 2, "segment_length": 8, "warmup": 0}
    for batching in ("shuffled", "consecutive", "similar"):
        config = mnemic.TrainConfig(**options, batching=batching, out=str(tmp_path / batching))
        model = memorizing()
        model.resize_token_embeddings(len(tokenizer))
        with pytest.raises(UsageError, match="without the past of its documents: train with batching = documents"):
            mnemic.train(model, tokenizer, corpus, config)
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    model = memorizing("bert")
    model.resize_token_embeddings(len(tokenizer))
    config = mnemic.TrainConfig(**options, out=str(tmp_path / "masked"))
    with pytest.raises(UsageError, match=r"a masked model .* give it a text first with model.memory.read"):
        mnemic.train(model, tokenizer, corpus, config)
    model.memory.read(tokens(1, 20))
    mnemic.train(model, tokenizer, corpus, config)


def test_what_cannot_be_read_is_told() -> None:
    model, other = memorizing(), memorizing(layers=[1])
    with model.memory.disabled(), pytest.raises(UsageError, match="outside of disabled"):
        model.memory.read(tokens(1, 5))
    other.memory.read(tokens(1, 5))
    with pytest.raises(UsageError, match=r"has no 0.keys of 2 heads of 8, which this memory in layers \[0\] needs"):
        model.memory.load_state(other.memory.state())
    both = {**other.memory.state(), **read(memorizing(), tokens(1, 5)).state()}
    with pytest.raises(UsageError, match=r"has 1.keys, 1.values and the memory is in layers \[0\]"):
        model.memory.load_state(both)
    before = read(model, tokens(1, 7)).state()
    with pytest.raises(UsageError, match=r"has no 0.keys of 2 heads of 8"):
        model.memory.load_state(read(memorizing("gpt2"), tokens(1, 5)).state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.memory.state().items())
    with pytest.raises(UsageError, match=r"takes a tensor of token ids \(texts, tokens\), not list"):
        model.memory.read([[1, 2, 3]])
    with pytest.raises(UsageError, match=r"not a tensor \(5,\)"):
        model.memory.read(tokens(5))
    with pytest.raises(UsageError, match=r"one number for each token: expected \(1, 5\)"):
        model.memory.read(tokens(1, 5), torch.ones(1, 4))
    with pytest.raises(UsageError, match=r"unknown setting of attention 'sise'.*size"):
        model.memory.change("attention", sise=3)


def read(model: Any, ids: torch.Tensor) -> Any:
    model.memory.read(ids)
    return model.memory
