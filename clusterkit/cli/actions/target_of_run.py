"""Where a training or an evaluation goes, by its settings; `target` decides where they say nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from clusterkit.backends.base import folder_of_runs
from clusterkit.cli.actions.target import Kind, Target, is_on_cluster, target
from clusterkit.cli.runoptions import RunOptions
from clusterkit.config.resolve import Resolved
from clusterkit.evaluate.request import run_of
from clusterkit.runs.directory import runs
from clusterkit.runs.trials import TrialState, choose_trial
from trainer.errors import UserError


def for_training(resolved: Resolved, typed: RunOptions, *, start: bool = True) -> Target:
    """Where `train` goes: a run without GPUs and of one host to this machine, another one to the current cluster.

    Args:
        resolved: the run as typed; mode=local and mode=ray are places, too.
        start: it will be started there, and not only looked at.

    Raises:
        UserError: as `target`; this machine has the run unfinished that would be started anew on the cluster.
    """
    config = resolved.config
    if "mode" in resolved.settings and config.mode == "local" and typed.cluster is None:
        return Target(None)
    if config.gpus == 0 and config.n_nodes == 1 and config.mode != "ray":
        name = f"preset {config.preset}" if config.preset else "the run"
        return target(Kind.HERE, typed, f"{name} needs no GPU")
    found = target(Kind.CLUSTER_FIRST, typed)
    if start and found.note and found.cluster is not None:
        _refuse_unfinished(resolved, found.cluster)
    return found


def for_checkpoint(checkpoint: str | None, typed: RunOptions) -> Target:
    """Where `eval` goes: a checkpoint of a run of this machine is scored here, all else on the current cluster.

    Args:
        checkpoint: as typed; None for that of the newest run.
    """
    if checkpoint is None:
        return target(Kind.NEWEST_RUN, typed)
    folder = Path(checkpoint).expanduser()
    if folder.exists():
        ours = run_of(folder.absolute()) or run_of(folder.absolute() / "actor" / "epoch")
        if ours is not None and not is_on_cluster(str(folder.absolute()), although_here=True):
            return target(Kind.HERE, typed, "its run is of this machine")
    elif checkpoint.count("/") == 1 and not checkpoint.startswith(("/", ".", "~")):
        experiment, trial = checkpoint.split("/")
        if runs(folder_of_runs(typed.fileroot), experiment, trial):
            return target(Kind.NEWEST_RUN, replace(typed, experiment=experiment, trial=trial))
    return target(Kind.CLUSTER_FIRST, typed)


def _refuse_unfinished(resolved: Resolved, cluster: str) -> None:
    try:
        trial = choose_trial(resolved.config, resolved.trial_is_named)
    except UserError:  # an unfinished one with other settings: none that this command would go on with
        return
    if trial.state is TrialState.RESUME:
        raise UserError(
            f"{trial.run.name} is unfinished on this machine ({trial.run.logs}).\n"
            f"To go on with it, add --here; to train on the cluster, add --cluster {cluster}"
        )
