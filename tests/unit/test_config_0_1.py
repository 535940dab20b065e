"""Runs of 0.1, whose files had the fields of every task, agent and reward, are read and go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from clusterkit.config.presets import leaves
from clusterkit.config.resolve import resolve
from clusterkit.evaluate.request import make_request
from clusterkit.runs.trials import differences
from evaluation.config import EvalConfig
from trainer.checkpoint.fingerprint import changes, fingerprint, shared_changes
from trainer.config import RunConfig, flatten
from trainer.config_0_1 import FIELDS
from trainer.config_lora import LoraConfig
from trainer.config_parts import SupervisedConfig
from trainer.configfile import read_config

KEPT = Path(__file__).parents[1] / "cases" / "config"
"""What 0.1 wrote: config.yaml of a run, and the fingerprint of its recover checkpoint."""
RUNS = {
    "tiny": ("tiny", None),
    "memalpha": ("memalpha-tiny", None),
    "hotpotqa": ("7B_n4", "memagent"),
    "math": ("7B_n4", "math"),
}
YOUNGER = {
    "agent.repeat_problem": False,
    "eval.final_documents": [],
    "eval.final_methods": [],
    **flatten(SupervisedConfig(), "supervised."),
    "task.curriculum": [],
    "task.real_share": None,
    "task.curriculum_tasks": 640,
    "rollout.share_prefixes": True,
    "rollout.prefetch_sections": False,
    "rollout.controllers": 0,
    "servers.hang_seconds": 600.0,
    "servers.prefill_delay_ms": 0.0,
    "train.share_prefixes": True,
    "eval.save_trajectories": 8,
    **flatten(LoraConfig(), "model.lora."),
    "checkpoint.merged": True,
    "weights.adapters": "auto",
}
"""Settings that it did not have, with their defaults."""
OTHER_DEFAULTS = ("weights.servers_per_group=1",)
"""Settings whose defaults were others; none that a run could not go on without."""
PLACES = ("fileroot=/runs", "cache_dir=/cache")


def values(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((KEPT / f"{name}_0.1.yaml").read_text()))


def saved(name: str) -> dict[str, Any]:
    return dict(json.loads((KEPT / f"{name}_0.1.json").read_text()))


def now(name: str, *overrides: str) -> RunConfig:
    return resolve(*RUNS[name], (*PLACES, *overrides)).config


@pytest.mark.parametrize("name", RUNS)
def test_a_file_of_it_is_read_with_the_same_values(name: str) -> None:
    config = read_config(KEPT / f"{name}_0.1.yaml", RunConfig)

    written, read = YOUNGER | dict(leaves(values(name))), flatten(config)
    assert read == flatten(now(name, *OTHER_DEFAULTS))
    mappings = {key for key, value in read.items() if isinstance(value, dict)}
    assert {key: written[key] for key in read if key not in mappings} == {
        key: value for key, value in read.items() if key not in mappings
    }
    assert len(read) < len(written)


@pytest.mark.parametrize("name", RUNS)
def test_its_sections_were_whole(name: str) -> None:
    assert {section: set(values(name)[section]) for section in FIELDS} == {k: set(v) for k, v in FIELDS.items()}


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_of_it_goes_on(name: str) -> None:
    assert changes(saved(name), fingerprint(now(name))) == []
    assert differences(values(name), now(name)) == []


@pytest.mark.parametrize(
    ("name", "override", "change"),
    [
        ("tiny", "task.num_keys=64", ("task.num_keys", 32, 64)),
        ("tiny", "reward.name=f1", ("reward.name", "boxed", "f1")),
        ("tiny", "agent.prompt_order=section_first", ("agent.prompt_order", "paper", "section_first")),
        ("tiny", "agent.repeat_problem=true", ("agent.repeat_problem", False, True)),
        ("memalpha", "reward.beta=0.5", ("reward.beta", 0.05, 0.5)),
        ("hotpotqa", "task.compat_upstream=true", ("task.compat_upstream", False, True)),
        ("math", "task.reward_scale=1", ("task.reward_scale", 5.0, 1.0)),
    ],
)
def test_a_real_difference_is_still_found(name: str, override: str, change: tuple[str, Any, Any]) -> None:
    assert changes(saved(name), fingerprint(now(name, override))) == [change]
    assert differences(YOUNGER | values(name), now(name, override)) == [f"{change[0]}: {change[1]} → {change[2]}"]


def test_of_another_task_its_name_and_what_both_have_are_told() -> None:
    other = fingerprint(resolve("7B_n4", "memagent").config)

    told = [name for name, _, _ in changes(saved("tiny"), other) if name.startswith("task.")]
    assert told == ["task.name", "task.train_size"]
    assert "task.name" in [name for name, _, _ in shared_changes(saved("tiny"), other)]


def test_a_field_that_only_one_task_has_had_its_default_where_it_was_not_saved() -> None:
    before = {key: value for key, value in saved("hotpotqa").items() if key != "task.compat_upstream"}

    assert changes(before, fingerprint(now("hotpotqa"))) == []
    assert changes(before, fingerprint(now("hotpotqa", "task.compat_upstream=true"))) == [
        ("task.compat_upstream", False, True)
    ]


def test_a_section_that_names_fewer_fields_was_written_by_hand() -> None:
    tree = values("math")
    del tree["task"]["num_values"]

    with pytest.raises(ValidationError, match="num_keys"):
        RunConfig.model_validate(tree)


def test_a_run_of_it_in_a_process_of_its_own_is_read_too() -> None:
    tree = values("tiny")
    tree["servers"]["engine"] = "embedded"

    assert flatten(RunConfig.model_validate(tree))["servers.engine"] == "embedded"
    assert "servers.count" not in flatten(RunConfig.model_validate(tree))


def test_a_request_of_an_evaluation_of_it_is_read() -> None:
    tree = values("math")
    request = {"model_path": "m", "output_path": "o", "data_names": ["math"]}

    read = EvalConfig.model_validate({**request, "agent": tree["agent"], "task": tree["task"]})

    assert read.task == now("math").task
    assert make_request(request, RunConfig.model_validate(tree), []).agent == read.agent


@pytest.mark.parametrize(("field", "value"), [("reward_scale", 5.0), ("reward_bias", 0.5)])
def test_a_scale_that_would_be_lost_is_refused(field: str, value: float) -> None:
    read = values("hotpotqa")
    read["reward"]["name"] = "math"
    RunConfig.model_validate(read)

    read["task"][field] = value

    with pytest.raises(ValidationError, match=f"task.{field}={value} with reward.name=math and task.name=hotpotqa"):
        RunConfig.model_validate(read)
