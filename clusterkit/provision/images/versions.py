"""The pinned versions of the runtime images: images/versions.env."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def folder() -> Path:
    """Return the folder of the Dockerfiles and versions: in an installed package, or at the top of the repository."""
    package = Path(__file__).parents[2]
    packed = package / "_images"
    return packed if packed.is_dir() else package.parent / "images"


@cache
def versions() -> dict[str, str]:
    """Return every pinned version by its name, such as RAY_VERSION."""
    lines = (folder() / "versions.env").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    return {name.strip(): value.strip() for name, value in pairs}
