"""Our cross entropy against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mnemic.models import cross_entropy
from mnemic.models.cross_entropy import mean_loss, token_cross_entropy


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_losses_and_gradient_are_torchs(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "ROWS", 5)  # so that pieces of several sizes occur
    logits = torch.randn(rows, 7, dtype=torch.float64) * 30
    targets = torch.randint(0, 7, (rows,))
    targets[rows // 2] = -100
    above = torch.randn(rows, dtype=torch.float64)
    one, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found = token_cross_entropy(one, targets)
    expected = F.cross_entropy(other, targets, reduction="none")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    found.backward(above, retain_graph=True)
    expected.backward(above)
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-11, atol=1e-12)
    one.grad = None
    found.backward(above)  # a second time: what was saved is still whole
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-11, atol=1e-12)


def test_half_precision_logits_give_full_precision_losses() -> None:
    logits = torch.randn(6, 50, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 50, (6,))
    losses = token_cross_entropy(logits, targets)
    torch.testing.assert_close(losses, F.cross_entropy(logits.float(), targets, reduction="none"))
    losses.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_huge_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    loss = token_cross_entropy(logits, torch.tensor([0]))
    loss.sum().backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_mean_counts_targets_or_what_the_trainer_counted() -> None:
    losses, targets = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([4, 4, -100])
    assert mean_loss(losses, targets, None).item() == 1.5
    assert mean_loss(losses, targets, 6).item() == 0.5
    assert mean_loss(losses, targets, torch.tensor(6)).item() == 0.5
