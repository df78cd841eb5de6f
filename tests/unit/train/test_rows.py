"""Tables trained by rows: each row against torch's Adam on a parameter of its own, and nothing else is touched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mnemic.errors import UsageError
from mnemic.memories.product_keys.layer import ValueTable
from mnemic.train.config import TrainConfig
from mnemic.train.optimizers import load_optimizer_tensors, make_optimizer, optimizer_tensors
from mnemic.train.rows import Adafactor, AdamW, clip_gradients, trimmed

ROWS, WIDTH = 9, 3
EVERY = pytest.mark.parametrize("kind", [AdamW, Adafactor])


def table(dtype: torch.dtype = torch.float64) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(ROWS, WIDTH, sparse=True, dtype=dtype)


def gradient(read: dict[int, Tensor], coalesced: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    """A sparse gradient of these rows; not coalesced, each comes in two parts."""
    rows, values = list(read), list(read.values())
    if not coalesced:
        rows, values = rows * 2, [0.25 * value for value in values] + [0.75 * value for value in values]
    found = torch.stack(values).to(dtype) if values else torch.empty(0, WIDTH, dtype=dtype)
    made = torch.sparse_coo_tensor(torch.tensor([rows], dtype=torch.long), found, (ROWS, WIDTH), check_invariants=True)
    return made.coalesce() if coalesced else made


def drawn(step: int, rows: set[int]) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(step)
    every = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return {row: every[row] for row in sorted(rows)}


def take_steps(optimizer: torch.optim.Optimizer, values: nn.Parameter, steps: range) -> None:
    for step in steps:
        values.grad = gradient(drawn(step, {step % ROWS, (3 * step) % ROWS, 1}), dtype=values.dtype)
        optimizer.step()


@EVERY
@given(
    reads=st.lists(st.sets(st.integers(0, ROWS - 1)), min_size=1, max_size=12),
    coalesced=st.booleans(),
    betas=st.sampled_from([(0.9, 0.999), (0.0, 0.9), (0.5, 0.0)]),
)
def test_each_row_is_trained_by_adam_as_a_parameter_of_its_own(
    kind: Any, reads: list[set[int]], coalesced: bool, betas: tuple[float, float]
) -> None:
    values = table().weight
    given_betas = {"betas": betas} if kind is AdamW else {}
    ours = kind([values], lr=0.01, rows_rate=7.0, weight_decay=0.3, **given_betas)
    rows = [nn.Parameter(row.clone()) for row in values.detach()]
    theirs = torch.optim.Adam(rows, lr=0.07, betas=given_betas.get("betas", (0.9, 0.999)))
    start = values.detach().clone()
    for step, read in enumerate(reads):
        found = drawn(step, read)
        values.grad = gradient(found, coalesced)
        for number, row in enumerate(rows):
            row.grad = found.get(number)
        ours.step()
        theirs.step()
        torch.testing.assert_close(values.detach(), torch.stack(rows).detach(), rtol=1e-9, atol=1e-12)
    ever, state = set().union(*reads), ours.state[values]
    never = [row for row in range(ROWS) if row not in ever]
    assert torch.equal(values[never], start[never])
    assert (state["place"][never] == -1).all()
    assert int(state["used"]) == len(ever)
    assert len(ever) <= len(state["moment"]) == len(state["square"]) == len(state["times"])
    assert len(state["moment"]) <= 2 * len(ever)
    (kept,) = ours.state_dict()["state"].values()  # without room for rows to come
    assert len(kept["moment"]) == len(kept["square"]) == len(kept["times"]) == len(ever)
    assert kept["moment"].untyped_storage().nbytes() == kept["moment"].nbytes
    assert {row for row in range(ROWS) if state["place"][row] >= 0} == ever
    for row in ever:
        assert state["times"][state["place"][row]] == sum(row in read for read in reads)


def test_many_rows_at_once_are_each_updated_once() -> None:
    torch.manual_seed(0)
    values = nn.Parameter(torch.randn(700, WIDTH, dtype=torch.float64))
    dense = nn.Parameter(values.detach().clone())
    ours, theirs = AdamW([values], lr=0.01, rows_rate=1.0), torch.optim.Adam([dense], lr=0.01)
    for _ in range(3):
        dense.grad = torch.randn_like(dense)
        values.grad = dense.grad.to_sparse(1)
        ours.step()
        theirs.step()
    torch.testing.assert_close(values, dense, rtol=1e-9, atol=1e-12)


def test_rows_read_in_other_steps_keep_their_moments_as_they_are() -> None:
    values = table(torch.float32).weight
    optimizer = AdamW([values], weight_decay=0.5)
    values.grad = gradient(drawn(0, {2, 5}), dtype=torch.float32)
    optimizer.step()
    place = optimizer.state[values]["place"][2]
    before = [values[2].clone(), *(optimizer.state[values][name][place].clone() for name in ("moment", "square"))]
    for step in range(1, 4):
        values.grad = gradient(drawn(step, {5, 6, 7, 8}), dtype=torch.float32)
        optimizer.step()
    after = [values[2], *(optimizer.state[values][name][place] for name in ("moment", "square"))]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@EVERY
def test_what_is_no_table_is_left_to_torch(kind: Any) -> None:
    torch.manual_seed(0)
    linear, values = nn.Linear(3, 4), table(torch.float32)
    twin = copy.deepcopy(linear)
    ours = kind([*linear.parameters(), *values.parameters()], lr=0.02, weight_decay=0.1)
    theirs = kind.__mro__[2](twin.parameters(), lr=0.02, weight_decay=0.1)
    for step in range(3):
        for one, other in zip(linear.parameters(), twin.parameters(), strict=True):
            one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(step))
            other.grad = one.grad.clone()
        values.weight.grad = gradient(drawn(step, {step}), dtype=torch.float32)
        ours.step()
        theirs.step()
        assert values.weight.grad is not None  # as torch leaves gradients
    for one, other in zip(linear.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_closure_is_called_once_and_its_loss_returned() -> None:
    values, calls = table(), []
    optimizer = AdamW(values.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = values(torch.tensor([1, 1, 4])).square().sum()
        loss.backward()
        calls.append(loss)
        return loss

    before = values.weight.detach().clone()
    assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1
    assert (values.weight != before).any(1).nonzero().flatten().tolist() == [1, 4]


def test_gradients_of_several_backward_passes_add_up() -> None:
    one, other = table(), table()
    for rows in ([1, 1, 4], [4, 6]):
        one(torch.tensor(rows)).square().sum().backward()
    other(torch.tensor([1, 1, 4, 4, 6])).square().sum().backward()
    for embedding in (one, other):
        AdamW(embedding.parameters(), lr=0.1).step()
    torch.testing.assert_close(one.weight, other.weight)


def test_a_narrow_table_has_wide_moments() -> None:
    values = table(torch.bfloat16).weight
    wide = nn.Parameter(values.detach().float())
    ours, theirs = AdamW([values], lr=0.01), AdamW([wide], lr=0.01)
    for step in range(5):
        values.grad = gradient(drawn(step, {1, step}), dtype=torch.bfloat16)
        wide.grad = values.grad.float()
        ours.step()
        theirs.step()
        with torch.no_grad():
            wide.copy_(wide.bfloat16())  # all that differs is how the table is kept
        assert torch.equal(values.float(), wide)
    assert ours.state[values]["moment"].dtype == ours.state[values]["square"].dtype == torch.float32
    (one,), (other,) = (optimizer.state_dict()["state"].values() for optimizer in (ours, theirs))
    for name in ("moment", "square", "times", "place"):
        assert torch.equal(one[name], other[name])


def plain(state: Any) -> Any:
    """The same in new tensors and plain dicts."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return [plain(value) for value in state] if isinstance(state, list) else state


@EVERY
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_state_goes_on_in_another_optimizer(kind: Any, dtype: torch.dtype) -> None:
    values, linear = table(dtype).weight, nn.Linear(2, 2)
    optimizer = kind([values, *linear.parameters()], lr=0.02)
    linear.weight.grad = torch.ones(2, 2)
    take_steps(optimizer, values, range(4))
    state, other = plain(optimizer.state_dict()), nn.Parameter(values.detach().clone())
    twin = copy.deepcopy(linear)
    twin.weight.grad = torch.ones(2, 2)
    again = kind([other, *twin.parameters()], lr=0.5)
    again.load_state_dict(state)
    for name, tensor in trimmed(optimizer.state[values]).items():
        assert again.state[other][name].dtype == tensor.dtype
        assert torch.equal(again.state[other][name], tensor)
    take_steps(optimizer, values, range(4, 9))
    take_steps(again, other, range(4, 9))
    assert torch.equal(values, other)
    assert torch.equal(linear.weight, twin.weight)


@EVERY
def test_a_copied_optimizer_goes_on_by_itself(kind: Any) -> None:
    values = table().weight
    optimizer = kind([values], lr=0.02, rows_rate=3.0, clip=0.5)
    take_steps(optimizer, values, range(3))
    twin = copy.deepcopy(optimizer)
    (other,) = twin.param_groups[0]["params"]
    take_steps(optimizer, values, range(3, 6))
    assert not torch.equal(values, other)
    take_steps(twin, other, range(3, 6))
    assert torch.equal(values, other)


def test_the_named_tensors_of_a_checkpoint_hold_all_of_it() -> None:
    config = TrainConfig(learning_rate=0.02)
    values = table(torch.bfloat16).weight
    optimizer = make_optimizer({"values": values}, config)
    take_steps(optimizer, values, range(4))
    tensors = plain(optimizer_tensors(optimizer, {"values": values}))
    other = nn.Parameter(values.detach().clone())
    again = make_optimizer({"values": other}, config)
    load_optimizer_tensors(again, {"values": other}, tensors)
    take_steps(optimizer, values, range(4, 9))
    take_steps(again, other, range(4, 9))
    assert torch.equal(values, other)


@given(largest=st.sampled_from([0.0, 0.3, 1.0, 1e6]), coalesced=st.booleans())
def test_clipping_is_torchs_on_dense_gradients(largest: float, coalesced: bool) -> None:
    sparse, dense, idle = table().weight, nn.Parameter(torch.zeros(4, dtype=torch.float64)), nn.Parameter(torch.ones(2))
    sparse.grad, dense.grad = gradient(drawn(1, {0, 3, 8}), coalesced), torch.arange(4.0, dtype=torch.float64)
    twins = [nn.Parameter(torch.zeros_like(p)) for p in (sparse, dense)]
    twins[0].grad, twins[1].grad = sparse.grad.to_dense(), dense.grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(twins, largest or torch.inf)
    assert clip_gradients([sparse, dense, idle], largest) == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(sparse.grad.to_dense(), twins[0].grad, rtol=1e-9, atol=0)
    torch.testing.assert_close(dense.grad, twins[1].grad, rtol=1e-9, atol=0)
    assert sparse.grad.is_sparse
    assert sparse.grad.coalesce().indices().tolist() == [[0, 3, 8]]
    assert idle.grad is None


def test_clipping_without_gradients_and_in_several_precisions() -> None:
    assert clip_gradients([nn.Parameter(torch.ones(2))], 1.0) == 0
    narrow, wide = table(torch.bfloat16).weight, nn.Parameter(torch.zeros(4))
    narrow.grad, wide.grad = gradient({1: torch.ones(WIDTH)}, dtype=torch.bfloat16), torch.ones(4)
    assert clip_gradients([narrow, wide], 0.5) == pytest.approx(7**0.5, rel=1e-2)
    assert clip_gradients([narrow, wide], 0.5) == pytest.approx(0.5, rel=1e-2)


def test_clipping_in_the_optimizer_is_clipping_before_it() -> None:
    one, other = table().weight, table().weight
    ours, theirs = AdamW([one], clip=0.1), AdamW([other])
    for step in range(3):
        one.grad, other.grad = (gradient(drawn(step, {1, step})) for _ in range(2))
        clip_gradients([other], 0.1)
        ours.step()
        theirs.step()
    assert torch.equal(one, other)


def test_values_of_product_keys_are_such_a_table() -> None:
    values = ValueTable(16, 4)
    before = values.weight.detach().clone()
    slots = torch.tensor([[[1, 2], [2, 9]], [[9, 9], [1, 1]]])
    values(slots, torch.rand(2, 2, 2).softmax(-1)).square().sum().backward()
    optimizer = make_optimizer({"v": values.weight}, TrainConfig(weight_decay=0.9, values_rate=4.0, learning_rate=0.01))
    optimizer.step()
    changed = (values.weight != before).any(1).nonzero().flatten().tolist()
    assert changed == [1, 2, 9]
    step = (values.weight - before).abs()[changed]
    torch.testing.assert_close(step, torch.full_like(step, 0.04), rtol=1e-3, atol=0)  # Adam's first step is its rate


def test_rates_of_a_schedule_reach_the_rows() -> None:
    values = table().weight
    optimizer = AdamW([values], lr=0.01, rows_rate=2.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [1.0, 0.0, 3.0][step])
    for expected in (0.02, 0.0, 0.06):
        before = values.detach().clone()
        values.grad = gradient({4: torch.ones(WIDTH)})
        optimizer.step()
        if expected < 0.06:
            schedule.step()
        torch.testing.assert_close((before - values)[4], torch.full((WIDTH,), expected).double(), rtol=1e-6, atol=1e-9)


def test_hooks_of_a_step_are_called_once_whoever_used_torchs_own_before() -> None:
    plain = nn.Parameter(torch.ones(2))
    torch.optim.AdamW([plain])  # from now on torch's class has hooks of its own
    optimizer, calls = AdamW([plain]), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    plain.grad = torch.ones(2)
    optimizer.step()
    assert calls == ["before", "after"]
    assert (plain != 1).all()


def trained_rows(embedding: nn.Embedding, optimizer: Any) -> int:
    """How many rows one step changes."""
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1, 4])).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return int((embedding.weight != before).any(1).sum())


def test_the_newest_optimizer_trains_tables_that_another_one_had_clipped() -> None:
    embedding = nn.Embedding(ROWS, WIDTH, sparse=True)
    first = AdamW(embedding.parameters(), lr=0.1, clip=1.0)
    assert trained_rows(embedding, first) == 2
    for clip in (1.0, 0.0, 1.0):
        optimizer = AdamW(embedding.parameters(), lr=0.1, clip=clip)
        assert trained_rows(embedding, optimizer) == 2
    assert not first._taken  # and it holds nothing that others computed


def test_a_copy_of_an_optimizer_takes_the_gradients_of_its_own_tables() -> None:
    embedding = nn.Embedding(ROWS, WIDTH, sparse=True)
    optimizer = AdamW(embedding.parameters(), lr=0.1, clip=1.0)
    both = copy.deepcopy({"embedding": embedding, "optimizer": optimizer})
    assert trained_rows(both["embedding"], both["optimizer"]) == 2
    assert trained_rows(embedding, optimizer) == 2


def test_a_state_that_was_loaded_stays_what_it_was() -> None:
    values = table().weight
    optimizer = AdamW([values], lr=0.02)
    take_steps(optimizer, values, range(2))
    saved = optimizer.state_dict()
    before = plain(saved)
    for _ in range(2):  # rolled back twice
        again = AdamW([nn.Parameter(values.detach().clone())], lr=0.02)
        again.load_state_dict(saved)
        take_steps(again, again.param_groups[0]["params"][0], range(2, 9))
    for name, tensor in before["state"][0].items():
        assert torch.equal(saved["state"][0][name], tensor)


def test_options_of_adam_hold_for_rows_too() -> None:
    values, dense = table().weight, nn.Parameter(table().weight.detach().clone())
    options: dict[str, Any] = {"lr": 0.01, "eps": 0.5, "maximize": True, "betas": (0.5, 0.7)}
    ours, theirs = AdamW([values], rows_rate=1.0, **options), torch.optim.Adam([dense], **options)
    for step in range(3):
        found = drawn(step, set(range(ROWS)))
        values.grad, dense.grad = gradient(found), torch.stack([found[row] for row in range(ROWS)])
        ours.step()
        theirs.step()
    torch.testing.assert_close(values, dense, rtol=1e-9, atol=1e-12)
    with pytest.raises(UsageError, match="amsgrad"):
        AdamW([values], amsgrad=True)
