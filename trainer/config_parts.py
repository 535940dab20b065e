"""Sections of a RunConfig that are the same for every task, agent and reward. See trainer/config.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from trainer.config_choice import Choice, Section


class TinyModel(Section):
    """Architecture of a Llama-type model that is trained from nothing (no weights are shipped)."""

    hidden_size: Annotated[int, Field(ge=8, multiple_of=8)] = 256
    """Width of the residual stream."""
    num_layers: Annotated[int, Field(ge=2)] = 2
    """Transformer layers; lookup by key needs at least two."""
    num_heads: Annotated[int, Field(ge=1)] = 4
    """Attention heads (as many key/value heads)."""
    intermediate_size: Annotated[int, Field(ge=8)] = 512
    """Width of the feed-forward layers."""
    max_position_embeddings: Annotated[int, Field(ge=64)] = 1024
    """Context window, in tokens."""

    @model_validator(mode="after")
    def _heads_divide(self) -> TinyModel:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be an even multiple of num_heads {self.num_heads}: "
                "choose for example hidden_size=256 num_heads=4"
            )
        return self


class ModelConfig(Section):
    """The policy that is trained."""

    path: str | None = None
    """Folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer); empty: build `tiny` and warm it up."""
    tiny: TinyModel = TinyModel()
    """Architecture used when `path` is empty."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of forward and backward passes, of the weights that sample, and of exports. bfloat16: the optimizer's
    weights and the gradients' sums stay in float32. float32 keeps rollout and training log-probs equal to about 1e-6.
    """
    context_window: Annotated[int, Field(ge=0)] = 0
    """Longest prompt plus response, in tokens; 0: what the checkpoint's config says."""
    gradient_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass. full (or true): a layer's input alone is kept, least memory, about a
    third more time. selective: attention and every second matrix product are kept as well, between the two."""

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _spelling(cls, value: Any) -> Any:
        # It was a switch at first, and is one in other trainers' files.
        return {True: "full", False: "none"}.get(value, value) if isinstance(value, bool) else value


class RolloutConfig(Section):
    """How trajectories are sampled."""

    batch_size: Annotated[int, Field(ge=1)] = 32
    """Tasks per training step; sft: examples per training step; trainer.type=null: tasks that are rolled out and
    written together."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Trajectories per task; their mean reward is the baseline."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature. The trainer applies the same one to its log-probs. 0, greedy, is for trainer.type=null."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Must be 1 in training: a cut distribution biases every importance ratio."""
    top_k: int = -1
    """Must be -1 (off) in training, for the same reason."""
    max_batch_tokens: Annotated[int, Field(ge=64)] = 16384
    """embedded engine: most prompt tokens in one forward pass."""
    save_trajectories: bool = True
    """Write rollouts/step_N.jsonl.zst: tokens, text, rewards and weight versions of every trajectory."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Engine servers: share of a GPU's memory for weights and KV cache."""
    max_running: Annotated[int, Field(ge=0)] = 0
    """Engine servers: most requests that one server works on at a time; 0: as many as the KV cache holds."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Engine servers: by how many weight versions a trajectory may be older than the step that learns from it (eta of
    asynchronous training, AReaL's max_head_offpolicyness). 0: synchronous, nothing is sampled while training."""
    window: Annotated[int, Field(ge=0)] = 0
    """With max_staleness: of how many of the oldest groups the finished ones are taken first, so that one slow document
    does not hold a step up; 0: three tenths of batch_size. Nothing overtakes what would then become too old."""
    refill: bool | None = None
    """Groups whose rewards are all equal (where turns are rewarded apart: those of the turns) are left out and others
    sampled in their place (DAPO's dynamic sampling). Empty: with algorithm.name=dapo."""
    max_refill: Annotated[float, Field(ge=1)] = 4.0
    """With refill: most groups sampled for one step, as a multiple of batch_size; then the step takes what there is."""
    stall_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Engine servers: when no response has come for so long, the log names the trajectories that are waited for."""


class JudgeConfig(Section):
    """reward.name=memalpha: the frozen model that answers from a memory and judges what was written into it."""

    reader: Literal["server", "rules"] = "server"
    """server: a model behind an OpenAI-compatible server. rules: a few lines of code that know facts `KEY value`; for
    task.name=facts on a CPU."""
    url: str = ""
    """Server, as http://HOST:PORT or several with commas between; empty: the servers that `clusterkit serve judge`
    registered for this experiment and trial. A key that it asks for is read from CLUSTERKIT_JUDGE_KEY only."""
    model: str = ""
    """Name (or its last part) of the model that the server must serve; empty: the one that it serves, if it is one."""
    concurrency: Annotated[int, Field(ge=1)] = 128
    """Most requests that one process of the run has under way."""
    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds for one answer; then the request is sent again."""
    wait_s: Annotated[float, Field(ge=0)] = 3600.0
    """Seconds that the run waits for servers that stopped answering before it ends; its checkpoints are kept."""
    top_k: Annotated[int, Field(ge=1)] = 20
    """Entries of each store that a question is answered from, the best ones by BM25."""
    answer_tokens: Annotated[int, Field(ge=1)] = 2048
    """Longest answer to a question."""
    answer_temperature: Annotated[float, Field(ge=0)] = 0.7
    """Sampling temperature of answers."""
    verdict_tokens: Annotated[int, Field(ge=8)] = 512
    """Longest verdict on an entry."""
    cache: bool = True
    """Keep answers and verdicts on disk (in the cache folder) by the content of the request."""

    @field_validator("url")
    @classmethod
    def _addresses(cls, url: str) -> str:
        for one in filter(None, (part.strip() for part in url.split(","))):
            if not one.startswith(("http://", "https://")) or "@" in one:
                raise ValueError(f"url {one!r} is no address such as http://10.0.0.5:30000 (and a key goes elsewhere)")
        return url

    @model_validator(mode="after")
    def _somebody_asks_the_server(self) -> JudgeConfig:
        if self.url and self.reader == "rules":
            raise ValueError("url names a server that judge.reader=rules never asks: set judge.reader=server as well")
        return self


class EmbeddedConfig(Section):
    """The trainer's own process samples."""

    engine: Literal["embedded"] = "embedded"


class ServersConfig(Section):
    """Inference servers that sample for the trainer; without them its own process does (the embedded engine)."""

    engine: Literal["auto", "embedded", "sglang", "vllm"] = "auto"
    """auto: the one that allocation_mode names, embedded without one. embedded: the trainer's own process, which takes
    no other setting of this section."""
    count: Annotated[int, Field(ge=0)] = 0
    """Servers that the run starts; 0: as allocation_mode says, 1 without one."""
    min_required: Annotated[int, Field(ge=0)] = 0
    """Servers that must answer before the first step, and below which the run waits for them to come back. 0: all that
    the run starts before the first step, one later."""
    shutdown_on_exit: bool = True
    """Whether the servers end with the trainer. false: they stay, and the next attempt at the run takes them over
    (`clusterkit serve list` shows them, `clusterkit serve stop` ends them)."""
    context_length: Annotated[int, Field(ge=0)] = 0
    """Longest prompt plus response that a server takes; 0: the model's own."""
    start_seconds: Annotated[float, Field(gt=0)] = 900.0
    """How long a server may take until it answers."""
    patience_seconds: Annotated[float, Field(ge=0)] = 0.0
    """How long requests wait for servers to come back while fewer than min_required are left. Without any server left
    after that the run ends and says what became of them; a dispatched one is then started again, with its servers. 0:
    as long as a start may take (start_seconds)."""
    restarts: Annotated[int, Field(ge=0)] = 5
    """How often a server that died is started again before it is given up; and so often its host process, if that is
    killed."""
    python: str = ""
    """Interpreter that has the server's package; empty: $CLUSTERKIT_SGLANG_PYTHON or $CLUSTERKIT_VLLM_PYTHON, else the
    trainer's own."""
    flags: list[str] = []  # noqa: RUF012 (pydantic copies it)
    """Further options for the server's command line, as it spells them."""


SERVERS = Choice(
    "servers",
    "auto",
    {"auto": ServersConfig, "sglang": ServersConfig, "vllm": ServersConfig, "embedded": EmbeddedConfig},
    ServersConfig,
    key="engine",
)
AnyServersConfig = Annotated[EmbeddedConfig | ServersConfig, SERVERS]
"""What the servers' section may be."""


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
    """Most tokens in one packed micro-batch of one rank."""
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
