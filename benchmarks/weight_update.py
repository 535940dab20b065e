"""Seconds and GB/s of weight updates into an SGLang server, over a plain NCCL broadcast of as many bytes.

    python3 benchmarks/weight_update.py [--parts nccl disk ipc] [--buckets 512 1024 4096] [--rounds 5] [--flags "…"]

Writes a model of Qwen2.5-1.5B's shape with random weights and prints one JSON object a line, each as soon as it is
known. The trainer is on GPU 0; `nccl` and `disk` publish to a server on GPU 1, `ipc` to one on GPU 0 (it alone needs no
second GPU). Every round changes all weights first.

* `limit`: a broadcast of the same bytes between the same two GPUs by two processes that do nothing else, NCCL set as
  for updates; median of ten, the first left out. `of_limit`: GB/s of an update's transfer over this.
* `first`: the update that forms the group. `steady`: the median of later ones, with no request under way: `transfer`
  goes from paused servers to every server's version checked, HTTP calls included; `whole` from the first request held
  back to the first that could be sent.
* `busy`: the same with requests in the middle of their responses; all must end complete, under two versions.
* `logprob_difference`: mean |server's - trainer's| of the tokens that the server then samples, by the trainer's own
  forward pass over the weights that it published.
* `disk`: `prepare` is writing the folder (to memory), before anything is interrupted. `ipc`: `release` frees the
  server's memory for training, `gib_freed` is what this process then sees.

With `--device cpu` a stand-in server and gloo take the places of SGLang and NCCL: that tries the script, its figures
mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from trainer.weights.choose import NCCL_SETTINGS

os.environ.update(NCCL_SETTINGS)

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from trainer.config import RunConfig
from trainer.config_parts import ModelConfig, WeightsConfig
from trainer.engines.dialects import make_dialect
from trainer.engines.http import Server, ServerPool
from trainer.engines.launching import launch
from trainer.engines.options import MEMORY_SAVER, ServerOptions
from trainer.engines.process import ServerProcess, free_port
from trainer.engines.served import ServedEngine
from trainer.rollout.background import BackgroundLoop
from trainer.train.distributed import World
from trainer.train.learner import Learner
from trainer.train.model import load_lm
from trainer.types import Row, SamplingParams
from trainer.weights.colocated import ColocatedPublisher
from trainer.weights.folders import FolderPublisher, choose_root
from trainer.weights.nccl import NcclPublisher
from trainer.weights.publisher import Outlet, Publisher, PublishStats

END = 151_645
QWEN_1_5B = {
    "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "tie_word_embeddings": True, "eos_token_id": END,
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": True, "eos_token_id": 1,
}  # fmt: skip


def show(what: str, **values: Any) -> None:
    print(json.dumps({"what": what, **values}), flush=True)


def write_model(folder: Path, shape: dict[str, Any], device: torch.device) -> Any:
    """A model of this shape with random weights; returns its (nearly empty) tokenizer."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        lm = Qwen2ForCausalLM(Qwen2Config(**shape))
    torch.set_default_dtype(torch.float32)
    lm.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<eos>": 0}, unk_token="<eos>")))
    tokenizer.save_pretrained(folder)
    return tokenizer


def plain_rank(rank: int, port: int, nbytes: int, cuda: bool, answer: Any) -> None:
    """One end of the plain broadcast."""
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    data = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(11):
        dist.barrier()
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        dist.broadcast(data, 0)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    if rank == 1:  # the receiver has it all
        answer.put(statistics.median(seconds[1:]))
    dist.destroy_process_group()


def plain_broadcast(nbytes: int, cuda: bool) -> float:
    """Seconds of one broadcast by processes that do nothing else."""
    context = multiprocessing.get_context("spawn")
    answer = context.SimpleQueue()
    port = free_port()
    processes = [context.Process(target=plain_rank, args=(r, port, nbytes, cuda, answer)) for r in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        if process.exitcode != 0:
            process.kill()
            raise SystemExit(f"the plain broadcast failed (exit code {process.exitcode})")
    return answer.get()


@dataclass
class Bench:
    given: argparse.Namespace
    model: Path
    learner: Learner
    tokenizer: Any
    loop: BackgroundLoop
    version: int = 0
    limit: float = 0.0

    @property
    def cuda(self) -> bool:
        return self.given.device == "cuda"

    def engine(self, server: Server) -> ServedEngine:
        dialect = make_dialect("sglang")
        engine = ServedEngine(ServerPool(dialect.health_path), dialect, self.model, set())
        self.loop.run(engine.join(server))
        return engine

    def folders(self, engine: ServedEngine) -> FolderPublisher:
        outlet = Outlet(engine, self.loop.submit)
        root = choose_root("", self.model.parent / "run", outlet, 4 << 30)
        return FolderPublisher(self.learner, outlet, self.tokenizer, root)

    @torch.no_grad()
    def learn(self) -> None:
        for parameter in self.learner.policy.parameters():
            parameter.mul_(1.0 + 0.01 * random.random())
        if self.cuda:
            torch.cuda.synchronize()

    def publish(self, publisher: Publisher) -> dict[str, float]:
        self.learn()
        self.version += 1
        return self.read(publisher.publish(self.version))

    def read(self, stats: PublishStats) -> dict[str, float]:
        gigabytes = stats.bytes / 1e9
        whole = stats.pause_seconds + stats.transfer_seconds + stats.resume_seconds
        found = {
            "prepare": stats.prepare_seconds, "pause": stats.pause_seconds, "transfer": stats.transfer_seconds,
            "resume": stats.resume_seconds, "whole": whole, "gb_per_s": gigabytes / stats.transfer_seconds,
        }  # fmt: skip
        if self.limit:
            found["of_limit"] = found["gb_per_s"] / (gigabytes / self.limit)
        return {name: round(value, 4) for name, value in found.items()} | {"transport": stats.transport}  # type: ignore[dict-item]

    def steady(self, publisher: Publisher) -> dict[str, float]:
        rounds = [self.publish(publisher) for _ in range(self.given.rounds)]
        middle = sorted(rounds, key=lambda found: found["transfer"])[len(rounds) // 2]
        return middle | {"slowest_transfer": max(found["transfer"] for found in rounds)}

    def busy(self, engine: ServedEngine, publisher: Publisher) -> dict[str, Any]:
        """An update in the middle of many responses."""
        draw = random.Random(self.version)
        params = SamplingParams(1024, banned_token_ids=(END,))
        prompts = [[draw.randrange(1000, 20_000) for _ in range(512)] for _ in range(64)]

        async def all_of_them() -> list[Any]:
            return list(await asyncio.gather(*(engine.generate(p, params) for p in prompts)))

        jobs = self.loop.submit(all_of_them())
        (server,) = engine.pool.usable()
        while server.in_flight < len(prompts):
            time.sleep(0.005)
        time.sleep(1.0)  # into the middle of the responses
        found: dict[str, Any] = dict(self.publish(publisher))
        dones = jobs.result()
        assert all(len(done.token_ids) == 1024 for done in dones)
        return found | {"requests": len(dones), "interrupted": sum(bool(done.spans) for done in dones)}

    def difference(self, engine: ServedEngine) -> dict[str, float]:
        """How far the server's log-probs are from the trainer's."""
        draw = random.Random(1)
        prompts = [[draw.randrange(1000, 20_000) for _ in range(512)] for _ in range(16)]
        params = SamplingParams(128, banned_token_ids=())

        async def all_of_them() -> list[Any]:
            return list(await asyncio.gather(*(engine.generate(p, params) for p in prompts)))

        dones = self.loop.run(all_of_them())
        rows = [
            Row(prompt, done.token_ids, done.logprobs, 1.0, 1.0, n)
            for n, (prompt, done) in enumerate(zip(prompts, dones, strict=True))
        ]
        own = self.learner.logprobs(rows)
        gaps = [
            abs(a - b)
            for done, values in zip(dones, own, strict=True)
            for a, b in zip(done.logprobs, values, strict=True)
        ]
        return {"mean": round(statistics.mean(gaps), 5), "max": round(max(gaps), 5), "tokens": len(gaps)}


def with_nccl(bench: Bench, engine: ServedEngine) -> None:
    folders = bench.folders(engine)
    for megabytes in bench.given.buckets:
        config = WeightsConfig(transport="nccl", bucket_mb=megabytes)
        publisher = NcclPublisher(folders, Outlet(engine, bench.loop.submit), config)
        count = len(publisher.source.buckets)
        show("nccl first", bucket_mb=megabytes, buckets=count, **bench.publish(publisher))
        show("nccl steady", bucket_mb=megabytes, buckets=count, **bench.steady(publisher))
        if bench.cuda:
            show("nccl busy", bucket_mb=megabytes, **bench.busy(engine, publisher))
            show("nccl logprob_difference", **bench.difference(engine))
        publisher.close()


def with_disk(bench: Bench, engine: ServedEngine) -> None:
    publisher = bench.folders(engine)
    show("disk first", folder=str(publisher.root), **bench.publish(publisher))
    show("disk steady", **bench.steady(publisher))
    if bench.cuda:
        show("disk busy", **bench.busy(engine, publisher))
        show("disk logprob_difference", **bench.difference(engine))
    publisher.close()


def with_ipc(bench: Bench, engine: ServedEngine) -> None:
    publisher = ColocatedPublisher(bench.folders(engine), Outlet(engine, bench.loop.submit))
    bench.limit = 0.0  # the broadcast between two GPUs is no limit for one
    for number in range(bench.given.rounds):
        free = torch.cuda.mem_get_info()[0] if bench.cuda else 0
        seconds = publisher.release()
        freed = (torch.cuda.mem_get_info()[0] - free) / 2**30 if bench.cuda else 0.0
        found = bench.publish(publisher)
        name = "ipc steady" if number else "ipc first"
        show(name, release=round(seconds, 4), gib_freed=round(freed, 2), **found)
    if bench.cuda:
        show("ipc logprob_difference", **bench.difference(engine))
    publisher.close()


async def start(bench: Bench, parts: list[str]) -> tuple[dict[str, Server], list[Any]]:
    """Start the servers that the parts need, at the same time."""
    flags = tuple(shlex.split(bench.given.flags))
    wanted = {"far": parts[:1] != ["ipc"], "near": "ipc" in parts}
    names = [name for name, is_wanted in wanted.items() if is_wanted]
    if not bench.cuda:
        from tests.weightserver import Faults, serve  # noqa: PLC0415

        context = multiprocessing.get_context("spawn")
        servers, processes = {}, []
        for name in names:
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(bench.model, Faults(), there), daemon=True)
            process.start()
            processes.append(process)
            servers[name] = Server(name, f"http://127.0.0.1:{here.recv()}")
        return servers, processes

    def options(name: str) -> ServerOptions:
        far = name == "far"
        more = () if far else (MEMORY_SAVER,)
        log = bench.given.logs / f"{name}.log"
        gpus = (1,) if far else (0,)
        fraction = 0.7 if far else 0.4
        return ServerOptions(
            bench.model, log, name, gpus, memory_fraction=fraction, context_length=8192, flags=(*flags, *more)
        )  # fmt: skip

    started = await asyncio.gather(*(launch("sglang", options(name)) for name in names))
    return dict(zip(names, (server for server, _ in started), strict=True)), [process for _, process in started]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["nccl", "disk", "ipc"], default=["nccl", "disk", "ipc"])
    parser.add_argument("--buckets", type=int, nargs="+", default=[512, 1024, 4096], metavar="MIB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--logs", type=Path, default=Path())
    parser.add_argument("--flags", default="")
    given = parser.parse_args()
    cuda = given.device == "cuda"
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    parts = [part for part in ("nccl", "disk", "ipc") if part in given.parts]
    gpus = torch.cuda.device_count() if cuda else 2
    if gpus < 2 and parts[0] != "ipc":
        raise SystemExit("nccl and disk need two GPUs here: --parts ipc")
    about = {"gpu": torch.cuda.get_device_name(0)} if cuda else {"stand_in": True}
    show("machine", **about, torch=torch.__version__, date=datetime.now(UTC).strftime("%Y-%m-%d"))
    loop = BackgroundLoop()
    processes: list[Any] = []
    engines: dict[str, ServedEngine] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        model = Path(folder) / "model"
        tokenizer = write_model(model, QWEN_1_5B if cuda else TINY, device)
        lm = load_lm(model, ModelConfig(dtype="bfloat16")).to(device)
        bench = Bench(given, model, Learner(lm, RunConfig(), World(0, 1, device), 1), tokenizer, loop)
        nbytes = sum(p.numel() * p.element_size() for p in lm.parameters())
        try:
            if parts[0] != "ipc":
                bench.limit = plain_broadcast(nbytes, cuda)
                show(
                    "limit", gigabytes=nbytes / 1e9, seconds=bench.limit, gb_per_s=round(nbytes / 1e9 / bench.limit, 1)
                )
            began = time.perf_counter()
            servers, processes = loop.run(start(bench, parts))
            show("servers", start_seconds=round(time.perf_counter() - began, 1))
            engines = {name: bench.engine(server) for name, server in servers.items()}
            for part in parts:
                {"nccl": with_nccl, "disk": with_disk, "ipc": with_ipc}[part](
                    bench, engines["near" if part == "ipc" else "far"]
                )
        finally:
            for process in processes:
                if isinstance(process, ServerProcess):
                    loop.run(process.stop())
                else:
                    process.kill()
            for engine in engines.values():
                loop.run(engine.pool.close())
            loop.close()


if __name__ == "__main__":
    main()
