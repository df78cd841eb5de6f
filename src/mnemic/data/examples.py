"""The examples of a task as token ids, cut to the length a model reads, and batches of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from mnemic.data.planned import PlannedBatches
from mnemic.data.streams import IGNORED, check_settings
from mnemic.data.tasks import Answer, Example, Task
from mnemic.data.tokenizers import tokenizer_fingerprint
from mnemic.errors import DamagedError, UsageError
from mnemic.files import write_bytes

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

NOBODY = -1
QUESTION = 64  # tokens of a question that are read, as in BERT (arXiv:1810.04805)
FILE = "examples.safetensors"
_AT_ONCE = 1000
_NO_BORDERS = np.empty((0, 2), np.int64)


class Row(NamedTuple):
    """What a model reads in one go: an example cut to length, or a question with a window of the text it is about."""

    example: int  # its number
    tokens: np.ndarray
    kinds: np.ndarray  # to which of two texts each token belongs; empty where the tokenizer does not say
    target: Any  # the label, the score, or the places in the row of the answer's first and last token
    place: int = 0  # in the row, of the window's first token
    borders: np.ndarray = _NO_BORDERS  # of the window's tokens in the text: first character and the one behind the last


def rows_of(
    examples: list[Example], task: Task, tokenizer: PreTrainedTokenizerBase, length: int, stride: int
) -> Iterator[Row]:
    """Yields the rows of examples of a task, of `length` tokens at most; windows move on by `stride` tokens."""
    if task.kind == "spans" and not tokenizer.is_fast:
        raise UsageError(
            f"{type(tokenizer).__name__} does not say where in a text its tokens are, which {task.name} needs: "
            "use a fast tokenizer"
        )
    numbered = iter(enumerate(_checked(examples, task)))
    try:
        while some := list(islice(numbered, _AT_ONCE)):
            for _, alike in groupby(some, key=lambda item: item[1].pair is None):
                numbers, group = zip(*alike, strict=True)
                if task.kind == "spans":
                    yield from _windows(numbers, group, tokenizer, length, stride)
                else:
                    yield from _cut(numbers, group, bool(task.labels), tokenizer, length)
    finally:
        if tokenizer.is_fast:
            tokenizer.backend_tokenizer.no_truncation()  # or it would be saved with it


def _checked(examples: Iterable[Example], task: Task) -> Iterator[Example]:
    for example in examples:
        if task.kind == "spans" and (not example.answers or example.pair is None):
            raise UsageError(f"the question {example.id} of {task.name} has no text with an answer in it")
        if task.kind == "classification" and example.label is None:
            raise UsageError(
                f"the example {example.id} of {task.name} has no label: use a split whose labels are known, as 'valid'"
            )
        if example.label == IGNORED:
            raise UsageError(f"the example {example.id} of {task.name} has the score {IGNORED}, which stands for none")
        yield example


def _encoded(group: tuple[Example, ...], tokenizer: PreTrainedTokenizerBase, length: int, **how: Any) -> Any:
    """What the tokenizer makes of examples that all are pairs, or all are not."""
    pairs = group[0].pair is not None
    least = tokenizer.num_special_tokens_to_add(pair=pairs) + 1 + pairs
    if length < least:
        raise UsageError(f"a length of {length} tokens leaves no room for a text: give at least {least}")
    texts = [[example.text for example in group], *([[example.pair or "" for example in group]] if pairs else [])]
    return tokenizer(*texts, split_special_tokens=True, verbose=False, return_attention_mask=False, **how)


def _kinds(encoded: Any, number: int) -> np.ndarray:
    return np.array(encoded["token_type_ids"][number] if "token_type_ids" in encoded else [], np.uint8)


def _cut(
    numbers: tuple[int, ...],
    group: tuple[Example, ...],
    labelled: bool,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
) -> Iterator[Row]:
    """Examples cut to length, the longer text of a pair first."""
    encoded = _encoded(group, tokenizer, length, truncation=True, max_length=length)
    for place, (number, example) in enumerate(zip(numbers, group, strict=True)):
        target = int(example.label or 0) if labelled else example.label
        yield Row(number, np.array(encoded["input_ids"][place], np.int32), _kinds(encoded, place), target)


def _windows(
    numbers: tuple[int, ...], group: tuple[Example, ...], tokenizer: PreTrainedTokenizerBase, length: int, stride: int
) -> Iterator[Row]:
    """Each question with windows of its text side by side, or overlapping, until all of it was seen.

    A row keeps all that stands before the text and after it. The target of a window without the answer is the token
    for the whole row, as in BERT.
    """
    encoded = _encoded(group, tokenizer, length, return_offsets_mapping=True)
    for place, (number, example) in enumerate(zip(numbers, group, strict=True)):
        tokens, kinds = np.array(encoded["input_ids"][place], np.int32), _kinds(encoded, place)
        side = np.array([NOBODY if text is None else text for text in encoded.sequence_ids(place)])
        borders = np.array(encoded["offset_mapping"][place], np.int64).reshape(-1, 2)
        text = np.flatnonzero(side == 1)
        before, after = (text[0], text[-1] + 1) if len(text) else (len(tokens), len(tokens))
        head = np.delete(np.arange(before), np.flatnonzero(side[:before] == 0)[QUESTION:])
        tail = np.arange(after, len(tokens))
        room = length - len(head) - len(tail)
        if room < 1:
            raise UsageError(f"a length of {length} tokens leaves no room beside the question {example.id}: give more")
        first, last = _answer_tokens(example.answers[0], borders[text])
        nowhere = int(next(iter(np.flatnonzero(tokens[head] == tokenizer.cls_token_id)), 0))
        for start in range(0, max(len(text) - room, 0) + min(stride, room), min(stride, room)):
            window = text[start : start + room]
            inside = start <= first <= last < start + len(window)
            target = [len(head) + first - start, len(head) + last - start] if inside else [nowhere, nowhere]
            chosen = np.concatenate([head, window, tail])
            yield Row(
                number, tokens[chosen], kinds[chosen] if len(kinds) else kinds, target, len(head), borders[window]
            )


def _answer_tokens(answer: Answer, borders: np.ndarray) -> tuple[int, int]:
    """The first and the last of a text's tokens that an answer touches; (-1, -1) if it touches none."""
    touched = np.flatnonzero((borders[:, 1] > answer.start) & (borders[:, 0] < answer.start + len(answer.text)))
    return (int(touched[0]), int(touched[-1])) if len(touched) else (NOBODY, NOBODY)


class TokenizedExamples:
    """Rows in a few arrays; `targets` is (N,), or (N, 2) where an answer has a first and a last token."""

    def __init__(self, arrays: dict[str, np.ndarray], made_from: str) -> None:
        self.arrays = arrays
        self.fingerprint = made_from
        self.tokens, self.kinds, self.targets = arrays["tokens"], arrays["kinds"], arrays["targets"]
        self.ends = arrays["ends"]
        self.lengths = np.diff(self.ends, prepend=0)

    @classmethod
    def of(cls, rows: Iterable[Row], made_from: str = "") -> TokenizedExamples:
        """The arrays of rows."""
        tokens, kinds, targets = [], [], []
        for row in rows:
            tokens.append(row.tokens)
            kinds.append(row.kinds)
            targets.append(row.target)
        arrays = {
            "tokens": np.concatenate(tokens),
            "kinds": np.concatenate(kinds),
            "ends": np.cumsum([len(row) for row in tokens], dtype=np.int64),
            "targets": np.array(targets, np.float32 if isinstance(targets[0], float) else np.int64),
        }
        return cls(arrays, made_from)

    @classmethod
    def open(cls, folder: str | Path) -> TokenizedExamples:
        """What `tokenize_task` wrote to a folder."""
        path = Path(folder) / FILE
        try:
            with safe_open(path, framework="numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                record = file.metadata()
            if record["checksum"] != _checksum(arrays):
                raise ValueError("it was altered")
            return cls(arrays, record["made_from"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{path} is not whole ({error}): delete it and train again") from None

    def __len__(self) -> int:
        return len(self.ends)

    def slice(self, number: int) -> slice:
        """Where the tokens of a row are."""
        end = int(self.ends[number])
        return slice(end - int(self.lengths[number]), end)


def tokenize_task(
    task: Task, part: str, tokenizer: PreTrainedTokenizerBase, length: int, stride: int, folder: Path
) -> TokenizedExamples:
    """The rows of a part of a task, kept in a folder and used again if they are of the same examples."""
    examples = list(task.examples(part))
    made_from = _digest(examples, tokenizer_fingerprint(tokenizer), length, stride, task.labels)
    if (folder / FILE).exists():
        try:
            kept = TokenizedExamples.open(folder)
        except DamagedError:
            kept = None
        if kept is not None and kept.fingerprint == made_from:
            return kept
    made = TokenizedExamples.of(rows_of(examples, task, tokenizer, length, stride), made_from)
    write_bytes(folder / FILE, save(made.arrays, {"made_from": made_from, "checksum": _checksum(made.arrays)}))
    return made


def _digest(examples: list[Example], *settings: object) -> str:
    digest = xxhash.xxh3_128(repr(settings).encode())
    for example in examples:
        digest.update(repr(example).encode())
    return digest.hexdigest()


def _checksum(arrays: dict[str, np.ndarray]) -> str:
    digest = xxhash.xxh3_128()
    for name in sorted(arrays):
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()


class ExampleBatches(PlannedBatches):
    """An endless (or with `epochs` finite) iterator of batches of rows, padded on the right.

    A batch is a dict of tensors with `batch_size` rows:
        input_ids       (B, S)  tokens
        token_type_ids  (B, S)  to which of two texts a token belongs, where the tokenizer says so
        attention_mask  (B, S)  0 on padding, else 1
        targets         (B,) or (B, 2)
        row             (B,)    the number of the row

    In an epoch each row is read exactly once, in an order by `seed` and epoch, or from the shortest to the longest
    without `shuffle`; what the last batch lacks are rows without targets (-100), of the number -1. With several
    processes (`rank`, `world_size`) the rows of all form one large batch; the state is the same on every rank.
    """

    def __init__(
        self,
        rows: TokenizedExamples,
        batch_size: int,
        segment_length: int,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_settings(epochs, rank, batch_size=batch_size, segment_length=segment_length, world_size=world_size)
        self.rows = rows
        self.seed, self.shuffle, self.epochs = seed, shuffle, epochs
        self._rank, self._size, self._together = rank, batch_size, batch_size * world_size
        self.begin()

    def plan(self, epoch: int) -> list[np.ndarray]:
        """The numbers of the rows of each batch of an epoch."""
        count = len(self.rows)
        order = np.array(self._shuffled(count, epoch)) if self.shuffle else self.rows.lengths.argsort(kind="stable")
        return [order[first : first + self._together] for first in range(0, count, self._together)]

    def batch(self, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        """This rank's rows of the batch of these rows, as wide as those of the others."""
        import torch

        own = numbers[self._rank * self._size : (self._rank + 1) * self._size].tolist()
        shape = self._size, int(self.rows.lengths[numbers].max())
        targets = self.rows.targets
        batch = {
            "input_ids": np.zeros(shape, np.int64),
            "attention_mask": np.zeros(shape, np.int64),
            "targets": np.full((self._size, *targets.shape[1:]), IGNORED, targets.dtype),
            "row": np.array(own + [NOBODY] * (self._size - len(own)), np.int64),
        }
        if len(self.rows.kinds):
            batch["token_type_ids"] = np.zeros(shape, np.int64)
        batch["attention_mask"][:, :1] = 1  # also of a row without tokens: attention to nothing is not a number
        batch["targets"][: len(own)] = targets[own]
        for row, number in enumerate(own):
            where, length = self.rows.slice(number), int(self.rows.lengths[number])
            batch["input_ids"][row, :length] = self.rows.tokens[where]
            batch["attention_mask"][row, :length] = 1
            if len(self.rows.kinds):
                batch["token_type_ids"][row, :length] = self.rows.kinds[where]
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    def _identity(self) -> dict[str, Any]:
        return {
            "task": self.rows.fingerprint,
            "row_count": self._together,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epochs": self.epochs,
        }
