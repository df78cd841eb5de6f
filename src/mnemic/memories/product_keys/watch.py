"""How a memory is used while it is trained, and a word if most of it is not (arXiv 2010.03881, section 3.1)."""

from __future__ import annotations

import math

from mnemic.memories.product_keys.usage import Usage

FEW = 0.1  # of the slots that even use would have made some token's best
PATIENCE = 3  # times in a row before it is said


class Watch:
    """Counts from one line of the log to the next."""

    def __init__(self, usage: Usage) -> None:
        self.usage = usage
        self._low = dict.fromkeys(usage.layers, 0)

    def tell(self) -> tuple[dict[str, float], list[str]]:
        """The top-1 usage of each layer since the last time, also as a share of what even use would have reached."""
        figures, said = dict[str, float](), list[str]()
        for layer, counts in self.usage.layers.items():
            tops = counts.tops.sum(0)
            reached, even = (tops > 0).double().mean().item(), evenly(int(tops.sum()), len(tops))
            if not even:
                continue
            figures |= {f"top1_usage.{layer}": reached, f"top1_evenness.{layer}": reached / even}
            self._low[layer] = self._low[layer] + 1 if reached < FEW * even else 0
            if self._low[layer] == PATIENCE:
                said.append(sentence(layer, reached, even))
            for part in (counts.reads, counts.tops, counts.weights):
                part.zero_()
        return figures, said


def evenly(times: int, slots: int) -> float:
    """The share of slots that are drawn at least once if each of so many draws takes any of them."""
    return -math.expm1(times * math.log1p(-1 / slots)) if slots > 1 else float(times > 0)


def sentence(layer: int, reached: float, even: float) -> str:
    """What a user should know of a memory of which few slots are used, and what the paper would do."""
    return (
        f"the product keys of layer {layer} use few of their slots: {reached:.2%} were the best of some token, where "
        f"even use would have reached {even:.2%}. Slots that are not read stay behind while the model moves on. The "
        "paper's remedies: begin with a model that was trained without the memory, keep its feed-forward (feed_forward "
        "= 'keep'), and normalise queries over the batch (query_norm = 'batch')"
    )
