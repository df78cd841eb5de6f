"""Figure 7: the loss of each token with a small and with a large memory."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from memorizing.traced import Shown


def measure(trace: Any) -> dict[str, Any]:
    """The gain of each token."""
    return {"gains": [round(gain, 3) for gain in trace.gains.tolist()]}


def show(folder: Path, size: str, results: dict[str, Any]) -> str:
    """The picture, and in words what the paper says of its own."""
    gains, smaller = np.array(results["gains"]), results["smaller"]
    figure, axes = plt.subplots(figsize=(10, 3.2), layout="constrained")
    axes.plot(gains, linewidth=0.4)
    axes.axvline(smaller, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel="token", ylabel="gain (nats)")
    axes.set_title(f"loss with {smaller:,} pairs minus loss with {results['memory']:,}", fontsize="medium")
    figure.savefig(folder / "results" / f"{size}.png", dpi=110)
    plt.close(figure)
    later = gains[smaller:]
    largest = np.sort(later)[::-1]
    share = largest[: max(len(largest) // 20, 1)].sum() / max(later.sum(), 1e-9) if len(later) else 0.0
    gaining, losing, (known, loss) = (later > 0.05).mean(), (later < -0.05).mean(), (results["memory"], results["loss"])
    return "\n\n".join(
        [
            f"![gain of each token](results/{size}.png)",
            f"`{results['document']}`, {results['tokens']:,} tokens. Mean loss {results['loss_smaller']:.4f} with "
            f"{smaller:,} pairs and {loss:.4f} with {known:,}. Of the tokens after number {smaller:,}, {gaining:.1%} "
            f"gain more than 0.05 nats and {losing:.1%} lose more; the 5 % that gain most gain {share:.1f} times what "
            "all gain together.",
            f"Size: {size}. Seed: {results['seed']}. Commit: {(results['commit'] or 'unknown')[:10]}.",
        ]
    )


ROW = Shown(measure, show)
main, table = ROW.main, ROW.table
