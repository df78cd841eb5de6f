"""Settings of all tests, and the summary of the contract matrix: what holds, and what is refused for which reason."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest
from hypothesis import settings

# The same examples in each run, and no test that fails because the machine is slow.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

RULES = "tests/contract/test_memory.py"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    cases = {
        outcome: [r for r in terminalreporter.stats.get(outcome, []) if RULES in r.nodeid and r.when != "teardown"]
        for outcome in ("passed", "skipped", "failed")
    }
    if not any(cases.values()):
        return
    refused = defaultdict(list)
    for report in cases["skipped"]:
        rule, case = re.search(r"::test_(\w+?)\[(.*)\]", report.nodeid).groups()
        refused[report.longrepr[2].removeprefix("Skipped: ")].append(f"{rule}[{case}]")
    passed, failed = (len([r for r in cases[k] if r.when == "call"]) for k in ("passed", "failed"))
    terminalreporter.section("contract matrix: memory x architecture x rule")
    terminalreporter.write_line(f"{passed} hold, {failed} broken, {sum(map(len, refused.values()))} refused:")
    for reason, names in sorted(refused.items()):
        terminalreporter.write_line(f"  {len(names):3d}  {reason}")
        terminalreporter.write_line(f"       {', '.join(sorted(names))}")
