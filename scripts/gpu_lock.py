"""Writes requirements-gpu.txt: what `make gpu` installs, every package with its version and the hash of one wheel.

    make gpu-lock

The versions that belong together are those of images/versions.env; the rest is the newest that these and pyproject.toml
allow. A package without a wheel for Python 3.12 on Linux x86_64 ends it with an error. The header counts the bytes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

REPOSITORY = Path(__file__).parents[1]
FILE = REPOSITORY / "requirements-gpu.txt"
OLDEST_GLIBC = 35
"""Minor version: 2.35 is that of Ubuntu 22.04. SGLang's wheel wants 2.34."""
PINS = {
    "sglang": "SGLANG_VERSION",
    "sglang-kernel": "SGLANG_KERNEL_VERSION",
    "torch": "TORCH_VERSION",
    "transformers": "TRANSFORMERS_VERSION",
}
# CUDA's compiler, for kernels that SGLang compiles where they first run: of the CUDA that torch was built with.
COMPILER = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-nvvm")
# uv and pip install the rest; the build backend makes the editable install of this repository.
TOOLS = ("uv>=0.9", "pip", "hatchling>=1.27", "hatch-vcs>=0.5", "editables")
EXTRAS = ("gpu", "assets", "data", "eval")


def main(out: Path) -> None:
    """Resolve and write the file."""
    packages = resolved(pins(read_versions()))
    tags = wheel_tags()
    lines, total = [], 0
    for package in sorted(packages, key=lambda one: str(one["name"])):
        wheel = best_wheel(package, tags)
        total += int(wheel["size"])
        lines.append(f"{package['name']}=={package['version']} --hash=sha256:{wheel['hashes']['sha256']}")
    head = [
        "# What `make gpu` installs into .venv-gpu. Made by scripts/gpu_lock.py (`make gpu-lock`):",
        f"# Python 3.12, Linux x86_64 with glibc 2.{OLDEST_GLIBC} or newer; {len(lines)} wheels, {total / 1e9:.1f} GB.",
    ]
    out.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
    print(f"{out}: {len(lines)} packages, {total / 1e9:.2f} GB")


def read_versions() -> dict[str, str]:
    """The variables of images/versions.env."""
    lines = (REPOSITORY / "images" / "versions.env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def pins(versions: dict[str, str]) -> list[str]:
    """Requirements with the versions that belong together."""
    cuda = ".".join(versions["CUDA_BASE"].partition(":")[2].split(".")[:2])
    return [
        *(f"{name}=={versions[variable]}" for name, variable in PINS.items()),
        *(f"{name}=={cuda}.*" for name in COMPILER),
    ]


def resolved(pinned: list[str]) -> list[dict[str, Any]]:
    """Packages as uv resolves them, each with its wheels."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, lock = Path(folder, "wanted.in"), Path(folder, "pylock.toml")
        wanted.write_text("\n".join([*pinned, *TOOLS]) + "\n", encoding="utf-8")
        beside = Path(sys.executable).with_name("uv")
        command = [str(beside) if beside.exists() else "uv", "pip", "compile", "--no-config", "--quiet"]
        command += ["--format", "pylock.toml"]
        command += ["--only-binary", ":all:", "--python-version", "3.12"]
        command += ["--python-platform", f"x86_64-manylinux_2_{OLDEST_GLIBC}"]
        command += [part for extra in EXTRAS for part in ("--extra", extra)]
        command += ["--output-file", str(lock), str(REPOSITORY / "pyproject.toml"), str(wanted)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return list(tomllib.loads(lock.read_text(encoding="utf-8"))["packages"])


def wheel_tags() -> list[Tag]:
    """Tags of wheels that fit, the best first."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(OLDEST_GLIBC, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    return [*cpython_tags((3, 12), platforms=platforms), *compatible_tags((3, 12), "cp312", platforms)]


def best_wheel(package: dict[str, Any], tags: Iterable[Tag]) -> dict[str, Any]:
    """The wheel of a package that an installer would take. Ends the program where there is none."""
    order = {tag: rank for rank, tag in enumerate(tags)}
    fitting = []
    for wheel in package.get("wheels", ()):
        name = str(wheel["url"]).rpartition("/")[2].partition("#")[0]
        ranks = [order[tag] for tag in parse_wheel_filename(name.replace("%2B", "+"))[3] if tag in order]
        if ranks:
            fitting.append((min(ranks), name, wheel))
    if not fitting:
        sys.exit(f"gpu_lock: {package['name']} {package['version']} has no wheel for Python 3.12 on Linux x86_64")
    return min(fitting, key=lambda one: one[:2])[2]


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
