"""Reading text files, plain or packed, in pieces, with an error that names the file and the byte or line."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from mnemic.errors import DamagedError, UsageError

PACKED = {".xz": lzma.open, ".gz": gzip.open}
_PIECE = 1 << 20


def unpacked_name(path: Path) -> str:
    """A file's name without the suffix of its packing: "train.txt.xz" -> "train.txt"."""
    return path.name.removesuffix(path.suffix) if path.suffix in PACKED else path.name


def read_pieces(path: Path) -> Iterator[str]:
    """Yields a UTF-8 text file in pieces of about a megabyte, exactly as it is: line ends are not translated."""
    pending, offset, final = b"", 0, False
    with _opened(path) as file:
        while not final:
            piece = file.read(_PIECE)
            final = not piece
            if (nul := piece.find(0)) >= 0:
                raise _binary(path, "a NUL byte", offset + nul)
            data, start = pending + piece, offset - len(pending)
            try:
                text, used = codecs.utf_8_decode(data, "strict", final)
            except UnicodeDecodeError as error:
                raise _binary(path, "not UTF-8", start + error.start) from None
            pending, offset = data[used:], offset + len(piece)
            yield text


def read_text(path: Path) -> str:
    """The whole text of a file."""
    return "".join(read_pieces(path))


def lines_of(pieces: Iterable[str]) -> Iterator[str]:
    r"""Yields the lines of a text that comes in pieces, each with its line end; only "\n" ends a line."""
    rest: list[str] = []
    for piece in pieces:
        start = 0
        while (end := piece.find("\n", start) + 1) > 0:
            yield "".join([*rest, piece[start:end]])
            rest, start = [], end
        if start < len(piece):
            rest.append(piece[start:])
    if rest:
        yield "".join(rest)


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields line number and object of each line of a .jsonl file; each object is sure to have a text in "text"."""
    for number, line in enumerate(lines_of(read_pieces(path)), start=1):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise UsageError(f'{path}, line {number} has no "text": each line must be an object with a text in it')
        try:
            row["text"].encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(f"{path}, line {number}: {error.reason} in its text at character {error.start}") from None
        yield number, row


def _binary(path: Path, what: str, offset: int) -> UsageError:
    return UsageError(
        f"{path} is not a text file: {what} at byte {offset}; convert it to UTF-8 or leave it out of the corpus"
    )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The unpacked bytes of a file; what the system or the packing says is said in one sentence."""
    try:
        with PACKED.get(path.suffix, open)(path, "rb") as file:  # type: ignore[operator]
            yield file
    except PermissionError:
        raise UsageError(f"no permission to read {path}: change its rights or take another file") from None
    except FileNotFoundError:
        raise UsageError(f"no such file: {path}") from None
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DamagedError(f"{path} cannot be unpacked ({error}): get the file again") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
