"""The settings of a run, each within its own bounds, and what follows from several of them.

That they fit one another is checked in `config_checks.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from trainer.algorithms.table import resolve
from trainer.allocation import Allocation
from trainer.allocation_text import parse as parse_allocation
from trainer.config_agents import (
    AnyAgentConfig,
    ChunksAgentConfig,
    MemagentConfig,
    MemalphaAgentConfig,
)
from trainer.config_choice import Section
from trainer.config_parts import (
    AlgorithmConfig,
    CheckpointConfig,
    ControlConfig,
    EvalConfig,
    JudgeConfig,
    ModelConfig,
    MonitorConfig,
    RolloutConfig,
    SupervisedConfig,
    TrainConfig,
    TrainerConfig,
    WarmupConfig,
    WeightsConfig,
)
from trainer.config_rewards import AnyRewardConfig, BoxedConfig
from trainer.config_servers import AnyServersConfig, ServersConfig
from trainer.config_tasks import (
    AnyTaskConfig,
    FactsConfig,
    FilesConfig,
    HotpotqaConfig,
    MathConfig,
    NeedlesConfig,
    ProblemsConfig,
    RecallConfig,
    SftConfig,
)


class RunFields(Section):
    """The settings of a run. A `RunConfig` has the same, and they are known to fit one another."""

    preset: str = ""
    """Preset that this configuration started from."""
    experiment_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = "experiment"
    """First part of the run's name."""
    trial_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = "run1"
    """Second part of the run's name; the same name goes on with the same run."""
    fileroot: str = "./runs"
    """Folder under which logs, checkpoints and recover checkpoints are written."""
    cache_dir: str = ""
    """Folder for warm-up weights and assets; empty: $CLUSTERKIT_CACHE or ~/.cache/clusterkit."""
    code_dir: str = ""
    """Folder to import your own classes (agent.name=module:Class) from, after PYTHONPATH; `clusterkit train` sets it to
    the folder that it runs in."""
    mode: Literal["local", "ray", "slurm"] = "local"
    """Where the ranks run. local: on one machine. ray: on the nodes of the trainer's Ray cluster. slurm: in a batch job
    that `clusterkit train` submits, and in which the mode is ray."""
    n_nodes: Annotated[int, Field(ge=1)] = 1
    """Hosts of the run."""
    n_gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """GPUs of each host that the run uses; 0: none."""
    allocation_mode: str = ""
    """How engine servers and training share the GPUs: sglang.d4p1m1+d2p2m1, sglang:d4t1+fsdp:d4 (d8s4: replicas), or
    rollout.backend=sglang:d4 actor.backend=fsdp:d4. Empty: no servers, the trainer's own process generates."""
    seed: int = 1
    """Seed of initialisation, tasks and sampling."""
    recover_mode: Literal["auto", "resume", "disabled"] = "auto"
    """auto: go on from a recover checkpoint if there is one. resume: fail without one. disabled: start afresh."""
    recover_from: str = ""
    """Start of a new run: another run's recover folder (weights, optimizer and step go on), or the folder of weights
    that model.path names. `clusterkit train --recover-from` sets it."""
    recover_retries: Annotated[int, Field(ge=0)] = 10
    """Restarts in a row without a new step before a failed run is given up; 0: none. On a cluster and Slurm after any
    failure; on this machine after a crash, not after an error that asks for a change."""
    recover_after: Annotated[float, Field(ge=0)] = 10.0
    """Seconds before the first of these restarts; later ones come after longer."""
    model: ModelConfig = ModelConfig()
    task: AnyTaskConfig = RecallConfig()
    agent: AnyAgentConfig = MemagentConfig()
    reward: AnyRewardConfig = BoxedConfig()
    judge: JudgeConfig = JudgeConfig()
    rollout: RolloutConfig = RolloutConfig()
    servers: AnyServersConfig = ServersConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    control: ControlConfig = ControlConfig()
    trainer: TrainerConfig = TrainerConfig()
    train: TrainConfig = TrainConfig()
    warmup: WarmupConfig = WarmupConfig()
    supervised: SupervisedConfig = SupervisedConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()
    monitor: MonitorConfig = MonitorConfig()

    @field_validator("allocation_mode")
    @classmethod
    def _readable(cls, text: str) -> str:
        if text:
            parse_allocation(text)
        return text

    @property
    def allocation(self) -> Allocation | None:
        """What allocation_mode says; None where it is empty."""
        return parse_allocation(self.allocation_mode) if self.allocation_mode else None

    @property
    def data_path(self) -> str | None:
        """Where the task's files are; None for a task without."""
        return self.task.path if isinstance(self.task, FilesConfig) else None

    @property
    def other_documents(self) -> list[int]:
        """Numbers of documents in the contexts of the closing table that are not those of the training."""
        own = self.task.num_documents if isinstance(self.task, HotpotqaConfig) else 0
        return [number for number in dict.fromkeys(self.eval.final_documents) if number != own]

    @property
    def examples(self) -> SftConfig:
        """The task of trainer.type=sft, which has no other."""
        assert isinstance(self.task, SftConfig)
        return self.task

    @property
    def verdicts(self) -> ProblemsConfig:
        """Scale and bias of reward.name=math, as the task has them."""
        return self.task if isinstance(self.task, ProblemsConfig) else MathConfig()

    @property
    def engine(self) -> Literal["embedded", "sglang", "vllm"]:
        """Which engine samples."""
        if self.servers.engine != "auto":
            return self.servers.engine
        wanted = self.allocation
        if wanted is None or wanted.rollout is None:
            return "embedded"
        return "sglang" if wanted.rollout.backend == "sglang" else "vllm"  # AReaL's first form names none and meant it

    @property
    def recomputes_old(self) -> bool:
        """Whether the trainer computes the log-probs that the policy's ratio starts from."""
        chosen = self.algorithm.old_logprobs
        return chosen == "recompute" or (chosen == "auto" and self.rollout.max_staleness > 0)

    @property
    def refills(self) -> bool:
        """Whether groups of equal rewards are replaced (dynamic sampling)."""
        return resolve(self.algorithm).dynamic_sampling if self.rollout.refill is None else self.rollout.refill

    def overlong_buffer(self, limit: int) -> int:
        """Last tokens of a response of at most `limit` over which its punishment for length grows; 0: none."""
        given = self.algorithm.overlong_tokens
        return round(resolve(self.algorithm).overlong_share * limit) if given is None else given

    @property
    def weighs_kept(self) -> bool:
        """Whether what sequence_mask leaves out is taken out of the loss's denominator."""
        a = self.algorithm
        return self.recomputes_old and a.sequence_mask != "none" and a.mask_denominator == "kept"

    @property
    def response_limit(self) -> int:
        """Most response tokens of a training trajectory: algorithm.response_limit, or what the settings allow; 0 where
        they set no bound.
        """
        a, task = self.agent, self.task
        if self.algorithm.response_limit or not isinstance(a, ChunksAgentConfig):
            return self.algorithm.response_limit or a.max_final_tokens
        generated = task.max_chunks if isinstance(task, RecallConfig | FactsConfig | NeedlesConfig) else 0
        if isinstance(a, MemalphaAgentConfig) and a.template != "words":
            generated = 0  # a section that is longer than a chunk is read in several turns
        chunks = min(filter(None, (a.max_chunks, generated)), default=0)
        if not chunks or "agent.name" in self.custom:
            return 0
        return chunks * a.max_memory_tokens + (a.max_final_tokens if isinstance(a, MemagentConfig) else 0)

    @property
    def ranks(self) -> int:
        """Processes that train: the training GPUs of allocation_mode, else train.ranks."""
        wanted = self.allocation
        return wanted.training_gpus if wanted is not None and wanted.training is not None else self.train.ranks

    @property
    def serving(self) -> ServersConfig:
        """The servers' settings; asked for only where servers sample."""
        assert isinstance(self.servers, ServersConfig)
        return self.servers

    @property
    def num_servers(self) -> int:
        """Servers that the run starts; 0 with the embedded engine."""
        if self.engine == "embedded":
            return 0
        wanted = self.allocation
        if self.serving.count or wanted is None or wanted.rollout is None:
            return self.serving.count or 1
        return wanted.rollout.layout.data

    @property
    def gpus(self) -> int:
        """GPUs that the run takes; 0 for none."""
        return self.n_nodes * self.n_gpus_per_node

    @property
    def custom(self) -> dict[str, str]:
        """Setting -> `module:Class` of every class that is the user's own."""
        named = {"task.name": self.task.name, "agent.name": self.agent.name, "reward.name": self.reward.name}
        return {setting: name for setting, name in named.items() if ":" in name}
