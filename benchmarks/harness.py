"""Compares settings fairly: one process each, order alternated, minimum and spread kept, the machine's load recorded.

A benchmark is a script that, called with `--setting NAME`, measures that one setting and prints a JSON object with
"seconds" (of the measured unit of work) as its last line, and otherwise calls `compare`. This file must stay light:
a child's peak memory is counted from its parent's size on.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def compare(script: str, settings: list[str], arguments: list[str], repeats: int, name: str) -> dict[str, Any]:
    """Runs all settings `repeats` times; the first one is what the others are compared with. Writes and returns it."""
    runs: dict[str, list[dict[str, Any]]] = {setting: [] for setting in settings}
    before = os.getloadavg()
    for turn in range(repeats):
        for setting in settings if turn % 2 == 0 else reversed(settings):
            found = run_once([sys.executable, script, "--setting", setting, *arguments])
            runs[setting].append(found)
            progress = f"{turn + 1}/{repeats} {setting}: {found['seconds']:.3f} s, {found['peak_mb']:.0f} MB"
            print(progress, file=sys.stderr, flush=True)
    result = {
        "name": name,
        "arguments": arguments,
        "baseline": settings[0],
        "settings": summary(runs, settings[0]),
        "load_average": {"before": before, "after": os.getloadavg()},
        **machine(),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"written: {path}", file=sys.stderr)
    return result


def run_once(command: list[str]) -> dict[str, Any]:
    """The JSON object that a process printed last, with its peak memory added as "peak_mb".

    Of a process that says what it held before its work, "before_mb", only the work's own counts.
    """
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        lines = output.read().splitlines()
    if process.returncode or not lines:
        raise SystemExit(f"benchmark failed with exit code {process.returncode}: {' '.join(command)}")
    found = json.loads(lines[-1])
    return {**found, "peak_mb": usage.ru_maxrss / 1024 - found.get("before_mb", 0)}


def summary(runs: dict[str, list[dict[str, Any]]], baseline: str) -> dict[str, dict[str, Any]]:
    """Per setting the least time and memory, the spread of the times, and the ratios of the minima.

    A process that measures the work without what it costs too, in turns with it, gives those seconds as "without":
    its ratio is to them, and what it costs is the difference.
    """
    best = {name: min(run["seconds"] for run in found) for name, found in runs.items()}
    bare = {name: min(run.get("without", best[baseline]) for run in found) for name, found in runs.items()}
    peak = {name: min(run["peak_mb"] for run in found) for name, found in runs.items()}
    return {
        name: {
            "seconds": best[name],
            "spread": max(run["seconds"] for run in found) / best[name] - 1,
            "time_ratio": best[name] / bare[name],
            "cost": best[name] - bare[name],
            "peak_mb": peak[name],
            "memory_ratio": peak[name] / peak[baseline],
            "runs": found,
        }
        for name, found in runs.items()
    }


def machine() -> dict[str, Any]:
    """What the numbers depend on besides the code: processors, versions, commit and time."""
    packages = {package: version(package) for package in ("torch", "transformers", "numpy")}
    return {
        "processors": os.cpu_count(),
        "platform": platform.platform(),
        "versions": {"python": platform.python_version(), **packages},
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no", ":!/benchmarks/results")),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def table(result: dict[str, Any]) -> str:
    """The summary as a Markdown table."""
    lines = ["| setting | s | more s | time ratio | peak MB | memory ratio | spread |", "|---|---|---|---|---|---|---|"]
    for name, found in result["settings"].items():
        lines.append(
            f"| {name} | {found['seconds']:.3f} | {found['cost']:.3f} | {found['time_ratio']:.2f} "
            f"| {found['peak_mb']:.0f} | {found['memory_ratio']:.2f} | {found['spread']:.0%} |"
        )
    return "\n".join(lines)
