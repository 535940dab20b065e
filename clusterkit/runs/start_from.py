"""Start a new run from another run's recover checkpoint or from weights: its settings, and checks that they fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.checkpoint.fingerprint import fingerprint, shared_changes
from trainer.config import RunConfig
from trainer.errors import RunError, UserError

Look = Callable[[str], dict[str, Any]]
"""Returns the content of a folder, like `trainer.checkpoint.slots.look`."""

_SHAPE = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)


def settings_for(folder: str, config: RunConfig, look: Look) -> list[str]:
    """Return the settings with which a run starts from a folder, as KEY=VALUE words.

    Args:
        folder: of recover checkpoints or weights.
        config: the run without them.

    Raises:
        UserError: the folder has neither, or does not fit the run; the message has the differences.
        RunError: no checkpoint is complete.
    """
    found = look(folder)
    if found["slots"]:
        _require_fit(folder, found, config)
        return [f"recover_from={folder}"]
    if found["model"] is None:
        raise UserError(
            f"--recover-from: {folder} holds no recover checkpoint (slot-a, slot-b) and no weights (config.json and "
            "*.safetensors)"
        )
    different = _shape_changes(config, found["model"], look)
    if different:
        raise UserError(
            _refusal(f"the weights under {folder} are of another model", different) + "\nTake the preset of that model"
        )
    return [f"recover_from={folder}", f"model.path={folder}"]


def is_path(source: str) -> bool:
    """Whether `EXPERIMENT/TRIAL|PATH` is a path: it is no name of a run, or such a folder exists."""
    parts = source.split("/")
    return len(parts) != 2 or not all(parts) or parts[0] in (".", "..", "~") or Path(source, "config.json").is_file()


def require_run_name(source: str) -> tuple[str, str]:
    """Split `EXPERIMENT/TRIAL`; raise UserError for anything else."""
    experiment, slash, trial = source.partition("/")
    if not slash or not experiment or not trial:
        raise UserError(f"--recover-from {source}: name a run as EXPERIMENT/TRIAL, or a folder by its path")
    return experiment, trial


def _require_fit(folder: str, found: dict[str, Any], config: RunConfig) -> None:
    newest = next((slot for slot in found["slots"] if slot["name"] == found["newest"]), None)
    if newest is None:
        problems = "".join(f"\n  {problem}" for problem in found["problems"])
        raise RunError(f"--recover-from: no recover checkpoint under {folder} is whole{problems}")
    different = shared_changes(newest["fingerprint"], fingerprint(config))
    step, total = newest["global_step"], config.train.total_steps
    if different:
        raise UserError(
            _refusal(f"the recover checkpoint of step {step} under {folder} does not fit", different)
            + "\nGive the run the same values. To take weights alone, with a new optimizer and from step 1: name a "
            "folder of weights, such as a persistent checkpoint"
        )
    if total and step >= total:
        raise UserError(
            f"--recover-from: the checkpoint under {folder} is that of step {step}, and train.total_steps={total} "
            f"counts from the beginning: add train.total_steps={2 * step}"
        )


def _shape_changes(config: RunConfig, model: dict[str, Any], look: Look) -> list[tuple[str, Any, Any]]:
    """Return how weights differ from the run's model; nothing if that is not on this machine."""
    if not config.model.path:
        raise UserError(
            "--recover-from: this preset builds its model from nothing, with words of its own; weights fit presets of "
            "a pretrained model. Its own runs go on from recover checkpoints: --recover-from EXPERIMENT/TRIAL"
        )
    own = look(config.model.path)["model"] if config.model.path.startswith("/") else None
    return [(key, model.get(key), own.get(key)) for key in _SHAPE if own and own.get(key) != model.get(key)]


def _refusal(what: str, different: list[tuple[str, Any, Any]]) -> str:
    lines = "\n".join(f"  {key}: {was} \u2192 {now}" for key, was, now in different)
    return f"--recover-from: {what} (there \u2192 in this run):\n{lines}"
