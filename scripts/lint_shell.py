"""Runs shellcheck over all shell of the repository: its own scripts, and what clusterkit sends to hosts and to Slurm.

The latter is rendered with sample data (tests/hostscripts.py). Exit code 1 and shellcheck's words for what it finds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "unit")]

# Blocks define functions and variables that not every script uses; files sourced on the host are not here; scripts
# within scripts stand in single quotes.
IGNORED_IN_RENDERED = "--exclude=SC1090,SC1091,SC2016,SC2034,SC2317,SC2329"


def main() -> int:
    """Check everything; the exit code."""
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        print("shellcheck is not installed: make setup, or apt-get install shellcheck", file=sys.stderr)
        return 1
    listing = ["git", "ls-files", "*.sh", ".ci/run"]
    own = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    faults = _faults([shellcheck], {str(ROOT / name): name for name in own})
    with tempfile.TemporaryDirectory() as folder:
        titles = {}
        for number, (title, text) in enumerate(_rendered()):
            file = Path(folder) / f"{number}.sh"
            file.write_text(text)
            titles[str(file)] = title
        faults += _faults([shellcheck, IGNORED_IN_RENDERED], titles)
    print("\n".join(faults) if faults else f"shellcheck: {len(own) + len(titles)} scripts are fine")
    return 1 if faults else 0


def _faults(command: list[str], titles: dict[str, str]) -> list[str]:
    checked = subprocess.run([*command, "-f", "gcc", *titles], check=False, text=True, capture_output=True)
    if checked.returncode > 1:
        return [checked.stderr]
    named = [line.partition(":") for line in checked.stdout.splitlines()]
    return [f"{titles[file]}: {rest}" for file, _, rest in named]


def _rendered() -> list[tuple[str, str]]:
    from hostscripts import all_scripts  # noqa: PLC0415 (from tests/)
    from test_slurm_script import rendered  # noqa: PLC0415

    # The probe is looked at as it lies in its file.
    scripts = [script for script in all_scripts() if script.name != "probe"]
    host = [(script.name, f"#!/bin/{'bash' if script.bash else 'sh'}\n{script.script}") for script in scripts]
    return [*host, *rendered().items()]


if __name__ == "__main__":
    sys.exit(main())
