"""mnemic gives a transformer a memory: in its input, its attention, its feed-forward layers or its output.

The public names are loaded on first use, so that `import mnemic` and `mnemic --help` need no torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "augment": "mnemic.augment",
    "load": "mnemic.augment",
    "Anatomy": "mnemic.hf.anatomy",
    "train": "mnemic.train",
    "TrainConfig": "mnemic.train.config",
    "AdamW": "mnemic.train.rows",
    "evaluate": "mnemic.evaluate",
    "EvaluateConfig": "mnemic.evaluate.config",
    "tune": "mnemic.evaluate.tuning",
    "trace": "mnemic.analysis.trace",
    "attention_maps": "mnemic.analysis.attention",
    "usage": "mnemic.analysis.usage",
    "usage_by_class": "mnemic.analysis.usage",
    "find_slots": "mnemic.analysis.slots",
    "choose_slots": "mnemic.analysis.slots",
    "prune_slots": "mnemic.analysis.pruning",
    "PruneSlotsConfig": "mnemic.analysis.config",
    "open_corpus": "mnemic.data",
    "open_task": "mnemic.data",
    "with_head": "mnemic.hf.heads",
    "fine_tuning": "mnemic.train.fine_tuning",
    "load_tokenizer": "mnemic.data",
    "train_tokenizer": "mnemic.data",
    "build_store": "mnemic.stores.build",
    "BuildConfig": "mnemic.stores.build_config",
    "prune_store": "mnemic.stores.prune",
    "PruneConfig": "mnemic.stores.prune",
    "open_store": "mnemic.stores",
    "StoreConfig": "mnemic.stores",
    "References": "mnemic.stores",
    "Source": "mnemic.stores",
    "Where": "mnemic.stores",
    "MnemicError": "mnemic.errors",
    "UsageError": "mnemic.errors",
    "UnsupportedModel": "mnemic.errors",
    "DamagedError": "mnemic.errors",
}


class _Verb(ModuleType):
    """A module that can be called: `mnemic.train` is a package and, called, the function `train` in it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # the import system sets submodules here; those that share the name of a public function become callable
        if name in _PUBLIC and isinstance(value, ModuleType):
            value.__class__ = _Verb
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        module = importlib.import_module(_PUBLIC[name])
        return module if isinstance(module, _Verb) and module.__name__ == f"mnemic.{name}" else getattr(module, name)
    from mnemic.memories import configs  # each folder of memories/ adds its config class to the public names

    if name in (found := configs()):
        return found[name]
    raise AttributeError(f"module 'mnemic' has no attribute {name!r}")


def __dir__() -> list[str]:
    from mnemic.memories import configs

    return sorted([*_PUBLIC, *configs(), "__version__"])
