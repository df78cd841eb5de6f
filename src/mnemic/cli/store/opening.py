"""What the verbs of `mnemic store` share: opening a store, and the model that made it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mnemic.errors import UsageError

if TYPE_CHECKING:
    from mnemic.stores import Store

STORE_HELP = "a folder, or milvus://host:19530/name"


def add_store(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that names a store."""
    parser.add_argument("store", help=STORE_HELP)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name the model of a store."""
    parser.add_argument("--model", metavar="NAME", help="the model that made the store; unset: as the store says")
    parser.add_argument(
        "--override", metavar="model,tokenizer", default="", help="what may differ from what the store was made with"
    )


def named_model(name: str) -> tuple[Any, Any, str]:
    """A model, its tokenizer, and a name under which both are found from any working folder."""
    from mnemic.cli.loading import load_model

    folder = Path(name).expanduser()
    lasting = str(folder.resolve()) if folder.is_dir() else name
    model, tokenizer = load_model(lasting)
    return model, tokenizer, lasting


def model_of(store: Store, arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The model and tokenizer that made a store, or those given in their place, which must be the same."""
    from mnemic.stores.origin import check_origin

    name = arguments.model or store.config.origin.get("model")
    if not name:
        raise UsageError(f"{store.address} does not say which model made it: name it with --model")
    try:
        model, tokenizer, _ = named_model(str(name))
    except UsageError as error:
        hint = "" if arguments.model else "; the store names this model: say where it is now with --model"
        raise UsageError(f"{error}{hint}") from None
    check_origin(store, model, tokenizer, overridden(arguments))
    return model, tokenizer


def overridden(arguments: argparse.Namespace) -> list[str]:
    """What --override names."""
    return [part for part in arguments.override.split(",") if part]


def counted(count: int, what: str) -> str:
    """A number of things."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def printable(text: str) -> str:
    """A text without anything that steers a terminal: such characters as they are written in Python."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def bytes_in_words(count: float) -> str:
    """A number of bytes as people write it."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if count < 1000:
            break
        count, unit = count / 1000, {"bytes": "KB", "KB": "MB", "MB": "GB", "GB": "TB"}[unit]
    return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
