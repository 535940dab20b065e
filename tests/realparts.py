"""The machine that tests run on: its cores, and what to do when a real part that a test needs is not there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

CORES = int(os.environ.get("CLUSTERKIT_TEST_CORES") or os.cpu_count() or 1)
"""Cores that tests may use: scripts/run_tests.py shares them out."""


def require(present: bool, reason: str) -> None:
    """Skip the test, or fail it where CLUSTERKIT_REQUIRE_REAL=1 says that everything must be there."""
    if present:
        return
    if os.environ.get("CLUSTERKIT_REQUIRE_REAL") == "1":
        pytest.fail(f"{reason} (and CLUSTERKIT_REQUIRE_REAL=1 forbids skipping)")
    pytest.skip(reason)


def data_is_missing(reason: str) -> None:
    """Skip a test that needs data; fail where CLUSTERKIT_REQUIRE_DATA=1 says that it must be there."""
    if os.environ.get("CLUSTERKIT_REQUIRE_DATA") == "1":
        pytest.fail(f"{reason} (and CLUSTERKIT_REQUIRE_DATA=1 forbids skipping)")
    pytest.skip(reason)


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
