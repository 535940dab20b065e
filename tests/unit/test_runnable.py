"""What a run is refused for before anything of it is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clusterkit.capacity.runnable import refusal
from clusterkit.cli.main import app
from clusterkit.config.resolve import resolve
from trainer.adapter_folder import CONFIG, WEIGHTS, adapter_config
from trainer.errors import UserError


def checkpoint(folder: Path, *layers: str) -> Path:
    """A checkpoint with linear layers of these names in its decoder layer, and others outside of it."""
    names = ["model.embed_tokens.weight", "lm_head.weight", *(f"model.layers.0.{layer}.weight" for layer in layers)]
    tensors = {n: {"dtype": "F32", "shape": [1, 1], "data_offsets": [4 * i, 4 * i + 4]} for i, n in enumerate(names)}
    header = json.dumps(tensors).encode()
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4 * len(names)))
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


def told(*settings: str, preset: str = "1.5B_n1") -> str:
    found = refusal(resolve(preset, None, ["model.lora.rank=4", *settings]).config, None)
    return str(found or "")


def test_adapters_for_layers_that_the_model_lacks_are_refused_with_those_it_has(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", "self_attn.one", "mlp.two")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / CONFIG).write_text(json.dumps(adapter_config(str(folder), 4, 8, ["one"])))
    (adapter / WEIGHTS).touch()

    for path in (folder, adapter):
        assert not told(f"model.path={path}")
        assert not told(f"model.path={path}", "model.lora.targets=[one,two]")
        message = told(f"model.path={path}", "model.lora.targets=[one,q_proj,lm_head]")
        assert "model.lora.targets=one,q_proj,lm_head" in message
        assert "no linear layer lm_head, q_proj: choose among one, two, or all-linear" in message
    assert not told(f"model.path={folder}", "model.lora.targets=[q_proj]", "model.lora.rank=0")


def test_where_no_weights_are_here_the_shape_of_the_model_says_what_layers_it_has() -> None:
    assert "no linear layer qproj: choose among down_proj" in told("model.lora.targets=[qproj,v_proj]")
    assert not told("model.lora.targets=[q_proj,v_proj]")
    assert not told("model.path=/storage/models/Unknown", "model.lora.targets=[qproj]")


@pytest.mark.parametrize("words", [["--dry-run"], [], ["--sweep", "seed=1,2"]])
def test_train_refuses_them_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setenv("CLUSTERKIT_CONFIG", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    settings = ["model.lora.rank=4", "model.lora.targets=[q_proj,nope]"]

    with pytest.raises(UserError, match="no linear layer nope: choose among down_proj") as error:
        CliRunner().invoke(app, ["train", "--preset", "tiny", *settings, *words], catch_exceptions=False)

    assert error.value.exit_code == 2
    assert not (tmp_path / "runs").exists()
