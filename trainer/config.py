"""RunConfig: everything that defines a run, in one validated tree.

Both sides read this module and the config_* modules beside it, so they import nothing but pydantic, the standard
library and modules of the same kind. Every field has a default, bounds and a sentence, which `clusterkit presets
explain` prints. Unknown keys are errors.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from trainer.algorithms.table import resolve
from trainer.allocation import Allocation
from trainer.allocation_text import parse as parse_allocation
from trainer.config_0_1 import without_others
from trainer.config_agents import (
    AnyAgentConfig,
    ChunksAgentConfig,
    MemagentConfig,
    MemalphaAgentConfig,
    OwnAgentConfig,
    SingleTurnConfig,
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


def check_sampling(c: RunConfig) -> None:
    """Training samples from the whole distribution."""
    if c.rollout.top_p < 1 or c.rollout.top_k != -1:
        raise ValueError(
            f"rollout.top_p={c.rollout.top_p} top_k={c.rollout.top_k}: training needs top_p=1 and top_k=-1, because "
            "the trainer's log-probs cover the whole vocabulary and a cut distribution would bias every ratio"
        )


def check_type(c: RunConfig) -> None:
    """Examples are for supervised learning, and it has no use for anything else."""
    kind = c.trainer.type
    if kind == "sft" and c.task.name != "sft":
        raise ValueError(
            f"trainer.type=sft learns from a file of examples, and task.name={c.task.name} is none: add --task sft "
            "task.path=FILE.jsonl"
        )
    if kind != "sft" and c.task.name == "sft":
        raise ValueError(f"task.name=sft has examples to learn from, and trainer.type is {kind}: set trainer.type=sft")
    if kind != "null" and c.eval.split == "train":
        raise ValueError("eval.split=train is for trainer.type=null: what is learned from is not held out")
    if kind == "grpo" and not c.rollout.temperature:
        raise ValueError("rollout.temperature=0 is for trainer.type=null: greedy trajectories are all the same")


def check_heldout(c: RunConfig) -> None:
    """Where nothing is held out, nothing held out is asked for."""
    if not isinstance(c.task, FilesConfig) or c.task.eval_fraction or c.custom:
        return
    if c.task.name in ("hotpotqa", "sft"):
        raise ValueError(f"task.eval_fraction=0: task.name={c.task.name} is always evaluated: hold out a share of it")
    if c.task.name != "math" and not (c.task.name == "memalpha" and c.eval.split == "dev"):
        return
    kept = f"task.eval_fraction=0 keeps every row of task.name={c.task.name} for training"
    if c.trainer.type == "null" and c.eval.split != "train":
        raise ValueError(f"{kept}: set eval.split=train, or task.eval_fraction=0.2 for a held-out part")
    if c.trainer.type == "grpo" and c.eval.every_steps:
        raise ValueError(
            f"eval.every_steps={c.eval.every_steps} measures held-out tasks, and {kept}: set task.eval_fraction=0.02 "
            "to hold a part out, or eval.every_steps=0 and score checkpoints with clusterkit eval"
        )


def check_batch(c: RunConfig) -> None:
    """A batch divides into minibatches and ranks, and an epoch has at least one."""
    if c.trainer.type == "null":  # the last batch may be a part of one
        return
    if c.rollout.batch_size % c.train.minibatches:
        raise ValueError(
            f"rollout.batch_size={c.rollout.batch_size} is not divisible by train.minibatches={c.train.minibatches}: "
            f"choose a multiple of {c.train.minibatches}"
        )
    if c.engine == "embedded" and c.rollout.batch_size % c.train.ranks:  # every rank samples its share
        raise ValueError(
            f"rollout.batch_size={c.rollout.batch_size} is not divisible by train.ranks={c.train.ranks}: "
            f"choose a multiple of {c.train.ranks}"
        )
    if c.rollout.batch_size > c.task.train_size:
        raise ValueError(
            f"rollout.batch_size={c.rollout.batch_size} is larger than task.train_size={c.task.train_size}: "
            "one epoch would have no whole step"
        )


def check_warmup(c: RunConfig) -> None:
    """A model built from nothing learns recall in its own words, a pretrained one everything else."""
    if c.model.path is None and c.task.name in ("hotpotqa", "math", "memalpha", "needles"):
        raise ValueError(
            f"task.name={c.task.name} needs a pretrained model: set model.path, or use --preset 135M_cpu "
            "(a model built from nothing can only learn task.name=recall or facts, examples, and tasks of your own)"
        )
    if c.model.path is not None and c.task.name in ("recall", "facts") and c.agent.template == "words":
        raise ValueError(
            "agent.template=words is for the tiny model's own vocabulary: with model.path set agent.template=memagent"
        )


def check_sections(c: RunConfig) -> None:
    """recall and facts cut their own sections: one must fit into what the agent reads at a time."""
    task, agent = c.task, c.agent
    if not isinstance(task, RecallConfig | FactsConfig) or not isinstance(agent, ChunksAgentConfig):
        return
    if agent.template == "words" and task.section_tokens > agent.chunk_tokens:
        raise ValueError(
            f"a section has 3 x task.facts_per_chunk={task.facts_per_chunk} + task.filler_per_chunk="
            f"{task.filler_per_chunk} = {task.section_tokens} tokens and agent.chunk_tokens is {agent.chunk_tokens}: "
            "raise agent.chunk_tokens, or lower the other two"
        )


def check_window(c: RunConfig) -> None:
    """The limits alone must fit into the context window; the prompt's own words are added once a tokenizer is there."""
    a, window, name = c.agent, c.model.context_window, "model.context_window"
    if isinstance(a, OwnAgentConfig) or c.trainer.type == "sft":
        return  # what they send is theirs; it is looked at when it is sent
    if isinstance(a, MemalphaAgentConfig):
        _check_memory_window(c, a)
        return
    # A model built from nothing runs with template=words only.
    own = c.model.tiny.max_position_embeddings if c.model.path is None and a.template == "words" else 0
    if own and (not window or own < window):
        window, name = own, "model.tiny.max_position_embeddings"
    if not window:
        return
    question = f"agent.max_question_tokens={a.max_question_tokens}"
    if isinstance(a, SingleTurnConfig):
        total, largest = a.max_question_tokens + a.max_final_tokens, "agent.max_final_tokens"
        terms = f"{question} + agent.max_final_tokens={a.max_final_tokens}"
    else:
        memory = f"agent.max_memory_tokens={a.max_memory_tokens}"
        update = a.chunk_tokens + 2 * a.max_memory_tokens + a.question_limit("update")
        final = a.max_memory_tokens + a.question_limit("final") + a.max_final_tokens
        total, largest = max(update, final), "agent.chunk_tokens" if update >= final else "agent.max_final_tokens"
        terms = f"{memory} + {question} + agent.max_final_tokens={a.max_final_tokens}"
        if update >= final:
            twice = "2 x " if a.question_limit("update") > a.max_question_tokens else ""
            terms = f"agent.chunk_tokens={a.chunk_tokens} + 2 x {memory} + {twice}{question}"
    if total > window:
        raise ValueError(
            f"{terms} = {total} tokens, before the prompt's own words, and the context window is {window} ({name}): "
            f"lower {largest}, or another of these limits, by {total - window} or more"
        )


def check_loss(c: RunConfig) -> None:
    """A loss that is divided by a constant has one."""
    row = resolve(c.algorithm)
    if c.trainer.type == "grpo" and row.loss_norm == "constant" and not c.response_limit:
        why = "algorithm.loss_norm=constant" if c.algorithm.loss_norm else f"algorithm.name={c.algorithm.name}"
        own = "agent.name" in c.custom or c.agent.name == "memalpha"
        raise ValueError(
            f"{why} divides the loss by the most response tokens that a trajectory may have, and no setting bounds "
            "them: set algorithm.response_limit=TOKENS" + ("" if own else ", or agent.max_chunks")
        )


def check_overlong(c: RunConfig) -> None:
    """The part of a response that is punished for its length is no longer than the response."""
    a, given = c.agent, c.algorithm.overlong_tokens or 0
    name, limit = "max_final_tokens", a.max_final_tokens
    if isinstance(a, MemalphaAgentConfig):
        name, limit = "max_memory_tokens", a.max_memory_tokens
    if given > limit:
        raise ValueError(
            f"algorithm.overlong_tokens={given} is over agent.{name}={limit}, the limit of a response: lower it"
        )


def check_gpus(c: RunConfig) -> None:
    """Every GPU that is taken has work, and every engine has its GPUs."""
    wanted = c.allocation
    if wanted is None or wanted.gpus == c.gpus:
        return
    sides = [f"{n} {does}" for n, does in ((wanted.rollout_gpus, "generate"), (wanted.training_gpus, "train")) if n]
    shared = ", the same ones" if wanted.colocated else ""
    raise ValueError(
        f"allocation_mode={c.allocation_mode} is for {wanted.gpus} GPU{'s' * (wanted.gpus != 1)} "
        f"({' and '.join(sides)}{shared}), and n_nodes={c.n_nodes} x n_gpus_per_node={c.n_gpus_per_node} = {c.gpus}: "
        f"change one of them; `clusterkit presets plan {c.preset or 'PRESET'} --nodes N` works it out"
        + _servers_alone(wanted)
    )


def _servers_alone(allocation: Allocation) -> str:
    judge = f"`clusterkit serve judge --model-path MODEL --gpus {allocation.gpus}`"
    alone = ".\nIt has servers alone: nothing would train. Mem-alpha's are those of a judge, started beside the run: "
    return "" if allocation.training_gpus else alone + judge


def check_servers(c: RunConfig) -> None:
    """What only servers can do is asked of servers, and no more of them is waited for than can come."""
    if c.engine == "embedded" and c.rollout.max_staleness:
        raise ValueError(
            f"rollout.max_staleness={c.rollout.max_staleness} needs engine servers, which sample while the trainer "
            "learns: set servers.engine=sglang or vllm, or rollout.max_staleness=0"
        )
    if c.rollout.controllers and (c.engine == "embedded" or c.reward.name == "memalpha"):
        why = "there are no engine servers to ask" if c.engine == "embedded" else "a judge is asked by one process"
        raise ValueError(f"rollout.controllers={c.rollout.controllers}: {why}: set rollout.controllers=0")
    if c.engine == "sglang" and not c.n_gpus_per_node:
        raise ValueError(
            "servers.engine=sglang needs GPUs: set n_gpus_per_node and allocation_mode (sglang:d1+fsdp:d1 for one GPU "
            "each, sglang:d1|fsdp:d1 for one GPU that both share), or servers.engine=vllm on a CPU"
            + (_servers_alone(c.allocation) if c.allocation else "")
        )
    shared = c.engine == "sglang" and c.allocation is not None and c.allocation.colocated
    if c.weights.transport == "nccl" and (shared or c.engine == "vllm"):
        why = "NCCL does not join two processes on one GPU" if shared else "vLLM servers take weights by folder only"
        raise ValueError(f"weights.transport=nccl: {why}: set weights.transport=auto")
    together = c.engine != "embedded" and c.allocation is not None and c.allocation.colocated
    if together and not c.serving.shutdown_on_exit:
        raise ValueError(
            f"servers.shutdown_on_exit=false: with allocation_mode={c.allocation_mode} the servers share the trainer's "
            "GPUs and end with it: set servers.shutdown_on_exit=true, or give them GPUs of their own (as in "
            "sglang:d1+fsdp:d1)"
        )
    if c.rollout.window > c.rollout.batch_size:
        raise ValueError(
            f"rollout.window={c.rollout.window} is larger than rollout.batch_size={c.rollout.batch_size}: lower it"
        )


def check_memory(c: RunConfig) -> None:
    """A structured memory is written by its agent, asked by its tasks and scored by its reward: all three, or none."""
    if c.custom or c.trainer.type == "sft":
        return
    parts = {
        f"task.name={c.task.name}": c.task.name in ("facts", "memalpha"),
        f"agent.name={c.agent.name}": c.agent.name == "memalpha",
        f"reward.name={c.reward.name}": c.reward.name == "memalpha",
    }
    if len(set(parts.values())) > 1:
        raise ValueError(
            f"{', '.join(parts)} do not belong together: with agent.name=memalpha set task.name=memalpha (or facts) "
            "and reward.name=memalpha, or start from --preset memalpha-tiny or memalpha-4B"
        )
    if c.task.name == "memalpha" and c.judge.reader == "rules":
        raise ValueError("judge.reader=rules knows task.name=facts only: documents need judge.reader=server")


def _check_memory_window(c: RunConfig, a: MemalphaAgentConfig) -> None:
    """The context that the agent keeps to must be one that the model has."""
    own = c.model.tiny.max_position_embeddings if c.model.path is None and a.template == "words" else 0
    limits = {
        "model.tiny.max_position_embeddings": own,
        "model.context_window": c.model.context_window,
    }
    for name, limit in limits.items():
        if limit and a.context_tokens > limit:
            raise ValueError(f"agent.context_tokens={a.context_tokens} is over {name}={limit}: lower it, or raise that")
    if a.chunk_tokens + a.max_memory_tokens > a.context_tokens:
        raise ValueError(
            f"agent.chunk_tokens={a.chunk_tokens} + agent.max_memory_tokens={a.max_memory_tokens} (the response) leave "
            f"no room in agent.context_tokens={a.context_tokens}: lower one of them"
        )


CHECKS = (
    check_type,
    lambda c: c.supervised.check(c.trainer.type, c.model.path),
    lambda c: c.eval.check(c.task.name, isinstance(c.task, HotpotqaConfig), c.agent.name),
    check_servers,
    check_sampling,
    check_heldout,
    check_batch,
    check_warmup,
    check_sections,
    check_memory,
    check_window,
    check_loss,
    check_overlong,
    check_gpus,
)
