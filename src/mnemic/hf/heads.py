"""The head that a task needs, on a pretrained encoder with or without memories."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForQuestionAnswering, AutoModelForSequenceClassification, PreTrainedModel

from mnemic.augment import AugmentedModel, augment, load
from mnemic.data.tasks import Task
from mnemic.errors import DamagedError, UsageError
from mnemic.saving import RECORD

_HEADS: dict[str, Any] = {"classification": AutoModelForSequenceClassification, "spans": AutoModelForQuestionAnswering}
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_POOLER = "pooler."  # a part of the encoder that masked models do without


def with_head(encoder: Any, task: Task) -> Any:
    """A model for a task: a pretrained encoder, by folder, name on the hub or object, with a head of its kind.

    A head of the right shape that is there is kept, any other is new; memories go with the encoder. An object that is
    given is used up.

    >>> model = mnemic.with_head("bert-base-uncased", mnemic.open_task("glue/cola"))
    """
    if not isinstance(encoder, PreTrainedModel):
        folder = Path(encoder)
        if not (folder / RECORD).exists():
            return _loaded(str(encoder), task)
        encoder = load(folder)
    if _fits(encoder, task):
        return encoder
    _refuse_causal([type(encoder).__name__], type(encoder).__name__, task)
    memory, state = getattr(encoder, "memory", None), {}
    if isinstance(encoder, AugmentedModel):
        state = encoder.memory.state_dict()
        encoder = encoder.memory.detach()
    model = _moved(encoder, task)
    if memory is not None:
        model = augment(model, *memory.configs, anatomy=memory.anatomy)
        new = model.memory.state_dict()
        fitting = {name: tensor for name, tensor in state.items() if tensor.shape == new[name].shape}
        model.memory.load_state_dict(new | fitting)  # a memory's own head for other labels is new, too
    return model


def _settings(task: Task) -> dict[str, Any]:
    """What the config of a model for a task says of its labels."""
    if task.kind == "spans":
        return {}
    names = dict(enumerate(task.labels or ("score",)))
    return {"id2label": names, "label2id": {name: number for number, name in names.items()}, "problem_type": None}


def _head(config: Any, task: Task) -> Any:
    """The class of a model of this architecture for a task; None if there is none."""
    return _HEADS[task.kind]._model_mapping.get(type(config), None)


def _fits(model: Any, task: Task) -> bool:
    """Whether a model has the head that a task needs already."""
    if _head(model.config, task) not in type(model).__mro__:
        return False
    return task.kind == "spans" or model.config.num_labels == (len(task.labels) or 1)


def _moved(encoder: Any, task: Task) -> Any:
    """A new model with the encoder's weights."""
    config = encoder.config
    kind = _head(config, task)
    if kind is None:
        raise UsageError(f"transformers has no head for {task.kind} on {type(encoder).__name__}: give another encoder")
    config.update(_settings(task))
    model = kind(config).to(encoder.device, encoder.dtype)
    found = model.base_model.load_state_dict(encoder.base_model.state_dict(), strict=False)
    _refuse_missing(found.missing_keys, type(encoder).__name__)
    model.config._name_or_path = encoder.config._name_or_path
    return model


def _loaded(source: str, task: Task) -> Any:
    """A plain encoder from a folder or the hub, with a head."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # that the head is new is what was asked for
    try:
        config = AutoConfig.from_pretrained(source, **_settings(task))
        _refuse_causal(config.architectures or [], source, task)
        options = {"config": config, "ignore_mismatched_sizes": True, "output_loading_info": True}
        model, report = _HEADS[task.kind].from_pretrained(source, **options)
    except SafetensorError as error:
        raise DamagedError(f"the weights of the model {source} are damaged ({error}): get or save it again") from error
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"no encoder {source!r} could be loaded for {task.name} ({str(error).splitlines()[0]}): give the folder of "
            "a run, a saved model such as BERT, or a name on the hub"
        ) from error
    finally:
        transformers.logging.set_verbosity(verbosity)
    prefix = model.base_model_prefix + "."
    missing = [*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])]
    _refuse_missing((name.removeprefix(prefix) for name in missing if name.startswith(prefix)), source)
    return model


def _refuse_missing(names: Iterable[str], source: str) -> None:
    """UsageError if an encoder would be partly untrained; what pools its outputs may be new."""
    if missing := sorted(name for name in names if not name.startswith(_POOLER)):
        raise UsageError(f"{source} lacks weights of its encoder ({missing[0]}): give a model that was saved whole")


def _refuse_causal(architectures: list[str], source: str, task: Task) -> None:
    if any(name.endswith(_CAUSAL) for name in architectures):
        raise UsageError(
            f"{source} is a causal language model ({architectures[0]}), and {task.name} a task for an encoder, which "
            "reads a text from both sides: give a model such as BERT or RoBERTa"
        )
