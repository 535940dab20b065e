"""The node side's command lines: what their environment is made of."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

PROGRAM = """
from trainer.entry import run_command

def work(path, stop):
    import torch
    return 0

raise SystemExit(run_command("program", None, work))
"""


@pytest.mark.parametrize(
    ("exported", "count"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")],
    ids=["ours", "the user's count", "the user's policy"],
)
def test_threads_that_wait_soon_sleep_unless_the_user_says_otherwise(exported: dict[str, str], count: str) -> None:
    inherited = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    environment = {**inherited, **exported, "OMP_DISPLAY_ENV": "verbose"}
    command = [sys.executable, "-c", PROGRAM, "config.yaml"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr) == [count]
