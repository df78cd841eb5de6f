"""Models by folder or name, and new ones of our own, for the verbs that use one."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from mnemic.cli.options import read_memory_settings, read_settings
from mnemic.errors import DamagedError, UsageError, unknown_name

NEW_MODELS = ("decoder", "encoder-decoder", "sru", "preset")


def load_model(name: str) -> tuple[Any, Any]:
    """The model and the tokenizer in a folder (a run's, or one that save_pretrained wrote) or of a name on the hub."""
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    import mnemic.models  # noqa: F401 (makes our architectures known to transformers)
    from mnemic.augment import load
    from mnemic.data import load_tokenizer
    from mnemic.saving import RECORD

    folder = model_folder(name)
    if folder is not None and (folder / RECORD).exists():
        return load(folder), load_tokenizer(str(folder))
    source = name if folder is None else str(folder)
    try:
        config = AutoConfig.from_pretrained(source)
        usual = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = (head_of(config) or usual).from_pretrained(source)
    except (OSError, ValueError) as error:
        where = "the hub or its cache" if folder is None else "the folder"
        raise UsageError(
            f"no model {name!r} could be loaded from {where} ({str(error).splitlines()[0]}): "
            "give the folder of a run, a saved model, or a name on the hub"
        ) from error
    except SafetensorError as error:
        raise DamagedError(f"the weights of the model {name} are damaged ({error}): get or save it again") from error
    return model, load_tokenizer(source)


def head_of(config: Any) -> Any:
    """The class that loads a model with the head its config names, if that is not one that writes text."""
    import transformers

    heads = {
        "ForMaskedLM": transformers.AutoModelForMaskedLM,
        "ForSequenceClassification": transformers.AutoModelForSequenceClassification,
        "ForQuestionAnswering": transformers.AutoModelForQuestionAnswering,
    }
    name = (config.architectures or [""])[0]
    return next((loader for head, loader in heads.items() if name.endswith(head)), None)


def load_for_task(name: str, task: Any) -> tuple[Any, Any]:
    """The encoder in a folder or of a name on the hub, with the head that a task needs, and its tokenizer."""
    from mnemic.data import load_tokenizer
    from mnemic.hf.heads import with_head

    folder = model_folder(name)
    source = name if folder is None else str(folder)
    return with_head(source, task), load_tokenizer(source)


def give_memories(model: Any, texts: list[str], seed: int = 0) -> None:
    """Puts the memories into a model that stood after --memory; one that is there and has learned is changed.

    seed: of what begins at random in them.
    """
    import torch

    from mnemic.augment import augment

    torch.manual_seed(seed)
    handles = model.memory.handles if hasattr(model, "memory") else {}
    new = []
    for text in texts:
        config, settings = read_memory_settings(text)
        handle = handles.get(config.memory())
        if handle is not None and any(True for _ in handle.parameters()):
            model.memory.change(config.memory(), **settings)
        else:
            new.append(config(**settings))
    if new:
        augment(model, *new)


def read_text(path: str) -> str:
    """The text in a file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{path} cannot be read ({error}): give a file of UTF-8 text") from None


def text_or_file(text: str) -> str:
    """The text in the file of that name, if there is one; otherwise what was given is the text."""
    return read_text(text) if os.path.isfile(text) else text  # Path.is_file() fails if the text is too long for a name


def model_folder(name: str) -> Path | None:
    """The folder that holds the model `name`, or None if it must be a name on the hub."""
    folder = Path(name)
    if (folder / "model").is_dir() and not (folder / "config.json").exists():
        return folder / "model"  # the folder of a run
    if folder.is_dir():
        return folder
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UsageError(
            f"there is no model folder {name}: give the folder of a run, a saved model, or a name on the hub"
        )
    return None


def read_new_model(text: str) -> tuple[Any, dict[str, Any]] | None:
    """The config class and the settings, found to make sense, of the new model that `text` asks for.

    It is decoder, encoder-decoder, sru or preset:<name>, and after them settings as in decoder:hidden_size=128. None if
    `text` names a model that there is already.
    """
    kind, _, written = text.partition(":")
    if kind not in NEW_MODELS:
        return None
    from mnemic import models
    from mnemic.models.presets import PRESETS

    settings: dict[str, Any] = {}
    if kind == "preset":
        name, _, written = written.partition(",")
        if name not in PRESETS:
            raise unknown_name("preset", name, PRESETS)
        config, settings = PRESETS[name]
    else:
        config = {
            "decoder": models.MnemicDecoderConfig,
            "encoder-decoder": models.MnemicEncoderDecoderConfig,
            "sru": models.MnemicSRUConfig,
        }[kind]
    settings = settings | read_settings("--model", kind, written, settings_of(config))
    config(**{**settings, "vocab_size": sys.maxsize})  # whatever the vocabulary will be
    return config, settings


def new_model(tokenizer: Any, config: Any, settings: dict[str, Any]) -> Any:
    """A new model of ours for the vocabulary of `tokenizer`; `settings` are those of the class `config`."""
    from transformers import AutoModelForMaskedLM

    from mnemic import models

    if not hasattr(config, "help"):  # of transformers: BERT and its kin
        special = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
        return AutoModelForMaskedLM.from_config(config(**{**settings, **special}))
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if config is models.MnemicEncoderDecoderConfig:
        special["decoder_start_token_id"] = tokenizer.eos_token_id
    made = config(**{**settings, "vocab_size": len(tokenizer), **special})
    kinds = {
        models.MnemicDecoderConfig: models.MnemicDecoderForCausalLM,
        models.MnemicSRUConfig: models.MnemicSRUForCausalLM,
        models.MnemicEncoderDecoderConfig: models.MnemicEncoderDecoderForConditionalGeneration,
    }
    return kinds[config](made)


def new_decoder(tokenizer: Any, **settings: Any) -> Any:
    """A new decoder of ours for the vocabulary of `tokenizer`; `settings` are those of MnemicDecoderConfig."""
    from mnemic.models import MnemicDecoderConfig

    return new_model(tokenizer, MnemicDecoderConfig, settings)


def settings_of(config: Any) -> dict[str, Any]:
    """The settings of a config class of ours that a user chooses, and their types; the tokenizer decides the others."""
    kinds = {field.name: field.type for field in dataclasses.fields(config)}
    decided = ("vocab_size", "is_encoder_decoder")
    named = config.help() if hasattr(config, "help") else vars(config).get("__annotations__", {})
    return {name: kinds[name] for name in named if name not in decided and not name.endswith("_token_id")}


def decoder_settings() -> dict[str, Any]:
    """The settings of the decoder that a user chooses, and their types."""
    from mnemic.models import MnemicDecoderConfig

    return settings_of(MnemicDecoderConfig)
