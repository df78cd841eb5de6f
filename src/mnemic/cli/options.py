"""Command-line options made from config dataclasses, and values read from their text."""

from __future__ import annotations

import argparse
import re
import types
import typing
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, NoReturn

from mnemic.config import Config, describe
from mnemic.errors import UsageError, unknown_name


class _Plain(argparse.RawDescriptionHelpFormatter):
    """Help of a fixed width, so that it reads the same everywhere."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=118)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are UsageErrors that suggest the nearest option."""

    def __init__(self, prog: str, description: str | None, epilog: str) -> None:
        super().__init__(prog, description=description, epilog=epilog, formatter_class=_Plain, allow_abbrev=False)

    def format_help(self) -> str:
        """The help, with a usage line that names the positional arguments only: the options are listed below it."""
        places = [action for action in self._actions if not action.option_strings]
        names = [(f"[{p.metavar or p.dest}]" if p.nargs == "?" else f"{p.metavar or p.dest}") for p in places]
        self.usage = " ".join([self.prog, *names, "[options]"])
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (try '{self.prog} --help')")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            raise self.unknown_option(unknown[0])
        return found

    def unknown_option(self, text: str) -> UsageError:
        """The error for an argument nobody asked for."""
        if not text.startswith("-"):
            return UsageError(f"unexpected argument {text!r} (try '{self.prog} --help')")
        known = [option for action in self._actions for option in action.option_strings]
        near = get_close_matches(text.partition("=")[0], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        return UsageError(f"unknown option {text}: {hint}(try '{self.prog} --help')")


def add_config_options(
    parser: argparse.ArgumentParser, config: type[Config], title: str, skip: Iterable[str] = ()
) -> argparse._ArgumentGroup:
    """Adds a group with an option for each field of `config`; what was typed is found again by `given`."""
    group, defaults = parser.add_argument_group(title), config()
    types_, help_ = config.types(), config.help()
    for name in (name for name in types_ if name not in set(skip)):
        flag, kind = "--" + name.replace("_", "-"), types_[name]
        shown = getattr(defaults, name)
        text = help_[name] + ("" if shown in (None, "", []) else f" (default: {_text(shown)})")
        settings: dict[str, Any] = {"dest": f"{config.__name__}.{name}", "default": argparse.SUPPRESS}
        settings["help"] = text.replace("%", "%%")
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **settings)
        else:
            group.add_argument(flag, metavar=_metavar(kind), **settings)
    return group


def given(arguments: argparse.Namespace, config: type[Config]) -> dict[str, Any]:
    """The options of `config` that were typed on the command line, as values of their types."""
    found = {}
    for name, kind in config.types().items():
        value = getattr(arguments, f"{config.__name__}.{name}", _NOT_TYPED)
        if value is not _NOT_TYPED:
            found[name] = _read("--" + name.replace("_", "-"), value, kind) if isinstance(value, str) else value
    return found


_NOT_TYPED = object()


def read_value(text: str, kind: Any) -> Any:
    """The value of type `kind` that `text` writes; ValueError if it writes none."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _read_first(text, arguments)
    if origin is typing.Literal:
        return _among({str(choice): choice for choice in arguments}, text)
    if origin is list:
        return [read_value(part, arguments[0]) for part in split(text.strip().removeprefix("[").removesuffix("]"))]
    if origin is dict:
        pairs = (part.partition("=") for part in split(text))
        return {read_value(k.strip(), arguments[0]): read_value(v.strip(), arguments[1]) for k, _, v in pairs}
    if kind is bool:
        return _among({"true": True, "false": False}, text.lower())
    if kind is type(None):
        return _among({"none": None}, text.lower())
    return kind(text)


def split(text: str) -> list[str]:
    """The parts of `text` between its commas, except commas inside of brackets."""
    return [part.strip() for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text)]


def add_memory_option(parser: argparse.ArgumentParser) -> None:
    """Adds --memory, for a verb that puts memories into a model that there is; what it gives is for `read_memory`."""
    parser.add_argument(
        "--memory",
        action="append",
        default=[],
        metavar="NAME[.START][:KEY=VALUE,...]",
        help="put this memory into the model first, as output:external=docs.store,weight=0.3 or attention.as_context "
        "(see `mnemic list memories`); may be given several times; an output memory takes the place of the one that is "
        "in the model, an attention memory that has learned is changed: attention:external=book.store, "
        "attention:size=262144",
    )


def read_memory(text: str) -> Any:
    """The memory config that "tokens:count=10,..." writes."""
    config, settings = read_memory_settings(text)
    return config(**settings)


def read_memory_settings(text: str) -> tuple[Any, dict[str, Any]]:
    """The class of memory config that "tokens:count=10,..." names, and the settings in it."""
    from mnemic.memories import registry

    called, _, settings = text.partition(":")
    name, dot, start = called.partition(".")
    config = registry().load(name)
    if dot and start not in config.starts:
        raise unknown_name(f"start of {name}", start, config.starts)
    return config, config.starts.get(start, {}) | read_settings("--memory", called, settings, config.types())


def write_memory(name: str, config: Any) -> str:
    """The text that `read_memory` reads as this config: the settings that are not as usual."""
    usual, kinds = type(config)(), config.types()
    changed = {key: getattr(config, key) for key in kinds if getattr(config, key) != getattr(usual, key)}
    settings = (
        f"{key}=[{_text(value)}]" if isinstance(value, list) else f"{key}={value}" for key, value in changed.items()
    )
    return f"{name}:{','.join(settings)}" if changed else name


def read_settings(flag: str, name: str, text: str, kinds: dict[str, Any]) -> dict[str, Any]:
    """The values in "count=10,...", which stood after `flag` and `name`, by the types of the settings there are."""
    values = {}
    for part in split(text):
        key, equals, value = part.partition("=")
        if key not in kinds:
            raise unknown_name(f"setting of {name}", key, kinds)
        if not equals:
            raise UsageError(f"{flag} {name}: the setting {key!r} has no value; write {name}:{key}=...")
        values[key] = _read(f"{flag} {name}:{key}", value, kinds[key])
    return values


def _read(flag: str, text: str, kind: Any) -> Any:
    """The value of `text`, which stood after `flag`; if there is none, what was expected in the words of a user."""
    try:
        return read_value(text, kind)
    except ValueError:
        raise UsageError(f"{flag} {text!r}: expected {describe(kind)}") from None


def _read_first(text: str, kinds: Iterable[Any]) -> Any:
    """The value of the first of `kinds` that `text` can be read as; nothing first, a text last."""
    for kind in sorted(kinds, key=lambda kind: (kind is str, kind is not type(None))):
        try:
            return read_value(text, kind)
        except ValueError:
            continue
    raise ValueError(text)


def _among(choices: dict[str, Any], text: str) -> Any:
    if text not in choices:
        raise ValueError(text)
    return choices[text]


def _text(value: Any) -> str:
    """A value as it would be typed."""
    return ",".join(map(_text, value)) if isinstance(value, list) else str(value)


def _metavar(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return "|".join(_metavar(a) for a in arguments if a is not type(None))
    if origin is typing.Literal:
        return "|".join(map(str, arguments))
    if origin is list:
        return f"{_metavar(arguments[0])},..."
    if origin is dict:
        return "KEY=VALUE,..."
    return {int: "N", float: "X", str: "TEXT"}.get(kind, "VALUE")
