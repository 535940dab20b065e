"""Run all tests in two halves side by side: each mostly waits, for servers, hosts and trainings with one thread.

    python scripts/run_tests.py [PYTEST_OPTION ...]

Options go to both halves. Where tests are named, these alone are run, in one piece. What a half prints is shown line by
line after its name.

Where a few tests failed, their files are run a second time with the machine to themselves: that tells what is broken
from what the other half was in the way of. The exit code is 0 when all that failed passed then. Either way the last
lines name every test that failed, and how it went alone: one that passes only alone has a race or a deadline to mend.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEARNING = (
    "tests/learning",
    *(
        f"tests/integration/test_{name}.py"
        for name in (
            "asynchronous", "eval_real", "eval_server_url", "judge_server", "recovery_ranks", "servers", "servers_ray",
            "slurm", "synchronous", "vllm_engine", "weight_publishing",
        )
    ),
)  # fmt: skip
"""Trainings and the servers that they need."""
REST = ("tests/unit", "tests/integration", "tests/cluster")
"""The other half, less what is in the first."""
TESTS_FAILED = 1
"""pytest's exit code; others say that tests could not be run."""
FILES_ALONE = 3
"""Files that are run a second time. More of them that fail are no accident."""


def show(name: str, process: subprocess.Popen[str], failed: list[str]) -> None:
    """Pass on what a half prints, until it ends; its summary's lines about tests that failed are kept."""
    assert process.stdout is not None
    summary = False
    for line in process.stdout:
        print(f"[{name}] {line}", end="", flush=True)
        summary = summary or " short test summary info " in line  # before it, a test's own log may have such lines
        if summary and line.startswith(("FAILED ", "ERROR ")):
            failed.append(line.rstrip())


def run(parts: dict[str, Sequence[str]], options: Sequence[str], root: Path, cores: int) -> tuple[list[int], list[str]]:
    """Run pytest over every part, side by side; exit codes, and lines about what failed. cores: that each may use."""
    environment = {**os.environ, "CLUSTERKIT_TEST_CORES": str(cores)}
    if len(parts) > 1:
        # Threads that spin while they wait for each other on cores that others want are many times slower than one.
        environment["OMP_NUM_THREADS"] = str(cores)
    running = {
        name: subprocess.Popen(
            [sys.executable, "-m", "pytest", *paths, *options],
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, paths in parts.items()
    }
    failed: list[str] = []
    shows = [threading.Thread(target=show, args=(*item, failed)) for item in running.items()]
    for thread in shows:
        thread.start()
    try:
        codes = [process.wait() for process in running.values()]
    except KeyboardInterrupt:  # it reaches both halves as well
        codes = [process.wait() or 130 for process in running.values()]
    for thread in shows:
        thread.join()
    return codes, failed


def files_of(failed: Sequence[str]) -> list[str]:
    """The files that pytest's lines of failures name, each once, in their order."""
    return list(dict.fromkeys(line.split()[1].partition("::")[0] for line in failed))


def judged(name: str, code: int) -> str:
    """How a part went, in a line."""
    return f"{name}: {f'exit code {code}' if code else 'passed'}"


def all_tests(halves: dict[str, Sequence[str]], options: Sequence[str], root: Path) -> int:
    """Run the halves, and what failed in them once more alone; the exit code."""
    cores = os.cpu_count() or 1
    codes, failed = run(halves, options, root, max(cores // len(halves), 1))
    files = files_of(failed)
    told = [*failed, *map(judged, halves, codes)]
    code = max(codes, key=abs)
    if set(codes) <= {0, TESTS_FAILED} and 0 < len(files) <= FILES_ALONE:
        print("\nonce more, alone:", *files, flush=True)
        (code,), again = run({"alone": files}, options, root, cores)
        told += [*again, judged(f"alone, {', '.join(files)}", code)]
    print(*told, sep="\n")
    return code


def main(options: list[str]) -> int:
    """Run the tests; the exit code."""
    if any(not option.startswith("-") and (ROOT / option.partition("::")[0]).exists() for option in options):
        return subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT, check=False).returncode
    halves = {"learning": LEARNING, "rest": (*REST, *(f"--ignore={path}" for path in LEARNING))}
    return all_tests(halves, options, ROOT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
