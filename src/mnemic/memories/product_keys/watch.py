"""How a memory is used while it is trained, and a word if most of it is not (arXiv 2010.03881, section 3.1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FEW = 0.1  # of the slots that even use would have made some token's best
PATIENCE = 3  # times in a row before it is said


class Watch:
    """Keeps which slots were some token's best in the step that is being made, and tells when it is asked.

    Of one step only: what is told then depends on nothing that a resumed run would not have.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._step: dict[int, list[Tensor]] = {}
        self._low: dict[int, int] = {}

    def begin_step(self) -> None:
        """Forgets the step before."""
        self._step.clear()

    def add(self, layer: int, slots: Tensor, weights: Tensor) -> None:
        """Keeps what tokens read in a layer: (N, heads, k)."""
        best = slots.detach().gather(-1, weights.detach().argmax(-1, keepdim=True))
        self._step.setdefault(layer, []).append(best.flatten())

    def tell(self) -> tuple[dict[str, float], list[str]]:
        """The top-1 usage of each layer in this step, also as a share of what even use would have reached."""
        figures, said = dict[str, float](), list[str]()
        for layer, parts in sorted(self._step.items()):
            best = torch.cat(parts)
            reached, even = len(best.unique()) / self.slots, evenly(len(best), self.slots)
            if not even:
                continue
            figures |= {f"top1_usage.{layer}": reached, f"top1_evenness.{layer}": reached / even}
            self._low[layer] = self._low.get(layer, 0) + 1 if reached < FEW * even else 0
            if self._low[layer] == PATIENCE:
                said.append(sentence(layer, reached, even))
        return figures, said


def evenly(times: int, slots: int) -> float:
    """The share of slots that are drawn at least once if each of so many draws takes any of them."""
    return -math.expm1(times * math.log1p(-1 / slots)) if slots > 1 else float(times > 0)


def sentence(layer: int, reached: float, even: float) -> str:
    """What a user should know of a memory of which few slots are used, and what the paper would do."""
    return (
        f"the product keys of layer {layer} use few of their slots: in a step {reached:.2%} were some token's best, "
        f"where even use would have reached {even:.2%}. Slots that are not read stay behind while the model moves on. "
        "The paper's remedies: begin with a model that was trained without the memory, keep its feed-forward "
        "(feed_forward = 'keep'), and normalise queries over the batch (query_norm = 'batch')"
    )
