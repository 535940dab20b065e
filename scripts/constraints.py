"""Writes constraints.txt: the versions in this environment, so that `make setup` makes the same one tomorrow.

    make constraints                                          pins for dependencies that are new in pyproject.toml
    make constraints VENV=FOLDER CLUSTERKIT_CONSTRAINTS=      the newest versions of everything, in a new FOLDER

scripts/setup.sh gives the file to pip, and `make setup CLUSTERKIT_CONSTRAINTS=` goes without: for a Python or a
platform that has no build of a version named here. Neither images nor the environment of scripts/vllm_cpu.py read it.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).parents[1] / "constraints.txt"
OURS = "clusterkit"


def main(out: Path) -> None:
    """Write the file."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "list", "--format=json"]
    packages = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    # Without the local part: 2.13.0 is any build of torch, 2.13.0+cpu only that of PyTorch's own index.
    pins = {_normal(package["name"]): package["version"].partition("+")[0] for package in packages}
    pins.pop(OURS, None)
    made = f"Python {platform.python_version().rpartition('.')[0]}, {platform.system()} {platform.machine()}"
    lines = [f"# Versions that `make setup` installs. Made by scripts/constraints.py ({made})."]
    lines += [f"{name}=={version}" for name, version in sorted(pins.items())]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{out}: {len(pins)} packages")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
