"""Which parameters are trained and how; optimiser state as plain named tensors that safetensors can hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mnemic.errors import UsageError
from mnemic.hf.fingerprint import MEMORY
from mnemic.memories.product_keys.layer import ValueTable
from mnemic.train.config import OPTIMIZERS, TrainConfig
from mnemic.train.rows import Adafactor, AdamW, trimmed


def select_trainable(model: nn.Module, config: TrainConfig) -> dict[str, nn.Parameter]:
    """The parameters to train by name, each shared one once; unless `trainable="all"`, the others are frozen."""
    if config.trainable == "slots":
        tables = tables_that_learn(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in tables)
    elif config.trainable != "all":
        of_memory = {name for name, _ in model.named_parameters() if name.startswith(MEMORY)}
        if not of_memory:
            raise UsageError(
                f"trainable = {config.trainable!r}, but {type(model).__name__} has no parameters of a memory: "
                "give it one with mnemic.augment, or train with trainable = 'all'"
            )
        for name, parameter in model.named_parameters():
            if name in of_memory or config.trainable == "memory":
                parameter.requires_grad_(name in of_memory and config.trainable == "memory")
    chosen = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not chosen:
        raise UsageError(f"every parameter of {type(model).__name__} is frozen: set requires_grad on those to train")
    return chosen


def tables_that_learn(model: nn.Module) -> set[str]:
    """The names of the tables of values of which slots were chosen to learn; UsageError if none were."""
    tables = {name: part.learning for name, part in model.named_modules() if isinstance(part, ValueTable)}
    found = {f"{name}.weight" for name, learning in tables.items() if learning is not None and learning.any()}
    if not found:
        raise UsageError(
            f"trainable = 'slots', but no slots of {type(model).__name__} were chosen: choose some with "
            "model.memory.product_keys.learn_only(mnemic.choose_slots(model, tokenizer, text, background))"
        )
    return found


def make_optimizer(parameters: dict[str, nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    """The configured optimiser; vectors (norms, biases) are not decayed."""
    groups = [
        {"params": [p for p in parameters.values() if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return OPTIMIZERS.load(config.optimizer)([group for group in groups if group["params"]], config)


def adamw(groups: list[dict[str, Any]], config: TrainConfig) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay (arXiv:1711.05101)."""
    betas = (config.betas[0], config.betas[1])
    return AdamW(groups, lr=config.learning_rate, betas=betas, rows_rate=config.values_rate)


def adafactor(groups: list[dict[str, Any]], config: TrainConfig) -> torch.optim.Optimizer:
    """Adafactor (arXiv:1804.04235): steps relative to the parameters' size and never above 1 / sqrt(step).

    That bound is what rsqrt reaches after its warm-up, so with rsqrt and rate 1.0 this is Memorizing Transformers'.
    """
    return Adafactor(groups, lr=config.learning_rate, rows_rate=config.values_rate)


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """What the optimiser remembers, as "parameter/quantity" -> tensor; a parameter never updated has nothing."""
    return {
        f"{name}/{quantity}": torch.as_tensor(value)
        for name, parameter in parameters.items()
        for quantity, value in trimmed(optimizer.state.get(parameter, {})).items()
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], tensors: dict[str, Tensor]
) -> None:
    """The inverse of `optimizer_tensors`."""
    optimizer.state.clear()
    for key, value in tensors.items():
        name, _, quantity = key.rpartition("/")
        parameter = parameters[name]
        # AdamW and Adafactor keep their step counts on the CPU whatever the device of the parameter
        optimizer.state[parameter][quantity] = value if quantity == "step" else value.to(parameter.device)
