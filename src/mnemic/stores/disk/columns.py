"""One array in one file: written once from front to end, read through a memory map, checked block by block.

The file is the bare array, little-endian. Its blocks' checksums are kept by whoever owns the file; a block is checked
when it is first touched, so that opening costs nothing and no damaged number is ever used.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from mnemic.errors import DamagedError
from mnemic.files import clear_os_errors
from mnemic.stores.config import StoreConfig

CHECKED_WHOLE = 1 << 26  # bytes up to which a file is checked as a whole
BLOCK = 1 << 15  # bytes of a block, at most (but at least one row)


def rows_of_a_block(row_bytes: int) -> int:
    """How many rows share a checksum; a row never lies in two blocks."""
    return max(1, BLOCK // row_bytes)


def blocks_of(rows: int, row_bytes: int) -> int:
    """How many checksums a column has."""
    return -(-rows // rows_of_a_block(row_bytes))


def in_type(rows: NDArray[np.generic], dtype: DTypeLike) -> NDArray[Any]:
    """Rows in another type; torch is many times faster at float16 than numpy."""
    dtype = np.dtype(dtype)
    if {rows.dtype, dtype} == {np.dtype(np.float16), np.dtype(np.float32)}:
        import torch

        tensor = torch.from_numpy(np.require(rows, requirements=["C", "W"]))
        return tensor.to(torch.float16 if dtype == np.float16 else torch.float32).numpy()
    return np.ascontiguousarray(rows, dtype)


class ColumnWriter:
    """Appends rows to a new file and takes the checksums on the way."""

    def __init__(self, path: Path, dtype: DTypeLike, width: int) -> None:
        self.path, self.dtype, self.width = path, np.dtype(dtype).newbyteorder("<"), width
        self.rows = 0
        self._sums: list[int] = []
        self._digest = xxhash.xxh3_64()
        self._before = (0, 0, self._digest.copy())  # rows, checksums and digest before the last rows came
        with clear_os_errors(path):
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (close closes it)

    def append(self, rows: NDArray[np.generic]) -> None:
        """Writes rows (n, width), converted to the file's type."""
        rows = in_type(rows, self.dtype).reshape(len(rows), self.width)
        self._before = (self.rows, len(self._sums), self._digest.copy())
        with clear_os_errors(self.path):
            data = rows.reshape(-1).view(np.uint8).data
            while data:
                data = data[self._file.write(data) :]
        self.rows += len(rows)
        block = rows_of_a_block(self.dtype.itemsize * self.width)
        space = block - self._before[0] % block
        while len(rows):
            self._digest.update(rows[:space].data)
            if len(rows) >= space:
                self._sums.append(self._digest.intdigest())
                self._digest = xxhash.xxh3_64()
            rows, space = rows[space:], block

    def cut_back(self, rows: int) -> None:
        """Takes back the last rows, if they, or a part of them, came after these `rows`."""
        if self._before[0] == rows:
            self.rows, whole, self._digest = rows, self._before[1], self._before[2].copy()
            del self._sums[whole:]
            with clear_os_errors(self.path):
                self._file.seek(rows * self.width * self.dtype.itemsize)
                self._file.truncate()

    def finish(self) -> list[int]:
        """Makes the file durable and returns the checksums of its blocks; more rows may follow."""
        with clear_os_errors(self.path):
            os.fsync(self._file.fileno())
        partial = self.rows % rows_of_a_block(self.dtype.itemsize * self.width)
        return [*self._sums, self._digest.intdigest()] if partial else self._sums

    def close(self) -> None:
        """Lets go of the file."""
        self._file.close()


def open_inside(path: Path) -> int:
    """A descriptor of a file of the store; a link, which could lead anywhere, a pipe or a folder is refused."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror}): it is no ordinary file of a store") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedError(f"{path} is no ordinary file: copy it back from a backup, or build the store again")
    return descriptor


class Column:
    """A file of `rows` rows of `width` numbers (of plain numbers if it is 1), with the checksums of its blocks."""

    def __init__(self, path: Path, dtype: DTypeLike, rows: int, width: int, sums: NDArray[np.uint64]) -> None:
        self.path, self.rows = path, rows
        dtype = np.dtype(dtype).newbyteorder("<")
        self._block_rows = rows_of_a_block(dtype.itemsize * width)
        self._sums = sums
        self._checked = np.zeros(len(sums), np.bool_)
        self._whole = False
        self._view: Any = None
        descriptor = open_inside(path)
        try:
            size, wanted = os.fstat(descriptor).st_size, rows * width * dtype.itemsize
            if size != wanted:
                raise DamagedError(
                    f"{path} has {size} bytes where {wanted} belong: it was cut short or exchanged. "
                    f"Copy it back from a backup, or build the store again"
                )
            self._map = mmap.mmap(descriptor, wanted, access=mmap.ACCESS_READ) if wanted else None
        finally:
            os.close(descriptor)
        self._array = np.frombuffer(self._map or b"", dtype).reshape((rows, width) if width > 1 else rows)

    def _check(self, block: int) -> None:
        start = block * self._block_rows
        if xxhash.xxh3_64_intdigest(self._array[start : start + self._block_rows].data) != int(self._sums[block]):
            last = min(start + self._block_rows, self.rows) - 1
            raise DamagedError(
                f"{self.path} is damaged (rows {start} to {last}): copy it back from a backup, or build the store "
                f"again; `mnemic store verify` lists all damage"
            )
        self._checked[block] = True

    def unchecked(self) -> NDArray[np.generic]:
        """All rows, for a file that is checked as a whole."""
        return self._array

    def check_all(self, anew: bool = False) -> None:
        """Looks at every block that was not looked at yet; `anew`, at all."""
        if anew:
            self._checked[:] = False
        elif self._whole:
            return
        for block in np.flatnonzero(~self._checked):
            self._check(int(block))
        self._whole = True
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)  # what was only looked at does not stay in this process's memory

    def touch(self, rows: NDArray[np.int64]) -> None:
        """Checks the blocks of these rows that were not checked yet."""
        if self._whole:
            return
        if self.bytes <= CHECKED_WHOLE:
            self.check_all()
            return
        blocks = rows // self._block_rows
        unchecked = blocks[~self._checked[blocks]]
        if len(unchecked):
            for block in np.unique(unchecked):
                self._check(int(block))
            self._whole = bool(self._checked.all())

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.generic]:
        """A copy of these rows."""
        self.touch(rows)
        return self._array.take(rows, 0)

    @property
    def bytes(self) -> int:
        """The size of the file."""
        return self._array.nbytes

    @property
    def checked(self) -> bool:
        """Whether all of it was checked."""
        return self._whole

    def faiss_view(self, config: StoreConfig) -> Any:
        """An index of FAISS over the vectors in the file, which nothing is copied for."""
        if self._view is None:
            metric = faiss.METRIC_L2 if config.metric == "l2" else faiss.METRIC_INNER_PRODUCT
            if self._array.dtype == np.float16:
                view = faiss.IndexScalarQuantizer(config.dim, faiss.ScalarQuantizer.QT_fp16, metric)
            else:
                view = faiss.IndexFlat(config.dim, metric)
            data = self._array.view(np.uint8).reshape(-1)
            view.codes = faiss.MaybeOwnedVectorUInt8.create_view(faiss.swig_ptr(data), data.size, view.codes.owner)
            view.ntotal = self.rows
            self._view = view
        return self._view

    def part(self, start: int, end: int) -> NDArray[np.generic]:
        """Rows from `start` up to `end`, straight from the file."""
        if not self._whole and start < end:
            blocks = np.arange(start // self._block_rows, (end - 1) // self._block_rows + 1)
            for block in blocks[~self._checked[blocks]]:
                self._check(int(block))
        return self._array[start:end]
