"""What an augmented model's `memory` is."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from mnemic.errors import UsageError, unknown_name
from mnemic.hf.anatomy import Anatomy, find
from mnemic.hf.entrance import Entrance
from mnemic.hf.fingerprint import fingerprint
from mnemic.hf.keys import module_path
from mnemic.hf.positions import positions, separates_documents
from mnemic.hf.reading import reading
from mnemic.hf.xl import new_xl_cache
from mnemic.memories.base import Handle, Masses, Reading
from mnemic.memories.config import MemoryConfig
from mnemic.memories.texts import check_tokens, evaluating, pieces
from mnemic.registry import Registry

SEGMENT = 512  # tokens that are read at a time, unless a memory was made for another length
OPENERS = Registry(  # by name: stores come after memories
    "thing to open", {"store": "mnemic.stores:open_store", "given": "mnemic.stores:check_given"}
)


class Memory(nn.Module):
    """`model.memory`: the memories in a model, by name, and the switches for all of them."""

    def __init__(self, model: PreTrainedModel, anatomy: Anatomy | None = None) -> None:
        super().__init__()
        self.anatomy = anatomy
        self.base_fingerprint = fingerprint(model)
        self.base_names = frozenset(model.state_dict())
        self.base_recoverable: bool | None = None
        self._owner = (model,)  # in a tuple, or torch would register the model as a part of its own part
        self._places = find(model, anatomy)
        self._entrance = Entrance(self._places)
        self._times_disabled = 0

    @property
    def handles(self) -> dict[str, Handle]:
        """The memories, by name."""
        return {name: child for name, child in self.named_children() if isinstance(child, Handle)}

    @property
    def configs(self) -> list[MemoryConfig]:
        """The settings of each memory."""
        return [handle.config for handle in self.handles.values()]

    @property
    def separates_documents(self) -> bool:
        """Whether the model's forward takes `document_starts`."""
        return separates_documents(self._places)

    def add(self, config: MemoryConfig) -> None:
        """Puts one more memory into the model, in the place of one of that kind that it has."""
        module = importlib.import_module(type(config).__module__.removesuffix("config") + "attach")
        added = module.Attached.attach(config, self._places, self._entrance)
        others = {name: handle for name, handle in self.handles.items() if name != config.memory()}
        try:
            added.check_beside(others)
            for handle in others.values():
                handle.check_beside({config.memory(): added})
        except UsageError:
            added.detach()
            raise
        self.add_module(config.memory(), added)

    def connect(self) -> None:
        """Opens the stores that memories name; one whose rows another model made is refused."""
        for handle in self.handles.values():
            if (address := getattr(handle.config, "external", None)) is not None and not handle.connected:
                given = handle.config.store  # type: ignore[attr-defined]
                if given is None:
                    opened = OPENERS.load("store")(address, model=self._owner[0])
                else:
                    opened = OPENERS.load("given")(given, self._owner[0])
                self._check_layer(opened, handle.config.key)  # type: ignore[attr-defined]
                handle.connect(opened)

    def change(self, name: str, **settings: Any) -> None:
        """Changes settings of a memory, as change("attention", size=262_144), and keeps what it has learned."""
        if name not in self.handles:
            raise unknown_name("memory of this model", name, self.handles)
        known = self.handles[name].config.to_dict()
        if unknown := sorted(settings.keys() - known.keys()):
            raise unknown_name(f"setting of {name}", unknown[0], known)
        before = {key: known[key] for key in settings}
        self.handles[name].change(**settings)
        try:
            self.connect()
        except Exception:
            self.handles[name].change(**before)
            self.connect()
            raise

    def _check_layer(self, store: Any, key: str) -> None:
        """UsageError if the keys of a store come from another place in the model than a memory's."""
        layer, own = store.config.origin.get("layer"), module_path(self._owner[0], key)
        if layer and layer != own:
            raise UsageError(
                f"the keys of {store.address} are the inputs of {layer} and those of the memory (key = {key!r}) of "
                f"{own}: build the store with layer = {key!r}, or choose that key"
            )

    def outputs(self, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """The model's forward with what each memory makes of its outputs."""
        for handle in self.handles.values():
            forward = functools.partial(_outputs, handle, forward)
        return forward(**inputs)

    def token_losses(self, masses: Masses, reading: Reading) -> tuple[torch.Tensor, Any]:
        """The loss of each target with the memory at the model's output, if there is one."""
        handles = list(self.handles.values())
        for handle in handles:
            masses = functools.partial(_run, handle, masses, reading)
        at_output = [handle for handle in handles if type(handle).token_losses is not Handle.token_losses]
        return (at_output or handles)[0].token_losses(masses, reading)

    @property
    def xl_length(self) -> int:
        """How many tokens of earlier segments the model's KV cache holds: by its config, or as a memory wants it."""
        own: int = getattr(self._owner[0].config, "xl_length", 0)
        if own or not self.enabled:
            return own
        return max((config.cached for config in self.configs), default=0)

    @property
    def segment(self) -> int | None:
        """How many tokens of a text the model is to read at a time, if a memory was made for that."""
        return min((handle.segment for handle in self.handles.values() if handle.segment), default=None)

    @property
    def writes(self) -> bool:
        """Whether a memory writes behind each segment what the next one reads."""
        return self.enabled and any(handle.writes for handle in self.handles.values())

    def new_cache(self, rows: int) -> Any:
        """An empty XL cache for so many rows."""
        (model,) = self._owner
        if getattr(model.config, "xl_length", 0):
            return model.new_cache(rows)  # type: ignore[operator]
        return new_xl_cache(self._places, self.xl_length, rows)

    def new_state(self, rows: int) -> dict[str, Any]:
        """What goes from segment to segment in each row, for each memory that has such a thing."""
        states = {name: handle.new_state(rows) for name, handle in self.handles.items()}
        return {name: state for name, state in states.items() if state is not None}

    def state_bytes(self, rows: int) -> int:
        """What the states of so many rows take at most."""
        return sum(handle.state_bytes(rows) for handle in self.handles.values())

    def begin_step(self, step: int, steps: int) -> None:
        """Tells each memory how far training is."""
        for handle in self.handles.values():
            handle.begin_step(step, steps)

    def end_training(self) -> None:
        """Tells each memory that there will be no more steps."""
        for handle in self.handles.values():
            handle.end_training()

    def read(
        self, input_ids: torch.Tensor, mask: torch.Tensor | None = None, segment_length: int | None = None
    ) -> None:
        """Reads texts (B, T) into the memories that keep what was read, for every later forward to look into.

        One text serves every row of a batch, or each row has one of its own. What is read goes on from what was read
        before, until `reset`. All memories read the same segments together: of `segment_length` tokens, or as long as a
        memory was made for, or 512.
        """
        if not (readers := [handle for handle in self.handles.values() if handle.reads]):
            return
        if not self.enabled:
            raise UsageError("a memory that is disabled reads nothing: read() outside of disabled()")
        check_tokens(input_ids, mask)
        stack, causal = self._places.stack, self._places.anatomy.kind == "causal"
        length = segment_length or self.segment or SEGMENT
        length = min(length, positions(stack) or length)
        with torch.no_grad(), evaluating(stack):
            for ids, real in pieces(input_ids, mask, length):
                given: dict[str, Any] = {"use_cache": False} if causal else {}
                if real is not None and causal and self._places.positions_by_id:
                    given["position_ids"] = (real.long().cumsum(1) - 1).clamp(min=0)
                with contextlib.ExitStack() as taking, reading(None):
                    for handle in readers:
                        taking.enter_context(handle.taking_in(len(ids), real))
                    stack(input_ids=ids, attention_mask=real, **given)

    def reset(self) -> None:
        """Forgets what was read so far; what was learned stays."""
        for handle in self.handles.values():
            handle.reset()

    @property
    def enabled(self) -> bool:
        """Whether memories take part: not within `disabled`."""
        return self._times_disabled == 0

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Within this context the model computes exactly what its base does, in every thread."""
        self._times_disabled += 1
        try:
            for handle in self.handles.values():
                handle.switch(False)
            yield
        finally:
            self._times_disabled -= 1
            for handle in self.handles.values():
                handle.switch(self.enabled)

    @contextlib.contextmanager
    def keys_only(self) -> Iterator[None]:
        """Within this context memories on which no hidden state depends take no part."""
        idle = [handle for handle in self.handles.values() if not handle.changes_keys]
        for handle in idle:
            handle.switch(False)
        try:
            yield
        finally:
            for handle in idle:
                handle.switch(self.enabled)

    def check_training(self, config: Any, kind: str) -> None:
        """Refuses settings of training that a memory in a model of this kind cannot be trained with."""
        for handle in self.handles.values():
            handle.check_training(config, kind)

    def tell(self) -> tuple[dict[str, float], list[str]]:
        """What training has shown since it was last asked: figures for the log, and sentences for the user."""
        figures, sentences = dict[str, float](), list[str]()
        for name, handle in self.handles.items():
            found, said = handle.tell()
            figures |= {f"{name}.{key}": value for key, value in found.items()}
            sentences += said
        return figures, sentences

    def count_parameters(self) -> int:
        """How many numbers the model computes with: all of its parameters but those that a memory has replaced."""
        unused = {id(parameter) for handle in self.handles.values() for parameter in handle.unused()}
        return sum(parameter.numel() for parameter in self._owner[0].parameters() if id(parameter) not in unused)

    def detach(self) -> PreTrainedModel:
        """Takes every memory out and returns the model, which is its base again."""
        (model,) = self._owner
        for handle in self.handles.values():
            handle.detach()
        self._entrance.remove()
        del model.memory
        model.__class__ = type(model).__bases__[1]
        return model

    def state(self) -> dict[str, torch.Tensor]:
        """What was read so far, as tensors; give it to `load_state` to go on from there."""
        return {f"{name}.{key}": t for name, handle in self.handles.items() for key, t in handle.state().items()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Goes on from where `state` was taken."""
        for name, handle in self.handles.items():
            own = name + "."
            handle.load_state({key.removeprefix(own): t for key, t in state.items() if key.startswith(own)})


def _run(handle: Handle, forward: Callable[..., Any], reading: Reading, **inputs: Any) -> Any:
    return handle.run(forward, inputs, reading)


def _outputs(handle: Handle, forward: Callable[..., Any], **inputs: Any) -> Any:
    return handle.outputs(forward, inputs)
