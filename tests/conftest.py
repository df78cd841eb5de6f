"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# The same examples in each run, and no test that fails because the machine is slow.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
