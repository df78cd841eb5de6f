"""The decoder written out with loops in float64, straight from the papers: the oracle of the tests."""

from __future__ import annotations

import cmath
import math

import torch
from torch import Tensor

from mnemic.models import MnemicDecoderForCausalLM


def sinusoid(position: float, width: int) -> Tensor:
    frequencies = [10000 ** (-2 * i / width) for i in range(width // 2)]
    values = [math.sin(position * f) for f in frequencies] + [math.cos(position * f) for f in frequencies]
    return torch.tensor(values, dtype=torch.float64)


def bucket(distance: int, count: int, farthest: int) -> int:
    distance, exact = max(distance, 0), count // 2
    if distance < exact:
        return distance
    return min(count - 1, exact + int(math.log(distance / exact) / math.log(farthest / exact) * (count - exact)))


def rotated(vector: Tensor, position: int, base: float) -> list[complex]:
    half = len(vector) // 2
    pairs = [complex(vector[i], vector[i + half]) for i in range(half)]
    return [pair * cmath.exp(1j * position * base ** (-i / half)) for i, pair in enumerate(pairs)]


def score(model: MnemicDecoderForCausalLM, layer: int, head: int, query: Tensor, key: Tensor, q: int, k: int) -> float:
    """The attention score of a query at position q and a key at position k."""
    config, attention = model.config, model.model.layers[layer].self_attn
    if config.position == "rotary":
        pairs = zip(rotated(query, q, config.rotary_base), rotated(key, k, config.rotary_base), strict=True)
        return sum((a * b.conjugate()).real for a, b in pairs) / math.sqrt(len(query))
    if config.position == "xl":
        terms = attention.relative
        width = len(query)
        projected = terms.projection.weight[head * width : (head + 1) * width] @ sinusoid(q - k, config.hidden_size)
        content = (query + terms.content_bias[head]) @ key
        return float(content + (query + terms.position_bias[head]) @ projected) / math.sqrt(width)
    plain = float(query @ key) / math.sqrt(len(query))
    if config.position == "t5":
        where = bucket(q - k, config.relative_buckets, config.relative_max_distance)
        return plain + math.sqrt(config.hidden_size) * float(model.model.relative_bias.weight[head, where])
    return plain


def naive_hidden(model: MnemicDecoderForCausalLM, embeds: Tensor, positions: list[int], visible: Tensor) -> Tensor:
    """The last hidden states (n, width) of one row, where token i sees token j if visible[i, j]."""
    config = model.config
    heads, width, count = config.num_attention_heads, config.head_dim, len(positions)
    states = embeds.clone()
    if config.position == "sinusoidal":
        states = states + torch.stack([sinusoid(p, config.hidden_size) for p in positions])
    for index, layer in enumerate(model.model.layers):
        queries, keys, values = (
            layer.self_attn.qkv_proj(layer.self_attn_norm(states)).view(count, 3, heads, width).unbind(1)
        )
        outputs = torch.zeros(count, heads, width, dtype=torch.float64)
        for head in range(heads):
            for i in range(count):
                seen = [j for j in range(count) if visible[i, j]]
                if not seen:
                    continue
                scores = [
                    score(model, index, head, queries[i, head], keys[j, head], positions[i], positions[j]) for j in seen
                ]
                weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
                outputs[i, head] = sum(w * values[j, head] for w, j in zip(weights, seen, strict=True))
        states = states + layer.self_attn.o_proj(outputs.view(count, -1))
        states = states + layer.mlp(layer.mlp_norm(states))
    return model.model.norm(states)


@torch.no_grad()
def naive_logits(model: MnemicDecoderForCausalLM, ids: Tensor, starts: Tensor, seen: Tensor | None = None) -> Tensor:
    """The logits (n, V) of one row of tokens in documents; `seen` (n, n) limits further what is seen."""
    positions: list[int] = []
    documents: list[int] = []
    for start in starts.tolist():
        positions.append(0 if start or not positions else positions[-1] + 1)
        documents.append((documents[-1] if documents else 0) + int(start))
    same = torch.tensor(documents)
    visible = (same[:, None] == same[None, :]).tril()
    if seen is not None:
        visible &= seen
    return model.lm_head(naive_hidden(model, model.model.embed_tokens(ids), positions, visible))
