"""Run the tests in parts, some side by side: each mostly waits, for servers, hosts and trainings with one thread.

    python scripts/run_tests.py [--long] [PYTEST_OPTION ...]

Without --long these are the tests that are not marked `long`, with it those that are. Other options go to every part.
Where tests are named, these alone are run, marked or not, in one piece. What a part prints is shown line by line after
its name; the slowest tests of all parts stand at the end.

Where a few tests failed, their files are run a second time with the machine to themselves: that tells what is broken
from what another part was in the way of. The exit code is 0 when all that failed passed then. Either way the last
lines name every test that failed, and how it went alone: one that passes only alone has a race or a deadline to mend.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def integration(*names: str) -> tuple[str, ...]:
    """Paths of integration tests."""
    return tuple(f"tests/integration/test_{name}.py" for name in names)


UNITS = tuple(f"units {number}" for number in range(1, 6))
"""Parts of the unit tests that share nothing: small ones at the end, so that no core waits long for the last part."""
PARTS = {
    "learning": ("tests/learning",),
    "cluster": ("tests/cluster",),
    "runs": integration(
        "diagnose_command", "faults_config", "faults_disk", "faults_model", "heldout_runs", "own_classes",
        "recover_check", "recover_from", "recovery_choice", "recovery_damage", "recovery_kill",
        "recovery_persistent", "recovery_ranks", "recovery_signals", "report_browser", "trainer_types",
    ),
    "rest": (),
    "more of the rest": (),
    "schedulers": integration("servers_ray", "cluster_runs", "eval_cluster", "sweep_ray", "slurm"),
    "servers": integration(
        "servers", "vllm_engine", "weight_publishing", "eval_server_url", "judge_server", "asynchronous", "synchronous",
        "eval_real", "prefix_sharing_real",
    ),
    "ranks": tuple(
        f"tests/unit/test_{name}.py" for name in (
            "exactness_ranks", "lora_ranks", "rank_outcome", "recover_background", "replicas", "sharded_checkpoints",
            "sharded_loading",
        )
    ),
    **dict.fromkeys(UNITS, ()),
}  # fmt: skip
"""Tests that share what is dear to start, in both suites the longest part first. The rest: integration tests that none
names, in two parts, which get every second file. Ranks: unit tests whose processes are forked from one.
"""
AT_ONCE = (os.cpu_count() or 1) + 2
"""Parts side by side: while one waits, the others keep the cores busy."""
MARK = "mark.long"
FLAGS = ("--long", "-x", "-q", "-v", "-s", "--lf", "--ff")
"""Options that take no word behind them."""
NO_TESTS = 5
"""pytest's exit code where every test was left out."""
TESTS_FAILED = 1
"""pytest's exit code; others say that tests could not be run."""
FILES_ALONE = 3
"""Files that are run a second time. More of them that fail are no accident."""
UNTIL, ALONE_LONGER_S = "CLUSTERKIT_TEST_UNTIL", 600.0
"""The variable after whose time no long test begins (tests/conftest.py), and how much later those may that failed."""
TURN = "CLUSTERKIT_TEST_TURN"
"""The variable with a number: the file that each part of the long tests begins with, counted round. So what is left out
for want of time is not always the same."""
SLOWEST = 15


@dataclass
class Outcome:
    """How a part went. cpu: seconds of processor time of its processes, but not of those that outlived their parents
    (Docker, daemons); failed: pytest's lines about what did; late: about what was left out for want of time (see
    tests/conftest.py); slowest: seconds, and pytest's line.
    """

    name: str
    code: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    failed: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    slowest: list[tuple[float, str]] = field(default_factory=list)

    def __str__(self) -> str:
        said = {0: "passed", NO_TESTS: "has no such tests"}.get(self.code, f"exit code {self.code}")
        return f"{self.name}: {said} ({self.seconds:.0f} s, {self.cpu:.0f} s of CPU)"

    def read(self, lines: Iterable[str]) -> None:
        """Pass on what pytest prints; keep its lines about failures and durations."""
        summary = False
        for line in lines:
            print(f"[{self.name}] {line}", end="", flush=True)
            summary = summary or " short test summary info " in line  # before it, a test's own log may have such lines
            if summary and line.startswith(("FAILED ", "ERROR ")):
                self.failed.append(line.rstrip())
            elif line.startswith("LEFT OUT"):
                self.late.append(line.rstrip())
            elif found := re.match(r"([\d.]+)s +(?:call|setup|teardown) +.*::", line):
                self.slowest.append((float(found[1]), line.rstrip()))


def run(
    name: str, paths: Sequence[str], options: Sequence[str], root: Path, cores: int, longer: float = 0.0
) -> Outcome:
    """Run pytest over a part. cores: that it may use; longer: seconds after UNTIL's time in which long tests begin."""
    began, outcome = time.monotonic(), Outcome(name)
    until = {UNTIL: str(float(os.environ[UNTIL]) + longer)} if os.environ.get(UNTIL) else {}
    # Threads that spin while they wait for each other on cores that others want are many times slower than one.
    shared = {"OMP_NUM_THREADS": str(cores)} if cores < (os.cpu_count() or 1) else {}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *paths, f"--durations={SLOWEST}", *options],
        cwd=root,
        # Hundreds of processes import our modules: none is to compile all of them anew.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", "CLUSTERKIT_TEST_CORES": str(cores), **shared, **until},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    outcome.read(process.stdout)
    _, status, usage = os.wait4(process.pid, 0)  # unlike wait(), it tells the usage of this part alone
    process.returncode = outcome.code = os.waitstatus_to_exitcode(status)
    outcome.seconds, outcome.cpu = time.monotonic() - began, usage.ru_utime + usage.ru_stime
    return outcome


def run_parts(parts: dict[str, Sequence[str]], options: Sequence[str], root: Path) -> list[Outcome]:
    """Run all parts, some at once, in their order."""
    cores = max((os.cpu_count() or 1) // AT_ONCE, 1)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = [pool.submit(run, name, paths, options, root, cores) for name, paths in parts.items()]
        try:
            return [future.result() for future in running]
        except KeyboardInterrupt:  # it reaches the parts that run as well
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def files_of(failed: Sequence[str]) -> list[str]:
    """The files that pytest's lines of failures name, each once, in their order."""
    return list(dict.fromkeys(line.split()[1].partition("::")[0] for line in failed))


def all_tests(parts: dict[str, Sequence[str]], options: Sequence[str], root: Path) -> int:
    """Run the parts, and what failed in them once more alone; the exit code."""
    outcomes = run_parts(parts, options, root)
    failed = [line for outcome in outcomes for line in outcome.failed]
    files = files_of(failed)
    codes = [outcome.code for outcome in outcomes if outcome.code != NO_TESTS] or [NO_TESTS]
    code = max(codes, key=abs)
    told = [*failed, *(line for outcome in outcomes for line in outcome.late), *outcomes]
    # A part that ended with no word of what failed, killed say, has tests that nobody ran.
    told_why = all(outcome.failed for outcome in outcomes if outcome.code == TESTS_FAILED)
    if set(codes) <= {0, TESTS_FAILED} and told_why and 0 < len(files) <= FILES_ALONE:
        print("\nonce more, alone:", *files, flush=True)
        alone = run(f"alone, {', '.join(files)}", files, options, root, os.cpu_count() or 1, ALONE_LONGER_S)
        told += [*alone.failed, *alone.late, alone]
        # One that failed and was left out then, since time was over, has not passed.
        missed = [line.split(": ", 1)[1] for line in alone.late]
        code = alone.code or TESTS_FAILED * any(line.split(" ", 1)[1].startswith(tuple(missed)) for line in failed)
    slowest = sorted((one for outcome in outcomes for one in outcome.slowest), reverse=True)[:SLOWEST]
    print("\nslowest:", *(line for _, line in slowest), "", *told, sep="\n")
    return code


def with_rest(root: Path) -> dict[str, Sequence[str]]:
    """The parts, with what PARTS leaves open."""
    taken = {path for paths in PARTS.values() for path in paths}
    rest, unit = (
        [path for path in files_in((folder,), root) if path not in taken]
        for folder in ("tests/integration", "tests/unit")
    )
    dealt = {name: unit[number :: len(UNITS)] for number, name in enumerate(UNITS)}
    return {**PARTS, "rest": rest[::2], "more of the rest": rest[1::2], **dealt}


def files_in(paths: Iterable[str], root: Path) -> list[str]:
    """Files of tests, for files and folders."""
    found = [
        file for path in paths for file in ([root / path] if path.endswith(".py") else (root / path).rglob("test_*.py"))
    ]
    return sorted(str(file.relative_to(root)) for file in found)


def marked(parts: dict[str, Sequence[str]], root: Path) -> dict[str, Sequence[str]]:
    """The files of each part whose tests may have the mark, from themselves or from a module beside them; the others
    need not even be read by pytest. Parts of one file, which have no turns, come first.
    """

    def may_have(file: str) -> bool:
        path = root / file
        beside = (other for other in path.parent.glob("*.py") if not other.name.startswith("test_"))
        return any(MARK in one.read_text() for one in (path, *beside))

    files = {name: [file for file in files_in(paths, root) if may_have(file)] for name, paths in parts.items()}
    turn = int(os.environ.get(TURN) or 0)
    begins = {name: turn % len(found) for name, found in files.items() if found}
    turned = {name: [*files[name][begin:], *files[name][:begin]] for name, begin in begins.items()}
    return dict(sorted(turned.items(), key=lambda part: len(part[1]) > 1))


def names_tests(options: Sequence[str]) -> bool:
    """Whether some of the words are tests, and not what an option is told (-k trainer, --deselect tests/…)."""
    before = ["", *options]
    return any(
        word.startswith("tests/") and not (option.startswith("-") and "=" not in option and option not in FLAGS)
        for option, word in zip(before, options, strict=False)
    )


def main(options: list[str]) -> int:
    """Run the tests; the exit code."""
    if names_tests(options):
        options = [option for option in options if option != "--long"]
        return subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT, check=False).returncode
    parts = with_rest(ROOT)
    if "--long" in options:
        options.remove("--long")
        return all_tests(marked(parts, ROOT), ["-m", "long", *options], ROOT)
    return all_tests(parts, ["-m", "not long", *options], ROOT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
