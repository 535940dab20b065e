"""The actor of a rank on Ray. Without PyTorch, as what it starts: a node starts one for every rank at once."""

from __future__ import annotations

import pickle
import subprocess
from contextlib import ExitStack
from dataclasses import replace

import ray

from trainer.engines.process import free_port
from trainer.launch.nccl_settings import NodeSettings, take
from trainer.launch.rank_job import RankJob, start_rank
from trainer.launch.ray_servers import GpusOfNode
from trainer.paths import RunPaths
from trainer.staging import temporary_folder


class RankHost:
    """Actor on the node of one rank: keeps the rank's process, which ends when the actor does."""

    def __init__(self) -> None:
        self._files = ExitStack()
        self._meeting = self._files.enter_context(temporary_folder("rank"))
        self._process: subprocess.Popen[bytes] | None = None
        self._settings = take()  # of the rank's process, which inherits them

    def node(self) -> str:
        """Address of this node."""
        return str(ray.util.get_node_ip_address())

    def gpus(self) -> GpusOfNode:
        """The GPUs of this rank."""
        return GpusOfNode(ray.get_runtime_context().get_node_id(), tuple(map(str, ray.get_gpu_ids())))

    def settings(self) -> NodeSettings:
        """What the rank has of the settings that `clusterkit check --nccl` kept on this node."""
        return self._settings

    def meeting_place(self) -> tuple[str, int]:
        """Address of this node and a port that is free here."""
        return self.node(), free_port("")

    def start(self, rank: int, job: bytes) -> None:
        """Start the rank of that number. job: a pickled RankJob; its meeting folder is set here."""
        rank_job: RankJob = replace(pickle.loads(job), meeting=self._meeting)
        console = RunPaths.of(rank_job.config).logs / f"attempt_{rank_job.attempt}" / f"rank_{rank}.log"
        with console.open("ab") as file:
            self._process = start_rank(rank, rank_job, file)

    def poll(self) -> int | None:
        """Exit code of the rank; None while it runs."""
        return self._process.poll() if self._process else None

    def signal(self, number: int) -> None:
        """Send the rank a signal."""
        if self._process is not None:
            self._process.send_signal(number)

    def left(self) -> dict[str, str]:
        """Name and content of the files that the rank has left; they are removed, since an actor is killed."""
        found = {path.name: path.read_text(encoding="utf-8") for path in self._meeting.iterdir()}
        self._files.close()
        return found
