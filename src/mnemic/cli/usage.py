"""Show which slots of a product-key memory a text uses: how many, how evenly, by layer and head, over checkpoints."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mnemic.cli.options import add_config_options, given
from mnemic.errors import UsageError
from mnemic.evaluate.config import EvaluateConfig
from mnemic.files import made_folder

EXAMPLE = """  mnemic usage runs/a book.txt
  mnemic usage runs/a wikitext-2 --split test --plots pictures
  mnemic usage runs/a wikitext-2 --stale            # of a run that kept several checkpoints (--keep 6)"""
COLUMNS = {"usage": "MU", "top1_usage": "top-1 MU", "kl_reads": "KL_u", "kl_weights": "KL_w"}


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options."""
    parser.add_argument("model", help="the folder of a run or of a saved model with product keys")
    parser.add_argument("corpus", help="a text file, a folder, a .jsonl file, hf:<dataset>, or a name")
    parser.add_argument("--corpus-path", metavar="PATH", help="where a corpus with a name lies on this machine")
    parser.add_argument("--stale", action="store_true", help="at which checkpoint of the run each slot was last used")
    parser.add_argument("--plots", metavar="FOLDER", help="draw how reads are spread over slots, and staleness, here")
    add_config_options(parser, EvaluateConfig, "how", skip=("metrics", "beams", "max_new_tokens"))
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Reads the text and prints the figures."""
    config = EvaluateConfig.from_dict(given(arguments, EvaluateConfig))
    from mnemic.analysis.usage import plot_staleness, plot_usage, staleness_of_run, usage
    from mnemic.cli.loading import load_model
    from mnemic.data import open_corpus

    folder = made_folder(arguments.plots) if arguments.plots else None
    corpus = open_corpus(arguments.corpus, arguments.corpus_path)
    model, tokenizer = load_model(arguments.model)
    if arguments.stale and not (Path(arguments.model) / "checkpoints").is_dir():
        raise UsageError(f"--stale: {arguments.model} is not the folder of a run, which has checkpoints")
    found = usage(model, tokenizer, corpus, config)
    result: dict[str, Any] = {
        "layers": {layer: counts.figures() | {"heads": counts.by_head()} for layer, counts in found.layers.items()}
    }
    if folder:
        plot_usage(found, folder / "usage.png")
    if arguments.stale:
        result["stale"] = staleness_of_run(model, tokenizer, corpus, arguments.model, config)
        if folder:
            plot_staleness({str(arguments.model): result["stale"]}, folder / "staleness.png")
    print(json.dumps(result) if arguments.json else in_words(result))
    return 0


def in_words(result: dict[str, Any]) -> str:
    """A table of the figures by layer and head, and one of last uses."""
    lines = [f"{'':16}" + "".join(f"{name:>10}" for name in COLUMNS.values())]
    for layer, figures in result["layers"].items():
        lines.append(_row(f"layer {layer}", figures))
        lines += [_row(f"  head {number}", head) for number, head in enumerate(figures["heads"])]
    lines += [
        "",
        "MU: share of slots that were read; top-1: that were some token's best. KL: from even use, 0 is even.",
    ]
    if "stale" in result:
        steps = ["never", *(f"step {step:,}" for step in result["stale"]["steps"])]
        for layer, slots in result["stale"]["layers"].items():
            lines += ["", f"layer {layer}: slots by the checkpoint at which they were last some token's best"]
            lines += [f"  {name:14}{count:>10,}" for name, count in zip(steps, slots, strict=True)]
    return "\n".join(lines)


def _row(name: str, figures: dict[str, float]) -> str:
    shares = [f"{figures[column]:>10.1%}" for column in ("usage", "top1_usage")]
    return f"{name:16}" + "".join([*shares, *(f"{figures[column]:>10.3f}" for column in ("kl_reads", "kl_weights"))])
