"""Translate settings of AReaL, verl and vime into ours.

A setting with a counterpart is translated, and one that always holds here is ignored, both with a note. One without a
counterpart that matters is refused, with what to type instead. docs/coming-from-areal.md shows examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from trainer.errors import UserError


@dataclass(frozen=True)
class Renamed:
    """A key that is one or more of ours."""

    keys: tuple[str, ...]  # our keys
    values: Mapping[str, str] = field(default_factory=dict)
    """Our values by theirs in lower case; other values stay as typed."""
    convert: Callable[[str], tuple[str, ...]] | None = None  # returns the text for each of `keys`
    beside: Mapping[str, str] = field(default_factory=dict)
    """Settings without which it has no effect, unless they are typed."""


@dataclass(frozen=True)
class Unneeded:
    """A key that is ignored. `values`: those that always hold here, in lower case; empty: any."""

    because: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Switch:
    """A key that is true or false. on: our settings of true, unless they are typed. off: those of false."""

    on: Mapping[str, str]
    off: Mapping[str, str]


@dataclass(frozen=True)
class RefusedSetting:
    """A key that cannot be translated. `instead`: what to do."""

    instead: str


Alias = Renamed | Unneeded | Switch | RefusedSetting


@dataclass(frozen=True)
class Translation:
    """One KEY=VALUE in our settings, what to set beside them, and a note if it was translated."""

    settings: Mapping[str, str]
    beside: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


def translate(key: str, text: str) -> Translation:
    """Translate KEY=VALUE as typed; a key of ours is returned unchanged.

    Raises:
        UserError: the key or its value has no counterpart.
    """
    old = key.lstrip("+") if key.startswith("+") else key  # Hydra's prefix of a key that its schema lacks
    alias = ALIASES.get(old)
    if alias is None:
        return Translation({key: text})
    if isinstance(alias, RefusedSetting):
        raise UserError(f"{key}: {alias.instead}")
    if isinstance(alias, Unneeded):
        if alias.values and text.lower() not in alias.values:
            raise UserError(f"{key}={text}: only {' or '.join(alias.values)} is possible here: {alias.because}")
        return Translation({}, note=f"{key}={text} is not needed here: {alias.because}")
    if isinstance(alias, Switch):
        if text.lower() not in ("true", "false"):
            raise UserError(f"{key}={text}: it is true or false")
        ours = alias.on if text.lower() == "true" else alias.off
        note = f"{key}={text} is {_words(ours)} here"
        return Translation({}, alias.on, note) if ours is alias.on else Translation(alias.off, note=note)
    value = alias.values.get(text.lower(), text)
    texts = alias.convert(value) if alias.convert else (value,) * len(alias.keys)
    settings = {name: part for name, part in zip(alias.keys, texts, strict=True) if part}
    if settings == {key: text}:
        return Translation(settings)
    return Translation(settings, alias.beside, f"{key}={text} is {_words(settings | dict(alias.beside))} here")


def _words(settings: Mapping[str, str]) -> str:
    return " ".join(f"{name}={part}" for name, part in settings.items())


def translation_notes(arguments: Iterable[str]) -> tuple[str, ...]:
    """Return a line for every argument that is translated or ignored; none for those that are refused."""
    notes = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        with suppress(UserError):
            notes.append(translate(key, text).note if equals else "")
    return tuple(note for note in notes if note)


def describe(key: str) -> str:
    """Return a sentence about a key of AReaL, verl or vime; empty for any other key."""
    match ALIASES.get(key):
        case Renamed(keys):
            return f"{key} is {' and '.join(keys)} here"
        case Switch(on):
            return f"{key} is {' and '.join(on)} here"
        case Unneeded(because):
            return f"{key} is not needed here: {because}"
        case RefusedSetting(instead):
            return f"{key}: {instead}"
    return ""


def _file_or_folder(text: str) -> tuple[str, str]:
    """Split a data set's path into folder and file; the file of a folder or a repository is empty."""
    folder, _, name = text.rpartition("/")
    return (folder or ".", name) if name.endswith((".jsonl", ".json")) else (text, "")


def _as_name(text: str) -> tuple[str]:
    """Make the name of a folder from verl's name, which may have slashes."""
    return (text.replace("/", "-"),)


def _recover_mode(text: str) -> tuple[str]:
    """Translate recover.mode; a fresh start must be typed with our key, which resume commands are checked for."""
    if text.lower() not in ("on", "auto"):
        raise UserError(f"recover.mode={text}: type recover_mode=disabled to start afresh, or recover_mode=resume")
    return ("auto",)


_NEVER = {"null": "0", "none": "0", "-1": "0"}
"""Values of others that turn intervals off."""
_DATA_SET = Renamed(("task.path", "task.dataset"), convert=_file_or_folder)
_OVERLONG = Unneeded("algorithm.overlong_tokens above 0 turns it on, 0 off", ("true",))
_MICRO_BATCH = Renamed(("train.max_tokens_per_mb",))
_CHECKPOINTING = {"true": "full", "false": "none"}
_EPOCHS = Renamed(("train.total_epochs",), beside={"train.total_steps": "0"})
_HELD_OUT = RefusedSetting(
    "leave it out: held-out tasks come from the data of task.path. task.eval_fraction=0.1 holds a tenth of them out, "
    "eval.split=dev or test chooses a part"
)
_OWN_FILES = RefusedSetting(
    "vime's JSON lines are not read: MemAgent's Parquet files are, task.path=FILE.parquet; or clusterkit assets get "
    "hotpotqa, then task.path=FOLDER"
)
_GREEDY = Unneeded("the held-out evaluation is greedy, and once at temperature 1 at the end")
_IN_ALLOCATION = "write it into allocation_mode, such as sglang:d4t2|fsdp:d8; clusterkit presets plan checks it"
_ONE_LIMIT = Unneeded("train.max_tokens_per_mb bounds every pass over the tokens")
_FROM_AGENT = Unneeded(
    "the lengths are agent.chunk_tokens, agent.max_question_tokens, agent.max_memory_tokens and agent.max_final_tokens"
)
_NO_CRITIC = RefusedSetting("no critic is trained here: leave it out")
_JUDGE = RefusedSetting(
    "judges are registered for the run's own experiment and trial: clusterkit serve judge EXPERIMENT/TRIAL; "
    "a server of your own is named by judge.url"
)

_EXPERIMENT: dict[str, Alias] = {  # AReaL of all versions: the run, its hosts, when it is saved and brought back
    "mode": Renamed(("mode",), {"torchrun": "local"}),
    "cluster.n_nodes": Renamed(("n_nodes",)),
    "cluster.n_gpus_per_node": Renamed(("n_gpus_per_node",)),
    "cluster.fileroot": Renamed(("fileroot",)),
    "external_configs.cluster_config.fileroot": Renamed(("fileroot",)),
    "external_configs.cluster_config": RefusedSetting(
        "set fileroot=FOLDER; hosts are named with clusterkit init or setup"
    ),
    "trainer.type": Renamed(("trainer.type",), {"ppo": "grpo"}),
    "model.gradient_checkpointing": Renamed(("model.gradient_checkpointing",), _CHECKPOINTING),
    "trainer.ppo.async_training": Renamed(("rollout.max_staleness",), {"true": "1", "false": "0"}),
    "trainer.sft.model.path": Renamed(("model.path",)),
    "shutdown_server_on_exit": Renamed(("servers.shutdown_on_exit",)),
    "min_required_servers": Renamed(("servers.min_required",)),
    "exp_ctrl.total_train_epochs": _EPOCHS,
    "total_train_epochs": _EPOCHS,
    "exp_ctrl.save_freq_epochs": Renamed(("checkpoint.save_freq_epochs",), _NEVER),
    "exp_ctrl.save_freq_steps": Renamed(("checkpoint.save_freq_steps",), _NEVER),
    "exp_ctrl.save_freq_secs": Renamed(("checkpoint.save_freq_secs",), _NEVER),
    "exp_ctrl.ckpt_freq_epochs": Unneeded("checkpoint.ckpt_freq_steps and checkpoint.ckpt_freq_secs decide", ("null",)),
    "exp_ctrl.ckpt_freq_steps": Renamed(("checkpoint.ckpt_freq_steps",), _NEVER),
    "exp_ctrl.ckpt_freq_secs": Renamed(("checkpoint.ckpt_freq_secs",)),
    "saver.freq_epochs": Renamed(("checkpoint.save_freq_epochs",), _NEVER),
    "saver.freq_steps": Renamed(("checkpoint.save_freq_steps",), _NEVER),
    "saver.freq_secs": Renamed(("checkpoint.save_freq_secs",), _NEVER),
    "recover.mode": Renamed(("recover_mode",), convert=_recover_mode),
    "recover.retries": Renamed(("recover_retries",)),
    "recover.freq_steps": Renamed(("checkpoint.ckpt_freq_steps",), _NEVER),
    "recover.freq_secs": Renamed(("checkpoint.ckpt_freq_secs",)),
    "evaluator.freq_steps": Renamed(("eval.every_steps",), _NEVER),
    "wandb.mode": Renamed(("monitor.wandb",)),
    "stats_logger.wandb.mode": Renamed(("monitor.wandb",)),
}
_LEARNING: dict[str, Alias] = {  # AReaL of all versions: model, data, sampling, loss
    "actor.path": Renamed(("model.path",)),
    "ref.path": Renamed(("model.path",)),
    "actor.use_lora": Switch({"model.lora.rank": "32", "model.lora.alpha": "16"}, {"model.lora.rank": "0"}),
    "actor.lora_rank": Renamed(("model.lora.rank",), beside={"model.lora.alpha": "16"}),
    "actor.lora_alpha": Renamed(("model.lora.alpha",)),
    "actor.target_modules": Renamed(("model.lora.targets",), {"[]": "all-linear"}),
    "critic.path": _NO_CRITIC,
    "dataset.path": _DATA_SET,
    "train_dataset.path": _DATA_SET,
    "valid_dataset.path": _HELD_OUT,
    "dataset.train_bs_n_seqs": Renamed(("rollout.batch_size",)),
    "train_dataset.batch_size": Renamed(("rollout.batch_size",)),
    "dataset.max_prompt_len": Renamed(("agent.max_question_tokens",)),
    "group_size": Renamed(("rollout.group_size",)),
    "gconfig.n_samples": Renamed(("rollout.group_size",)),
    "ppo.gen.max_new_tokens": Renamed(("agent.max_final_tokens",)),
    "gconfig.max_new_tokens": Renamed(("agent.max_final_tokens",)),
    "ppo.gen.min_new_tokens": Unneeded("a response ends where the model ends it", ("0",)),
    "ppo.gen.temperature": Renamed(("rollout.temperature",)),
    "gconfig.temperature": Renamed(("rollout.temperature",)),
    "gconfig.agent.adv_estimator": Renamed(("algorithm.turn_advantage",)),
    "gconfig.agent.beta": Renamed(("reward.beta",)),
    "gconfig.agent.gamma": Renamed(("reward.gamma",)),
    "gconfig.agent.adv_lambda": Renamed(("algorithm.gigpo_weight",)),
    "gconfig.agent.gigpo_gamma": Renamed(("algorithm.gigpo_discount",)),
    "ppo.ppo_n_minibatches": Renamed(("train.minibatches",)),
    "actor.ppo_n_minibatches": Renamed(("train.minibatches",)),
    "ppo.kl_ctl": Renamed(("algorithm.kl_coef",)),
    "actor.kl_ctl": Renamed(("algorithm.kl_coef",)),
    "ppo.eps_clip": Renamed(("algorithm.clip_low", "algorithm.clip_high")),
    "actor.eps_clip": Renamed(("algorithm.clip_low", "algorithm.clip_high")),
    "actor.c_clip": Renamed(("algorithm.dual_clip",), {"null": "0"}),
    "actor.overlong_reward_penalty": _OVERLONG,
    "actor.overlong_tokens": Renamed(("algorithm.overlong_tokens",)),
    "actor.overlong_penalty_factor": Renamed(("algorithm.overlong_penalty",)),
    "actor_train.mb_spec.max_tokens_per_mb": _MICRO_BATCH,
    "ref_inf.mb_spec.max_tokens_per_mb": _MICRO_BATCH,
    "actor.mb_spec.max_tokens_per_mb": _MICRO_BATCH,
    "actor.optimizer.lr": Renamed(("train.learning_rate",)),
    "actor.sglang.mem_fraction_static": Renamed(("rollout.gpu_memory_fraction",)),
    "sglang.mem_fraction_static": Renamed(("rollout.gpu_memory_fraction",)),
    "actor.vllm.max_num_seqs": Renamed(("rollout.max_running",)),
    "actor.vllm.swap_space": RefusedSetting("no engine here swaps its KV cache to the CPU: lower rollout.max_running"),
    "rollout.backend": RefusedSetting("one value: allocation_mode='rollout.backend=sglang:d4 actor.backend=fsdp:d4'"),
    "actor.backend": RefusedSetting("one value: allocation_mode='rollout.backend=sglang:d4 actor.backend=fsdp:d4'"),
    "external_engine.experiment_name": _JUDGE,
}
_VIME: dict[str, Alias] = {  # variables of vime's scripts, typed behind the command instead of before it
    "NUM_ROLLOUT": Renamed(("train.total_steps",)),
    "ROLLOUT_BATCH_SIZE": Renamed(("rollout.batch_size",)),
    "N_SAMPLES_PER_PROMPT": Renamed(("rollout.group_size",)),
    "SAVE_INTERVAL": Renamed(("checkpoint.save_freq_steps",)),
    "MEM_CHUNK_TOKENS": Renamed(("agent.chunk_tokens",)),
    "MEM_MAX_MEMORY": Renamed(("agent.max_memory_tokens",)),
    "MEM_MAX_FINAL": Renamed(("agent.max_final_tokens",)),
    "MEM_MAX_CHUNKS": Renamed(("agent.max_chunks",)),
    "HF_CKPT": Renamed(("model.path",)),
    "TORCH_DIST": Unneeded("the checkpoint is read as the Hugging Face hub has it"),
    "TRAIN_DATA": _OWN_FILES,
    "SAVE_PATH": Renamed(("fileroot",)),
}
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_VERL: dict[str, Alias] = {  # verl's configuration, as MemAgent's scripts use it
    "recurrent.enable": Renamed(("agent.name",), {"memory": "memagent"}),
    "recurrent.memory.config.chunk_size": Renamed(("agent.chunk_tokens",)),
    "recurrent.memory.config.max_chunks": Renamed(("agent.max_chunks",)),
    "recurrent.memory.config.max_prompt_length": Renamed(("agent.max_question_tokens",)),
    "recurrent.memory.config.max_memorization_length": Renamed(("agent.max_memory_tokens",)),
    "recurrent.memory.config.max_final_response_length": Renamed(("agent.max_final_tokens",)),
    "algorithm.adv_estimator": Renamed(("algorithm.name",)),
    "algorithm.grpo_use_adv": Renamed(("algorithm.advantage",), {"false": "mean", "true": "mean_std"}),
    "algorithm.filter_groups.enable": Renamed(("rollout.refill",)),
    "algorithm.kl_ctrl.kl_coef": Unneeded("the KL is a part of the loss, algorithm.kl_coef, not of the reward"),
    "data.train_files": Renamed(("task.path",)),
    "data.val_files": _HELD_OUT,
    "data.shuffle": Unneeded("the order of the tasks follows from seed"),
    "data.filter_overlong_prompts": Unneeded(
        "a longer question than agent.max_question_tokens is never cut", ("true",)
    ),
    "data.train_batch_size": Renamed(("rollout.batch_size",)),
    "data.truncation": Renamed(("agent.overflow",)),
    "data.context_key": Unneeded("every task knows its own files"),
    "data.max_prompt_length": _FROM_AGENT,
    "data.max_response_length": _FROM_AGENT,
    "reward_model.overlong_buffer.enable": _OVERLONG,
    "reward_model.overlong_buffer.len": Renamed(("algorithm.overlong_tokens",)),
    "reward_model.overlong_buffer.penalty_factor": Renamed(("algorithm.overlong_penalty",)),
    "reward_model.reward_manager": Unneeded("an answer is scored in the process that sampled it"),
    "actor_rollout_ref.model.path": Renamed(("model.path",)),
    "actor_rollout_ref.model.lora_rank": Renamed(("model.lora.rank",), beside={"model.lora.alpha": "16"}),
    "actor_rollout_ref.model.lora_alpha": Renamed(("model.lora.alpha",)),
    "actor_rollout_ref.model.target_modules": Renamed(("model.lora.targets",)),
    "actor_rollout_ref.model.use_remove_padding": Unneeded("rows are packed without padding", ("true",)),
    "actor_rollout_ref.model.enable_gradient_checkpointing": Renamed(("model.gradient_checkpointing",), _CHECKPOINTING),
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": _ONE_LIMIT,
    "actor_rollout_ref.ref.fsdp_config.param_offload": Unneeded("train.offload says it for all weights"),
    f"{_ACTOR}.optim.lr": Renamed(("train.learning_rate",)),
    f"{_ACTOR}.optim.lr_warmup_steps": Renamed(("train.warmup_steps",)),
    f"{_ACTOR}.clip_ratio_low": Renamed(("algorithm.clip_low",)),
    f"{_ACTOR}.clip_ratio_high": Renamed(("algorithm.clip_high",)),
    f"{_ACTOR}.clip_ratio_c": Renamed(("algorithm.dual_clip",)),
    f"{_ACTOR}.entropy_coeff": Unneeded("the loss has no entropy term", ("0", "0.0", "0.00", "0.000")),
    f"{_ACTOR}.ppo_mini_batch_size": RefusedSetting(
        "set train.minibatches, the number of optimizer steps: data.train_batch_size divided by ppo_mini_batch_size"
    ),
    f"{_ACTOR}.use_dynamic_bsz": Unneeded("micro-batches are filled up to train.max_tokens_per_mb", ("true",)),
    f"{_ACTOR}.ppo_max_token_len_per_gpu": _MICRO_BATCH,
    f"{_ACTOR}.ulysses_sequence_parallel_size": Unneeded("a row is not split over ranks", ("1",)),
    f"{_ACTOR}.use_kl_loss": Unneeded("algorithm.kl_coef above 0 turns it on, 0 off", ("true",)),
    f"{_ACTOR}.kl_loss_coef": Renamed(("algorithm.kl_coef",)),
    f"{_ACTOR}.kl_loss_type": Unneeded("it is this one", ("low_var_kl", "k3")),
    f"{_ACTOR}.fsdp_config.param_offload": Renamed(("train.offload",)),
    f"{_ACTOR}.fsdp_config.optimizer_offload": Renamed(("train.offload",)),
    f"{_ACTOR}.fsdp_config.fsdp_size": Unneeded("the weights are sharded over all training ranks"),
    f"{_ROLLOUT}.n": Renamed(("rollout.group_size",)),
    f"{_ROLLOUT}.name": RefusedSetting(_IN_ALLOCATION),
    f"{_ROLLOUT}.tensor_model_parallel_size": RefusedSetting(f"the t of the engine: {_IN_ALLOCATION}"),
    f"{_ROLLOUT}.temperature": Renamed(("rollout.temperature",)),
    f"{_ROLLOUT}.top_p": Renamed(("rollout.top_p",)),
    f"{_ROLLOUT}.gpu_memory_utilization": Renamed(("rollout.gpu_memory_fraction",)),
    f"{_ROLLOUT}.max_num_batched_tokens": Renamed(("rollout.max_batch_tokens",)),
    f"{_ROLLOUT}.dtype": Renamed(("model.dtype",)),
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": _ONE_LIMIT,
    f"{_ROLLOUT}.enforce_eager": Unneeded("it is for vLLM's own engine"),
    f"{_ROLLOUT}.free_cache_engine": Unneeded("it is for vLLM's own engine"),
    f"{_ROLLOUT}.val_kwargs.n": _GREEDY,
    f"{_ROLLOUT}.val_kwargs.do_sample": _GREEDY,
    f"{_ROLLOUT}.val_kwargs.temperature": _GREEDY,
    f"{_ROLLOUT}.val_kwargs.top_p": _GREEDY,
    "trainer.critic_warmup": Unneeded("no critic is trained", ("0",)),
    "trainer.default_hdfs_dir": Unneeded("runs lie under fileroot", ("null",)),
    "trainer.default_local_dir": Renamed(("fileroot",)),
    "trainer.experiment_name": Renamed(("experiment_name",), convert=_as_name),
    "trainer.logger": Unneeded(
        "numbers go to main.log, metrics.jsonl and TensorBoard; to Weights & Biases with monitor.wandb=online"
    ),
    "trainer.n_gpus_per_node": Renamed(("n_gpus_per_node",)),
    "trainer.nnodes": Renamed(("n_nodes",)),
    "trainer.project_name": Renamed(("monitor.wandb_project",)),
    "trainer.save_freq": Renamed(("checkpoint.save_freq_steps",), _NEVER),
    "trainer.test_freq": Renamed(("eval.every_steps",), _NEVER),
    "trainer.total_epochs": _EPOCHS,
    "trainer.total_training_steps": Renamed(("train.total_steps",)),
    "trainer.val_before_train": Unneeded("the model is scored before the first step and after the last one", ("true",)),
}

ALIASES: dict[str, Alias] = {**_EXPERIMENT, **_LEARNING, **_VIME, **_VERL}
"""All keys that are understood."""
