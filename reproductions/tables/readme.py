"""The table in a row's README.md: the paper's figures beside what is in the results file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from mnemic.errors import UsageError
from mnemic.files import write_text

if TYPE_CHECKING:
    from tables.harness import Table

BEGIN, END = "<!-- results -->", "<!-- end of results -->"
NOT_RUN = "not run"

Figures = dict[str, dict[str, dict[str, float]]]
"""Label -> column -> seed -> figure."""


def put_table(path: Path, table: Table, results: dict[str, Any], size: str) -> None:
    """Writes the table between the two markers of a README."""
    put_between(path, "\n".join([*lines(table, results), "", said(results, size)]))


def put_between(path: Path, made: str) -> None:
    """Writes a text between the two markers of a README."""
    text = path.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise UsageError(f"{path} has no place for the table: put {BEGIN} and {END} on lines of their own")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    write_text(path, f"{before}{BEGIN}\n{made}\n{END}{after}")


def lines(table: Table, results: dict[str, Any]) -> list[str]:
    """The table in Markdown."""
    ours, papers = figures(table, results), paper_figures(table)
    others = {row.label: row.against or table.rows[0].label for row in table.rows}
    cited = [column for column in table.columns if any(found.get(column) is not None for found in papers.values())]
    head = ["model"]
    for column in table.columns:
        head += [f"{column}, paper", f"{column}, ours"] if column in cited else [column]
    if table.change:
        head += ["change, paper", "change, ours"]
    rows = [head, ["---"] * len(head)]
    for label, paper in papers.items():
        row = [label]
        for column in table.columns:
            row += [number(paper.get(column))] if column in cited else []
            row.append(spread(ours[label].get(column), column in paper))
        if table.change:
            other = others[label]
            row.append(percent(change([paper.get(table.change)], [papers[other].get(table.change)])))
            row.append(percent(change(*paired(ours[label], ours[other], table.change))))
        rows.append(row)
    return [f"| {' | '.join(row)} |" for row in rows]


def figures(table: Table, results: dict[str, Any]) -> Figures:
    """What was measured."""
    found: Figures = {row.label: {} for row in table.rows}
    for row in table.rows:
        for seed, made in results.get("measurements", {}).get(table.key(row), {}).items():
            for column in row.paper:
                if (figure := made["figures"].get(column)) is not None:
                    found[row.label].setdefault(column, {})[seed] = figure * table.scale
    return found


def paper_figures(table: Table) -> dict[str, dict[str, float | None]]:
    """The paper's figures by label and column."""
    found: dict[str, dict[str, float | None]] = {}
    for row in table.rows:
        found.setdefault(row.label, {}).update(row.paper)
    return found


def paired(these: dict[str, Any], those: dict[str, Any], column: str) -> tuple[list[float], list[float]]:
    """The figures of a column for those seeds that both have."""
    mine, other = these.get(column, {}), those.get(column, {})
    seeds = [seed for seed in mine if seed in other]
    return [mine[seed] for seed in seeds], [other[seed] for seed in seeds]


def change(figures: Sequence[float | None], first: Sequence[float | None]) -> float | None:
    """By what share figures differ from others, on average; None without any."""
    pairs = [(x, y) for x, y in zip(figures, first, strict=True) if x is not None and y]
    return mean(x / y - 1 for x, y in pairs) if pairs else None


def number(figure: float | None) -> str:
    """A figure as the paper writes it."""
    if figure is None:
        return "–"
    return f"{figure:,.0f}" if figure >= 1000 else f"{figure:.2f}"


def spread(found: dict[str, float] | None, wanted: bool) -> str:
    """The mean over seeds, with the least and the largest figure if there are several."""
    if not found:
        return NOT_RUN if wanted else ""
    middle = number(mean(found.values()))
    return middle if len(found) == 1 else f"{middle} ({number(min(found.values()))} to {number(max(found.values()))})"


def percent(share: float | None) -> str:
    """A change as text."""
    return "–" if share is None else f"{share:+.1%}"


def short(commit: str | None) -> str:
    """The beginning of a commit's name, and whether there was more than the commit."""
    return re.sub(r"^(\w{10})\w*", r"\1", commit or "unknown")


def said(results: dict[str, Any], size: str) -> str:
    """What made the results, in a line."""
    made = [one for seeds in results.get("measurements", {}).values() for one in seeds.values()]
    if not made:
        return f"Size: {size}. Not run yet."
    seeds = sorted({int(seed) for found in results["measurements"].values() for seed in found})
    commits = sorted({short(one["commit"]) for one in made})
    return (
        f"Size: {size}. Seeds: {', '.join(map(str, seeds))}. Commit: {', '.join(commits)}. "
        f"Processors: {max(one['machine']['processors'] for one in made)}. "
        f"Seconds, of what was not shared with another table: {sum(one['seconds'] for one in made):,.0f}."
    )
