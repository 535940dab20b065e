"""Whether a configuration can run: with this version, and on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from contextlib import suppress

from clusterkit.backends.local.interpreter import gpu_python, gpus_present, missing_packages
from clusterkit.backends.local.launch import require_trainer
from clusterkit.backends.own_code import require_own
from clusterkit.capacity.shapes import shape_of
from clusterkit.common.text_plot import gpus
from clusterkit.config.presets import size_names
from clusterkit.runs.trials import Trial, TrialState, require_free
from trainer.adapter_folder import is_adapter_folder
from trainer.assets import adapter_base, resolve_model
from trainer.config import RunConfig
from trainer.config_tasks import HotpotqaConfig, MathConfig, MemalphaConfig, SftConfig
from trainer.errors import UserError
from trainer.hf_folder import linear_layers
from trainer.sft.start import require_examples
from trainer.tasks.examples import examples_file
from trainer.tasks.hotpotqa import HotpotQA
from trainer.tasks.hotpotqa_published import published_file
from trainer.tasks.memalpha import find_files
from trainer.tasks.size import count_rows


def require_runnable(config: RunConfig) -> None:
    """Raise UserError if the trainer lacks a part that a configuration asks for, or a user's class is unusable."""
    if missing := missing_parts(config):
        preset = config.preset or "PRESET"
        raise UserError(
            f"preset {preset} cannot be trained by this version: it asks for {'; '.join(missing)}. Change "
            f"allocation_mode; clusterkit presets plan {preset} shows what it asks for"
        )
    if config.trainer.type == "sft":
        examples_file(config.examples)
    require_own(config)


def require_local_gpus(config: RunConfig) -> None:
    """Raise UserError if this machine has too few GPUs for a run."""
    if not config.gpus:
        return
    name = config.preset or "PRESET"
    cluster = "make a cluster with clusterkit setup --hostnames H1 H2 …, and clusterkit train goes there"
    if config.n_nodes > 1:
        fewer = f"see how it would fit on one host with clusterkit presets plan {name} --nodes 1"
        raise UserError(f"n_nodes={config.n_nodes}: this run takes {config.n_nodes} hosts: {cluster}, or {fewer}")
    present = gpus_present()
    if config.gpus > present:
        usable = f"{present} {'is' if present == 1 else 'are'}" if present else "none is"
        plan = f"see how it would fit with clusterkit presets plan {name} --gpus-per-node {present}"
        small = f"train it in miniature with --preset {name}_cpu" if f"{name}_cpu" in size_names() else ""
        less = plan if present else small or "see what this machine can run with clusterkit doctor"
        raise UserError(
            f"this run takes {gpus(config.gpus)}, and {usable} usable here (nvidia-smi shows them): {cluster}, "
            f"or {less}"
        )


def require_inputs(config: RunConfig, *, started: bool = False) -> None:
    """Raise UserError, as the trainer would, if the model or the data of a run is not on this machine.

    Args:
        started: its supervised start is done, and needs no examples.
    """
    if config.model.path:
        resolve_model(config.model.path, config.cache_dir)
    if not started:
        require_examples(config)  # before the task's data: its message says how both are made
    task = config.task
    if isinstance(task, MathConfig | SftConfig):
        count_rows(task)
    elif isinstance(task, HotpotqaConfig):
        published = published_file(task.path)
        if published and "gold" in config.eval.final_methods:
            raise UserError(
                f"eval.final_methods has gold, and {published} does not say which documents answer a question: leave "
                "gold out"
            )
        if not published:
            source = HotpotQA(task, config.seed, config.cache_dir)  # refuses more documents than there are
            if config.eval.split != "train":
                for size in config.eval.final_documents:
                    source.heldout(config.eval.split, 0, size)
    elif isinstance(task, MemalphaConfig):
        find_files(task.path, config.cache_dir)


def require_adapted_layers(config: RunConfig) -> None:
    """Raise UserError if adapters are for layers that the model lacks, as far as this machine can tell."""
    if config.model.lora.rank and (known := _linear_layers(config)):
        config.model.lora.chosen(known)


def _linear_layers(config: RunConfig) -> Collection[str]:
    """Names of a decoder layer's linear layers: from the weights that are here, or the model's shape; empty: unknown.

    A folder that cannot be read is no matter of adapters, and is named when the run's inputs are looked at.
    """
    if config.model.path:
        with suppress(OSError, ValueError, UserError):
            folder = resolve_model(config.model.path, config.cache_dir)
            return linear_layers(adapter_base(folder, config.cache_dir) if is_adapter_folder(folder) else folder)
    shape = shape_of(config)
    return shape.linear if shape else ()


def require_engine(config: RunConfig, python: str) -> None:
    """Raise UserError if SGLang is not there for a run's servers on this machine.

    Args:
        python: the interpreter of its trainer, which the servers share where nothing else is said.
    """
    if not config.gpus or config.engine != "sglang":
        return
    if config.serving.python or os.environ.get("CLUSTERKIT_SGLANG_PYTHON"):
        return
    if missing_packages(python, ["sglang"]):
        raise UserError(
            f"SGLang is not installed in {python}: make gpu, in a clone of this repository, installs it with CUDA's "
            "PyTorch, and this command then finds it"
        )


def refusal(config: RunConfig, trial: Trial | None) -> UserError | None:
    """Return the error that would prevent a run from starting, or None.

    A complete run is not trained again, so it needs no data.

    Args:
        trial: its trial; None for a run on other machines.
    """
    try:
        require_runnable(config)
        require_adapted_layers(config)
        if trial is None:
            return None
        require_local_gpus(config)
        require_free(trial.run)
        if trial.state is not TrialState.COMPLETE:
            python = gpu_python() if config.gpus else sys.executable
            require_trainer(python)
            require_engine(config, python)  # before the model: `make gpu` brings both
            require_inputs(config, started=trial.run.has_supervised_checkpoint)
    except UserError as error:
        return error
    return None


def missing_parts(config: RunConfig) -> list[str]:
    """Return the parts that a configuration asks for and the trainer lacks."""
    missing = []
    allocation = config.allocation
    if allocation is not None and allocation.training is not None and allocation.training.layout.context > 1:
        missing.append(
            "context parallel training (c): a long conversation fits into one GPU with "
            "model.gradient_checkpointing=chunked, or offloaded; give the GPUs of c to data parallel (d)"
        )
    if allocation is not None and allocation.rollout is not None and allocation.rollout.layout.pipeline > 1:
        missing.append("pipeline parallel servers (p): use tensor parallel (t)")
    return missing
