"""Whether the section may stand before the memory: what is learned with either order, the problem repeated or not.

    python3 benchmarks/prompt_order.py tiny --out FOLDER [--jobs 16] [--seconds 900] [key=value …]
    python3 benchmarks/prompt_order.py 135M --model MODEL --out FOLDER [--jobs 3] [--seconds 900] --flags="…"

Real runs of the trainer (`python -m trainer`) of a preset: every seed with each of four wordings, the same seeds, steps
and held-out questions. `tiny` builds its model from nothing on one CPU thread a run (three seeds, 60 steps); `135M`
is SmolLM2-135M-Instruct's folder on the GPUs that are visible, which the runs share (two seeds, 20 steps): servers of
one GPU start one after another, for each takes its share of the memory that it finds free. Any setting can be given as
key=value. Warm-ups are kept in FOLDER/cache, and runs of one wording and seed share theirs.

Printed: a JSON line a run as soon as it is over (also in FOLDER/runs.jsonl), and at the end a table: held-out accuracy
before and after at the longest trained length and at 16 times that, as a mean over the seeds, with the interval of all
their questions together (`evaluation.metrics.score_interval`, 95 %), and what each seed gained or lost against the
paper's order. The same command goes on where it was: runs that are complete are read, interrupted ones go on from their
recover checkpoint; with other settings it is refused. Runs are interrupted 45 s before --seconds are over, so that they
can write their recover checkpoint, and the table has what is there.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml
from gpu_suite import visible_gpus

from clusterkit.config.overrides import parse_overrides
from clusterkit.config.resolve import resolve
from evaluation.metrics import score_interval
from trainer.config import RunConfig, flatten
from trainer.errors import UserError
from trainer.files import write_atomic
from trainer.launch.retries import REFUSED
from trainer.paths import RunPaths
from trainer.serving import registry

ROOT = Path(__file__).resolve().parents[1]
ARMS = {
    "paper": ("paper", False),
    "paper+repeat": ("paper", True),
    "section_first": ("section_first", False),
    "section_first+repeat": ("section_first", True),
}
MEMORY = "rollout.gpu_memory_fraction"
"""As --jobs and the GPUs are; changes nothing that is learned."""
OWN = {"agent.prompt_order", "agent.repeat_problem", "seed", "train.total_steps", "eval.num_tasks", "trial_name"}
"""Settings that options say."""
FAR = 16
"""Times the longest trained document."""
GRACE_SECONDS = 45.0
"""For an interrupted run to finish its step, write its recover checkpoint and end its servers."""
STARTS = 3
"""Of a run that fails: another may have taken the memory that its server began with."""
STOP = threading.Event()
STARTING: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
"""By GPU, held while a server starts on it."""
PRINTING = threading.Lock()


@dataclass(frozen=True)
class Kind:
    """seeds, steps, tasks: by default. settings: of every run of the preset."""

    seeds: tuple[int, ...]
    steps: int
    tasks: int
    settings: tuple[str, ...]
    jobs: int


KINDS = {
    "tiny": Kind((11, 12, 13), 60, 256, ("train.threads=1",), os.cpu_count() or 1),
    # Room for the repeated problem, the same for all.
    "135M": Kind((1, 2), 20, 128, ("model.context_window=704",), 1),
}


@dataclass(frozen=True)
class Run:
    """One run: where it stands in the table, and its configuration."""

    arm: str
    seed: int
    config: RunConfig

    @property
    def logs(self) -> Path:
        return RunPaths.of(self.config).logs

    def summary(self) -> dict[str, Any] | None:
        """What a complete run left; None of any other."""
        try:
            found: dict[str, Any] = json.loads((self.logs / "summary.json").read_text())
        except (OSError, ValueError):
            return None
        return found if found.get("table") and found["global_step"] >= self.config.train.total_steps else None

    def record(self) -> dict[str, Any] | None:
        """What is printed of a complete run. Accuracies: None where it was not measured."""
        summary = self.summary()
        if summary is None:
            return None
        lines = [json.loads(line) for line in (self.logs / "metrics.jsonl").read_text().splitlines() if line]
        steps = [line for line in lines if line["kind"] == "step"]
        wanted = ("before", "after", "sampled_before", "sampled_after")
        table = {str(r["chunks"]): {name: r[name] for name in wanted} for r in summary["table"]}
        return {
            "arm": self.arm,
            "seed": self.seed,
            "steps": summary["global_step"],
            "tasks": summary["num_tasks"],
            "accuracy": table,  # by sections of a document, 0: as trained
            "seconds": summary["time_split"],
            "step_s": round(statistics.median(step["step_time_s"] for step in steps), 3),
            **{name: steps[-1]["stats"][name] for name in ("cached_share",) if name in steps[-1]["stats"]},
        }


def runs(arguments: argparse.Namespace, out: Path) -> list[Run]:
    """All runs, seed by seed, so that what is there after an interruption can be compared."""
    kind = KINDS[arguments.preset]
    found = []
    for seed in arguments.seeds or kind.seeds:
        for arm in arguments.arms:
            order, repeat = ARMS[arm]
            steps = kind.steps if arguments.steps is None else arguments.steps
            config = resolve(
                arguments.preset,
                None,
                [
                    f"seed={seed}",
                    f"agent.prompt_order={order}",
                    f"agent.repeat_problem={str(repeat).lower()}",
                    f"experiment_name=prompt-order-{arguments.preset}",
                    f"trial_name={arm.replace('+', '-')}-seed{seed}-steps{steps}",
                    f"fileroot={out / 'runs'}",
                    f"cache_dir={out / 'cache'}",
                    f"train.total_steps={steps}",
                    f"eval.num_tasks={kind.tasks if arguments.tasks is None else arguments.tasks}",
                    "eval.split=test",
                    "eval.every_steps=0",
                    "eval.blank_memory=false",
                    "rollout.save_trajectories=false",
                    "monitor.tensorboard=false",
                    *([f"model.path={Path(arguments.model).resolve()}"] if arguments.model else []),
                    *([f"servers.flags={json.dumps(shlex.split(arguments.flags))}"] if arguments.flags else []),
                    *kind.settings,
                    *arguments.settings,
                ],
            ).config
            longest = config.task.max_chunks
            final = config.eval.model_copy(update={"final_chunks": [longest, FAR * longest]})
            found.append(Run(arm, seed, config.model_copy(update={"eval": final})))
    return found


def changed(run: Run, out: Path) -> list[str]:
    """Settings that differ from those with which the run was started in this folder."""
    try:
        before = flatten(RunConfig.model_validate(yaml.safe_load(file_of(run, out).read_text())))
    except FileNotFoundError:
        return []
    except (ValueError, yaml.YAMLError):
        return ["version of clusterkit"]
    now = flatten(run.config)
    return [name for name in now if name != MEMORY and before.get(name) != now[name]]


def file_of(run: Run, out: Path) -> Path:
    return out / f"{run.config.trial_name}.yaml"


def carry_out(run: Run, out: Path, gpu: str, deadline: float) -> None:
    """Train a run until it is complete or time is over, then print its line."""
    for _ in range(STARTS):
        if run.summary() is not None or train(run, out, gpu, deadline) in (0, REFUSED):
            break
    tell(run, out)


def train(run: Run, out: Path, gpu: str, deadline: float) -> int:
    """One start of a run, to its end or the deadline's; its exit code, 0 where no time is left for it."""
    file = file_of(run, out)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "CUDA_VISIBLE_DEVICES": gpu,
    }
    if not gpu:
        environment["OMP_NUM_THREADS"] = "1"

    def over() -> bool:
        return STOP.is_set() or time.monotonic() >= deadline

    waits = gpu and run.config.engine != "embedded"
    with STARTING[gpu] if waits else nullcontext():
        if over():
            return 0
        write_atomic(file, yaml.safe_dump(run.config.model_dump(mode="json")))
        with PRINTING:
            print(f"{run.arm}, seed {run.seed}: training, {file.with_suffix('.log')}", file=sys.stderr, flush=True)
        with file.with_suffix(".log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "trainer", str(file)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # a Ctrl-C reaches it once, from here
            )
        while waits and process.poll() is None and not over() and not has_server(run):
            STOP.wait(0.5)
    while process.poll() is None and not over():
        STOP.wait(0.5)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def has_server(run: Run) -> bool:
    return any(one.state == "ready" and one.alive_here() for one in registry.read(registry.folder_of(run.logs)))


def tell(run: Run, out: Path) -> None:
    record = run.record()
    if record is None:
        log = out / f"{run.config.trial_name}.log"
        record = {"arm": run.arm, "seed": run.seed, "incomplete": log.read_text()[-500:] if log.exists() else "no time"}
    with PRINTING, (out / "runs.jsonl").open("a") as file:
        print(json.dumps(record), flush=True)
        file.write(json.dumps(record) + "\n")


def table(complete: dict[tuple[str, int], dict[str, Any]], arms: list[str], longest: int) -> list[str]:
    """Lines of a Markdown table."""
    lengths = [longest, FAR * longest]
    head = [f"{n} sections, {when}" for n in lengths for when in ("before", "after")]
    head += [f"{n} sections, against paper, by seed" for n in lengths]
    found = [f"| wording | seeds | {' | '.join(head)} |", "|---" * (len(head) + 2) + "|"]
    for arm in arms:
        seeds = sorted(seed for other, seed in complete if other == arm)
        if not seeds:
            found.append(f"| {arm} | none complete |" + " |" * len(head))
            continue
        cells = [share(complete, arm, seeds, n, when) for n in lengths for when in ("before", "after")]
        cells += [", ".join(difference(complete, arm, seed, n) for seed in seeds) for n in lengths]
        found.append(f"| {arm} | {', '.join(map(str, seeds))} | {' | '.join(cells)} |")
    return found


def share(complete: dict[tuple[str, int], dict[str, Any]], arm: str, seeds: list[int], chunks: int, when: str) -> str:
    """Mean over the seeds in %, and the interval of their questions; rewards are 0 or 1, so a mean is a count."""
    scores: list[float] = []
    for seed in seeds:
        record = complete[arm, seed]
        value = record["accuracy"][str(chunks)][when]
        if value is None:
            return "not measured"
        right = round(value * record["tasks"])
        scores += [1.0] * right + [0.0] * (record["tasks"] - right)
    low, high = score_interval(scores)
    return f"{100 * statistics.mean(scores):.1f} ({100 * low:.1f} … {100 * high:.1f})"


def difference(complete: dict[tuple[str, int], dict[str, Any]], arm: str, seed: int, chunks: int) -> str:
    """Points after training above the paper's order, same seed and questions."""
    if arm == "paper":
        return "·"
    if ("paper", seed) not in complete:
        return "?"
    after = [complete[name, seed]["accuracy"][str(chunks)]["after"] for name in (arm, "paper")]
    return f"{100 * (after[0] - after[1]):+.1f}"


def checked_runs(parser: argparse.ArgumentParser, arguments: argparse.Namespace, out: Path) -> list[Run]:
    """All runs; ends the command with one sentence where they cannot be, or are there with other settings."""
    try:
        if own := parse_overrides(arguments.settings).keys() & OWN:
            parser.error(f"{', '.join(sorted(own))}: --arms, --seeds, --steps and --tasks say that")
        wanted = runs(arguments, out)
    except UserError as error:
        parser.error(str(error))
    for run in wanted:
        if names := changed(run, out):
            parser.error(
                f"{out} has {run.config.trial_name} with another {', '.join(names)}: name another folder for --out"
            )
    return wanted


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=KINDS)
    parser.add_argument("settings", nargs="*", metavar="key=value")
    parser.add_argument("--out", type=Path, required=True, help="folder of runs, cache and runs.jsonl; kept")
    parser.add_argument("--model", default="", help="135M: folder of SmolLM2-135M-Instruct")
    parser.add_argument("--seeds", type=int, nargs="+", help="[11 12 13, 135M: 1 2]")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--steps", type=positive, help="[60, 135M: 20]")
    parser.add_argument("--tasks", type=positive, help="held-out questions of every length [256, 135M: 128]")
    parser.add_argument("--jobs", type=positive, help="runs side by side; tiny: as many as cores, 135M: 1")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all runs together, 45 to finish included")
    parser.add_argument("--flags", default="", help="135M: more options for the servers")
    arguments = parser.parse_intermixed_args()
    if (arguments.preset == "135M") != bool(arguments.model):
        parser.error("--model FOLDER belongs to 135M, and 135M needs it")
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell in the background has them ignored
        signal.signal(number, signal.default_int_handler)
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    jobs = arguments.jobs or KINDS[arguments.preset].jobs
    gpus = visible_gpus() if arguments.model else []
    if arguments.model:
        if not gpus:
            parser.error("135M needs a GPU, and none is visible")
        side_by_side = -(-jobs // len(gpus))
        arguments.settings.insert(0, f"{MEMORY}={min(0.4, round(0.45 / side_by_side, 2))}")
    wanted = checked_runs(parser, arguments, out)
    deadline = time.monotonic() + arguments.seconds - GRACE_SECONDS
    places: queue.SimpleQueue[str] = queue.SimpleQueue()
    for number in range(jobs):
        places.put(gpus[number % len(gpus)] if gpus else "")

    def place_and_run(run: Run) -> None:
        place = places.get()
        try:
            carry_out(run, out, place, deadline)
        finally:
            places.put(place)

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(place_and_run, run) for run in wanted]
        try:
            for future in futures:
                future.result()
        except KeyboardInterrupt:
            STOP.set()
            print("interrupting the runs …", file=sys.stderr, flush=True)
        except OSError as error:  # a full disk, say
            STOP.set()
            parser.exit(1, f"{parser.prog}: {error}\n")
    complete = {(run.arm, run.seed): record for run in wanted if (record := run.record())}
    print("\n".join(table(complete, arguments.arms, wanted[0].config.task.max_chunks)))
    return 130 if STOP.is_set() else int(len(complete) < len(wanted))


if __name__ == "__main__":
    sys.exit(main())
