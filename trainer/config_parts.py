"""Sections of a RunConfig that are the same for every task, agent and reward. See trainer/config.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from trainer.config_choice import Section
from trainer.config_lora import LoraConfig


class TinyModel(Section):
    """Architecture of a Llama model that is trained from random weights."""

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


LESS_MEMORY = {"none": "full", "selective": "full", "full": "chunked", "chunked": "offloaded"}
"""What takes less memory than a model.gradient_checkpointing."""
CHUNKED = ("chunked", "offloaded")
"""Those that compute the feed-forward part of a layer some tokens at a time."""


class ModelConfig(Section):
    """The policy that is trained."""

    path: str | None = None
    """Folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer); empty: `tiny`, after a warm-up."""
    tiny: TinyModel = TinyModel()
    """Architecture used when `path` is empty."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of forward and backward passes, of the sampling weights and of exports. With bfloat16 the optimizer's
    weights and the gradient sums stay in float32. With float32, rollout and training log-probs agree to about 1e-6."""
    context_window: Annotated[int, Field(ge=0)] = 0
    """Longest prompt plus response, in tokens; 0: as the checkpoint's config says."""
    gradient_checkpointing: Literal["none", "selective", "full", "chunked", "offloaded"] = "none"
    """Recompute activations in the backward pass. full (or true): keep only each layer's input; little memory, about a
    third more time. selective: also keep attention and every second matrix product; between full and none. chunked: as
    full, with the feed-forward part of a layer some tokens at a time, for long rows. offloaded: as chunked, and the
    layers' inputs wait in host memory."""
    lora: LoraConfig = LoraConfig()

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _spelling(cls, value: Any) -> Any:
        # It was a boolean at first, and is one in other trainers' files.
        return {True: "full", False: "none"}.get(value, value) if isinstance(value, bool) else value


class RolloutConfig(Section):
    """How trajectories are sampled."""

    batch_size: Annotated[int, Field(ge=1)] = 32
    """Tasks per training step; sft: examples per training step; trainer.type=null: tasks per rollout file."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Trajectories per task; their mean reward is the baseline."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature. The trainer applies the same one to its log-probs. 0, greedy, is for trainer.type=null."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Must be 1 in training: a truncated distribution biases every importance ratio."""
    top_k: int = -1
    """Must be -1 (off) in training, for the same reason."""
    max_batch_tokens: Annotated[int, Field(ge=64)] = 16384
    """embedded engine: most prompt tokens in one forward pass."""
    save_trajectories: bool = True
    """Write rollouts/step_N.jsonl.zst: tokens, text, rewards and weight versions of every trajectory."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Engine servers: share of a GPU's memory for weights and KV cache."""
    max_running: Annotated[int, Field(ge=0)] = 0
    """Engine servers: most requests that one server processes at a time; 0: as many as the KV cache holds."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Engine servers: most weight versions between a trajectory's oldest and the step that learns from it (eta of
    asynchronous training, AReaL's max_head_offpolicyness). 0: synchronous, nothing is sampled during training."""
    window: Annotated[int, Field(ge=0)] = 0
    """With max_staleness: a step takes finished groups among this many of the oldest ones, so that one slow document
    does not delay it; 0: three tenths of batch_size. No group is overtaken that would then become too old."""
    refill: bool | None = None
    """Replace groups whose rewards (of turns, where turns have rewards) are all equal by newly sampled ones: DAPO's
    dynamic sampling. Empty: with algorithm.name=dapo."""
    max_refill: Annotated[float, Field(ge=1)] = 4.0
    """With refill: most groups sampled for one step, as a multiple of batch_size; then the step uses those it has."""
    share_prefixes: bool = True
    """Prompts of a group that begin alike: read the common prefix once, then send the prompts. Prefixes are found in
    the token ids, whatever the agent (docs/servers.md). Changes speed alone."""
    prefetch_sections: bool = False
    """Engine servers: read the next section while the present turn is answered, where the agent announces how its next
    prompts begin (agent.prompt_order=section_first) and the server has room. Needs share_prefixes."""
    controllers: Annotated[int, Field(ge=0)] = 0
    """Engine servers: processes beside rank 0 that make requests and read answers, each for a part of the servers; 0:
    rank 0 itself does, some hundred requests a second (docs/scale.md). Not with rewards that ask a judge."""
    stall_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Engine servers: seconds without any response after which the log names the unfinished trajectories."""


class JudgeConfig(Section):
    """reward.name=memalpha: the frozen model that answers from a memory and judges what was written into it."""

    reader: Literal["server", "rules"] = "server"
    """server: a model behind an OpenAI-compatible server. rules: string comparison of facts `KEY value`, for
    task.name=facts on a CPU."""
    url: str = ""
    """Address of the server, http://HOST:PORT, or several with commas; empty: the servers that `clusterkit serve judge`
    registered for this experiment and trial. A key is read from CLUSTERKIT_JUDGE_KEY only."""
    model: str = ""
    """Name (or its last part) of the model that the server must serve; empty: the only one that it serves."""
    concurrency: Annotated[int, Field(ge=1)] = 128
    """Most requests in flight of one process of the run."""
    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds for one answer; then the request is sent again."""
    wait_s: Annotated[float, Field(ge=0)] = 3600.0
    """Seconds that the run waits for servers that do not answer before it ends; its checkpoints stay."""
    top_k: Annotated[int, Field(ge=1)] = 20
    """Entries of each store, the best by BM25, that a question is answered from."""
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


class AlgorithmConfig(Section):
    """Advantages and loss."""

    name: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo"] = "grpo"
    """Row of the algorithm table (trainer/algorithms/table.py; docs/algorithms.md). The fields below override the row
    where they are set. With another name than the preset's, the preset's own overrides are left out."""
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
    """loss_norm=constant: response tokens per trajectory that the loss is divided by. 0: the most that the settings
    allow, chunks times agent.max_memory_tokens plus agent.max_final_tokens."""
    credit: Literal["share", "split"] = "share"
    """share: every turn gets the trajectory's advantage. split: divided by the number of turns."""
    turn_advantage: Literal["grpo", "gigpo"] = "grpo"
    """Advantages where every turn has a reward (reward.name=memalpha). grpo: all turns of a group are one population.
    gigpo: the trajectory's part among trajectories, plus the turns' discounted part among turns of the same number."""
    gigpo_discount: Annotated[float, Field(ge=0, le=1)] = 0.95
    """gigpo: discount of a later turn's reward per turn between it and an earlier one."""
    gigpo_weight: Annotated[float, Field(ge=0)] = 1.0
    """gigpo: weight of the trajectory's part."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the k3 KL to the frozen starting policy; 0: there is no reference model."""
    old_logprobs: Literal["auto", "engine", "recompute"] = "auto"
    """Old log-probs of the policy's ratio. engine: those that the engine returned. recompute: the trainer's own before
    the step (decoupled PPO, with tis_cap), by a forward pass; the first of train.minibatches takes them from its
    training pass. auto: recompute with rollout.max_staleness, else engine."""
    tis_cap: Annotated[float, Field(ge=0)] = 2.0
    """Cap of the truncated importance weights of trainer against engine, where old_logprobs are recomputed; 0: off."""
    sequence_mask: Literal["none", "max", "geometric"] = "none"
    """Leave out turns whose trainer/engine ratio is outside [mask_low, mask_high], of any token (max) or in the
    geometric mean, where old log-probs are recomputed. Such turns add neither to the policy's loss nor to the KL."""
    mask_low: Annotated[float, Field(ge=0)] = 0.33
    """Lower bound of sequence_mask."""
    mask_high: Annotated[float, Field(gt=0)] = 3.0
    """Upper bound of sequence_mask."""
    mask_denominator: Literal["all", "kept"] = "all"
    """Denominator of the loss where sequence_mask leaves turns out. all: their tokens count, so that the weight of the
    others stays (AReaL). kept: only kept tokens count (verl); then old log-probs of all of train.minibatches are
    computed before the step."""
    drop_truncated_final: bool = False
    """Do not learn from final answers that hit max_final_tokens; they still count in the group's mean."""
    overlong_tokens: Annotated[int, Field(ge=0)] | None = None
    """DAPO's soft overlong punishment: over this many tokens below its limit a response loses up to overlong_penalty.
    0: none. Empty: as the row says, for dapo a fifth of the limit. It applies to final answers, or to every turn where
    turns have rewards."""
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
    """Negative controls: runs that have nothing to learn from."""

    rewards: Literal["true", "shuffled", "flipped"] = "true"
    """shuffled: rewards are permuted over the batch. flipped: their sign is reversed."""
    zero_advantages: bool = False
    """Set every advantage to zero, so that no weight may change."""


class TrainerConfig(Section):
    """Kind of run."""

    type: Literal["grpo", "sft", "null"] = "grpo"
    """grpo: reinforcement learning (ppo, AReaL's name, means the same). sft: supervised learning of a file of examples.
    null: no training, only trajectories of eval.num_tasks tasks of eval.split with their rewards."""

    @field_validator("type", mode="before")
    @classmethod
    def _spelling(cls, value: Any) -> Any:
        # An unquoted null in YAML is None.
        return {None: "null", "ppo": "grpo"}.get(value, value)


class TrainConfig(Section):
    """Optimisation."""

    total_steps: Annotated[int, Field(ge=0)] = 0
    """Training steps; 0: total_epochs decides."""
    total_epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the training tasks."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after the warm-up steps."""
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
    """Optimizer steps per rollout batch, each on an equal share of the tasks."""
    max_tokens_per_mb: Annotated[int, Field(ge=16)] = 16384
    """Most tokens in one packed micro-batch of one rank; common beginnings of rows count once. A longer row is a
    micro-batch of its own. Supervised learning leaves longer ones out."""
    share_prefixes: bool = True
    """Compute common beginnings of rows in a micro-batch once, such as a section that the trajectories of a group read
    at the same turn. The same gradients up to rounding; false: compute every row whole."""
    logprob_chunk: Annotated[int, Field(ge=1)] = 4096
    """Loss positions whose logits [positions, vocabulary] are in memory at a time."""
    ranks: Annotated[int, Field(ge=1)] = 1
    """Data-parallel FSDP2 ranks; with allocation_mode, its training GPUs in place of this."""
    compile: bool | None = None
    """Compile the layers with torch.compile: faster, after a minute of compilation. Empty: on GPUs with Triton, unless
    tensor parallel ranks share them."""
    max_skipped_steps: Annotated[int, Field(ge=0)] = 5
    """Skipped optimizer steps (gradient not finite) in a row after which the run ends; 0: no limit."""
    max_logprob_gap: Annotated[float, Field(ge=0)] | None = None
    """Largest mean difference, in nats, between log-probs of one long row by the trainer's and by the model's own
    forward pass; the run ends before its first step where it is larger. Empty: 0.001 in float32, 0.2 in bfloat16; 0:
    not compared."""
    offload: bool = False
    """Keep parameters and optimizer state, 12 bytes per parameter, in host memory while they are unused: slower, for
    GPUs that also generate."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads per rank; 0: cores divided by ranks. Bit-identical runs need the same number."""


class WarmupConfig(Section):
    """Supervised warm-up on demonstrations before the first RL step, for models that start from random weights."""

    recall_steps: Annotated[int, Field(ge=0)] = 0
    """Most steps of dense recall practice, which ends early at 98 % accuracy."""
    steps: Annotated[int, Field(ge=0)] = 0
    """Steps of supervised fine-tuning on demonstrations; 0: no warm-up."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Sequences per step."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate; linear decay to a tenth."""
    carry_share: Annotated[float, Field(ge=0, le=1)] = 0.15
    """Share of demonstrations that keep a needed fact over a section without it; the others drop it."""
    gate: Annotated[float, Field(ge=0, le=1)] = 0.98
    """Greedy accuracy on held-out tasks of one section that the warm-up must reach."""
    retries: Annotated[int, Field(ge=0)] = 2
    """Further initialisations that are tried when the gate is missed."""


RAG_PARAGRAPHS = 2
"""Paragraphs that eval.final_methods=rag reads."""
FinalMethod = Literal["rag", "gold", "long_context"]
METHOD_LABELS: Mapping[str, str] = {
    "rag": f"BM25's top {RAG_PARAGRAPHS}",
    "gold": "gold documents alone",
    "long_context": "all at once, cut to the window",
}
"""What people are told a line of the closing table is, by its `FinalMethod`."""


class EvalConfig(Section):
    """Held-out evaluation during training."""

    every_steps: Annotated[int, Field(ge=0)] = 10
    """Steps between evaluations; 0: only before the first and after the last step."""
    num_tasks: Annotated[int, Field(ge=1)] = 128
    """Held-out tasks per evaluation; with trainer.type=null: tasks of the run."""
    split: Literal["dev", "test", "train"] = "test"
    """Split of the tasks: dev to choose settings, test to report. train: the training tasks, with trainer.type=null."""
    final_chunks: list[Annotated[int, Field(ge=1)]] = []  # noqa: RUF012 (pydantic copies it)
    """recall: document lengths, in chunks, of the closing table."""
    final_documents: list[Annotated[int, Field(ge=2)]] = []  # noqa: RUF012 (pydantic copies it)
    """hotpotqa: numbers of documents in the contexts of the closing table, beside task.num_documents."""
    final_methods: list[FinalMethod] = []  # noqa: RUF012 (pydantic copies it)
    """hotpotqa with agent.name=memagent: what the agent is shown, in place of all sections one after the other, in
    further lines of the closing table at each number of documents. rag: the two documents that BM25 finds; gold: those
    that hold the answer; long_context: all at once, without the middle where it does not fit into the run's context
    window. As `clusterkit eval --methods` with reader=agent, whose window is the checkpoint's own."""
    blank_memory: bool = True
    """Closing table: also measure with the memory blanked and the policy forced to answer."""
    save_trajectories: Annotated[int, Field(ge=0)] = 8
    """Held-out tasks, the first ones, whose memories after every section are kept before the first step and after the
    last one, for `clusterkit trace --heldout`; 0: none."""

    @field_validator("final_methods")
    @classmethod
    def _once(cls, methods: list[FinalMethod]) -> list[FinalMethod]:
        return list(dict.fromkeys(methods))

    def check(self, task: str, is_hotpotqa: bool, agent: str) -> None:
        """Raise ValueError where a run cannot have the lines that are asked for. task, agent: their names."""
        if self.final_documents and not is_hotpotqa:
            raise ValueError(
                f"eval.final_documents={self.final_documents} is for task.name=hotpotqa, and task.name is {task}: "
                "leave it out"
            )
        if self.final_methods and not (is_hotpotqa and agent == "memagent"):
            raise ValueError(
                f"eval.final_methods={','.join(self.final_methods)} is for task.name=hotpotqa with agent.name=memagent "
                f"(this run has task.name={task} and agent.name={agent}): leave it out"
            )


class CheckpointConfig(Section):
    """Recover checkpoints (to go on from, overwritten) and persistent ones (kept, in Hugging Face format)."""

    ckpt_freq_secs: Annotated[float, Field(ge=0)] = 600.0
    """Seconds after which the end of a step writes the next recover checkpoint."""
    ckpt_first_step: Annotated[int, Field(ge=1)] = 2
    """Write the first recover checkpoint after this step."""
    ckpt_freq_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between further recover checkpoints; 0: by time only."""
    async_recover: bool | None = None
    """Write checkpoints in the background: a step waits only for a copy in host memory, 12 bytes per parameter for a
    recover checkpoint and 2 (bfloat16) or 4 for a persistent one. Empty: on GPUs."""
    save_freq_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between persistent checkpoints; 0: off."""
    save_freq_epochs: Annotated[int, Field(ge=0)] = 1
    """Epochs between persistent checkpoints; 0: off."""
    save_freq_secs: Annotated[float, Field(ge=0)] = 0.0
    """Seconds between persistent checkpoints; 0: off."""
    merged: bool = True
    """With model.lora: persistent checkpoints are whole models, into which the adapter is merged, and hold it in their
    folder `adapter`. false: they are the adapter alone, which needs its base beside it."""


class WeightsConfig(Section):
    """Publishing new weights to inference servers."""

    transport: Literal["auto", "nccl", "disk"] = "auto"
    """auto: NCCL to SGLang servers on GPUs, CUDA IPC to those on the trainer's own; a folder for others, and after a
    failed transfer. nccl: NCCL only; a server that it cannot reach is used no more. disk: a folder, but for servers
    that give their memory away."""
    adapters: Literal["auto", "merged", "alone"] = "auto"
    """With model.lora: merged: servers get all weights, with the adapters merged in, in the way of `transport`. alone:
    they keep the base's weights, and load adapters from a folder, without a pause. auto: alone to vLLM, merged to
    SGLang."""
    bucket_mb: Annotated[int, Field(ge=1, le=16384)] = 1024
    """Size of a bucket of weights, in MiB. Trainer and servers need memory for about two beside the weights."""
    deadline_s: Annotated[float, Field(gt=0, le=300)] = 60.0
    """Seconds for a server to join a transfer, and for each bucket to arrive."""
    servers_per_group: Annotated[int, Field(ge=0)] = 16
    """Most servers of one broadcast; 0: all. Rank 0 sends the weights once a group, so few groups are faster. Where a
    server dies during a broadcast the others of its group load that version from a folder, or are started again."""
    folder: str = ""
    """Folder for weight versions; empty: /dev/shm where all servers are on this host and it has room, else the run's
    folder."""


class MonitorConfig(Section):
    """Outputs of numbers beside main.log and metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard event files to the run directory."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases; its key is read from WANDB_API_KEY only, and written nowhere."""
    wandb_project: str = "clusterkit"
    """Project at Weights & Biases."""


class SupervisedConfig(Section):
    """Supervised start, as a run of trainer.type=sft with the model, agent, ranks and seed of this one."""

    dataset: str = ""
    """JSON-lines file of examples, within task.path where the task has one (traces.jsonl of `clusterkit data prepare
    reading`). Empty: no supervised start."""
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the examples (by hash of their text) that is held out."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Examples of an optimizer step."""
    total_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps; 0: total_epochs decides."""
    total_epochs: Annotated[int, Field(ge=1)] = 2
    """Passes over the examples."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate of AdamW; it falls along a cosine."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Final learning rate as a share of the peak; 1: constant."""
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Optimizer steps of linear warm-up of the learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    """AdamW; not applied to biases and norms."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW."""
    eval_every_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between measurements of the held-out loss; 0: only before and after."""
    eval_tasks: Annotated[int, Field(ge=1)] = 256
    """Most held-out examples that are measured."""

    def check(self, kind: str, model_path: str | None) -> None:
        """Raise ValueError where a run cannot have a supervised start. kind: trainer.type."""
        if not self.dataset:
            return
        named = f"supervised.dataset={self.dataset}"
        if kind != "grpo":
            raise ValueError(f"{named} is learned before reinforcement, and trainer.type is {kind}: leave it out")
        if not model_path:
            raise ValueError(
                f"{named} needs a pretrained model, and one built from nothing has a warm-up of its own: set model.path"
            )
