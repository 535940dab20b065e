"""Recover checkpoints in themselves: what saving and loading may not change."""

from __future__ import annotations

import json
import os
import tarfile
import warnings
from pathlib import Path

import pytest
import torch

from trainer.checkpoint import recover
from trainer.checkpoint.recover import RecoverStore, RunState
from trainer.config import RunConfig
from trainer.errors import RunError, UserError
from trainer.files import sha256
from trainer.paths import RunPaths
from trainer.rollout.record import write_records
from trainer.runs import begin
from trainer.train.distributed import single_world
from trainer.train.learner import Learner
from trainer.warmup.tiny import make_lm, make_tokenizer

WORLD = single_world()
CASES = Path(__file__).parents[1] / "cases"


def _learner(**shape: int) -> Learner:
    tiny = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64} | shape
    config = RunConfig.model_validate({"model": {"tiny": tiny}, "agent": _agent()})
    return Learner(make_lm(config.model, make_tokenizer(["a", "b"]), 5), config, WORLD, 10)


def _agent() -> dict[str, object]:
    return {"template": "words", "chunk_tokens": 16, "max_question_tokens": 4, "max_memory_tokens": 4} | {
        "max_final_tokens": 5
    }


def _state(step: int) -> RunState:
    return RunState(step, 4 * step, step, step, float(step))


def _learn(learner: Learner, seed: int) -> None:
    """One optimizer step on made-up gradients."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in learner.policy.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    learner.optimizer.step()
    learner.optimizer.zero_grad(set_to_none=True)


def _same(one: Learner, other: Learner) -> bool:
    pairs = zip(one.policy.parameters(), other.policy.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_saving_before_the_first_optimizer_step_changes_nothing(tmp_path: Path) -> None:
    """DCP steps an unused optimizer, and Adam would count that step."""
    undisturbed, saved, loaded = _learner(), _learner(), _learner()
    store = RecoverStore(tmp_path / "recover")
    store.save(saved, _state(1), {}, WORLD)
    slot, _ = store.newest()
    assert slot is not None
    RecoverStore(tmp_path / "recover").load(loaded, slot)
    for seed in range(3):
        for learner in (undisturbed, saved, loaded):
            _learn(learner, seed)
    assert _same(saved, undisturbed)
    assert _same(loaded, undisturbed)
    assert not _same(undisturbed, _learner())


def test_a_checkpoint_that_several_threads_wrote_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recover, "WRITER_BYTES", 20_000)
    saved, loaded = _learner(), _learner()
    _learn(saved, 1)
    store = RecoverStore(tmp_path)
    store.save(saved, _state(1), {}, WORLD)
    slot, problems = store.newest()
    assert slot is not None, problems
    assert len(list(slot.path.glob("*.distcp"))) > 1
    RecoverStore(tmp_path).load(loaded, slot)
    for learner in (saved, loaded):
        _learn(learner, 2)
    assert _same(saved, loaded)


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    learner, other = _learner(), _learner()
    store = RecoverStore(tmp_path)
    _learn(learner, 1)
    learner.optimizer_steps = 7
    store.save(learner, RunState(3, 12, 7, 3, 1.5, 0.5, eval_due=True), {"seed": 1}, WORLD)
    slot, problems = store.newest()
    assert slot is not None
    assert problems == []
    assert slot.state == RunState(3, 12, 7, 3, 1.5, 0.5, eval_due=True)
    assert slot.fingerprint == {"seed": 1}
    RecoverStore(tmp_path).load(other, slot)
    assert other.optimizer_steps == 7
    for each in (learner, other):
        _learn(each, 2)
    assert _same(learner, other)


def test_a_slot_of_the_days_when_rank_0_hashed_all_files(tmp_path: Path) -> None:
    """Kept from a trainer before 2026-11-26: step 3, after one optimizer step."""
    with tarfile.open(CASES / "recover_0.1.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    small = {"hidden_size": 8, "num_heads": 2, "intermediate_size": 8}
    loaded, expected = _learner(**small), _learner(**small)
    slot, problems = RecoverStore(tmp_path).newest()
    assert slot is not None
    assert problems == []
    assert (slot.state, slot.fingerprint) == (RunState(3, 12, 1, 3, 1.5), {"seed": 1})
    RecoverStore(tmp_path).load(loaded, slot)
    _learn(expected, 1)
    for seed in (2, 3):
        pairs = zip(loaded.policy.parameters(), expected.policy.parameters(), strict=True)
        assert all(torch.allclose(a, b, rtol=1e-5) for a, b in pairs)
        for learner in (loaded, expected):
            _learn(learner, seed)


def test_slots_take_turns_and_the_newer_wins(tmp_path: Path) -> None:
    learner, store = _learner(), RecoverStore(tmp_path)
    written = [store.save(learner, _state(step), {}, WORLD)["slot"] for step in (1, 2, 3)]
    assert written == ["slot-a", "slot-b", "slot-a"]
    slot, _ = store.newest()
    assert slot is not None
    assert (slot.name, slot.state.global_step, slot.serial) == ("slot-a", 3, 2)


def test_a_fresh_start_hides_a_further_run(tmp_path: Path) -> None:
    """A run that starts afresh in the folder of one that had come further must not be mistaken for it."""
    learner = _learner()
    old = RecoverStore(tmp_path)
    for step in (8, 9):
        old.save(learner, _state(step), {}, WORLD)
    RecoverStore(tmp_path).save(learner, _state(1), {}, WORLD)
    slot, problems = RecoverStore(tmp_path).newest()
    assert slot is not None
    assert (slot.state.global_step, problems) == (1, [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LATEST", slot.name]


def test_a_checkpoint_of_another_version_is_named(tmp_path: Path) -> None:
    RecoverStore(tmp_path).save(_learner(), _state(1), {}, WORLD)
    state = tmp_path / "slot-a" / "state.json"
    state.write_text(json.dumps({"state": {"steps": 1}}))
    manifest = json.loads((tmp_path / "slot-a" / "MANIFEST.json").read_text())
    manifest["state.json"] = {"bytes": state.stat().st_size, "sha256": sha256(state)}
    (tmp_path / "slot-a" / "MANIFEST.json").write_text(json.dumps(manifest))
    slot, problems = RecoverStore(tmp_path).newest()
    assert slot is None
    assert problems == [f"recover checkpoint {tmp_path / 'slot-a'} was written by another version of the trainer"]


def test_a_checkpoint_of_another_model_is_refused_in_words(tmp_path: Path) -> None:
    store = RecoverStore(tmp_path)
    store.save(_learner(), _state(1), {}, WORLD)
    slot, _ = store.newest()
    assert slot is not None
    config = RunConfig.model_validate({"model": {"tiny": {"hidden_size": 64}}, "agent": _agent()})
    other = Learner(make_lm(config.model, make_tokenizer(["a", "b"]), 5), config, WORLD, 10)
    with pytest.raises(RunError, match=r"slot-a is whole but does not fit this model: .*\. Was model\.path changed"):
        store.load(other, slot)


def test_one_rank_is_not_warned_of_having_no_process_group(tmp_path: Path) -> None:
    learner, store = _learner(), RecoverStore(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.save(learner, _state(1), {}, WORLD)
        slot, _ = store.newest()
        assert slot is not None
        store.load(learner, slot)


def test_a_run_whose_recover_checkpoints_have_gone_does_not_begin_again_without_a_word(tmp_path: Path) -> None:
    """As where its other folders were moved, or the storage of this one is not mounted: a start would overwrite."""
    paths = RunPaths.of(config := RunConfig(fileroot=str(tmp_path)))
    paths.logs.mkdir(parents=True)
    metrics = paths.logs / "metrics.jsonl"
    metrics.write_text(json.dumps({"kind": "step", "global_step": 2}) + "\n")
    assert begin(config, paths).slot is None  # killed before its first checkpoint

    with metrics.open("a") as file:
        file.writelines(json.dumps({"kind": "recover", "global_step": step}) + "\n" for step in (3, 5))
        file.write('{"kind": "recover", "glob')  # torn by a kill
    with pytest.raises(UserError, match=r"written a recover checkpoint of step 5, and there is none under .*run1: put"):
        begin(config, paths)
    assert begin(config.model_copy(update={"recover_mode": "disabled"}), paths).slot is None


def test_trajectories_without_their_progress_are_not_removed(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"fileroot": str(tmp_path), "trainer": {"type": "null"}})
    paths = RunPaths.of(config)
    (folder := paths.logs / "rollouts").mkdir(parents=True)
    for number in (1, 2):
        assert begin(config, paths).done == 0  # killed between the first step's file and its progress
        (folder / f"step_{number}.jsonl.zst").touch()
    with pytest.raises(UserError, match=r"progress.json is missing, and there are trajectories: put it back"):
        begin(config, paths)


def test_trajectories_are_durable_before_they_have_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """progress.json counts them, and outlives a power failure."""
    synced, sync = {}, os.fsync

    def fsync(descriptor: int) -> None:
        synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_records(path := tmp_path / "rollouts" / "step_1.jsonl.zst", [{"task_id": "t"}])
    assert synced[path.stat().st_ino] == path.stat().st_size > 0
