"""Which run a `train` command means, and when it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_writer import RunWriter

from clusterkit.backends.local.train import prepared
from clusterkit.capacity.plan import RunPlan
from clusterkit.config.resolve import resolve
from clusterkit.runs.directory import hold_lock
from clusterkit.runs.trials import Trial, TrialState, choose_trial, differences, must_stay, require_free
from trainer.checkpoint.fingerprint import fingerprint
from trainer.config import RunConfig, flatten
from trainer.errors import UserError


def _choose(fileroot: Path, *overrides: str) -> Trial:
    resolved = resolve("tiny", None, [*overrides, f"fileroot={fileroot}"])
    return choose_trial(resolved.config, resolved.trial_is_named)


def _unfinished(fileroot: Path, *overrides: str, trial: str = "run1") -> RunWriter:
    return RunWriter(fileroot, trial=trial).config(*overrides).attempt().steps(1, 5).recover(4).steps(6, 6)


def _complete(fileroot: Path, *overrides: str, trial: str = "run1") -> RunWriter:
    return RunWriter(fileroot, trial=trial).config(*overrides).attempt().steps(1, 30).recover(30).finish()


def test_the_first_run_is_run1(tmp_path: Path) -> None:
    trial = _choose(tmp_path)

    assert (trial.run.trial, trial.state) == ("run1", TrialState.NEW)
    assert list(tmp_path.iterdir()) == []


def test_after_a_complete_run_comes_the_next_number(tmp_path: Path) -> None:
    for number in (2, 9, 10):
        _complete(tmp_path, trial=f"run{number}")
    RunWriter(tmp_path, trial="other").config("seed=9").attempt().steps(1, 3)

    trial = _choose(tmp_path)

    assert (trial.run.trial, trial.state) == ("run11", TrialState.NEW)
    plan = RunPlan(resolve("tiny", None, [f"fileroot={tmp_path}"]).config, trial)
    assert plan.summary.startswith("tiny-recall/run11 starts from the beginning; run10 is complete")


def test_an_unfinished_run_goes_on_from_its_recover_checkpoint(tmp_path: Path) -> None:
    _unfinished(tmp_path).finish("interrupted", 6)

    trial = _choose(tmp_path)

    assert (trial.run.trial, trial.state, trial.resume_step) == ("run1", TrialState.RESUME, 4)


@pytest.mark.parametrize(
    "harmless",
    ["train.total_steps=60", "monitor.wandb=offline", "checkpoint.save_freq_steps=5", "train.ranks=2", "cache_dir=/c"],
)
def test_settings_that_do_not_shape_what_is_learned_may_change(tmp_path: Path, harmless: str) -> None:
    _unfinished(tmp_path)

    assert _choose(tmp_path, harmless).state is TrialState.RESUME


@pytest.mark.parametrize("named", [[], ["trial_name=run1"]])
def test_an_unfinished_run_with_other_settings_is_refused_with_the_differences(
    tmp_path: Path, named: list[str]
) -> None:
    writer = _unfinished(tmp_path, "seed=3")
    before = writer.run.config.read_bytes()

    with pytest.raises(UserError) as raised:
        _choose(tmp_path, "seed=4", "model.tiny.num_layers=4", *named)

    message = str(raised.value)
    assert "seed: 3 → 4" in message
    assert "model.tiny.num_layers: 3 → 4" in message
    assert "fileroot" not in message
    assert "trial_name=NEW" in message
    assert raised.value.exit_code == 2
    assert writer.run.config.read_bytes() == before


def test_a_file_from_before_a_field_existed_had_that_fields_default(tmp_path: Path) -> None:
    writer = _unfinished(tmp_path)
    lines = writer.run.config.read_text().splitlines()
    writer.run.config.write_text("\n".join(line for line in lines if "grad_clip" not in line))

    assert _choose(tmp_path).state is TrialState.RESUME
    with pytest.raises(UserError, match=r"train\.grad_clip: 1\.0 → 2\.0"):
        _choose(tmp_path, "train.grad_clip=2")


def test_a_run_that_learned_nothing_yet_is_begun_again_with_the_new_settings(tmp_path: Path) -> None:
    RunWriter(tmp_path).config("seed=3").attempt().finish("failed", 0, "no such file")

    trial = _choose(tmp_path, "seed=4")

    assert (trial.run.trial, trial.state) == ("run1", TrialState.NEW)


def test_recover_mode_disabled_leaves_the_unfinished_run_alone(tmp_path: Path) -> None:
    _unfinished(tmp_path, "seed=3")

    trial = _choose(tmp_path, "recover_mode=disabled", "seed=4")

    assert (trial.run.trial, trial.state) == ("run2", TrialState.NEW)


def test_recover_mode_resume_demands_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no recover checkpoint"):
        _choose(tmp_path, "recover_mode=resume")
    _unfinished(tmp_path)

    assert _choose(tmp_path, "recover_mode=resume").state is TrialState.RESUME


def test_a_named_complete_run_is_complete_until_more_steps_are_asked_for(tmp_path: Path) -> None:
    _complete(tmp_path, trial="mine")

    assert _choose(tmp_path, "trial_name=mine", "train.total_steps=30").state is TrialState.COMPLETE
    further = _choose(tmp_path, "trial_name=mine", "train.total_steps=60")
    assert (further.state, further.resume_step) == (TrialState.RESUME, 30)
    assert _choose(tmp_path, "trial_name=mine", "train.total_steps=0").state is TrialState.RESUME  # a whole epoch


@pytest.mark.parametrize("steps", ["train.total_steps=30", "train.total_steps=60"])
def test_a_named_complete_run_with_other_settings_is_refused_and_not_called_unfinished(
    tmp_path: Path, steps: str
) -> None:
    _complete(tmp_path, "seed=5", trial="mine")

    assert _choose(tmp_path, "trial_name=mine", "seed=5", "train.total_steps=30").state is TrialState.COMPLETE
    with pytest.raises(UserError) as raised:
        _choose(tmp_path, "trial_name=mine", "rollout.group_size=4", steps)

    message = str(raised.value)
    assert message.startswith("tiny-recall/mine is complete and was started with other settings (was → now):\n")
    assert "  seed: 5 → 1\n" in message
    assert "rollout.group_size: " in message
    assert "Keep it and train another: add trial_name=NEW" in message
    assert "unfinished" not in message
    assert raised.value.exit_code == 2


def test_a_complete_run_that_was_not_named_refuses_no_other_settings(tmp_path: Path) -> None:
    _complete(tmp_path, "seed=5")

    trial = _choose(tmp_path, "seed=4")

    assert (trial.run.trial, trial.state) == ("run2", TrialState.NEW)


def test_a_run_that_another_process_trains_is_refused(tmp_path: Path) -> None:
    writer = _unfinished(tmp_path, "seed=3")
    with hold_lock(writer.run.logs / "run.lock") as held:
        assert held
        trial = _choose(tmp_path, "seed=4")
        with pytest.raises(UserError, match=r"being trained now by process \d+.*clusterkit status") as raised:
            require_free(trial.run)

    assert raised.value.exit_code == 2
    require_free(trial.run)


def test_a_damaged_configuration_is_named(tmp_path: Path) -> None:
    writer = _unfinished(tmp_path)
    writer.run.config.write_text("a: [")

    with pytest.raises(UserError, match=r"config\.yaml cannot be read.*trial_name=NEW"):
        _choose(tmp_path)


def test_operator_and_trainer_agree_on_what_must_stay() -> None:
    assert {key for key in flatten(RunConfig()) if must_stay(key)} == set(fingerprint(RunConfig()))


def written_before(config: RunConfig, **algorithm: Any) -> dict[str, Any]:
    """What a run's config.yaml held before dynamic sampling was an algorithm's default and wordings came from files."""
    old = config.model_dump(mode="json")
    for key in ("overlong_tokens", "overlong_penalty", "response_limit", "mask_denominator"):
        del old["algorithm"][key]
    old["algorithm"] |= algorithm
    old["rollout"]["refill"] = False
    for key in ("template_file", "wording"):
        old["agent"].pop(key, None)
    return old


def test_runs_of_an_earlier_version_go_on() -> None:
    for name in ("tiny", "1.5B_n4", "memalpha-4B"):
        config = resolve(name).config
        assert differences(written_before(config), config) == []
    mathematics = resolve("1.5B_n4").config
    assert differences(written_before(mathematics, name="dapo", dual_clip=None), mathematics) == []


def test_a_run_of_dapo_from_before_it_was_the_papers_is_told_what_changed() -> None:
    config = resolve("135M_cpu", "hotpotqa", ("algorithm.name=dapo",)).config

    assert differences(written_before(config), config) == [
        "algorithm.overlong_tokens: 0 → 0.2 of the limit",
        "rollout.refill: False → True",
    ]


def test_of_two_commands_at_the_same_moment_the_second_changes_nothing(tmp_path: Path) -> None:
    first, second = _choose(tmp_path, "seed=1"), _choose(tmp_path, "seed=2")
    config = resolve("tiny", None, ["seed=1", f"fileroot={tmp_path}"]).config
    other = resolve("tiny", None, ["seed=2", f"fileroot={tmp_path}"]).config
    busy = pytest.raises(UserError, match="is being trained now by process")
    with prepared(first.run, config, first), busy, prepared(second.run, other, second):
        pass
    refused = pytest.raises(UserError, match="started by another command at the same moment")
    with refused, prepared(second.run, other, second):
        pass
    assert "seed: 1" in first.run.config.read_text().splitlines()
    assert first.run.attempt_numbers() == [1]
