"""constraints.txt: a version for all that pyproject.toml asks for, which pip on another machine can take, too."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

REPOSITORY = Path(__file__).parents[2]
EXTRAS = ("train", "eval", "assets", "data", "docs", "dev")


def pins_of(file: Path) -> dict[str, str]:
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines)
    assert list(pins) == sorted(map(canonicalize_name, pins))
    return pins


def test_everything_that_is_asked_for_has_a_version() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f".[{','.join(EXTRAS)}]" in (REPOSITORY / "scripts" / "setup.sh").read_text(encoding="utf-8")
    optional = project["optional-dependencies"]
    wanted = [Requirement(text) for text in sum((optional[extra] for extra in EXTRAS), project["dependencies"])]

    pins = pins_of(REPOSITORY / "constraints.txt")

    unmet = [str(one) for one in wanted if not one.specifier.contains(pins.get(canonicalize_name(one.name), "0"))]
    assert unmet == [], "make constraints"
    assert {"grimp", "pip"} <= set(pins), "what the others need in turn, and what installs them"


def test_written_from_an_environment(tmp_path: Path) -> None:
    script = REPOSITORY / "scripts" / "constraints.py"
    file = tmp_path / "constraints.txt"
    subprocess.run([sys.executable, script, file], check=True, capture_output=True)

    pins = pins_of(file)

    assert pins["torch"] == "2.13.0"  # of any build
    assert pins["pytest"]
    assert "clusterkit" not in pins
    assert all(Version(version).local is None for version in pins.values())


def test_what_the_oldest_python_cannot_have_is_refused(tmp_path: Path) -> None:
    facts = tmp_path / "late-1.2.dist-info" / "METADATA"
    facts.parent.mkdir()
    facts.write_text("Metadata-Version: 2.1\nName: late\nVersion: 1.2\nRequires-Python: >=3.11.5\n")
    script, file = REPOSITORY / "scripts" / "constraints.py", tmp_path / "constraints.txt"
    done = subprocess.run(
        [sys.executable, script, file], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip

    assert done.returncode == 1
    assert "Python 3.11 cannot have these:\n  late==1.2 needs Python >=3.11.5\n" in done.stderr
    assert "pip install 'late<1.2'" in done.stderr
    assert not file.exists()
