"""One rank of an attempt, wherever it runs: join the others, train, leave word of how it ended."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.checkpoint.start import Start
from trainer.config import RunConfig
from trainer.errors import InterruptedRunError, UserError
from trainer.metrics import Monitor, make_sinks, open_log
from trainer.paths import RunPaths
from trainer.placement import first_training_gpu
from trainer.runs import AnyRun, make_run
from trainer.signals import StopFlag
from trainer.train.distributed import World, join_world, leave_world
from trainer.train.gpu_footprint import out_of_memory
from trainer.train.model import compute_dtype
from trainer.train.tensorparallel import tensor_degree
from trainer.weights.environment import prepare_nccl


def set_threads(config: RunConfig) -> None:
    """Fix the number of CPU threads: results are bit-identical only for the same number."""
    torch.set_num_threads(config.train.threads or max(1, (os.cpu_count() or 1) // config.ranks))
    # On a GPU the deterministic kernels (attention backwards, indexing) would cost a good part of the time.
    torch.use_deterministic_algorithms(not torch.cuda.is_available(), warn_only=True)


@dataclass(frozen=True)
class RankJob:
    """What every rank is told.

    meeting: folder for what ranks leave to whoever started them. rendezvous: where they meet, a URL of
    torch.distributed. gpu: number of the rank's GPU among those that it sees; None: all ranks are on one machine, whose
    first GPUs may be the servers'.
    """

    config: RunConfig
    model_folder: Path
    attempt: int
    start: Start
    meeting: Path
    rendezvous: str
    gpu: int | None = None


def rank_main(rank: int, job: RankJob, stop: StopFlag) -> None:
    """Be rank `rank` to the end of the attempt; the process ends in here."""
    config, meeting = job.config, job.meeting
    # What a crash outside of Python (an abort in a library, a segmentation fault) leaves: where every thread was.
    faulthandler.enable((meeting / f"fatal-{rank}").open("w", encoding="utf-8"))
    logs = RunPaths.of(config).logs
    set_threads(config)
    main = rank == 0
    if main:
        open_log(logs / "main.log")
    monitor = Monitor(logs if main else None, job.attempt, make_sinks(config, logs) if main else [])
    world: World | None = None
    run: AnyRun | None = None
    code, message = 0, ""
    try:
        gpu = rank + first_training_gpu(config) if job.gpu is None else job.gpu
        prepare_nccl(config)
        dtype, tensor = compute_dtype(config.model), tensor_degree(config)
        world = join_world(rank, config.ranks, job.rendezvous, gpu, dtype, tensor)
        run = make_run(config, job.model_folder, world, monitor, stop, job.start)
        run.run()
    except UserError as error:
        code, message = error.exit_code, str(error)
        if not main and not isinstance(error, InterruptedRunError):
            # Rank 0 tells what befell all; what befell this one alone (its GPU's memory) it cannot know.
            (meeting / f"fault-{rank}").write_text(message, encoding="utf-8")
    except torch.OutOfMemoryError as error:
        code, message = 1, str(out_of_memory(error))
        (meeting / f"fault-{rank}").write_text(f"{traceback.format_exc()}\n{message}", encoding="utf-8")
    except Exception:
        code = 1
        (meeting / f"fault-{rank}").write_text(traceback.format_exc(), encoding="utf-8")
    finally:
        monitor.close()
        if world is not None and not code:
            leave_world(world)
    if main:
        step = run.global_step if run else job.start.global_step
        outcome = {"global_step": step, "message": message, "exit_code": code}
        (meeting / "outcome").write_text(json.dumps(outcome), encoding="utf-8")
    # The process group of an abandoned run still has threads: the interpreter's own way out would end in a C++ abort.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
