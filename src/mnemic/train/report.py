"""What a run tells about itself: log.jsonl line by line, report.json as a whole, and the versions that made it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

from mnemic.errors import DamagedError
from mnemic.files import clear_os_errors, fsync, write_text


class Log:
    """log.jsonl: one JSON line per logged step, without times, so that equal runs write equal files.

    It is made durable before each checkpoint and cut back to the checkpoint on resume: no line twice, none missing.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        with clear_os_errors(path):
            text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1].splitlines()  # a killed process may have left half a line
        try:
            self.entries = [entry for entry in map(json.loads, whole) if entry["step"] <= step]
        except (ValueError, KeyError, TypeError):
            raise DamagedError(f"{path} is damaged: expected a JSON object with a step in each line") from None
        kept = "".join(map(_line, self.entries))
        if not path.exists() or text != kept:
            write_text(path, kept)

    def append(self, entry: dict[str, Any]) -> None:
        """Adds a line."""
        self.entries.append(entry)
        with clear_os_errors(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(_line(entry))

    def sync(self) -> None:
        """Makes the lines durable."""
        with clear_os_errors(self.path):
            fsync(self.path)


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry) + "\n"


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Replaces report.json atomically."""
    write_text(path, json.dumps(report, indent=2) + "\n")


def versions() -> dict[str, str]:
    """The versions of Python and of the libraries that numbers depend on."""
    libraries = ("mnemic", "torch", "transformers", "accelerate", "tokenizers", "datasets", "numpy")
    return {"python": platform.python_version()} | {name: _version(name) for name in libraries}


def _version(library: str) -> str:
    if library == "mnemic":  # also right when it runs from a source tree that was never installed
        import mnemic

        return mnemic.__version__
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def commit() -> str | None:
    """The git commit of the working directory, "-dirty" if files differ from it, or None outside of a repository.

    Folders `results` and texts (.md), which runs write while others go on, do not count: they make no figure.
    """
    code = (":/", ":(top,exclude,glob)**/results/**", ":(top,exclude,glob)**/*.md")
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        if head.returncode:
            return None
        differs = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *code], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + ("-dirty" if differs.returncode else "")
