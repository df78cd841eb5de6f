"""The base of every configuration: one dataclass field defines an option, its type, its default and its help."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, ClassVar, Self

from mnemic.errors import UsageError, unknown_name
from mnemic.files import write_text

SCHEMA = 1


def option(default: Any, help: str) -> Any:
    """A config field with its default and the one line of documentation that `--help`, TOML and docs show."""
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(kw_only=True)
class Config:
    """Strict settings: unknown keys and wrong types are refused; JSON and TOML in and out."""

    schema: ClassVar[int] = SCHEMA

    def __post_init__(self) -> None:
        for name, kind in self.types().items():
            setattr(self, name, checked(type(self).__name__, name, getattr(self, name), kind))
        self.check()

    def check(self) -> None:
        """Raises UsageError where values do not make sense together; subclasses override it."""

    @classmethod
    def types(cls) -> dict[str, Any]:
        """The resolved type of each option, in order."""
        hints = typing.get_type_hints(cls)
        return {field.name: hints[field.name] for field in dataclasses.fields(cls)}

    @classmethod
    def help(cls) -> dict[str, str]:
        """The line of documentation of each option, in order."""
        return {field.name: field.metadata.get("help", "") for field in dataclasses.fields(cls)}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the schema number."""
        return {"schema": self.schema, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_dict`; a key that is not an option is an error that suggests the nearest one."""
        values = dict(values)
        schema = values.pop("schema", cls.schema)
        if schema != cls.schema:
            raise UsageError(
                f"{cls.__name__}: schema {schema!r} was written by another version of mnemic "
                f"(this one reads schema {cls.schema}); install the version that wrote it"
            )
        known = cls.types()
        for key in values:
            if key not in known:
                raise unknown_name(f"option of {cls.__name__}", key, known)
        return cls(**values)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a .json or .toml file."""
        return cls.from_dict(cls.read(path))

    @staticmethod
    def read(path: str | Path) -> dict[str, Any]:
        """The options that a .json or .toml file sets, as they stand there."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
            values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except FileNotFoundError:
            raise UsageError(f"no such config file: {path}") from None
        except OSError as error:
            raise UsageError(f"the config file {path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise UsageError(f"{path} is not valid {path.suffix.lstrip('.') or 'TOML'}: {error}") from None
        if not isinstance(values, dict):
            raise UsageError(f"{path}: expected a table of options, found {type(values).__name__}")
        return values

    def save(self, path: str | Path) -> None:
        """Writes a .json or a commented .toml file, atomically."""
        path = Path(path)
        text = json.dumps(self.to_dict(), indent=2) + "\n" if path.suffix == ".json" else self.to_toml()
        write_text(path, text)

    def to_toml(self) -> str:
        """TOML with each option's help above it; options that are None are left as comments."""
        lines = [f"schema = {self.schema}"]
        for name, help in self.help().items():
            value = getattr(self, name)
            lines += ["", f"# {help}", f"# {name} =" if value is None else f"{name} = {_toml(value)}"]
        return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml(str(k))} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # nan, inf and -inf, where JSON has other words
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # the one control character JSON leaves


def checked(owner: str, name: str, value: Any, kind: Any) -> Any:
    """`value` if it is of type `kind` (an int is accepted where a float is expected), else UsageError."""
    accepted = _accept(value, kind)
    if accepted is _NO:
        raise UsageError(f"{owner}.{name} = {value!r}: expected {describe(kind)}")
    return accepted


_NO = object()


def _accept(value: Any, kind: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return next((got for got in (_accept(value, a) for a in arguments) if got is not _NO), _NO)
    if origin is typing.Literal:
        return value if any(value == a and type(value) is type(a) for a in arguments) else _NO
    if origin is list and isinstance(value, list | tuple):
        items = [_accept(item, arguments[0]) for item in value]
        return _NO if any(item is _NO for item in items) else items
    if origin is dict and isinstance(value, dict):
        pairs = {_accept(k, arguments[0]): _accept(v, arguments[1]) for k, v in value.items()}
        return _NO if _NO in pairs or any(v is _NO for v in pairs.values()) else pairs
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, bool):
        return _NO
    return value if isinstance(kind, type) and isinstance(value, kind) else _NO


def describe(kind: Any) -> str:
    """A type in the words of a user: "a whole number", "one of 'a', 'b'"."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(a) for a in arguments)
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(a) for a in arguments)
    if origin is list:
        return f"a list of {describe(arguments[0]).removeprefix('a ')}s"
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "nothing"}
    return names.get(kind, str(kind))
