"""Several processes that train together, started by `accelerate launch` or torchrun; or one, for which all is trivial.

Each process has its own rows of every batch and its own copy of the model. There is no wrapper around the model: after
the backward pass the gradients of all are added up in one go, whatever method of the model the loss came from.

The processes meet: each says something to all others and goes on when it has heard them all. One that has failed says
so at the meeting at which the others wait for it, so that none waits for ever; for this, all meet in the same order,
and only gradients and weights travel outside of meetings. Messages are JSON and safetensors and go through the CPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from safetensors.torch import load, save
from torch import Tensor, nn

from mnemic.errors import MnemicError, UsageError
from mnemic.train.config import TrainConfig

BRIEF = 4096  # bytes of a message that need no second exchange
_NOTE = struct.Struct(f"q?{BRIEF}s")  # the length of a message, whether its sender has failed, and its beginning
PATIENCE = timedelta(days=30)  # one may tokenise for hours while others wait; one that dies is noticed at once


class FailedElsewhere(MnemicError):
    """Another process has failed, and says why."""


class Processes:
    """This process among those that train together."""

    def __init__(self) -> None:
        state = PartialState(cpu=_on_cpu())
        self.rank: int = state.process_index
        self.count: int = state.num_processes
        self.is_main = self.rank == 0
        self._messages = dist.new_group(backend="gloo", timeout=PATIENCE) if self.count > 1 else None

    # Meetings

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A block that all leave together: in peace, or each with an error if one of them fails."""
        try:
            yield
            self.collect(None)
        except FailedElsewhere:
            raise
        except BaseException as error:
            with contextlib.suppress(FailedElsewhere):
                self._meet((str(error) or type(error).__name__).encode(), failed=True)
            raise

    def collect(self, value: Any) -> list[Any]:
        """The JSON-able values that the processes brought to this meeting, in the order of their ranks."""
        if self.count == 1:
            return [value]
        return [json.loads(text) for text in self._meet(json.dumps(value, separators=(",", ":")).encode())]

    def from_main(self, action: Callable[[], Any]) -> Any:
        """What `action` gives in the main process, where alone it is done; it must be JSON-able."""
        return self.collect(action() if self.is_main else None)[0]

    def any(self, here: bool) -> bool:
        """Whether it is so in any process."""
        return any(self.collect(here))

    def sum(self, *numbers: float) -> list[Any]:
        """The sum over the processes of each number, the same in all of them to the last bit."""
        return [sum(column) for column in zip(*self.collect(numbers), strict=True)]

    def gather(self, tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """The named tensors of each process, in the main one; nothing in the others."""
        if self.count == 1:
            return [tensors]
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        own = _bytes(save(tensors))
        sizes = self.collect(len(own))
        with self._others_needed():
            if not self.is_main:
                dist.send(own, 0, group=self._messages)
                return []
            gathered = [tensors]
            for rank in range(1, self.count):
                received = torch.empty(sizes[rank], dtype=torch.uint8)
                dist.recv(received, rank, group=self._messages)
                gathered.append(load(received.numpy().tobytes()))
        return gathered

    def _meet(self, message: bytes, failed: bool = False) -> list[bytes]:
        """The messages of all; FailedElsewhere if one of them is the last word of a process that has failed."""
        if self.count == 1:
            return [message]
        notes = self._share(_NOTE.pack(len(message), failed, message[:BRIEF]))
        sizes, failures, beginnings = zip(*map(_NOTE.unpack, notes), strict=True)
        rest = max(0, max(sizes) - BRIEF)
        ends = self._share(message[BRIEF:].ljust(rest)) if rest else [b""] * self.count
        messages = [(first + end)[:size] for first, end, size in zip(beginnings, ends, sizes, strict=True)]
        if any(failures):
            rank = failures.index(True)
            why = messages[rank].decode()
            raise FailedElsewhere(f"training stopped in process {self.rank}, because process {rank} failed: {why}")
        return messages

    def _share(self, own: bytes) -> list[bytes]:
        """What each process gives, all of the same length."""
        everyone = [torch.empty(len(own), dtype=torch.uint8) for _ in range(self.count)]
        with self._others_needed():
            dist.all_gather(everyone, _bytes(own), group=self._messages)
        return [theirs.numpy().tobytes() for theirs in everyone]

    @contextlib.contextmanager
    def _others_needed(self) -> Iterator[None]:
        """Says in our words what torch says when a process it waits for has died."""
        try:
            yield
        except RuntimeError as error:
            raise FailedElsewhere(f"training stopped in process {self.rank}, because another one is gone") from error

    # Tensors of the model

    def copy_from_main(self, model: nn.Module) -> None:
        """Gives all processes the weights and buffers of the main one; UsageError if their models differ in shape."""
        if self.count == 1:
            return
        tensors = [*model.parameters(), *model.buffers()]
        shapes = [[str(tensor.dtype), *tensor.shape] for tensor in tensors]
        if any(theirs != shapes for theirs in self.collect(shapes)):
            raise UsageError("the processes have different models: give each of them the same")
        for tensor in tensors:
            sent = tensor.detach().contiguous()
            with self._others_needed():
                dist.broadcast(sent.reshape(-1).view(torch.uint8), 0)
            tensor.data.copy_(sent)

    def add(self, parameters: dict[str, nn.Parameter], *numbers: float) -> list[Any]:
        """Replaces each gradient by its sum over the processes, and returns the sums of the numbers.

        A gradient that no process has stays None.
        """
        if self.count == 1:
            return list(numbers)
        sparse = self.count + 1  # counts for more than dense ones in all processes
        kinds = [0 if p.grad is None else sparse if p.grad.is_sparse else 1 for p in parameters.values()]
        sums = self.sum(*numbers, *kinds)
        by_kind: dict[torch.dtype, list[Tensor]] = {}
        for parameter, somewhere in zip(parameters.values(), sums[len(numbers) :], strict=True):
            if somewhere and parameter.grad is None:
                parameter.grad = no_rows(parameter) if somewhere >= sparse else torch.zeros_like(parameter)
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = self._add_rows(parameter.grad.coalesce())
            elif parameter.grad is not None:
                by_kind.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for gradients in by_kind.values():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            with self._others_needed():
                dist.all_reduce(flat)
            pieces = flat.split([gradient.numel() for gradient in gradients])
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))
        return sums[: len(numbers)]

    def _add_rows(self, grad: Tensor) -> Tensor:
        """The sum over the processes of a sparse gradient, of which each has rows of its own."""
        rows, values, sizes = grad.indices()[0], grad.values(), self.collect(grad._nnz())
        most = max(sizes)
        gathered = []
        for part in (rows, values):
            padded = part.new_zeros(most, *part.shape[1:])
            padded[: len(part)] = part
            everyone = [torch.empty_like(padded) for _ in sizes]
            with self._others_needed():
                dist.all_gather(everyone, padded)
            gathered.append(torch.cat([theirs[:size] for theirs, size in zip(everyone, sizes, strict=True)]))
        summed = torch.sparse_coo_tensor(gathered[0][None], gathered[1], grad.shape, check_invariants=False)
        return summed.coalesce()


def no_rows(parameter: nn.Parameter) -> Tensor:
    """The sparse gradient of a table of which nothing was read."""
    rows = torch.empty(1, 0, dtype=torch.long, device=parameter.device)
    values = parameter.new_empty(0, *parameter.shape[1:])
    return torch.sparse_coo_tensor(rows, values, parameter.shape, check_invariants=False)


def check_divisible(model: nn.Module, processes: Processes, config: TrainConfig) -> None:
    """UsageError if several processes could not train as one would."""
    whole = processes.count * config.accumulate * config.consecutive
    if config.batch_size % whole:
        raise UsageError(
            f"batch_size = {config.batch_size} cannot be divided among {processes.count} processes with accumulate = "
            f"{config.accumulate} and consecutive = {config.consecutive}: set it to a multiple of {whole}"
        )
    for name, module in model.named_modules():
        if processes.count > 1 and isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UsageError(
                f"{name} normalises over the whole batch, of which each of {processes.count} processes sees only a "
                "part: train this model in one process, or product keys with query_norm = 'layer'"
            )


def _on_cpu() -> bool:
    """Whether accelerate is told to use the CPU, or should be: it knows several processes without a GPU only then."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    device = torch.accelerator.current_accelerator(check_available=True)
    return parse_flag_from_env("ACCELERATE_USE_CPU") or (several and (device is None or device.type == "mps"))


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
