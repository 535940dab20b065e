"""RunConfig: everything that defines a run, in one validated tree.

Both sides read this module, so it imports nothing but pydantic, the standard library and modules of the same kind.
Every field has a default, a bound and a sentence; `clusterkit presets explain` prints those. Unknown keys are errors.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from trainer.algorithms.table import resolve
from trainer.allocation import Allocation
from trainer.allocation_text import parse as parse_allocation
from trainer.config_0_1 import without_others
from trainer.config_agents import AgentConfig, AnyAgentConfig, ChunksAgentConfig, MemagentConfig, MemalphaAgentConfig
from trainer.config_checks import CHECKS
from trainer.config_judge import JudgeConfig
from trainer.config_parts import ModelConfig, RolloutConfig, Section, TinyModel
from trainer.config_rewards import AnyRewardConfig, BoxedConfig, RewardConfig
from trainer.config_servers import AnyServersConfig, ServersConfig
from trainer.config_tasks import (
    AnyTaskConfig,
    FactsConfig,
    FilesConfig,
    MathConfig,
    NeedlesConfig,
    ProblemsConfig,
    RecallConfig,
    SftConfig,
    TaskConfig,
)

__all__ = [
    "AgentConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "JudgeConfig",
    "ModelConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "ServersConfig",
    "TaskConfig",
    "TinyModel",
    "flatten",
]


class AlgorithmConfig(Section):
    """Advantages and loss."""

    name: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo"] = "grpo"
    """Row of the algorithm table (trainer/algorithms/table.py; docs/algorithms.md). The fields below override the row
    where set; with another name than the preset's, what the preset sets of them is left out."""
    advantage: Literal["mean", "mean_std"] | None = None
    """Reward minus group mean, or that divided by the group's standard deviation."""
    clip_low: Annotated[float, Field(ge=0)] | None = None
    """Lower clip range of the importance ratio, 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0)] | None = None
    """Upper clip range, 1 + clip_high."""
    dual_clip: Annotated[float, Field(ge=0)] | None = None
    """Bound of ratio times negative advantage (Ye et al. 2020), above 1; 0: off."""
    loss_norm: Literal["token", "trajectory_mean", "constant"] | None = None
    """token: one global mean over all response tokens. trajectory_mean: every trajectory weighs the same.
    constant: divide by trajectories times response_limit (Dr. GRPO)."""
    response_limit: Annotated[int, Field(ge=0)] = 0
    """loss_norm=constant: response tokens of a trajectory that the loss is divided by, whatever was sampled. 0: the
    most that the settings allow: chunks times agent.max_memory_tokens, plus agent.max_final_tokens."""
    credit: Literal["share", "split"] = "share"
    """share: every turn gets the trajectory's advantage. split: divided by the number of turns."""
    turn_advantage: Literal["grpo", "gigpo"] = "grpo"
    """Where every turn has a reward of its own (reward.name=memalpha). grpo: all turns of a group are one population.
    gigpo: the trajectory's part among trajectories, plus the turns' discounted part among turns of the same number."""
    gigpo_discount: Annotated[float, Field(ge=0, le=1)] = 0.95
    """gigpo: what a later turn's own reward counts for an earlier one, per turn between them."""
    gigpo_weight: Annotated[float, Field(ge=0)] = 1.0
    """gigpo: weight of the trajectory's part."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the k3 KL to the frozen starting policy; 0: no reference model is kept."""
    old_logprobs: Literal["auto", "engine", "recompute"] = "auto"
    """Log-probs that the policy's ratio starts from. engine: those that the engine returned. recompute: the trainer's
    own before the step (decoupled PPO, with tis_cap): by a forward pass before it, save for the first of
    train.minibatches, whose training pass has the very same. auto: recompute with rollout.max_staleness, else
    engine."""
    tis_cap: Annotated[float, Field(ge=0)] = 2.0
    """Truncated importance sampling of trainer against engine (where old_logprobs are recomputed): cap; 0: off."""
    sequence_mask: Literal["none", "max", "geometric"] = "none"
    """Leave out turns whose trainer/engine ratio leaves [mask_low, mask_high]: any token, or the geometric mean. Acts
    where old log-probs are recomputed; neither the policy's loss nor the KL is taken of a turn that is left out."""
    mask_low: Annotated[float, Field(ge=0)] = 0.33
    """Lower bound of sequence_mask."""
    mask_high: Annotated[float, Field(gt=0)] = 3.0
    """Upper bound of sequence_mask."""
    mask_denominator: Literal["all", "kept"] = "all"
    """What the loss is divided by where sequence_mask leaves turns out. all: their tokens count, so that the others
    weigh what they always do (AReaL). kept: only what is learned from counts (verl); the log-probs of the first of
    train.minibatches are then computed before it, too."""
    drop_truncated_final: bool = False
    """Leave out final answers that hit max_final_tokens (they stay in the group's mean)."""
    overlong_tokens: Annotated[int, Field(ge=0)] | None = None
    """DAPO's soft overlong punishment: over the last so many tokens below its limit a rewarded response loses up to
    overlong_penalty. 0: none. Empty: as the row says, for dapo a fifth of the limit. Rewarded are final answers; every
    turn where turns are rewarded apart."""
    overlong_penalty: Annotated[float, Field(ge=0)] = 1.0
    """Largest overlong punishment, before task.reward_scale (reward.name=math)."""

    @field_validator("dual_clip")
    @classmethod
    def _bounds_something(cls, value: float | None) -> float | None:
        if value is not None and 0 < value <= 1:
            raise ValueError(
                f"dual_clip {value} would cut off ratios of 1: choose more than 1, 3 for example, or 0, off"
            )
        return value

    @model_validator(mode="after")
    def _mask_holds_one(self) -> AlgorithmConfig:
        if not self.mask_low <= 1 <= self.mask_high:
            raise ValueError(
                f"mask_low {self.mask_low} and mask_high {self.mask_high} leave out the ratio 1, so every turn: choose "
                "mask_low at most 1 and mask_high at least 1"
            )
        return self


class ControlConfig(Section):
    """Negative controls: what the curve must look like when there is nothing to learn from."""

    rewards: Literal["true", "shuffled", "flipped"] = "true"
    """shuffled: permuted over the batch. flipped: sign turned round."""
    zero_advantages: bool = False
    """Set every advantage to zero: nothing may change."""


class TrainerConfig(Section):
    """What a run does."""

    type: Literal["grpo", "sft", "null"] = "grpo"
    """grpo: reinforcement learning (ppo, AReaL's word, means the same). sft: supervised learning of the answers in a
    file of examples. null: no training, only trajectories of eval.num_tasks tasks of eval.split with their rewards."""

    @field_validator("type", mode="before")
    @classmethod
    def _spelling(cls, value: Any) -> Any:
        # Unquoted null in a YAML file is no text; AReaL's name of the training with a group's baseline is ppo.
        return {None: "null", "ppo": "grpo"}.get(value, value)


class TrainConfig(Section):
    """Optimisation."""

    total_steps: Annotated[int, Field(ge=0)] = 0
    """Training steps in all; 0: total_epochs decides."""
    total_epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the training tasks."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up steps."""
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    """Optimizer steps of linear warm-up of the learning rate."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate of linear and cosine, as a share of the peak."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """AdamW; not applied to biases and norms."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest gradient norm."""
    minibatches: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps per rollout batch; tasks are split evenly over them."""
    max_tokens_per_mb: Annotated[int, Field(ge=16)] = 16384
    """Most tokens in one packed micro-batch of one rank; what rows begin with alike counts once."""
    share_prefixes: bool = True
    """Compute once what rows of a micro-batch begin with alike: a section that the trajectories of a group read at the
    same turn. The same gradients up to rounding; false: every row whole."""
    logprob_chunk: Annotated[int, Field(ge=1)] = 4096
    """Loss positions whose [chunk, vocabulary] logits exist at a time."""
    ranks: Annotated[int, Field(ge=1)] = 1
    """Data-parallel FSDP2 ranks. 1 needs no process group. With allocation_mode its training GPUs count instead."""
    compile: bool | None = None
    """Compile the layers (torch.compile): faster after a minute of compiling at the start. Empty: on GPUs that have
    Triton."""
    max_skipped_steps: Annotated[int, Field(ge=0)] = 5
    """Optimizer steps in a row whose gradient is not finite (they are skipped) before the run is given up; 0: never."""
    max_logprob_gap: Annotated[float, Field(ge=0)] | None = None
    """Largest mean difference, in nats, between the log-probs of one long row as they are trained on and by the model's
    own forward pass; beyond it the run ends before its first step. Empty: 0.001 in float32, 0.2 in bfloat16; 0: not
    compared."""
    offload: bool = False
    """Keep parameters and optimizer state in host memory while unused, 12 bytes per parameter of it: slower, for GPUs
    that also generate."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads per rank; 0: cores divided by ranks. Bit-identical runs need the same number."""


class WarmupConfig(Section):
    """Supervised warm-up on oracle traces, before the first RL step (only when the model starts from nothing)."""

    recall_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of dense recall pre-training, at most; it stops early once it is right 98 % of the time."""
    steps: Annotated[int, Field(ge=0)] = 0
    """Steps of supervised fine-tuning on demonstrations; 0: no warm-up."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Sequences per step."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate; linear decay to a tenth."""
    carry_share: Annotated[float, Field(ge=0, le=1)] = 0.15
    """How often a demonstration carries a needed fact over a section without it (else it reads each section alone)."""
    gate: Annotated[float, Field(ge=0, le=1)] = 0.98
    """Single-section retrieval that the warm-up must reach, greedy, on held-out tasks."""
    retries: Annotated[int, Field(ge=0)] = 2
    """Further initialisations to try when the gate is missed."""


class EvalConfig(Section):
    """Held-out evaluation during training."""

    every_steps: Annotated[int, Field(ge=0)] = 10
    """Evaluate every so many steps; 0: only before the first and after the last step."""
    num_tasks: Annotated[int, Field(ge=1)] = 128
    """Held-out tasks per evaluation; with trainer.type=null: tasks in all."""
    split: Literal["dev", "test", "train"] = "test"
    """Which held-out tasks: dev is for choosing settings, test for reporting. train: the training tasks, only with
    trainer.type=null."""
    final_chunks: list[Annotated[int, Field(ge=1)]] = []  # noqa: RUF012 (pydantic copies it)
    """recall: document lengths, in chunks, of the closing table."""
    blank_memory: bool = True
    """Closing table: also with the memory blanked and the policy forced to answer."""


class CheckpointConfig(Section):
    """Recover checkpoints (overwritten, to go on from) and persistent ones (kept, Hugging Face format)."""

    ckpt_freq_secs: Annotated[float, Field(ge=0)] = 600.0
    """Write a recover checkpoint when a step ends and this much time has passed since the last one."""
    ckpt_first_step: Annotated[int, Field(ge=1)] = 2
    """Write the first recover checkpoint after this step."""
    ckpt_freq_steps: Annotated[int, Field(ge=0)] = 0
    """Also write a recover checkpoint every so many steps; 0: by time only."""
    async_recover: bool | None = None
    """Write recover checkpoints in the background: a step only waits for the copy to host memory, which needs 12 bytes
    per parameter there. Empty: on GPUs."""
    save_freq_steps: Annotated[int, Field(ge=0)] = 0
    """Persistent checkpoint every so many steps; 0: off."""
    save_freq_epochs: Annotated[int, Field(ge=0)] = 1
    """Persistent checkpoint every so many epochs; 0: off."""
    save_freq_secs: Annotated[float, Field(ge=0)] = 0.0
    """Persistent checkpoint when this much time has passed since the last one; 0: off."""


class WeightsConfig(Section):
    """How new weights reach the inference servers (only where servers generate)."""

    transport: Literal["auto", "nccl", "disk"] = "auto"
    """auto: over NCCL to SGLang servers on GPUs; through a folder to others, and from a failed transfer on. nccl: only
    so; a server that cannot be reached is used no more. disk: always through a folder."""
    bucket_mb: Annotated[int, Field(ge=1, le=16384)] = 1024
    """Weights sent in one piece, in MiB. The trainer and each server need room for about two beside the weights."""
    deadline_s: Annotated[float, Field(gt=0, le=300)] = 60.0
    """Seconds within which a server must join the transfer, and within which each piece must have arrived."""
    servers_per_group: Annotated[int, Field(ge=0)] = 1
    """Servers that get their weights in one broadcast; 0: all. More is faster for many servers, but one that dies
    in the middle takes those of its group with it."""
    folder: str = ""
    """Where versions are written for servers; empty: memory (/dev/shm) where all servers are on this host and there is
    room, else the run's own folder."""


class MonitorConfig(Section):
    """Where numbers go beside main.log and metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard event files to the run directory."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases; the key is read from WANDB_API_KEY only and is written nowhere."""
    wandb_project: str = "clusterkit"
    """Project at Weights & Biases."""


class RunConfig(Section):
    """One run: what `clusterkit train` resolves and `python -m trainer` executes."""

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
    """Folder that your own classes (agent.name=module:Class) are imported from, after PYTHONPATH; set by `clusterkit
    train` to the folder it runs in."""
    mode: Literal["local", "ray", "slurm"] = "local"
    """Where the ranks run. local: on one machine. ray: on the nodes of the Ray cluster that runs the trainer. slurm: in
    a batch job, which `clusterkit train` submits and in which it is ray."""
    n_nodes: Annotated[int, Field(ge=1)] = 1
    """Hosts that the run is spread over."""
    n_gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """GPUs of each host that the run takes; 0: it needs none."""
    allocation_mode: str = ""
    """How engine servers and training share the GPUs: sglang.d4p1m1+d2p2m1, sglang:d4t1+fsdp:d4, or
    rollout.backend=sglang:d4 actor.backend=fsdp:d4. Empty: no servers, the trainer's own process generates."""
    seed: int = 1
    """Seeds initialisation, tasks and sampling."""
    recover_mode: Literal["auto", "resume", "disabled"] = "auto"
    """auto: go on from a recover checkpoint where there is one. resume: demand one. disabled: start afresh."""
    recover_from: str = ""
    """Where a new run starts: another run's recover folder (its weights, optimizer and step go on), or the folder of
    weights that model.path names. Written by `clusterkit train --recover-from`."""
    recover_retries: Annotated[int, Field(ge=0)] = 10
    """Restarts in a row, without a new step, of a run that died before it is given up. On a cluster and Slurm after
    any failure; on this machine after a crash, not after an error that asks for something. 0: none."""
    recover_after: Annotated[float, Field(ge=0)] = 10.0
    """Seconds before the first of these restarts; later ones wait longer."""
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
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()
    monitor: MonitorConfig = MonitorConfig()

    @model_validator(mode="before")
    @classmethod
    def _of_0_1(cls, values: Any) -> Any:
        return without_others(values)

    @model_validator(mode="after")
    def _fits(self) -> RunConfig:
        for check in CHECKS:
            check(self)
        return self

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


def flatten(config: BaseModel, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> value of every leaf of a configuration, in field order."""
    flat: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
