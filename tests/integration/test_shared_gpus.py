"""Several ranks hand several servers their weights, each to the server on its own device, and take turns with memory.

Servers are the stand-ins of tests/weightserver.py and the GPUs are the CPU, with shared memory in place of CUDA IPC:
ranks, gathering, publisher and all calls are real. tests/gpu/test_weights.py shows the same with SGLang on GPUs.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import publishing
import pytest
import torch
from builders import sampled_rows, small_parts
from forkserver import run_ranks
from publishing import digest_of, folder_tensors, save_model, servers

from trainer.checkpoint.export import export
from trainer.engines.http import Server
from trainer.errors import CrashError, RunError
from trainer.train.distributed import join_world, leave_world
from trainer.weights.buckets import plan_buckets
from trainer.weights.colocated import ColocatedPublisher
from trainer.weights.folders import SHARED_MEMORY

RANKS = 4


@dataclass
class Case:
    """What the ranks are to do with the servers that are there.

    kill: process that is killed while its memory is given away; 0: none.
    """

    model: str
    there: list[Server]
    trades: bool = True
    kill: int = 0
    versions: tuple[int, ...] = (1, 2)


def run_rank(rank: int, size: int, folder: Path, case: Case) -> None:
    torch.set_num_threads(1)
    world = join_world(rank, size, f"file://{folder}/rendezvous")
    found: list[Any] = []
    with servers(folder / "model") if rank == 0 else contextlib.nullcontext() as rig:
        for server in case.there if rig else ():
            rig.join(server)
        one = publishing.Trainer(case.model, world, rig.outlet if rig else None, folder / "weights")
        try:
            publisher = ColocatedPublisher(one.folders, rig.outlet if rig else None, 1, trades=case.trades)
            publisher.source.buckets = plan_buckets(
                [piece for bucket in publisher.source.buckets for piece in bucket.pieces], 20_000
            )
            assert len(publisher.source.buckets) >= 4
            lm = publishing.make_lm(case.model)
            for version in case.versions:
                publisher.release()
                if case.kill and rank == 0:
                    os.kill(case.kill, signal.SIGKILL)
                one.learn()
                one.learner.logprobs(sampled_rows(lm, 3, lm.config.vocab_size))  # leaves some weights gathered
                stats = publisher.publish(version, folder=version == 2 and rank == 0)
                found.append((stats.transport, stats.version, stats.servers))
            export(one.learner, small_parts().tokenizer, folder / "export")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    torch.save(found, folder / f"rank{rank}.pt")
    if not found or isinstance(found[-1], tuple):
        leave_world(world)
    else:
        os._exit(0)  # the others may wait in a collective


@pytest.mark.parametrize(("model", "count", "each", "trades"), [
    ("llama", 4, 1, True), ("qwen2", 2, 2, True), ("qwen2", 4, 1, False),
])  # fmt: skip
def test_every_server_gets_the_weights_from_the_ranks_on_its_gpus(
    tmp_path: Path, model: str, count: int, each: int, trades: bool
) -> None:
    before = set(SHARED_MEMORY.glob("clusterkit-weights-*"))
    with servers(save_model(model, tmp_path / "model")) as rig:
        there = [rig.start(tensor_parallel=each, memory_saver=trades) for _ in range(count)]
        told = run_ranks(run_rank, RANKS, tmp_path, Case(model, there, trades))
        states = [rig.state(server) for server in there]
    whole = {name: tensor.to(torch.bfloat16) for name, tensor in folder_tensors(tmp_path / "export").items()}
    assert [state["digest"] for state in states] == [digest_of(whole)] * count
    assert digest_of(folder_tensors(tmp_path / "weights" / "v2")) == digest_of(whole)
    assert told == [[("ipc", 1, count), ("ipc", 2, count)]] * RANKS
    for state in states:
        memory = [path for path in state["calls"] if path.endswith("memory_occupation")]
        turn = ["/release_memory_occupation", *["/resume_memory_occupation"] * 2]
        assert memory == (turn * 2 if trades else [])
    assert set(SHARED_MEMORY.glob("clusterkit-weights-*")) == before


def test_where_a_server_is_lost_that_gave_its_memory_away_all_ranks_end_together(tmp_path: Path) -> None:
    with servers(save_model("llama", tmp_path / "model")) as rig:
        there = [rig.start() for _ in range(RANKS)]
        lost = rig.processes[2].pid
        assert lost is not None
        told = run_ranks(run_rank, RANKS, tmp_path, Case("llama", there, kill=lost))
    first, *others = [errors for (errors,) in told]
    assert first.startswith(f"{CrashError.__name__}: servers on the trainer's GPUs were lost (s2: it could not be")
    assert all("servers on the trainer's GPUs were lost" in one for one in others)


def test_one_that_has_its_memory_all_the_time_may_be_lost(tmp_path: Path) -> None:
    with servers(save_model("llama", tmp_path / "model")) as rig:
        there = [rig.start(**({"die_at": 2} if number == 1 else {})) for number in range(RANKS)]
        told = run_ranks(run_rank, RANKS, tmp_path, Case("llama", there, trades=False))
    assert told == [[("ipc", 1, 3), ("ipc", 2, 3)]] * RANKS


def test_servers_that_do_not_have_the_ranks_gpus_are_refused(tmp_path: Path) -> None:
    with servers(save_model("llama", tmp_path / "model")) as rig:
        there = [rig.start() for _ in range(3)]
        told = run_ranks(run_rank, RANKS, tmp_path, Case("llama", there))
    (first,), *others = told
    assert first.startswith(f"{RunError.__name__}: trainer and servers share GPUs one for one: there are 4 ranks, and ")
    assert len(others) == RANKS - 1
