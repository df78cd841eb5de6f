"""Made tasks that a tiny model can learn, a tokenizer of words for them, and tiny encoders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf

from mnemic.data.tasks import Answer, Example, Task

WORDS = ["red", "blue", "green", "one", "two", "cat", "dog", "sun", "is", "who", "where", "the", "a"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def word_tokenizer() -> Any:
    """BERT's tokenizer with a few words and all letters."""
    letters = [chr(code) for code in range(97, 123)]
    vocabulary = [*SPECIAL, *WORDS, *letters, *("##" + letter for letter in letters), "?", "."]
    return hf.BertTokenizerFast(vocab={word: number for number, word in enumerate(vocabulary)})


def make_encoder(name: str, tokenizer: Any, head: str = "ForSequenceClassification", **options: Any) -> Any:
    """A tiny encoder with random weights."""
    torch.manual_seed(0)
    size = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "initializer_range": 0.2}
    if name == "distilbert":
        shape = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 64}
        return getattr(hf, f"DistilBert{head}")(hf.DistilBertConfig(**{**size, **shape, **options}))
    family, config = {"bert": ("Bert", hf.BertConfig), "roberta": ("Roberta", hf.RobertaConfig)}[name]
    kinds = {"type_vocab_size": 1 if name == "roberta" else 2}
    return getattr(hf, family + head)(config(**{**size, **SHAPE, **kinds, "max_position_embeddings": 64, **options}))


def reader(examples: list[Example]) -> Callable[[], list[Example]]:
    return lambda: examples


def colours(count: int = 24) -> Task:
    """Pairs of texts that name the same colour, or not; of many lengths."""
    draw = np.random.default_rng(5)
    examples = []
    for number in range(count):
        label = number % 2
        first = int(draw.integers(3))
        second = first if label else (first + 1 + int(draw.integers(2))) % 3
        filler = " ".join(draw.choice(["the", "a", "is"], int(draw.integers(1, 6))))
        examples.append(Example(str(number), f"{WORDS[first]} {filler}", f"{filler} {WORDS[second]}", label))
    parts = {"train": reader(examples), "valid": reader(examples[: count // 2])}
    return Task("colours", parts, ("other", "same"), ("accuracy", "f1", "matthews"))


def counts(count: int = 24) -> Task:
    """A score: how many dogs there are in a text."""
    draw = np.random.default_rng(6)
    texts = [draw.choice(["dog", "cat", "sun"], int(draw.integers(1, 7))).tolist() for _ in range(count)]
    examples = [Example(str(n), " ".join(words), None, float(words.count("dog"))) for n, words in enumerate(texts)]
    return Task("counts", {"train": reader(examples), "valid": reader(examples)}, (), ("pearson", "spearman"))


def questions(count: int = 16) -> Task:
    """Who is there? The one after "is"; in texts longer than a window."""
    draw = np.random.default_rng(7)
    examples = []
    for number in range(count):
        before, after = (" ".join(draw.choice(["the", "sun"], int(draw.integers(2, 9)))) for _ in range(2))
        answer = str(draw.choice(["cat", "dog", "red", "blue"]))
        text = f"{before} is {answer} {after}"
        start = text.index(" is ") + 4
        examples.append(Example(str(number), "who is ?", text, answers=(Answer(start, answer),)))
    parts = {"train": reader(examples), "valid": reader(examples)}
    return Task("questions", parts, metrics=("exact_match", "f1"), kind="spans")


def write_own(folder: Path, task: Task) -> Path:
    """A folder of one's own with the examples of a task."""
    folder.mkdir(parents=True)
    for split, name in (("train", "train.tsv"), ("valid", "dev.tsv")):
        rows = [f"{e.text}\t{e.pair}\t{task.labels[int(e.label or 0)]}" for e in task.examples(split)]
        (folder / name).write_text("\n".join(["text\ttext_pair\tlabel", *rows]) + "\n")
    return folder


def write_squad(folder: Path, task: Task) -> Path:
    """SQuAD's own files with the examples of a task."""
    folder.mkdir(parents=True)
    for split, name in (("train", "train-v1.1.json"), ("valid", "dev-v1.1.json")):
        paragraphs = [
            {
                "context": e.pair,
                "qas": [
                    {
                        "id": e.id,
                        "question": e.text,
                        "answers": [{"answer_start": a.start, "text": a.text} for a in e.answers],
                    }
                ],
            }
            for e in task.examples(split)
        ]
        (folder / name).write_text(json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}))
    return folder
