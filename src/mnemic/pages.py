"""Memory in large pages: where rows are read here and there, much time goes into finding out where small pages are."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

import torch
from torch import Tensor

LARGE = 2 << 20  # bytes
ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # only Linux has it


def large_empty(*size: int, **where: Any) -> Tensor:
    """As torch.empty; on a CPU in large pages, if it is large and the system has them."""
    made = torch.empty(*size, **where)
    room = made.numel() * made.element_size()
    if ADVICE is not None and made.device.type == "cpu" and room >= 2 * LARGE:
        begin = -(-made.data_ptr() // LARGE) * LARGE
        end = (made.data_ptr() + room) // LARGE * LARGE
        _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ADVICE)  # which may be declined
    return made


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
