from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mnemic.data import reading
from mnemic.data.reading import lines_of, read_pieces, read_rows, read_text
from mnemic.errors import DamagedError, UsageError

LINES = ["first line\r\n", "zwölf Boxkämpfer\n", "日本語 \U0001f600\n", "\x1c\u2028no line end"]
TEXT = "".join(LINES)


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".xz", lzma.compress), (".gz", gzip.compress)])
@pytest.mark.parametrize("piece", [1, 2, 3, 5, 1 << 20])
def test_text_comes_back_exactly_whatever_the_piece(tmp_path, monkeypatch, suffix, pack, piece):
    path = tmp_path / f"text.txt{suffix}"
    path.write_bytes(pack(TEXT.encode()))
    monkeypatch.setattr(reading, "_PIECE", piece)
    assert read_text(path) == TEXT
    assert list(lines_of(read_pieces(path))) == LINES


@given(st.lists(st.text(alphabet="a\n\r\u2028", max_size=6)))
def test_lines_of_pieces_are_those_of_the_whole(pieces):
    lines = list(lines_of(pieces))
    whole = "".join(pieces)
    assert "".join(lines) == whole
    assert len(lines) == whole.count("\n") + (not whole.endswith("\n") and whole != "")
    assert all(line.find("\n") in (-1, len(line) - 1) for line in lines)


@pytest.mark.parametrize("piece", [1, 4, 1 << 20])
@pytest.mark.parametrize(
    ("data", "what", "at"),
    [
        (b"some\x00text", "NUL", 4),
        ("päper".encode("latin-1"), "UTF-8", 1),
        ("ok ok ok ä".encode()[:-1], "UTF-8", 9),
        (b"0123456789\xff", "UTF-8", 10),
    ],
)
def test_a_binary_file_is_named_with_the_byte(tmp_path, monkeypatch, piece, data, what, at):
    path = tmp_path / "image.png"
    path.write_bytes(data)
    monkeypatch.setattr(reading, "_PIECE", piece)
    with pytest.raises(UsageError, match=rf"image\.png.*{what}.*at byte {at};"):
        read_text(path)


def test_damaged_packing(tmp_path):
    packed = lzma.compress(TEXT.encode() * 1000)
    for name, data in {"cut.xz": packed[: len(packed) // 2], "not.xz": b"hello", "not.gz": b"hello"}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DamagedError, match="cannot be unpacked"):
            read_text(tmp_path / name)


def test_missing_and_forbidden_files(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="no such file"):
        read_text(tmp_path / "nothing.txt")

    def forbidden(*_):
        raise PermissionError

    monkeypatch.setitem(reading.PACKED, ".txt", forbidden)  # root may read anything, so the system's word is put in
    with pytest.raises(UsageError, match=r"no permission to read .*secret\.txt"):
        read_text(tmp_path / "secret.txt")


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_rows(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", json.dumps({"text": "a\nb"}), "", json.dumps({"text": "", "id": 3}))
    assert list(read_rows(path)) == [(1, {"text": "a\nb"}), (3, {"text": "", "id": 3})]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"txt": "a"}', 'no "text"'),
        ('{"text": 7}', 'no "text"'),
        ('["text"]', 'no "text"'),
        ('{"text": "a"', "not JSON"),
        (r'{"text": "\ud800"}', "surrogates"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path, line, what):
    path = write_lines(tmp_path / "a.jsonl", '{"text": "good"}', line)
    with pytest.raises(UsageError, match=rf"a\.jsonl, line 2.*{what}"):
        list(read_rows(path))
