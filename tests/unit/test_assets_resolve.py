"""What `model.path` may be, and what is said when it cannot be loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.assets import cache_root, model_folder, resolve_model
from trainer.errors import UserError

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 269060552\n"


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def failure(path: Path | str, cache_dir: str = "") -> str:
    with pytest.raises(UserError) as caught:
        resolve_model(str(path), cache_dir)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    assert resolve_model(str(folder)) == folder


@pytest.mark.parametrize("name", ["smollm2-135m", "SmolLM2-135M"])
def test_an_asset_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = checkpoint(tmp_path / "models" / "smollm2-135m")
    assert resolve_model(name, str(tmp_path)) == folder
    monkeypatch.setenv("CLUSTERKIT_CACHE", str(tmp_path))
    assert resolve_model(name) == folder
    assert model_folder("smollm2-135m", "/elsewhere") == Path("/elsewhere/models/smollm2-135m")


def test_the_cache_is_in_the_home_folder_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLUSTERKIT_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_root() == Path("/home/somebody/.cache/clusterkit")


def test_an_asset_that_was_not_fetched_says_how_to_fetch_it(tmp_path: Path) -> None:
    message = failure("smollm2-135m", str(tmp_path))
    assert f"clusterkit assets get smollm2-135m --cache-dir {tmp_path}" in message


def test_neither_folder_nor_asset(tmp_path: Path) -> None:
    message = failure("Qwen/Qwen2.5-7B")
    assert "neither a folder nor the name of an asset (smollm2-135m)" in message
    (tmp_path / "model.gguf").write_text("")
    assert "is a file" in failure(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("config.json", "it has no config.json"),
        ("tokenizer.json", "has no tokenizer"),
        ("model.safetensors", "has no weights"),
    ],
)
def test_a_folder_that_lacks_a_part(tmp_path: Path, name: str, problem: str) -> None:
    folder = checkpoint(tmp_path / "model")
    (folder / name).unlink()
    assert problem in failure(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_git_lfs_pointers_and_empty_files(tmp_path: Path, name: str) -> None:
    folder = checkpoint(tmp_path / "model")
    (folder / name).write_text(POINTER)
    assert f"{folder / name} is a Git LFS pointer" in failure(folder)
    assert "git lfs pull" in failure(folder)
    (folder / name).write_text("")
    assert f"{folder / name} is empty" in failure(folder)


def test_sharded_weights_must_all_be_there(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    (folder / "one.safetensors").write_text("x")
    assert "two.safetensors is missing" in failure(folder)
    (folder / "two.safetensors").write_text(POINTER)
    assert "two.safetensors is a Git LFS pointer" in failure(folder)
    (folder / "two.safetensors").write_text("x")
    assert resolve_model(str(folder)) == folder
    index.write_text("{")
    assert "is damaged" in failure(folder)
    index.write_text(POINTER)
    assert "is a Git LFS pointer" in failure(folder)
