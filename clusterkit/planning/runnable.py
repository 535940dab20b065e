"""Whether this version can execute a configuration, or only resolve, explain and plan it."""

from __future__ import annotations

from clusterkit.owncode import require_own
from trainer.config import RunConfig
from trainer.errors import UserError
from trainer.sft.examples import examples_file


def require_runnable(config: RunConfig) -> None:
    """Refuse what the trainer has no engine, agent or task for, and classes of the user's own that cannot be used.

    Raises:
        UserError: it names all that is missing, or what is wrong with a class.

    """
    if missing := missing_parts(config):
        preset = config.preset or "PRESET"
        raise UserError(
            f"preset {preset} cannot be trained by this version: it asks for {'; '.join(missing)}.\n"
            f"What works today: clusterkit presets plan {preset}, clusterkit train --preset {preset} --dry-run, and "
            "training with the embedded engine (--preset tiny)"
        )
    if config.trainer.type == "sft":
        examples_file(config.task)
    require_own(config)


def missing_parts(config: RunConfig) -> list[str]:
    """What a configuration asks for and the trainer has not got; empty where it can run."""
    missing = []
    wanted = config.allocation
    if wanted is not None and wanted.rollout is not None:
        engine = wanted.rollout.backend or "vllm"
        missing.append(f"{engine} servers on {wanted.rollout_gpus} GPUs (only the embedded engine is there)")
    if wanted is not None and wanted.training is not None:
        missing.append(f"training ranks on {wanted.training_gpus} GPUs (allocation_mode is not executed yet)")
    if config.train.offload:
        missing.append("train.offload")
    if config.agent.name == "single_turn":
        missing.append("agent single_turn")
    if config.task.name == "math":
        missing.append("task math")
    return missing
