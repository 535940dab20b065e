"""What a rank does from its job to its end: it joins the others and trains."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import traceback
from pathlib import Path

import torch

from trainer.base_run import Attempt
from trainer.config import RunConfig
from trainer.disk import disk_of
from trainer.errors import CrashError, InterruptedRunError, RunError, UserError
from trainer.files import disk_error, is_full
from trainer.launch.rank_job import RankJob
from trainer.metrics import Monitor, make_sinks, open_log
from trainer.paths import RunPaths, cache_folder
from trainer.placement import first_training_gpu
from trainer.runs import AnyRun, make_run
from trainer.signals import StopFlag
from trainer.train.distributed import World, join_world, leave_world
from trainer.train.gpu_footprint import out_of_memory
from trainer.train.model import compute_dtype
from trainer.train.tensorparallel import shard_ranks, tensor_degree
from trainer.weights.choose import prepare_nccl


def set_threads(config: RunConfig) -> None:
    """Fix the number of CPU threads: results are bit-identical only for the same number."""
    torch.set_num_threads(config.train.threads or max(1, (os.cpu_count() or 1) // config.ranks))
    # On a GPU the deterministic kernels (attention backwards, indexing) would cost a good part of the time.
    torch.use_deterministic_algorithms(not torch.cuda.is_available(), warn_only=True)


def full_disk(error: BaseException, config: RunConfig) -> RunError | None:
    """The error to tell where a full disk is behind an exception; None where another cause is."""
    system = disk_error(error)
    if system is None or not is_full(system):
        return None
    places = [Path(system.filename)] if system.filename else [Path(config.fileroot).absolute(), cache_folder(config)]
    disks = ". ".join(dict.fromkeys(map(disk_of, places)))
    return RunError(
        f"no space left at {' or '.join(map(str, places))}: free some space there, then start the same command again "
        f"to go on. {disks}"
    )


def rank_main(rank: int, job: RankJob, stop: StopFlag) -> None:
    """Be rank `rank` to the end of the attempt; the process ends in here."""
    config, meeting = job.config, job.meeting
    # A crash outside of Python (an abort in a library, a segmentation fault) leaves where every thread was.
    faulthandler.enable((meeting / f"fatal-{rank}").open("w", encoding="utf-8"))
    logs = RunPaths.of(config).logs
    set_threads(config)
    main = rank == 0
    if main:
        open_log(logs / "main.log")
    monitor = Monitor(logs if main else None, job.attempt, make_sinks(config, logs) if main else [])
    world: World | None = None
    run: AnyRun | None = None
    code, message, full, crashed = 0, "", "", False
    try:
        gpu = rank + first_training_gpu(config) if job.gpu is None else job.gpu
        prepare_nccl(config)
        dtype, tensor = compute_dtype(config.model), tensor_degree(config)
        world = join_world(rank, config.ranks, job.rendezvous, gpu, dtype, tensor, shard_ranks(config))
        run = make_run(Attempt(config, job.model_folder, world, monitor, stop, job.start))
        run.run()
    except UserError as error:
        code, message, crashed = error.exit_code, str(error), isinstance(error, CrashError)
        if not main and not isinstance(error, InterruptedRunError):
            # Rank 0 reports what all ranks see; what only this one sees (its GPU's memory) it cannot know.
            (meeting / f"fault-{rank}").write_text(message, encoding="utf-8")
            full = message if full_disk(error, config) else ""
    except torch.OutOfMemoryError as error:
        code, message = 1, str(out_of_memory(error))
        (meeting / f"fault-{rank}").write_text(f"{traceback.format_exc()}\n{message}", encoding="utf-8")
    except Exception as error:
        message = full = str(full_disk(error, config) or "")
        code = 1
        (meeting / f"fault-{rank}").write_text(traceback.format_exc(), encoding="utf-8")
    finally:
        monitor.close()
        if world is not None and not code:
            leave_world(world)
    if main:
        step = run.global_step if run else job.start.global_step
        outcome = {"global_step": step, "message": message, "exit_code": code, "crashed": crashed}
        (meeting / "outcome").write_text(json.dumps(outcome), encoding="utf-8")
    elif full:  # a disk of this rank's host, or its last bytes: rank 0 may have seen no more than that we are gone
        (meeting / f"full-{rank}").write_text(f"rank {rank} on {os.uname().nodename}: {full}", encoding="utf-8")
    # The process group of an abandoned run still has threads: a normal exit of the interpreter would abort in C++.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
