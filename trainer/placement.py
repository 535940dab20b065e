"""Which GPUs of a run serve and which train, by arithmetic over its settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.config import RunConfig
from trainer.config_lora import ALL_LINEAR
from trainer.hf_folder import linear_layers

EVERY_LAYER = "all"
"""SGLang's name for all layers that it can have adapters for, embedding and output layer among them."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one server goes. name: of the server. gpus: device numbers on its machine, all for one replica."""

    name: str
    gpus: tuple[int, ...]


def gpus_per_server(config: RunConfig) -> int:
    """GPUs of one server; 0 where the run has none."""
    allocation = config.allocation
    if not config.n_gpus_per_node:
        return 0
    return allocation.rollout.layout.per_replica if allocation is not None and allocation.rollout is not None else 1


def local_places(config: RunConfig) -> list[Place]:
    """The run's servers on this machine: its first GPUs, one replica after another."""
    each = gpus_per_server(config)
    return [Place(f"server-{i}", tuple(range(i * each, (i + 1) * each))) for i in range(config.num_servers)]


def first_training_gpu(config: RunConfig) -> int:
    """Number of the first GPU of this machine that trains: those before it generate, unless both share them."""
    allocation = config.allocation
    if allocation is not None:
        return 0 if allocation.colocated else allocation.rollout_gpus
    return config.num_servers * gpus_per_server(config)


def shared_gpus(config: RunConfig, start: RunConfig) -> set[int]:
    """GPUs of this machine, by number, that the run's servers and its supervised start both use.

    start: the supervised start as a run of its own, which has no servers.
    """
    first = first_training_gpu(start)
    return {gpu for place in local_places(config) for gpu in place.gpus} & set(range(first, first + start.ranks))


def serves_adapters(config: RunConfig) -> bool:
    """Whether servers keep the base's weights and load adapters alone (`weights.adapters`)."""
    chosen = config.weights.adapters
    if not config.model.lora.rank or config.trainer.type != "grpo" or gives_memory_away(config):
        return False
    return (chosen == "alone" and config.engine != "embedded") or (chosen == "auto" and config.engine == "vllm")


def served_rank(config: RunConfig) -> int:
    """Rank of the adapters that servers load; 0 where they get whole weights."""
    return config.model.lora.rank if serves_adapters(config) else 0


def served_versions(config: RunConfig) -> int:
    """Adapters that a server is asked for beside one another; 1 where it gets whole weights.

    When a version comes out, no response of a run is older than `rollout.max_staleness` versions before it: groups
    admitted earlier have all been trained (`trainer.rollout.buffer`).
    """
    return config.rollout.max_staleness + 1 if serves_adapters(config) else 1


def served_layers(config: RunConfig, model: Path) -> tuple[str, ...]:
    """Names of the layers that servers are to prepare for adapters; none where they get whole weights, or are vLLM's,
    which take adapters of any layer.

    EVERY_LAYER stands for the layers of weights that have no known names. Raises OSError or ValueError where those in
    the folder `model` cannot be read.
    """
    if config.engine != "sglang" or not serves_adapters(config):
        return ()
    targets = tuple(config.model.lora.targets)
    return targets if targets != (ALL_LINEAR,) else tuple(linear_layers(model)) or (EVERY_LAYER,)


def gives_memory_away(config: RunConfig) -> bool:
    """Whether servers free their GPU memory while the trainer, on the same GPUs, learns (`train.offload`)."""
    allocation = config.allocation
    shared = allocation is not None and allocation.colocated and config.engine == "sglang"
    every_gpu = config.ranks == config.num_servers * gpus_per_server(config)
    return shared and every_gpu and config.train.offload and not config.rollout.max_staleness
