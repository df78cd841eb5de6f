"""Show what an attention memory found in a text: the tokens that gained most, and what was retrieved for them."""

from __future__ import annotations

import argparse
import json
from typing import Any

from mnemic.cli.options import add_memory_option, read_memory
from mnemic.errors import UsageError
from mnemic.files import made_folder

EXAMPLE = """  mnemic trace runs/a book.txt
  mnemic trace runs/a book.txt --window 128 --smaller 2048 --plots book-plots"""
PLOTS = ("loss-delta", "distance", "shares")


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options."""
    parser.add_argument("model", help="the folder of a run or of a saved model with an attention memory")
    parser.add_argument("text", help="a file of UTF-8 text, read as one document")
    add_memory_option(parser)
    parser.add_argument("--window", type=int, default=512, help="tokens of a segment, best as in training (512)")
    parser.add_argument(
        "--smaller", type=int, default=0, metavar="PAIRS", help="the memory that is compared with; 0, as usual: none"
    )
    parser.add_argument("--most", type=int, default=10, help="how many tokens are shown (10)")
    parser.add_argument(
        "--plots", metavar="FOLDER", help="draw gains by token, distances of what was retrieved, and gates by head here"
    )
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Reads the text with both memories and prints where the larger one helped."""
    for name, least in (("window", 1), ("smaller", 0), ("most", 1)):
        if getattr(arguments, name) < least:
            raise UsageError(f"--{name} {getattr(arguments, name)}: expected {least} or more")
    for text in arguments.memory:
        read_memory(text)  # a mistake is told before anything is loaded
    from mnemic.analysis.trace import trace
    from mnemic.cli.loading import give_memories, load_model, read_text

    folder = made_folder(arguments.plots) if arguments.plots else None
    document = read_text(arguments.text)
    model, tokenizer = load_model(arguments.model)
    give_memories(model, arguments.memory)
    found = trace(model, tokenizer, document, window=arguments.window, smaller=arguments.smaller)
    tokens = max(len(found.ids) - 1, 1)
    result = {
        "tokens": len(found.ids),
        "memory": model.memory.attention.config.size,
        "smaller": arguments.smaller,
        "loss": found.losses.sum().item() / tokens,
        "loss_smaller": (found.losses + found.gains).sum().item() / tokens,
        "best": found.best(arguments.most),
    }
    if folder:
        for what in PLOTS:
            found.plot(what, folder / f"{what}.png")
    print(json.dumps(result) if arguments.json else in_words(result))
    return 0


def in_words(result: dict[str, Any]) -> str:
    """A line with the losses, and a paragraph for each token."""
    lines = [
        f"{result['tokens']:,} tokens, loss {result['loss']:.3f} with {result['memory']:,} pairs, "
        f"{result['loss_smaller']:.3f} with {result['smaller']:,}"
    ]
    for row in result["best"]:
        lines += ["", f"token {row['token']:,}, gain {row['gain']:.2f}: {_line(row['query'])} [{_line(row['target'])}]"]
        lines += [
            f"  {one['distance']:>7,} back, weight {one['weight']:.2f}: {_line(one['text'])}"
            for one in row["retrieved"]
        ]
    return "\n".join(lines)


def _line(text: str) -> str:
    return " ".join(text.split())
