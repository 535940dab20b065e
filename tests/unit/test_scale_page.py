"""docs/scale.md: its tables are those that `presets plan` would print today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_the_tables_are_those_of_the_present_rates_and_presets() -> None:
    command = [sys.executable, str(REPOSITORY / "scripts" / "scale_page.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, f"run {' '.join(command[:2])} {done.stderr}"
