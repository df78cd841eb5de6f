"""Continue a text with a model, or translate it, with its memories, without them, or both ways side by side.

A model uses the memories that it was saved with. With --memory it gets another one for this text: with a store of a
text that it has never seen (`mnemic store build`), the model writes what it finds there, without any training. Settings
that suit the model and the store are found by `mnemic evaluate --tune`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mnemic.cli.options import add_config_options, add_memory_option, given, read_memory, write_memory
from mnemic.config import Config, option
from mnemic.errors import UsageError

EXAMPLE = """  mnemic generate runs/a "def main(" --max-new-tokens 40
  echo "import os" | mnemic generate runs/a - --greedy --json
  mnemic generate runs/m "The treaty was signed by" --read history.txt
  mnemic store build docs.store docs/ --model runs/a
  mnemic generate runs/a "def main(" --compare --memory output:external=docs.store,k=64,weight=0.3"""

SEGMENT = 512  # tokens of a long prompt that a model with an XL cache reads at a time
SAME = "the memory changes nothing here"
TUNE = "; `mnemic evaluate --tune` finds the weight and temperatures of an output memory"


@dataclass(kw_only=True)
class GenerateConfig(Config):
    """How to choose the next token."""

    max_new_tokens: int = option(60, "how many tokens to write at most")
    greedy: bool = option(False, "always take the most likely token")
    temperature: float = option(0.8, "below 1 likely tokens become likelier, above 1 less likely")
    top_p: float = option(0.95, "choose among the likeliest tokens that together have this probability")
    beams: int = option(1, "with more than one, search for the likeliest text with that many beams")
    seed: int = option(0, "of the random choices")

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
    parser.add_argument("prompt", help="the text to continue, or to translate; - reads it from stdin")
    add_memory_option(parser)
    parser.add_argument(
        "--read",
        action="append",
        default=[],
        metavar="FILE",
        help="a text that the model's memory reads first, however long: attention memory, recurrent memory tokens; "
        "may be given several times",
    )
    parser.add_argument("--no-memory", action="store_true", help="switch the model's memories off")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="show what the memories do: continue the text without them and then with them, the rest being the same",
    )
    add_config_options(parser, GenerateConfig, "generating")
    parser.add_argument("--json", action="store_true", help="print prompt, text, memories and settings as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the prompt and its continuation, or the two that are compared."""
    config = GenerateConfig.from_dict(given(arguments, GenerateConfig))
    if arguments.no_memory and (arguments.memory or arguments.compare):
        raise UsageError("--no-memory does not go with --memory or --compare: leave it out; --compare writes both ways")
    for text in arguments.memory:
        read_memory(text)  # a mistake is told before anything is loaded
    prompt = read_prompt() if arguments.prompt == "-" else arguments.prompt
    from mnemic.cli.loading import give_memories, load_model

    model, tokenizer = load_model(arguments.model)
    before = prompt if writer(model) is continue_text else ""
    give_memories(model, arguments.memory, config.seed)
    for path in arguments.read:
        read_file(model, tokenizer, path)
    used = [] if arguments.no_memory else memories_of(model)
    if arguments.compare and not used:
        raise UsageError(
            f"{arguments.model} has no memory to compare with: give it one, as in "
            "--memory output:external=docs.store,weight=0.3"
        )
    result: dict[str, Any] = {"model": arguments.model, "prompt": prompt, "memory": used}
    if arguments.compare:
        result["text_without_memory"] = write(model, tokenizer, prompt, config, memory=False)
    result["text"] = write(model, tokenizer, prompt, config, memory=not arguments.no_memory)
    print(json.dumps(result | {"settings": config.to_dict()}) if arguments.json else in_words(result, before))
    if result.get("text_without_memory") == result["text"]:
        print(SAME + TUNE * ("output" in result["memory"]), file=sys.stderr)
    return 0


def in_words(result: dict[str, Any], before: str) -> str:
    """The text after `before`; both texts, each with a line above it that says which it is, if they are compared."""
    text = before + result["text"]
    if "text_without_memory" not in result:
        return text
    without = before + result["text_without_memory"]
    return f"=== without memory ===\n{without}\n\n=== with {' and '.join(result['memory'])} ===\n{text}"


def memories_of(model: Any) -> list[str]:
    """The memories in a model, as they are written after --memory."""
    configs = model.memory.configs if hasattr(model, "memory") else []
    return [write_memory(config.memory(), config) for config in configs]


def read_file(model: Any, tokenizer: Any, path: str) -> None:
    """Lets the memories of a model read a file."""
    import torch

    from mnemic.cli.loading import read_text
    from mnemic.data.encoding import start_and_end

    memory = getattr(model, "memory", None)
    if not hasattr(memory, "attention") and getattr(memory, "segment", None) is None:
        raise UsageError(
            "--read is for a model with a memory that keeps what was read: see KNNAttention and MemoryTokens.recurrent"
        )
    start, _ = start_and_end(tokenizer)
    ids = tokenizer(read_text(path), add_special_tokens=False, verbose=False)["input_ids"]
    model.memory.read(torch.tensor([[start, *ids]], device=model.device))


def read_prompt() -> str:
    """The text on stdin."""
    try:
        prompt = sys.stdin.read()
        prompt.encode()  # in some locales Python reads bytes that are no text as lone surrogates
    except UnicodeError:
        raise UsageError("what came on stdin is not UTF-8 text: give a text to continue") from None
    return prompt


Writer = Callable[[Any, Any, str, dict[str, Any]], list[int]]


def writer(model: Any) -> Writer:
    """How a model writes; UsageError if it does not."""
    from mnemic.train.objectives import model_kind

    writers: dict[str, Writer] = {"causal": continue_text, "seq2seq": translate}
    if (kind := model_kind(model)) not in writers:
        name = type(model).__name__
        raise UsageError(f"{name} does not continue a text: give a causal model, or one that translates")
    return writers[kind]


def write(model: Any, tokenizer: Any, prompt: str, config: GenerateConfig, memory: bool = True) -> str:
    """What the model writes after a text, or as its translation; with its memories or not."""
    import torch

    from mnemic.data.encoding import start_and_end
    from mnemic.train.objectives import check_vocabulary

    check_vocabulary(model, tokenizer)
    torch.manual_seed(config.seed)
    model.eval()
    off = not memory and hasattr(model, "memory")
    with torch.no_grad(), model.memory.disabled() if off else contextlib.nullcontext():
        tokens = writer(model)(model, tokenizer, prompt, config.decoding())
    return to_text(tokenizer, tokens, {*start_and_end(tokenizer)})


def continue_text(model: Any, tokenizer: Any, prompt: str, decoding: dict[str, Any]) -> list[int]:
    """The tokens after `prompt`, which is read as the beginning of a document."""
    import torch

    from mnemic.data.encoding import start_and_end

    start, end = start_and_end(tokenizer)
    ids = torch.tensor([[start, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]])
    padding = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    ends = {"pad_token_id": padding, "eos_token_id": end}
    with far_back(model, ids, decoding) as (near, how):
        mask = torch.ones_like(near)
        tokens: list[int] = model.generate(input_ids=near, attention_mask=mask, **ends, **how)[0].tolist()
    return tokens[near.shape[1] :]


@contextlib.contextmanager
def far_back(model: Any, ids: Any, decoding: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The part of a long prompt that a model reads at once; with a memory, which reads the rest before.

    Recurrent memory tokens read whole segments, an attention memory what the model has no room for. Where memories are
    switched off, the model has the same part and nothing of the rest.
    """
    memory: Any = getattr(model, "memory", None)
    segment = getattr(memory, "segment", None)
    if getattr(memory or model.config, "xl_length", 0) and not segment:
        yield ids, decoding | {"prefill_chunk_size": SEGMENT}
        return
    room = getattr(model.config, "max_position_embeddings", None) or ids.shape[1] + decoding["max_new_tokens"]
    room -= decoding["max_new_tokens"]
    if segment:
        room = min(room, (ids.shape[1] - 1) % segment + 1)
    if ids.shape[1] <= room or room < 1 or not (segment or hasattr(memory, "attention")):
        yield ids, decoding
        return
    if not memory.enabled:
        yield ids[:, -room:], decoding
        return
    before = memory.state()
    memory.read(ids[:, :-room])
    try:
        yield ids[:, -room:], decoding
    finally:
        memory.load_state(before)


def translate(model: Any, tokenizer: Any, prompt: str, decoding: dict[str, Any]) -> list[int]:
    """The tokens of a translation of `prompt`."""
    from mnemic.data import Document
    from mnemic.data.pair_batches import tokenize_pairs
    from mnemic.data.pairs import Pair
    from mnemic.evaluate.translation import written_for
    from mnemic.train.seq2seq import decoder_start, padding_token

    if not prompt.strip():
        raise UsageError("there is nothing to translate: give a text")
    pairs = tokenize_pairs(lambda: [Pair(Document("source", prompt), Document("target", prompt))], tokenizer)
    ((_, written),) = written_for(model, tokenizer, pairs, 1, decoding)
    marks = {decoder_start(model), padding_token(model, tokenizer)}
    return [token for token in written[0].tolist() if token not in marks]


def to_text(tokenizer: Any, tokens: list[int], marks: set[int]) -> str:
    """The text of tokens without `marks` and other special ones; a word that the vocabulary lacks stays seen."""
    hidden = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id} | marks
    return str(tokenizer.decode([token for token in tokens if token not in hidden]))
