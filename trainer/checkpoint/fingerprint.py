"""What must be the same for a run to go on from a recover checkpoint, and how a difference is told.

A checkpoint that does not fit is never passed over in silence: the run refuses to start and shows what changed.
"""

from __future__ import annotations

from typing import Any

from trainer.config import RunConfig, flatten

# May change between attempts: where things lie, what is watched, how long it goes on, how it is cut into pieces.
# Settings by name, whole sections with a dot at the end.
FREE = (
    "preset",
    "fileroot",
    "cache_dir",
    "code_dir",
    "mode",
    "n_nodes",
    "n_gpus_per_node",
    "allocation_mode",
    "trial_name",
    "experiment_name",
    "recover_mode",
    "recover_retries",
    "recover_after",
    "monitor.",
    "servers.",
    "weights.",
    "checkpoint.",
    "eval.",
    "train.total_steps",
    "train.total_epochs",
    "train.ranks",
    "train.threads",
    "train.offload",
    "train.compile",
    "train.max_skipped_steps",
    "train.max_tokens_per_mb",
    "train.logprob_chunk",
    "rollout.max_batch_tokens",
    "rollout.save_trajectories",
    "rollout.gpu_memory_fraction",
    "rollout.max_running",
    "rollout.stall_seconds",
    "model.gradient_checkpointing",
    "judge.url",
    "judge.concurrency",
    "judge.timeout_s",
    "judge.wait_s",
    "judge.cache",
)

# What a new run must have in common with the run whose checkpoint it starts from: the tensors must fit, and a step must
# be the same place in the tasks.
SHARED = ("model.", "task.", "agent.template", "rollout.batch_size", "trainer.type")


def fingerprint(config: RunConfig) -> dict[str, Any]:
    """Dotted name -> value of every setting that shapes what is learned."""
    return {name: value for name, value in flatten(config).items() if not is_free(name)}


def is_free(name: str) -> bool:
    """Whether a setting may change between the attempts at a run."""
    return _listed(name, FREE)


def shared_changes(saved: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """As `changes`, of what must be the same for a new run to start from that checkpoint."""
    return [change for change in changes(saved, now) if _listed(change[0], SHARED)]


def _listed(name: str, names: tuple[str, ...]) -> bool:
    return any(name.startswith(one) if one.endswith(".") else name == one for one in names)


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line per setting that differs: `name: saved -> now`."""
    return [f"{name}: {was} -> {new}" for name, was, new in changes(saved, now)]


def changes(saved: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Name, saved and present value of every setting that differs; `(not set)` where there is none.

    A field that did not exist when the checkpoint was written had its default.
    """
    saved = {**{name: value for name, value in flatten(RunConfig()).items() if name in now}, **saved}
    pairs = [
        (name, saved.get(name, "(not set)"), now.get(name, "(not set)")) for name in sorted(saved.keys() | now.keys())
    ]
    return [(name, was, new) for name, was, new in pairs if was != new]
