"""Run all tests in two halves side by side: each mostly waits, for servers, hosts and trainings with one thread.

    python scripts/run_tests.py [PYTEST_OPTION ...]

Options go to both halves. Where tests are named, these alone are run, in one piece. The exit code is that of the worst
half. What a half prints is shown line by line after its name; what failed is named again at the very end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
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


def show(name: str, process: subprocess.Popen[str], failed: list[str]) -> None:
    """Pass on what a half prints, until it ends; its lines about tests that failed are kept."""
    assert process.stdout is not None
    for line in process.stdout:
        print(f"[{name}] {line}", end="", flush=True)
        if line.startswith(("FAILED ", "ERROR ")):
            failed.append(line.rstrip())


def main(options: list[str]) -> int:
    """Run the tests; the exit code."""
    pytest = [sys.executable, "-m", "pytest"]
    if any(not option.startswith("-") and (ROOT / option.partition("::")[0]).exists() for option in options):
        return subprocess.run([*pytest, *options], cwd=ROOT, check=False).returncode
    halves = {"learning": [*LEARNING], "rest": [*REST, *(f"--ignore={path}" for path in LEARNING)]}
    # Threads that spin while they wait for each other on cores that others want are many times slower than one.
    share = str(max((os.cpu_count() or 1) // len(halves), 1))
    environment = {**os.environ, "CLUSTERKIT_TEST_CORES": share, "OMP_NUM_THREADS": share}
    running = {
        name: subprocess.Popen(
            [*pytest, *paths, *options],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, paths in halves.items()
    }
    failed: list[str] = []
    shows = [threading.Thread(target=show, args=(*item, failed)) for item in running.items()]
    for thread in shows:
        thread.start()
    try:
        codes = {name: process.wait() for name, process in running.items()}
    except KeyboardInterrupt:  # it reaches both halves as well
        codes = {name: process.wait() or 130 for name, process in running.items()}
    for thread in shows:
        thread.join()
    print(*failed, sep="\n")
    for name, code in codes.items():
        print(f"{name}: {'passed' if not code else f'exit code {code}'}")
    return max(codes.values(), key=abs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
