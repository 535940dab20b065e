"""Persistent checkpoints: at the right steps, under AReaL's names, and readable by transformers as they are."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import TOTAL_STEPS, Forks, NewTrial, Trial
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.agents.base import RolloutOptions
from trainer.agents.memagent import MemAgent
from trainer.config import RunConfig
from trainer.config_parts import CheckpointConfig
from trainer.loop import TrainingRun
from trainer.rewards.boxed import boxed_reward
from trainer.schedule import LONG_WAIT_S, Schedule, recover_due, save_due, seconds_to_first_save
from trainer.tasks import make_source
from trainer.types import Completion, SamplingParams

HOUR = 3600.0


def _course(steps_per_epoch: int = 6, total: int = 12) -> Schedule:
    return Schedule(steps_per_epoch, total, 4 * steps_per_epoch, 4)


def _saves(total: int, steps_per_epoch: int, **settings: float) -> list[int]:
    config = CheckpointConfig.model_validate({"save_freq_epochs": 0, **settings})
    course = _course(steps_per_epoch, total)
    return [step for step in range(1, total + 1) if save_due(config, course, step, 0.0)]


def test_due_by_steps_by_epochs_and_at_the_end() -> None:
    assert _saves(12, 6, save_freq_steps=4) == [4, 8, 12]
    assert _saves(12, 5, save_freq_epochs=1) == [5, 10, 12]
    assert _saves(24, 4, save_freq_epochs=2) == [8, 16, 24]
    assert _saves(12, 5, save_freq_steps=3, save_freq_epochs=2) == [3, 6, 9, 10, 12]
    assert _saves(7, 100) == [7]


def test_due_by_time() -> None:
    config = CheckpointConfig(save_freq_epochs=0, save_freq_secs=100.0)
    assert not save_due(config, _course(), 3, 100.0)
    assert save_due(config, _course(), 3, 100.1)


@pytest.mark.parametrize(
    ("step", "since", "have_one", "due"),
    [
        (1, 9999.0, False, False),  # before ckpt_first_step
        (2, 0.0, False, True),
        (5, 0.0, False, True),  # the first was missed: at the next step
        (3, 599.0, True, False),
        (3, 600.5, True, True),
    ],
)
def test_recover_checkpoints_after_the_second_step_then_by_time(
    step: int, since: float, have_one: bool, due: bool
) -> None:
    assert recover_due(CheckpointConfig(), step, since, have_one) is due


def test_recover_checkpoints_by_steps() -> None:
    config = CheckpointConfig(ckpt_freq_steps=3)
    assert [s for s in range(2, 10) if recover_due(config, s, 0.0, have_one=s > 2)] == [2, 3, 6, 9]


def test_how_long_until_the_first_persistent_checkpoint() -> None:
    course = _course(19, 19)
    assert seconds_to_first_save(CheckpointConfig(), course, 2200.0) == 19 * 2200.0 > LONG_WAIT_S
    assert seconds_to_first_save(CheckpointConfig(save_freq_steps=5), course, 2200.0) == 5 * 2200.0 < LONG_WAIT_S
    assert seconds_to_first_save(CheckpointConfig(save_freq_secs=HOUR), course, 2200.0) == HOUR + 2200.0
    assert seconds_to_first_save(CheckpointConfig(save_freq_epochs=0), _course(19, 190), 10.0) == 1900.0


@pytest.mark.parametrize(("step_seconds", "words"), [(2200.0, "after 12 hours"), (60.0, "")], ids=["slow", "fast"])
def test_a_late_first_save_is_warned_of(step_seconds: float, words: str) -> None:
    warnings: list[str] = []
    run = SimpleNamespace(
        config=RunConfig(agent={"chunk_tokens": 500}),
        course=_course(19, 19),
        monitor=SimpleNamespace(warn=warnings.append),
    )
    TrainingRun._warn_of_late_save(run, step_seconds)
    assert len(warnings) == bool(words)
    assert words in "".join(warnings)
    assert all("checkpoint.save_freq_steps or checkpoint.save_freq_secs" in warning for warning in warnings)


def test_the_reference_has_them_under_their_names(reference: Trial) -> None:
    names = ["epoch1epochstep4globalstep4", "epoch2epochstep2globalstep8", f"epoch2epochstep6globalstep{TOTAL_STEPS}"]
    assert sorted(reference.weights()) == sorted(names)
    assert [Path(r["path"]).name for r in reference.records("save")] == names
    assert [r["global_step"] for r in reference.records("save")] == [4, 8, TOTAL_STEPS]
    for record in reference.records("save"):
        files = [p for p in Path(record["path"]).rglob("*") if p.is_file()]
        assert record["bytes"] == sum(p.stat().st_size for p in files)
        assert f"Model actor saved at {record['path']}. Time consumption: " in reference.log()
    assert reference.summary()["checkpoint"] == reference.records("save")[-1]["path"]
    assert reference.records("warning") == []


def test_epoch_saves_of_a_real_run(forks: Forks, new_trial: NewTrial) -> None:
    trial = new_trial(checkpoint={"save_freq_steps": 0, "save_freq_epochs": 1}, **{"task.train_size": 12})
    trial.change(**{"train.total_steps": 7})
    assert forks.run(trial) == 0, trial.said()
    names = ["epoch1epochstep3globalstep3", "epoch2epochstep3globalstep6", "epoch3epochstep1globalstep7"]
    assert sorted(trial.weights()) == names


@torch.inference_mode()
def test_transformers_reads_them_and_answers_the_same(reference: Trial) -> None:
    """Greedy answers of a fresh AutoModel to the prompts of the last evaluation are those the run recorded."""
    folder = reference.summary()["checkpoint"]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    saved = json.loads((Path(folder) / "config.json").read_text())
    assert saved["architectures"] == ["LlamaForCausalLM"]
    assert "attn_implementation" not in json.dumps(saved)
    accuracy = _greedy_accuracy(reference, model, tokenizer)
    assert accuracy == reference.records("eval")[-1]["accuracy"]
    assert sum(p.numel() for p in model.parameters()) > 10_000


def _greedy_accuracy(trial: Trial, model: torch.nn.Module, tokenizer: object) -> float:
    """Play the closing evaluation with transformers' own generate()."""

    class Generate:
        """transformers' generate() behind the engine protocol's one method that an agent uses."""

        async def generate(self, prompt_ids: list[int], params: SamplingParams, **_: str) -> Completion:
            prompt = torch.tensor([prompt_ids])
            limit = params.max_new_tokens
            out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=limit, do_sample=False)
            ids = out[0, len(prompt_ids) :].tolist()
            stopped = ids[-1] == tokenizer.eos_token_id
            return Completion(ids, [0.0] * len(ids), "stop" if stopped else "length", 0)

    agent, source = MemAgent(trial.config.agent, tokenizer), make_source(trial.config)
    rewards = []
    for number in range(trial.config.eval.num_tasks):
        task = source.heldout("test", number, 0)
        options = RolloutOptions(0.0, lambda turn: turn, False, ())
        trajectory = asyncio.run(agent.rollout(agent.prepare(task), Generate(), options))
        rewards.append(boxed_reward(trajectory.answer_text, task.answers))
    return sum(rewards) / len(rewards)
