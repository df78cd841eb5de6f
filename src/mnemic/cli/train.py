"""Train a model on a corpus, with memories or without.

The model is a new decoder of ours, a folder, or a name on the Hugging Face hub. A task (`mnemic list tasks`) is learned
by a pretrained encoder, with the settings of Large Product Key Memory's Table 3 where no others are given. A run can be
stopped at any moment and continued with --resume. Its folder holds the trained model, checkpoints, the log, report.json
and the settings.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mnemic.cli.loading import give_memories, load_for_task, load_model, new_model, read_new_model
from mnemic.cli.options import add_config_options, given, read_memory
from mnemic.config import option
from mnemic.data.tasks import is_task
from mnemic.errors import UsageError
from mnemic.train.config import TrainConfig

EXAMPLE = """  mnemic train stdlib --memory tokens:count=10 --out runs/a --steps 500
  mnemic train books/ --model decoder:hidden_size=128,position=t5 --tokenizer byte --out runs/b
  mnemic train corpus.jsonl --model gpt2 --memory tokens:gated=true --trainable memory --out runs/c
  mnemic train pairs/ --model encoder-decoder:hidden_size=256 --label-smoothing 0.1 --out runs/d
  mnemic train glue/cola --model bert-base-uncased --memory tokens:count=10 --out runs/cola
  mnemic train --resume --out runs/a
  mnemic train stdlib --print-config > run.toml && mnemic train --config run.toml"""

TRAINED_HERE = ("bpe", "word", "byte")
SETTINGS = "experiment.toml"  # in the run's folder: what was asked for


@dataclass(kw_only=True)
class Experiment(TrainConfig):
    """What is trained on what, and how: all that one command says."""

    corpus: str = option(
        "",
        "a text file, a folder, a .jsonl file, hf:<dataset>, or a name from `mnemic list corpora` or `mnemic list "
        "tasks`; task:<folder> is a task of your own, with train.tsv and dev.tsv",
    )
    corpus_path: str | None = option(None, "where a corpus with a name lies on this machine, if not on the hub")
    model: str = option(
        "decoder",
        "decoder, encoder-decoder or sru, with settings as decoder:<setting>=<value>,... (see `mnemic list decoder`), "
        "preset:<name>, a folder, or a name on the hub",
    )
    memory: list[str] = option([], "a memory and its settings, as tokens:count=10 (see `mnemic list memories`)")
    tokenizer: str = option(
        "auto", "bpe, word or byte to train one, a folder, a name on the hub; auto is the model's own"
    )
    vocab_size: int | None = option(None, "size of the vocabulary of a tokenizer that is trained here; unset: as usual")
    epochs: float | None = option(
        None, "how often the examples of a task are read, instead of steps; unset: 10, squad 3"
    )

    def train_config(self) -> TrainConfig:
        """The part that the training loop takes."""
        return TrainConfig(**{name: getattr(self, name) for name in TrainConfig.types()})


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options."""
    texts = Experiment.help()
    parser.add_argument(
        "corpus", nargs="?", default=argparse.SUPPRESS, metavar="CORPUS", help=texts["corpus"]
    ).dest = "Experiment.corpus"
    what = {name for name in Experiment.types() if name not in TrainConfig.types()}
    group = add_config_options(parser, Experiment, "what", skip={*TrainConfig.types(), "corpus", "memory"})
    group.add_argument(
        "--memory",
        dest="Experiment.memory",
        action="append",
        default=argparse.SUPPRESS,
        metavar="NAME[.START][:KEY=VALUE,...]",
        help=texts["memory"] + "; may be given several times",
    )
    add_config_options(parser, Experiment, "how", skip=what)
    parser.add_argument(
        "--config", metavar="FILE", help="a .toml or .json file of these options; the command line wins"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the settings as TOML with comments, and stop"
    )
    parser.add_argument("--json", action="store_true", help="print the run's report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Trains, and prints where the model is and how it went."""
    experiment = read_experiment(arguments)
    if arguments.print_config:
        print(experiment.to_toml(), end="")
        return 0
    if not experiment.corpus:
        raise UsageError("no corpus was given: `mnemic train CORPUS ...`, for example a text file or stdlib")
    for text in experiment.memory:
        read_memory(text)  # a mistake is told before anything is loaded
    new = read_new_model(experiment.model)
    if new is not None and is_task(experiment.corpus):
        raise UsageError(f"{experiment.corpus} is a task, which a pretrained encoder learns: name one with --model")
    import torch

    from mnemic.data import open_corpus
    from mnemic.files import write_text
    from mnemic.train import train
    from mnemic.train.loop import refuse_to_overwrite
    from mnemic.train.processes import Processes

    out, processes = Path(experiment.out), Processes()
    with processes.together():
        if processes.is_main:
            refuse_to_overwrite(out, experiment.resume)
        torch.manual_seed(experiment.seed)
        corpus = open_corpus(experiment.corpus, experiment.corpus_path)
        if processes.is_main:
            keep_tokenizer(experiment, corpus, new_model=new is not None)
        processes.collect(None)  # the others find it in the run's folder
        model, tokenizer = make_model(experiment, new, corpus)
        give_memories(model, experiment.memory)
        if processes.is_main and not (out / SETTINGS).exists():
            write_text(out / SETTINGS, experiment.to_toml())  # for --resume
    done = train(model, tokenizer, corpus, experiment.train_config())
    if not processes.is_main:
        return 0
    write_text(out / SETTINGS, experiment.to_toml())  # what a resumed run may change, such as checkpoint_every
    if arguments.json:
        print(json.dumps(done.report))
    else:
        step, loss = done.losses[-1]
        print(f"step {step}, training loss {loss:.4f}, model in {out / 'model'}")
    return 0


def read_experiment(arguments: argparse.Namespace) -> Experiment:
    """The settings: the defaults, then a file's, then the command line's."""
    typed = given(arguments, Experiment)
    saved = Path(typed.get("out", Experiment().out)) / SETTINGS
    said: dict[str, Any] = {}
    if arguments.config:
        said = Experiment.read(arguments.config)
    elif typed.get("resume") and saved.exists():
        said = Experiment.read(saved)
    if "epochs" in typed:  # the steps and the warm-up of a file follow from other epochs
        said = {name: value for name, value in said.items() if name not in ("steps", "warmup")}
    said |= typed
    Experiment.from_dict(said)  # tells what is wrong with it
    experiment = Experiment.from_dict(completed(said))
    saved = Path(experiment.out) / SETTINGS
    if experiment.resume and saved.exists():
        refuse_another_experiment(experiment, Experiment.load(saved))
    return experiment


def completed(said: dict[str, Any]) -> dict[str, Any]:
    """What was said, and for a task what is usual where nothing was."""
    if not is_task(said.get("corpus", "")):
        if said.get("epochs") is not None:
            raise UsageError("--epochs is for tasks: a corpus is read for as many --steps as are given")
        return said
    from mnemic.data import open_task
    from mnemic.train.fine_tuning import fine_tuning

    task = open_task(said["corpus"], said.get("corpus_path"))
    how = {name: said[name] for name in TrainConfig.types() if name in said}
    return {**fine_tuning(task, said.get("epochs"), **how).to_dict(), **said}


def refuse_another_experiment(experiment: Experiment, started: Experiment) -> None:
    """UsageError if a run is to go on with another model, tokenizer or corpus; the training loop checks the rest."""
    different = [
        f"{name} = {getattr(experiment, name)!r} (was {getattr(started, name)!r})"
        for name in ("corpus", "model", "memory", "tokenizer", "vocab_size", "epochs")
        if getattr(experiment, name) != getattr(started, name)
    ]
    if different:
        raise UsageError(
            f"the run in {experiment.out} was started with other settings: {', '.join(different)}; leave them out, "
            "or start another run in another --out folder"
        )


def make_model(experiment: Experiment, new: tuple[Any, dict[str, Any]] | None, corpus: Any) -> tuple[Any, Any]:
    """A new model, by its config class and settings, with a tokenizer that fits; or the model named, with its own."""
    if new is not None:
        tokenizer = make_tokenizer(experiment)
        return new_model(tokenizer, *new), tokenizer
    if experiment.tokenizer != "auto":
        raise UsageError(f"--tokenizer {experiment.tokenizer}: the model {experiment.model} has its own tokenizer")
    return load_for_task(experiment.model, corpus) if is_task(experiment.corpus) else load_model(experiment.model)


def tokenizer_kind(experiment: Experiment) -> str:
    """What the tokenizer option says, with its default for a new model."""
    return "bpe" if experiment.tokenizer == "auto" else experiment.tokenizer


def keep_tokenizer(experiment: Experiment, corpus: Any, new_model: bool) -> None:
    """Trains a new model's tokenizer, if it is one that is trained, into the run's folder; not again on resume."""
    from mnemic.data import train_tokenizer
    from mnemic.files import new_folder

    kind, folder = tokenizer_kind(experiment), Path(experiment.out) / "tokenizer"
    if new_model and kind in TRAINED_HERE and not (experiment.resume and folder.exists()):
        print(f"training a {kind} tokenizer", file=sys.stderr)
        tokenizer = train_tokenizer(corpus.documents(experiment.split), kind=kind, vocab_size=experiment.vocab_size)
        with new_folder(folder) as temporary:
            tokenizer.save_pretrained(temporary)


def make_tokenizer(experiment: Experiment) -> Any:
    """The tokenizer that was asked for; one that is trained here lies in the run's folder."""
    from mnemic.data import load_tokenizer

    kind = tokenizer_kind(experiment)
    return load_tokenizer(str(Path(experiment.out) / "tokenizer") if kind in TRAINED_HERE else kind)
