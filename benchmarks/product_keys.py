"""What a product-key memory costs, beside models without one and beside the PyPI package product-key-memory.

    inference   BERT-base, with ResM, with PKM, and BERT-large: one row of 128 tokens
    forward     a layer of 512^2 slots, 4 heads, k = 32, keys of 256, values of 768: mnemic and the package
    step        the same layer: forward, backward and optimiser step, and the memory that takes
    slots       a training step of BERT-base with ResM of 65,536 and of 1,048,576 slots: cost follows what is read
    usage       a training step of BERT-base with ResM, in turns with and without counting which slots are read

The package is looked for in --peer FOLDER too. Weights are random: nothing here depends on what they have learned.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from harness import compare, table

SIZES = (128, 1024, 4096)  # tokens of a layer's forward and step: one row of 128, eight, and 32
PARTS = {
    "inference": ["bert-base", "bert-base+resm", "bert-base+pkm", "bert-large"],
    **{f"forward-{size}": ["package", "mnemic"] for size in SIZES},
    **{f"step-{size}": ["package", "mnemic"] for size in SIZES},
    "slots": ["65536", "1048576"],
    "usage": ["counted"],
}
BERT = {
    "bert-base": {},
    "bert-large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}
WIDTH, SLOTS, HEADS, K, KEY_DIM, LENGTH = 768, 512**2, 4, 32, 256, 128


def main() -> None:
    """Compares the settings of one part, or of all, or measures the one that `--setting` names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), help="default: all of them")
    parser.add_argument("--setting", help="measure only this one and print JSON")
    parser.add_argument("--rows", type=int, default=8, help="of 128 tokens, in a training step of BERT-base")
    parser.add_argument("--times", type=int, default=8, help="measured in a process, of which the fastest counts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="processes of each setting")
    parser.add_argument("--peer", default="", help="a folder with the package product-key-memory")
    options = parser.parse_args()
    if options.setting:
        print(json.dumps(measure(options)))
        return
    for part in [options.part] if options.part else PARTS:
        arguments = [f"--part={part}", *(f"--{n}={getattr(options, n)}" for n in ("rows", "times", "threads", "peer"))]
        print(table(compare(__file__, PARTS[part], arguments, options.repeats, f"product-keys-{part}")))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The seconds of one setting, and what else is known of it."""
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    part, _, size = options.part.partition("-")
    if part == "inference":
        return inference(options)
    if part in ("slots", "usage"):
        return training_step(options)
    return layer(options, int(size), part == "step")


def fastest(do: Callable[[], Any], times: int) -> list[float]:
    """The seconds of each time, after two that do not count."""
    seconds = []
    for _ in range(times + 2):
        began = time.perf_counter()
        do()
        seconds.append(time.perf_counter() - began)
    return seconds[2:]


def bert(name: str) -> Any:
    """A random BERT for classification, as in Table 1, with a memory or without."""
    from transformers import BertConfig, BertForSequenceClassification

    import mnemic

    size, _, memory = name.partition("+")
    model = BertForSequenceClassification(BertConfig(**BERT[size]))
    if memory:
        mnemic.augment(model, mnemic.ProductKeys(feed_forward={"resm": "keep", "pkm": "replace"}[memory]))
    return model


def inference(options: argparse.Namespace) -> dict[str, Any]:
    """A forward of one row."""
    import torch

    model = bert(options.setting).eval()
    ids = torch.randint(1000, 30_000, (1, LENGTH))
    with torch.inference_mode():
        seconds = fastest(lambda: model(input_ids=ids), 4 * options.times)
    memory = getattr(model, "memory", None)
    numbers = memory.count_parameters() if memory else sum(p.numel() for p in model.parameters())
    return {"seconds": min(seconds), "parameters": numbers, "all_seconds": seconds}


def training_step(options: argparse.Namespace) -> dict[str, Any]:
    """A step of BERT-base with ResM on rows of random tokens, which read as many different slots as can be.

    There are two batches that come again and again: what a row costs when it is first read, and gets its moments, is
    in "first_seconds".
    """
    import torch
    from transformers import BertConfig, BertForMaskedLM

    import mnemic
    from mnemic.hf.losses import masked_token_losses
    from mnemic.train.rows import AdamW, clip_gradients

    model = BertForMaskedLM(BertConfig())
    slots = int(options.setting) if options.part == "slots" else SLOTS
    mnemic.augment(model, mnemic.ProductKeys(slots=slots)).train()
    optimizer = AdamW(model.parameters(), lr=1e-4)

    batches = []
    for _ in range(2):
        ids = torch.randint(1000, 30_000, (options.rows, LENGTH))
        batches.append((ids, ids.masked_fill(torch.rand(ids.shape) > 0.15, -100)))
    turn = itertools.cycle(batches)

    def step() -> float:
        began = time.perf_counter()
        ids, targets = next(turn)
        masked_token_losses(model, targets, input_ids=ids).mean().backward()
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - began

    first = [step() for _ in range(6)]
    if options.part == "slots":
        seconds = [step() for _ in range(options.times)]
        kept = sum(t.numel() * t.element_size() for state in optimizer.state.values() for t in state.values())
        return {"seconds": min(seconds), "all_seconds": seconds, "first_seconds": first, "optimizer_bytes": kept}
    counted, without = list[float](), list[float]()
    for number in range(2 * options.times):
        for counts in (True, False) if number % 2 else (False, True):
            with model.memory.product_keys.counting() if counts else contextlib.nullcontext():
                (counted if counts else without).append(step())
    return {"seconds": min(counted), "without": min(without), "all_seconds": counted, "all_without": without}


def layer(options: argparse.Namespace, tokens: int, step: bool) -> dict[str, Any]:
    """A layer alone: its forward, or a whole step of training."""
    import torch

    forward, parameters = (package(options) if options.setting == "package" else ours())[:2]
    states = torch.randn(1, tokens, WIDTH)
    if not step:
        with torch.inference_mode():
            seconds = fastest(lambda: forward(states), 2 * options.times)
        return {"seconds": min(seconds), "all_seconds": seconds}
    from mnemic.train.rows import AdamW

    kind = torch.optim.AdamW if options.setting == "package" else AdamW
    optimizer = kind(parameters, lr=1e-3)
    wanted = torch.randn(1, tokens, WIDTH)

    def train() -> None:
        torch.nn.functional.mse_loss(forward(states), wanted).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds = fastest(train, options.times)
    return {"seconds": min(seconds), "all_seconds": seconds}


def ours() -> tuple[Callable[[Any], Any], list[Any]]:
    """Our layer, as it is in a model."""
    from mnemic.memories.product_keys.layer import ProductKeyLayer, ValueTable
    from mnemic.memories.product_keys.selecting import quick_best_pairs
    from mnemic.pages import large_empty

    memory = ProductKeyLayer(WIDTH, SLOTS, HEADS, K, KEY_DIM, norm="layer")
    memory.select, values = quick_best_pairs, ValueTable(SLOTS, WIDTH, empty=large_empty)
    return lambda states: memory(states[0], values)[None], [*memory.parameters(), *values.parameters()]


def package(options: argparse.Namespace) -> tuple[Callable[[Any], Any], list[Any]]:
    """The package's layer of the same sizes, which normalises queries by layer too."""
    if options.peer:
        sys.path.append(options.peer)
    from product_key_memory import PKM

    memory = PKM(WIDTH, heads=HEADS, num_keys=int(SLOTS**0.5), topk=K, dim_head=KEY_DIM // 2)
    return memory, list(memory.parameters())


if __name__ == "__main__":
    main()
