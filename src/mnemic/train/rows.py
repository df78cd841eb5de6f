"""Optimisers for tables of which a step reads few rows: what a step costs, and keeps, follows what was read.

A table has a sparse gradient (`ValueTable`, or nn.Embedding(sparse=True)). Each of its rows is trained by Adam as if it
were a parameter of its own, which takes part in those steps only in which it was read: rows that were not read stay
as they are to the last bit, are not decayed, and have no moments. Everything else is left to the usual optimiser.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mnemic.errors import UsageError
from mnemic.pages import large_empty

AT_ONCE = 256  # rows: with their moments and gradients they fit into the processor's cache
GROWTH = 2  # times the room there was; memory that is not written to yet is none to the system
MOMENTS = ("moment", "square", "times")
BETAS, EPS = (0.9, 0.999), 1e-8

_listening = WeakTensorKeyDictionary()  # parameter -> the hook of the optimiser that takes its gradient


class ByRows:
    """What an optimiser gains: tables are trained by rows, at `rows_rate` times the learning rate of their group.

    clip: the largest norm of the gradient, for training loops whose own clipping fails where a gradient is sparse, as
    that of `transformers.Trainer` (with max_grad_norm = 0). The optimiser then takes the gradients of tables as they
    come, so that such a loop never sees them, and clips all gradients itself. 0: they stay where they are, unclipped.
    """

    param_groups: list[dict[str, Any]]
    state: Any

    def __init__(self, params: Any, *args: Any, rows_rate: float = 10.0, clip: float = 0.0, **kwargs: Any) -> None:
        self.rows_rate, self.clip = rows_rate, clip
        super().__init__(params, *args, **kwargs)  # type: ignore[call-arg]
        if any(group.get("amsgrad") for group in self.param_groups):
            raise UsageError("amsgrad = True: tables are trained by rows with plain Adam, leave it out")
        self._taken: dict[Tensor, Tensor] = {}  # table -> its gradient
        self._listen()

    def _listen(self) -> None:
        """Takes the gradients of tables from now on, if they are clipped here; no optimiser before does any more."""
        mine = weakref.ref(self)

        def take(parameter: Tensor) -> None:
            if (optimizer := mine()) is not None:
                optimizer._take(parameter)

        for parameter in [p for group in self.param_groups for p in group["params"]]:
            if before := _listening.pop(parameter, None):
                before.remove()
            if self.clip:
                _listening[parameter] = parameter.register_post_accumulate_grad_hook(take)

    def _take(self, parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.is_sparse:
            before = self._taken.get(parameter)
            self._taken[parameter] = parameter.grad if before is None else before + parameter.grad
            parameter.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients."""
        self._taken.clear()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for table, grad in self._taken.items():
            table.grad = grad
        every = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.clip:
            clip_gradients([parameter for _, parameter in every], self.clip)
        tables = [(group, p, p.grad) for group, p in every if p.grad.is_sparse]
        for group, table, grad in tables:
            rate = self.rows_rate * group["lr"] * (-1 if group.get("maximize") else 1)
            eps = EPS if isinstance(group["eps"], tuple | list) else group["eps"]  # Adafactor has two, of another kind
            update_rows(table, grad, self.state[table], rate, group.get("betas", BETAS), eps)
            table.grad = None
        usual: Any = super().step.__func__  # type: ignore[misc]
        # torch wraps the step of a class once it was used by itself, and would call the hooks of ours once more
        (usual.__wrapped__ if getattr(usual, "hooked", False) else usual)(self)
        for _, table, grad in tables:
            table.grad = None if table in self._taken else grad
        self._taken.clear()  # Trainer empties the gradients of the model, and not of the optimiser
        return loss

    def __getstate__(self) -> dict[str, Any]:
        kept: Any = super().__getstate__()
        return {**kept, "rows_rate": self.rows_rate, "clip": self.clip}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._taken = {}
        tables = {parameter: kept for parameter, kept in state["state"].items() if "place" in kept}
        others = {parameter: kept for parameter, kept in state["state"].items() if parameter not in tables}
        super().__setstate__({**state, "state": defaultdict(dict, others)})  # type: ignore[misc]
        self.state.update(tables)  # which have no "step" that torch asks every state for
        self._listen()

    def state_dict(self) -> dict[str, Any]:
        """What the optimiser has to remember."""
        kept: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        for number, state in kept["state"].items():
            if "place" in state:  # whose room for rows to come torch.save would write too
                kept["state"][number] = {name: value.clone() for name, value in trimmed(state).items()}
        return kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`; torch would make all of a state what the parameter is, row numbers too."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        mine = (p for group in self.param_groups for p in group["params"])
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        for parameter, number in zip(mine, numbers, strict=True):
            if "place" in (kept := state_dict["state"].get(number, {})):
                self.state[parameter] = {name: value.to(parameter.device, copy=True) for name, value in kept.items()}


class AdamW(ByRows, torch.optim.AdamW):
    """torch's AdamW, and Adam by rows for tables with sparse gradients."""


class Adafactor(ByRows, torch.optim.Adafactor):
    """torch's Adafactor, and Adam by rows for tables with sparse gradients."""


def trimmed(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a parameter; of a table's moments only those that are of a row."""
    if "place" not in state:
        return state
    return {name: value[: int(state["used"])] if name in MOMENTS else value for name, value in state.items()}


def update_rows(
    table: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    rate: float,
    betas: tuple[float, float] = BETAS,
    eps: float = EPS,
) -> None:
    """One step of Adam for the rows in a sparse gradient.

    State: `place`, where each row of the table has its moments, -1 for none; `moment` and `square`, the averages of
    gradients and of their squares; `times`, how often each was read.
    """
    grad = coalesced(grad)
    rows, values, (first, second) = grad.indices()[0], grad.values(), betas
    places = _places(table, rows, state)
    moment, square, times = state["moment"], state["square"], state["times"]
    times[places] += 1
    towards, root = 1 - first ** times[places, None], (1 - second ** times[places, None]).sqrt()
    little, scale = eps * root, -rate * root / towards  # m' / (sqrt(v') + eps) with m' = m / towards, v' = v / root^2
    m, v = torch.empty(2, AT_ONCE, table.shape[1], dtype=moment.dtype, device=table.device)
    for begin in range(0, len(rows), AT_ONCE):
        some = slice(begin, begin + AT_ONCE)
        row, place, g = rows[some], places[some], values[some].to(moment.dtype)
        m, v = m[: len(row)], v[: len(row)]
        torch.index_select(moment, 0, place, out=m).lerp_(g, 1 - first)
        torch.index_select(square, 0, place, out=v).mul_(second).addcmul_(g, g, value=1 - second)
        moment.index_copy_(0, place, m)
        square.index_copy_(0, place, v)
        step = m.div_(v.sqrt_().add_(little[some])).mul_(scale[some])
        if table.dtype == step.dtype:
            table.index_add_(0, row, step)
        else:
            table[row] = step.add_(table[row]).to(table.dtype)


def _places(table: Tensor, rows: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Where the moments of rows are; those that were never read before get some."""
    kind = torch.float64 if table.dtype == torch.float64 else torch.float32
    if "place" not in state:
        state["place"] = torch.full((len(table),), -1, dtype=torch.int32, device=table.device)
        for name, shape in zip(MOMENTS, ((0, table.shape[1]), (0, table.shape[1]), (0,)), strict=True):
            state[name] = torch.zeros(shape, dtype=kind, device=table.device)
        state["used"] = torch.zeros((), dtype=torch.int64)
    place, used = state["place"], int(state["used"])
    new = rows[place[rows] < 0]
    needed = used + len(new)
    if needed > len(state["times"]):
        size = min(max(GROWTH * len(state["times"]), needed), len(table))
        for name in MOMENTS:
            kept = state[name]
            grown = large_empty(size, *kept.shape[1:], dtype=kept.dtype, device=kept.device)
            grown[:used] = kept[:used]
            state[name] = grown
    for name in MOMENTS:
        state[name][used:needed] = 0
    place[new] = torch.arange(used, needed, dtype=torch.int32, device=table.device)
    state["used"] += len(new)
    return place[rows].long()


def coalesced(grad: Tensor) -> Tensor:
    """A sparse gradient with each row once and in order; one that is so already need not be sorted to be known so."""
    if not grad.is_coalesced():
        rows = grad._indices()[0]
        if (rows[1:] > rows[:-1]).all():
            return grad._coalesced_(True)
    return grad.coalesce()


def clip_gradients(parameters: Iterable[nn.Parameter], largest: float) -> float:
    """The norm of all gradients together, which are scaled down if it is above `largest`; sparse ones count too."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                parameter.grad = coalesced(parameter.grad)
                gradients.append(parameter.grad._values())
            else:
                gradients.append(parameter.grad)
    norm = torch.nn.utils.get_total_norm(gradients)
    if largest and norm > largest:
        for gradient in gradients:
            gradient.mul_(largest / (norm.to(gradient.device) + 1e-6))
    return float(norm)
