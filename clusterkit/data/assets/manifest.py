"""The manifest of a fetched folder: every file's size and SHA-256, and the source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainer.files import sha256, write_atomic

MANIFEST = "clusterkit-asset.json"


def write_manifest(folder: Path, asset: str, details: dict[str, Any]) -> None:
    """Write the manifest of a folder; `details` has at least `source`."""
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    write_atomic(folder / MANIFEST, json.dumps({"asset": asset, **details, "files": files}, indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest, or None if it is missing or damaged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) else None


def origin(source: str) -> str:
    """Return a source for the manifest: a URL without user, password and query (possible secrets), or a full path."""
    parts = urlsplit(source)
    if parts.scheme in ("http", "https"):
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    return str(Path(source).expanduser().resolve())


def differences(folder: Path, manifest: dict[str, Any]) -> str:
    """Return which files are missing or changed, as a phrase; empty if none."""
    wrong = []
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif path.stat().st_size != expected["bytes"] or sha256(path) != expected["sha256"]:
            wrong.append(f"{name} is different")
    return ", ".join(wrong)
