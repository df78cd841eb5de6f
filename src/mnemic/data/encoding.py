"""Documents to token ids, many at a time, long ones in pieces where that provably gives the same ids."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from mnemic.data.documents import Document
from mnemic.data.tokenizers import BYTE_CHARACTERS
from mnemic.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE = 1 << 18
BATCH = 1 << 20

# Between a character that is no white space of any kind and a space or line end.
_BREAK = re.compile(r"(?<=\S)[ \n]")


def start_and_end(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """The ids that open and close a document: bos (else eos) and eos; for models like BERT their cls and sep."""
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.cls_token_id
    if end is None:
        raise UsageError("the tokenizer has no token for the end of a text: set tokenizer.eos_token")
    return (end if start is None else start), end


def encode(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[Document, list[int], bool]]:
    """Yields (document, ids of its next piece, whether that is the last one); memory holds one batch of pieces.

    The first piece begins with the start token, the last ends with the end token (once: where a line end is the end
    token, as with words, the text may end with it already). Special tokens written out in a text ("<eos>") are encoded
    as the characters they are.
    """
    start, end = start_and_end(tokenizer)
    pipeline = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {}
    encode_texts = _encoder(tokenizer, pipeline)
    first = True
    for batch in _batches(documents, splits_at_spaces(pipeline)):
        encoded = encode_texts([piece for _, piece, _ in batch])
        for (document, _, last), ids in zip(batch, encoded, strict=True):
            opening = [start] if first else []
            closing = [end] if last and (not ids or ids[-1] != end) else []
            yield document, opening + ids + closing, last
            first = last


def splits_at_spaces(pipeline: dict[str, Any]) -> bool:
    """Whether encoding the two sides of a break apart surely gives the ids of the whole.

    True for the tokenizers trained here and for GPT-2's own splitting (no normaliser; no token reaches across the
    place between a character and the white space after it); unknown, hence false, for all others.
    """
    splitter, normalizer = pipeline.get("pre_tokenizer") or {}, pipeline.get("normalizer")
    gpt2 = splitter.get("type") == "ByteLevel" and splitter["use_regex"] and not splitter["add_prefix_space"]
    words = splitter.get("type") == "Split" and splitter["pattern"] == {"String": " "} and not splitter["invert"]
    line_ends = normalizer and normalizer["type"] == "Replace" and normalizer["pattern"] == {"String": "\n"}
    plain_added = not any(
        token["lstrip"] or token["rstrip"] or token["single_word"] or re.search(r"\s", token["content"])
        for token in pipeline.get("added_tokens", [])
    )
    return plain_added and bool((gpt2 and normalizer is None) or (words and line_ends))


def _batches(documents: Iterable[Document], split: bool) -> Iterator[list[tuple[Document, str, bool]]]:
    """Groups the pieces of documents, each with its document and whether it is the last, to about BATCH characters."""
    batch: list[tuple[Document, str, bool]] = []
    size = 0
    for document in documents:
        for piece, last in _pieces(document.text) if split else [(document.text, True)]:
            batch.append((document, piece, last))
            size += len(piece)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    start = 0
    while len(text) - start > PIECE and (found := _BREAK.search(text, start + PIECE)):
        yield text[start : found.start()], False
        start = found.start()
    yield text[start:], True


def _encoder(
    tokenizer: PreTrainedTokenizerBase, pipeline: dict[str, Any]
) -> Callable[[list[str]], Iterable[list[int]]]:
    """The fastest way to the ids of several texts, special tokens taken as plain text."""
    if _ids_are_bytes(pipeline):
        return lambda texts: (list(text.encode()) for text in texts)
    if not tokenizer.is_fast:
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        return lambda texts: (tokenizer(text, **options)["input_ids"] for text in texts)
    backend = tokenizer.backend_tokenizer  # half the time of calling the tokenizer, which sets these at each call
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return lambda texts: (encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False))


def _ids_are_bytes(pipeline: dict[str, Any]) -> bool:
    """Whether the ids of a text are its UTF-8 bytes: the byte tokenizer made here, which need not be called at all."""
    model = pipeline.get("model", {})
    return (
        splits_at_spaces(pipeline)
        and model["type"] == "BPE"
        and not model["merges"]
        and all(model["vocab"].get(character) == byte for byte, character in enumerate(BYTE_CHARACTERS))
        and all(token["special"] for token in pipeline["added_tokens"])
    )
