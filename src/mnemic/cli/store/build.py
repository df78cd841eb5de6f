"""Encode a corpus into a store, one row for each token; stopped or killed, the same command goes on.

Each row is a key (what enters a layer of the model at that position), the token that follows, and a reference to the
document and position. Documents never see each other. The store remembers its model, tokenizer and text, and refuses
to be used with others.

A sequence-to-sequence model reads a parallel corpus: the rows are the tokens of the targets, each with the key of its
source and of what precedes it in the target (kNN-MT).

With --keys codes the keys are not kept: a row takes a fraction of the space, but only about half of the true nearest
rows are found (a recall at 32 of 0.5 to 0.6 on keys of real models; `mnemic store info` shows that of a store).
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from mnemic.cli.options import add_config_options, add_memory_option, given, read_memory
from mnemic.cli.store.opening import add_store, bytes_in_words, counted, named_model
from mnemic.errors import UsageError

EXAMPLE = """  mnemic store build python.store stdlib --model runs/a
  mnemic store build wiki.store wikitext-103 --model gpt2 --metric cosine --tokens wiki.tokens
  mnemic store build small.store books/ --model runs/a --max-probability 0.9     leaves out what the model knows
  mnemic store build codes.store books/ --model gpt2 --keys codes                far smaller, far less exact
  mnemic store build book.store book.txt --model gpt2 --split all --layer attention --memory attention.as_context
  mnemic store build pairs.store multi30k --model runs/mt --metric ip            with a model that translates"""


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options."""
    from mnemic.stores.build_config import BuildConfig
    from mnemic.stores.config import StoreConfig

    add_store(parser)
    parser.add_argument(
        "corpus",
        help="a text file, a folder, a .jsonl file, hf:<dataset>, or a name; for a model that translates, a folder "
        "with files such as train.de and train.en",
    )
    parser.add_argument("--model", metavar="NAME", required=True, help="the folder of a run or model, or a hub's name")
    add_memory_option(parser)
    parser.add_argument("--corpus-path", metavar="PATH", help="where a corpus with a name lies on this machine")
    kept = set(StoreConfig.types())
    add_config_options(parser, BuildConfig, "what becomes a row", skip=kept)
    own = set(BuildConfig.types()) - kept
    add_config_options(parser, BuildConfig, "how rows are kept and found", skip={*own, "dim", "origin"})
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Builds, and prints what the store holds."""
    from mnemic.stores.build import Build
    from mnemic.stores.build_config import BuildConfig

    if arguments.store.startswith("ram:"):
        raise UsageError("a store in memory is gone when the command ends: give a folder, or milvus://host:19530/name")
    config = BuildConfig.from_dict(given(arguments, BuildConfig))
    for text in arguments.memory:
        read_memory(text)  # a mistake is told before anything is loaded
    from mnemic.cli.loading import give_memories
    from mnemic.data import open_corpus

    corpus: Any = arguments.corpus
    if arguments.corpus_path:
        corpus = open_corpus(arguments.corpus, arguments.corpus_path)
    model, tokenizer, name = named_model(arguments.model)
    give_memories(model, arguments.memory)
    config.origin = {"model": name}
    build = Build(model, tokenizer, corpus, arguments.store, config)
    with build.run():
        report = build.report
    print(json.dumps(report) if arguments.json else in_words(report))
    return 0


def in_words(report: dict[str, Any]) -> str:
    """The report in sentences."""
    lines = [
        f"{report['store']}: {counted(report['rows'], 'row')} of {counted(report['documents'], 'document')}, "
        f"{bytes_in_words(report['bytes'])}"
    ]
    if report["encoded_now"]:
        speed = report["encoded_now"] / max(report["seconds"], 1e-9)
        lines.append(f"{report['encoded_now']:,} tokens in {report['seconds']:.1f} s, {speed:,.0f} a second")
    if "dropped" in report:
        share = report["dropped"] / report["tokens"]
        lines.append(
            f"left out: {report['dropped']:,} rows ({share:.0%}), about {bytes_in_words(report['bytes_saved'])}"
        )
        if report["dropped_loss"] is not None:
            lines[-1] += f"; without them the model pays {report['dropped_loss']:.3f} nats for each of their tokens"
    return "\n".join(lines)
