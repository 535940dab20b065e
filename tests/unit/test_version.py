"""The version comes from git's tags, and there is one without tags, without git and without an installation, too."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SINCE = r"\.post1\.dev(\d+)\+g[0-9a-f]{7,}"


def built(folder: Path, *words: str) -> str:
    """What hatchling prints."""
    command = [sys.executable, "-m", "hatchling", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def git(folder: Path, *words: str) -> None:
    person = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *person, *words], capture_output=True, check=True)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """What a build of the version reads, in a folder without git."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder)
    for name in ("clusterkit", "trainer", "evaluation", "presets", "images"):
        (folder / name).mkdir()
    return folder


@pytest.fixture
def clone(sources: Path) -> Path:
    """The same as a git repository of one commit."""
    git(sources, "init", "--quiet")
    git(sources, "add", ".")
    git(sources, "commit", "--message", "one")
    return sources


def test_version_of_tags(clone: Path, tmp_path: Path) -> None:
    git(clone, "tag", "v0.7.0")
    assert built(clone, "version") == "0.7.0"

    git(clone, "commit", "--allow-empty", "--message", "two")
    after = re.fullmatch(rf"0\.7\.0{SINCE}", built(clone, "version"))
    assert after is not None
    assert after[1] == "1"

    built(clone, "build", "--target", "sdist")
    (packed,) = (clone / "dist").glob("*.tar.gz")
    with tarfile.open(packed) as tar:
        tar.extractall(tmp_path / "sdist", filter="data")
    (unpacked,) = (tmp_path / "sdist").iterdir()
    assert built(unpacked, "version") == after[0]


def test_version_of_a_shallow_clone_without_tags(clone: Path, tmp_path: Path) -> None:
    git(clone, "commit", "--allow-empty", "--message", "two")
    git(tmp_path, "clone", "--depth", "1", "--no-tags", f"file://{clone}", "shallow")

    for folder, commits in ((clone, "2"), (tmp_path / "shallow", "1")):
        found = re.fullmatch(rf"0\.1\.0{SINCE}", built(folder, "version"))
        assert found is not None
        assert found[1] == commits


def test_version_without_git(sources: Path) -> None:
    assert built(sources, "version") == "0.1.0"

    git(sources.parent, "init", "--quiet")
    git(sources.parent, "commit", "--allow-empty", "--message", "a repository of something else")
    git(sources.parent, "tag", "v9.9.9")
    assert built(sources, "version") == "0.1.0"


def test_version_command(tmp_path: Path) -> None:
    """As installed, and in a folder on PYTHONPATH that pip knows nothing of."""
    command = [sys.executable, "-m", "clusterkit.cli.main", "--version"]
    installed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert installed.stdout == f"clusterkit {version('clusterkit')}\n"

    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "clusterkit" not in path.name:
            (tmp_path / path.name).symlink_to(path)
    bare = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-S", *command[1:]]  # no site-packages, so no clusterkit that is installed there
    copied = subprocess.run(command, capture_output=True, text=True, check=True, env=bare, cwd=tmp_path)
    assert copied.stdout == "clusterkit 0+unknown (not installed)\n"
