"""Check this installation: versions, threads, memory, FAISS, and a self-check of a few seconds."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mnemic

EXAMPLE = """  mnemic doctor
  mnemic doctor --json > machine.json"""

LIBRARIES = ("torch", "transformers", "accelerate", "tokenizers", "datasets", "safetensors", "faiss-cpu", "numpy")
FAILED = "failed: "


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options."""
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints facts and checks; 1 if a check failed."""
    facts = machine()
    checks = {name: _answer(check) or "OK" for name, check in CHECKS.items()}
    failed = [name for name, answer in {**facts, **checks}.items() if str(answer).startswith(FAILED)]
    if arguments.json:
        print(json.dumps({"machine": facts, "checks": checks}, indent=2))
        return int(bool(failed))
    width = max(map(len, [*facts, *checks]))
    for name, value in [*facts.items(), *checks.items()]:
        print(f"{name:{width}}  {value}")
    print(f"\n{'all well' if not failed else 'failed: ' + ', '.join(failed)}")
    return int(bool(failed))


def machine() -> dict[str, Any]:
    """What is installed and what the machine has."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "mnemic": mnemic.__version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        **{name: _version(name) for name in LIBRARIES},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": f"{memory:.1f} GiB",
        **{name: _answer(fact) for name, fact in FACTS.items()},
    }


def torch_threads() -> int:
    """How many threads torch uses."""
    import torch

    return torch.get_num_threads()


def gpu() -> str:
    """The GPU, if there is one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def faiss_build() -> str:
    """How FAISS was built, and how many threads it uses."""
    import faiss

    return f"{faiss.get_compile_options().strip()}, {faiss.omp_get_max_threads()} threads"


def hub_cache() -> str:
    """Where models and datasets of the hub are kept."""
    from huggingface_hub.constants import HF_HOME

    return f"{HF_HOME} ({'writable' if _writable(Path(HF_HOME)) else 'NOT writable: set HF_HOME'})"


FACTS: dict[str, Callable[[], Any]] = {
    "torch threads": torch_threads,
    "gpu": gpu,
    "faiss build": faiss_build,
    "hub cache": hub_cache,
}


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _writable(folder: Path) -> bool:
    """Whether a file could be written below a folder that may not exist yet; nothing is left behind."""
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _answer(question: Callable[[], Any]) -> Any:
    """What a fact or a check says; whatever goes wrong is the answer too."""
    try:
        return question()
    except Exception as error:
        if os.environ.get("MNEMIC_DEBUG"):
            traceback.print_exc(file=sys.stderr)
        return f"{FAILED}{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class CheckFailed(Exception):
    """A self-check found what must not be."""


def check_search() -> None:
    """FAISS's exact search finds what numpy finds."""
    import faiss
    import numpy as np

    rows = np.random.default_rng(0).standard_normal((500, 32), dtype=np.float32)
    queries = rows[:20] + np.float32(0.01)
    index = faiss.IndexFlatL2(32)
    index.add(rows)
    _, found = index.search(queries, 5)
    distances = ((queries[:, None].astype(np.float64) - rows[None]) ** 2).sum(-1)
    if not (found == distances.argsort(axis=1)[:, :5]).all():
        raise CheckFailed("FAISS and numpy name different neighbours")


def check_memory() -> None:
    """A small model with each memory learns, is saved and loaded, and then says and writes the same."""
    from mnemic.memories import registry

    for name in registry():
        _check_memory(registry().load(name))


def _check_memory(kind: Any) -> None:
    import torch

    from mnemic.augment import augment, load
    from mnemic.models import MnemicDecoderConfig, MnemicDecoderForCausalLM
    from mnemic.train.rows import AdamW

    torch.manual_seed(0)
    settings = MnemicDecoderConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    model = augment(MnemicDecoderForCausalLM(settings), kind.small(layers=2))
    ids = torch.arange(48).remainder(12).view(2, 24)
    optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    losses = []
    for _ in range(20):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if not losses[-1] < losses[0] / 2:
        raise CheckFailed(f"{kind.__name__}: the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")
    model.eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        again = load(folder).eval()
        if not torch.equal(model(input_ids=ids).logits, again(input_ids=ids).logits):
            raise CheckFailed(f"{kind.__name__}: the loaded model differs from the saved one")
        prompt = {"input_ids": ids[:, :6], "attention_mask": torch.ones_like(ids[:, :6]), "max_new_tokens": 8}
        written = [m.generate(**prompt, do_sample=False, pad_token_id=0) for m in (model, again)]
        if not torch.equal(*written):
            raise CheckFailed(f"{kind.__name__}: the loaded model writes another text than the saved one")


def check_files() -> None:
    """A file can be replaced and a folder locked where temporary files go."""
    from mnemic.files import lock, write_text

    with tempfile.TemporaryDirectory() as folder:
        with lock(Path(folder) / "lock", "the test folder"):
            write_text(Path(folder) / "a", "first")
            write_text(Path(folder) / "a", "second")
        if (Path(folder) / "a").read_text() != "second":
            raise CheckFailed("a replaced file has its old content")


CHECKS: dict[str, Callable[[], None]] = {
    "files: replace and lock": check_files,
    "faiss: same as numpy": check_search,
    "memory: train, save, load, generate": check_memory,
}
