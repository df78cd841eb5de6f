"""A training step with an output memory against the plain step: time and peak memory, with the paper's 38M model.

`local` sees the tokens of its own segment; `long` also the earlier ones of the consecutive segments in the batch, which
are one text: with 24 rows of 512 tokens a memory of 12,288.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from harness import compare, table

SETTINGS = ["plain", "local", "long"]


def main() -> None:
    """Compares all settings, or measures the one that `--setting` names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setting", choices=SETTINGS, help="measure only this one and print JSON")
    parser.add_argument("--preset", default="trime-38m", help="see `mnemic list presets`")
    parser.add_argument("--context", type=int, default=512, help="tokens in a row")
    parser.add_argument("--batch", type=int, default=24, help="rows in a batch")
    parser.add_argument("--steps", type=int, default=3, help="training steps of a process, of which the fastest counts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2, help="processes of each setting")
    options = parser.parse_args()
    if options.setting:
        print(json.dumps(measure(options)))
        return
    names = ("preset", "context", "batch", "steps", "threads")
    arguments = [f"--{name}={getattr(options, name)}" for name in names]
    print(table(compare(__file__, SETTINGS, arguments, options.repeats, "output-training")))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The fastest of a few training steps of one setting."""
    import torch

    from mnemic.hf.losses import token_losses

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model, extra = made(options)
    ids = torch.randint(0, model.config.vocab_size, (options.batch, options.context + 1))
    tokens, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    seconds = []
    for _ in range(options.steps):
        start = time.perf_counter()
        optimiser.zero_grad(set_to_none=True)
        (token_losses(model, targets, input_ids=tokens, use_cache=False, **extra)[0].sum() / targets.numel()).backward()
        optimiser.step()
        seconds.append(time.perf_counter() - start)
    return {"seconds": min(seconds), "all_seconds": seconds, "parameters": sum(p.numel() for p in model.parameters())}


def made(options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """A model with the memory of a setting, in the middle of its training, and what its losses take besides tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    import mnemic
    from mnemic.models.presets import preset

    model = AutoModelForCausalLM.from_config(preset(options.preset)).train()
    if options.setting == "plain":
        return model, {}
    training = "local" if options.setting == "local" else "consecutive"
    model = mnemic.augment(model, mnemic.OutputMemory(training=training)).train()
    model.memory.begin_step(50, 100)
    return model, {"streams": torch.zeros(options.batch, dtype=torch.long)}


if __name__ == "__main__":
    main()
