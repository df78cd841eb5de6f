"""Memory in large pages is memory like any other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mnemic.pages import LARGE, large_empty

MAPS = Path("/proc/self/smaps")
PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("size", [(0, 4), (3,), (LARGE // 4, 3), (5, LARGE // 8 + 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_it_is_written_and_read_as_any_tensor(size: tuple[int, ...], dtype: torch.dtype) -> None:
    made = large_empty(*size, dtype=dtype).fill_(3)
    assert made.shape == size
    assert made.dtype == dtype
    assert (made == 3).all()


def test_no_memory_is_needed_on_the_meta_device() -> None:
    assert large_empty(10**6, 10**6, device="meta").is_meta


@pytest.mark.skipif(not PAGES.exists() or not MAPS.exists(), reason="the system has no large pages")
def test_the_system_is_asked_for_large_pages() -> None:
    made = large_empty(8 * LARGE, dtype=torch.uint8)
    middle = made.data_ptr() + 4 * LARGE
    flags = None
    for line in MAPS.read_text(encoding="ascii").splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= middle < int(found[2], 16)
        elif line.startswith("VmFlags:") and inside:
            flags = line.split()
    assert flags is not None
    assert "hg" in flags
