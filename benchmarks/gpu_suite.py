"""What has still to be measured on GPUs, the most important first, within a given time.

    python3 benchmarks/gpu_suite.py TOKENIZER_FOLDER --seconds 1500 [--out FOLDER] [--flags="…"] [--only NAME …]
    python3 benchmarks/gpu_suite.py TOKENIZER_FOLDER --seconds 900 --cpu    # tries the scripts; figures mean nothing

Runs the other scripts of this folder one after another, each with a time limit of its own; what they print is passed on
line by line, and kept in --out. A part that no longer fits into the time, or needs more GPUs than there are, is skipped
with a note. A part that fails does not keep the others from running.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
GRACE_SECONDS = 15.0
"""Beyond its own limit, for ending servers."""


@dataclass(frozen=True)
class Part:
    """name: also of its file in --out. argv: script and options; {seconds} is its limit. least: seconds without which
    it shows nothing; most: more are not given to it. gpus: that it needs.
    """

    name: str
    argv: tuple[str, ...]
    least: float
    most: float
    gpus: int = 1


def parts(tokenizer: str, flags: str, cpu: bool) -> list[Part]:
    """All of them, in order of importance."""
    limit = ("--seconds", "{seconds}")
    if cpu:
        tiny = (tokenizer, "--shape", "tiny", "--engine", "vllm", "--documents", "2", "--group", "2", *limit)
        tiny += (f"--flags={flags or '--enforce-eager'}",)
        rows = ("--device", "cpu", "--shape", "tiny", "--tokens", "512", "--row", "128", "--variants", "eager")
        return [
            Part("rollout", ("rollout.py", *tiny, "--rounds", "1"), 60, 300, 0),
            Part("memory-step", ("memory_step.py", *tiny, "--steps", "3"), 60, 300, 0),
            Part("ipc", ("weight_update.py", "--device", "cpu", "--parts", "ipc", "--rounds", "2"), 30, 120, 0),
            Part("keeping", ("training.py", *rows, "--seconds", "1", "--keeping"), 30, 120, 0),
            Part("scaling", ("training.py", *rows, "--seconds", "1", "--gpus", "1", "2"), 30, 120, 0),
        ]
    served = (f"--flags={flags}",)
    shared = ("--colocated", "--staleness", "0")
    compiled = ("--shape", "1.5B", "--variants", "compiled")
    return [
        Part("rollout-135M", ("rollout.py", tokenizer, "--shape", "135M", *limit, *served), 150, 300),
        Part("memory-step", ("memory_step.py", tokenizer, *limit, *served), 300, 600, 2),
        Part("memory-step-1gpu", ("memory_step.py", tokenizer, *limit, *served, *shared), 250, 400),
        Part("rollout-1.5B", ("rollout.py", tokenizer, "--shape", "1.5B", *limit, *served), 200, 400),
        Part("scaling-2", ("training.py", *compiled, "--gpus", "1", "2", "--micro-batches", "4"), 120, 240, 2),
        Part("keeping", ("training.py", *compiled, "--micro-batches", "4", "--keeping"), 100, 240),
        Part("ipc", ("weight_update.py", "--parts", "ipc", *served), 150, 300),
        Part("scaling-4", ("training.py", *compiled, "--gpus", "1", "4", "--micro-batches", "4"), 120, 240, 4),
    ]  # fmt: skip


def run(part: Part, seconds: float, out: Path) -> str:
    """Run one part; how it ended, in words. All that it prints goes on, and into a file."""
    argv = [sys.executable, str(HERE / part.argv[0]), *(w.format(seconds=int(seconds)) for w in part.argv[1:])]
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": f"{HERE.parent}:{os.environ.get('PYTHONPATH', '')}",
    }
    began = time.monotonic()
    with (out / f"{part.name}.log").open("wb") as file:
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=out, env=environment, start_new_session=True
        )
        assert process.stdout is not None
        selector = selectors.DefaultSelector()
        selector.register(process.stdout, selectors.EVENT_READ)
        told = False
        while True:
            over = time.monotonic() - began - seconds
            if over > GRACE_SECONDS and not told:
                told = True
                process.send_signal(signal.SIGINT)  # it ends what it has started
            if over > 3 * GRACE_SECONDS:
                os.killpg(process.pid, signal.SIGKILL)
            if not selector.select(timeout=1.0):
                continue
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                break
            file.write(data)
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
    code = process.wait()
    spent = f"{time.monotonic() - began:.0f} s"
    return f"ended after {spent}" if not code else f"exit code {code} after {spent}{', out of time' if told else ''}"


def visible_gpus() -> int:
    """How many GPUs PyTorch sees, asked in a process of its own: this one takes no memory there."""
    asked = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"], capture_output=True, check=True
    )
    return int(asked.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="folder with an instruction model's tokenizer")
    parser.add_argument("--seconds", type=float, required=True, help="for all parts together")
    parser.add_argument("--out", type=Path, default=Path("gpu-suite"))
    parser.add_argument("--flags", default="", help="more options for the servers")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these parts, in the suite's order")
    parser.add_argument("--cpu", action="store_true", help="tiny shapes without a GPU")
    given = parser.parse_args()
    deadline = time.monotonic() + given.seconds
    given.out.mkdir(parents=True, exist_ok=True)
    gpus = 0 if given.cpu else visible_gpus()
    tokenizer = str(Path(given.tokenizer).resolve())
    wanted = [p for p in parts(tokenizer, given.flags, given.cpu) if not given.only or p.name in given.only]
    for part in wanted:
        left = deadline - time.monotonic() - GRACE_SECONDS
        if part.gpus > gpus:
            how = f"skipped: it needs {part.gpus} GPUs, and there are {gpus}"
        elif left < part.least:
            how = f"skipped: it needs {part.least:.0f} s, and {max(left, 0):.0f} s are left"
        else:
            print(json.dumps({"part": part.name, "seconds": round(min(left, part.most))}), flush=True)
            how = run(part, min(left, part.most), given.out)
        print(json.dumps({"part": part.name, "how": how}), flush=True)


if __name__ == "__main__":
    main()
