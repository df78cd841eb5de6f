"""What SRU++ carries over: saved exactly, moved by rows, without gradient, written once."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from mnemic.errors import UsageError
from mnemic.models import SRUCache
from tests.unit.models.naive_sru import CLOSE, ROWS, as_starts, model_of, tiny_sru, tokens


@torch.no_grad()
def test_saved_and_loaded_exactly() -> None:
    model, ids = model_of(5), tokens(7)
    cache, other = model.new_cache(ROWS), model.new_cache(ROWS)
    model(ids[:, :9], past_key_values=cache, document_starts=as_starts([{3}, {0, 8}])[:, :9])
    saved = cache.tensors()
    assert all(tensor.ndim == 0 or len(tensor) == ROWS for tensor in saved.values())
    expected = model(ids[:, 9:], past_key_values=cache).logits
    for _ in range(2):  # what was saved is not touched by a forward
        other.load_tensors(saved)
        assert torch.equal(model(ids[:, 9:], past_key_values=other).logits, expected)
    other.load_tensors(model.new_cache(ROWS).tensors())
    assert other.states == [None, None]
    with pytest.raises(UsageError, match=r"missing states\.1"):
        other.load_tensors({name: tensor for name, tensor in saved.items() if name != "states.1"})


@torch.no_grad()
def test_rows_can_be_moved_and_forgotten() -> None:
    model, ids = model_of(), tokens(8)
    alone = model(ids).logits[:, 7:]

    def filled() -> SRUCache:
        cache = model.new_cache(ROWS)
        model(ids[:, :7], past_key_values=cache)
        return cache

    def goes_on(cache: SRUCache, rows: list[int]) -> None:
        torch.testing.assert_close(model(ids[rows, 7:], past_key_values=cache).logits, alone[rows], **CLOSE)

    cache = filled()
    cache.reorder_cache(torch.tensor([1, 1]))
    goes_on(cache, [1, 1])
    cache = filled()
    cache.batch_select_indices(torch.tensor([1]))
    goes_on(cache, [1])
    cache = filled()
    cache.batch_repeat_interleave(2)
    goes_on(cache, [0, 0, 1, 1])
    cache = filled()
    cache.reset([1])
    rest = model(ids[:, 7:], past_key_values=cache).logits
    torch.testing.assert_close(rest[0], alone[0], **CLOSE)
    torch.testing.assert_close(rest[1], model(ids[1:, 7:]).logits[0], **CLOSE)
    cache.reset()
    torch.testing.assert_close(model(ids, past_key_values=cache).logits[:, 7:], alone, **CLOSE)


def test_no_gradient_flows_into_the_cache() -> None:
    model, ids = tiny_sru(), tokens(9)
    cache = model.new_cache(ROWS)
    first, second = (model.model.embed_tokens(part).detach().requires_grad_() for part in (ids[:, :6], ids[:, 6:]))
    model(inputs_embeds=first, past_key_values=cache)
    model(inputs_embeds=second, past_key_values=cache).logits.sum().backward()
    assert first.grad is None
    assert second.grad is not None
    assert not any(tensor.requires_grad for tensor in cache.tensors().values())


def test_activation_checkpointing_reads_and_writes_once() -> None:
    ids, found = tokens(10), []
    for checkpointing in (False, True):
        model = tiny_sru(xl_length=6).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        cache = model.new_cache(ROWS)
        losses = [
            model.token_losses(ids[:, low + 1 : high + 1], input_ids=ids[:, low:high], past_key_values=cache)[0].sum()
            for low, high in ((0, 5), (5, 9), (9, 13))
        ]
        sum(losses).backward()
        found.append(([loss.item() for loss in losses], model, cache.tensors()))
    (plain, first, cached), (again, second, recached) = found
    assert plain == pytest.approx(again, rel=1e-12)
    assert all(torch.equal(cached[name], recached[name]) for name in cached)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-11)


def test_wrong_use_is_refused() -> None:
    model, ids = model_of(), tokens(11)
    with pytest.raises(UsageError, match="DynamicCache cannot carry the recurrent state"):
        model(ids, past_key_values=DynamicCache())
    with pytest.raises(UsageError, match="the XL cache has 3 rows, the input 2"):
        model(ids, past_key_values=model.new_cache(3))
    with pytest.raises(UsageError, match="document_starts of shape"):
        model(ids, document_starts=torch.zeros(2, 3, dtype=torch.bool))
    with pytest.raises(UsageError, match="either input_ids or inputs_embeds"):
        model()
