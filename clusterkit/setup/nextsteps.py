"""The commands that `clusterkit setup` prints at its end. All work on this cluster as they are printed."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from clusterkit.backends.base import SubmittedRun
from clusterkit.backends.ray.request import request_on
from clusterkit.capacity.runnable import require_runnable
from clusterkit.config import presets
from clusterkit.config.resolve import resolve
from clusterkit.hosts.model import Cluster
from clusterkit.provision.assets.model import JUDGE
from clusterkit.provision.ray.current import option
from clusterkit.provision.ray.state import ClusterState
from clusterkit.setup.typed import SetupOptions
from trainer.errors import UserError

WITHOUT_GPUS = "tiny"
GIB_TOLERANCE = 0.95
"""A GPU that is sold with 80 GiB reports 79.6."""


@dataclass(frozen=True)
class NextStep:
    """A command and its purpose."""

    purpose: str
    command: str


def next_steps(
    cluster: Cluster,
    state: ClusterState,
    gpu_memory: int,
    options: SetupOptions,
    submitted: SubmittedRun | None,
) -> list[NextStep]:
    """Return the commands that may come after a set-up.

    Args:
        state: of its Ray; where it is not ready, no command needs it.
        gpu_memory: bytes of the smallest GPU; 0 where it is unknown.
        submitted: the run that the set-up started.
    """
    named = option(cluster.name)
    steps: list[NextStep] = []
    if state.ready:
        run = submitted.run.name if submitted is not None else ""
        if not run:
            train, run = _training(cluster, state, gpu_memory, options)
            steps += [NextStep("train", train)] if train else []
        if run:
            steps.append(NextStep("how it is doing", f"clusterkit status{named}"))
            steps.append(NextStep("its log", f"clusterkit logs -f{named}"))
            steps.append(NextStep("score it", f"clusterkit eval --model-path {run}{named}"))
            steps.append(NextStep("end it", f"clusterkit stop{named}"))
    steps.append(NextStep("nodes and GPUs", f"clusterkit ray-status{named}"))
    steps.append(NextStep("take it down", f"clusterkit down{named}"))
    return steps


def lines_of(steps: list[NextStep]) -> list[str]:
    """Return the commands as text for people."""
    width = max(len(step.purpose) for step in steps)
    return ["Next:", *(f"  {step.purpose:<{width}}  {step.command}" for step in steps)]


def fitting_preset(cluster: Cluster, state: ClusterState, gpu_memory: int) -> str:
    """Return the preset that uses most of a cluster's GPUs, needs no servers of its own, and can be trained there."""
    nodes = [node for node in state.nodes if node.ray_state == "ALIVE"]
    gpus = min((node.gpus for node in nodes), default=0)
    best, taken = WITHOUT_GPUS, 0
    for name in presets.size_names():
        size, config = presets.load_size(name), resolve(name).config
        needs_memory = size.gpu_memory_gib * GIB_TOLERANCE * 2**30
        if (
            not size.suggested
            or config.gpus < max(taken, 1)
            or config.n_gpus_per_node > gpus
            or config.n_nodes > len(nodes)
        ):
            continue
        if (gpu_memory and gpu_memory < needs_memory) or not _can_train(cluster, name):
            continue
        best, taken = name, config.gpus
    return best


def _can_train(cluster: Cluster, preset: str) -> bool:
    try:
        request = request_on(cluster, preset, None, [])
        require_runnable(request.typed or request.config)
    except UserError:
        return False
    return not any(asset.setting == JUDGE for asset in request.assets)


def _training(cluster: Cluster, state: ClusterState, gpu_memory: int, options: SetupOptions) -> tuple[str, str]:
    """Return the `train` command and its run; empty where the preset of the set-up cannot be trained."""
    preset = options.preset or fitting_preset(cluster, state, gpu_memory)
    places = [("model.path", options.model_path), ("task.path", options.dataset_path)]
    settings = [*options.settings, *(f"{key}={place}" for key, place in places if place)]
    try:
        request = request_on(cluster, preset, options.task, settings)
        config = request.typed or request.config
        require_runnable(config)
    except UserError:
        return "", ""
    words = ["clusterkit", "train", "--preset", preset, *(["--task", options.task] if options.task else []), *settings]
    # Without a cluster's name, a run without GPUs trains on this machine.
    named = option(cluster.name) or ("" if config.gpus or config.n_nodes > 1 else f" --cluster {cluster.name}")
    return shlex.join(words) + named, f"{config.experiment_name}/{config.trial_name}"
