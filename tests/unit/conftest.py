"""Disks that are full or read-only, for the tests of faults."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def _mounted(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"cannot mount a small disk here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    yield from _mounted(tmp_path / "small-disk", "size=1m")


@pytest.fixture
def read_only_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that cannot be written, not even by root."""
    yield from _mounted(tmp_path / "read-only-disk", "size=1m,ro")
