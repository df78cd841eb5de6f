"""Models by folder or name, and new decoders, for the verbs that use one."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from mnemic.errors import DamagedError, UsageError


def load_model(name: str) -> tuple[Any, Any]:
    """The model and the tokenizer in a folder (a run's, or one that save_pretrained wrote) or of a name on the hub."""
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    import mnemic.models  # noqa: F401 (makes our architectures known to transformers)
    from mnemic.augment import load
    from mnemic.data import load_tokenizer
    from mnemic.saving import RECORD

    folder = model_folder(name)
    if folder is not None and (folder / RECORD).exists():
        return load(folder), load_tokenizer(str(folder))
    source = name if folder is None else str(folder)
    try:
        classes = AutoConfig.from_pretrained(source).architectures or [""]
        kind = AutoModelForMaskedLM if classes[0].endswith("ForMaskedLM") else AutoModelForCausalLM
        model = kind.from_pretrained(source)
    except (OSError, ValueError) as error:
        where = "the hub or its cache" if folder is None else "the folder"
        raise UsageError(
            f"no model {name!r} could be loaded from {where} ({str(error).splitlines()[0]}): "
            "give the folder of a run, a saved model, or a name on the hub"
        ) from error
    except SafetensorError as error:
        raise DamagedError(f"the weights of the model {name} are damaged ({error}): get or save it again") from error
    return model, load_tokenizer(source)


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


def new_decoder(tokenizer: Any, **settings: Any) -> Any:
    """A new decoder of ours for the vocabulary of `tokenizer`; `settings` are those of MnemicDecoderConfig."""
    from mnemic.models import MnemicDecoderConfig, MnemicDecoderForCausalLM

    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return MnemicDecoderForCausalLM(MnemicDecoderConfig(vocab_size=len(tokenizer), **special, **settings))


def check_decoder(**settings: Any) -> None:
    """UsageError if there can be no decoder of these settings, whatever its vocabulary."""
    from mnemic.models import MnemicDecoderConfig

    MnemicDecoderConfig(vocab_size=sys.maxsize, **settings)


def decoder_settings() -> dict[str, Any]:
    """The settings of the decoder that a user chooses, and their types; the tokenizer decides the others."""
    from mnemic.models import MnemicDecoderConfig

    kinds = {field.name: field.type for field in dataclasses.fields(MnemicDecoderConfig)}
    decided = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    return {name: kinds[name] for name in MnemicDecoderConfig.help() if name not in decided}
