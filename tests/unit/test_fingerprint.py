"""What must be the same for a run to go on: nothing that shapes the result may be missing from the fingerprint."""

from __future__ import annotations

import json

import pytest

from clusterkit.config.resolve import resolve
from trainer.checkpoint.fingerprint import differences, fingerprint, shared_changes
from trainer.config import RunConfig


def changed(*overrides: str) -> list[str]:
    return differences(fingerprint(resolve("tiny").config), fingerprint(resolve("tiny", None, overrides).config))


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.tiny.hidden_size=128", "model.tiny.hidden_size: 256 -> 128"),
        ("model.dtype=bfloat16", "model.dtype: float32 -> bfloat16"),
        ("seed=2", "seed: 1 -> 2"),
        ("rollout.group_size=4", "rollout.group_size: 8 -> 4"),
        ("train.learning_rate=0.01", "train.learning_rate: 0.0001 -> 0.01"),
        ("train.minibatches=2", "train.minibatches: 1 -> 2"),
        ("control.rewards=flipped", "control.rewards: true -> flipped"),
        ("algorithm.clip_high=0.5", "algorithm.clip_high: 0.2 -> 0.5"),
    ],
)
def test_what_shapes_the_result_is_told(override: str, line: str) -> None:
    assert changed(override) == [line]


@pytest.mark.parametrize(
    "override",
    [
        "fileroot=/elsewhere",
        "train.total_steps=99",
        "train.ranks=2",
        "train.max_tokens_per_mb=999",
        "eval.num_tasks=7",
        "checkpoint.ckpt_freq_secs=1",
        "monitor.tensorboard=false",
        "model.gradient_checkpointing=true",
        "recover_retries=3",
        "train.offload=true",
    ],
)
def test_what_may_change_between_attempts_is_not(override: str) -> None:
    assert changed(override) == []


def test_settings_that_one_side_does_not_have_are_told() -> None:
    saved = {"a.old": 1, "b": 2}

    assert differences(saved, {"b": 2, "c.new": 3}) == ["a.old: 1 -> (not set)", "c.new: (not set) -> 3"]


def test_a_field_that_is_younger_than_the_checkpoint_had_its_default() -> None:
    now = fingerprint(resolve("135M_cpu", "math").config) | {"task.reward_scale": 1.0}
    before = {name: value for name, value in now.items() if name not in ("task.reward_scale", "task.reward_bias")}

    assert differences(before, now) == []
    assert differences(before, {**now, "task.reward_scale": 5.0}) == ["task.reward_scale: 1.0 -> 5.0"]


def test_a_fingerprint_survives_its_file() -> None:
    now = fingerprint(resolve("tiny").config)

    assert differences(json.loads(json.dumps(now)), now) == []


def test_a_setting_left_to_the_row_is_the_rows_own_value() -> None:
    assert changed("algorithm.clip_high=0.2", "algorithm.dual_clip=3", "rollout.refill=false") == []
    assert changed("algorithm.dual_clip=0") == ["algorithm.dual_clip: 3.0 -> 0.0"]


def test_another_row_is_told_with_what_it_changes() -> None:
    lines = changed("algorithm.name=dapo", "algorithm.advantage=mean", "rollout.refill=true")

    assert lines == [
        "algorithm.clip_high: 0.2 -> 0.28",
        "algorithm.dual_clip: 3.0 -> None",
        "algorithm.name: grpo -> dapo",
        "rollout.refill: False -> True",
    ]


def test_a_run_of_before_dynamic_sampling_was_dapos_default_is_refused_with_what_changed() -> None:
    now = fingerprint(resolve("tiny", None, ("algorithm.name=dapo", "algorithm.overlong_tokens=4")).config)
    before = {**now, "rollout.refill": False}
    del before["algorithm.overlong_tokens"]

    assert differences(before, now) == ["algorithm.overlong_tokens: 0 -> 4", "rollout.refill: False -> True"]
    assert differences(before, {**now, "rollout.refill": False, "algorithm.overlong_tokens": 0}) == []


def test_runs_of_the_mathematics_presets_go_on_though_their_row_has_another_name() -> None:
    now = fingerprint(resolve("1.5B_n4").config)
    before = {**now, "algorithm.name": "dapo", "algorithm.dual_clip": None, "rollout.refill": False}
    del before["algorithm.overlong_tokens"]

    assert differences(before, now) == []


def test_data_files_count_where_both_sides_know_theirs() -> None:
    settings = fingerprint(resolve("tiny").config)
    saved = settings | {"task.path/questions.jsonl": "9 bytes", "task.path/documents.jsonl": "7 bytes"}
    now = settings | {"task.path/questions.jsonl": "9 bytes", "task.path/documents.jsonl.gz": "5 bytes"}

    assert differences(saved, settings) == differences(settings, now) == []
    lines = ["task.path/documents.jsonl: 7 bytes -> (not set)", "task.path/documents.jsonl.gz: (not set) -> 5 bytes"]
    assert differences(saved, now) == lines
    assert [name for name, _, _ in shared_changes(saved, now)] == [line.partition(":")[0] for line in lines]


def test_a_run_goes_on_with_its_adapters_alone() -> None:
    saved = fingerprint(RunConfig.model_validate({"model": {"lora": {"rank": 8}}}))
    other = RunConfig.model_validate({"model": {"lora": {"rank": 16}}, "checkpoint": {"merged": False}})

    assert differences(saved, fingerprint(other)) == ["model.lora.rank: 8 -> 16"]
    before_there_were_any = {name: value for name, value in fingerprint(RunConfig()).items() if "lora" not in name}
    assert differences(before_there_were_any, fingerprint(RunConfig())) == []
