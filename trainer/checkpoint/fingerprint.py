"""Which settings must be the same for a run to go on from a recover checkpoint, and how they differ.

A checkpoint that does not fit is never ignored in silence: the run refuses to start and shows what changed.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import ValidationError

from trainer.algorithms.table import resolve
from trainer.config import RunConfig, flatten
from trainer.config_choices import CHOICES
from trainer.config_parts import AlgorithmConfig

# Settings that may change between attempts: paths, monitoring, the length of the run, batching of the computation.
# A dot at the end means the whole section.
FREE = (
    "preset",
    "fileroot",
    "cache_dir",
    "code_dir",
    "agent.template_file",  # its content counts, agent.wording
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
    "train.max_logprob_gap",
    "train.max_tokens_per_mb",
    "train.share_prefixes",
    "train.logprob_chunk",
    "rollout.max_batch_tokens",
    "rollout.save_trajectories",
    "rollout.gpu_memory_fraction",
    "rollout.max_running",
    "rollout.stall_seconds",
    "rollout.share_prefixes",
    "rollout.prefetch_sections",
    "rollout.controllers",
    "model.gradient_checkpointing",
    "judge.url",
    "judge.concurrency",
    "judge.timeout_s",
    "judge.wait_s",
    "judge.cache",
)

# Settings that a new run must share with the run whose checkpoint it starts from: the tensors must fit, and a step must
# be the same place in the tasks.
SHARED = ("model.", "task.", "agent.template", "rollout.batch_size", "trainer.type")

DATA = "task.path/"
"""Begins the names of a task's data files, whose contents count like settings."""
TRACES = "memories of traces"
"""How many sentences these have where the traces do not say; checkpoints of before do not tell."""
UNSET = "(not set)"
ROW_FIELDS = ("advantage", "loss_norm", "clip_low", "clip_high", "dual_clip")
ROW_NAMES = (*(f"algorithm.{name}" for name in ROW_FIELDS), "algorithm.overlong_tokens", "rollout.refill")
# Values that acted before these fields existed, where they are not the defaults.
BEFORE = {"algorithm.overlong_tokens": 0, "rollout.refill": False, "agent.wording": ""}


def fingerprint(config: RunConfig) -> dict[str, Any]:
    """Dotted name -> value of every setting that shapes what is learned."""
    settings = {name: value for name, value in flatten(config).items() if not is_free(name)}
    if "agent.wording" in settings:
        wording = settings["agent.wording"]
        text = json.dumps(wording, sort_keys=True).encode()
        settings["agent.wording"] = f"sha256:{hashlib.sha256(text).hexdigest()[:16]}" if wording else ""
    return settings


def is_free(name: str) -> bool:
    """Whether a setting may change between the attempts at a run."""
    return _listed(name, FREE)


def shared_changes(saved: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """As `changes`, but only settings that a new run must share to start from that checkpoint."""
    return [change for change in changes(saved, now) if _listed(change[0], SHARED)]


def _listed(name: str, names: tuple[str, ...]) -> bool:
    return any(name.startswith(one) if one.endswith(".") else name == one for one in names)


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line per setting that differs: `name: saved -> now`."""
    return [f"{name}: {was} -> {new}" for name, was, new in changes(saved, now)]


def changes(saved: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Name, saved and present value of every setting that differs; `(not set)` where there is none.

    A field that did not exist when the checkpoint was written had its default. Values count as they act: an unset
    `algorithm.dual_clip` and one that is set to the row's value are the same. Fields that the task, agent or reward of
    either side lacks do not count, since 0.1 saved the fields of all of them. Data files count where both sides have
    any: earlier versions saved none, and who only looks at a run may not have them.
    """
    saved, now = _of_both(saved, now)
    of_all = {f"{c.section}.{field}": value for c in CHOICES.values() for field, value in c.defaults().items()}
    defaults = {**flatten(RunConfig()), **of_all, **BEFORE}
    saved = {**{name: value for name, value in defaults.items() if name in now}, **saved}
    acted, acts = _acting(saved), _acting(now)
    found = []
    for name in sorted(saved.keys() | now.keys()):
        was, new = saved.get(name, UNSET), now.get(name, UNSET)
        if acted.get(name, UNSET) != acts.get(name, UNSET):
            was, new = (acted.get(name) if was is None else was), (acts.get(name) if new is None else new)
            found.append((name, was, new))
        elif name == "algorithm.name" and was != new and any(acted[n] != acts[n] for n in ROW_NAMES if n in acted):
            found.append((name, was, new))
    return found


def _of_both(saved: dict[str, Any], now: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both without fields that the task, agent or reward of either lacks, and of data only what is known of both."""
    data = all(any(name.startswith(DATA) for name in settings) for settings in (saved, now))

    def foreign(name: str) -> bool:
        if name == TRACES:
            return name not in saved or name not in now
        if name.startswith(DATA):
            return not data
        section, _, field = name.partition(".")
        choice = CHOICES.get(section)
        if choice is None:
            return False
        names = [settings.get(choice.setting, choice.default) for settings in (saved, now)]
        return any(choice.lacks(chosen, field.partition(".")[0]) for chosen in names)

    kept = [{name: value for name, value in settings.items() if not foreign(name)} for settings in (saved, now)]
    return kept[0], kept[1]


def _acting(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings as they act: unset ones have the values of the algorithm's row, whose name is that of its loss."""
    own = {name.removeprefix("algorithm."): value for name, value in settings.items() if name.startswith("algorithm.")}
    try:
        row = resolve(AlgorithmConfig.model_validate(own))
    except ValidationError:  # of another version, or no run's
        return settings
    acting = {f"algorithm.{name}": getattr(row, name) for name in ROW_FIELDS} | {"algorithm.name": row.loss}
    share = f"{row.overlong_share} of the limit" if row.overlong_share else 0
    acting["algorithm.overlong_tokens"] = share if own.get("overlong_tokens") is None else own["overlong_tokens"]
    refill = settings.get("rollout.refill")
    acting["rollout.refill"] = row.dynamic_sampling if refill is None else refill
    return settings | {name: value for name, value in acting.items() if name in settings}
