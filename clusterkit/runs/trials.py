"""Choose the trial of a `train` command: a new one, an unfinished one to resume, or one that is complete."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from clusterkit.config.presets import leaves
from clusterkit.runs.directory import RunDirectory, numbered_trials, user_name
from clusterkit.runs.holder import holder_of
from clusterkit.runs.log.metrics import History, read_history
from trainer.checkpoint.fingerprint import BEFORE, changes, fingerprint, is_free
from trainer.config import RunConfig
from trainer.errors import UserError


class TrialState(Enum):
    """What the command does with the chosen trial."""

    NEW = "new"
    RESUME = "resume"
    COMPLETE = "complete"


@dataclass(frozen=True)
class Trial:
    """The chosen run directory, what to do with it, and its history so far."""

    run: RunDirectory
    state: TrialState
    history: History
    attempts: tuple[int, ...] = ()  # the numbers of its attempts at the time of the choice
    complete: str = ""  # the trial that the command would have gone on with, were there anything left of it

    @property
    def resume_step(self) -> int:
        """Step after which the run goes on, by its records; 0: from the start."""
        if self.state is TrialState.RESUME and not self.history.learns:
            return self.history.global_step
        if self.state is not TrialState.RESUME or not self.run.has_recover_checkpoint or not self.history.recovers:
            return 0
        return int(self.history.recovers[-1].get("global_step") or 0)


def choose_trial(config: RunConfig, named_by_user: bool) -> Trial:
    """Find the trial that this configuration resumes, or the next free name.

    Args:
        named_by_user: whether its trial_name was typed.

    Raises:
        UserError: the trial was started with other settings, or lacks a recover checkpoint.
    """
    if named_by_user:
        return _judge(config, config.trial_name, named_by_user=True)
    numbers = numbered_trials(Path(config.fileroot), config.experiment_name)
    newest = numbers[-1] if numbers else 0
    following = f"run{newest + 1}"
    if not newest:
        return _judge(config, following, named_by_user=False)
    latest = run_directory(config, f"run{newest}")
    busy = holder_of(latest) is not None
    if config.recover_mode == "disabled" and not busy:
        return _judge(config, following, named_by_user=False)
    if config.recover_from and config.recover_from != latest.saved_values().get("recover_from"):
        return _judge(config, following, named_by_user=False)
    trial = _judge(config, f"run{newest}", named_by_user=False)
    if trial.state is not TrialState.COMPLETE:
        return trial
    return replace(_judge(config, following, named_by_user=False), complete=trial.run.trial)


def completed_trial(config: RunConfig) -> RunDirectory | None:
    """Return the newest trial of the experiment if it is complete and had this configuration, else None.

    For `setup`, which does not train again what is done.
    """
    numbers = numbered_trials(Path(config.fileroot), config.experiment_name)
    run = run_directory(config, f"run{numbers[-1]}") if numbers else None
    if run is None or not is_complete(read_history(run.metrics), config):
        return None
    old = run.saved_values()
    return run if old and not differences(old, config) else None


def saved_config(run: RunDirectory) -> RunConfig | None:
    """Return the configuration with which a run was last started; None if it cannot be read or is not valid."""
    values = run.saved_values()
    try:
        return RunConfig.model_validate(values) if values else None
    except ValueError:
        return None


def run_directory(config: RunConfig, trial: str) -> RunDirectory:
    """Return the paths of one trial of this configuration's experiment."""
    return RunDirectory(Path(config.fileroot), user_name(), config.experiment_name, trial)


def require_free(run: RunDirectory, way_out: str = "To train beside it: add trial_name=NEW") -> None:
    """Raise UserError if a process works on the run."""
    holder = holder_of(run)
    if holder:
        raise UserError(
            f"{run.name} is being trained now by {holder}. To watch it: clusterkit status --watch "
            f"{run.word} --fileroot {shlex.quote(str(run.fileroot))}. {way_out}"
        )


def require_unchanged(trial: Trial) -> None:
    """Raise UserError if another command has started the run since it was chosen. Call it while holding the lock."""
    run = trial.run
    if tuple(run.attempt_numbers()) != trial.attempts:
        raise UserError(
            f"{run.name} was started by another command at the same moment: nothing was changed. "
            "Give the command again: it goes on with that run, or takes the next name"
        )


def must_stay(key: str) -> bool:
    """Whether a run can be resumed only with the same value of a setting."""
    return not is_free(key)


def differences(old: dict[str, Any], new: RunConfig) -> list[str]:
    """Return `key: was → now` for every setting that must stay and differs."""
    written = dict(leaves(old))
    try:
        before = fingerprint(RunConfig.model_validate(old))
        before |= {key: value for key, value in BEFORE.items() if not _written(key, written)}
    except ValueError:  # the file is of another version
        before = {key: value for key, value in written.items() if must_stay(key)}
    return [f"{key}: {was} → {now}" for key, was, now in changes(before, fingerprint(new))]


def _written(key: str, values: dict[str, Any]) -> bool:
    """Whether a configuration file has the setting; entries of a mapping have longer keys."""
    return any(name == key or name.startswith(f"{key}.") for name in values)


def _judge(config: RunConfig, name: str, named_by_user: bool) -> Trial:
    run = run_directory(config, name)
    attempts = tuple(run.attempt_numbers())
    return replace(_judge_run(config, run, named_by_user), attempts=attempts)


def _judge_run(config: RunConfig, run: RunDirectory, named_by_user: bool) -> Trial:
    if not run.logs.is_dir():
        return _demand_checkpoint(config, Trial(run, TrialState.NEW, History()))
    history = read_history(run.metrics)
    if holder_of(run):  # the caller refuses it; differences from a running trial would only confuse
        return Trial(run, TrialState.RESUME, history)
    if is_complete(history, config if named_by_user else None):
        if named_by_user:
            _refuse_differences(config, run, history)
        return Trial(run, TrialState.COMPLETE, history)
    if config.recover_mode == "disabled":
        return Trial(run, TrialState.NEW, history)
    if not history.steps and not run.has_recover_checkpoint:
        return _demand_checkpoint(config, Trial(run, TrialState.NEW, history))  # nothing was learned
    _refuse_differences(config, run, history)
    return _demand_checkpoint(config, Trial(run, TrialState.RESUME, history))


def is_complete(history: History, config: RunConfig | None = None) -> bool:
    """Whether the run reached its end, and also the (perhaps later) end of the new configuration, if given."""
    finish = history.finish
    if finish is None or finish.get("status") != "completed":
        return False
    reached = int(finish.get("global_step") or history.global_step)
    return config is None or reached >= _target(config, history)


def _target(config: RunConfig, history: History) -> int:
    if config.trainer.type == "null":
        return -(-config.eval.num_tasks // config.rollout.batch_size)
    per_epoch = int(history.steps[-1].get("steps_per_epoch") or 0) if history.steps else 0
    return config.train.total_steps or config.train.total_epochs * per_epoch


def _demand_checkpoint(config: RunConfig, trial: Trial) -> Trial:
    only_rollouts = trial.state is TrialState.RESUME and not trial.history.learns
    kept = trial.run.has_recover_checkpoint or trial.run.keeps_supervised
    if config.recover_mode == "resume" and not only_rollouts and not kept:
        raise UserError(
            f"recover_mode=resume, but {trial.run.name} has no recover checkpoint under "
            f"{trial.run.recover}: leave recover_mode out to start, or name the trial with trial_name="
        )
    return trial


def _refuse_differences(config: RunConfig, run: RunDirectory, history: History) -> None:
    try:
        old = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return  # the trainer's own fingerprint in the recover checkpoint still guards
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{run.config} cannot be read ({reason}): repair it, or add trial_name=NEW") from None
    different = differences(old if isinstance(old, dict) else {}, config)
    if different:
        complete = is_complete(history)
        go_on = "Go on with it: repeat the command with the old values"
        another = f"{'Keep it and train another' if complete else 'Start another run'}: add trial_name=NEW"
        raise UserError(
            f"{run.name} is {'complete' if complete else 'unfinished'} and was started with other "
            "settings (was → now):\n"
            + "\n".join(f"  {line}" for line in different)
            + (f"\n{another}. {go_on}" if complete else f"\n{go_on}. {another}")
        )
