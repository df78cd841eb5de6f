"""What memory tokens cost, beside the same model without them, in turns in one process.

    layers       a training step of an encoder (6 layers of 256) with 10 tokens before rows of 500 and of 512; and, to
                 tell what they cost from what ten more of any tokens do, without memory on rows of 522 beside 512
    generation   a token that a causal model (6 layers of 256) writes with its KV cache, with 10 tokens in it; and the
                 whole call that writes 32 of them, with the 128 of its prompt
    bottleneck   a training step of an encoder with MemBottleneck (20 tokens) on 4,096 and on 8,192 tokens, its memory
                 without what the libraries and the model take

A layer that reads n + 10 tokens in place of n has (n + 10) / n of the work to do; a bottleneck twice the work for twice
the length. Weights are random: nothing here depends on what they have learned.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from harness import compare, table

COUNT = 10
ROWS = {"10 and 500": (500, 500, COUNT), "10 and 512": (512, 512, COUNT), "522 for 512": (512, 522, 0)}
PARTS = {
    "layers": list(ROWS),
    "generation": ["a token", "a call"],
    "bottleneck": ["4096", "8192"],
}
SHAPE = {"hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 1024, "vocab_size": 1000}


def main() -> None:
    """Compares the settings of one part, or of all, or measures the one that `--setting` names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), help="default: all of them")
    parser.add_argument("--setting", help="measure only this one and print JSON")
    parser.add_argument("--times", type=int, default=30, help="measured in a process, of which the fastest counts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3, help="processes of each setting")
    options = parser.parse_args()
    if options.setting:
        print(json.dumps(measure(options)))
        return
    for part in [options.part] if options.part else PARTS:
        arguments = [f"--part={part}", f"--times={options.times}", f"--threads={options.threads}"]
        print(table(compare(__file__, PARTS[part], arguments, options.repeats, f"memory-tokens-{part}")))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The seconds of one setting, and those without memory where it has them."""
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.part == "layers":
        without, length, count = ROWS[options.setting]
        return in_turns(training_step(encoder(0), without), training_step(encoder(count), length), options.times)
    if options.part == "generation":
        first = 1 if options.setting == "a token" else 0
        return in_turns(writing(0, first), writing(COUNT, first), options.times)
    step = training_step(encoder(20, "bottleneck"), int(options.setting))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seconds = timed([step], max(options.times // 6, 2))[0]
    return {"seconds": fastest(seconds), "all_seconds": seconds, "before_mb": before}


Work = Callable[[], list[float]]  # does something and returns the seconds of each of its steps


def in_turns(without: Work, with_tokens: Work, times: int) -> dict[str, Any]:
    """The fastest of each, measured one after the other."""
    bare, full = timed([without, with_tokens], times)
    all_seconds = {"all_seconds": [sum(one) for one in full], "all_without": [sum(one) for one in bare]}
    return {"seconds": fastest(full), "without": fastest(bare), **all_seconds}


def timed(works: list[Work], times: int) -> list[list[list[float]]]:
    """The seconds of each piece of work, in turns and in both orders, after two that do not count."""
    seconds: list[list[list[float]]] = [[] for _ in works]
    for number in range(times + 2):
        order = list(enumerate(works))
        for at, work in order if number % 2 else reversed(order):
            found = work()
            if number > 1:
                seconds[at].append(found)
    return seconds


def fastest(seconds: list[list[float]]) -> float:
    """The sum of the least that each step of a piece of work took."""
    return sum(map(min, zip(*seconds, strict=True)))


def encoder(count: int, variant: str = "plain") -> Any:
    """Our encoder-decoder, of which the encoder is measured, with so many memory tokens."""
    import mnemic
    from mnemic.models import MnemicEncoderDecoderConfig, MnemicEncoderDecoderForConditionalGeneration

    config = MnemicEncoderDecoderConfig(**SHAPE, encoder_layers=6, decoder_layers=1)
    model = MnemicEncoderDecoderForConditionalGeneration(config)
    return mnemic.augment(model, mnemic.MemoryTokens(count=count, variant=variant)) if count else model


def training_step(model: Any, length: int) -> Work:
    """Forward and backward of the encoder on two rows of `length` tokens; on one if they are long."""
    import torch

    ids = torch.randint(0, SHAPE["vocab_size"], (2 if length < 1000 else 1, length))

    def step() -> list[float]:
        began = time.perf_counter()
        model.get_encoder()(input_ids=ids).last_hidden_state.square().mean().backward()
        model.zero_grad(set_to_none=True)
        return [time.perf_counter() - began]

    return step


def writing(count: int, first: int) -> Work:
    """32 tokens that a causal model writes after 128, with its cache; those from number `first` on count."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import mnemic

    model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=6)).eval()
    if count:
        mnemic.augment(model, mnemic.MemoryTokens(count=count))
    ids = torch.randint(0, SHAPE["vocab_size"], (1, 128))
    how = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False, "attention_mask": torch.ones_like(ids)}

    def write() -> list[float]:
        times = [time.perf_counter()]

        def written(_: Any, scores: Any) -> Any:
            times.append(time.perf_counter())
            return scores

        model.generate(ids, logits_processor=[written], **how)
        return [later - earlier for earlier, later in pairwise(times)][first:]

    return write


if __name__ == "__main__":
    main()
