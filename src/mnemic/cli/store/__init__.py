"""Build, search and look after stores of (context, next token) rows.

A store holds, for each position of a text, the vector that a model has for what came before, the token that followed,
and where that is. The verbs, each with its own --help (--json on all that report something):

{verbs}
"""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType

from mnemic.cli.options import Parser
from mnemic.errors import unknown_name

VERBS = ("build", "add", "search", "info", "verify", "forget", "compact", "prune", "plan")

EXAMPLE = """  mnemic store build python.store stdlib --model runs/a
  mnemic store search python.store "def __init__(self"
  mnemic store add python.store notes/ --namespace alice
  mnemic store forget python.store --namespace alice --compact"""


def verb_module(verb: str) -> ModuleType:
    """The file of a verb: like those of the verbs of `mnemic` itself."""
    return importlib.import_module(f"mnemic.cli.store.{verb}")


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the verb and whatever follows it."""
    first_lines = {verb: (verb_module(verb).__doc__ or "").splitlines()[0] for verb in VERBS}
    lines = "\n".join(f"  {verb:10}{line}" for verb, line in first_lines.items())
    parser.description = (__doc__ or "").format(verbs=lines)
    parser.add_argument("verb", metavar="<verb>", help=f"one of {', '.join(VERBS)}")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Runs one verb on its own arguments."""
    if arguments.verb not in VERBS:
        raise unknown_name("verb of `mnemic store`", arguments.verb, VERBS)
    module = verb_module(arguments.verb)
    parser = Parser(f"mnemic store {arguments.verb}", module.__doc__, f"example:\n{module.EXAMPLE}")
    module.options(parser)
    try:
        own = parser.parse_args(arguments.rest)
    except SystemExit as stop:  # argparse's way to end after --help
        return int(stop.code or 0)
    return int(module.run(own))
