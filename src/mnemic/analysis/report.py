"""A self-contained HTML report of models trained side by side: curves, table, samples and settings in one file."""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mnemic.files import write_text


@dataclass(frozen=True)
class Contender:
    """One trained model: its row of the table, its training losses as (step, loss), and a line it wrote."""

    name: str
    row: dict[str, float | int]
    losses: Sequence[tuple[int, float]]
    sample: str
    pictures: dict[str, str] = field(default_factory=dict)
    """Title -> SVG: pictures of its own that a memory adds below the table."""


def text_table(contenders: Sequence[Contender]) -> str:
    """The table in plain text, columns aligned, one line for each contender."""
    rows = [["", *contenders[0].row], *([c.name, *map(show, c.row.values())] for c in contenders)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def show(value: float | int) -> str:
    """A number as people write it: 1,234,567 and 12.34."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}"


def loss_curves(contenders: Sequence[Contender]) -> str:
    """Two panels as SVG: the training losses, and each loss minus the first contender's on the same batches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = [step for step, _ in contenders[0].losses]
    window = max(1, len(steps) // 20)
    base = smooth([loss for _, loss in contenders[0].losses], window)
    for contender in contenders:
        curve = smooth([loss for _, loss in contender.losses], window)
        left.plot(steps[window - 1 :], curve, label=contender.name, linewidth=1.2)
        right.plot(steps[window - 1 :], [a - b for a, b in zip(curve, base, strict=True)], linewidth=1.2)
    left.set(title="Training loss (moving average)", xlabel="step", ylabel="nats per token")
    right.set(
        title=f"Loss minus that of “{contenders[0].name}”", xlabel="step", ylabel="nats per token (lower is better)"
    )
    left.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return svg(figure)


def smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean of each `window` neighbours; shorter than `values` by window - 1."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [(sums[i + window] - sums[i]) / window for i in range(len(values) - window + 1)]


def svg(figure: Any) -> str:
    """A matplotlib figure as an SVG element that can stand inside of HTML: no prolog, no metadata, no addresses."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mnemic"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    element = text.getvalue()[text.getvalue().index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", element)  # HTML knows these names without their addresses


def write_report(
    path: str | Path, title: str, contenders: Sequence[Contender], settings: dict[str, Any], notes: Sequence[str]
) -> None:
    """Writes the whole report into one HTML file that refers to nothing outside of itself."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("", *contenders[0].row))
    body = "".join(
        f"<tr><td>{html.escape(c.name)}</td>" + "".join(f"<td>{show(value)}</td>" for value in c.row.values()) + "</tr>"
        for c in contenders
    )
    samples = "".join(f"<h3>{html.escape(c.name)}</h3><pre>{html.escape(c.sample)}</pre>" for c in contenders)
    pictures = "".join(f"<h2>{html.escape(t)}</h2>{image}" for c in contenders for t, image in c.pictures.items())
    parts = {
        "title": html.escape(title),
        "table": f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>",
        "notes": "".join(f"<p>{html.escape(note)}</p>" for note in notes),
        "curves": loss_curves(contenders),
        "pictures": pictures,
        "samples": samples,
        "settings": html.escape(json.dumps(settings, indent=2, ensure_ascii=False)),
    }
    write_text(path, _PAGE.format(**parts))


_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
  body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
  table {{ border-collapse: collapse; }}
  th, td {{ padding: .3rem .9rem; border-bottom: 1px solid #ddd; text-align: right; }}
  th:first-child, td:first-child {{ text-align: left; }}
  svg {{ max-width: 100%; height: auto; }}
  pre {{ background: #f6f6f4; padding: .8rem; overflow-x: auto; white-space: pre-wrap; }}
</style>
<h1>{title}</h1>
{table}
{notes}
{curves}
{pictures}
<h2>What each of them writes</h2>
{samples}
<h2>Settings</h2>
<pre>{settings}</pre>
</html>
"""
