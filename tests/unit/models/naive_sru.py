"""SRU++ written out with loops in float64, straight from the paper: the oracle of the tests; and tiny models."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from mnemic.models import MnemicSRUConfig, MnemicSRUForCausalLM

ROWS, LENGTH, VOCABULARY = 2, 14, 61
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def tiny_sru(**options: Any) -> MnemicSRUForCausalLM:
    """Weights large enough for mistakes to show, in float64."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 12, "num_hidden_layers": 2, "attention_size": 6}
    ends = {"eos_token_id": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    model = MnemicSRUForCausalLM(MnemicSRUConfig(**{**shape, **ends, "attention_start": 0.7, **options})).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model.eval()


@functools.cache
def model_of(xl_length: int = 50) -> MnemicSRUForCausalLM:
    return tiny_sru(xl_length=xl_length)


def tokens(seed: int, rows: int = ROWS, length: int = LENGTH) -> Tensor:
    return torch.randint(2, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def as_starts(rows: list[set[int]]) -> Tensor:
    starts = torch.zeros(len(rows), LENGTH, dtype=torch.bool)
    for row, places in enumerate(rows):
        starts[row, list(places)] = True
    return starts


def naive_states(gates: Tensor, values: Tensor, weight: Tensor, state: Tensor, starts: Tensor) -> Tensor:
    """The states (T, d) of one row, number by number."""
    states = torch.empty_like(values)
    for i in range(values.shape[1]):
        before = state[i].item()
        for t in range(values.shape[0]):
            before = 0.0 if starts[t] else before
            forget = 1 / (1 + math.exp(-(gates[t, i].item() + weight[i].item() * before)))
            before = forget * before + (1 - forget) * values[t, i].item()
            states[t, i] = before
    return states


def normalised(vector: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
    centred = vector - vector.mean()
    return centred / torch.sqrt((centred**2).mean() + norm.eps) * norm.weight + norm.bias


def attended(attention: torch.nn.Module, x: Tensor, sees: list[list[int]]) -> Tensor:
    """Z (T, d') of one row; `sees[t]` are the tokens that token t sees."""
    width, heads = attention.q_proj.out_features, attention.heads
    to_keys, to_values = attention.kv_proj.weight[:width], attention.kv_proj.weight[width:]
    queries = [attention.q_proj.weight @ vector for vector in x]
    keys, values = ([matrix @ query for query in queries] for matrix in (to_keys, to_values))
    result = []
    for t, query in enumerate(queries):
        found = torch.zeros_like(query)
        for head in range(heads):
            part = slice(head * width // heads, (head + 1) * width // heads)
            weights = [math.exp(query[part].dot(keys[j][part]).item() / math.sqrt(width // heads)) for j in sees[t]]
            for weight, j in zip(weights, sees[t], strict=True):
                found[part] += weight / sum(weights) * values[j][part]
        result.append(normalised(query + attention.alpha * found, attention.norm))
    return torch.stack(result)


def naive_logits(model: MnemicSRUForCausalLM, ids: Tensor, starts: Tensor, seen: Tensor | None = None) -> Tensor:
    """The logits (T, V) of one row; `seen` (T, T) limits which tokens attention sees."""
    document = starts.cumsum(0).tolist()
    sees = [
        [j for j in range(t + 1) if document[j] == document[t] and (seen is None or seen[t, j])]
        for t in range(len(ids))
    ]
    x = model.model.embed_tokens.weight[ids]
    for block in model.model.layers:
        layer = block.recurrence
        u = attended(block.self_attn, x, sees) @ layer.out_proj.weight.T
        forget, reset, values = u.chunk(3, dim=1)
        zero = torch.zeros(x.shape[1], dtype=x.dtype)
        states = naive_states(forget + layer.forget_bias, values, layer.forget_weight, zero, starts)
        outputs = []
        for t, state in enumerate(states):
            before = zero if t == 0 or starts[t] else states[t - 1]
            r = 1 / (1 + torch.exp(-(reset[t] + layer.reset_weight * before + layer.reset_bias)))
            outputs.append(r * state + (1 - r) * x[t])
        x = torch.stack(outputs)
    return torch.stack([normalised(vector, model.model.norm) for vector in x]) @ model.lm_head.weight.T
