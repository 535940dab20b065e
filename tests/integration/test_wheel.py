"""What `pip install .` installs is whole: the wheel trains outside of the checkout, which it cannot import there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("clusterkit", "trainer", "evaluation")
FAST = [
    *("model.tiny.hidden_size=32", "model.tiny.num_layers=2", "model.tiny.intermediate_size=64"),
    *("warmup.recall_steps=2", "warmup.steps=2", "warmup.batch_size=4", "warmup.gate=0", "warmup.retries=0"),
    *("train.total_steps=2", "rollout.batch_size=4", "rollout.group_size=4", "train.threads=1", "eval.num_tasks=2"),
    *("eval.final_chunks=[]", "monitor.tensorboard=false"),
]
WHERE = f"""
import json, sys
from importlib import import_module
print(json.dumps({{"path": sys.path, "files": [import_module(name).__file__ for name in {PACKAGES}]}}))
"""


def done(words: list[str], cwd: Path, **more: str) -> str:
    """What a command prints that has to succeed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = subprocess.run(words, cwd=cwd, env=environment | more, capture_output=True, text=True, check=False)
    assert command.returncode == 0, command.stdout + command.stderr
    return command.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the checkout, built with the tools of this environment: nothing is downloaded."""
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    done([*pip, "--no-build-isolation", "--wheel-dir", str(out), str(REPOSITORY)], out)
    (built,) = out.glob("clusterkit-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel in it, and beside it this environment's packages without the checkout's."""
    folder = tmp_path_factory.mktemp("installed")
    shared = folder / "shared"
    shared.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "clusterkit" not in path.name:
            (shared / path.name).symlink_to(path)
    venv.create(folder / "venv", symlinks=True)
    python = str(folder / "venv" / "bin" / "python")
    site = Path(done([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    (site / "shared.pth").write_text(f"{shared}\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "--quiet"]
    done([*pip, "--no-deps", "--no-index", "--no-compile", str(wheel)], folder)
    return folder / "venv"


def files_of(folder: Path) -> Iterator[str]:
    """Paths below a folder of the checkout, less what Python has left there."""
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(folder).as_posix()


def test_the_wheel_is_whole(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if not name.partition("/")[0].endswith(".dist-info")}
    wanted = {f"{name}/{path}" for name in PACKAGES for path in files_of(REPOSITORY / name)}
    wanted |= {f"clusterkit/_{name}/{path}" for name in ("presets", "images") for path in files_of(REPOSITORY / name)}

    assert packed == wanted
    page = [f"observe/report/{name}" for name in ("page.css", "plots.js", "uplot/uPlot.iife.min.js", "uplot/LICENSE")]
    for name in ("_presets/sizes/tiny.yaml", "_images/versions.env", *page):
        assert f"clusterkit/{name}" in packed
    assert {f"{name}/py.typed" for name in PACKAGES} <= packed


def test_the_wheel_trains_outside_of_the_checkout(installed: Path, wheel: Path, tmp_path: Path) -> None:
    where = json.loads(done([str(installed / "bin" / "python"), "-P", "-c", WHERE], tmp_path))
    assert not any(Path(path).is_relative_to(REPOSITORY) for path in where["path"])
    assert all(Path(file).is_relative_to(installed) for file in where["files"])

    clusterkit = str(installed / "bin" / "clusterkit")
    assert done([clusterkit, "--version"], tmp_path) == f"clusterkit {wheel.name.split('-')[1]}\n"

    cache = {"CLUSTERKIT_CACHE": str(tmp_path / "cache")}
    facts = json.loads(done([clusterkit, "train", "--preset", "tiny", "--json", *FAST], tmp_path, **cache))
    assert (facts["status"], facts["exit_code"]) == ("completed", 0)
    (metrics,) = tmp_path.glob("runs/logs/*/tiny-recall/run1/metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    assert [record["global_step"] for record in records if record["kind"] == "step"] == [1, 2]
