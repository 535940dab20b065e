"""What an inference server's settings bring the memory-agent workload: tokens/s, one JSON object a setting.

    python3 benchmarks/rollout_settings.py TOKENIZER_FOLDER [--seconds 330] [--only NAME …] [--gpus 1]
        [--also "NAME=FLAGS" …] [--rounds 1] [--documents 32] [--group 8] [--mean-tokens 0 60]
    python3 benchmarks/rollout_settings.py TOKENIZER_FOLDER --shape tiny --engine vllm --documents 2 --group 4
    python3 benchmarks/rollout_settings.py --list

Random weights of a shape, 32 documents of four sections of about 2000 tokens, 8 trajectories each, 256 tokens of
memory, through `RolloutController` and `ServedEngine`. Random weights say nothing that ends a turn, so all turns have
256 tokens and end at the same moments; with --mean-tokens N every N-th token of the vocabulary ends one, and prompts
come one by one, as in real runs. A setting is one start of a server; on it the ways to ask are
measured one after the other, each with documents of its own and an empty cache, after a small round that warms up:

* paper, section_first: the order of the prompt (`agent.prompt_order`);
* alone: every prompt is sent as it comes; share: what a group's prompts share is read once (`rollout.share_prefixes`);
  ahead: and the next section while the present turn is answered (`rollout.prefetch_sections`).

Printed for each: tokens/s of sampling and `ratio` over the first line of such turns; `cached_share` of the prompt
tokens, less what was computed to put it there, beside `shareable_share`, what a cache that forgets nothing could serve;
`roofline`: share of what the GPU's memory allows decoding; `tail_s`: from the end of nine tenths of the trajectories to
the end of all; `client_cpu`: processor seconds of this script a second; of SGLang's log `decode_tokens_per_s` (median
of its lines about decoding), `graph_share` (of those lines, with a CUDA graph), `prefills` and `prefill_tokens`.

A setting that fails, or takes longer than --setting-seconds, is told with its reason and left out; with less than
--least-seconds of --seconds left, counted from the start of the script, none is begun, and what is under way then ends.
With --gpus N settings are measured side by side, each on a GPU of its own, by a process of its own. With --at-once N so
many servers of a GPU are started at the same moment, with --cache-tokens each, and then measured one after the other:
the others are idle meanwhile. A start takes 30 to 70 s, a way 10 to 20 s. With --profile N SGLang then traces so many
passes, --profile-after seconds after a round began: its first turns are written then. Told are `step_ms`, the share of
it in which the GPU is `busy`, and the kernels that take longest, in milliseconds of a step.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from server_profile import facts as profile_facts
from server_profile import request as request_profile
from server_settings import AHEAD, ALL, BASES, SETTINGS, SHARE, Setting, Way

T = TypeVar("T")


def show(**values: Any) -> None:
    print(json.dumps(values), flush=True)


# -- in a process that measures: torch and the trainer are imported there alone ----------------------------------------


class Bench:
    """One GPU, its settings one after the other."""

    def __init__(self, given: argparse.Namespace, work: Path, deadline: float) -> None:
        from memory_step import write_model  # noqa: PLC0415 (torch takes seconds)

        self.given, self.work, self.deadline = given, work, deadline
        self.model = work / "model"
        write_model(self.model, given.shape, given.tokenizer)
        self.round = 0

    async def all(self, settings: list[Setting]) -> None:
        """Start as many servers as go at once, measure one after the other, and so on."""
        waiting = list(settings)
        while waiting:
            some, waiting = waiting[: self.given.at_once], waiting[self.given.at_once :]
            left = self.deadline - time.perf_counter()
            if left < self.given.least_seconds:
                for setting in [*some, *waiting]:
                    show(setting=setting.name, left_out=f"{left:.0f} s are left of --seconds")
                return
            started = await asyncio.gather(*(self.attempt(one, self.start(one), True) for one in some))
            running = [(one, found) for one, found in zip(some, started, strict=True) if found is not None]
            try:
                for setting, (engine, server, _, log) in running:
                    await self.attempt(setting, self.ways(setting, engine, server, log))
            finally:
                for _, (engine, _, process, _) in running:
                    await engine.pool.close()
                    await asyncio.shield(process.stop())

    async def attempt(self, setting: Setting, doing: Coroutine[Any, Any, T], starting: bool = False) -> T | None:
        """What it returns, in the time that a setting has; None where it failed, which is told."""
        limit = min(self.deadline - time.perf_counter(), self.given.setting_seconds)
        try:
            async with asyncio.timeout(limit):
                return await doing
        except TimeoutError:
            what = "its server was not there" if starting else "it was not measured"
            show(setting=setting.name, failed=f"{what} within {limit:.0f} s")
        except Exception as error:
            show(setting=setting.name, failed=f"{type(error).__name__}: {error}"[:600])
        return None

    def config(self, order: str) -> Any:
        from memory_step import Case, like, settings  # noqa: PLC0415

        from trainer.config import RunConfig  # noqa: PLC0415

        plain = settings(like(self.given), self.model, self.work, Case(order=order))
        return RunConfig.model_validate(plain)

    async def start(self, setting: Setting) -> tuple[Any, Any, Any, Path]:
        """Engine, server, its process and its log."""
        from trainer.engines.dialects import make_dialect  # noqa: PLC0415
        from trainer.engines.http import Limits, ServerPool  # noqa: PLC0415
        from trainer.engines.launching import launch  # noqa: PLC0415
        from trainer.engines.served import ServedEngine  # noqa: PLC0415
        from trainer.serving.host import server_options  # noqa: PLC0415

        kind = self.given.engine
        base = BASES[kind] if self.given.base_flags is None else self.given.base_flags
        if setting.less:
            base = base.replace(setting.less, "")
        flags = tuple(shlex.split(f"{base} {setting.flags}"))
        if kind == "sglang" and self.given.at_once > 1:
            flags += ("--max-total-tokens", str(self.given.cache_tokens))
        log = self.given.logs / f"{setting.name}.log"
        options = server_options(
            self.config("paper"), self.model, log, setting.name, (0,) * (kind == "sglang"), "127.0.0.1"
        )
        options = replace(options, flags=flags, env=setting.env, fp32_head=setting.fp32_head)
        began = time.perf_counter()
        server, process = await launch(kind, options)
        started = time.perf_counter() - began
        dialect = make_dialect(kind)
        # A busy CPU's first answer takes minutes.
        pool = ServerPool(dialect.health_path, Limits(control=300.0))
        engine = ServedEngine(pool, dialect, self.model, {2})
        try:
            version = await engine.join(server)
        except BaseException:
            await asyncio.shield(process.stop())
            raise
        shown = {"server": f"{dialect.title} {version}", "start_s": round(started, 1), "flags": " ".join(flags)}
        show(setting=setting.name, **shown)
        return engine, server, process, log

    async def ways(self, setting: Setting, engine: Any, server: Any, log: Path) -> None:
        vocabulary = json.loads((self.model / "config.json").read_text())["vocab_size"]
        await self.measure(engine, server, setting.ways[0], self.given.warm_documents)
        for mean in self.given.mean_tokens:
            engine.stop_ids = [2, *(range(3, vocabulary, mean) if mean else ())]
            for way in setting.ways:
                for _ in range(self.given.rounds):
                    found = await self.measure(engine, server, way, self.given.documents, log)
                    show(setting=setting.name, way=way.name, mean_tokens=mean or "all", **found)
        if steps := self.given.profile:
            engine.stop_ids = [2]
            await self.profile(setting, engine, server, steps)

    async def profile(self, setting: Setting, engine: Any, server: Any, steps: int) -> None:
        """Ask once more, with the server's profiler at work while the first turns are sampled."""
        folder = self.given.logs / f"{setting.name}-profile"
        asking = asyncio.ensure_future(request_profile(engine.pool, server, folder, steps, self.given.profile_after))
        await self.measure(engine, server, setting.ways[0], self.given.documents)
        await asking
        show(setting=setting.name, steps=steps, profile=profile_facts(folder, steps))

    async def measure(
        self, engine: Any, server: Any, way: Way, documents: int, log: Path | None = None
    ) -> dict[str, Any]:
        from memory_step import Coin  # noqa: PLC0415
        from rollout import CACHES  # noqa: PLC0415

        from trainer.agents import make_agent  # noqa: PLC0415
        from trainer.rollout.batch import distinct_prompt_tokens  # noqa: PLC0415
        from trainer.rollout.controller import RolloutController, SamplingPlan  # noqa: PLC0415
        from trainer.tasks import make_source  # noqa: PLC0415
        from trainer.train.model import load_tokenizer  # noqa: PLC0415

        config = self.config(way.order)
        self.round += 1
        source = make_source(config)
        controller = RolloutController(
            make_agent(config, load_tokenizer(self.model)), engine, config.seed, reward=Coin(None)
        )
        engine.sharing.enabled, engine.sharing.ahead = way.share, way.ahead
        tasks = [source.train(self.round * 1000 + i) for i in range(documents)]
        prepared = [controller.agent.prepare(task) for task in tasks]
        await engine.pool.call(server, "POST", CACHES[self.given.engine], {}, 60)
        ends: list[float] = []
        jobs = []
        seen = log.stat().st_size if log is not None else 0
        before, waits = replace(engine.stats), engine.sharing.waits
        began, cpu = time.perf_counter(), time.process_time()
        plan = SamplingPlan(f"round-{self.round}", config.rollout.group_size, 1.0)
        for task, one in zip(tasks, prepared, strict=True):
            job = asyncio.ensure_future(controller.group(task, one, plan))
            job.add_done_callback(lambda _: ends.append(time.perf_counter()))
            jobs.append(job)
        try:
            groups = await asyncio.gather(*jobs)
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
        seconds, spent = time.perf_counter() - began, time.process_time() - cpu
        controller.check(groups)
        turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
        sampled = sum(len(turn.completion.token_ids) for turn in turns)
        prompts = sum(len(turn.prompt_ids) for turn in turns)
        now = engine.stats
        distinct = sum(map(distinct_prompt_tokens, groups))
        computed = now.prompt_tokens - before.prompt_tokens - (now.served_tokens - before.served_tokens)
        return {
            "tokens_per_s": round(sampled / seconds),
            "seconds": round(seconds, 2),
            "requests": len(turns),
            "ahead_requests": now.ahead_requests - before.ahead_requests,
            "waits": engine.sharing.waits - waits,
            "sampled_tokens": sampled,
            "prompt_tokens": prompts,
            "computed_tokens": computed,
            "cached_share": round(1 - computed / prompts, 3),
            "shareable_share": round(1 - distinct / prompts, 3),
            "tail_s": round(max(ends) - sorted(ends)[int(0.9 * (len(ends) - 1))], 2),
            "client_cpu": round(spent / seconds, 2),
            **self.roofline(now, before, seconds),
            **(log_facts(log, seen) if log is not None else {}),
        }

    def roofline(self, now: Any, before: Any, seconds: float) -> dict[str, float]:
        import torch  # noqa: PLC0415

        from trainer.rollout.roofline import DecodeRoofline  # noqa: PLC0415

        gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
        limit = DecodeRoofline.of(self.model, gpu, 1, 1)
        if limit is None:
            return {}
        tokens = now.sampled_tokens - before.sampled_tokens
        context = now.context_tokens - before.context_tokens
        requests = now.request_seconds - before.request_seconds
        return {"roofline": round(limit.share(tokens, context, requests, seconds), 3)}


def log_facts(log: Path, start: int) -> dict[str, Any]:
    """What SGLang logged of its batches from a position on; nothing where it logged nothing of the kind."""
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode("utf-8", "replace").split("\n")
    decoding = [line for line in lines if "Decode batch" in line]
    prefills = [line for line in lines if "Prefill batch" in line]
    speeds = [
        float(found[1]) for line in decoding if (found := re.search(r"gen throughput \(token/s\): ([\d.]+)", line))
    ]
    graphs = [found[1] == "True" for line in decoding if (found := re.search(r"cuda graph: (True|False)", line))]
    tokens = [int(found[1]) for line in prefills if (found := re.search(r"#new-token: (\d+)", line))]
    facts: dict[str, Any] = {}
    if speeds:
        facts["decode_tokens_per_s"] = round(statistics.median(speeds))
    if graphs:
        facts["graph_share"] = round(sum(graphs) / len(graphs), 2)
    if prefills:
        facts |= {"prefills": len(prefills), "prefill_tokens": sum(tokens)}
    return facts


def measure(given: argparse.Namespace, settings: list[Setting], deadline: float) -> None:
    given.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rollout-settings-") as name:
        began = time.perf_counter()
        bench = Bench(given, Path(name), deadline)
        show(shape=given.shape, model_written_s=round(time.perf_counter() - began, 1), **_hardware())
        asyncio.run(bench.all(settings))


def _hardware() -> dict[str, str]:
    import torch  # noqa: PLC0415

    return {"gpu": torch.cuda.get_device_name(0)} if torch.cuda.is_available() else {"gpu": "none"}


# -- the process that was started: shares the settings out, and puts the ratios in -------------------------------------


class Table:
    """Prints lines as they come, with the ratio over the first setting's first way, turns of the same lengths."""

    def __init__(self, first: str) -> None:
        self.first = first
        self.base: dict[Any, float] = {}  # of each length of turns
        self.waiting: list[dict[str, Any]] = []
        self.best: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    def add(self, line: str) -> None:
        with self.lock:
            try:
                values = json.loads(line)
            except ValueError:
                print(line.rstrip(), file=sys.stderr, flush=True)
                return
            if "tokens_per_s" not in values:
                show(**values)
                return
            if values["setting"] == self.first:
                self.base.setdefault(values["mean_tokens"], values["tokens_per_s"])
            self.waiting.append(values)
            if values["mean_tokens"] in self.base:
                self.flush()

    def flush(self) -> None:
        for values in self.waiting:
            base = self.base.get(values["mean_tokens"])
            ratio = {"ratio": round(values["tokens_per_s"] / base, 3)} if base else {}
            show(**values, **ratio)
            self.best.append({name: values[name] for name in ("setting", "way", "mean_tokens", "tokens_per_s")} | ratio)
        self.waiting.clear()

    def end(self) -> None:
        self.flush()
        self.best.sort(key=lambda one: -one["tokens_per_s"])
        show(best=self.best[:10])


def chosen(given: argparse.Namespace) -> list[Setting]:
    also = []
    for text in given.also:
        name, _, flags = text.partition("=")
        also.append(Setting(name, flags, "asked for", (SHARE, AHEAD)))
    settings = [*SETTINGS[given.engine], *also]
    unknown = set(given.only) - {setting.name for setting in settings}
    if unknown:
        raise SystemExit(f"no setting of the name {', '.join(sorted(unknown))}: see --list")
    if given.only:
        by_name = {setting.name: setting for setting in settings}
        settings = [by_name[name] for name in given.only]
    if given.ways:
        ways = tuple(way for way in ALL if way.name in given.ways)
        settings = [replace(setting, ways=ways) for setting in settings]
    return settings


@contextlib.contextmanager
def ended(children: list[subprocess.Popen[str]]) -> Iterator[None]:
    """No process is left behind, nor the server that it started: these end with their parent's connection."""
    try:
        yield
    finally:
        for child in children:
            if child.poll() is None:
                child.terminate()
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(20)


def share_out(given: argparse.Namespace, settings: list[Setting], deadline: float) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(given.gpus)))).split(",")
    table = Table(settings[0].name)
    children, readers = [], []
    with ended(children):
        for number in range(min(given.gpus, len(settings))):
            mine = [setting.name for setting in settings[number :: given.gpus]]
            command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--child", "--only", *mine]
            command += ["--seconds", str(deadline - time.perf_counter())]
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible[number]} if given.engine == "sglang" else None
            child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            children.append(child)
            assert child.stdout is not None
            reader = threading.Thread(target=lambda lines=child.stdout: [table.add(line) for line in lines])
            reader.start()
            readers.append(reader)
        for reader in readers:
            reader.join()
    table.end()


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", nargs="?", help="folder with an instruction model's tokenizer")
    parser.add_argument("--shape", choices=("1.5B", "135M", "tiny"), default="1.5B")
    parser.add_argument("--engine", choices=("sglang", "vllm"), default="sglang")
    parser.add_argument("--flags", dest="base_flags", help="base flags of every server, instead of the script's own")
    parser.add_argument("--only", nargs="+", default=[], help="settings by name, in this order")
    parser.add_argument("--also", nargs="+", default=[], help="more settings: NAME=FLAGS")
    parser.add_argument("--ways", nargs="+", default=[], help='only these, such as "section_first share"')
    parser.add_argument("--seconds", type=float, default=600.0, help="for everything")
    parser.add_argument("--setting-seconds", type=float, default=240.0, help="for one start and its rounds")
    parser.add_argument("--least-seconds", type=float, default=60.0, help="with less left no setting is begun")
    parser.add_argument("--rounds", type=int, default=1, help="of every way of a setting")
    parser.add_argument("--documents", type=int, default=32)
    parser.add_argument("--warm-documents", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--mean-tokens", type=int, nargs="+", default=[0], help="of a turn, at random; 0: 256 for all")
    parser.add_argument("--profile", type=int, default=0, metavar="STEPS", help="of SGLang, by the GPU's kernels")
    parser.add_argument("--profile-after", type=float, default=2.0, metavar="SECONDS", help="of a round's begin")
    parser.add_argument("--gpus", type=int, default=1, help="settings side by side, one on each GPU")
    parser.add_argument("--at-once", type=int, default=1, help="servers that are started at once on a GPU")
    parser.add_argument("--cache-tokens", type=int, default=700_000, help="of each SGLang server, with several at once")
    parser.add_argument("--logs", type=Path, default=Path("rollout-settings"), help="folder for the servers' logs")
    parser.add_argument("--list", action="store_true", help="print the settings and what each may bring")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    settings = chosen(given)
    if given.list:
        for setting in settings:
            ways = [way.name for way in setting.ways]
            show(setting=setting.name, flags=setting.flags, env=setting.env, why=setting.why, ways=ways)
        return
    if not given.tokenizer:
        parser.error("the folder of a tokenizer is needed")
    if given.child:
        measure(given, settings, began + given.seconds)
    else:
        share_out(given, settings, began + given.seconds)


if __name__ == "__main__":
    main()
