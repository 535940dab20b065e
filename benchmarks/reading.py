"""How well it reads, and its controls: trains, evaluates every arm at every length, keeps records, draws them.

    python3 benchmarks/reading.py run QUESTIONS --out FOLDER [--supervised CHECKPOINT] [--seconds 580] [--set KEY=VALUE]
    python3 benchmarks/reading.py draw RECORDS

QUESTIONS is a folder of `clusterkit data prepare reading`. `run` trains --preset (135M_read) with every seed, and again
with rewards that are shuffled over the batch, and asks every held-out question of dev and test among each number of
documents: the trained checkpoints, the supervised start alone, and the base model. Ways to read: the memory; a blank
memory; the question alone; the full context cut to the window; BM25's top 2 documents; the gold documents. The last
three go through the same trained reader in its own wording (reader=agent). The two controls that show what training
did without the memory, shuffled and untrained, read with their memory and with a blank one, at --control-documents.

Each checkpoint's arms are one evaluation, so a server starts once. Every stage is skipped where its result is there,
and the same command goes on after an interruption; after --seconds a stage is interrupted in order. Records are brought
up to date after every evaluation; seeds that were measured on other machines stay in them. --jobs 3 works on three
seeds at a time, dealt to the GPUs in turn; commands with other --seeds may work on one --out at the same time. Printed:
a JSON line a stage (also in FOLDER/stages.jsonl), and at the end what `draw` prints: Markdown tables. `draw` writes the
picture beside the records, from them alone. --set gives every run a setting; FOLDER belongs to one QUESTIONS, preset
and model, and their settings.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml
from gpu_suite import visible_gpus
from reading_picture import picture
from reading_records import TOP_K, Records, measured_with, tables

from clusterkit.config.resolve import resolve
from clusterkit.evaluate.request import make_request
from evaluation.config import EvalConfig
from evaluation.steps import checkpoints_in
from trainer.config import RunConfig
from trainer.errors import UserError
from trainer.files import sha256, write_atomic
from trainer.paths import RunPaths

ROOT = Path(__file__).resolve().parents[1]
ALL = ["memagent", "blank_memory", "no_context", "long_context", "rag", "gold"]
FEW = ["memagent", "blank_memory"]
SHAPING = ("data_names", "num_questions", "split", "methods", "rag_top_k", "reader", "n_sampling", "agent")
"""Of an evaluation's settings those that shape its answers, wherever its checkpoint and data lie."""
GRACE_SECONDS = 45.0
"""For an interrupted run to finish its step, write its recover checkpoint and end its servers."""


CROWDED = "leave no GPU memory for the KV cache"
"""Said by a server beside which another one took memory while it measured what is free: it is started again."""
STARTS = 4
"""In all. Of six evaluations that began at one moment on three GPUs one was crowded out twice."""


class TimeIsOverError(Exception):
    """A stage was interrupted, or would begin, after --seconds; the same command goes on."""


@dataclass
class Bench:
    """What was asked for.

    deadline: on the monotonic clock. gpu: the one that its stages may use; empty: all. stop: ends them in order.
    """

    given: argparse.Namespace
    out: Path
    records: Path
    deadline: float
    device: str
    gpu: str = ""
    stop: threading.Event = field(default_factory=threading.Event)

    def config(self, kind: str, seed: int) -> RunConfig:
        """The settings of a run, also those by which other checkpoints are asked."""
        return resolve(self.given.preset, self.given.task, self._settings(kind, seed)).config

    def _settings(self, kind: str, seed: int) -> list[str]:
        # The control on shuffled rewards begins where the run of its seed began reinforcement.
        start = self._start(seed) if kind == "shuffled" or self.given.supervised else ""
        model = start or self.given.model
        return [
            f"task.path={self.given.questions.resolve()}",
            f"seed={seed}",
            *self._place(kind, seed),
            f"control.rewards={'shuffled' if kind == 'shuffled' else 'true'}",
            *([f"model.path={model}"] if model else []),
            *(["supervised.dataset="] if start else []),
            *([f"rollout.gpu_memory_fraction={self.given.memory_fraction}"] if self.given.memory_fraction else []),
            *([f"servers.flags={json.dumps(shlex.split(self.given.flags))}"] if self.given.flags else []),
            *self.given.settings,
        ]

    def _place(self, kind: str, seed: int) -> list[str]:
        return ["experiment_name=reading", f"trial_name={kind}-seed{seed}", f"fileroot={self.out / 'runs'}"]

    def _start(self, seed: int) -> str:
        """The supervised start of a seed: the one that is named, or what its run keeps; empty where there is none."""
        if self.given.supervised:
            return str(Path(self.given.supervised).resolve())
        placed = resolve(self.given.preset, self.given.task, self._place("trained", seed)).config
        kept = RunPaths.of(placed).supervised.checkpoints
        return str(kept) if (kept / "config.json").is_file() else ""

    def train(self, kind: str, seed: int) -> str:
        """Train a run to its end, unless it is complete; its last checkpoint."""
        paths = RunPaths.of(self.config(kind, seed))
        if not _is_complete(paths.logs):
            preset = ["--preset", self.given.preset, *(["--task", self.given.task] if self.given.task else [])]
            command = ["-m", "clusterkit.cli.main", "train", "--here", *preset, *self._settings(kind, seed)]
            self.stage(f"train {kind} seed {seed}", command)
        return str(checkpoints_in(paths.checkpoints)[-1])

    def supervised(self, seed: int) -> str:
        """The checkpoint of the supervised start. Raises UserError where there is none."""
        if found := self._start(seed):
            return found
        raise UserError(
            f"the run of seed {seed} keeps no supervised start: name the checkpoint of one with --supervised, or leave "
            "that arm out: --arms trained shuffled untrained"
        )

    def untrained(self) -> str:
        """The base model: a folder, or the name of an asset."""
        return str(self.given.model or resolve(self.given.preset, self.given.task, []).config.model.path)

    def measure(self, kind: str, seed: int, checkpoint: Callable[[], str]) -> None:
        """Ask a checkpoint everything, unless that was done, and take the results into the records.

        checkpoint: makes it, where it is not there yet; where everything was asked it is not needed any more.
        """
        with self._alone(f"{kind}-seed{seed}"):  # another command may be at it, and leave the results
            results = _results(self.request(kind, seed, ""))
            if results is None:
                request = self.request(kind, seed, checkpoint())
                file = self.out / "requests" / f"{kind}-seed{seed}.yaml"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(yaml.safe_dump(request.model_dump(), sort_keys=False, allow_unicode=True))
                name, command = f"evaluate {kind} seed {seed}", ["-m", "evaluation", str(file)]
                for left in reversed(range(STARTS)):
                    try:
                        self.stage(name, command)
                        break
                    except UserError as error:
                        if CROWDED not in str(error) or not left:
                            raise
                results = _results(request)
        if results is None:
            raise UserError(f"the evaluation of {kind}, seed {seed}, lacks answers: run the same command again")
        done = [line["device"] for line in _stages(self.out) if line["stage"] == f"evaluate {kind} seed {seed}"]
        with self._alone("records"):
            records = Records.read(self.records) if self.records.exists() else Records()
            records.add(results, kind, seed, done[-1] if done else self.device)
            records.write(self.records)

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Only one command at a time on this --out; others wait. Raises TimeIsOverError where time is over before."""
        locks = self.out / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / name).open("a") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= self.deadline or self.stop.wait(0.2):
                        raise TimeIsOverError(name) from None
            yield

    def request(self, kind: str, seed: int, checkpoint: str) -> EvalConfig:
        """What a checkpoint is asked."""
        control = kind in ("shuffled", "untrained")
        documents = self.given.control_documents if control else self.given.documents
        values = {
            "model_path": checkpoint,
            "output_path": str(self.out / "evaluations" / f"{kind}-seed{seed}"),
            "data_names": [f"ruler_hqa@{number}" for number in documents],
            "data_path": str(self.given.questions.resolve()),
            "num_questions": self.given.num_questions,
            "split": self.given.split,
            "methods": FEW if control else ALL,
            "rag_top_k": TOP_K,
            "reader": "agent",
            "n_sampling": 0,
            "server": self._server(),
        }
        return make_request(values, self.config("trained", seed), ())

    def _server(self) -> dict[str, Any]:
        server: dict[str, Any] = {"engine": self.given.engine, "flags": shlex.split(self.given.flags)}
        if self.given.memory_fraction:
            server["memory_fraction"] = self.given.memory_fraction
        return server

    def stage(self, name: str, command: list[str]) -> None:
        """Run a command of this clone to its end, and tell its seconds.

        Raises:
            TimeIsOverError: it was interrupted, or there was no time to begin.
            UserError: it failed; with the end of what it printed.
        """
        if time.monotonic() >= self.deadline or self.stop.is_set():
            raise TimeIsOverError(name)
        log = self.out / "logs" / f"{name.replace(' ', '-')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        if self.gpu:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpu
        began = time.monotonic()
        with log.open("ab") as console:
            process = subprocess.Popen(
                [sys.executable, *command],
                stdout=console,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=ROOT,
                start_new_session=True,  # a Ctrl-C reaches it once, from here
            )
            try:
                while (code := process.poll()) is None:
                    if time.monotonic() >= self.deadline or self.stop.wait(0.2):
                        code = _interrupt(process)
            except KeyboardInterrupt:
                code = _interrupt(process)
        line = {"stage": name, "seconds": round(time.monotonic() - began, 1), "code": code, "device": self.device}
        print(json.dumps(line), flush=True)
        with (self.out / "stages.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if code == 130 or code < 0:
            raise TimeIsOverError(name)
        if code:
            raise UserError(f"{name} ended with code {code}; the end of {log}:\n{log.read_text()[-1500:]}")


def _interrupt(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGINT)
    try:
        return process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def _is_complete(logs: Path) -> bool:
    try:
        lines = (logs / "metrics.jsonl").read_text().splitlines()
        return (json.loads(lines[-1])["kind"], json.loads(lines[-1])["status"]) == ("finish", "completed")
    except (OSError, ValueError, KeyError, IndexError):
        return False


def _results(request: EvalConfig) -> dict[str, Any] | None:
    """The complete results of the same request; None where there are none."""
    wanted = request.model_dump(include=set(SHAPING))
    for path in Path(request.output_path).glob("*/results.json"):
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["status"] == "complete" and {key: found["config"][key] for key in SHAPING} == wanted:
            return found
    return None


def run(bench: Bench) -> None:
    """All stages, seed by seed, so that what is there after an interruption can be compared.

    Raises:
        TimeIsOverError: not all of them were done.
        UserError: one failed; with --jobs the others went on.
    """
    given = bench.given
    _claim(
        bench.out,
        {
            "preset": given.preset,
            "task": given.task,
            "settings": given.settings,
            "start": bool(given.supervised),
            "model": given.model,
            "questions": _digest(given.questions),
        },
    )
    parts = [_without_training, *(partial(_seed, seed=seed) for seed in given.seeds)]
    if given.jobs == 1:
        for part in parts:
            part(bench)
        return
    gpus = visible_gpus()
    places: queue.SimpleQueue[str] = queue.SimpleQueue()
    for number in range(given.jobs):
        places.put(gpus[number % len(gpus)] if gpus else "")

    def placed(part: Callable[[Bench], None]) -> None:
        place = places.get()
        try:
            part(replace(bench, gpu=place))
        finally:
            places.put(place)

    with ThreadPoolExecutor(given.jobs) as pool:
        running = [pool.submit(placed, part) for part in parts]
        try:
            wait(running)
        except KeyboardInterrupt:
            bench.stop.set()
    for one in sorted(
        (e for future in running if (e := future.exception())), key=lambda e: isinstance(e, TimeIsOverError)
    ):
        raise one


def _without_training(bench: Bench) -> None:
    given = bench.given
    if "untrained" in given.arms:
        bench.measure("untrained", 0, bench.untrained)
    if given.supervised and "supervised" in given.arms:
        bench.measure("supervised", 0, lambda: bench.supervised(0))


def _seed(bench: Bench, seed: int) -> None:
    given = bench.given
    if "trained" in given.arms:
        bench.measure("trained", seed, partial(bench.train, "trained", seed))
    if "supervised" in given.arms and not given.supervised:
        bench.measure("supervised", seed, partial(bench.supervised, seed))
    if "shuffled" in given.arms:
        bench.measure("shuffled", seed, partial(bench.train, "shuffled", seed))


def _digest(questions: Path) -> str:
    """Return what tells one QUESTIONS from another: who was trained on one must not be asked what another holds out."""
    files = sorted(file for name in ("questions", "documents") for file in questions.rglob(f"{name}.jsonl*"))
    told = "".join(f"{file.relative_to(questions)} {sha256(file)}\n" for file in files)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _claim(out: Path, given: dict[str, Any]) -> None:
    """Refuse a folder whose runs have other settings."""
    file = out / "settings.json"
    if not file.exists():
        write_atomic(file, json.dumps(given))
    before = json.loads(file.read_text())
    if {**given, **before} != given:  # folders of earlier versions say less
        raise UserError(f"{out} has runs of {before}, and now {given} is asked for: name another --out")


def draw(records: Path) -> None:
    """Print the tables of records, and write their picture beside them."""
    found = Records.read(records)
    print("\n".join([*tables(found), *measured_with(found)]))
    write_atomic(records.with_suffix(".svg"), picture(found))
    print(f"picture: {records.with_suffix('.svg')}")


def _stages(out: Path) -> list[dict[str, Any]]:
    file = out / "stages.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def seconds_of_stages(out: Path) -> list[str]:
    """Lines that tell how long each stage took, over all commands that worked on it."""
    lines = _stages(out)
    names = list(dict.fromkeys((line["stage"], line["device"]) for line in lines))
    spent = [sum(line["seconds"] for line in lines if (line["stage"], line["device"]) == name) for name in names]
    rows = [f"| {stage} | {total:.0f} | {place} |" for (stage, place), total in zip(names, spent, strict=True)]
    return ["| stage | seconds | device |", "|---|---|---|", *rows, ""]


def device() -> str:
    """The GPUs that may be used, by name, or the cores of a machine without."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        if chosen := os.environ.get("CUDA_VISIBLE_DEVICES"):
            asked.append(f"--id={chosen}")
        names = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")
        return ", ".join(name.strip() for name in names if name.strip())
    except (OSError, subprocess.CalledProcessError):
        return f"{os.cpu_count()} CPU cores"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="tables and picture from records alone")
    drawing.add_argument("records", type=Path)
    running = commands.add_parser("run", help="train, evaluate, record")
    running.add_argument("questions", type=Path, help="folder of `clusterkit data prepare reading`")
    running.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    running.add_argument("--out", type=Path, required=True, help="folder of runs, evaluations and logs; kept")
    running.add_argument("--records", type=Path, help="file of records [records.jsonl in --out]")
    running.add_argument("--preset", default="135M_read")
    running.add_argument("--task")
    running.add_argument("--model", default="", help="base model; the preset's when left out")
    running.add_argument("--supervised", default="", help="checkpoint of a supervised start, from which runs begin")
    running.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arms = ["trained", "supervised", "shuffled", "untrained"]
    running.add_argument("--arms", nargs="+", choices=arms, default=arms)
    running.add_argument("--documents", type=int, nargs="+", default=[8, 16, 32, 64, 128, 200])
    running.add_argument("--control-documents", type=int, nargs="+", default=[8, 32])
    running.add_argument("--split", default="dev+test", choices=["test", "dev", "dev+test"])
    running.add_argument("--num-questions", type=int, default=0, help="only the first so many; 0: all")
    running.add_argument("--engine", default="auto", help="of the evaluations: embedded, sglang, vllm")
    running.add_argument("--flags", default="", help="more options for the servers")
    running.add_argument("--jobs", type=int, default=1, help="seeds side by side, each on the next GPU in turn")
    fraction = "of its GPU, for each server; with more --jobs than GPUs, 0.45 over the jobs of one"
    running.add_argument("--memory-fraction", type=float, default=0.0, help=fraction)
    running.add_argument("--seconds", type=float, default=86400.0, help="after which a stage is interrupted")
    given = parser.parse_args(argv)
    if given.command == "run" and given.jobs < 1:
        parser.error(f"--jobs {given.jobs}: at least 1")
    return given


def main() -> int:
    given = parse()
    try:
        if given.command == "draw":
            draw(given.records)
            return 0
        out = given.out.resolve()
        out.mkdir(parents=True, exist_ok=True)
        records = (given.records or out / "records.jsonl").resolve()
        if given.jobs > 1 and not given.memory_fraction and (gpus := visible_gpus()) and given.jobs > len(gpus):
            given.memory_fraction = round(0.45 / -(-given.jobs // len(gpus)), 2)
        bench = Bench(given, out, records, time.monotonic() + given.seconds - GRACE_SECONDS, device())
        code = 0
        try:
            run(bench)
        except TimeIsOverError as stage:
            print(f"time is over at: {stage}; the same command goes on there")
            code = 1
        print("\n".join(seconds_of_stages(out)))
        if records.exists():
            draw(records)
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
