"""One forward of a model with an attention memory: what it may find, and what it will have read when it is done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mnemic.memories.attention import layer
from mnemic.memories.attention.search import MISSING
from mnemic.memories.attention.state import State
from mnemic.memories.attention.working import Found
from mnemic.models.masks import real_tokens

Pairs = tuple[Tensor, Tensor, bool]
"""Keys and values (H, n, d), and whether they are the row's own."""
Attended = tuple[Tensor, Tensor, Tensor]
"""What queries took from the memory (B, H, T, d), the mass of its scores and whether there was any (B, H, T)."""


@dataclass(eq=False)
class Forward:
    """What is known of the tokens (B, T) of a forward, and what its layers found.

    Found pairs are kept, for a layer may run a second time in the backward pass, when the memory has moved on.
    """

    state: State | None  # of these rows; moved on by `commit`
    shared: list[State] = field(default_factory=list)  # what was read before, for every row to look into
    starts: Tensor | None = None  # where documents start
    real: Tensor | None = None  # no padding
    held: list[int] | None = None  # how many of each row's last pairs the context holds
    overlap: Tensor | None = None  # (B,): how many of the first tokens were read before
    prefix: int = 0  # vectors before the tokens, which are not read,
    suffix: int = 0  # nor those behind them
    groups: int = 1  # of the vectors before: the second of two is before documents that begin in this forward
    heads: int = 0  # of the queries
    new: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    found: dict[int, list[Found]] = field(default_factory=dict)
    asked: dict[int, Tensor] = field(default_factory=dict)  # by whom is watching: scaled queries (B, H, T, d)
    shares: dict[int, Tensor] = field(default_factory=dict)  # and the memory's share of each result (B, H, T)
    pairs: dict[int, list[list[Pairs]]] = field(default_factory=dict)
    repeated: set[int] = field(default_factory=set)  # the layers that ran again in the backward pass

    def nearest(self, index: int, queries: Tensor, asked: Tensor, k: int) -> Attended | None:
        """Attention of `asked` (B, H, T, d) to the k pairs nearest to `queries`, which differ from it by a scale."""
        if index not in self.found:
            self.found[index] = self._find(index, _folded(queries.detach(), self._kv_heads(index)), k)
        found = self.found[index]
        if not found:
            return None
        folded = _folded(asked, self._kv_heads(index))
        attended = [
            layer.attend_to_pairs(one, near.keys, near.values, near.there)
            for one, near in zip(folded, found, strict=True)
        ]
        memory, mass = (torch.stack(part) for part in zip(*attended, strict=True))
        return _unfolded(asked.shape, memory, mass, torch.stack([near.there.any(-1) for near in found]))

    def _find(self, index: int, queries: Tensor, k: int) -> list[Found]:
        """What each row finds; nothing if there is no memory to look into."""
        parts: list[list[Found]] = []
        if (own := self.state and self.state.memories[index]) and own.has_visible(self.held):
            found = own.find(queries, k, self.held)
            if self.starts is not None:
                hidden = self._after_a_start(queries.shape[2])
                found = [one.hidden(tokens) for one, tokens in zip(found, hidden, strict=True)]
            parts.append(found)
        shared = [state.memories[index] for state in self.shared]
        parts += [
            [one.elsewhere() for one in memory.find(queries, k, None)] for memory in shared if memory.has_visible(None)
        ]
        return [Found.best(list(of_row), one, k) for one, *of_row in zip(queries, *parts, strict=True)] if parts else []

    def all(self, index: int, asked: Tensor) -> Attended | None:
        """Attention of `asked` (B, H, T, d) to all pairs."""
        if index not in self.pairs:
            self.pairs[index] = self._pairs(index, len(asked))
        if not any(self.pairs[index]):
            return None
        folded = _folded(asked, self._kv_heads(index))
        hidden = None if self.starts is None else self._after_a_start(folded.shape[2])
        attended, there = [], []
        for row, pairs in enumerate(self.pairs[index]):
            results, masses = [torch.zeros_like(folded[row])], [torch.full_like(folded[row, ..., 0], -torch.inf)]
            for keys, values, own in pairs:
                result, mass = layer.attend_to_all(folded[row], keys.to(asked.dtype), values.to(asked.dtype))
                results.append(result)
                masses.append(mass.masked_fill(hidden[row], -torch.inf) if own and hidden is not None else mass)
            there.append((torch.stack(masses) > -torch.inf).any(0))
            attended.append(layer.together(torch.stack(results), torch.stack(masses)))
        memory, mass = (torch.stack(part) for part in zip(*attended, strict=True))
        return _unfolded(asked.shape, memory, mass, torch.stack(there))

    def _pairs(self, index: int, rows: int) -> list[list[Pairs]]:
        """The pairs that each row sees, as copies: the memory moves on before the gradient comes back."""
        memories = [] if self.state is None else [(self.state.memories[index], self.held, True)]
        memories += [(state.memories[index], None, False) for state in self.shared]
        found = []
        for row in range(rows):
            seen = [(*memory.visible_pairs(row, rows, held), own) for memory, held, own in memories]
            found.append([(keys.clone(), values.clone(), own) for keys, values, own in seen if keys.shape[1]])
        return found

    def _after_a_start(self, queries: int) -> Tensor:
        """Which of the queries (B, heads in a group * tokens) belong to a document that began in this forward.

        So does what stands before such a document, and may stand before the one that goes on, too.
        """
        begun = self.starts.long().cumsum(1) > 0  # type: ignore[union-attr]
        any_begun, half = begun[:, -1:], self.prefix // self.groups
        before = [torch.zeros_like(any_begun).expand(-1, self.prefix - half), any_begun.expand(-1, half)]
        begun = torch.cat([*before, begun, any_begun.expand(-1, self.suffix)], 1)
        return begun.repeat(1, queries // begun.shape[1])

    def _kv_heads(self, index: int) -> int:
        return self.new[index][0].shape[1]

    def observed(self, k: int) -> dict[str, Tensor]:
        """What the first row found: numbers and weights (layers, H, T, k), and shares (layers, H, T) of the memory."""
        seen: dict[str, list[Tensor]] = {"numbers": [], "weights": [], "shares": []}
        for index in sorted(self.new):
            keys, (found, asked) = self.new[index][0], (self.found.get(index), self.asked.get(index))
            if not found or asked is None:
                heads, tokens = self.heads, keys.shape[2]
                seen["numbers"].append(torch.full((heads, tokens, k), MISSING))
                seen["weights"].append(torch.zeros(heads, tokens, k))
                seen["shares"].append(torch.zeros(heads, tokens))
                continue
            first, queries = found[0], _folded(asked, keys.shape[1])[0]
            scores = (first.keys @ queries.unsqueeze(3)).squeeze(3).masked_fill(~first.there, -torch.inf)
            weights = scores.softmax(-1).nan_to_num()
            seen["numbers"].append(first.numbers.reshape(*asked.shape[1:3], k))
            seen["weights"].append(weights.reshape(*asked.shape[1:3], k))
            seen["shares"].append(self.shares[index][0])
        return {name: self._of_tokens(torch.stack(parts)).cpu() for name, parts in seen.items()}

    def _of_tokens(self, states: Tensor) -> Tensor:
        """What is known of tokens alone, from (.., .., T, ..) of all that was read."""
        return states[:, :, self.prefix : states.shape[2] - self.suffix]

    def pairs_by_token(self) -> Tensor:
        """The keys and values of all layers and heads, of each token: (B, T, width)."""
        pairs = [self._of_tokens(states) for index in sorted(self.new) for states in self.new[index]]
        return torch.cat([states.transpose(1, 2).flatten(2) for states in pairs], 2)

    def commit(self) -> None:
        """Moves the memory on: what a document began with is cleared before, and padding is left out."""
        if self.state is None:
            return
        for index, (keys, values) in self.new.items():
            keys, values = self._of_tokens(keys), self._of_tokens(values)
            kept = torch.ones(len(keys), keys.shape[2], dtype=torch.bool, device=keys.device)
            if self.real is not None:
                kept &= self.real[:, -keys.shape[2] :]
            places = torch.arange(keys.shape[2], device=keys.device)
            if self.overlap is not None:
                kept &= places >= self.overlap[:, None]
            if self.starts is not None:
                last = torch.where(self.starts.bool() & kept, places, -1).amax(1)
                self.state.memories[index].clear(last >= 0)
                kept &= places >= last[:, None]
            self.state.memories[index].append(keys, values, kept)


def _folded(queries: Tensor, kv_heads: int) -> Tensor:
    """Queries of heads (B, H, T, d) that share keys, one after the other: (B, kv heads, H / kv heads * T, d)."""
    return queries.reshape(len(queries), kv_heads, -1, queries.shape[3])


def _unfolded(shape: torch.Size, memory: Tensor, mass: Tensor, there: Tensor) -> Attended:
    """What folded queries took, by head again."""
    return memory.reshape(shape), mass.reshape(shape[:3]), there.reshape(shape[:3])


def tokens_that_are_real(inputs: dict[str, Any], cache: Any) -> Tensor | None:
    """Which tokens of a forward are no padding, (B, T or more), if its mask tells: of 4D masks the widest is asked."""
    mask: Any = inputs.get("attention_mask")
    if isinstance(mask, dict):
        mask = max((one for one in mask.values() if one is not None), key=lambda one: one.shape[-1], default=None)
    if mask is None or mask.ndim == 2:
        return None if mask is None else mask.bool()
    return real_tokens(mask, mask.shape[2], int(cache.get_seq_length()) if cache is not None else 0)
