"""Table 8: what was retrieved for the tokens that gained most from a larger memory."""

from pathlib import Path
from typing import Any

from memorizing.traced import Shown

MOST = 12


def measure(trace: Any) -> dict[str, Any]:
    """The tokens that gained most, with what was retrieved for them."""
    return {"best": trace.best(MOST)}


def show(folder: Path, size: str, results: dict[str, Any]) -> str:
    """The table, one retrieved text for each token."""
    lines = ["| token | before it | target | gain | retrieved at | retrieved text |", "|---|---|---|---|---|---|"]
    for row in results["best"]:
        far = next((one for one in row["retrieved"] if one["distance"] > results["smaller"]), None)
        one = far or (row["retrieved"] or [{"position": "", "text": ""}])[0]
        cells = [row["token"], row["query"], row["target"], f"{row['gain']:.2f}", one["position"], one["text"]]
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    known = f"Size: {size}. Seed: {results['seed']}. Commit: {(results['commit'] or 'unknown')[:10]}."
    return "\n".join([*lines, "", f"`{results['document']}`, {results['tokens']:,} tokens. {known}"])


def _cell(value: object) -> str:
    text = " ".join(str(value).split()).replace("|", "\\|")
    return f"`{text}`" if isinstance(value, str) and text else text


ROW = Shown(measure, show)
main, table = ROW.main, ROW.table
