"""Measure a model on a corpus: perplexity per token, word and byte, each token scored exactly once."""

from __future__ import annotations

import argparse
import json

from mnemic.cli.options import add_config_options, given, read_memory
from mnemic.evaluate.config import EvaluateConfig

EXAMPLE = """  mnemic evaluate runs/a stdlib
  mnemic evaluate runs/a book.txt --split test --json
  mnemic evaluate runs/a docs/ --memory output:external=docs.store,weight=0.25"""


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options."""
    parser.add_argument("model", help="the folder of a run or of a saved model, or a name on the hub")
    parser.add_argument("corpus", help="a text file, a folder, a .jsonl file, hf:<dataset>, or a name")
    parser.add_argument("--corpus-path", metavar="PATH", help="where a corpus with a name lies on this machine")
    parser.add_argument(
        "--memory",
        action="append",
        default=[],
        metavar="MEMORY",
        help="put this memory into the model first, as output:external=docs.store (see `mnemic list memories`); an "
        "output memory takes the place of the one that the model was trained with",
    )
    add_config_options(parser, EvaluateConfig, "how")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the figures."""
    config = EvaluateConfig.from_dict(given(arguments, EvaluateConfig))
    from mnemic.augment import augment
    from mnemic.cli.loading import load_model
    from mnemic.data import open_corpus
    from mnemic.evaluate import evaluate

    corpus = open_corpus(arguments.corpus, arguments.corpus_path)
    memories = [read_memory(text) for text in arguments.memory]
    model, tokenizer = load_model(arguments.model)
    if memories:
        augment(model, *memories)
    result = evaluate(model, tokenizer, corpus, config)
    if arguments.json:
        print(json.dumps(result))
    else:
        shown = {name: value for name, value in result.items() if isinstance(value, int | float | str)}
        width = max(map(len, shown))
        print("\n".join(f"{name.replace('_', ' '):{width}}  {_text(value)}" for name, value in shown.items()))
    return 0


def _text(value: float | int | str) -> str:
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
