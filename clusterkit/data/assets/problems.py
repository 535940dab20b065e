"""Sets of mathematical problems that `clusterkit eval` knows by name: published files, pinned by hash.

A set that the Hugging Face hub has as JSON lines comes from there, or from the mirror in $HF_ENDPOINT; the others come
from the repositories that published them. All keep their own columns.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from clusterkit.data.assets.download import Say, download
from clusterkit.data.assets.manifest import origin
from evaluation.suites.problems import read_problems
from trainer.errors import UserError

HUB = "https://huggingface.co"
_GITHUB = "https://raw.githubusercontent.com"
_AREAL = f"{_GITHUB}/areal-project/AReaL/de3f66a90c374560f72bdc1e8200a55de8b26015/evaluation/data"
FILE = "test.jsonl"


@dataclass(frozen=True, slots=True)
class Published:
    """Where a set was published."""

    description: str  # for `clusterkit assets list`
    licence: str
    path: str  # "ORG/NAME@REVISION" on the hub, else a URL
    sha256: str

    @property
    def url(self) -> str:
        """The file's address."""
        if "://" in self.path:
            return self.path
        repository, _, revision = self.path.partition("@")
        endpoint = (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
        return f"{endpoint}/datasets/{repository}/resolve/{revision}/{FILE}"


PUBLISHED = {
    "math_500": Published(
        "500 problems of MATH with solutions (447 kB)",
        "none stated",
        "HuggingFaceH4/MATH-500@6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
    ),
    "aime24": Published(
        "30 problems of AIME 2024, AReaL's file (157 kB)",
        "none stated",
        f"{_AREAL}/aime24/{FILE}",
        "af2b8bd2aa911b6333ad0df32f3ca05c7ae8ed10f1731f4372c8ae26990bf7ac",
    ),
    "aime25": Published(
        "30 problems of AIME 2025 (15 kB)",
        "Apache-2.0",
        "math-ai/aime25@563bb8404243c5f09de6ec262f2db674fe5bce9b",
        "b4e273c02d3e7fe1b74b59eae768fc8230bfb0f79539890cb56f4361caac0331",
    ),
    "amc23": Published(
        "40 problems of AMC 2023, AReaL's file (28 kB)",
        "none stated",
        f"{_AREAL}/amc23/{FILE}",
        "43707e1ca784602d8479de24ee8ce36609dbebc46dd152b0b12a46611aa898a4",
    ),
    "gsm8k": Published(
        "1,319 test problems of GSM8K (750 kB)",
        "MIT",
        f"{_GITHUB}/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data/{FILE}",
        "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
    ),
}


def fetch(name: str, source: str, folder: Path, say: Say) -> dict[str, Any]:
    """Save a set as test.jsonl and check that every problem can be read.

    Args:
        source: a URL, a JSON-lines file (plain or .gz), or a folder with test.jsonl; empty: the published file.

    Returns:
        `source` and `questions`, for the manifest.

    Raises:
        UserError: the source is missing, or a line is no problem.
        RunError: the download failed.
    """
    published = PUBLISHED[name]
    address = source or published.url
    if urlsplit(address).scheme in ("http", "https"):
        kept = folder / FILE
        download(address, kept, say, expected_sha256="" if source else published.sha256)
    else:
        file = _file(Path(address).expanduser())
        kept = folder / (f"{FILE}.gz" if file.suffix == ".gz" else FILE)
        shutil.copyfile(file, kept)
    return {"source": origin(address), "questions": count(name, kept)}


def count(name: str, file: Path) -> int:
    """Return the number of problems in a file; UserError names the file and the line that is none."""
    return len(read_problems(name, file))


def file_in(folder: Path) -> Path:
    """Return the problems' file in a folder; raise UserError if there is none."""
    for file in (folder / FILE, folder / f"{FILE}.gz"):
        if file.is_file():
            return file
    raise UserError(f"{folder} has no {FILE}: put the problems there, or move the folder away and fetch the set again")


def _file(path: Path) -> Path:
    if path.is_dir():
        return file_in(path)
    if not path.is_file():
        raise UserError(f"--from {path}: there is no such file or folder")
    return path
