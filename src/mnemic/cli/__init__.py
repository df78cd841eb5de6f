"""The command line: each other file of this folder named in `VERBS` is one verb.

A verb's file has a docstring (its help), `EXAMPLE`, `options(parser)` and `run(arguments) -> exit code`. It
imports torch, and whatever imports torch, inside its functions, so that help answers at once.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

import mnemic
from mnemic.cli.options import Parser
from mnemic.errors import MnemicError, UsageError, unknown_name

VERBS = ("demo", "list", "doctor", "train", "evaluate", "generate", "trace", "attention", "usage", "slots", "store")

DESCRIPTION = """Memory for any transformer: in its input, its attention, its feed-forward layers or its output.

verbs:
"""

EPILOG = """examples:
  mnemic demo                                 with and without memory, side by side, in about four minutes
  mnemic train book.txt --memory tokens:count=10 --out runs/a --steps 500
  mnemic evaluate runs/a/model book.txt
  mnemic generate runs/a/model "Once upon"
  mnemic store build book.store book.txt --model runs/a && mnemic store search book.store "Once upon"

Results go to stdout, progress to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 damaged files.
"""

# What writing to stdout can say. A file that is written says it too, but mnemic.files makes a sentence of that.
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and gives its exit code; every failure a user can act on is one line on stderr."""
    try:
        code = _run([*(sys.argv[1:] if argv is None else argv)])  # `list` is a verb here
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as stop:
        print(f"\nmnemic: {str(stop) or 'stopped'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()  # whoever read us (head, less) has enough
        return 0
    except OSError as error:
        if os.environ.get("MNEMIC_DEBUG") or error.errno not in _CANNOT_WRITE or error.filename:
            raise
        _drop_output()
        print(f"mnemic: the output could not be written: {error.strerror}", file=sys.stderr)
        return 1
    except MnemicError as error:
        if os.environ.get("MNEMIC_DEBUG"):
            raise
        print(f"mnemic: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code


def _drop_output() -> None:
    """Forgets what is buffered for stdout, so that it does not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str]) -> int:
    for argument in argv:
        try:
            argument.encode()
        except UnicodeEncodeError:  # what is no text reaches us as lone surrogates
            raise UsageError(f"the argument {argument!r} is not UTF-8 text: write it in UTF-8") from None
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"mnemic {mnemic.__version__}")
        return 0
    if not sys.stderr.isatty():  # the libraries' own progress bars are for terminals only
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    verb, *rest = argv
    if verb not in VERBS:
        raise unknown_name("option" if verb.startswith("-") else "verb", verb, [*VERBS, "--help", "--version"])
    module = importlib.import_module(f"mnemic.cli.{verb}")
    try:
        arguments = _parser(verb, module).parse_args(rest)
    except SystemExit as stop:  # argparse's way to end after --help
        return int(stop.code or 0)
    return module.run(arguments)


def _parser(verb: str, module: ModuleType) -> Parser:
    parser = Parser(f"mnemic {verb}", module.__doc__, f"example:\n{module.EXAMPLE}")
    module.options(parser)
    return parser


def _overview() -> str:
    modules = {verb: importlib.import_module(f"mnemic.cli.{verb}") for verb in VERBS}
    verbs = "\n".join(f"  {verb:10}{(module.__doc__ or '').splitlines()[0]}" for verb, module in modules.items())
    usage = "usage: mnemic <verb> [options]      mnemic <verb> --help      mnemic --version"
    return f"{usage}\n\n{DESCRIPTION}{verbs}\n\n{EPILOG}"
