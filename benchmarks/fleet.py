"""A run on a simulated fleet: real controller, buffer, publisher and registrations; servers answer from a timer.

    python benchmarks/fleet.py TOKENIZER_FOLDER [--preset 1.5B_n16] [--task memagent] [--gpu H200] [--steps 3]
        [--lose server@2 --lose host@3 …] [--learn SECONDS] [--mean SHARE] [KEY=VALUE …]

The preset is taken as written, with all of its servers, each with a port of its own, in a process for every host. They
answer after as long as an H200 takes by the rates that were measured (clusterkit/capacity/speed.py), no clock is slowed
down, and all else is the trainer's (fleet_rank.py): so requests/s are those of the real run. Documents are made of the
tokenizer's own words; responses have drawn lengths, exponential around --mean of their limit. An optimizer step is a
pause of --learn seconds, and what is published are the weights of a tiny model, for which each server takes as long as
loading the preset's takes, up to a fifth longer on some.

--lose has something end in the middle of a step: `server`, the first one, after half of its requests, or, after half of
the servers' own time of the step before, all servers of the last host (`host`: connections are reset; `silent-host`:
packets vanish, which needs a network namespace of its own: sudo unshare -n sh -c "ip link set lo up; …"), the process
of rank 0 (`rank`), which is started again as a run's next attempt, or that of the first controller (`controller`, with
rollout.controllers=N). A server comes back with weights of version 0 after --back seconds.

--ray has the servers be actors of a Ray that believes in the preset's hosts and GPUs (fleet_ray.py).

Printed, a JSON object a line: what rank 0 tells of every step (fleet_rank.py), and a summary: requests/s held, CPU of
the controller's thread, the wait beyond the servers' own time, and a version change over the slowest server's.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml
from fleet_machine import load_factor

from clusterkit.capacity import speed
from clusterkit.capacity.shapes import shape_of
from clusterkit.config.resolve import resolve
from trainer.config import RunConfig
from trainer.errors import UserError
from trainer.files import disk_error
from trainer.paths import RunPaths
from trainer.placement import gpus_per_server
from trainer.serving import registry

HERE = Path(__file__).parent
QUESTIONS, DOCUMENTS, PROBLEMS = 600, 4000, 4096
LOSSES = ("server", "host", "silent-host", "rank", "controller")
LONG = 3600.0
LOADING = 3.09e9 / 0.911
"""Bytes/s with which a server loads a folder of weights from memory (docs/performance.md)."""


def show(**values: Any) -> None:
    print(json.dumps(values), flush=True)


class Fleet:
    """The servers of a run, a process for every host. hosts: names of its servers, by address."""

    def __init__(self, folder: Path, rates: Path, hosts: dict[str, list[str]]) -> None:
        self.folder, self.rates, self.hosts = folder, rates, hosts
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for address in hosts:
            self.start(address)

    def start(self, address: str) -> None:
        command = [sys.executable, str(HERE / "fleet_servers.py"), str(self.rates), "--folder", str(self.folder)]
        command += ["--address", address, *(f"--name={name}" for name in self.hosts[address])]
        self.processes[address] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def say(self, what: str, name: str, number: int = 0) -> None:
        """Have a server `lose` its process once it has taken `number` more requests, or `return`."""
        pipe = self.processes[next(a for a, names in self.hosts.items() if name in names)].stdin
        assert pipe is not None
        pipe.write(f"{what} {name} {number}\n".encode())
        pipe.flush()

    def lose_host(self, address: str) -> None:
        self.processes[address].kill()
        self.processes[address].wait()

    def close(self) -> list[dict[str, Any]]:
        """End all; what the servers tell of themselves."""
        told = []
        for process in self.processes.values():
            with suppress(BrokenPipeError):
                told += [json.loads(line) for line in process.communicate(timeout=60)[0].splitlines()]
        return told


def on_ray(config: RunConfig, folder: Path, work: Path) -> Any:
    """The servers as actors."""
    from fleet_ray import RayFleet  # noqa: PLC0415 (Ray takes seconds, and not everybody has it)

    fleet = RayFleet(config, folder, work / "rates.json")
    show(event="ray", nodes=config.n_nodes, nodes_s=fleet.nodes_s, servers=config.num_servers, placed_s=fleet.placed_s)
    return fleet


class Losses:
    """What is to end in the middle of which step. fleet: the servers. silent: hosts whose packets are dropped."""

    def __init__(self, fleet: Any, wanted: list[str], back: float) -> None:
        self.fleet, self.back = fleet, back
        self.at = {int(step): what for what, _, step in (one.partition("@") for one in wanted)}
        self.waited, self.requests = 2.0, 2.0
        self.rank: subprocess.Popen[str] | None = None
        self.controllers: list[int] = []
        self.silent: list[str] = []
        self._due: list[tuple[float, Callable[[], None]]] = []

    def hear(self, told: dict[str, Any]) -> None:
        """Take a line of rank 0's."""
        if told["event"] == "start":
            self.controllers = told["controllers"]
        elif told["event"] == "step":
            self.waited, self.requests = told["servers_own_s"], told["requests"] / told["servers"]
        elif told["event"] == "begun" and (what := self.at.pop(told["step"], None)):
            seconds = 0.0 if what == "server" else self.waited / 2
            self._later(seconds, lambda: self._lose(what, told["step"]))

    def run(self) -> float:
        """Do what is due; returns the seconds until the next is."""
        while self._due and self._due[0][0] <= time.monotonic():
            self._due.pop(0)[1]()
        return max(0.0, self._due[0][0] - time.monotonic()) if self._due else LONG

    def end(self) -> None:
        """Give packets that vanish their way back."""
        for address in self.silent:
            _packets(address, drop=False)

    def _later(self, seconds: float, work: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, work))
        self._due.sort(key=lambda one: one[0])

    def _lose(self, what: str, step: int) -> None:
        show(event="loses", what=what, step=step, at=time.time())
        last = list(self.fleet.hosts)[-1]
        if what == "server":
            self.fleet.say("lose", "server-0", max(1, round(self.requests / 2)))
            self._later(self.waited / 2 + self.back, lambda: self.fleet.say("return", "server-0"))
        elif what == "host":
            self.fleet.lose_host(last)
            self._later(self.back, lambda: self.fleet.start(last))
        elif what == "silent-host":
            self.silent.append(last)
            _packets(last, drop=True)
        elif what == "controller":
            os.kill(self.controllers[0], signal.SIGKILL)
        elif self.rank is not None:
            self.rank.kill()


def _packets(address: str, *, drop: bool) -> None:
    for option in ("-s", "-d"):
        rule = ["iptables", "-I" if drop else "-D", "INPUT", option, address, "-j", "DROP"]
        subprocess.run(rule, check=True)


def hosts_of(config: RunConfig) -> dict[str, list[str]]:
    """The servers of a run on its hosts, by loopback addresses: as many on each as its GPUs are for."""
    each = max(1, config.n_gpus_per_node // max(1, gpus_per_server(config)))
    names = [f"server-{number}" for number in range(config.num_servers)]
    return {f"127.0.1.{1 + i // each}": names[i : i + each] for i in range(0, len(names), each)}


def write_rates(file: Path, preset: RunConfig, config: RunConfig, gpu: str, mean: float, tokenizer: Any) -> None:
    """What the servers of a preset take how long for, on a GPU."""
    shape = shape_of(preset)
    assert shape is not None
    card, gpus = speed.GPUS[gpu], max(1, gpus_per_server(preset))
    prompt = speed.prefill_seconds(shape, card, 1, 0, gpus)
    weights, cached = speed.decode_seconds(shape, card, 1, gpus)
    special = set(tokenizer.all_special_ids)
    answer = tokenizer.encode(" \\boxed{7}", add_special_tokens=False)
    values = {
        "prompt": prompt,
        "context": speed.prefill_seconds(shape, card, 1, 1, gpus) - prompt,
        "weights": weights,
        "cached": cached,
        "load": speed.WIDTH * shape.parameters / LOADING,
        "mean": mean,
        "ids": [one for one in range(len(tokenizer)) if one not in special][-20_000:],
        "end": [*answer, tokenizer.eos_token_id],
        "most": max(config.agent.response_limit(kind) for kind in ("update", "final")),
    }
    file.write_text(json.dumps(values), encoding="utf-8")


def write_texts(folder: Path, tokenizer: Any) -> None:
    """HotpotQA of words that mean nothing, as many to a document as the real one has; and problems."""
    folder.mkdir()
    draw = random.Random(0)
    words = [word for word in tokenizer.get_vocab() if word.strip("\u0120\u2581").isalpha()]
    words = [word.strip("\u0120\u2581") for word in sorted(words)]
    text = lambda count: " ".join(draw.choices(words, k=count))  # noqa: E731
    with (folder / "documents.jsonl").open("w") as file:
        for number in range(DOCUMENTS):
            line = {"id": f"d{number}", "title": text(2) + f" {number}", "text": text(draw.randint(50, 150))}
            file.write(json.dumps(line) + "\n")
    with (folder / "questions.jsonl").open("w") as file:
        for number in range(QUESTIONS):
            own = [f"d{2 * number}", f"d{2 * number + 1}"]
            line = {"id": f"q{number}", "question": text(15), "answers": ["7"], "supporting": own, "own_documents": own}
            file.write(json.dumps(line) + "\n")
    with (folder / "problems.jsonl").open("w") as file:
        for number in range(PROBLEMS):
            line = {"query_id": f"p{number}", "prompt": text(80), "solutions": [f"\\boxed{{{number % 9}}}"]}
            file.write(json.dumps(line) + "\n")


def prepare(given: argparse.Namespace, work: Path) -> RunConfig:
    """Write model, texts, rates and configuration; returns the configuration that rank 0 runs with."""
    from memory_step import write_model  # noqa: PLC0415 (PyTorch takes seconds)
    from transformers import AutoTokenizer  # noqa: PLC0415

    preset = resolve(given.preset, given.task, given.settings)
    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
    write_model(work / "model", "tiny", given.tokenizer)
    write_texts(work / "texts", tokenizer)
    here = [f"fileroot={work / 'runs'}", f"model.path={work / 'model'}", "servers.engine=sglang"]
    here += ["weights.transport=disk", "train.offload=false"]  # one rank of many: it has no GPU to share
    if preset.config.task.name == "math":
        here += [f"task.path={work / 'texts' / 'problems.jsonl'}", "task.dataset=", f"task.train_size={PROBLEMS}"]
    elif preset.config.task.name == "hotpotqa":
        here += [f"task.path={work / 'texts'}"]
    config = resolve(given.preset, given.task, [*given.settings, *here]).config
    (work / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    write_rates(work / "rates.json", preset.config, config, given.gpu, given.mean, tokenizer)
    return config


def train(work: Path, given: argparse.Namespace, losses: Losses) -> list[dict[str, Any]]:
    """Run rank 0 to its end, again where it was killed; everything that it told."""
    told: list[dict[str, Any]] = []
    command = [sys.executable, str(HERE / "fleet_rank.py"), str(work)]
    command += ["--steps", str(given.steps), "--learn", str(given.learn)]
    while True:
        with (work / "rank.log").open("a") as log:
            rank = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        losses.rank = rank
        try:
            _listen(rank, losses, told)
        except BaseException:
            rank.kill()
            raise
        if rank.wait() != -signal.SIGKILL:
            return told


def _listen(rank: subprocess.Popen[str], losses: Losses, told: list[dict[str, Any]]) -> None:
    """Add what rank 0 tells, until it ends, and have things lost meanwhile."""
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_pass_on, args=(rank, lines), daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=losses.run())
        except queue.Empty:
            continue
        if not line:
            return
        told.append(json.loads(line))
        losses.hear(told[-1])
        show(**{key: round(v, 4) if isinstance(v, float) else v for key, v in told[-1].items()})


def _pass_on(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    """Put a process's lines into a queue, and an empty one at their end."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put("")


def summary(
    config: RunConfig, told: list[dict[str, Any]], servers: list[dict[str, Any]], slowest: float
) -> dict[str, Any]:
    """What is to be known of the steps after the first, which opens the connections, and in which nothing was lost."""
    steps = [one for one in told if one["event"] == "step"]
    calm = [one for one in steps[1:] if not one["lost"] and not one["sent_again"]] or steps
    median = lambda name: statistics.median(one[name] for one in calm)  # noqa: E731
    requests, cpu = (sum(one[name] for one in servers) for name in ("requests", "cpu_s"))
    beyond = statistics.median(1 - one["servers_own_s"] / one["wait_s"] for one in calm)
    return {
        "event": "summary", "servers": config.num_servers, "steps": len(calm),
        "requests_per_s": median("requests_per_s"), "wait_s": median("wait_s"),
        "servers_own_s": median("servers_own_s"), "beyond_share": beyond,
        "cpu_of_controllers": median("cpu_of_controllers"), "cpu_ms_per_request": median("cpu_ms_per_request"),
        "rows_s": median("rows_s"), "version_change_s": median("publish_interruption_s"),
        "slowest_load_s": slowest, "version_change_over_slowest": median("publish_interruption_s") / slowest,
        "failed_trajectories": sum(one["failed"] for one in steps),
        "stand_ins_late_s": statistics.fmean(one["late_s"] for one in servers) if servers else None,
        "cpu_ms_per_request_of_stand_ins": 1000 * cpu / requests if requests else None,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="folder with an instruction model's tokenizer (its weights are not read)")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings over the preset's")
    parser.add_argument("--preset", default="1.5B_n16")
    parser.add_argument("--task", default="memagent")
    parser.add_argument("--gpu", choices=speed.GPUS, default=speed.MEASURED_ON)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--mean", type=float, default=0.6, help="mean length of responses over their limit")
    parser.add_argument("--learn", type=float, default=1.0, help="seconds of an optimizer step")
    parser.add_argument("--lose", action="append", default=[], metavar="WHAT@STEP", help="may be given several times")
    parser.add_argument("--ray", action="store_true", help="the servers as actors of a Ray with a node for every host")
    parser.add_argument("--back", type=float, default=5.0, help="seconds until a lost server is there again")
    given = parser.parse_intermixed_args()
    if not (Path(given.tokenizer) / "tokenizer_config.json").is_file():
        parser.error(f"{given.tokenizer}: no folder with a tokenizer: name that of an instruction model")
    for one in given.lose:
        what, _, step = one.partition("@")
        if what not in LOSSES or not step.isdigit():
            parser.error(f"--lose {one}: give one of {', '.join(LOSSES)} and a step, as in server@2")
    try:
        resolve(given.preset, given.task, given.settings)
    except UserError as error:
        parser.error(str(error))
    try:
        simulate(given)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if (system := disk_error(error)) is None:
            raise
        sys.exit(f"{system.strerror or system}: free some space, or name another folder with TMPDIR")


def simulate(given: argparse.Namespace) -> None:
    """Run the fleet and the trainer's rank 0 to the end, and print what came of it."""
    with tempfile.TemporaryDirectory(prefix="fleet-") as name:
        work = Path(name)
        config = prepare(given, work)
        folder = registry.folder_of(RunPaths.of(config).logs)
        folder.mkdir(parents=True)
        fleet = on_ray(config, folder, work) if given.ray else Fleet(folder, work / "rates.json", hosts_of(config))
        losses = Losses(fleet, given.lose, given.back)
        try:
            told = train(work, given, losses)
        finally:
            losses.end()
            servers = fleet.close()
        load = json.loads((work / "rates.json").read_text())["load"]
        slowest = load * max(load_factor(f"server-{number}") for number in range(config.num_servers))
        show(**summary(config, told, servers, slowest))
        if told[-1].get("step") != given.steps:
            sys.exit((work / "rank.log").read_text()[-3000:])


if __name__ == "__main__":
    main()
