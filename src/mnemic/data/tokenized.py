"""A corpus as token ids in a memory-mapped file, tokenised once and used again.

The folder of a tokenised corpus:

    tokens.bin      the ids of all documents one after the other, 2 bytes each, or 4 if the vocabulary needs them
    documents.bin   a record for each document: where its tokens and its name end, bytes, words, checksum of the text
    ids.txt         the documents' names, each followed by a line end
    manifest.json   what made it, and a checksum of each of the others; written last
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import xxhash
from tqdm import tqdm

from mnemic.data.documents import Document
from mnemic.data.encoding import encode, start_and_end
from mnemic.data.local import missing
from mnemic.data.tokenizers import tokenizer_fingerprint
from mnemic.errors import DamagedError, UsageError
from mnemic.files import checksum, clear_os_errors, new_folder, write_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCHEMA = 1
FILES = TOKENS, DOCUMENTS, IDS = "tokens.bin", "documents.bin", "ids.txt"
MANIFEST = "manifest.json"
RECORD = np.dtype([("tokens", "<i8"), ("ids", "<i8"), ("bytes", "<i8"), ("words", "<i8"), ("digest", "<u8", (2,))])

log = logging.getLogger(__name__)


class TokenizedCorpus:
    """Documents as token ids: start token, text, end token; `corpus[i]` is document i as an array of int64."""

    def __init__(self, folder: str | Path) -> None:
        """Opens a tokenised corpus and checks its files; DamagedError if one is not as it was written."""
        folder = Path(folder)
        manifest = _checked_manifest(folder)
        self.fingerprint: str = manifest["files"][DOCUMENTS] + manifest["tokenizer"]
        self.tokenizer: str = manifest["tokenizer"]
        self.vocab_size: int = manifest["vocab_size"]
        self.end_token: int = manifest["end_token"]
        self.tokens = np.memmap(folder / TOKENS, manifest["dtype"], "r")
        self._records = np.memmap(folder / DOCUMENTS, RECORD, "r")
        self._ids = np.memmap(folder / IDS, np.uint8, "r")

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.slice(range(len(self))[index], 0, None)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[index] for index in range(len(self)))

    def slice(self, index: int, start: int, stop: int | None) -> np.ndarray:
        """Tokens `start` to `stop` of a document, as a new array of int64; only they are read."""
        first, end = self._span("tokens", index)
        stop = end if stop is None else min(first + stop, end)
        return self.tokens[first + start : stop].astype(np.int64)

    def length(self, index: int) -> int:
        """The number of tokens of a document, start and end token included."""
        first, end = self._span("tokens", index)
        return end - first

    def id(self, index: int) -> str:
        """The name of a document."""
        first, end = self._span("ids", index)
        return self._ids[first : end - 1].tobytes().decode()

    @cached_property
    def byte_counts(self) -> np.ndarray:
        """The number of UTF-8 bytes of each document's text."""
        return self._records["bytes"].astype(np.int64)

    @cached_property
    def word_counts(self) -> np.ndarray:
        """The number of words, white space between them, of each document's text."""
        return self._records["words"].astype(np.int64)

    @property
    def target_count(self) -> int:
        """How many tokens there are to predict: all but the start token of each document."""
        return len(self.tokens) - len(self)

    def _span(self, field: str, index: int) -> tuple[int, int]:
        return int(self._records[field][index - 1]) if index else 0, int(self._records[field][index])

    def holds(self, index: int, document: Document) -> bool:
        """Whether document `index` was made from this very id and text."""
        return index < len(self) and self._records["digest"][index].tolist() == _digest(document)

    def copy_first(self, count: int, tokens: IO[bytes], records: IO[bytes], ids: IO[bytes]) -> None:
        """Writes the first `count` documents to the files of another tokenised corpus."""
        tokens.write(self.tokens[: self._span("tokens", count - 1)[1]].data)
        records.write(self._records[:count].data)
        ids.write(self._ids[: self._span("ids", count - 1)[1]].data)


def tokenize_corpus(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, folder: str | Path | None = None
) -> TokenizedCorpus:
    """Tokenises documents into `folder` (one folder for each split), or into a temporary file.

    What the folder holds already is used again as far as it was made from the same documents with the same tokenizer;
    a damaged one is made anew.
    """
    documents = iter(documents)
    fingerprint = tokenizer_fingerprint(tokenizer)
    old = None if folder is None else _reusable(Path(folder), fingerprint)
    kept, document = 0, next(documents, None)
    if document is None:
        raise UsageError("there are no documents to tokenise: the corpus is empty")
    while old and document and old.holds(kept, document):
        kept, document = kept + 1, next(documents, None)
    if old and document is None and kept == len(old):
        return old
    rest = chain([document], documents) if document else iter(())
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="mnemic-") as temporary, clear_os_errors(Path(temporary)):
            _write(Path(temporary), rest, tokenizer, fingerprint)
            return TokenizedCorpus(temporary)  # the mapped files stay readable when the folder is gone
    with new_folder(folder) as unfinished:
        _write(unfinished, rest, tokenizer, fingerprint, old, kept)
    return TokenizedCorpus(folder)


def count_words(text: str, piece: int = 1 << 20) -> int:
    """`len(text.split())` without a list of all words of a long text."""
    count = 0
    for start in range(0, len(text), piece):
        count += len(text[start : start + piece].split())
        if start and not text[start - 1].isspace() and not text[start].isspace():
            count -= 1  # the word across the border was counted twice
    return count


def _write(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    fingerprint: str,
    old: TokenizedCorpus | None = None,
    kept: int = 0,
) -> None:
    """Writes the files of a tokenised corpus: the first `kept` documents of `old`, then `documents`."""
    vocab_size = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    with contextlib.ExitStack() as stack:
        tokens, records, ids = (stack.enter_context(open(folder / name, "wb")) for name in FILES)
        bar = stack.enter_context(tqdm(desc="tokenising", unit="B", unit_scale=True, delay=2, disable=None))
        if old and kept:
            old.copy_first(kept, tokens, records, ids)
        for document, piece, last in encode(documents, tokenizer):
            tokens.write(np.array(piece, dtype).tobytes())
            if last:
                ids.write(_id_bytes(document))
                size = len(document.text.encode())
                ends = tokens.tell() // dtype.itemsize, ids.tell()
                records.write(np.array((*ends, size, count_words(document.text), _digest(document)), RECORD).tobytes())
                bar.update(size)
    manifest = {
        "schema": SCHEMA,
        "dtype": dtype.str,
        "vocab_size": vocab_size,
        "end_token": start_and_end(tokenizer)[1],
        "tokenizer": fingerprint,
        "files": {name: checksum(folder / name) for name in FILES},
    }
    write_text(folder / MANIFEST, json.dumps({**manifest, "checksum": _manifest_checksum(manifest)}, indent=2) + "\n")


def _id_bytes(document: Document) -> bytes:
    return document.id.encode("utf-8", "backslashreplace") + b"\n"


def _digest(document: Document) -> list[int]:
    """128 bits that tell a document's id and text from any other's."""
    digest = xxhash.xxh3_128_intdigest(_id_bytes(document) + document.text.encode())
    return [digest >> 64, digest & (1 << 64) - 1]


def _reusable(folder: Path, fingerprint: str) -> TokenizedCorpus | None:
    """What a folder holds from before, if it is whole and of the same tokenizer; one of other things is refused."""
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file: give a folder for the tokenised corpus")
    names = {item.name for item in folder.iterdir()}
    if others := names - {*FILES, MANIFEST}:
        raise UsageError(f"{folder} holds other files ({min(others)}): give the tokenised corpus a folder of its own")
    if not names:
        return None
    try:
        corpus = TokenizedCorpus(folder)
    except DamagedError as error:
        log.warning("%s; it is made anew", error)
        return None
    return corpus if corpus.tokenizer == fingerprint else None


def _checked_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a tokenised corpus, after every file was found to be as it was written."""
    if not folder.is_dir():
        raise missing(folder)
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest.pop("checksum") != _manifest_checksum(manifest):
            raise ValueError(f"{MANIFEST} was altered")
        if manifest["schema"] != SCHEMA:
            raise ValueError(f"schema {manifest['schema']} is of another version of mnemic")
        for name in FILES:
            if checksum(folder / name) != manifest["files"][name]:
                raise ValueError(f"{name} was altered")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(
            f"{folder} is not a whole tokenised corpus ({error}): delete it and tokenise again"
        ) from None
    return manifest


def _manifest_checksum(manifest: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())
