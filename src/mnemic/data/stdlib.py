"""The embedded corpus: the running Python's own standard library."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from mnemic.data.documents import Corpus, Document, divided
from mnemic.data.local import files_under, join
from mnemic.data.reading import read_text
from mnemic.errors import UsageError

_TESTS = {"test", "tests", "idle_test"}


def stdlib(path: str | None) -> Corpus:
    """The running Python's own standard library: a package or top-level module is a document; split by hash."""
    root = Path(path or sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise UsageError(f"this Python's standard library is not a folder ({root}): give another corpus")
    return divided("stdlib", partial(_documents, root))


def _documents(root: Path) -> Iterator[Document]:
    for name in sorted(sys.stdlib_module_names - _TESTS):
        package = root / name
        if package.is_dir():
            files = [file for inner, file in files_under(package) if inner.endswith(".py") and not _is_test(inner)]
            yield Document(name, join(map(read_text, files)))
        elif (module := root / f"{name}.py").is_file():
            yield Document(name, read_text(module))


def _is_test(name: str) -> bool:
    return not _TESTS.isdisjoint(name.split("/")[:-1])
