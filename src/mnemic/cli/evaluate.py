"""Measure a model on a corpus or a task: perplexity with each token scored exactly once, or the task's own figures."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from mnemic.cli.options import add_config_options, add_memory_option, given, read_memory, write_memory
from mnemic.data.documents import SPLIT_WORDS
from mnemic.errors import UsageError
from mnemic.evaluate.config import EvaluateConfig

EXAMPLE = """  mnemic evaluate runs/a stdlib
  mnemic evaluate runs/a book.txt --split test --json
  mnemic evaluate runs/cola glue/cola
  mnemic evaluate runs/a docs/ --memory output:external=docs.store,weight=0.25
  mnemic evaluate runs/a docs/ --split test --memory output:long=4096,external=docs.store --tune --save tuned"""


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options."""
    parser.add_argument("model", help="the folder of a run or of a saved model, or a name on the hub")
    parser.add_argument("corpus", help="a text file, a folder, a .jsonl file, hf:<dataset>, or a name, also of a task")
    parser.add_argument("--corpus-path", metavar="PATH", help="where a corpus with a name lies on this machine")
    add_memory_option(parser)
    parser.add_argument(
        "--tune",
        action="store_true",
        help="first find the best temperatures, weights, k and long-term size of the output memory on the valid split, "
        "from one reading of it; `long` and `k` are the most that is tried",
    )
    parser.add_argument("--save", metavar="FOLDER", help="with --tune: keep the model with the memory that was found")
    add_config_options(parser, EvaluateConfig, "how")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the figures."""
    config = EvaluateConfig.from_dict(given(arguments, EvaluateConfig))
    if arguments.save and not arguments.tune:
        raise UsageError("--save keeps the memory that --tune finds: give both")
    if arguments.save and Path(arguments.save).exists():
        raise UsageError(f"{arguments.save} exists already: choose a new folder")
    from mnemic.cli.loading import give_memories, load_model
    from mnemic.data import open_corpus
    from mnemic.evaluate import evaluate

    corpus = open_corpus(arguments.corpus, arguments.corpus_path)
    for text in arguments.memory:
        read_memory(text)  # a mistake is told before anything is loaded
    model, tokenizer = load_model(arguments.model)
    give_memories(model, arguments.memory, config.seed)
    tuned = tuned_on_valid(model, tokenizer, corpus, config) if arguments.tune else {}
    if arguments.save:
        model.save_pretrained(arguments.save)
        tokenizer.save_pretrained(arguments.save)
    result = evaluate(model, tokenizer, corpus, config) | tuned
    if arguments.json:
        print(json.dumps(result))
    else:
        shown = in_words({name: value for name, value in result.items() if name != "versions"})
        width = max(map(len, shown))
        print("\n".join(f"{name:{width}}  {value}" for name, value in shown.items()))
    return 0


def tuned_on_valid(model: Any, tokenizer: Any, corpus: Any, config: EvaluateConfig) -> dict[str, Any]:
    """Finds the best settings of the output memory and puts them in its place; what was found."""
    from mnemic.evaluate.tuning import tune

    tuned = tune(model, tokenizer, corpus, dataclasses.replace(config, split="valid"))
    tuned.put_into(model)
    written = write_memory("output", tuned.memory)
    said = [f"found on valid, of {tuned.tried:,} settings: --memory {shlex.quote(written)}"]
    said.append(f"perplexity there {tuned.perplexity:.6g}, before {tuned.before:.6g}, model alone {tuned.plain:.6g}")
    if tuned.gate is not None:
        said.append("its gate has learned from the valid split: --save keeps it with the model, for generate")
    if tuned.at_the_edge:
        said.append(f"at the end of what was tried: {', '.join(tuned.at_the_edge)}")
    if SPLIT_WORDS.get(config.split) == "valid":
        said.append("the figures below are of the text that the settings were chosen on; --split test has another")
    print("\n".join(said), file=sys.stderr)
    return {"tuned": written, "valid_perplexity": tuned.perplexity, "valid_perplexity_plain": tuned.plain}


def in_words(result: dict[str, Any]) -> dict[str, str]:
    """Names and figures to show; those of a metric with several are named after it."""
    shown: dict[str, str] = {}
    for name, value in result.items():
        name = str(name).replace("_", " ")
        if isinstance(value, dict):
            shown |= {f"{name} {inner}": text for inner, text in in_words(value).items()}
        elif isinstance(value, int | float | str):
            shown[name] = _text(value)
    return shown


def _text(value: float | int | str) -> str:
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
