"""A model with recurrent memory tokens: what it has read, other memories beside them, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mnemic
from mnemic.errors import UnsupportedModel, UsageError
from mnemic.memories.tokens.recurrence import Carried
from tests.contract.architectures import build
from tests.unit.memories.recurrent import CLOSE, COUNT, Reader, every_architecture, ids, made, starting


@every_architecture
def test_what_was_read_is_before_every_later_forward(architecture: str) -> None:
    model, text, prompt = made(architecture, segment=8), ids(1, 16), ids(2, 5, seed=3)
    new = model(input_ids=prompt).logits
    model.memory.read(text)
    read, written = model(input_ids=prompt).logits, model.memory.tokens.shared.written
    assert (read - new).abs().max() > 1e-3
    model.memory.reset()
    assert torch.equal(model(input_ids=prompt).logits, new)
    reader = Reader(model, 1)
    reader.cache = None  # an XL cache is no part of what a memory reads
    for begin in (0, 8):
        reader.read(text[:, begin : begin + 8])
    torch.testing.assert_close(reader.state.written, written, **CLOSE)
    model.memory.read(text[:, :8])
    model.memory.read(text[:, 8:])
    torch.testing.assert_close(model(input_ids=prompt).logits, read, **CLOSE)
    kept = model.memory.state()
    model.memory.reset()
    model.memory.load_state(kept)
    torch.testing.assert_close(model(input_ids=prompt).logits, read, **CLOSE)


@every_architecture
def test_texts_of_different_lengths_are_read_beside_each_other(architecture: str) -> None:
    model, texts, prompt = made(architecture, segment=4), ids(2, 10), ids(2, 5, seed=3)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 6:] = 0
    model.memory.read(texts, mask)
    together = model(input_ids=prompt).logits
    model.memory.reset()
    for row, length in ((0, 10), (1, 6)):
        model.memory.reset()
        model.memory.read(texts[row : row + 1, :length])
        torch.testing.assert_close(together[row : row + 1], model(input_ids=prompt[row : row + 1]).logits, **CLOSE)


def test_an_attention_memory_beside_them_keeps_tokens_alone() -> None:
    torch.manual_seed(0)
    both = mnemic.augment(
        build("llama"), mnemic.KNNAttention(layers=[1], k=4, size=50), mnemic.MemoryTokens.recurrent()
    )
    reader, text = Reader(both.eval(), 2), ids(2, 12)
    with torch.no_grad():
        reader.read(text[:, :6], starting((2, 6), (0, 0), (1, 2)))
        row, second = reader.states["attention"].memories[1].rows
        assert (row.count, second.count) == (6, 4)
        reader.read(text[:, 6:], starting((2, 6)))
        assert (row.count, second.count) == (12, 10)


def test_an_output_memory_beside_them_has_keys_of_tokens_alone() -> None:
    for name in ("llama", "opt"):
        torch.manual_seed(0)
        both = mnemic.augment(
            build(name), mnemic.OutputMemory(local=True, long=50), mnemic.MemoryTokens.recurrent(count=COUNT)
        ).eval()
        apart = mnemic.augment(build(name), mnemic.OutputMemory(local=True, long=50)).eval()
        with torch.no_grad():
            both.memory.tokens.layer.vectors.zero_()
            keys, expected = [], []
            for model, found in ((both, keys), (apart, expected)):
                states = model.memory.new_state(2)
                model.token_losses(ids(2, 6).roll(-1, 1), input_ids=ids(2, 6), memory_state=states)
                found.append(states["output"].keys)
        assert keys[0].shape == expected[0].shape == (2, 6, 32)


def test_rows_can_be_chosen_and_saved() -> None:
    state = Carried(3, torch.zeros(2, 4))
    state.write(torch.arange(24.0).view(3, 2, 4), ended=torch.tensor([False, True, False]))
    assert state.begun.tolist() == [True, False, True]
    state.batch_select_indices(torch.tensor([2, 1]))
    twin = Carried(2, torch.zeros(2, 4))
    twin.load_tensors(state.tensors())
    assert torch.equal(twin.written, state.written)
    assert twin.begun.tolist() == [True, False]
    with pytest.raises(UsageError, match="another number or width"):
        Carried(2, torch.zeros(3, 4)).load_tensors(state.tensors())


def test_a_forward_that_carries_nothing_reads_the_new_memory() -> None:
    """Evaluation in between does not touch what training carries, nor what was read."""
    model, text = made("llama"), ids(2, 12)
    with torch.no_grad():
        reader = Reader(model, 2)
        reader.read(text[:, :6])
        before = reader.state.written.clone()
        other = Reader(model, 4)
        other.read(ids(4, 6, seed=8))
        model(input_ids=text)
        model.generate(input_ids=text, max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert torch.equal(reader.state.written, before)
        assert model.memory.tokens.shared is None


def test_a_memory_of_another_size_reads_anew() -> None:
    model = made("llama", segment=8)
    model.memory.read(ids(1, 16))
    model.memory.change("tokens", count=5)
    assert model.memory.tokens.shared is None
    assert model(input_ids=ids(1, 4)).logits.isfinite().all()


def test_what_cannot_be_is_said() -> None:
    for settings in ({"variant": "control"}, {"place": "both"}, {"pool": True}):
        with pytest.raises(UsageError, match="segment = 128 is for causal models"):
            mnemic.MemoryTokens.recurrent(**settings)
    with pytest.raises(UnsupportedModel, match="is not causal"):
        made("bert")
    model = made("llama")
    with pytest.raises(UsageError, match="read segments without past_key_values"):
        Reader(model, 1).model.token_losses(
            ids(1, 4),
            input_ids=ids(1, 4),
            memory_state=model.memory.new_state(1),
            past_key_values=model(input_ids=ids(1, 1), use_cache=True).past_key_values.__class__(),
        )
    with model.memory.disabled(), pytest.raises(UsageError, match="outside of disabled"):
        model.memory.read(ids(1, 4))
    with pytest.raises(UsageError, match="the tokens of a segment, or 0"):
        mnemic.MemoryTokens.recurrent(segment=-1)
    with pytest.raises(UsageError, match="only their count can be changed"):
        model.memory.change("tokens", segment=0)
    for rows in (1, 3):
        with pytest.raises(UsageError, match=f"a state of {rows} rows for a batch of 2"):
            model.token_losses(ids(2, 4), input_ids=ids(2, 4), memory_state=model.memory.new_state(rows))
    model.memory.read(ids(2, 4))
    with pytest.raises(UsageError, match="read one text for all"):
        model(input_ids=ids(3, 4))
    with pytest.raises(UsageError, match="as many texts"):
        model.memory.read(ids(1, 4))


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_new_document_finds_nothing_of_the_one_before_through_the_memory(recurrent: bool) -> None:
    """Below the last layer an attention memory gives memory tokens what the next layer reads in them."""
    tokens = mnemic.MemoryTokens.recurrent(count=COUNT) if recurrent else mnemic.MemoryTokens(count=COUNT)
    torch.manual_seed(1)
    model = mnemic.augment(build("llama"), mnemic.KNNAttention(layers=[0], k=4, size=50), tokens).eval()
    for starts, same in ((starting((1, 8), (0, 0)), slice(0, 7)), (starting((1, 8), (0, 3)), slice(3, 7))):
        found = []
        for seed in (5, 6):
            reader = Reader(model, 1)
            with torch.no_grad():
                reader.read(ids(1, 8, seed=seed), starting((1, 8), (0, 0)))
                found.append(reader.read(ids(1, 8), starts))
        torch.testing.assert_close(found[0][:, same], found[1][:, same])
        assert not torch.equal(found[0], found[1]) or same.start == 0


def test_memories_read_a_text_together() -> None:
    """As evaluation reads it, in whichever order they were put in."""
    attention, tokens = mnemic.KNNAttention(layers=[1], k=4, size=100), mnemic.MemoryTokens.recurrent(segment=8)
    found = []
    for order in ((attention, tokens), (tokens, attention)):
        model = mnemic.augment(build("llama"), *order).eval()
        vectors = model.memory.tokens.layer.vectors
        vectors.data = torch.randn(vectors.shape, generator=torch.Generator().manual_seed(0))
        model.memory.read(ids(1, 24))
        found.append(model(input_ids=ids(1, 5, seed=3)).logits)
        written = model.memory.tokens.shared.written
        model.memory.reset()
        reader = Reader(model, 1)
        with torch.no_grad():
            for begin in (0, 8, 16):
                reader.read(ids(1, 24)[:, begin : begin + 8])
        torch.testing.assert_close(reader.state.written, written, **CLOSE)
    torch.testing.assert_close(found[0], found[1], **CLOSE)


def test_packed_rows_are_documents_too() -> None:
    model, positions, found = made("llama"), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]), []
    for seed in (5, 6):
        reader = Reader(model, 1)
        with torch.no_grad():
            reader.read(ids(1, 8, seed=seed))
            given = {"input_ids": ids(1, 8), "position_ids": positions, "memory_state": reader.states}
            found.append(model.token_losses(ids(1, 8).roll(-1, 1), **given)[0])
    assert torch.equal(found[0], found[1])  # both documents begin anew


def test_positions_may_be_given_with_an_xl_cache_and_no_mask() -> None:
    model, text, found = made("mnemic-rotary+xl"), ids(1, 8), []
    for given in ({}, {"position_ids": torch.arange(8)[None]}):
        states, cache = model.memory.new_state(1), model.memory.new_cache(1)
        options = {"memory_state": states, "past_key_values": cache, "use_cache": True}
        found.append(model.token_losses(text, input_ids=text, **options, **given)[0])
    torch.testing.assert_close(found[0], found[1])


def test_every_parameter_takes_part_in_a_plain_forward() -> None:
    model = made("llama")
    model(input_ids=ids(2, 8), labels=ids(2, 8)).loss.backward()
    assert all(parameter.grad is not None for parameter in model.memory.parameters())
    assert model.memory.tokens.layer.scale.grad.abs().sum() == 0


def test_a_refused_state_leaves_what_was_read() -> None:
    model = made("llama", segment=8)
    model.memory.read(ids(1, 8))
    before = model(input_ids=ids(1, 4)).logits
    with pytest.raises(UsageError, match="another number or width"):
        model.memory.load_state({"tokens.written": torch.zeros(2, 1, 32), "tokens.begun": torch.ones(2).bool()})
    assert torch.equal(model(input_ids=ids(1, 4)).logits, before)


def test_a_lesion_leaves_nothing_to_carry() -> None:
    model = made("llama", segment=8)
    model.memory.change("tokens", count=0)
    with torch.no_grad():
        reader = Reader(model, 2)
        reader.read(ids(2, 8))
        found = reader.read(ids(2, 8, seed=1), starting((2, 8), (1, 3)))
        with model.memory.disabled():
            plain = Reader(model, 2).read(ids(2, 8, seed=1), starting((2, 8), (1, 3)))
    torch.testing.assert_close(found, plain)


def test_what_was_read_is_before_documents_that_are_scored() -> None:
    model, text = made("llama", segment=8), ids(2, 8)
    with torch.no_grad():
        new = Reader(model, 2).read(text, starting((2, 8), (0, 0), (1, 0), (1, 4)))
        model.memory.read(ids(1, 16, seed=9))
        read = Reader(model, 2).read(text, starting((2, 8), (0, 0), (1, 0), (1, 4)))
    assert ((new - read)[:, :4].abs().amax(1) > 1e-4).all()
    assert (new - read)[1, 4:].abs().max() > 1e-4


def test_a_store_is_not_built_of_what_goes_from_segment_to_segment(tmp_path: Any) -> None:
    tokenizer = mnemic.train_tokenizer([], "byte")
    (tmp_path / "text.txt").write_text("a text that is long enough")
    model = made("llama")
    with pytest.raises(UsageError, match="windows that are read alone"):
        mnemic.build_store(model, tokenizer, str(tmp_path), tmp_path / "rows.store")


@pytest.mark.parametrize("architecture", ["llama", "mnemic-rotary+xl"])
def test_rows_of_a_text_stand_one_after_the_other(architecture: str) -> None:
    """Two texts that were read serve four rows, or two beams each: the first two rows the first."""
    model, texts, prompts = made(architecture, segment=8), ids(2, 16), ids(4, 5, seed=3)
    model.memory.tokens.layer.scale.data *= 10
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.memory.read(texts)
    together = model(input_ids=prompts).logits
    beams = model.generate(input_ids=prompts[:2], num_beams=2, **options)
    for row in range(4):
        model.memory.reset()
        model.memory.read(texts[row // 2 : row // 2 + 1])
        torch.testing.assert_close(together[row : row + 1], model(input_ids=prompts[row : row + 1]).logits, **CLOSE)
    for row in range(2):
        model.memory.reset()
        model.memory.read(texts[row : row + 1])
        assert torch.equal(
            beams[row : row + 1], model.generate(input_ids=prompts[row : row + 1], num_beams=2, **options)
        )


def test_what_is_read_is_read_without_dropout_and_without_gradient() -> None:
    torch.manual_seed(0)
    base = build("gpt2")
    for module in base.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    model, found = mnemic.augment(base, mnemic.MemoryTokens.recurrent(count=COUNT, segment=8)).train(), []
    for _ in range(2):
        model.memory.reset()
        model.memory.read(ids(1, 16))
        found.append(model.memory.tokens.shared.written)
    assert torch.equal(*found)
    assert not found[0].requires_grad
    assert model.training


def test_a_state_of_another_number_of_tokens_is_refused() -> None:
    model = made("llama")
    state = model.memory.new_state(2)
    model.memory.change("tokens", count=COUNT + 1)
    with pytest.raises(UsageError, match="a state of 3 memory tokens where there are 4 now"):
        model.token_losses(ids(2, 4), input_ids=ids(2, 4), memory_state=state)
