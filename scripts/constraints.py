"""Writes constraints.txt: the versions in this environment, so that `make setup` makes the same one tomorrow.

    make constraints                                          pins for dependencies that are new in pyproject.toml
    make constraints VENV=FOLDER CLUSTERKIT_CONSTRAINTS=      the newest versions of everything, in a new FOLDER

scripts/setup.sh gives the file to pip, and `make setup CLUSTERKIT_CONSTRAINTS=` goes without: for a Python or a
platform that has no build of a version named here. Neither images nor the environment of scripts/vllm_cpu.py read it.

A package that the oldest Python of pyproject.toml cannot have is refused: that of this environment may be newer (Debian
12 has 3.11.2, and a release may want 3.11.5), and `make setup` fails there.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.specifiers import SpecifierSet

FILE = Path(__file__).parents[1] / "constraints.txt"
OURS = "clusterkit"


def main(out: Path) -> None:
    """Write the file."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "list", "--format=json"]
    packages = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    # Without the local part: 2.13.0 is any build of torch, 2.13.0+cpu only that of PyTorch's own index.
    pins = {_normal(package["name"]): package["version"].partition("+")[0] for package in packages}
    pins.pop(OURS, None)
    oldest = oldest_python()
    if wrong := too_new(distributions(), oldest):
        listed = "\n".join(f"  {name}=={version} needs Python {python}" for name, version, python in wrong)
        sys.exit(
            f"Python {oldest} cannot have these:\n{listed}\ninstall the newest release of each that it can, such as\n"
            f"  {sys.executable} -m pip install '{wrong[0][0]}<{wrong[0][1]}'\nand then: make constraints"
        )
    made = f"Python {platform.python_version().rpartition('.')[0]}, {platform.system()} {platform.machine()}"
    lines = [f"# Versions that `make setup` installs. Made by scripts/constraints.py ({made})."]
    lines += [f"{name}=={version}" for name, version in sorted(pins.items())]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{out}: {len(pins)} packages")


def oldest_python() -> str:
    """The oldest Python that pyproject.toml allows."""
    project = tomllib.loads((FILE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return next(one.version for one in SpecifierSet(project["requires-python"]) if one.operator == ">=")


def too_new(packages: Iterable[Distribution], python: str) -> list[tuple[str, str, str]]:
    """Name, version and Requires-Python of the packages that this Python cannot have."""
    found = [(one.name, one.version, one.metadata.get("Requires-Python") or "") for one in packages]
    return sorted(one for one in found if not SpecifierSet(one[2]).contains(python))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
