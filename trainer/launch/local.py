"""Starting the trainer on this machine: the run's folder and lock, what it goes on from, and the words it ends with."""

from __future__ import annotations

import errno
import logging
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch

from trainer.assets import resolve_model
from trainer.base_run import Attempt
from trainer.checkpoint.room import require_room
from trainer.checkpoint.start import Start
from trainer.config import RunConfig
from trainer.disk import disk_of
from trainer.engines.launching import check_options
from trainer.engines.options import check_model, check_window
from trainer.errors import CrashError, InterruptedRunError, RunError, UserError
from trainer.files import disk_error, is_full
from trainer.launch.rank_run import full_disk, set_threads
from trainer.launch.ranks import RankedRun
from trainer.launch.supervised import may_start_beside, supervised_model
from trainer.locks import HeldError, hold
from trainer.metrics import Monitor, make_sinks, open_log
from trainer.paths import RunPaths, cache_folder, new_attempt
from trainer.placement import Place, first_training_gpu, gpus_per_server, local_places
from trainer.rewards.make import make_reward
from trainer.runs import AnyRun, begin, is_complete, make_run
from trainer.serving import registry
from trainer.serving.host import server_options
from trainer.serving.keeper import LocalServers
from trainer.signals import StopFlag
from trainer.tasks.datafiles import data_digests
from trainer.train.adapterfiles import whole_model
from trainer.train.distributed import single_world
from trainer.train.gpu_footprint import out_of_memory
from trainer.train.loading import look_at
from trainer.train.model import compute_dtype
from trainer.train.tensorparallel import check_split, tensor_degree
from trainer.warmup.sft import Warmup, WarmupInterruptedError
from trainer.warmup.tiny import untrained_model
from trainer.weights.choose import prepare_nccl

if TYPE_CHECKING:
    from trainer.launch.ray import RayRun

log = logging.getLogger("trainer")
RESERVE_BYTES = 1 << 16
"""Held on the run's disk while it is at work and freed as it ends: on a disk that has filled up, why it failed can
still be recorded and told."""
REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EEXIST)
log.addHandler(logging.NullHandler())  # before main.log is open, messages go to the user only


def train(config: RunConfig, stop: StopFlag | None = None) -> None:
    """Run a configuration to its end. `stop` is the flag that signals set, where the caller has installed it already.

    Raises:
        UserError: with its subclasses for failed and interrupted runs; the message is meant for the user.
    """
    stop = stop or StopFlag().install()
    paths = RunPaths.of(config)
    with _open_run(paths, config), _in_plain_words(config):
        start = begin(config, paths)
        if is_complete(config, paths, start):
            message = f"{config.experiment_name}/{config.trial_name} is complete ({start.global_step} steps)"
            log.info(message)
            rollouts = "nothing is left to roll out. A larger eval.num_tasks goes on."
            training = "nothing is left to train. A larger train.total_steps trains on."
            print(f"{message}: {rollouts if config.trainer.type == 'null' else training}")
            return
        _attempt(config, paths, start, stop)


def _attempt(config: RunConfig, paths: RunPaths, start: Start, stop: StopFlag) -> None:
    """One attempt, with its last record."""
    number = int(os.environ.get("CLUSTERKIT_ATTEMPT") or new_attempt(paths.logs))
    set_threads(config)
    monitor = Monitor(paths.logs, number, make_sinks(config, paths.logs))
    reserve = paths.logs / ".reserve"
    with suppress(OSError):  # what is written next says so
        reserve.write_bytes(os.urandom(RESERVE_BYTES))  # of zeros a file system that compresses would hold nothing
    status, message, step, crashed = "failed", "", start.global_step, False
    command = os.environ.get("CLUSTERKIT_COMMAND", "")
    try:
        monitor.record("start", command=command)
        folder = _checked_model(config, monitor, stop)
        with LocalServers(config) if servers_here(config) else nullcontext() as servers:

            def learn(settings: RunConfig, at: Start) -> None:
                if servers and may_start_beside(config, settings, folder):
                    servers.start(folder)
                _ranks(settings, folder, monitor, number, stop, at).run()

            trained = supervised_model(config, folder, start, learn)
            if servers:
                servers.start(trained)
            run = _ranks(config, trained, monitor, number, stop, start)
            try:
                run.run()
            finally:
                step = run.global_step
        status = "completed"
    except InterruptedRunError as error:
        status, message = "interrupted", str(error)
        raise
    except BaseException as error:
        told = error if isinstance(error, UserError) else full_disk(error, config)
        explained = told is not None or disk_error(error) is not None
        message = str(told or f"{type(error).__name__}: {error}")
        crashed = isinstance(error, CrashError) or not (explained or isinstance(error, torch.OutOfMemoryError))
        raise
    finally:
        with suppress(OSError):
            reserve.unlink(missing_ok=True)
        with suppress(OSError):  # there is an error to be told already
            monitor.record("finish", status=status, global_step=step, message=message, crashed=crashed, command=command)
        monitor.close()


def _checked_model(config: RunConfig, monitor: Monitor, stop: StopFlag) -> Path:
    """See `model_folder`; what is wrong with the run or this machine shows first. Raises UserError."""
    if config.model.path:  # before its GPUs are asked for: what is wrong with a model shows without any
        check_run(config, model_folder(config, monitor, stop))
    elif config.reward.name == "memalpha" and config.trainer.type != "sft":
        make_reward(config)  # before minutes of warm-up: what is wrong with a judge shows now, too
    if not on_ray(config):
        require_gpus(config)
    folder = model_folder(config, monitor, stop)
    if not config.model.path:
        check_run(config, folder)
    return folder


def _ranks(
    config: RunConfig, folder: Path, monitor: Monitor, number: int, stop: StopFlag, start: Start
) -> AnyRun | RankedRun | RayRun:
    """What trains: this process, processes of this machine, or ones of a Ray cluster. number: of the attempt."""
    start = replace(start, data=data_digests(config))
    if on_ray(config):
        from trainer.launch.ray import RayRun  # noqa: PLC0415 (Ray is not installed where nothing needs it)

        return RayRun(config, folder, number, stop, start)
    if config.ranks > 1:
        return RankedRun(config, folder, number, stop, start)
    prepare_nccl(config)
    world = single_world(first_training_gpu(config), compute_dtype(config.model))
    return make_run(Attempt(config, folder, world, monitor, stop, start))


def require_gpus(config: RunConfig) -> None:
    """Raise UserError unless this process can use the GPUs that the run takes."""
    visible = torch.cuda.device_count() if config.gpus and torch.cuda.is_available() else 0
    if config.n_nodes > 1 and config.gpus:
        raise UserError(
            f"mode=local with n_nodes={config.n_nodes}: a run on several hosts needs mode=ray, or a cluster"
        )
    if config.gpus > visible:
        plural = "s" * (config.gpus != 1)
        raise UserError(
            f"this run takes {config.gpus} GPU{plural} (n_nodes x n_gpus_per_node), and PyTorch can use {visible} here"
            f"{_why_none() if not visible else ''}: check nvidia-smi, CUDA_VISIBLE_DEVICES and that PyTorch is a CUDA "
            "build for this driver"
        )


def _why_none() -> str:
    """What PyTorch says for itself when it can use no GPU: no driver, one that is too old, a build without CUDA."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f" ({str(error).strip().splitlines()[0].rstrip('.')})"
    return ""


def on_ray(config: RunConfig) -> bool:
    """Whether ranks are placed by Ray: a single one without GPUs stays where the run was started."""
    return config.mode == "ray" and (config.ranks > 1 or config.gpus > 0)


def servers_here(config: RunConfig) -> bool:
    """Whether this process starts the run's engine servers: not where it has none, or Ray places them."""
    return config.engine != "embedded" and not on_ray(config)


def model_folder(config: RunConfig, monitor: Monitor, stop: StopFlag) -> Path:
    """The checkpoint to start from: the one that is named, or the warmed-up tiny model, untrained for examples."""
    if config.model.path:
        folder = resolve_model(config.model.path, config.cache_dir)
        return whole_model(folder, config.cache_dir, run=f"{config.experiment_name}/{config.trial_name}")
    if config.trainer.type == "sft":
        return untrained_model(config)

    def report(record: dict[str, object]) -> None:
        monitor.record("warmup", **record)

    try:
        begun = partial(require_room, config)
        return Warmup(config, cache_folder(config) / "warmup", report, stop, begun).result()
    except WarmupInterruptedError as error:
        raise InterruptedRunError(
            "interrupted during the warm-up: its state is written; the same command goes on from there"
        ) from error


@contextmanager
def _open_run(paths: RunPaths, config: RunConfig) -> Iterator[BinaryIO]:
    """Make the run's folders, lock the run and open its log.

    Raises:
        UserError: it is running already, or its folders cannot be written. RunError: the disk is full.
    """
    try:
        for folder in (paths.logs, paths.checkpoints, paths.recover):
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise UserError(f"cannot write to {folder}: change its permissions, or choose another fileroot=FOLDER")
        with (paths.logs / "run.lock").open("a+b") as lock:
            _take(lock, config)
            open_log(paths.logs / "main.log")
            yield lock
    except OSError as error:
        where = error.filename or paths.logs
        if is_full(error):
            room = disk_of(Path(where))
            raise RunError(f"no space left at {where}: free some, or choose another fileroot=FOLDER. {room}") from error
        reason = error.strerror or error
        raise UserError(f"cannot write the run directory: {where}: {reason}. Choose another fileroot=FOLDER") from error


def _take(lock: BinaryIO, config: RunConfig) -> None:
    try:
        hold(lock)
    except HeldError as error:
        raise UserError(
            f"{config.experiment_name}/{config.trial_name} is already running (process {error.holder or '?'}): "
            "`clusterkit status` shows it; trial_name=NEW starts another one"
        ) from None


@contextmanager
def _in_plain_words(config: RunConfig) -> Iterator[None]:
    """Log how the run ends, and turn what a disk answers into a message for the user."""
    try:
        yield
    except InterruptedRunError as error:
        log.info(str(error))
        raise
    except UserError as error:
        log.error(str(error))
        raise
    except torch.OutOfMemoryError as error:
        failure = out_of_memory(error)
        log.error("%s\n%s", failure, traceback.format_exc())
        raise failure from error
    except Exception as error:
        log.error("%s: %s\n%s", type(error).__name__, error, traceback.format_exc())
        if (full := full_disk(error, config)) is not None:
            raise full from error
        system = disk_error(error)
        if system is not None and system.filename and system.errno in REFUSALS:
            raise UserError(
                f"cannot write {system.filename}: {system.strerror}. Change that, or choose another fileroot=FOLDER"
            ) from error
        raise


def check_run(config: RunConfig, model: Path) -> None:
    """See that a model folder can be trained and served as the run wants it; files are read, no weights.

    Raises:
        RunError: not one recover checkpoint fits on the disk.
        UserError: it is of another architecture, lacks weights or has ones of another shape, its heads cannot be shared
            out over the GPUs, or a server of the kind is not installed here, where it is to run here.
    """
    if config.trainer.type != "null":
        lm, _ = look_at(model)
        require_room(config, lm)
        check_split(lm.config, tensor_degree(config))
    if config.engine == "embedded":
        return
    logs = registry.folder_of(RunPaths.of(config).logs)
    here = config.mode != "ray"
    # On a cluster the nodes have GPUs and programs of their own; the model is the same.
    places = local_places(config) if here else [Place("a server", tuple(range(gpus_per_server(config))))]
    for place in places:
        options = server_options(config, model, logs / f"{place.name}.log", place.name, place.gpus, "127.0.0.1")
        if here:
            check_options(config.engine, options)
        else:
            check_model(options)
            check_window(config.engine, options)
