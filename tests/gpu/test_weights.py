"""Weights published to real SGLang servers: through CUDA IPC on one GPU, over NCCL and through folders on a second.

    python3 -m pytest tests/gpu/test_weights.py -m gpu

needs SGLang in the same Python; what takes a second GPU is skipped without one. CLUSTERKIT_SGLANG_FLAGS adds options to
the servers' command lines. The last test stops a server.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shlex
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tokenversions import token_versions

from tests.realparts import require
from trainer.config import RunConfig
from trainer.config_parts import ModelConfig, WeightsConfig
from trainer.engines.dialects import make_dialect
from trainer.engines.http import Limits, Server, ServerPool
from trainer.engines.launching import launch
from trainer.engines.options import ServerOptions
from trainer.engines.process import ServerProcess
from trainer.engines.served import ServedEngine
from trainer.rollout.background import BackgroundLoop
from trainer.types import Completion, Row, SamplingParams
from trainer.weights.choose import NCCL_SETTINGS

pytestmark = pytest.mark.gpu

os.environ.update(NCCL_SETTINGS)
psutil = pytest.importorskip("psutil")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from trainer.engines.options import MEMORY_SAVER  # noqa: E402
from trainer.train.distributed import World  # noqa: E402 (torch may be missing)
from trainer.train.learner import Learner  # noqa: E402
from trainer.train.model import load_lm, load_tokenizer  # noqa: E402
from trainer.weights.colocated import ColocatedPublisher  # noqa: E402
from trainer.weights.folders import FolderPublisher  # noqa: E402
from trainer.weights.nccl import NcclPublisher  # noqa: E402
from trainer.weights.publisher import Outlet  # noqa: E402

FLAGS = tuple(shlex.split(os.environ.get("CLUSTERKIT_SGLANG_FLAGS", "")))
# Of log-probs, the server's against the trainer's own forward pass: rounding, and what other weights make of it.
SAME, OTHER = 0.05, 0.1
QUESTIONS = ["What is the capital of France?", "Name three rivers of Germany.", "Why is the sky blue?"]


@dataclass
class Rig:
    """A trainer on GPU 0 with SmolLM2-135M, and servers started with the same weights."""

    model: Path
    logs: Path
    loop: BackgroundLoop = field(default_factory=BackgroundLoop)
    processes: list[ServerProcess] = field(default_factory=list)
    pools: list[ServerPool] = field(default_factory=list)
    versions: int = 0

    def __post_init__(self) -> None:
        lm = load_lm(self.model, ModelConfig(dtype="bfloat16")).to("cuda:0")
        self.learner = Learner(lm, RunConfig(), World(0, 1, torch.device("cuda", 0)), 1)
        self.tokenizer = load_tokenizer(self.model)

    def engine(self, names: tuple[str, ...], gpu: int, *flags: str) -> ServedEngine:
        """Servers on one GPU, and an engine over them."""
        dialect = make_dialect("sglang")
        self.pools.append(ServerPool(dialect.health_path, Limits(control=20.0, health=5.0)))
        engine = ServedEngine(self.pools[-1], dialect, self.model, {self.tokenizer.eos_token_id})

        async def start(name: str) -> None:
            options = ServerOptions(
                self.model, self.logs / f"{name}.log", name, (gpu,), memory_fraction=0.3, flags=(*FLAGS, *flags)
            )
            server, process = await launch("sglang", options)
            self.processes.append(process)
            await engine.join(server)

        for name in names:  # one after the other: each measures the GPU's free memory while it starts
            self.loop.run(start(name))
        return engine

    def folders(self, engine: ServedEngine, root: Path) -> FolderPublisher:
        return FolderPublisher(self.learner, Outlet(engine, self.loop.submit), self.tokenizer, root)

    def next_version(self) -> int:
        """Change the weights so much that log-probs show it."""
        self.versions += 1
        generator = torch.Generator("cuda").manual_seed(self.versions)
        with torch.no_grad():
            for parameter in self.learner.policy.parameters():
                if parameter.ndim == 2:
                    noise = torch.randn(parameter.shape, generator=generator, device="cuda", dtype=parameter.dtype)
                    parameter.mul_(1 + 0.05 * noise)
        return self.versions

    def prompt(self, question: str) -> list[int]:
        chat = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def ask(self, engine: ServedEngine) -> list[Row]:
        """What the servers sample to every question, as rows to learn from."""

        async def all_of_them() -> list[Completion]:
            params = [SamplingParams(64, seed=n) for n in range(len(QUESTIONS))]
            jobs = zip(QUESTIONS, params, strict=True)
            return list(await asyncio.gather(*(engine.generate(self.prompt(q), p, key=q) for q, p in jobs)))

        return self.rows(self.loop.run(all_of_them()))

    def rows(self, dones: list[Completion]) -> list[Row]:
        found = enumerate(zip(QUESTIONS, dones, strict=True))
        return [Row(self.prompt(q), d.token_ids, d.logprobs, 1.0, 1.0, n) for n, (q, d) in found]

    def difference(self, rows: list[Row]) -> float:
        """Mean |served - trainer's own| log-prob under the present weights."""
        own = self.learner.logprobs(rows)
        gaps = [abs(a - b) for r, p in zip(rows, own, strict=True) for a, b in zip(r.behave_logprobs, p, strict=True)]
        return sum(gaps) / len(gaps)

    def checksum(self, engine: ServedEngine, server: Server) -> str:
        """Of the weights in the server's GPU memory, by SGLang itself."""
        call = engine.pool.call(server, "POST", "/weights_checker", {"action": "checksum"}, 60.0)
        return str(self.loop.run(call)["per_engine_checksum"])

    def close(self) -> None:
        family = [c for p in self.processes if p.running for c in psutil.Process(p.pid).children(recursive=True)]
        for process in self.processes:
            self.loop.run(process.stop())
        for pool in self.pools:
            self.loop.run(pool.close())
        self.loop.close()
        assert psutil.wait_procs(family, timeout=30)[1] == []


@pytest.fixture(scope="module")
def rig(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    if not torch.cuda.is_available() or importlib.util.find_spec("sglang") is None:
        require(False, "needs a CUDA device and SGLang in this Python")
    logs = os.environ.get("CLUSTERKIT_TEST_LOGS")
    found = Rig(smollm2_path, Path(logs) if logs else tmp_path_factory.mktemp("logs"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def near(rig: Rig) -> ServedEngine:
    """One server on the trainer's own GPU."""
    return rig.engine(("near",), 0, MEMORY_SAVER)


@pytest.fixture(scope="module")
def far(rig: Rig) -> ServedEngine:
    """Two servers on another GPU."""
    if torch.cuda.device_count() < 2:
        require(False, "needs a second GPU")
    return rig.engine(("one", "two"), 1)


def test_a_server_on_the_same_gpu_gives_memory_away_and_takes_the_new_weights(
    rig: Rig, near: ServedEngine, tmp_path: Path
) -> None:
    publisher = ColocatedPublisher(rig.folders(near, tmp_path), Outlet(near, rig.loop.submit))
    for _ in range(2):
        old = rig.ask(near)
        assert rig.difference(old) < SAME
        before = torch.cuda.mem_get_info(0)[0]
        seconds = publisher.release()
        freed = (torch.cuda.mem_get_info(0)[0] - before) / 2**30
        assert freed > 5  # of 0.3 of the GPU, the KV cache is nearly all
        version = rig.next_version()
        stats = publisher.publish(version)
        assert torch.cuda.mem_get_info(0)[0] < before + 2**30  # the server has it back
        print(f"released {freed:.1f} GiB in {seconds:.3f} s; {stats}")
        new = rig.ask(near)
        assert near.version == version
        print(
            f"mean |difference of log-probs| {rig.difference(new):.4f}; of the older weights' {rig.difference(old):.4f}"
        )
        assert rig.difference(new) < SAME
        assert rig.difference(old) > OTHER


def test_over_nccl_with_requests_under_way(rig: Rig, far: ServedEngine, tmp_path: Path) -> None:
    publisher = NcclPublisher(
        rig.folders(far, tmp_path),
        Outlet(far, rig.loop.submit),
        WeightsConfig(transport="nccl", bucket_mb=64),  # several buckets
    )
    assert len(publisher.source.buckets) > 3
    publisher.publish(rig.next_version())

    async def long_ones() -> list[Completion]:
        params = SamplingParams(1500, banned_token_ids=(rig.tokenizer.eos_token_id,))
        return list(await asyncio.gather(*(far.generate(rig.prompt(q), params, key=q) for q in QUESTIONS * 8)))

    jobs = rig.loop.submit(long_ones())
    while sum(server.in_flight for server in far.pool.usable()) < len(QUESTIONS) * 8:
        time.sleep(0.01)
    stats = publisher.publish(rig.next_version())
    dones = jobs.result()
    print(stats)
    assert (stats.transport, stats.servers) == ("nccl", 2)
    assert {token_versions(done)[-1] for done in dones} == {rig.versions}
    new = rig.ask(far)
    print(f"mean |difference of log-probs| {rig.difference(new):.4f}")
    assert rig.difference(new) < SAME
    publisher.close()


def test_every_way_leaves_the_same_bytes_in_the_gpu(rig: Rig, far: ServedEngine, tmp_path: Path) -> None:
    sums: list[set[str]] = []
    outlet = Outlet(far, rig.loop.submit)
    folders = rig.folders(far, tmp_path / "a")
    rig.next_version()
    folders.publish(rig.versions)
    sums.append({rig.checksum(far, server) for server in far.pool.usable()})
    for per_group in (0, 1):
        rig.next_version()
        folders.publish(rig.versions)  # something else in between
        wanted = {rig.checksum(far, server) for server in far.pool.usable()}
        assert wanted != sums[-1]
        config = WeightsConfig(transport="nccl", bucket_mb=64, servers_per_group=per_group)
        publisher = NcclPublisher(folders, outlet, config)
        rig.versions += 1
        assert publisher.publish(rig.versions).transport == "nccl"
        sums.append({rig.checksum(far, server) for server in far.pool.usable()})
        assert sums[-1] == wanted
        assert len(wanted) == 1


def test_a_server_that_hangs_is_named_and_the_other_goes_on(rig: Rig, far: ServedEngine, tmp_path: Path) -> None:
    hanging = next(process for process in rig.processes if process.command.name == "one")
    family = psutil.Process(hanging.pid).children(recursive=True)
    config = WeightsConfig(transport="nccl", bucket_mb=64, deadline_s=5.0)
    publisher = NcclPublisher(rig.folders(far, tmp_path), Outlet(far, rig.loop.submit), config)
    for process in family:
        process.send_signal(signal.SIGSTOP)
    try:
        stats = publisher.publish(rig.next_version())
    finally:
        for process in family:
            process.kill()
    assert (stats.transport, stats.servers) == ("nccl", 1)
    assert [server.name for server in far.pool.usable()] == ["two"]
    assert "one did not join the weight transfer group" in far.pool.servers[0].problem
    assert rig.difference(rig.ask(far)) < SAME
