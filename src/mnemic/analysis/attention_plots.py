"""Pictures of attention maps: a panel for each layer and head, and what is written, processed and read by layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mnemic.analysis.operations import NONE

if TYPE_CHECKING:
    from mnemic.analysis.attention import StackMaps

PANEL = (1.5, 3.2)  # inches: the least and the most of a panel's longer side
LEGEND = (2.0, 4.0)  # inches: the width of what is beside the panels, and the least height
WIDEST = 40.0  # inches of a whole picture
SMALLEST_LETTERS = 4.0  # points; labels that would be smaller are left out
LETTERS = 7.0  # points, at most
LONGEST_LABEL = 14  # characters
BORDER = "#d62728"
COLOURS = {"write": "#d95f02", "process": "#7570b3", "read": "#1b9e77"}
TITLES = {
    "self": "the memory and the text",
    "encoder": "encoder: the memory and the source",
    "decoder": "decoder: the target to itself",
    "cross": "decoder reading the memory and the source",
}


def draw_maps(maps: StackMaps, stack: str, path: str | Path) -> None:
    """Draws a grid of layers and heads; red lines part memory from sequence, one colour scale serves all panels."""
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    layers, heads, queries, keys = maps.weights.shape
    cell = min(max(0.1, PANEL[0] / max(queries, keys)), PANEL[1] / max(queries, keys), WIDEST / (keys * heads))
    width, height = max(keys * cell, 0.6), max(queries * cell, 0.6)
    wide, high = heads * (width + 0.15) + 1.2, max(layers * (height + 0.3) + 1.6, LEGEND[1])
    figure = Figure(figsize=(wide + LEGEND[0], high), layout="constrained")
    figure.suptitle(f"{TITLES.get(stack, stack)} (rows take from columns)")
    drawn, side = figure.subfigures(1, 2, squeeze=False, width_ratios=[wide, LEGEND[0]])[0]
    grid = drawn.subplots(layers, heads, squeeze=False)
    highest = max(maps.weights.max().item(), 1e-6)
    scale = PowerNorm(0.5, vmin=0, vmax=highest)  # weak patterns stay seen beside sharp ones
    named = maps.operations()
    for layer in range(layers):
        for head in range(heads):
            axes = grid[layer][head]
            image = axes.imshow(maps.weights[layer, head].numpy(), norm=scale, cmap="Blues", aspect="auto")
            named_so = "" if named[layer][head] == NONE else f": {named[layer][head]}"
            axes.set_title(f"layer {layer}, head {head}{named_so}", fontsize=LETTERS)
            _borders(axes, maps.memory_queries, maps.memory_keys)
            _ticks(axes, maps, cell * 72, left=head == 0, below=layer == layers - 1)
    _legend(side, maps, image, high)
    figure.savefig(path, dpi=110)


def draw_summary(stacks: dict[str, StackMaps], path: str | Path) -> None:
    """Draws bars of what is written, processed and read in each layer, with the name of its strongest operation."""
    from matplotlib.figure import Figure

    summary = {name: maps.summary() for name, maps in stacks.items()}
    widths = [max(4.0 if len(summary) > 1 else 2.6, 0.9 + 0.75 * len(rows)) for rows in summary.values()]
    wide = max(sum(widths) + 0.6, 4.5)
    beside = wide >= 8  # inches, in which the legend is one line
    figure = Figure(figsize=(wide, 3.8 if beside else 4.3), layout="constrained")
    panels = figure.subplots(1, len(summary), squeeze=False, sharey=True, width_ratios=widths)[0]
    for axes, (stack, rows) in zip(panels, summary.items(), strict=True):
        kinds = [kind for kind in COLOURS if rows[0][kind] is not None]
        thick = 0.8 / len(COLOURS)
        for number, kind in enumerate(kinds):
            places = [row["layer"] + (number - (len(kinds) - 1) / 2) * thick for row in rows]
            axes.bar(places, [row[kind] for row in rows], thick, color=COLOURS[kind], label=kind)
        for row in rows:
            highest = max(row[kind] for kind in kinds)
            named = "" if row["operation"] == NONE else row["operation"]
            axes.text(row["layer"], highest + 0.02, named, ha="center", fontsize=9, fontweight="bold")
        causal = "\n(causal: the memory cannot see the text)" if stacks[stack].blind else ""
        axes.set_title(TITLES.get(stack, stack) + causal, fontsize=10)
        axes.set(xlabel="layer", xticks=range(len(rows)), ylim=(0, 1.1), xlim=(-0.6, len(rows) - 0.4))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("share of attention, mean of heads")
    bars = {label: bar for axes in panels for bar, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    said = {
        "write": "write: memory tokens to the text",
        "process": "process: memory tokens to each other",
        "read": "read: the text to memory tokens",
    }
    handles = [bars[kind] for kind in COLOURS if kind in bars]
    labels = [said[kind] for kind in COLOURS if kind in bars]
    figure.legend(handles, labels, loc="outside lower center", ncols=3 if beside else 1, fontsize=9, frameon=False)
    figure.savefig(path, dpi=110)


def _borders(axes: Any, memory_queries: int, memory_keys: int) -> None:
    """Lines between the memory and the sequence."""
    for line, count in ((axes.axhline, memory_queries), (axes.axvline, memory_keys)):
        if count:
            line(count - 0.5, color=BORDER, linewidth=0.8)


def _ticks(axes: Any, maps: StackMaps, points: float, left: bool, below: bool) -> None:
    """The tokens beside the panels on the left and below the last ones, if a cell of so many points has room."""
    axes.tick_params(length=0, pad=1)
    size = min(points * 0.95, LETTERS)
    for axis, labels, outer, memory in (
        (axes.yaxis, maps.queries, left, maps.memory_queries),
        (axes.xaxis, maps.keys, below, maps.memory_keys),
    ):
        turn = 90 if axis is axes.xaxis else 0
        if not outer:
            axis.set_ticks([])
        elif size >= SMALLEST_LETTERS:
            shown = [_label(label) for label in labels]
            axis.set_ticks(range(len(labels)), shown, fontsize=size, rotation=turn, parse_math=False)
        else:
            middles = [(memory - 1) / 2] * bool(memory) + [(memory + len(labels) - 1) / 2]
            axis.set_ticks(middles, ["memory"] * bool(memory) + ["text"], fontsize=LETTERS, rotation=90)


def _label(text: str) -> str:
    """The text of a token in one short line."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text).strip() or repr(text)
    return shown if len(shown) <= LONGEST_LABEL else shown[: LONGEST_LABEL - 1] + "…"


def _legend(side: Any, maps: StackMaps, image: Any, high: float) -> None:
    """How the blocks are called, drawn as they lie in each panel, and the colour scale, beside `high` inches."""
    square, (wide, _) = 1.2, LEGEND
    blocks = side.add_axes([0.5 / wide, 1 - 2.0 / high, square / wide, square / high])
    blocks.set(xlim=(0, 2), ylim=(2, 0), xticks=[], yticks=[])
    for name, row, column in _places(maps):
        blocks.text(column, row, name, ha="center", va="center", fontsize=8)
    if maps.memory_queries:
        blocks.axhline(1, color=BORDER, linewidth=0.8)
        blocks.set_yticks([0.5, 1.5], ["memory", "text"], fontsize=LETTERS, rotation=90, va="center")
    if maps.memory_keys:
        blocks.axvline(1, color=BORDER, linewidth=0.8)
        blocks.set_xticks([0.5, 1.5], ["memory", "text"], fontsize=LETTERS)
    blocks.tick_params(length=0)
    blocks.set_title("the blocks", fontsize=9)
    tall = min(high - 3.0, 3.0)
    scale = side.add_axes([0.5 / wide, 1 - (2.6 + tall) / high, 0.2 / wide, tall / high])
    bar = side.colorbar(image, cax=scale)
    bar.set_label("attention weight", fontsize=8)
    bar.ax.tick_params(labelsize=LETTERS)


def _places(maps: StackMaps) -> Sequence[tuple[str, float, float]]:
    """Name, row and column of each block in a square of two by two."""
    if maps.memory_queries:
        return [("process", 0.5, 0.5), ("write", 0.5, 1.5), ("read", 1.5, 0.5), ("update", 1.5, 1.5)]
    if maps.memory_keys:
        return [("read", 1, 0.5), ("source", 1, 1.5)]
    return [("update", 1, 1)]
