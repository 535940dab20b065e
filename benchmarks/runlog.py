"""How fast `clusterkit status --log` reads a log of a gigabyte, against `grep -c` of the same keywords.

    .venv/bin/python benchmarks/runlog.py [--megabytes 1000] [--steps 2000] [--rounds 3] [--folder DIR] [--json]

The log is made of the lines of AReaL v0.2's master worker (tests/cases/runlog), renumbered, between lines of engines
and workers; it is removed at the end. Measured, all in this run and with the file in the page cache:

* a full parse, and `grep -c -F` of clusterkit.runs.log.lines.KEYWORDS on the same file, in turn; medians of the rounds;
* a refresh after the log grew by 1 MB: within a process that follows it (--watch), and as a new invocation that first
  loads what the last one remembered;
* whether time grows in proportion to what a hostile log holds: seconds for four times as much, over four.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from clusterkit.runs.log.lines import KEYWORDS
from clusterkit.runs.log.reader import LogReader
from clusterkit.runs.log.scan import LogScanner

SAMPLE = Path(__file__).parents[1] / "tests" / "cases" / "runlog" / "areal_v0.2_master_worker.log"
MEGABYTE = 1_000_000
STEP_SECONDS = 400

NOISE = (
    "(model_worker/{n} pid=9{n}412, ip=10.0.0.{n}) {stamp} model worker INFO: Model worker {n} #actor_gen# "
    "*end* handle request 4f1c-{r} finished, time {r}.{n}s, memory used 63.{n} GiB, peak 70.{n} GiB",
    "(generation_server/{n} pid=4{n}, ip=10.0.0.{n}) [2025-02-22 11:{n}:07] Decode batch, #running-req: {r}, "
    "#token: {r}48, token usage: 0.{n}, cuda graph: True, gen throughput (token/s): {r}.68, #queue-req: 0",
    "(generation_server/{n} pid=4{n}, ip=10.0.0.{n}) [2025-02-22 11:{n}:07] Prefill batch, #new-seq: 6, "
    "#new-token: {r}, #cached-token: 0, token usage: 0.{n}, #running-req: {n}, #queue-req: 47, #pending-token: {r}",
    '(generation_server/{n} pid=4{n}) \x1b[32mINFO\x1b[0m:     10.0.0.{n}:41{r} - "POST /generate HTTP/1.1" 200 OK',
    "(master_worker/0 pid=96390, ip=10.0.0.1) {stamp} master worker INFO: Amending RPC actor_gen output keys: seq {r}",
)


def noise(size: int) -> bytes:
    """Lines of about `size` bytes that tell nothing."""
    draw = random.Random(0)
    lines = []
    while size > 0:
        stamp = f"20250222-11:{draw.randrange(60):02}:{draw.randrange(60):02}.{draw.randrange(1000):03}"
        lines.append(draw.choice(NOISE).format(n=draw.randrange(1, 9), r=draw.randrange(1000, 99999), stamp=stamp))
        size -= len(lines[-1]) + 1
    return ("\n".join(lines) + "\n").encode()


def step_lines(step: int, steps: int) -> bytes:
    """The sample's three kinds of lines for one step."""
    sample = SAMPLE.read_text().splitlines()
    at = datetime(2025, 2, 22) + timedelta(seconds=STEP_SECONDS * step)
    finished = re.sub(
        r"step \d+/\d+ \(global step \d+\)", f"step {step}/{steps} (global step {step})", sample[step % 6]
    )
    told = [sample[6 + step % 6], finished, sample[12 + step % 6]]
    stamps = [at + timedelta(milliseconds=ms) for ms in (0, 6, 60)]
    return "".join(
        re.sub(r"\d{8}-[\d:.]+", time.strftime("%Y%m%d-%H:%M:%S.%f")[:-3], line, count=1) + "\n"
        for line, time in zip(told, stamps, strict=True)
    ).encode()


def write_log(path: Path, size: int, steps: int) -> None:
    """A log of `size` bytes with so many steps."""
    chatter = noise(8 * MEGABYTE)
    with path.open("wb") as file:
        for step in range(1, steps + 1):
            start = chatter.index(b"\n", random.Random(step).randrange(len(chatter) // 2)) + 1
            missing = size * step // steps - file.tell()
            while missing > 0:
                part = chatter[start : start + missing]
                part = part[: part.rfind(b"\n") + 1]
                if not part:
                    break
                file.write(part)
                missing, start = missing - len(part), 0
            file.write(step_lines(step, steps))


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that a call took, and what it gave."""
    began = time.perf_counter()
    value = work()
    return time.perf_counter() - began, value


def grep(path: Path) -> int:
    """How many lines have one of the keywords, by grep at its fastest (bytes, fixed words)."""
    arguments = ["grep", "-c", "-a", "-F", *(part for word in KEYWORDS for part in ("-e", word)), str(path)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"})
    return int(done.stdout)


def full_parses(path: Path, rounds: int, steps: int) -> dict[str, float]:
    """MB/s of both, in turn."""
    ours, theirs = [], []
    grep(path)  # the file is in the page cache from here on
    for _ in range(rounds):
        theirs.append(timed(lambda: grep(path))[0])
        seconds, view = timed(LogReader(path).refresh)
        if view.history.global_step != steps or len(view.history.stat("task_reward")) != steps:
            raise SystemExit(f"{view.history.global_step} of {steps} steps were found")
        ours.append(seconds)
    megabytes = path.stat().st_size / MEGABYTE
    ratios = [grepped / parsed for grepped, parsed in zip(theirs, ours, strict=True)]
    return {
        "parse_mb_s": megabytes / statistics.median(ours),
        "grep_mb_s": megabytes / statistics.median(theirs),
        "parse_over_grep": statistics.median(ratios),
    }


def refreshes(path: Path, folder: Path, rounds: int, steps: int) -> dict[str, float]:
    """Milliseconds of a refresh after 1 MB more, by a process that goes on and by one that begins."""
    following = LogReader(path, folder)
    following.refresh()
    news = noise(MEGABYTE)
    watched, invoked = [], []
    for number in range(1, rounds + 1):
        with path.open("ab") as file:
            file.write(news + step_lines(steps + number, steps))
        seconds, view = timed(lambda: LogReader(path, folder).refresh())
        invoked.append(seconds)
        assert view.news < 2 * len(news), view.news
        seconds, view = timed(following.refresh)
        watched.append(seconds)
        assert view.history.global_step == steps + number
    return {
        "refresh_watching_ms": 1000 * statistics.median(watched),
        "refresh_invocation_ms": 1000 * statistics.median(invoked),
        "remembered_mb": sum(file.stat().st_size for file in folder.iterdir()) / MEGABYTE,
    }


HOSTILE: dict[str, Callable[[int], str]] = {
    "messages in one line": lambda n: "INFO: RPC name actor_train returns {" * n,
    "a line without an end": lambda n: "x" * 100 * n,
    "rows of a table": lambda n: "INFO: Stats (1/1):\n" + "│ a │ 1 │\n" * n,
    "parts of statistics": lambda n: "".join(f"INFO: Stats ({i}/9):\n│ a{i} │ 1 │\n╘\n" for i in range(2, n // 8)),
    "attempts": lambda n: "".join(
        f"INFO: Epoch 1/1 step 1/9 (global step {1 + i % 2}) finishes.\n" for i in range(n // 8)
    ),
}


def growth(size: int = 40_000) -> dict[str, float]:
    """Seconds for four times as much over four times the seconds: 1 is linear, 4 is quadratic."""

    def scan(text: str) -> None:
        scanner, data = LogScanner(), text.encode()
        for start in range(0, len(data), 1 << 18):
            scanner.feed(data[start : start + (1 << 18)])

    def seconds(make: Callable[[int], str], n: int) -> float:
        text = make(n)
        return min(timed(lambda: scan(text))[0] for _ in range(3))

    return {name: seconds(make, 4 * size) / 4 / seconds(make, size) for name, make in HOSTILE.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="where the log is made; the system's temporary folder when left out"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="runlog-", dir=arguments.folder) as name:
        log, state = Path(name) / "main.log", Path(name) / "state"
        write_log(log, arguments.megabytes * MEGABYTE, arguments.steps)
        figures: dict[str, Any] = {"megabytes": log.stat().st_size / MEGABYTE, "steps": arguments.steps, "load": load}
        figures |= full_parses(log, arguments.rounds, arguments.steps)
        figures |= refreshes(log, state, arguments.rounds, arguments.steps)
    figures["growth"] = growth()
    if arguments.json:
        print(json.dumps(figures, indent=2))
        return
    print(f"log                {figures['megabytes']:.0f} MB, {arguments.steps} steps; load average before: {load:.1f}")
    print(f"full parse         {figures['parse_mb_s']:.0f} MB/s")
    print(
        f"grep -c            {figures['grep_mb_s']:.0f} MB/s: we read at {figures['parse_over_grep']:.2f} of its speed"
    )
    print(f"refresh (1 MB)     {figures['refresh_watching_ms']:.1f} ms while watching")
    remembered = f"{figures['remembered_mb']:.1f} MB are remembered"
    print(f"                   {figures['refresh_invocation_ms']:.1f} ms as a new invocation ({remembered})")
    for name, ratio in figures["growth"].items():
        print(f"growth             {ratio:.2f} x linear: {name}")


if __name__ == "__main__":
    main()
