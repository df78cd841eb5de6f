"""Show what a model does with its memory tokens: what it writes to them, processes in them and reads from them.

The attention of every layer and head is read as section 3.2 of Memory Transformer (arXiv 2006.11527) does it by eye:
memory tokens that attend to the text write, those that attend to memory tokens process (store: to themselves, fusion:
to their neighbours, copy: to another block of the memory), text that attends to memory tokens reads. --out draws it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mnemic.files import made_folder

if TYPE_CHECKING:
    from mnemic.analysis.attention import AttentionMaps

EXAMPLE = """  mnemic attention runs/a "The treaty was signed in a tent."
  mnemic attention runs/a letter.txt --out letter-maps
  mnemic attention runs/de-en "Der Vertrag wurde unterschrieben." --target "The treaty was signed." --json"""
SHARES = ("write", "process", "read")


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options."""
    parser.add_argument("model", help="the folder of a run or of a saved model with memory tokens")
    parser.add_argument("text", help="a text, or a file of UTF-8 text; of a model that translates: the source")
    parser.add_argument(
        "--target", help="what the decoder reads of a model that translates, text or file; unset: what it writes itself"
    )
    parser.add_argument(
        "--out", metavar="FOLDER", help="draw the maps of each stack, and what is written, processed and read, here"
    )
    parser.add_argument("--json", action="store_true", help="print the figures, also of single heads, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Reads the text and prints what each layer does with the memory."""
    from mnemic.analysis.attention import attention_maps
    from mnemic.cli.loading import load_model, text_or_file

    folder = made_folder(arguments.out) if arguments.out else None
    text = text_or_file(arguments.text)
    target = None if arguments.target is None else text_or_file(arguments.target)
    model, tokenizer = load_model(arguments.model)
    maps = attention_maps(model, tokenizer, text, target)
    if folder:
        draw(maps, folder)
    print(json.dumps(figures(maps)) if arguments.json else in_words(maps))
    return 0


def draw(maps: AttentionMaps, folder: Path) -> None:
    """Draws the maps of each stack and the summary into a folder."""
    for stack in maps.stacks:
        maps.plot(folder / f"{stack}.png", stack=stack)
        print(f"drawn: {folder / f'{stack}.png'}", file=sys.stderr)
    maps.plot_summary(folder / "summary.png")
    print(f"drawn: {folder / 'summary.png'}", file=sys.stderr)


def figures(maps: AttentionMaps) -> dict[str, Any]:
    """The figures of each stack that sees the memory: tokens, layers, and each measure by layer and head."""
    summary = maps.summary()
    stacks = {
        name: {
            "queries": list(stack.queries),
            "keys": list(stack.keys),
            "memory_queries": stack.memory_queries,
            "memory_keys": stack.memory_keys,
            "causal": stack.causal,
            "behind": stack.behind,
            "layers": summary[name],
            "heads": {measure: value.tolist() for measure, value in stack.measures.items()},
            "operations": stack.operations(),
        }
        for name, stack in maps.with_memory.items()
    }
    return {"stacks": stacks, "notes": maps.notes()}


def in_words(maps: AttentionMaps) -> str:
    """A table by layer for each stack, and what its columns mean."""
    lines = []
    for name, rows in maps.summary().items():
        stack = maps[name]
        text = (len(stack.queries) - stack.memory_queries, len(stack.keys) - stack.memory_keys)
        attend = "1 token that attends" if text[0] == 1 else f"{text[0]} tokens that attend"
        lines.append(f"{name}: {attend} to {text[1]} and to {stack.memory_keys} memory tokens")
        lines.append(f"{'layer':>7}{'write':>9}{'process':>9}{'read':>9}   strongest, and how strong each operation is")
        possible = rows[0]["operations"] if stack.memory_queries else ["read"]
        for row in rows:
            shares = "".join(f"{'-' if row[kind] is None else f'{row[kind]:.0%}':>9}" for kind in SHARES)
            strong = "  ".join(f"{kind} {row['operations'][kind]:.2f}" for kind in possible)
            lines.append(f"{row['layer']:>7}{shares}   {row['operation']:8}{strong}")
        lines.append("")
    lines += [
        "write, process: how much memory tokens attend to the text and to each other; read: how much the others attend",
        "to the memory. The strength of an operation goes from 0 to 1, and is 0 where attention is even, or alike in",
        "most rows.",
    ]
    return "\n".join([*lines, *maps.notes()])
