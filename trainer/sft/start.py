"""The supervised start of a run: examples learned before its first step of reinforcement, as a run of trainer.type=sft.

Its settings follow from the run's own, its files lie beside the run's in folders named `supervised`. When it is done,
start.json there says with which settings, and its recover checkpoints, which nothing reads any more, are removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.fingerprint import differences, fingerprint
from trainer.checkpoint.start import Start, find_start, settings_and_data, way_out
from trainer.config import RunConfig
from trainer.config_parts import EvalConfig, RolloutConfig, TrainerConfig
from trainer.config_servers import EmbeddedConfig
from trainer.config_tasks import SftConfig
from trainer.errors import UserError
from trainer.paths import RunPaths
from trainer.start_mark import start_facts
from trainer.tasks.examples import load_examples

_KEPT = (
    "preset",
    "experiment_name",
    "trial_name",
    "fileroot",
    "cache_dir",
    "code_dir",
    "mode",
    "n_nodes",
    "n_gpus_per_node",
    "allocation_mode",
    "seed",
    "recover_mode",
    "model",
    "agent",
    "supervised",
)


def start_config(config: RunConfig) -> RunConfig:
    """The start as a run of its own; what does not shape it, such as the reward, has its default."""
    s = config.supervised
    train = {
        "total_steps": s.total_steps,
        "total_epochs": s.total_epochs,
        "learning_rate": s.learning_rate,
        "schedule": "cosine",
        "min_lr_ratio": s.min_lr_ratio,
        "warmup_steps": s.warmup_steps,
        "weight_decay": s.weight_decay,
        "beta2": s.beta2,
        "minibatches": 1,
        "offload": False,  # servers are not beside it where they share its GPUs and train.offload is set
    }
    only_last = {"save_freq_steps": 0, "save_freq_epochs": 0, "save_freq_secs": 0.0, "merged": True}
    sections = {
        "task": SftConfig(path=str(examples_path(config)), eval_fraction=s.eval_fraction),
        "rollout": RolloutConfig(batch_size=s.batch_size),
        "servers": EmbeddedConfig(engine="embedded"),
        "trainer": TrainerConfig(type="sft"),
        "train": config.train.model_copy(update=train),
        "eval": EvalConfig(every_steps=s.eval_every_steps, num_tasks=s.eval_tasks, blank_memory=False),
        "checkpoint": config.checkpoint.model_copy(update=only_last),
        "monitor": config.monitor.model_copy(update={"wandb": "disabled"}),
    }
    # Not validated again: a run with a supervised start that is itself one is refused to users.
    return RunConfig().model_copy(update={name: getattr(config, name) for name in _KEPT} | sections)


def is_start(config: RunConfig) -> bool:
    """Whether a configuration comes from `start_config`."""
    return config.trainer.type == "sft" and bool(config.supervised.dataset)


def examples_path(config: RunConfig) -> Path:
    """File of the examples."""
    return Path(config.data_path or "").expanduser() / Path(config.supervised.dataset).expanduser()


def require_examples(config: RunConfig) -> None:
    """Raise UserError where a run has a supervised start and its file is not there."""
    if config.supervised.dataset and config.data_path and not Path(config.data_path).expanduser().exists():
        raise UserError(f"task.path={config.data_path}: there is no such folder")
    if config.supervised.dataset and not (path := examples_path(config)).is_file():
        raise UserError(
            f"supervised.dataset={config.supervised.dataset}: there is no file {path}: make it with `clusterkit data "
            "prepare reading --from FOLDER --out QUESTIONS` and set task.path=QUESTIONS, or leave the supervised start "
            "out with supervised.dataset="
        )


def require_batch(config: RunConfig) -> None:
    """Raise UserError where the examples cannot be read, or do not fill a batch. config: of the start."""
    found, size = load_examples(config.examples), config.rollout.batch_size
    if len(found.train) < size:
        raise UserError(
            f"supervised.batch_size={size} is more than the {len(found.train)} examples that {found.path} has beside "
            "those that are held out: lower it"
        )


@dataclass(frozen=True)
class SupervisedStart:
    """The supervised start of a run, as it stands.

    config: as a run of its own.
    paths: its folders.
    start: what it goes on from, unless it is done.
    done: what start.json says; empty while it is not done.
    """

    config: RunConfig
    paths: RunPaths
    start: Start
    done: dict[str, Any]

    @property
    def summary(self) -> str:
        """What was done, for the log."""
        losses = self.done.get("heldout_loss") or {}
        before, after = (losses.get(name) for name in ("before", "after"))
        told = f", held-out loss {before:.3f} → {after:.3f}" if before is not None and after is not None else ""
        return f"{self.done.get('global_step', '?')} steps{told}"


def find_supervised(config: RunConfig, goes_on: bool) -> SupervisedStart:
    """How far the supervised start of a run has come. Changes nothing on disk.

    Args:
        goes_on: the run is beyond it and goes on from a recover checkpoint, whose settings were compared.

    Raises:
        UserError: its examples are missing, or it was begun with other settings.
    """
    own, paths = start_config(config), RunPaths.of(config).supervised
    done = start_facts(paths) if config.recover_mode != "disabled" or goes_on else {}
    if goes_on:
        return SupervisedStart(own.model_copy(update={"recover_mode": "auto"}), paths, Start(None), done)
    if done:
        # It is made: examples that have gone are not missed.
        now = settings_and_data(own) if examples_path(config).is_file() else fingerprint(own)
        if changed := differences(done["fingerprint"], now):
            raise UserError(
                "the supervised start was made with other settings or data (then -> now):\n  "
                + "\n  ".join(changed)
                + way_out(own, changed, f"{paths.checkpoints} supervised.dataset=")
            )
        return SupervisedStart(own, paths, Start(None), done)
    require_examples(config)
    try:
        return SupervisedStart(own, paths, find_start(own, paths.recover), {})
    except UserError as error:
        raise UserError(f"supervised start: {error}") from None
