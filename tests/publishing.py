"""A trainer with stand-in servers (tests/weightserver.py), on one rank or several, for the tests of publishing."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from builders import grouped_query_lm, learner, small_config, small_parts
from forkserver import CONTEXT
from safetensors.torch import load_file
from weightserver import Faults, serve

from trainer.config_parts import WeightsConfig
from trainer.engines.dialects import make_dialect
from trainer.engines.http import Server, ServerPool
from trainer.engines.served import ServedEngine
from trainer.rollout.background import BackgroundLoop
from trainer.train.distributed import World
from trainer.weights.buckets import plan_buckets
from trainer.weights.folders import FolderPublisher
from trainer.weights.nccl import NcclPublisher
from trainer.weights.publisher import Outlet

MODELS = ("llama", "qwen2")  # tied and untied output weights


def make_lm(name: str) -> Any:
    return small_parts().lm if name == "llama" else grouped_query_lm()


@dataclass
class Servers:
    """Stand-in servers behind a real engine."""

    folder: Path
    loop: BackgroundLoop = field(default_factory=BackgroundLoop)
    processes: list[BaseProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        dialect = make_dialect("sglang")
        self.pool = ServerPool(dialect.health_path)
        self.engine = ServedEngine(self.pool, dialect, self.folder, {2})
        self.outlet = Outlet(self.engine, self.loop.submit)

    def start(self, **faults: Any) -> Server:
        """Start one, not yet joined."""
        here, there = CONTEXT.Pipe()
        process = CONTEXT.Process(target=serve, args=(self.folder, Faults(**faults), there), daemon=True)
        process.start()
        self.processes.append(process)
        return Server(f"s{len(self.processes) - 1}", f"http://127.0.0.1:{here.recv()}")

    def add(self, **faults: Any) -> Server:
        return self.join(self.start(**faults))

    def join(self, server: Server) -> Server:
        """Use a server, which another process may have started."""
        self.loop.run(self.engine.join(server))
        return server

    def state(self, server: Server) -> dict[str, Any]:
        """digest of the weights, groups that it is in, calls that came."""
        return self.loop.run(self.pool.call(server, "GET", "/state", None, 10.0))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.loop.run(self.pool.close())
        self.loop.close()


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[Servers]:
    found = Servers(folder)
    try:
        yield found
    finally:
        found.close()


@dataclass
class Trainer:
    """A learner on a small model, and its publishers. One bucket holds only a part of the weights."""

    model: str
    world: World
    outlet: Outlet | None
    root: Path

    def __post_init__(self) -> None:
        self.learner = learner(make_lm(self.model), small_config(), self.world)
        self.folders = FolderPublisher(
            self.learner, self.outlet, small_parts().tokenizer, self.root, bucket_bytes=20_000
        )  # fmt: skip

    def nccl(self, **settings: Any) -> NcclPublisher:
        config = WeightsConfig(**{"deadline_s": 5.0, **settings})
        publisher = NcclPublisher(self.folders, self.outlet, config)
        pieces = [piece for bucket in publisher.source.buckets for piece in bucket.pieces]
        publisher.source.buckets = plan_buckets(pieces, 20_000)
        assert len(publisher.source.buckets) >= 4
        return publisher

    @torch.no_grad()
    def learn(self) -> None:
        """Change every weight."""
        for parameter in self.learner.policy.parameters():
            parameter.mul_(1.1).add_(0.01)


def save_model(name: str, folder: Path) -> Path:
    make_lm(name).to(torch.bfloat16).save_pretrained(folder)
    return folder


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    """As the stand-in server computes it."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(name.encode() + str(tensor.dtype).encode())
        total.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def folder_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
