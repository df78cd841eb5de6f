"""Our decoder against transformers' GPT-2 of the same size: time of a training step and peak memory."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

from harness import compare, table

OURS = ["rotary", "rotary, labels", "sinusoidal", "t5", "xl"]


def main() -> None:
    """Compares all settings, or measures the one that `--setting` names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setting", help="measure only this one and print JSON (the harness calls it so)")
    parser.add_argument("--context", type=int, default=256, help="tokens in a row")
    parser.add_argument("--batch", type=int, default=8, help="rows in a batch")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=6, help="training steps of a process, of which the fastest counts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3, help="processes of each setting")
    options = parser.parse_args()
    if options.setting:
        print(json.dumps(measure(options)))
        return
    names = ("context", "batch", "layers", "width", "heads", "vocabulary", "steps", "threads")
    arguments = [f"--{name}={getattr(options, name)}" for name in names]
    settings = ["gpt2", "gpt2, fused gelu", *OURS]
    print(table(compare(__file__, settings, arguments, options.repeats, f"backbone-{options.context}")))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The fastest of a few training steps of one setting."""
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    ids = torch.randint(0, options.vocabulary, (options.batch, options.context))
    model, loss = (gpt2 if options.setting.startswith("gpt2") else decoder)(options, ids)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    seconds = []
    for _ in range(options.steps):
        start = time.perf_counter()
        optimiser.zero_grad(set_to_none=True)
        loss().backward()
        optimiser.step()
        seconds.append(time.perf_counter() - start)
    return {"seconds": min(seconds), "all_seconds": seconds, "parameters": sum(p.numel() for p in model.parameters())}


def gpt2(options: argparse.Namespace, ids: Any) -> tuple[Any, Callable[[], Any]]:
    """transformers' GPT-2 as it is, without dropout and without a cache; or with the faster activation we use."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=options.vocabulary,
        n_positions=options.context,
        n_embd=options.width,
        n_layer=options.layers,
        n_head=options.heads,
        activation_function="gelu" if "fused" in options.setting else "gelu_new",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    return model, lambda: model(input_ids=ids, labels=ids).loss


def decoder(options: argparse.Namespace, ids: Any) -> tuple[Any, Callable[[], Any]]:
    """Our decoder with one kind of positions, trained as `mnemic.train` does, through `token_losses`, or by labels."""
    from torch.nn.functional import pad

    from mnemic.models import MnemicDecoderConfig, MnemicDecoderForCausalLM

    config = MnemicDecoderConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        position=options.setting.partition(",")[0],
    )
    model = MnemicDecoderForCausalLM(config)
    if options.setting.endswith("labels"):
        return model, lambda: model(input_ids=ids, labels=ids).loss
    targets = pad(ids[:, 1:], (0, 1), value=-100)
    return model, lambda: model.token_losses(targets=targets, input_ids=ids)[0].sum() / (targets != -100).sum()


if __name__ == "__main__":
    main()
