"""augment() puts memories into a Hugging Face model; load() brings a saved one back.

The model object stays what it was, with hooks inside and a class made on the fly from `AugmentedModel` and its own
class, so that `isinstance`, `generate`, `Trainer` and `pipeline` go on working. `model.memory.detach()` undoes it all.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from mnemic import saving
from mnemic.errors import UsageError
from mnemic.hf.anatomy import Anatomy
from mnemic.hf.entrance import MARK
from mnemic.hf.losses import masses_of_logits
from mnemic.hf.reading import reading
from mnemic.memories.base import Handle, Reading, to_be_filled
from mnemic.memories.config import MemoryConfig
from mnemic.memories.memory import Memory
from mnemic.models.cache import rows_to_generate

if TYPE_CHECKING:
    _Base = PreTrainedModel
else:
    _Base = object


def augment(model: Any, *memories: MemoryConfig, anatomy: Anatomy | None = None) -> Any:
    """Gives `model` one or several memories and returns the same object; an augmented model can be given more.

    `anatomy` describes a model of an architecture that mnemic does not know.
    """
    with _put_in(model, memories, anatomy) as augmented:
        augmented.memory.connect()
    return augmented


@contextlib.contextmanager
def _put_in(model: Any, memories: Sequence[MemoryConfig], anatomy: Anatomy | None) -> Iterator[Any]:
    """Gives `model` memories, and takes them out again if that, or what is done within this context, fails."""
    if not isinstance(model, PreTrainedModel):
        raise UsageError(f"augment() takes a transformers PreTrainedModel, not {type(model).__name__}")
    if not memories or not all(isinstance(memory, MemoryConfig) for memory in memories):
        raise UsageError("augment() takes one or more memories, as in augment(model, mnemic.MemoryTokens(count=10))")
    existing = getattr(model, "memory", None)
    if existing is not None and not isinstance(existing, Memory):
        raise UsageError(f"{type(model).__name__} has a part named 'memory' already: mnemic needs that name")
    if existing is None and any(isinstance(part, Memory) for part in model.modules()):
        raise UsageError(f"a part of this {type(model).__name__} has a memory already: augment the whole model only")
    handles = getattr(existing, "handles", {})
    learned = [name for name, handle in handles.items() if any(True for _ in handle.parameters())]
    names = [config.memory() for config in memories] + learned  # one that has learned nothing is put in anew
    if doubled := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"a model holds one memory of a kind: {', '.join(doubled)} was given twice, detach() first")
    if existing is None:
        memory = Memory(model, anatomy)
        model.memory = memory
        model.__class__ = _augmented_class(type(model), memory.separates_documents)  # type: ignore[arg-type]
    else:
        memory = existing
    replaced: dict[str, Handle] = {}
    try:
        for config in memories:
            if (old := memory.handles.get(config.memory())) is not None:
                replaced[config.memory()] = old
            memory.add(config)
        memory.train(model.training)
        yield model
    except Exception:
        if existing is None:
            memory.detach()
        for name, old in replaced.items():
            if (new := memory.handles[name]) is not old:
                new.detach()
                memory.add_module(name, old)
        raise
    for old in replaced.values():
        old.detach()


class AugmentedModel(_Base):
    """What a model's class gains while it has memories."""

    memory: Memory

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | Path, is_main_process: bool = True, **kwargs: Any
    ) -> None:
        """Writes the memories, and the base's weights if they were trained or can be had nowhere else, and a card."""
        if is_main_process:
            saving.save(self, Path(save_directory), super().save_pretrained, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # the class is made on the fly: copies and pickles make it anew
        return _blank, (type(self).__bases__[1], self.memory.separates_documents), self.__dict__


def _blank(base: type[PreTrainedModel], separates: bool) -> Any:
    kind: Any = _augmented_class(base, separates)  # type: ignore[arg-type]
    return kind.__new__(kind)


@functools.cache
def _augmented_class(base: type[PreTrainedModel], separates: bool) -> type[PreTrainedModel]:
    """A subclass of `base` under the same name, so that configs and cards name the base's class."""
    names: dict[str, Any] = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    names["forward"] = _forward(base, separates)
    names["token_losses"] = _token_losses(base)
    if hasattr(base, "_prepare_cache_for_generation"):
        names["_prepare_cache_for_generation"] = _prepare_cache_for_generation(base)
    if hasattr(base, "prepare_inputs_for_generation"):
        names["prepare_inputs_for_generation"] = _prepare_inputs_for_generation(base)
    if hasattr(base, "_expand_inputs_for_generation"):
        names["_expand_inputs_for_generation"] = _expand_inputs_for_generation(base)
    return type(base.__name__, (AugmentedModel, base), names)


def _forward(base: Any, separates: bool) -> Any:
    """The base's forward, which takes `document_starts` too where documents can be kept apart."""

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, document_starts: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if not isinstance(self.memory, Memory):
            raise UsageError(
                f"model.memory is now a {type(self.memory).__name__}: leave the memory as it is (for PEFT, instead of "
                "modules_to_save set requires_grad on its parameters)"
            )
        inputs = dict(zip(names, args, strict=False)) | kwargs
        with reading(document_starts):
            return self.memory.outputs(functools.partial(base.forward, self), inputs)

    own = inspect.signature(base.forward)
    names = list(own.parameters)[1:]
    if separates and "document_starts" not in own.parameters:
        extra = inspect.Parameter("document_starts", inspect.Parameter.KEYWORD_ONLY, default=None)
        ordered = list(own.parameters.values())
        at = len(ordered) - (ordered[-1].kind is inspect.Parameter.VAR_KEYWORD)
        forward.__signature__ = own.replace(parameters=[*ordered[:at], extra, *ordered[at:]])  # type: ignore
    return forward


def _token_losses(base: Any) -> Any:
    """The loss of each target with the memories, for models with a softmax over tokens."""

    def token_losses(
        self: Any,
        targets: torch.Tensor,
        *,
        document_starts: torch.Tensor | None = None,
        streams: torch.Tensor | None = None,
        memory_state: Any = None,
        **inputs: Any,
    ) -> tuple[torch.Tensor, Any]:
        if hasattr(base, "token_masses"):
            masses = functools.partial(base.token_masses, self, targets)
        else:
            masses = functools.partial(masses_of_logits, functools.partial(base.forward, self), targets)
        with reading(document_starts if self.memory.separates_documents else None):
            return self.memory.token_losses(masses, Reading(inputs, targets, document_starts, streams, memory_state))

    return token_losses


def _prepare_cache_for_generation(base: Any) -> Any:
    """The base's own, or the XL cache that a memory wants for the model."""

    @functools.wraps(base._prepare_cache_for_generation)
    def prepare(self: Any, config: Any, inputs: dict[str, Any], mode: Any, rows: int, *more: Any) -> Any:
        if self.memory.xl_length and (needed := rows_to_generate(config, inputs, rows)):
            inputs["past_key_values"] = self.memory.new_cache(needed)
            return None
        return base._prepare_cache_for_generation(self, config, inputs, mode, rows, *more)

    return prepare


def _prepare_inputs_for_generation(base: Any) -> Any:
    """The base's own, which counts the prefix out of a KV cache that `generate` is handed to go on from."""

    @functools.wraps(base.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self: Any, *args: Any, **kwargs: Any) -> Any:
        taken = getattr(kwargs.get("past_key_values"), MARK, 0)
        if taken and kwargs.get("is_first_iteration") and kwargs.get("next_sequence_length") is not None:
            kwargs["next_sequence_length"] += taken
        return base.prepare_inputs_for_generation(self, *args, **kwargs)

    return prepare_inputs_for_generation


def _expand_inputs_for_generation(base: Any) -> Any:
    """The base's own, after which the copy of an encoder's output that beams read still says what the prefix is."""

    @functools.wraps(base._expand_inputs_for_generation)
    def expand(self: Any, *args: Any, **kwargs: Any) -> Any:
        encoded = kwargs.get("encoder_outputs")
        taken = 0 if encoded is None else getattr(encoded[0], MARK, 0)
        of_base: Any = super(AugmentedModel, self)  # in some it is a static method
        input_ids, found = of_base._expand_inputs_for_generation(*args, **kwargs)
        if taken:
            setattr(found["encoder_outputs"][0], MARK, taken)
        return input_ids, found

    return expand


def load(folder: str | Path, base: PreTrainedModel | None = None, check_base: bool = True, mapped: bool = False) -> Any:
    """The augmented model that `save_pretrained` wrote to `folder`.

    The base comes from the folder if its weights are there, else from where it first came from; or give `base`.
    `check_base=False` accepts a base with other weights than the memories were trained with. `mapped=True` leaves large
    tables (product keys) in their file, from which rows are read as they are needed: they may be larger than memory.
    """
    folder = Path(folder)
    record = saving.read_record(folder)
    saving.check_files(folder, record)
    anatomy = Anatomy.from_dict(record["anatomy"]) if record["anatomy"] else None
    base = saving.load_base(folder, record["base"]) if base is None else base
    with to_be_filled(), _put_in(base, saving.read_configs(record), anatomy) as model:
        saving.load_memory(model, folder, record, check_base, mapped)
        model.memory.connect()
    return model
