"""Persistent checkpoints: at the right steps, under AReaL's names, and readable by transformers as they are."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import torch
from runs import SHORT_WARMUP, TOTAL_STEPS, Forks, NewTrial, Trial
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.agents.base import RolloutOptions
from trainer.agents.memagent import MemAgent
from trainer.rewards.boxed import boxed_reward
from trainer.tasks import make_source
from trainer.types import Completion, SamplingParams


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
    trial = new_trial(
        checkpoint={"save_freq_steps": 0, "save_freq_epochs": 1}, **{"task.train_size": 12, **SHORT_WARMUP}
    )
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
