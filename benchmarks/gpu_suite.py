"""Everything that is measured on GPUs, what docs/performance.md lacks first, within a given time, on all GPUs at once.

    python3 benchmarks/gpu_suite.py MODEL --data DATA --seconds 1500 [--out FOLDER] [--flags="…"] [--only NAME …]
    python3 benchmarks/gpu_suite.py MODEL --data DATA --seconds 1500 --gpus 4     # what needs two and four GPUs first
    python3 benchmarks/gpu_suite.py MODEL --data DATA --seconds 900 --cpu    # tries the scripts; figures mean nothing

MODEL is SmolLM2-135M-Instruct's folder, DATA has `hotpotqa` and `math` (docs/evaluation.md). Runs the other scripts of
this folder, trainings, and the tests that need GPUs (`tests-…`), each with a time limit and GPUs of its own, as many
side by side as there are GPUs for; what they print is passed on line by line under their names, and kept in --out. A
part that no longer fits into the time, or needs more GPUs than there are, is skipped with a note. A part that waits
for GPUs keeps later ones waiting, a part that fails does not keep the others from running. Times that the host's other
work would change are taken with nothing beside them. Ctrl-C ends them all in order.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
GRACE_SECONDS = 15.0
"""Beyond its own limit, for ending servers."""
STOP = threading.Event()
SMALL_GIB = 100.0
"""GPUs with less get smaller micro-batches."""
PREFIXES = ("--orders", "section_first", "--documents", "4", "--seconds", "3")
SHORT = ("--tokens", "8192", "--micro-batches", "1", "--seconds", "4")
LOST = ("--staleness", "0", "--orders", "section_first", "--documents", "16", "--allocation", "sglang:d2+fsdp:d2")
Words = tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """name: also of its file in --out. argv: a script of this folder, `train` or `pytest`, and options; {seconds} is
    its limit, {out} a folder of its own. least: seconds without which it shows nothing; most: more are not given to it.
    gpus: that it needs. alone: nothing runs beside it.
    """

    name: str
    argv: tuple[str, ...]
    least: float
    most: float
    gpus: int = 1
    alone: bool = False


def of_several(model: str, limit: Words, served: Words, small: bool) -> list[Part]:
    """What only several GPUs of one host can show. small: GPUs of 80 GB."""
    tokens = ("--tokens", "16384" if small else "32768")
    step = ("memory_step.py", model, *limit, *served, "--orders", "section_first", "--steps", "3")
    turns = (*step, *tokens, "--staleness", "0", "--allocation")
    large = ("--shape", "7B", "--keep-activations", "full", "--tokens", "16384", "--documents", "4")
    large += ("--set", "train.compile=false")  # publishing does not depend on it
    width = ("training.py", "--shape", "7B", "--seconds", "4", "--tokens", "8192", "--micro-batches", "4", "--variants")
    huge = ("training.py", "--shape", "32B", "--variants", "compiled, full", "--layouts", "d4", *SHORT)
    grouped = ("--staleness", "0", "--allocation", "sglang:d2+fsdp:d2", "--servers-per-group", "16", "1")
    layouts = ("compiled, selective", "--layers", "6", "--layouts")
    return [
        Part("shared-2", (*turns, "sglang:d2|fsdp:d2"), 200, 420, 2),
        Part("apart-2", (*step, *tokens, "--allocation", "sglang:d1+fsdp:d1"), 260, 520, 2),
        Part("tensor-server-2", (*turns, "sglang:t2|fsdp:d2"), 200, 420, 2),
        Part("shared-4", (*turns, "sglang:d4|fsdp:d4"), 180, 420, 4),
        Part("math-4", (*turns, "sglang:d4|fsdp:d4", "--workload", "math"), 180, 420, 4),
        Part("layouts-4", (*width, *layouts, "d1", "d2", "d4", "d4s2"), 250, 500, 4),
        Part("tensor-4", (*width, *layouts, "d1", "d2t2"), 150, 400, 4),
        Part("lost-4", ("lost.py", model, *limit, *served, *tokens, *LOST), 240, 450, 4),
        Part("7B-4", (*width, "compiled, full", "--layouts", "d4", "d4s2"), 120, 300, 4),
        Part("prefixes-4", ("prefixes.py", *tokens, "--ranks", "1", "2", "4", *PREFIXES), 300, 450, 4),
        Part("publish-4", (*step, *large, *grouped), 240, 500, 4),
        Part("32B-lora-4", (*huge, "--lora", "64"), 120, 300, 4),
        Part("32B-4", (*huge, "--layers", "24" if small else "48"), 120, 300, 4),
        Part("checkpoints-4", ("checkpoints.py", "--shape", "7B", "--ranks", "4", "--repeat", "1"), 120, 300, 4),
    ]


def parts(model: str, data: str, flags: str, cpu: bool, small: bool = False) -> list[Part]:
    """All of them, what needs several GPUs first, then what has not been measured yet."""
    limit = ("--seconds", "{seconds}")
    if cpu:
        tiny = (model, "--shape", "tiny", "--engine", "vllm", "--documents", "2", "--group", "2", *limit)
        tiny += (f"--flags={flags or '--enforce-eager'}",)
        rows = ("--device", "cpu", "--shape", "tiny", "--tokens", "512", "--row", "128", "--variants", "eager")
        few = ("--engine", "embedded", "--questions", "1", "--samples", "1", "--new", "4", "--loads", "1")
        few += ("--parts", "stream,serial")
        return [
            Part(
                "evaluation",
                ("evaluation.py", model, "--data-path", data, *few, "--parts", "stream,serial"),
                60,
                400,
                0,
            ),
            Part("rollout", ("rollout.py", *tiny, "--rounds", "1"), 60, 300, 0),
            Part("memory-step", ("memory_step.py", *tiny, "--steps", "3"), 60, 300, 0),
            Part("ipc", ("weight_update.py", "--device", "cpu", "--parts", "ipc", "--rounds", "2"), 30, 120, 0),
            Part("keeping", ("training.py", *rows, "--seconds", "1", "--keeping"), 30, 120, 0),
            Part("scaling", ("training.py", *rows, "--seconds", "1", "--gpus", "1", "2"), 30, 120, 0),
        ]
    served = (f"--flags={flags}",)
    train = ("train", "--preset", "135M", f"model.path={model}", "fileroot={out}", "monitor.tensorboard=false")
    train += (
        f"servers.flags={json.dumps(shlex.split(flags))}",
        "eval.every_steps=0",
        "rollout.save_trajectories=false",
    )
    hotpotqa = (*train, "--task", "hotpotqa", f"task.path={data}/hotpotqa", "train.total_steps=25")
    scores = ("evaluation.py", model, "--data-path", data, *served)
    by_length = ("--parts", "hqa", "--chunk", "512", "--memory", "32", "--final", "16")
    wordings = ("prompt_order.py", "135M", "servers.prefill_delay_ms=100", "--model", model, *limit, *served)
    compiled = ("--shape", "1.5B", "--variants", "compiled", "--micro-batches", "4")
    shared = ("--colocated", "--staleness", "0", "--steps", "2")
    in_turns = ("memory_step.py", model, *limit, *served, "--staleness", "0", "--colocated", "--keep-memory")
    in_turns += ("--orders", "section_first", "paper", "--sharing", "on", "off", "--steps", "2", "--tokens")
    sixteen = ("--group", "16", "--documents", "2")
    wide = ("--shape", "7B", "--layers", "6", "--workload", "memagent")
    twelve = ("--shape", "7B", "--layers", "12", "--keep-activations", "full", "--workload", "memagent")
    rows = ("prefixes.py", *wide)
    deep = ("prefixes.py", "--shape", "7B", "--layers", "22", "--checkpointing", "full", "--workload", "memagent")
    turn = ("--groups", "1", "--rows", "16", "--prefix", "5150", "--own", "2070", "--heads", "28", "--kv-heads", "4")
    exact = ("prefixes.py", "--shape", "1.5B", "--documents", "2", "--seconds", "2", "--tokens", "12288", "--exact")
    sweep = ("rollout_settings.py", model, *limit, "--at-once", "4", "--ways", "section_first share")
    adapters = ("training.py", "--shape", "1.5B", "--variants", "compiled", "--lora", "0", "64", "--micro-batches", "1")
    return [
        *of_several(model, limit, served, small),
        Part("wordings-4", (*wordings, "--out", "{out}", "--jobs", "8"), 500, 1000, 4),
        Part("attention", ("attention.py",), 40, 90),
        Part("attention-memagent", ("attention.py", *turn), 40, 90),
        Part("memagent-deep", (*deep, "--documents", "1", "--seconds", "4", "--tokens", "40960"), 200, 400),
        Part("lora-1.5B", (*adapters, "--seconds", "5"), 100, 240),
        Part("long-rows", ("long_rows.py",), 300, 500),
        Part("hqa", (*scores, *by_length), 300, 800, alone=True),
        Part("judge", ("memalpha_judge.py", model, "--minutes", "13", "--keep", "{out}", *served), 300, 840),
        Part("orders-step", (*in_turns, "24576", "--memory", "0.3"), 500, 780),
        Part("prefixes-exact", (*exact, "--orders", "section_first", "paper"), 100, 240),
        Part("memagent-rows", (*rows, "--documents", "1", "--seconds", "4", "--tokens", "40960"), 150, 300),
        Part("memagent-step", (*in_turns, "40960", *twelve, *sixteen, "--memory", "0.2"), 500, 900),
        Part("settings", (*sweep, "--only", "graphs", "page-64", "no-overlap", "lpm"), 250, 480),
        Part("memory-step-1gpu", ("memory_step.py", model, *limit, *served, *shared), 250, 400),
        Part("evaluation", (*scores, "--questions", "60", "--parts", "stream,bare,serial"), 700, 1300),
        Part("ipc", ("weight_update.py", "--parts", "ipc", "--logs", "{out}", *served), 120, 300),
        Part("keeping", ("training.py", *compiled, "--keeping"), 100, 400),
        Part("rounding", ("rounding.py", model), 30, 120),
        Part("memory-step", ("memory_step.py", model, *limit, *served, "--steps", "2"), 300, 600, 2),
        Part("learn-recall", (*train, "train.total_steps=20", "eval.num_tasks=128"), 300, 900),
        Part("learn-hotpotqa", hotpotqa, 300, 900),
        Part("rollout-135M", ("rollout.py", model, "--shape", "135M", *limit, *served), 150, 300),
        Part("rollout-1.5B", ("rollout.py", model, "--shape", "1.5B", *limit, *served), 200, 400),
        Part("scaling-2", ("training.py", *compiled, "--gpus", "1", "2"), 120, 240, 2),
        Part("tests-weights", ("pytest", "tests/gpu/test_weights.py", "-k", "same_gpu"), 120, 300),
        Part("tests-sglang", ("pytest", "tests/gpu/test_sglang.py"), 240, 900),
        Part("tests-training", ("pytest", "tests/gpu/test_training.py"), 150, 400, 2),
        Part("tests-weights-2gpu", ("pytest", "tests/gpu/test_weights.py", "-k", "not same_gpu"), 150, 400, 2),
        Part("scaling-4", ("training.py", *compiled, "--gpus", "1", "4"), 120, 240, 4),
    ]  # fmt: skip


def run(part: Part, seconds: float, out: Path, gpus: list[str]) -> str:
    """Run one part on these GPUs; how it ended, in words. All that it prints goes on, and into a file."""
    words = [w.replace("{seconds}", str(int(seconds))).replace("{out}", str(out / part.name)) for w in part.argv]
    if words[0] == "train":
        argv = [sys.executable, "-m", "clusterkit.cli.main", *words]
    elif words[0] == "pytest":
        argv = [sys.executable, "-m", *words, "-m", "gpu", "-s", "-p", "no:cacheprovider"]
    else:
        argv = [sys.executable, str(HERE / words[0]), *words[1:]]
    (out / part.name).mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": f"{HERE.parent}:{os.environ.get('PYTHONPATH', '')}",
    }
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    began = time.monotonic()
    with (out / f"{part.name}.log").open("wb") as file:
        process = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=HERE.parent if words[0] == "pytest" else out / part.name,
            env=environment,
            start_new_session=True,
        )
        assert process.stdout is not None
        selector = selectors.DefaultSelector()
        selector.register(process.stdout, selectors.EVENT_READ)
        told: float | None = None
        rest = b""
        while True:
            now = time.monotonic()
            if told is None and (STOP.is_set() or now - began - seconds > GRACE_SECONDS):
                told = now
                process.send_signal(signal.SIGINT)  # it ends what it has started
            if told is not None and now - told > 2 * GRACE_SECONDS:
                os.killpg(process.pid, signal.SIGKILL)
            if not selector.select(timeout=1.0):
                continue
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                break
            file.write(data)
            file.flush()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                print(f"{part.name}: {line.decode(errors='replace')}", flush=True)
    if rest:
        print(f"{part.name}: {rest.decode(errors='replace')}", flush=True)
    code = process.wait()
    spent = f"{time.monotonic() - began:.0f} s"
    return f"ended after {spent}" if not code else f"exit code {code} after {spent}{', out of time' if told else ''}"


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES takes them; asked in a process of its own: this one
    takes no memory there.
    """
    asked = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"], capture_output=True, check=True
    )
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in allowed.split(",") if name.strip()]
    return names or [str(number) for number in range(int(asked.stdout))]


def memory_gib() -> float:
    """Of the first GPU; asked as `visible_gpus` asks."""
    code = "import torch; print(torch.cuda.get_device_properties(0).total_memory / 2**30)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)


def run_all(waiting: list[Part], deadline: float, out: Path, gpus: list[str]) -> None:
    """Start each part, in their order, as soon as there are GPUs for it; on CPUs one after another."""
    everything = len(gpus)
    free = list(gpus)
    running: dict[Future[str], tuple[Part, list[str]]] = {}

    def tell(part: Part, how: str) -> None:
        print(json.dumps({"part": part.name, "how": how}), flush=True)

    with ThreadPoolExecutor(max(everything, 1)) as pool:
        while waiting or running:
            for part in list(waiting):
                left = deadline - time.monotonic() - GRACE_SECONDS
                alone = any(other.alone for other, _ in running.values())
                if part.gpus > everything:
                    tell(part, f"skipped: it needs {part.gpus} GPUs, and there are {everything}")
                elif left < part.least or STOP.is_set():
                    tell(part, f"skipped: it needs {part.least:.0f} s, and {max(left, 0):.0f} s are left")
                elif part.gpus > len(free):
                    break  # else the small ones behind it would keep it waiting for good
                elif running and (part.alone or not part.gpus or alone):
                    continue
                else:
                    mine, free = free[: part.gpus], free[part.gpus :]
                    seconds = min(left, part.most)
                    print(json.dumps({"part": part.name, "seconds": round(seconds), "gpus": mine}), flush=True)
                    running[pool.submit(run, part, seconds, out, mine)] = (part, mine)
                waiting.remove(part)
            try:
                done = wait(running, return_when=FIRST_COMPLETED).done if running else set()
            except KeyboardInterrupt:
                STOP.set()
                continue
            for future in done:
                part, mine = running.pop(future)
                free += mine
                tell(part, future.result())


def names(cpu: bool) -> str:
    """The parts by name, in lines for --help."""
    return textwrap.fill(" ".join(part.name for part in parts("", "", "", cpu)), 100, break_on_hyphens=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"parts, in their order:\n{names(cpu=False)}\n\nparts with --cpu:\n{names(cpu=True)}",
    )
    parser.add_argument("model", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--data", required=True, help="folder with hotpotqa and math")
    parser.add_argument("--seconds", type=float, required=True, help="for all parts together")
    parser.add_argument("--out", type=Path, default=Path("gpu-suite"))
    parser.add_argument("--flags", default="", help="more options for the servers")
    parser.add_argument("--gpus", type=int, default=0, help="use the first so many; 0: all")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these parts (named below)")
    parser.add_argument("--cpu", action="store_true", help="tiny shapes without a GPU")
    given = parser.parse_args()
    for folder in (given.model, given.data):
        if not Path(folder).is_dir():
            parser.error(f"{folder}: there is no such folder")
    deadline = time.monotonic() + given.seconds
    out = given.out.resolve()
    os.environ.setdefault("CLUSTERKIT_SGLANG_FLAGS", given.flags)  # of the tests
    model, data = str(Path(given.model).resolve()), str(Path(given.data).resolve())
    gpus = [] if given.cpu else visible_gpus()
    if not gpus and not given.cpu:
        parser.error("PyTorch finds no GPU here; --cpu tries the scripts without one")
    if given.gpus > len(gpus) and not given.cpu:
        parser.error(f"--gpus {given.gpus}: there are {len(gpus)}")
    known = parts(model, data, given.flags, given.cpu, small=bool(gpus) and memory_gib() < SMALL_GIB)
    if unknown := set(given.only) - {part.name for part in known}:
        parser.error(f"--only {' '.join(unknown)}: there are {' '.join(part.name for part in known)}")
    out.mkdir(parents=True, exist_ok=True)
    wanted = [part for part in known if not given.only or part.name in given.only]
    run_all(wanted, deadline, out, gpus[: given.gpus or None])


if __name__ == "__main__":
    main()
