"""Checks of a configuration's arithmetic: each finding has its numbers, and what to change if they do not fit."""

from __future__ import annotations

from clusterkit.capacity import timing
from clusterkit.capacity.expected import lengths_of
from clusterkit.capacity.memory import (
    GIB,
    RELEASED,
    ROOM,
    cache_of,
    disk_usage,
    enough_memory,
    host_usage,
    training_usage,
    waiting_usage,
)
from clusterkit.capacity.plan import LATE_CHECKPOINT_HOURS, longest_sequence, remote_plan, template_tokens
from clusterkit.capacity.shapes import ModelShape, shape_named
from clusterkit.capacity.sharing import computed_tokens, room_tokens, training_ranks
from clusterkit.capacity.timing import StepTime
from clusterkit.common.finding import Finding, Level
from clusterkit.common.text_plot import duration
from clusterkit.config.presets import WholeRun
from trainer.allocation import Layout, Part
from trainer.config import RunConfig
from trainer.config_agents import MemalphaAgentConfig, SingleTurnConfig
from trainer.config_lora import ALL_LINEAR
from trainer.config_parts import LESS_MEMORY
from trainer.errors import UserError
from trainer.tasks.size import evaluates, training_size

FEW_SEQUENCES = 8
"""With room for fewer sequences of full length, a server wastes most of its GPU."""
SMALL_CHUNK = 1024
"""A chunk of log-probs that needs little memory and costs hardly any speed."""
SELDOM_MORE = 1.05
"""What training computes, over what it would with larger micro-batches, or the busiest rank over the mean, that is not
worth a word."""
ROUND = 1024
"""Tokens to whose multiples a micro-batch is rounded."""
USUAL_STORAGE, USUAL_SHARED_STORAGE = 10**12, 10**13
"""Bytes of storage that AReaL's tutorial asks for: on a single host, and shared by several."""
FULL_JUDGE = 0.7
"""A judge whose weights take a larger share of a GPU can answer few requests at a time."""
USUAL_RANK = 32
"""Rank of the adapters that are proposed where training all weights does not fit."""


def context_window(config: RunConfig, shape: ModelShape | None) -> int:
    """Return the context in tokens: the setting, else that of the checkpoint; 0 if both are unknown."""
    return config.model.context_window or (shape.context if shape else 0)


def check_gpus(config: RunConfig, shape: ModelShape | None) -> list[Finding]:
    """Check that GPUs are the sum of data x tensor x pipeline, and that t divides the heads within one host."""
    allocation = config.allocation
    if allocation is None:
        many = f"; {config.train.ranks} ranks" if config.train.ranks > 1 else ""
        return [_ok("gpus", f"none needed: no engine servers, the trainer's own process generates{many}")]
    sides = []
    if allocation.rollout is not None:
        sides.append(f"{allocation.rollout_gpus} generate ({_degrees(allocation.rollout.layout)})")
    if allocation.training is not None:
        folded = ", its pipeline as FSDP ranks" if allocation.training.layout.pipeline > 1 else ""
        sides.append(f"{allocation.training_gpus} train ({_degrees(allocation.training.layout)}{folded})")
    shared = " and, on the same GPUs, " if config.rollout.max_staleness else " and, taking turns on the same GPUs, "
    together = shared if allocation.colocated else " + "
    hosts = f"{_count(config.n_nodes, 'host')} x {config.n_gpus_per_node}"
    findings = [_ok("gpus", f"{hosts} = {config.gpus}: {together.join(sides)}")]
    for part in allocation.parts:
        findings += _tensor(config, shape, part)
    return findings


def check_tokens(config: RunConfig, shape: ModelShape | None) -> list[Finding]:
    """Check that the longest prompt with its response fits into the context."""
    agent, longest, window = config.agent, longest_sequence(config), context_window(config, shape)
    memory = config.train.max_tokens_per_mb
    words = template_tokens(agent)
    if isinstance(agent, MemalphaAgentConfig):
        terms = f"chunk {agent.chunk_tokens} + response {agent.max_memory_tokens} + as much of the memory as fits"
    elif isinstance(agent, SingleTurnConfig):
        terms = f"question {agent.max_question_tokens} + response {agent.max_final_tokens}"
    elif longest == words + agent.question_limit("update") + agent.chunk_tokens + 2 * agent.max_memory_tokens:
        twice = "2 x " if agent.question_limit("update") > agent.max_question_tokens else ""
        question = f"{twice}question {agent.max_question_tokens}"
        terms = f"{question} + chunk {agent.chunk_tokens} + 2 x memory {agent.max_memory_tokens} + prompt {words}"
    else:
        question = f"question {agent.max_question_tokens}"
        terms = f"{question} + memory {agent.max_memory_tokens} + answer {agent.max_final_tokens} + prompt {words}"
    if window and longest > window:
        fix = f"lower agent.chunk_tokens or another of these by {longest - window}, or use a model with more context"
        return [_fail("tokens", f"{terms} = {longest}, and the context is {window}", fix)]
    context = f"{window} of context" if window else "a context that is not known"
    if longest > memory:
        return [_ok("tokens", f"{terms} = {longest} ≤ {context}; over {memory} it is a micro-batch of its own")]
    return [_ok("tokens", f"{terms} = {longest} ≤ {context}; ≤ {memory} per micro-batch")]


def check_batch(config: RunConfig) -> list[Finding]:
    """Check that the trajectories of a minibatch divide into the training ranks."""
    rollout, minibatches = config.rollout, config.train.minibatches
    ranks = training_ranks(config)
    trajectories = rollout.batch_size * rollout.group_size // minibatches
    text = (
        f"{rollout.batch_size} tasks x {rollout.group_size} = {rollout.batch_size * rollout.group_size} trajectories, "
        f"{_count(minibatches, 'optimizer step')} of {trajectories}"
    )
    if trajectories < ranks:
        fix = "fewer training GPUs, fewer minibatches, or a larger rollout.batch_size"
        return [_fail("batch", f"{text}, which leaves some of {ranks} training ranks without any", fix)]
    if trajectories % ranks:
        message = f"{text}, which {ranks} training ranks cannot share evenly: some wait for the others"
        return [_warn("batch", message, "choose training GPUs that divide it")]
    each = f", {trajectories // ranks} per training rank" if ranks > 1 else ""
    return [_ok("batch", text + each)]


def check_prefixes(config: RunConfig, shape: ModelShape | None, gpu_memory: int) -> list[Finding]:
    """Report what training computes of the rows, and whether a micro-batch has room for those that begin alike.

    Its time is that of the rank with most tokens, which the others wait for.
    """
    allocation = config.allocation
    if allocation is None or allocation.training is None or config.trainer.type != "grpo":
        return []
    plan, layout, now = remote_plan(config), allocation.training.layout, config.train.max_tokens_per_mb
    length = lengths_of(config)[1]
    turns, room = plan.turns(length), room_tokens(config, plan.turns(1.0))
    if not room or config.custom:  # whose lengths nobody knows
        return []

    def needed(size: int) -> int:
        train = config.train.model_copy(update={"max_tokens_per_mb": size})
        usage = training_usage(config.model_copy(update={"train": train}), shape, layout).total if shape else 0
        return usage + (RELEASED if allocation.colocated else 0)

    tokens = computed_tokens(config, turns)
    computes = f"training takes the time of {tokens.waited_for / tokens.whole:.0%} of the rows' tokens"
    if tokens.waited_for > SELDOM_MORE * tokens.computed:
        over = tokens.waited_for / tokens.computed
        computes += f", as the busiest of {training_ranks(config)} ranks computes {over:.1f} times the mean"
    need = f"{config.rollout.group_size} rows that begin alike need up to {room} tokens of a micro-batch"
    sizes = range(ROUND * -(-room // ROUND), now, -ROUND)
    if not sizes or tokens.waited_for < SELDOM_MORE * computed_tokens(config, turns, sizes[0]).waited_for:
        return [_ok("prefixes", f"{need}; {computes} (responses {length:.0%} of their limit)")]
    message = f"{need}, and it holds {now}, so what they begin with is computed several times: {computes}"
    size = next((size for size in sizes if needed(size) <= (1 - ROOM) * gpu_memory), now)
    better = computed_tokens(config, turns, size).waited_for
    if tokens.waited_for < SELDOM_MORE * better:
        return [_ok("prefixes", f"{message}; a GPU has no room for one that helps")]
    takes = f", which takes {_gib(needed(size))} of a training GPU" if shape else ""
    message += f", with {size} {better / tokens.whole:.0%} (responses {length:.0%} of their limit)"
    return [_warn("prefixes", message, f"train.max_tokens_per_mb={size}{takes}")]


def check_data(config: RunConfig) -> list[Finding]:
    """Report the rows to train on, the steps of an epoch, and whether rows are held out."""
    if config.trainer.type == "null":
        return []
    try:
        schedule = timing.schedule(config)
    except UserError as error:
        return [_fail("data", str(error), "")]
    bound = "" if training_size(config).exact else "at most "
    held = "" if evaluates(config) else "; none is held out: clusterkit eval scores the checkpoints"
    return [
        _ok("data", f"{bound}{schedule.train_size} rows to train on, {schedule.steps_per_epoch} steps an epoch{held}")
    ]


def check_memory(config: RunConfig, shape: ModelShape | None, gpu_memory: int) -> list[Finding]:
    """Compare weights, optimizer, activations and KV cache with the memory of a GPU (bytes)."""
    allocation = config.allocation
    if allocation is None:
        return []
    if shape is None:
        message = f"the shape of {config.model.path} is not known here, so its memory is not checked"
        return [_warn("memory", message, "name a folder that has its config.json: model.path=FOLDER")]
    findings = []
    if allocation.training is not None:
        findings.append(_training(config, shape, allocation.training.layout, gpu_memory, allocation.colocated))
    if allocation.rollout is not None:
        findings.append(_rollout(config, shape, allocation.rollout, gpu_memory))
    if allocation.colocated and allocation.training is not None:
        findings += _colocated(config, shape, allocation.training.layout, gpu_memory)
    if allocation.training is not None:
        findings += _host(config, shape, allocation.training.layout)
    return findings


def check_adapters(config: RunConfig, usual: float, shape: ModelShape | None) -> list[Finding]:
    """Tell what low-rank adapters are for, and whether they have a learning rate of their own; usual: the preset's."""
    lora, rate = config.model.lora, config.train.learning_rate
    if not lora.rank or shape is None:
        return []
    layers = "all linear layers" if lora.targets == [ALL_LINEAR] else ", ".join(lora.targets)
    count = shape.adapter_parameters(lora)
    message = (
        f"adapters of rank {lora.rank} for {layers}: {count / 1e6:.3g} M of {shape.parameters / 1e9:.3g} G parameters"
    )
    try:
        lora.chosen(shape.linear)
    except UserError as error:
        return [_fail("adapters", str(error), "name layers that it has: model.lora.targets")]
    if rate != usual:
        return [_ok("adapters", f"{message}; learning rate {rate:g}")]
    message += f"; learning rate {rate:g}, the preset's for all weights: adapters want about ten times as much"
    return [_warn("adapters", message, f"train.learning_rate={10 * rate:g}")]


def check_judge(config: RunConfig, gpu_memory: int) -> list[Finding]:
    """Report the model that reads and judges; its GPUs come on top of the run's."""
    judge = config.judge
    if config.reward.name != "memalpha" or judge.reader == "rules":
        return []
    name = judge.model or "any model"
    if judge.url:
        return [_ok("judge", f"{name}, asked at {judge.url}")]
    command = f"clusterkit serve judge --model-path {judge.model or 'MODEL'} --gpus N"
    message = f"{name} on GPUs beside these, started before the training ({command})"
    shape = shape_named(judge.model) if judge.model else None
    if shape is None:
        return [_ok("judge", message)]
    weights = 2 * shape.parameters
    message += f"; its weights are {_gib(weights)} of a GPU's {_gib(gpu_memory)}"
    if weights <= FULL_JUDGE * gpu_memory:
        return [_ok("judge", message)]
    return [_warn("judge", message, "give every server two GPUs: --tensor-parallel 2")]


def check_disk(config: RunConfig, shape: ModelShape | None, time: StepTime | None) -> list[Finding]:
    """Report the space for checkpoints."""
    if shape is None:
        return []
    saves = timing.saves(config, time.seconds if time else None)
    usage = disk_usage(config, shape, saves)
    parts = [
        f"recover checkpoints {_gib(usage.parts['recover'])} (two, and the next one while it is written)",
        f"{_count(saves, 'checkpoint')} {_gib(usage.parts['checkpoints'])}",
    ]
    if usage.parts["model"]:
        parts.insert(0, f"the model {_gib(usage.parts['model'])}")
    message = f"{_gib(usage.total)} on the storage: {', '.join(parts)}; trajectories come on top"
    usual = USUAL_STORAGE if config.n_nodes == 1 else USUAL_SHARED_STORAGE
    if usage.total <= usual:
        return [_ok("disk", message)]
    fix = "a larger checkpoint.save_freq_steps, or fewer train.total_steps"
    return [_warn("disk", f"{message}; AReaL's tutorial asks for {_gib(usual)}", fix)]


def check_saves(config: RunConfig, time: StepTime | None, whole: WholeRun | None) -> list[Finding]:
    """Report when the first persistent checkpoint is written."""
    step = timing.save_interval(config)
    if time is None:
        unknown = "" if whole else "; nobody has published a step's time"
        return [_ok("checkpoint", f"first persistent checkpoint after step {step}{unknown}")]
    away = timing.first_save_seconds(config, time.seconds)
    message = f"first persistent checkpoint after step {step}, in about {_hours(away)}"
    if config.checkpoint.save_freq_secs:
        message = f"first persistent checkpoint in about {_hours(away)}"
    if away <= LATE_CHECKPOINT_HOURS * 3600:
        return [_ok("checkpoint", message)]
    seldom = away > 4 * 3600 and not 0 < config.checkpoint.save_freq_secs <= 4 * 3600
    often = ("14400", "four hours") if seldom else ("3600", "hour")
    return [
        _warn(
            "checkpoint",
            f"{message}; until then there is only the recover checkpoint, which is overwritten",
            f"checkpoint.save_freq_secs={often[0]} writes one every {often[1]}",
        )
    ]


def check_hours(config: RunConfig, task: str, time: StepTime | None, whole: WholeRun | None) -> list[Finding]:
    """Report the hours of the whole run, and those until the model converged for others."""
    steps, evaluations = timing.total_steps(config), remote_plan(config).evaluation_steps
    beside = f", and held-out evaluations on top, {evaluations}" if evaluations else ""
    if time is None and whole is not None:
        took = f"{duration(whole.low_s)} to {duration(whole.high_s)}"
        told = f"nearly as the preset stands it took {took} from the command to the end ({whole.source})"
        return [_ok("hours", f"{steps} steps{beside}; {told}")]
    if time is None:
        return [_ok("hours", f"{steps} steps{beside}; nobody has published how long one takes")]
    all_steps = (
        f"{duration(time.seconds)} a step ({time.basis}); all {steps} steps {_hours(steps * time.seconds)}{beside}"
    )
    measured = timing.measured_for(config, task)
    if measured is None or measured.steps is None:
        return [_ok("hours", f"{all_steps}; nobody has published how many steps it takes to converge")]
    converged = f"about {measured.steps} steps to converge, {_hours(measured.steps * time.seconds)}"
    return [_ok("hours", f"{converged}; {all_steps}")]


def _training(config: RunConfig, shape: ModelShape, layout: Layout, gpu_memory: int, shared: bool) -> Finding:
    usage = training_usage(config, shape, layout)
    kept = RELEASED if shared else 0
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in usage.parts.items() if size)
    message = f"a training GPU needs {_gib(usage.total + kept)} of {_gib(gpu_memory)}: {parts}"
    if kept:
        message += f", the engine's rest {_gib(kept)}"
    if config.model.lora.rank and (sold := enough_memory(usage.total + kept)):
        message += f"; a GPU of {sold} GB is enough"
    if usage.total + kept <= (1 - ROOM) * gpu_memory:
        return _ok("memory", message)
    tight = usage.total + kept <= gpu_memory
    if tight:
        message += f"; an estimate should leave {ROOM:.0%} free"
    least, ways = longest_sequence(config), []
    if kind := LESS_MEMORY.get(config.model.gradient_checkpointing):
        ways.append(f"model.gradient_checkpointing={kind}")
    if config.train.logprob_chunk > SMALL_CHUNK:
        ways.append(f"train.logprob_chunk={SMALL_CHUNK}")
    if config.train.max_tokens_per_mb > least:
        ways.append(f"lower train.max_tokens_per_mb (to {least} at least)")
    ways += ["raise s of the training layout"] if layout.shard else ["train on more GPUs"]
    ways.append("raise t of the training layout")
    if not config.model.lora.rank:
        ways += _adapters(config, shape, layout, gpu_memory, kept)
    return Finding("", "memory", Level.WARN if tight else Level.FAIL, message, ", or ".join(ways))


def _adapters(config: RunConfig, shape: ModelShape, layout: Layout, gpu_memory: int, kept: int) -> list[str]:
    """Return adapters in place of all weights as a way to fit, where they do."""
    lora = config.model.lora.model_copy(update={"rank": USUAL_RANK})
    changed = config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
    needed = training_usage(changed, shape, layout).total + kept
    if needed > (1 - ROOM) * gpu_memory:
        return []
    return [f"train low-rank adapters, which need {_gib(needed)}: model.lora.rank={USUAL_RANK} (docs/lora.md)"]


def _rollout(config: RunConfig, shape: ModelShape, part: Part, gpu_memory: int) -> Finding:
    longest = longest_sequence(config)
    cache = cache_of(config, shape, part.layout, gpu_memory, longest)
    servers = part.layout.data
    fraction = f"{config.rollout.gpu_memory_fraction:g} of {_gib(gpu_memory)}"
    if part.layout.per_replica > 1:
        fraction += f" on {part.layout.per_replica} GPUs"
    more = "raise t of the rollout layout, or rollout.gpu_memory_fraction"
    if cache.space <= 0:
        message = f"a server's weights of {_gib(cache.weights)} do not fit into {fraction}"
        return _fail("memory", message, more)
    per_step = config.rollout.batch_size * config.rollout.group_size / servers
    message = (
        f"a server has {fraction}: weights {_gib(cache.weights)}, KV cache {_gib(cache.space)} for "
        f"{cache.sequences:.0f} sequences of {longest} tokens ({_count(servers, 'server')}, {per_step:.0f} sequences "
        "each per step)"
    )
    if cache.sequences < 1:
        return _fail("memory", f"{message}: not even one", more)
    if cache.sequences < min(FEW_SEQUENCES, per_step):
        return _warn("memory", f"{message}: so few keep a GPU idle", more)
    return _ok("memory", message)


def _colocated(config: RunConfig, shape: ModelShape, layout: Layout, gpu_memory: int) -> list[Finding]:
    waiting = waiting_usage(config, shape, layout)
    engine = int(config.rollout.gpu_memory_fraction * gpu_memory)
    total = waiting + engine
    if total <= (1 - ROOM) * gpu_memory:
        return []
    message = (
        f"while an engine has {_gib(engine)} of a GPU, weights and optimizer of the training need {_gib(waiting)} more"
    )
    level = Level.WARN if total <= gpu_memory else Level.FAIL
    if level is Level.WARN:
        message += f", which leaves less than {ROOM:.0%} of {_gib(gpu_memory)} free"
    return [Finding("", "memory", level, message, "train.offload=true, or a lower rollout.gpu_memory_fraction")]


def _host(config: RunConfig, shape: ModelShape, layout: Layout) -> list[Finding]:
    usage = host_usage(config, shape, layout)
    if not usage.total:
        return []
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in usage.parts.items() if size)
    return [_ok("memory", f"a host that trains keeps {_gib(usage.total)} in its own memory: {parts}")]


def _tensor(config: RunConfig, shape: ModelShape | None, part: Part) -> list[Finding]:
    tensor = part.layout.tensor
    name = part.backend or ("the rollout" if part.generates else "the training")
    if shape and (what := _undivided(shape, part)):
        message = f"t{tensor} of {name} does not divide the {what} of the model"
        return [_fail("gpus", message, "choose t that divides them")]
    if tensor > config.n_gpus_per_node:
        message = f"t{tensor} of {name} goes over the edge of a host with {config.n_gpus_per_node} GPUs, which is slow"
        return [_warn("gpus", message, "keep t within a host")]
    return []


def _undivided(shape: ModelShape, part: Part) -> str:
    """Return what t does not divide; servers may copy key/value heads to more GPUs."""
    tensor, heads = part.layout.tensor, shape.kv_heads
    if shape.heads % tensor:
        return f"{shape.heads} attention heads"
    if heads % tensor and not (part.generates and tensor % heads == 0):
        return f"{heads} key/value heads"
    if not part.generates and shape.intermediate % tensor:
        return f"{shape.intermediate} feed-forward columns"
    return ""


def _degrees(layout: Layout) -> str:
    pairs = {"d": layout.data, "t": layout.tensor, "p": layout.pipeline, "c": layout.context}
    text = " x ".join(f"{letter}{degree}" for letter, degree in pairs.items() if degree > 1 or letter == "d")
    return f"{text} in {layout.data // layout.shard} replicas" if layout.shard else text


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:.0f} hours" if hours >= 10 else duration(seconds)


def _gib(size: float) -> str:
    gib = size / GIB
    return f"{gib:.0f} GiB" if gib >= 99.95 else f"{round(gib, 1):g} GiB"


def _ok(check: str, message: str) -> Finding:
    return Finding("", check, Level.OK, message)


def _warn(check: str, message: str, fix: str) -> Finding:
    return Finding("", check, Level.WARN, message, fix)


def _fail(check: str, message: str, fix: str) -> Finding:
    return Finding("", check, Level.FAIL, message, fix)
