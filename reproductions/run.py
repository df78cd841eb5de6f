"""Runs one table or figure of a paper: `python reproductions/run.py trime table10`.

A reproduction is a folder `reproductions/<paper>/<row>/` with a `run.py` that has two functions:

    main(folder, size, seeds, runs)    trains and measures what the row needs, into results/<size>.json; that of a
                                       table takes `only` too, a part of the labels that it is to run
    table(folder, size)                puts what is in that file beside the paper's figures in README.md

Sizes are `small` (two cores), `smoke` (seconds, on text that is always there) and `paper` (the paper's own numbers).
Without arguments this lists what exists.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mnemic.cli.options import Parser
from mnemic.errors import MnemicError, UsageError, unknown_name

HERE = Path(__file__).resolve().parent
SIZES = ("small", "smoke", "paper")

if str(HERE) not in sys.path:
    sys.path.append(str(HERE))  # rows import what their paper's rows share: `from tables.harness import ...`


def rows(root: Path) -> dict[str, dict[str, Path]]:
    """Paper -> row -> folder, of all reproductions below `root`."""
    found: dict[str, dict[str, Path]] = {}
    for script in sorted(root.glob("*/*/run.py")):
        found.setdefault(script.parent.parent.name, {})[script.parent.name] = script.parent
    return found


def listing(found: dict[str, dict[str, Path]]) -> str:
    """One line for each paper, or a sentence if there is none."""
    lines = [f"{paper}: {', '.join(names)}" for paper, names in found.items()]
    return "\n".join(lines) or "there are no reproductions yet"


def run(root: Path, arguments: Sequence[str]) -> None:
    """Runs the row that `arguments` name (paper, row); lists all rows if they name none."""
    asked = parser().parse_args(list(arguments))
    found = rows(root)
    if asked.paper is None:
        print(listing(found))
        return
    if asked.paper not in found:
        raise unknown_name("paper", asked.paper, found)
    papers_rows = found[asked.paper]
    if asked.row is None:
        raise UsageError(f"expected a paper and a row; the rows of {asked.paper} are {', '.join(papers_rows)}")
    if asked.row not in papers_rows:
        raise unknown_name(f"row of {asked.paper}", asked.row, papers_rows)
    if asked.size not in SIZES:
        raise unknown_name("size", asked.size, SIZES)
    folder = papers_rows[asked.row]
    module = load(folder)
    if asked.data is not None:
        os.environ["MNEMIC_DATA"] = asked.data
    if not asked.table:
        chosen = {} if asked.only is None else {"only": asked.only}
        if chosen and not hasattr(module, "TABLE"):
            raise UsageError(f"{asked.row} is measured as a whole: leave out --only {asked.only}")
        module.main(folder, asked.size, read_seeds(asked.seeds), Path(asked.runs), **chosen)
    if asked.size != "smoke":
        module.table(folder, asked.size)


def parser() -> Parser:
    """The options of the command."""
    options = Parser("reproduce", "Runs one table or figure of a paper.", "  python reproductions/run.py trime table10")
    options.add_argument("paper", nargs="?", help="a paper; nothing lists them all")
    options.add_argument("row", nargs="?", help="a table or figure of it")
    options.add_argument("size", nargs="?", default="small", help=f"{', '.join(SIZES)}; default: small")
    options.add_argument("--seeds", metavar="0,1,2", help="the seeds to run; default: those of the settings")
    options.add_argument(
        "--only",
        metavar="TEXT",
        help="of a table, only this row, or all that have this in their names; two commands may run side by side",
    )
    options.add_argument("--data", metavar="FOLDER", help="where the corpora lie; default: MNEMIC_DATA, or the hub")
    options.add_argument(
        "--runs", metavar="FOLDER", default="runs/reproductions", help="where trained models and stores are kept"
    )
    options.add_argument("--table", action="store_true", help="run nothing, only make the table in README.md again")
    return options


def read_seeds(text: str | None) -> list[int] | None:
    """The numbers in "0,1,2"."""
    if text is None:
        return None
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise UsageError(f"--seeds {text}: expected numbers with commas between, as 0,1,2") from None


def load(folder: Path) -> Any:
    """The module `run.py` of a row."""
    name = f"{folder.parent.name}_{folder.name}"
    spec = importlib.util.spec_from_file_location(name, folder / "run.py")
    if spec is None or spec.loader is None:
        raise UsageError(f"{folder / 'run.py'} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    """The exit codes of the command line: 0 done, 1 failed, 2 wrong usage, 3 damaged files."""
    try:
        run(HERE, sys.argv[1:])
    except MnemicError as error:
        print(f"reproduce: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
