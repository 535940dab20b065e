"""Checkpoints of several ranks: each writes and hashes its own files, none holds the model, a kill leaves what was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import savingranks
import shardedranks
import torch
from builders import learner, parameters, small_config
from forkserver import CONTEXT, run_ranks
from runs import wait_for
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from trainer.checkpoint.recover import RecoverStore
from trainer.checkpoint.room import CheckpointSizes
from trainer.train.distributed import single_world
from trainer.train.weightfiles import WeightFiles

RANKS = 4
LARGEST_SHARE = 0.25


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(savingranks.main, RANKS, folder)


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("world", savingranks.WORLDS)
def test_an_export_of_four_ranks_is_the_model(saved: tuple[Path, list[dict[str, Any]]], world: str) -> None:
    folder, told = saved
    dtype = savingranks.WORLDS[world][-1]
    expected = {name: value.to(dtype) for name, value in told[0][world]["parameters"].items()}
    for name in ("one file", "files", "background"):
        found = tensors(folder / world / name)
        assert found.keys() == expected.keys()  # tied weights once
        assert all(found[n].dtype == dtype and torch.equal(found[n], value) for n, value in expected.items())
        model = AutoModelForCausalLM.from_pretrained(folder / world / name)
        assert {n: p.dtype for n, p in model.named_parameters()} == dict.fromkeys(expected, dtype)
        assert all(torch.equal(p, expected[n]) for n, p in model.named_parameters())
        assert not (folder / world / f"{name}.tmp").exists()
    assert [p.name for p in (folder / world / "one file").glob("model*")] == ["model.safetensors"]
    files = sorted((folder / world / "files").glob("*.safetensors"))
    assert len(files) > RANKS
    index = json.loads((folder / world / "files" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in expected.values())
    # What is asked for of the disk beforehand: the same on every rank, and on disk with what describes it.
    sizes = CheckpointSizes(12 * sum(t.numel() for t in expected.values()), index["metadata"]["total_size"])
    assert all(its[world]["sizes"] == sizes for its in told)
    slot = folder / world / "recover" / "slot-a"
    assert sizes.recover < sum(file.stat().st_size for file in slot.iterdir()) < 1.5 * sizes.recover


def test_a_disk_that_one_rank_finds_full_is_told_by_all(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, told = saved
    for world in savingranks.WORLDS:
        (said,) = {its[world]["full"] for its in told}
        place = f"{folder / world / 'full'} (rank {RANKS - 1} on {os.uname().nodename})"
        assert said.startswith(f"cannot write the checkpoint {place}: no space left on the disk. Free")
        (said,) = {its[world]["full recover"] for its in told}
        place = f"{folder / world / 'no room'} (rank {RANKS - 1} on {os.uname().nodename})"
        assert said.startswith(f"no space left for a recover checkpoint under {place} (this run has none yet): free")
        assert not list((folder / world).glob("full*"))
        assert not list((folder / world / "no room").iterdir())


def test_a_rank_without_memory_leaves_no_other_waiting(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, told = saved
    for world in savingranks.WORLDS:
        (said,) = {its[world]["no memory"] for its in told}
        assert said.endswith(f"no memory (rank {RANKS - 1} on {os.uname().nodename}): MemoryError: none is left")
        assert not list((folder / world).glob("no memory*"))


@pytest.mark.parametrize("world", savingranks.WORLDS)
def test_every_rank_hashes_what_it_wrote(saved: tuple[Path, list[dict[str, Any]]], world: str) -> None:
    folder, told = saved
    slot, problems = RecoverStore(folder / world / "recover").newest()
    assert slot is not None, problems
    for rank, its in enumerate(told):
        own = {path.name for path in slot.path.glob(f"__{rank}_*")}
        assert own
        assert set(its[world]["hashed"]) == own | ({".metadata", "state.json"} if rank == 0 else set())
        kept, gone_on = its[world]["records"]
        assert 0 < kept["stall_s"] <= kept["seconds"]
        assert gone_on["slot"] == slot.name
    manifest = json.loads((slot.path / "MANIFEST.json").read_text())
    assert manifest.keys() | {"MANIFEST.json"} == {path.name for path in slot.path.iterdir()}


def test_other_numbers_of_ranks_load_it(saved: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    """Written by two pairs of ranks that share layers; loaded by one rank, by two that share layers, by replicas."""
    folder, told = saved
    expected, slots = told[0]["both ways"]["parameters"], folder / "both ways" / "recover"
    slot, _ = RecoverStore(slots).newest()
    assert slot is not None
    one = learner(shardedranks.model(), small_config(*shardedranks.SETTINGS), single_world())
    RecoverStore(slots).load(one, slot)
    two = run_ranks(savingranks.load, 2, tmp_path, 2, slots)
    replicas = run_ranks(savingranks.load, 4, tmp_path, 1, slots, 2)
    for found in (parameters(one), *two, *replicas):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_no_rank_holds_the_model_while_it_is_exported(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    """Beside its weights a rank needs one whole tensor; in the background a copy of its quarter of the weights, too."""
    folder, told = saved
    found = tensors(folder / "waiting")
    assert {name: float(value.mean()) for name, value in found.items()} == told[0]["memory"]["numbers"]
    for its in told:
        memory = its["memory"]
        assert memory["weights"] > 350e6
        assert memory["waiting"] < LARGEST_SHARE * memory["weights"]
        assert memory["background"] < (LARGEST_SHARE + 1 / RANKS) * memory["weights"]


@pytest.mark.parametrize(
    ("moment", "tensor", "shard"), [("recover/slot-b.tmp/__3_*", 1, 2), ("step2.tmp/*.safetensors", 2, 0)]
)
def test_killed_in_the_middle_four_ranks_leave_what_was_whole(
    tmp_path: Path, moment: str, tensor: int, shard: int
) -> None:
    main = savingranks.save_until_killed
    ranks = [CONTEXT.Process(target=main, args=(n, RANKS, tmp_path, moment, tensor, shard)) for n in range(RANKS)]
    for process in ranks:
        process.start()
    try:
        wait_for(lambda: (tmp_path / "reached").exists() or not all(process.is_alive() for process in ranks))
        assert any(tmp_path.glob(moment))
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.join()

    exported = [folder for folder in tmp_path.glob("step*") if folder.suffix not in (".tmp", ".old")]
    for folder in exported:
        number = float(folder.name.removeprefix("step"))
        assert all(bool((value == number).all()) for value in tensors(folder).values())
        WeightFiles(folder)  # raises where one is cut short
    told = run_ranks(savingranks.load_large, 2, tmp_path, tmp_path / "recover")
    assert told == [(1, {1.0}, [])] * 2
    assert {folder.name for folder in exported} == {"step1"} | ({"step2"} if "recover" in moment else set())
