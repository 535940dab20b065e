"""Persistent checkpoints in Hugging Face format, complete when they are saved: nothing is merged or converted later."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from trainer.disk import disk_of
from trainer.errors import RunError
from trainer.files import disk_error, is_full, sync_tree, tree_bytes
from trainer.train.learner import Learner
from trainer.weights.source import tied_names

PREFIX = "lm."


def checkpoint_name(epoch: int, epoch_step: int, global_step: int) -> str:
    """AReaL's name of a persistent checkpoint; all numbers from 1."""
    return f"epoch{epoch}epochstep{epoch_step}globalstep{global_step}"


def export(learner: Learner, tokenizer: Any, folder: Path) -> dict[str, Any]:
    """Write weights, config and tokenizer to `folder`. Collective: every rank calls it. Returns a metrics record.

    Raises:
        RunError: it cannot be written; nothing is left at `folder`.
    """
    began = time.perf_counter()
    learner.wake(state=False)
    world = learner.world
    sharded = world.mesh is not None
    state: dict[str, Any] = get_model_state_dict(
        learner.policy, options=StateDictOptions(full_state_dict=sharded, cpu_offload=sharded)
    )
    problem = ""
    if world.is_main:
        temporary = folder.with_name(folder.name + ".tmp")
        lm = learner.policy.lm
        # After gathering, tied weights are copies: one of them is enough.
        tied = tied_names(lm)
        weights = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
        weights = {name: tensor.to(world.dtype) for name, tensor in weights.items() if name not in tied}
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            lm.save_pretrained(temporary, state_dict=weights)
            _name_dtype(temporary / "config.json", world.dtype)
            tokenizer.save_pretrained(temporary)
            sync_tree(temporary)
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
        except Exception as error:
            if (system := disk_error(error)) is None:
                raise
            shutil.rmtree(temporary, ignore_errors=True)
            reason, remedy = system.strerror or str(system), "Make the folder writable"
            if is_full(system):
                reason, remedy = "no space left on the disk", "Free some space"
            problem = (
                f"cannot write the checkpoint {folder}: {reason}. {remedy}, then start the same command again to go on "
                f"from the last recover checkpoint. {disk_of(folder)}"
            )
    if problem := next((p for p in world.gather(problem) if p), ""):
        raise RunError(problem)
    return {
        "path": str(folder),
        "bytes": tree_bytes(folder) if world.is_main else 0,
        "seconds": round(time.perf_counter() - began, 4),
    }


def _name_dtype(config: Path, dtype: torch.dtype) -> None:
    """Make config.json name the dtype of the weights beside it, where the trainer's own dtype differs."""
    facts = json.loads(config.read_text(encoding="utf-8"))
    name = str(dtype).removeprefix("torch.")
    if any(facts.get(key, name) != name for key in ("dtype", "torch_dtype")):
        facts |= {key: name for key in ("dtype", "torch_dtype") if key in facts}
        config.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def parameter_digest(learner: Learner) -> str:
    """SHA-256 over all parameters, names included: equal digests mean bit-identical weights. Collective."""
    learner.wake(state=False)
    digest = hashlib.sha256()
    for name, parameter in sorted(learner.policy.named_parameters()):
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        digest.update(name.encode())
        digest.update(full.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
