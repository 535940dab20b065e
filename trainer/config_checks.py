"""Whether the settings of a run fit one another. Each check raises ValueError with what to change."""

from __future__ import annotations

from trainer.algorithms.table import resolve
from trainer.allocation import Allocation
from trainer.config_agents import (
    ChunksAgentConfig,
    MemalphaAgentConfig,
    OwnAgentConfig,
    SingleTurnConfig,
)
from trainer.config_fields import RunFields
from trainer.config_tasks import (
    FactsConfig,
    FilesConfig,
    HotpotqaConfig,
    RecallConfig,
)


def check_sampling(c: RunFields) -> None:
    """Training samples from the whole distribution."""
    if c.rollout.top_p < 1 or c.rollout.top_k != -1:
        raise ValueError(
            f"rollout.top_p={c.rollout.top_p} top_k={c.rollout.top_k}: training needs top_p=1 and top_k=-1, because "
            "the trainer's log-probs cover the whole vocabulary and a cut distribution would bias every ratio"
        )


def check_type(c: RunFields) -> None:
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


def check_heldout(c: RunFields) -> None:
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


def check_batch(c: RunFields) -> None:
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


def check_warmup(c: RunFields) -> None:
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


def check_sections(c: RunFields) -> None:
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


def check_window(c: RunFields) -> None:
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


def check_loss(c: RunFields) -> None:
    """A loss that is divided by a constant has one."""
    row = resolve(c.algorithm)
    if c.trainer.type == "grpo" and row.loss_norm == "constant" and not c.response_limit:
        why = "algorithm.loss_norm=constant" if c.algorithm.loss_norm else f"algorithm.name={c.algorithm.name}"
        own = "agent.name" in c.custom or c.agent.name == "memalpha"
        raise ValueError(
            f"{why} divides the loss by the most response tokens that a trajectory may have, and no setting bounds "
            "them: set algorithm.response_limit=TOKENS" + ("" if own else ", or agent.max_chunks")
        )


def check_overlong(c: RunFields) -> None:
    """The part of a response that is punished for its length is no longer than the response."""
    a, given = c.agent, c.algorithm.overlong_tokens or 0
    name, limit = "max_final_tokens", a.max_final_tokens
    if isinstance(a, MemalphaAgentConfig):
        name, limit = "max_memory_tokens", a.max_memory_tokens
    if given > limit:
        raise ValueError(
            f"algorithm.overlong_tokens={given} is over agent.{name}={limit}, the limit of a response: lower it"
        )


def check_gpus(c: RunFields) -> None:
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


def check_servers(c: RunFields) -> None:
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


def check_memory(c: RunFields) -> None:
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


def _check_memory_window(c: RunFields, a: MemalphaAgentConfig) -> None:
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
