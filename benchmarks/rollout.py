"""Tokens/s of the memory-agent workload through the rollout controller, over those of the bare server.

    python3 benchmarks/rollout.py TOKENIZER_FOLDER [--shape 135M 1.5B] [--rounds 4] [--seconds 300] [--flags="…"]
    python3 benchmarks/rollout.py TOKENIZER_FOLDER --shape tiny --engine vllm --rounds 1 --documents 2 --group 2

For each shape (random weights) one server is started on GPU 0. A round: 32 documents of four sections of about 2000
tokens, 8 trajectories each, 256 tokens of memory, through `RolloutController` and `ServedEngine`; then the very same
requests, of the same lengths, on plain sockets: the turns of a trajectory one after the other, all trajectories at
once, answers read and thrown away. Caches are emptied before each, and every round has documents of its own. Printed at
once, a JSON object a line: start of the server, every round, and at the end the medians and their ratio. No round is
begun that would not end within --seconds, counted from the start of the script.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from memory_step import SHAPES, Case, Coin, like, settings, write_model
from sglang_engine import exchange

from trainer.agents import make_agent
from trainer.config import RunConfig
from trainer.engines.dialects import make_dialect
from trainer.engines.http import Server, ServerPool
from trainer.engines.launching import launch
from trainer.engines.served import ServedEngine
from trainer.rollout.controller import RolloutController, SamplingPlan
from trainer.serving.host import server_options
from trainer.tasks import make_source
from trainer.train.model import load_tokenizer
from trainer.types import Group, SamplingParams

END_ID = 2
CACHES = {"sglang": "/flush_cache?timeout=30", "vllm": "/reset_prefix_cache"}


def show(**values: Any) -> None:
    print(json.dumps(values), flush=True)


class Rig:
    """One server, and the two ways to it."""

    def __init__(self, config: RunConfig, engine: ServedEngine, server: Server, tokenizer: Any) -> None:
        self.config, self.engine, self.server = config, engine, server
        self.source = make_source(config)
        self.controller = RolloutController(make_agent(config, tokenizer), engine, config.seed, reward=Coin(None))

    async def forget(self) -> None:
        await self.engine.pool.call(self.server, "POST", CACHES[self.config.engine], {}, 60)

    async def through_controller(self, number: int) -> tuple[float, list[Group]]:
        c = self.config.rollout
        tasks = [self.source.train(number * c.batch_size + i) for i in range(c.batch_size)]
        began = time.perf_counter()
        groups = await self.controller.groups(tasks, SamplingPlan(f"round-{number}", c.group_size, 1.0))
        return time.perf_counter() - began, groups

    async def bare(self, groups: list[Group]) -> float:
        host, _, port = self.server.url.removeprefix("http://").partition(":")
        dialect = self.engine.dialect
        sent = [
            [self.body(turn.prompt_ids, len(turn.completion.token_ids)) for turn in trajectory.turns]
            for group in groups
            for trajectory in group.trajectories
        ]

        async def one(bodies: list[bytes]) -> None:
            for body in bodies:
                await exchange(host, int(port), dialect.generate_path, body)

        began = time.perf_counter()
        await asyncio.gather(*(one(bodies) for bodies in sent))
        return time.perf_counter() - began

    def body(self, prompt: list[int], new: int) -> bytes:
        params = SamplingParams(new, banned_token_ids=(END_ID,))  # so that it is as long as it was
        return json.dumps(self.engine.dialect.request(prompt, params, new, [], self.server)).encode()


async def measure(given: argparse.Namespace, shape: str, work: Path, deadline: float) -> None:
    began = time.perf_counter()
    model = work / shape
    write_model(model, shape, given.tokenizer)
    config = RunConfig.model_validate(settings(like(given, shape=shape, flags=given.flags), model, work, Case()))
    gpus = (0,) if config.engine == "sglang" else ()
    options = server_options(config, model, given.log, "server", gpus, "127.0.0.1")
    server, process = await launch(config.engine, options)  # type: ignore[arg-type]
    dialect = make_dialect(config.engine)  # type: ignore[arg-type]
    pool = ServerPool(dialect.health_path)
    engine = ServedEngine(pool, dialect, model, {END_ID})
    try:
        version = await engine.join(server)
        show(shape=shape, server=f"{dialect.title} {version}", start_s=round(time.perf_counter() - began, 1))
        rig = Rig(config, engine, server, load_tokenizer(model))
        found: dict[str, list[float]] = {"controller": [], "bare": []}
        longest = 0.0
        for number in range(given.rounds + 1):  # the first warms up
            if time.perf_counter() + longest > deadline:
                show(shape=shape, stopped=f"no time for round {number} of {given.rounds}")
                break
            start = time.perf_counter()
            await rig.forget()
            seconds, groups = await rig.through_controller(number)
            await rig.forget()
            alone = await rig.bare(groups)
            turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
            sampled = sum(len(turn.completion.token_ids) for turn in turns)
            speeds = {"controller": sampled / seconds, "bare": sampled / alone}
            show(
                shape=shape, round=number, requests=len(turns), sampled_tokens=sampled,
                prompt_tokens=sum(len(turn.prompt_ids) for turn in turns),
                tokens_per_s={name: round(value) for name, value in speeds.items()}, ratio=round(alone / seconds, 3),
            )  # fmt: skip
            for name, value in speeds.items():
                found[name] += [value] if number else []
            longest = max(longest, time.perf_counter() - start)
        if found["bare"]:
            median = {name: statistics.median(values) for name, values in found.items()}
            ratio = round(median["controller"] / median["bare"], 3)
            show(shape=shape, rounds=len(found["bare"]), **{k: round(v) for k, v in median.items()}, ratio=ratio)
    finally:
        await pool.close()
        await process.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="folder with an instruction model's tokenizer (its weights are not read)")
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["135M", "1.5B"])
    parser.add_argument("--engine", choices=("sglang", "vllm"), default="sglang")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--documents", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--flags", default="", help="more options for the server")
    parser.add_argument("--log", type=Path, default=Path("rollout-server.log"))
    given = parser.parse_args()
    deadline = time.perf_counter() + given.seconds
    with tempfile.TemporaryDirectory(prefix="rollout-") as name:
        for shape in list(given.shape):
            asyncio.run(measure(given, shape, Path(name), deadline))


if __name__ == "__main__":
    main()
