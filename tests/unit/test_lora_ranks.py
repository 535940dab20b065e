"""Adapters over several ranks, in bfloat16 and float32: what one rank learns, saves, samples from and publishes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import loraranks
import pytest
import shardedranks
import torch
from builders import byte_tokenizer, relative_difference
from forkserver import run_ranks
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from trainer.train.distributed import single_world
from trainer.train.lora import is_adapter


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    shardedranks.model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Any]:
    told = loraranks.run(single_world(), tmp_path_factory.mktemp("alone"), model)
    return told | {"digests": [loraranks.whole_digest(model, dtype) for dtype in (torch.float32, torch.bfloat16)]}


def check(told: dict[str, Any], folder: Path, alone: dict[str, Any], half: bool = False) -> None:
    """A rank's report, and what was written, against that of one rank in float32."""
    first = {name: value for name, value in alone["first"].items() if is_adapter(name)}
    assert all(torch.equal(told["first"][name], value) for name, value in first.items())
    assert told["digest"] == alone["digests"][half]
    assert told["parity"] <= (0.05 if half else 1e-5)
    assert told["reference"] == told["before"]
    assert all(torch.equal(told["base"][name], told["first"][name]) for name in told["base"])
    assert {value.dtype for value in told["adapters"].values()} == {torch.float32}
    assert {value.dtype for value in told["base"].values()} == {torch.bfloat16 if half else torch.float32}
    near = 0.1 if half else 1e-3
    moved, expected = ({n: v - first[n] for n, v in one["adapters"].items()} for one in (told, alone))
    assert relative_difference(moved, expected) <= near
    for mine, its in zip(told["stats"], alone["stats"], strict=True):
        assert mine["grad_norm"] == pytest.approx(its["grad_norm"], rel=near)
    assert all(torch.equal(told["resumed"][name], value) for name, value in told["adapters"].items())
    merged = dict(told["base"])
    for name in first:
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")
            a, b = told["adapters"][name], told["adapters"][f"{layer}.lora_B.weight"]
            merged[f"{layer}.weight"] = merged[f"{layer}.weight"].float() + 2.0 * b @ a
    assert told["served"].keys() == merged.keys() - {"lm_head.weight"}
    assert all(torch.allclose(value, merged[name].float(), atol=1e-6) for name, value in told["served"].items())
    for name, value in load_file(folder / "export" / "model.safetensors").items():
        assert torch.equal(value, merged[name].to(value.dtype)) or torch.allclose(value, merged[name], atol=1e-6)
    for name, value in told["replica"].items():
        own = told["adapters"].get(name, told["base"].get(name))
        assert own is not None
        assert torch.equal(value, own.to(value.dtype))


def test_one_rank_in_bfloat16(tmp_path: Path, model: Path, alone: dict[str, Any]) -> None:
    check(loraranks.run(single_world(dtype=torch.bfloat16), tmp_path, model), tmp_path, alone, half=True)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    return folder, run_ranks(loraranks.main, 2, folder, model)


@pytest.mark.parametrize("world", sorted(loraranks.WORLDS))
def test_ranks_learn_what_one_does(world: str, two_ranks: tuple[Path, list[dict[str, Any]]], alone: Any) -> None:
    folder, told = two_ranks
    for one in told:
        check(one[world], folder / world, alone, loraranks.WORLDS[world][-1] == torch.bfloat16)


def test_layers_shared_by_two_or_replicated_and_sharded_over_two(
    tmp_path: Path, model: Path, alone: dict[str, Any]
) -> None:
    for one in run_ranks(loraranks.main, 4, tmp_path, model):
        for world in loraranks.FOUR:
            check(one[world], tmp_path / world, alone)


def test_a_recover_checkpoint_holds_adapters_alone(alone: dict[str, Any]) -> None:
    tensors = FileSystemReader(alone["saved"]["path"]).read_metadata().state_dict_metadata
    kept = {name for name in tensors if name.startswith("model.")}
    assert kept == {f"model.lm.{name}" for name in alone["adapters"]}
