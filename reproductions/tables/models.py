"""The models of the tables: each is trained once for all tables, and tested with several memories.

runs/tokenizer-<settings>/
runs/<a pretrained model>/
runs/drilled-<settings>-seed<seed>/
runs/<name>-<settings>-seed<seed>/
    model/  report.json  ...     the run of `mnemic.train`
    stores/<text>-<metric>-<settings>/
    kept/<settings>.json         what was tuned and measured
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tables.drill import Drill, drilled
from tables.pretrained import ENCODERS, PRETRAINED, unpacked
from tables.settings import Settings, identity
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

import mnemic
from mnemic.augment import AugmentedModel, augment
from mnemic.cli.loading import load_model, new_model, read_new_model
from mnemic.data import load_tokenizer, train_tokenizer
from mnemic.errors import UsageError
from mnemic.files import lock, new_folder, write_text
from mnemic.models.positions import sinusoids
from mnemic.models.presets import PRESETS
from mnemic.train import train
from mnemic.train.report import commit
from mnemic.train.terminal import no_other_bars

THEIRS, MASKED = "transformers:", "masked:"
# Settings that came after names were given, and what they were before
LATER = {"values_rate": 10.0, "stride": 128, "segments": 1}
HOW_OFTEN = ("out", "resume", "checkpoint_every", "keep", "log_every", "trackers")  # changes nothing in a model


@dataclass(frozen=True)
class Trained:
    """A way to train: with which memory, on which batches, and from where."""

    name: str
    batching: str = "shuffled"
    memory: dict[str, Any] = field(default_factory=dict)  # of OutputMemory; empty: none
    attention: dict[str, Any] = field(default_factory=dict)  # of KNNAttention, `size` by its name; empty: none
    product_keys: dict[str, Any] = field(default_factory=dict)  # of ProductKeys, beside the settings' own; empty: none
    tokens: dict[str, Any] = field(default_factory=dict)  # of MemoryTokens; empty: none
    start: Trained | None = None  # the model that training goes on from, with [finetune] in place of [train]

    def changed(self, batching: str | None = None, **memory: Any) -> Trained:
        """The same with a few changes."""
        return replace(self, batching=batching or self.batching, memory=self.memory | memory)


PLAIN = Trained("plain")
LOCAL = Trained("local", memory={"training": "local"})
LONG = Trained("long", "consecutive", {"training": "consecutive"})
PREVIOUS = Trained("previous", "documents", {"training": "previous"})
EXT = Trained("ext", "similar", {"training": "batch"})


def unusual(memory: Any) -> dict[str, Any]:
    """The settings of a memory that are not as usual, so that a new one leaves the names of models as they are."""
    if memory is None:
        return {}
    usual = type(memory)().to_dict()
    return {name: value for name, value in memory.to_dict().items() if value != usual[name]}


def described(text: Any) -> dict[str, Any]:
    """A text's settings, without those that came after names were given and are as before."""
    return {name: value for name, value in text.to_dict().items() if name != "besides" or value}


def alone(folder: Path) -> AbstractContextManager[None]:
    """What several processes may want to make, one makes, and the others wait for."""
    return lock(folder.with_name(f".{folder.name}.lock"), str(folder), wait=True)


class Model:
    """One trained model, by its settings and seed, in its folder below `runs`; `train` makes it if it is not there."""

    def __init__(self, trained: Trained, settings: Settings, seed: int, runs: Path) -> None:
        self.trained, self.settings, self.seed, self.runs = trained, settings, seed, runs
        self.start = None if trained.start is None else Model(trained.start, settings, seed, runs)
        changes = settings.train if self.start is None else settings.train | settings.finetune
        options = {"batching": trained.batching, **changes, "seed": seed, "resume": True}
        if options["batching"] == "consecutive":
            options["consecutive"] = settings.consecutive
        config = mnemic.TrainConfig(**options)
        usual = {"local_dropout": settings.local_dropout} if trained.memory.get("training") == "batch" else {}
        self.memory: Any = mnemic.OutputMemory(**usual | trained.memory) if trained.memory else None
        if trained.attention:
            size = settings.memory[trained.attention["size"]]
            self.memory = mnemic.KNNAttention(**{**trained.attention, "size": size})
        if trained.product_keys:
            self.memory = mnemic.ProductKeys(**settings.product_keys | trained.product_keys)
        if trained.tokens:
            self.memory = mnemic.MemoryTokens(**trained.tokens)
        vocabulary = [described(settings.text("home")), settings.tokenizer, settings.vocab_size]
        self.tokenizer_folder = runs / f"tokenizer-{identity(vocabulary)}"
        steps = {
            name: value
            for name, value in config.to_dict().items()
            if name not in HOW_OFTEN and LATER.get(name, ...) != value
        }
        learned = unusual(self.memory) | trained.tokens
        from_where = [] if self.start is None else [self.start.identity]
        more = [part for part in (settings.drill, settings.sinusoids) if part]
        self.identity = identity(
            vocabulary, settings.model, settings.model_settings, steps, learned, *from_where, *more
        )
        self.folder = runs / f"{trained.name}-{self.identity}-seed{seed}"
        self.config = replace(config, out=str(self.folder))

    def train(self) -> dict[str, Any]:
        """Trains the model, or goes on with it, unless that is done; its report."""
        with alone(self.folder):
            if (self.folder / "model").is_dir():
                report: dict[str, Any] = json.loads((self.folder / "report.json").read_text(encoding="utf-8"))
                return report
            model = self.begun()
            if self.pretrained and self.start is None:
                return self.keep_as_it_is(model)
            corpus = self.settings.text("home").open()
            return dict(train(model, self.tokenizer, corpus, self.config).report)

    @property
    def pretrained(self) -> bool:
        """Whether others have trained the model."""
        return self.settings.model.startswith(PRETRAINED)

    @property
    def masked(self) -> bool:
        """Whether the model guesses hidden tokens."""
        kind, _, name = self.settings.model.partition(":")
        encoders = {"preset": [one for one in PRESETS if "bert" in one], "pretrained": ENCODERS}
        return self.settings.model.startswith(MASKED) or name.partition(",")[0] in encoders.get(kind, ())

    def keep_as_it_is(self, model: Any) -> dict[str, Any]:
        """Saves a pretrained model as a run of no steps; its report."""
        parameters = sum(weight.numel() for weight in model.parameters())
        report = {"step": 0, "tokens": 0, "seconds": 0.0, "tokens_per_second": 0.0, "commit": commit()}
        report |= {"losses": [{"loss": None}], "parameters": {"all": parameters}}
        with new_folder(self.folder) as made:
            model.save_pretrained(made / "model")
            self.tokenizer.save_pretrained(made / "model")
            write_text(made / "report.json", json.dumps(report) + "\n")
        return report

    def begun(self) -> Any:
        """The model before it is trained: new, or another one that has been trained."""
        if self.start is not None:
            self.start.train()
            model = self.start.load()
        else:
            torch.manual_seed(self.seed)
            model = self.new()
        if isinstance(model, AugmentedModel):  # it has learned to use its memory, which is enlarged
            torch.manual_seed(self.seed)
            grown = {"count": self.memory.count} if self.trained.tokens else {"size": self.memory.size}
            model.memory.change(self.memory.memory(), **grown)
        elif self.memory is not None:
            augment(model, self.memory)
        if self.start is None and self.settings.drill and not self.pretrained:
            self.drill(model)
        return model

    def new(self) -> Any:
        """A new model: one of ours, or of an architecture of transformers, as transformers:gpt2; or one from others."""
        name, settings = self.settings.model, self.settings.model_settings
        if self.pretrained:
            return load_model(str(self.unpacked()))[0]
        if name.startswith(MASKED):
            special = {"vocab_size": len(self.tokenizer), "pad_token_id": self.tokenizer.pad_token_id}
            config = AutoConfig.for_model(name.removeprefix(MASKED), **settings | special)
            return AutoModelForMaskedLM.from_config(config)
        if name.startswith(THEIRS):
            special = {token: getattr(self.tokenizer, token) for token in ("bos_token_id", "eos_token_id")}
            size = {"vocab_size": len(self.tokenizer)}
            config = AutoConfig.for_model(name.removeprefix(THEIRS), **settings, **size, **special)
            model = AutoModelForCausalLM.from_config(config)
            if amplitude := self.settings.sinusoids:  # by which a head can look at the token before from the start
                table = model.base_model.wpe.weight.data
                table.copy_(amplitude * sinusoids(torch.arange(len(table)), table.shape[1], table.dtype))
            return model
        if (new := read_new_model(name)) is None:
            raise UsageError(f"model = {name!r}: expected a new one, as preset:small, decoder or {THEIRS}gpt2")
        kind, usual = new
        return new_model(self.tokenizer, kind, usual | settings)

    def drill(self, model: Any) -> None:
        """Teaches a new model to look back, or takes the weights of one that differs only in what it may keep."""
        learned = {} if self.memory is None else unusual(self.memory) | {"size": 0}
        shape = self.settings.model_settings | {"xl_length": 0}
        more = [self.settings.sinusoids] if self.settings.sinusoids else []
        name = identity(len(self.tokenizer), self.settings.model, shape, learned, self.settings.drill, *more)
        folder = self.runs / f"drilled-{name}-seed{self.seed}"
        with alone(folder):
            drilled(model, Drill(**self.settings.drill), self.seed, folder)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, trained on the home text, which all models of that text share."""
        if self.pretrained:
            return load_tokenizer(self.unpacked())
        with alone(self.tokenizer_folder):
            if not self.tokenizer_folder.is_dir():
                settings = self.settings
                documents = settings.text("home").open().documents("train")
                tokenizer = train_tokenizer(documents, settings.tokenizer, settings.vocab_size)
                with new_folder(self.tokenizer_folder) as folder:
                    tokenizer.save_pretrained(folder)
        return load_tokenizer(self.tokenizer_folder)

    def unpacked(self) -> Path:
        """The folder of the pretrained model."""
        name = self.settings.model.removeprefix(PRETRAINED)
        with alone(self.runs / name):
            return unpacked(name, self.runs / name)

    def load(self) -> Any:
        """The trained model; an output memory is taken out, for others are put in to test it."""
        with no_other_bars():
            model, _ = load_model(str(self.folder))
        return model.memory.detach() if self.trained.memory else model

    def store(self, model: Any, text: str, metric: str) -> Any:
        """A store of the text `home` or `other`, built if it is not there; open."""
        settings = {"metric": metric, **self.settings.store}
        source = self.settings.text(text)
        name = f"{text}-{metric}-{identity(settings, described(source))}"
        path = self.folder / "stores" / name
        return mnemic.build_store(model, self.tokenizer, source.open(), path, mnemic.BuildConfig(**settings))

    def kept(self, what: list[Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was found with these settings before, or is made now and kept."""
        path = self.folder / "kept" / f"{identity(what)}.json"
        if not path.exists():
            write_text(path, json.dumps(make() | {"commit": commit()}, indent=2) + "\n")
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
