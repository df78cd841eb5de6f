"""The state that lives outside of variables: random generators, and which modules are in training mode."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The states of Python's, NumPy's and torch's global generators, as tensors and as plain values."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()  # of the one device that this process uses
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    numpy_state = {**numpy_state, "state": {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}}
    return tensors, {"python": [version, list(words), gauss], "numpy": numpy_state}


def set_random_state(tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """The inverse of `random_state`."""
    version, words, gauss = values["python"]
    random.setstate((version, tuple(words), gauss))
    numpy_state = values["numpy"]
    key = np.array(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy_state, "state": {**numpy_state["state"], "key": key}})
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


@contextlib.contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Puts a model into training or evaluation mode, and each of its modules back into its own at the end."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was in before:
            module.training = was


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """For evaluation: no gradients, evaluation mode, and afterwards modes and random generators as before.

    Not inference mode: what a model caches in it (rotary tables) could not be used in training afterwards.
    """
    before = random_state()
    try:
        with torch.no_grad(), mode(model, training=False):
            yield
    finally:
        set_random_state(*before)
