"""Show what there is: memories, corpora, tasks, architectures, settings of our decoder, objectives, metrics."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from mnemic.config import describe
from mnemic.errors import unknown_name
from mnemic.registry import Registry

EXAMPLE = """  mnemic list
  mnemic list memories --json"""

Rows = dict[str, str]


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options."""
    parser.add_argument("section", nargs="?", help=f"one of {', '.join(SECTIONS)}; all of them if left out")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints one section or all."""
    if arguments.section is not None and arguments.section not in SECTIONS:
        raise unknown_name("section", arguments.section, SECTIONS)
    chosen = [arguments.section] if arguments.section else list(SECTIONS)
    found = {section: SECTIONS[section]() for section in chosen}
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n\n".join(f"{section}\n{_lines(rows)}" for section, rows in found.items()))
    return 0


def _lines(rows: Rows) -> str:
    width = max(map(len, rows), default=0)
    return "\n".join(f"  {name:{width}}  {text}" for name, text in rows.items())


def _first_line(thing: Any) -> str:
    return (thing.__doc__ or "").strip().partition("\n")[0]


def _registered(registry: Registry) -> Rows:
    return {name: _first_line(registry.load(name)) for name in registry}


def _memories() -> Rows:
    from mnemic.memories import registry
    from mnemic.memories.config import MemoryConfig

    rows: Rows = {}
    for name in registry():
        config: type[MemoryConfig] = registry().load(name)
        rows[name] = _first_line(config)
        rows |= {f"{name}.{start}": _first_line(getattr(config, start)) for start in config.starts}
        rows |= _settings(name, config.help(), config.types(), config())
    return rows


def _settings(owner: str, help: Rows, kinds: dict[str, Any], defaults: object) -> Rows:
    """A row for each setting: "owner:key=default" and what it means."""
    return {f"{owner}:{key}={getattr(defaults, key)}": f"{text} ({describe(kinds[key])})" for key, text in help.items()}


def _corpora() -> Rows:
    from mnemic.data import CORPORA

    paths = {"a path": "A text file, a folder or a .jsonl file.", "hf:<dataset>": "A dataset on the Hugging Face hub."}
    return _registered(CORPORA) | paths


def _tasks() -> Rows:
    from mnemic.data import TASKS

    own = {
        "task:<folder>": "A folder with train.tsv and dev.tsv, or .jsonl: columns text, label, and text_pair for pairs."
    }
    return _registered(TASKS) | own


def _architectures() -> Rows:
    from mnemic.hf.anatomy import ARCHITECTURES

    return {name: f"{anatomy.kind}, {anatomy.positions} positions" for name, anatomy in sorted(ARCHITECTURES.items())}


def _decoder() -> Rows:
    from mnemic.cli.loading import decoder_settings
    from mnemic.models import MnemicDecoderConfig

    kinds, help = decoder_settings(), MnemicDecoderConfig.help()
    return _settings("decoder", {name: help[name] for name in kinds}, kinds, MnemicDecoderConfig())


def _sru() -> Rows:
    from mnemic.cli.loading import settings_of
    from mnemic.models import MnemicSRUConfig

    kinds, help = settings_of(MnemicSRUConfig), MnemicSRUConfig.help()
    return _settings("sru", {name: help[name] for name in kinds}, kinds, MnemicSRUConfig())


def _presets() -> Rows:
    from mnemic.models.presets import PRESETS

    return {
        f"preset:{name}": f"{kind.model_type}: " + ", ".join(f"{key} = {value}" for key, value in settings.items())
        for name, (kind, settings) in PRESETS.items()
    }


def _train(name: str) -> Rows:
    from mnemic.train import config

    return _registered(getattr(config, name))


def _metrics() -> Rows:
    from mnemic.evaluate.config import METRICS

    return _registered(METRICS)


SECTIONS: dict[str, Callable[[], Rows]] = {
    "memories": _memories,
    "corpora": _corpora,
    "tasks": _tasks,
    "architectures": _architectures,
    "decoder": _decoder,
    "sru": _sru,
    "presets": _presets,
    "objectives": lambda: _train("OBJECTIVES"),
    "schedules": lambda: _train("SCHEDULES"),
    "optimizers": lambda: _train("OPTIMIZERS"),
    "metrics": _metrics,
}
