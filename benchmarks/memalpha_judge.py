"""How much of a step a judge costs: complete training steps with a reader and judge on a server of its own.

    python3 benchmarks/memalpha_judge.py MODEL [--steps 20] [--staleness 0 4] [--gpus 1] [--judges 2] [--minutes 15]
        [--urls URL,URL] [--set KEY=VALUE …]
    python3 benchmarks/memalpha_judge.py MODEL --device cpu --engine vllm --steps 2

The agent is MODEL (SmolLM2-135M-Instruct, say) on a server that shares GPU 0 with the trainer (--gpus 2: the trainer
has a second GPU), and the judge is MODEL on two servers (--judges) beside them, on GPU 0, too; on a CPU the agent is
the tiny model and MODEL is the judge alone. Texts are generated. So small a model hardly ever calls a tool rightly; so
the judge is asked as if the agent had kept every line of the text (4 questions and 9 verdicts a trajectory, each sent:
no two are the same), and a coin is tossed on top of the rewards, so that every step trains on all that was sampled. One
run for every --staleness: with 0 sampling, scoring and training take turns, with 4 the trajectories of the next four
steps are sampled and scored meanwhile. Printed, a JSON object a line: every step as it ends; for every run the time
split of its steps and the judge's share: seconds in which the trainer waited for nothing but scores (`judge_wait_s`),
over the seconds of the steps; the limit that it is held against is 0.1. A run is ended after its share of `--minutes`,
with the steps that there are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from clusterkit.config.resolve import resolve
from trainer.agents.memory import INSERT
from trainer.config import RunConfig
from trainer.judge.servers import judge_urls, judges_folder
from trainer.paths import RunPaths, user_name
from trainer.rewards.make import make_reward

REPOSITORY = Path(__file__).parents[1]
LIMIT = 0.1
CONFIG = "CLUSTERKIT_JUDGE_COST"
"""The run's configuration, for the reward: it is given its own section only."""
PLACES = "Arnby Belk Corvale Dunmere Eskow Fallory Greth Holmsund Jarrow Kelmar Lindow Marsh".split()
NAMES = "Ada Bo Cleo Dov Edda Finn Gwen Hal Ida Jon Kit Lena Mo Nils Olga Pia".split()


class Kept:
    """What the judge is asked of one trajectory, while it reads."""

    def __init__(self, inner: Any, number: int) -> None:
        self.inner, self.number = inner, number
        self.entries: list[str] = []

    def turn_read(self, turn: dict[str, Any]) -> None:
        for line in turn["chunk"].splitlines():
            # No two are the same, as no two agents write the same: the judge is asked the same thing only once.
            self.entries.append(f"Note {self.number}: {line}")
            turn["calls"].append({"tool": INSERT, "ok": True, "store": "semantic", "content": self.entries[-1]})
        self.inner.turn_read(turn)

    def close(self) -> None:
        self.inner.close()


class JudgedCoin:
    """Mem-alpha's reward, asked of the judge as of an agent that keeps every line that it reads, plus a coin's toss."""

    def __init__(self, _config: Any) -> None:
        config = RunConfig.model_validate(yaml.safe_load(Path(os.environ[CONFIG]).read_text()))
        plain = config.reward.model_copy(update={"name": "memalpha"})
        self._inner: Any = make_reward(config.model_copy(update={"reward": plain}))
        self._coin, self._number = random.Random(0), count()

    def begin(self) -> Kept:
        return Kept(self._inner.begin(), next(self._number))

    async def score(self, task: Any, trajectory: Any) -> float:
        kept, memory = trajectory.begun, trajectory.details["memory"]
        memory["semantic"] |= {f"kept_{number}": text for number, text in enumerate(kept.entries)}
        trajectory.begun = kept.inner
        value: float = await self._inner.score(task, trajectory)
        rewards = trajectory.turn_rewards
        if rewards is None:  # none of its questions could be answered
            return value
        luck = float(self._coin.random() < 0.5)
        trajectory.turn_rewards = replace(rewards, outcome=rewards.outcome + luck)
        return value + luck

    def counts(self) -> dict[str, float]:
        counted: dict[str, float] = self._inner.counts()
        return counted


def write_texts(path: Path, count: int = 64) -> None:
    """Texts about people and towns in the schema of YuWangX/Memalpha; three chunks and four questions each."""
    draw = random.Random(1)
    rows = []
    for number in range(count):
        people = draw.sample(NAMES, 9)
        homes = {person: draw.choice(PLACES) for person in people}
        told = [f"{person} {number} was born in {home} and paints there. " * 4 for person, home in homes.items()]
        chunks = ["\n".join(told[i : i + 3]) for i in range(0, 9, 3)]
        asked = [{"question": f"Where was {p} {number} born?", "answer": homes[p]} for p in people[::3] + people[:1]]
        rows.append(
            {"instance_id": f"t{number}", "data_source": "squad", "chunks": chunks, "questions_and_answers": asked}
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def settings(arguments: argparse.Namespace, root: Path, staleness: int, urls: list[str]) -> tuple[str, list[str]]:
    """Preset and overrides of a run. urls: of the judge."""
    common = [
        *(f"fileroot={root / 'runs'}", f"train.total_steps={arguments.steps}", "experiment_name=judge-cost"),
        *(f"trial_name=staleness-{staleness}", f"judge.url={','.join(urls)}"),
        *("reward.name=memalpha_judge:JudgedCoin", f"code_dir={Path(__file__).resolve().parent}"),
        *(f"judge.model={Path(arguments.model).name}", "judge.reader=server", "judge.cache=false"),
        *("judge.answer_tokens=64", "judge.verdict_tokens=96", "judge.concurrency=256", "monitor.tensorboard=false"),
        *("eval.every_steps=0", "eval.num_tasks=2", "eval.final_chunks=[]", "eval.blank_memory=false"),
    ]
    if arguments.device == "cpu":
        small = ("rollout.batch_size=2", "rollout.group_size=2", "warmup.gate=0", "warmup.steps=20")
        return "memalpha-tiny", [*common, *small]
    write_texts(root / "texts.jsonl")
    together = "|" if arguments.gpus == 1 else "+"
    layout = (f"n_gpus_per_node={arguments.gpus}", f"allocation_mode=sglang:d1{together}fsdp:d1")
    return "memalpha-4B", [
        *common,
        *(f"model.path={arguments.model}", f"task.path={root / 'texts.jsonl'}", *layout),
        # SGLang takes its fraction of the whole GPU less what others have: 0.2 is the judge's.
        *("rollout.gpu_memory_fraction=0.45", f"rollout.max_staleness={staleness}"),
        *("model.context_window=8192", "agent.context_tokens=6144", "agent.chunk_tokens=1024"),
        *("agent.max_memory_tokens=256", "agent.tool_format=json", "train.max_tokens_per_mb=16384"),
        *("rollout.batch_size=8", "rollout.group_size=8"),
        f"servers.flags={json.dumps(shlex.split(arguments.flags))}",
    ]


@contextlib.contextmanager
def start_judges(arguments: argparse.Namespace, root: Path, deadline: float) -> Iterator[list[str]]:
    """Keep the judge's servers running; their addresses. One after the other: two that take their share of a GPU at the
    same moment each see what the other has taken, and find nothing left.
    """
    command = [sys.executable, "-m", "trainer.judge.serve", "--model", arguments.model]
    command += ["--fileroot", str(root / "runs"), "--user", user_name(), "--experiment", "judge-cost"]
    command += ["--trial", "judge", "--engine", arguments.engine]
    flags = arguments.flags
    if arguments.device == "cuda":
        command += ["--gpus", "0,"]
        share = 0.2 / arguments.judges
        flags += f" --{'mem-fraction-static' if arguments.engine == 'sglang' else 'gpu-memory-utilization'} {share:g}"
    command += [f"--flags={flags}"] if flags.strip() else []
    folder = judges_folder(root / "runs", user_name(), "judge-cost", "judge")
    judges: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(arguments.judges):
            began = time.monotonic()
            judges.append(subprocess.Popen(command, cwd=REPOSITORY))
            while len(urls := judge_urls(folder)) <= number:
                if judges[-1].poll() is not None or time.monotonic() > deadline:
                    logs = "\n".join(path.read_text(errors="replace")[-3000:] for path in folder.glob("*.log"))
                    raise SystemExit(f"the judge did not start\n{logs}")
                time.sleep(0.2)
            say({"judge": urls, "start_s": round(time.monotonic() - began, 1)})
        yield urls
    finally:
        for judge in judges:
            judge.send_signal(signal.SIGTERM)
        for judge in judges:
            judge.wait(timeout=120)


def say(what: dict[str, Any]) -> None:
    """One line, at once."""
    print(json.dumps(what), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=15.0, help="end after so long, with the steps that there are")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 4], help="rollout.max_staleness of each run")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1, help="2: one of them for the trainer alone")
    parser.add_argument("--judges", type=int, help="servers of the judge, all on GPU 0 (2; on a CPU 1)")
    parser.add_argument("--urls", help="servers of the judge that run already, with commas; none are started")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the run's configuration")
    parser.add_argument("--engine", choices=("sglang", "vllm"), default="sglang")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--keep", type=Path, help="folder for the run's files, which stay; else they are removed")
    parser.add_argument("--flags", default="", help="options of the servers' own command line, agent's and judge's")
    arguments = parser.parse_args()
    arguments.judges = arguments.judges or (2 if arguments.device == "cuda" else 1)
    with contextlib.ExitStack() as stack:
        root = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        root.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + 60 * arguments.minutes
        urls = arguments.urls.split(",") if arguments.urls else None
        urls = urls or stack.enter_context(start_judges(arguments, root, deadline))
        waiting = [0] if arguments.device == "cpu" else list(dict.fromkeys(arguments.staleness))
        failed = []
        while waiting:
            now, left = time.monotonic(), len(waiting)
            try:
                train(arguments, root, waiting.pop(0), urls, now + (deadline - now) / left)
            except SystemExit as error:  # the other run may show something
                failed.append(str(error))
    if failed:
        raise SystemExit("; ".join(failed))


def train(arguments: argparse.Namespace, root: Path, staleness: int, urls: list[str], deadline: float) -> None:
    """One run of the trainer, and what it showed."""
    preset, overrides = settings(arguments, root, staleness, urls)
    config = resolve(preset, None, [*overrides, *arguments.set]).config
    file = root / f"staleness-{staleness}.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    trainer = subprocess.Popen(
        [sys.executable, "-m", "trainer", str(file)], cwd=REPOSITORY, env={**os.environ, CONFIG: str(file)}
    )
    report(follow(trainer, RunPaths.of(config).logs / "metrics.jsonl", deadline), staleness)


def follow(trainer: subprocess.Popen[bytes], path: Path, deadline: float) -> list[dict[str, Any]]:
    """Records of the steps, each printed as it comes."""
    told = False
    steps: list[dict[str, Any]] = []
    while True:
        ended = trainer.poll() is not None
        lines = path.read_text().splitlines() if path.exists() else []
        records = [json.loads(line) for line in lines if line.startswith('{"kind": "step"') or '"step_time_s"' in line]
        for record in records[len(steps) :]:
            stats = record["stats"]
            names = (
                "r1",
                "r2",
                "r4",
                "judge_requests",
                "judge_unreadable",
                "score_seconds",
                "judge_wait_s",
                "judge_share",
            )
            shown = {name: round(stats[name], 3) for name in names if name in stats}
            say({"step": record["global_step"], "seconds": round(record["step_time_s"], 2), **shown})
        steps = records
        if ended:
            if trainer.returncode and not told:
                raise SystemExit(f"the trainer ended with {trainer.returncode}")
            return steps
        if time.monotonic() > deadline and not told:
            told = True
            say({"ended": "no time is left"})
            trainer.terminate()
        time.sleep(0.5)


def report(steps: list[dict[str, Any]], staleness: int) -> None:
    """The time split and the judge's share; of the first step, which compiles and connects, the share alone."""
    if not steps:
        raise SystemExit("no step was finished")
    counted = steps[1:] or steps
    seconds = sum(step["step_time_s"] for step in counted)
    split: dict[str, float] = {}
    for step in counted:
        for name, value in step["timings"].items():
            split[name] = split.get(name, 0.0) + value
    alone = sum(step["stats"].get("judge_wait_s", 0.0) for step in counted)
    parts = {name: round(value / seconds, 4) for name, value in split.items()}
    result = {"staleness": staleness, "steps": len(counted), "seconds": round(seconds, 2), "time_split": parts}
    each = [round(step["stats"].get("judge_wait_s", 0.0) / step["step_time_s"], 4) for step in steps]
    most = max(each[len(steps) - len(counted) :])
    shares = {"judge_share": round(alone / seconds, 4), "largest_of_a_step": most, "first_step": each[0]}
    say({**result, **shares, "limit": LIMIT})


if __name__ == "__main__":
    main()
