"""Runs one table or figure of a paper: `python reproductions/run.py trime table10`.

A reproduction is a folder `reproductions/<paper>/<row>/` with a `run.py` that has `main(folder) -> None`: it reads its
settings beside it and writes `results/*.json` there. Without arguments this lists what exists.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from mnemic.errors import MnemicError, UsageError, unknown_name

HERE = Path(__file__).resolve().parent


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
    found = rows(root)
    if not arguments:
        print(listing(found))
        return
    if arguments[0] not in found:
        raise unknown_name("paper", arguments[0], found)
    papers_rows = found[arguments[0]]
    if len(arguments) != 2:
        raise UsageError(f"expected a paper and a row; the rows of {arguments[0]} are {', '.join(papers_rows)}")
    if arguments[1] not in papers_rows:
        raise unknown_name(f"row of {arguments[0]}", arguments[1], papers_rows)
    folder = papers_rows[arguments[1]]
    spec = importlib.util.spec_from_file_location(f"{arguments[0]}_{arguments[1]}", folder / "run.py")
    if spec is None or spec.loader is None:
        raise UsageError(f"{folder / 'run.py'} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(folder)


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
