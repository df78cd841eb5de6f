"""Adaptive input and softmax: proper probabilities, torch's own as oracle, and losses without the vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mnemic.errors import UsageError
from mnemic.models import MnemicDecoderForCausalLM
from mnemic.models.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from tests.unit.models.conftest import tiny_decoder

CUTOFFS = [20, 45]


def decoder(**options: object) -> MnemicDecoderForCausalLM:
    return tiny_decoder("rotary", adaptive_cutoffs=CUTOFFS, adaptive_factor=2, **options)


def oracle(head: AdaptiveSoftmax) -> nn.AdaptiveLogSoftmaxWithLoss:
    """torch's adaptive softmax with the same weights."""
    torchs = nn.AdaptiveLogSoftmaxWithLoss(16, 61, CUTOFFS, div_value=2.0).double()
    with torch.no_grad():
        torchs.head.weight.copy_(torch.cat([head.tables[0], head.clusters]))
        for band, (narrow, wide) in enumerate(torchs.tail, start=1):
            narrow.weight.copy_(head.projections[band - 1])
            wide.weight.copy_(head.tables[band])
    return torchs


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_log_probabilities_sum_to_one_and_are_torchs(tied: bool) -> None:
    model = decoder(tie_word_embeddings=tied)
    hidden = torch.randn(9, 16, dtype=torch.float64) * 3
    found = model.lm_head(hidden)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(9, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, oracle(model.lm_head).log_prob(hidden), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tied", [True, False])
def test_token_losses_are_those_of_the_logits(tied: bool) -> None:
    ids = torch.randint(0, 61, (2, 30))
    targets = torch.randint(0, 61, (2, 30))
    targets[0, 3] = targets[1, 7] = -100
    gradients = []
    for whole in (True, False):
        model = decoder(tie_word_embeddings=tied)
        if whole:
            logits = model(ids).logits
            kept = targets.clamp(min=0).unsqueeze(-1)
            losses = -logits.gather(-1, kept).squeeze(-1) * (targets != -100)
            expected = losses
        else:
            losses, outputs = model.token_losses(targets, input_ids=ids)
            torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-10)
            assert outputs.last_hidden_state.shape == (2, 30, 16)
        losses.sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_losses_equal_torchs_and_never_form_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder()
    hidden, targets = torch.randn(40, 16, dtype=torch.float64), torch.randint(0, 61, (40,))
    tail, computed = AdaptiveSoftmax._tail, []

    def counted(self: AdaptiveSoftmax, hidden: Tensor, band: int) -> Tensor:
        computed.append((band, len(hidden)))
        return tail(self, hidden, band)

    monkeypatch.setattr(AdaptiveSoftmax, "_tail", counted)
    found, normalisers = model.lm_head.losses(hidden, targets)
    head = torch.cat([model.lm_head.tables[0], model.lm_head.clusters])
    torch.testing.assert_close(normalisers, (hidden @ head.t()).logsumexp(-1), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found, -oracle(model.lm_head)(hidden, targets).output, rtol=1e-10, atol=1e-10)
    in_band = [int(((targets >= low) & (targets < high)).sum()) for low, high in ((20, 45), (45, 61))]
    assert computed == [(1, in_band[0]), (2, in_band[1])]


def test_labels_give_the_mean_of_the_token_losses() -> None:
    model, ids = decoder(), torch.randint(0, 61, (2, 12))
    losses, _ = model.token_losses(ids[:, 1:], input_ids=ids[:, :-1])
    assert model(ids, labels=ids).loss.item() == pytest.approx(losses.mean().item(), rel=1e-10)


@torch.no_grad()
def test_embedding_of_each_band() -> None:
    model = decoder()
    embedding = model.model.embed_tokens
    assert isinstance(embedding, AdaptiveEmbedding)
    ids = torch.tensor([[0, 19, 20], [44, 45, 60]])
    found = embedding(ids)
    for token, vector in zip(ids.flatten().tolist(), found.view(6, 16), strict=True):
        band = sum(token >= cutoff for cutoff in CUTOFFS)
        expected = embedding.tables[band][token - [0, *CUTOFFS][band]]
        if band:
            expected = expected @ embedding.projections[band - 1]
        torch.testing.assert_close(vector, expected * 4, rtol=1e-12, atol=1e-12)


def test_tied_weights_are_one_and_counted_once() -> None:
    tied, free = decoder(), decoder(tie_word_embeddings=False)
    assert tied.lm_head.tables[1] is tied.model.embed_tokens.tables[1]
    assert tied.lm_head.projections[0] is tied.model.embed_tokens.projections[0]
    assert free.lm_head.tables[1] is not free.model.embed_tokens.tables[1]
    bands = 20 * 16 + 25 * 8 + 16 * 4 + (8 + 4) * 16
    more = sum(p.numel() for p in free.parameters()) - sum(p.numel() for p in tied.parameters())
    assert more == bands


def test_all_bands_begin_about_as_large() -> None:
    torch.manual_seed(0)
    model = tiny_decoder("rotary", vocab_size=3000, hidden_size=128, adaptive_cutoffs=[1000, 2000])
    sizes = [model.model.embed_tokens(torch.arange(low, low + 1000)).std().item() for low in (0, 1000, 2000)]
    assert max(sizes) < 2 * min(sizes)


def test_what_cannot_be_done_is_said() -> None:
    model = decoder()
    with pytest.raises(UsageError, match="cannot be resized"):
        model.resize_token_embeddings(70)
    with pytest.raises(UsageError, match="the vocabulary has 61 tokens"):
        model(torch.tensor([[61]]))
