"""What an attention memory found while a text was read, token by token, and what it was worth."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mnemic.data import Document, TokenizedCorpus, tokenize_corpus
from mnemic.errors import UsageError
from mnemic.evaluate.perplexity import carried_windows
from mnemic.hf.losses import IGNORED
from mnemic.train.objectives import NextToken, check_length
from mnemic.train.state import untouched

AROUND = 8  # tokens shown before and after one that was retrieved


@dataclass(frozen=True)
class Retrieved:
    """A pair that a token looked at: where in the document it stands, in which layer and head, and its weight there."""

    position: int
    layer: int
    head: int
    weight: float


@dataclass(frozen=True)
class Trace:
    """A document as a model read it: token ids, the loss of each, and what was retrieved to predict it.

    Entry t of everything is about the prediction of token t; token 0 begins the document, and nothing predicts it.
    `numbers` and `weights` are (layers, heads, tokens, k): -1 and 0 where nothing was found, numbers below -1 for what
    is not of this document but of a store. `shares` (layers, heads, tokens) is the memory's share of a head's result.
    """

    tokenizer: Any
    ids: Tensor
    losses: Tensor
    smaller: Tensor | None  # the losses with another size of the memory
    layers: list[int]
    numbers: Tensor
    weights: Tensor
    shares: Tensor

    @property
    def gains(self) -> Tensor:
        """How much lower each token's loss is than with the smaller memory."""
        if self.smaller is None:
            raise UsageError("gains are against a smaller memory: give trace() one, as in smaller=0")
        return self.smaller - self.losses

    @cached_property
    def looks(self) -> Tensor:
        """What of a head's result each pair is, (layers, heads, tokens, k): its weight, times the memory's share."""
        worth = self.weights * self.shares.abs().unsqueeze(-1)  # a tanh gate may take away too
        return worth.masked_fill(self.numbers < 0, 0)

    @cached_property
    def usual_looks(self) -> Tensor:
        """How much each head looks at each position of the document on average, (layers, heads, tokens)."""
        numbers, total = self.numbers.clamp(min=0).flatten(2), torch.zeros_like(self.shares)
        return total.scatter_add_(2, numbers, self.looks.flatten(2)) / len(self.ids)

    def retrieved(self, token: int, most: int = 5) -> list[Retrieved]:
        """What was looked at most to predict a token, by w log(w / usual): its part of how unusual a head's looks are.

        Many models rest their attention on the first token where they have no use for it, which tells nothing.
        """
        worth, numbers = self.looks[:, :, token], self.numbers[:, :, token]
        usual = self.usual_looks.gather(2, numbers.clamp(min=0)).clamp(min=torch.finfo(worth.dtype).tiny)
        found = []
        for flat in torch.xlogy(worth, worth / usual).flatten().argsort(descending=True)[:most].tolist():
            layer, rest = divmod(flat, worth.shape[1] * worth.shape[2])
            head, place = divmod(rest, worth.shape[2])
            if (weight := worth[layer, head, place].item()) > 0:
                found.append(Retrieved(int(numbers[layer, head, place]), self.layers[layer], head, weight))
        return found

    def best(self, most: int = 10) -> list[dict[str, Any]]:
        """The tokens that gained most, each with the text before it and what was retrieved, side by side (Table 8)."""
        rows = []
        for token in self.gains.argsort(descending=True)[:most].tolist():
            found = self.retrieved(token)
            rows.append(
                {
                    "token": token,
                    "gain": self.gains[token].item(),
                    "query": self.text(token - 2 * AROUND, token),
                    "target": self.text(token, token + 1),
                    "retrieved": [
                        {"position": one.position, "distance": token - one.position, "weight": one.weight}
                        | {"text": self.text(one.position - AROUND, one.position + AROUND)}
                        for one in found
                    ],
                }
            )
        return rows

    def distances(self) -> Tensor:
        """How far back each retrieved pair stands from the token it was retrieved for."""
        places = torch.arange(self.numbers.shape[2]).view(1, 1, -1, 1)
        return (places - self.numbers)[self.numbers >= 0]

    def text(self, first: int, end: int) -> str:
        """The text of some tokens."""
        return str(self.tokenizer.decode(self.ids[max(first, 0) : max(end, 0)].tolist()))

    def plot(self, what: str, path: str | Path) -> None:
        """Draws "loss-delta" (gain by token, Figure 7), "distance" or "shares" (by layer and head) into a file."""
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
        if what == "loss-delta":
            axes.plot(self.gains.numpy(), linewidth=0.6)
            axes.set(xlabel="token", ylabel="loss, smaller memory minus larger, nats")
        elif what == "distance":
            axes.hist(self.distances().numpy(), bins=60)
            axes.set(xlabel="tokens back", ylabel="retrieved pairs")
        elif what == "shares":
            for layer, shares in zip(self.layers, self.shares.mean(-1), strict=True):
                axes.bar([f"layer {layer}, head {head}" for head in range(len(shares))], shares.numpy())
            axes.set(ylabel="share of the memory")
            axes.tick_params(axis="x", rotation=45)
        else:
            raise UsageError(f"plot {what!r}: there are loss-delta, distance and shares")
        figure.savefig(path)
        plt.close(figure)


def trace(model: Any, tokenizer: Any, text: str | Document, *, window: int = 512, smaller: int | None = None) -> Trace:
    """Reads a document segment by segment with the model's attention memory and keeps what it found.

    smaller: the size of another memory to compare with, 0 for none.
    """
    memory = getattr(getattr(model, "memory", None), "attention", None)
    if memory is None:
        raise UsageError("trace() shows what an attention memory finds: give the model one, see KNNAttention")
    document = text if isinstance(text, Document) else Document("text", text)
    check_length(model, window, "window")
    tokens = tokenize_corpus([document], tokenizer)
    objective, other = NextToken(model, tokenizer, seed=0), None
    with untouched(model):
        with memory.observing() as seen:
            losses, scored = _losses(objective, tokens, window)
        if smaller is not None:
            with memory.sized(smaller):
                other, _ = _losses(objective, tokens, window)
    found = {
        name: torch.cat([one[name][:, :, own] for one, own in zip(seen, scored, strict=True)], 2) for name in seen[0]
    }
    numbers = F.pad(found["numbers"], (0, 0, 1, 0), value=-1)
    weights = F.pad(found["weights"], (0, 0, 1, 0))
    shares = F.pad(found["shares"], (1, 0))
    ids = torch.from_numpy(tokens[0].astype("int64"))
    return Trace(tokenizer, ids, losses, other, memory.indices, numbers, weights, shares)


def _losses(objective: NextToken, tokens: TokenizedCorpus, window: int) -> tuple[Tensor, list[Tensor]]:
    """The loss of each token of a document, 0 for the first; and which tokens of each window were scored.

    The last window begins with some that the one before has scored.
    """
    parts, scored = [torch.zeros(1)], []
    for batch, carry in carried_windows(tokens, window, window, 1, objective):
        losses = objective.losses(batch, carry)
        own = batch["targets"] != IGNORED
        parts.append(losses[own].float().cpu())
        scored.append(own[0].cpu())
    return torch.cat(parts), scored
