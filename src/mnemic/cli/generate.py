"""Continue a text with a model, with its memory or without."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import dataclass
from typing import Any

from mnemic.cli.options import add_config_options, given
from mnemic.config import Config, option
from mnemic.errors import UsageError

EXAMPLE = """  mnemic generate runs/a/model "def main(" --max-new-tokens 40
  echo "import os" | mnemic generate runs/a/model - --greedy --json"""


@dataclass(kw_only=True)
class GenerateConfig(Config):
    """How to choose the next token."""

    max_new_tokens: int = option(60, "how many tokens to write at most")
    greedy: bool = option(False, "always take the most likely token")
    temperature: float = option(0.8, "below 1 likely tokens become likelier, above 1 less likely")
    top_p: float = option(0.95, "choose among the likeliest tokens that together have this probability")
    beams: int = option(1, "with more than one, search for the likeliest text with that many beams")
    seed: int = option(0, "of the random choices")
    memory: bool = option(True, "use the model's memories")

    def check(self) -> None:
        if self.max_new_tokens < 1 or self.beams < 1:
            raise UsageError("--max-new-tokens and --beams: expected 1 or more")
        if not self.temperature > 0 or not 0 < self.top_p <= 1:
            raise UsageError("--temperature: expected more than 0; --top-p: expected more than 0 and at most 1")

    def decoding(self) -> dict[str, Any]:
        """The arguments of transformers' generate()."""
        chosen: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "num_beams": self.beams, "do_sample": False}
        if not self.greedy and self.beams == 1:
            chosen |= {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
        return chosen


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options."""
    parser.add_argument("model", help="the folder of a run or of a saved model, or a name on the hub")
    parser.add_argument("prompt", help="the text to continue; - reads it from stdin")
    add_config_options(parser, GenerateConfig, "generating")
    parser.add_argument("--json", action="store_true", help="print prompt, text and settings as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the prompt and its continuation."""
    config = GenerateConfig.from_dict(given(arguments, GenerateConfig))
    prompt = read_prompt() if arguments.prompt == "-" else arguments.prompt
    from mnemic.cli.loading import load_model

    model, tokenizer = load_model(arguments.model)
    text = continue_text(model, tokenizer, prompt, config)
    if arguments.json:
        print(json.dumps({"model": arguments.model, "prompt": prompt, "text": text, "settings": config.to_dict()}))
    else:
        print(prompt + text)
    return 0


def read_prompt() -> str:
    """The text on stdin."""
    try:
        prompt = sys.stdin.read()
        prompt.encode()  # in some locales Python reads bytes that are no text as lone surrogates
    except UnicodeError:
        raise UsageError("what came on stdin is not UTF-8 text: give a text to continue") from None
    return prompt


def continue_text(model: Any, tokenizer: Any, prompt: str, config: GenerateConfig) -> str:
    """What the model writes after `prompt`, which it reads as the beginning of a document."""
    import torch

    from mnemic.data.encoding import start_and_end
    from mnemic.train.objectives import check_vocabulary, model_kind

    if model_kind(model) != "causal":
        raise UsageError(f"{type(model).__name__} does not continue a text: give a causal model")
    check_vocabulary(model, tokenizer)
    start, end = start_and_end(tokenizer)
    ids = torch.tensor([[start, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]])
    torch.manual_seed(config.seed)
    model.eval()
    off = not config.memory and hasattr(model, "memory")
    with torch.no_grad(), model.memory.disabled() if off else contextlib.nullcontext():
        written = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pad_token_id=end if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            eos_token_id=end,
            **config.decoding(),
        )
    return tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
