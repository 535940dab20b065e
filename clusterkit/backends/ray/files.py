"""The files that tell about a run of a cluster: which there are, the ends of logs, and how their places are told."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from clusterkit.backends.ray.head import Head
from clusterkit.backends.ray.storage import RECORDS, read_from
from clusterkit.runs.directory import RunDirectory
from clusterkit.ssh.api import ErrorKind, HostError
from evaluation.steps import SCORES
from trainer.paths import SUPERVISED

LOOK_SECONDS = 60.0
HELDOUT = "rollouts/eval_"
"""What the names of a run's held-out trajectories begin with."""
LOG_BYTES = 8 << 20
"""Of a longer log only the end is fetched."""

T = TypeVar("T")
Facts = dict[str, tuple[int, float]]
"""Files of a run by name below its folder: bytes, and the time of the last change."""


async def listing(head: Head, run: RunDirectory) -> tuple[Facts, float]:
    """The files that tell about a run, its attempts (`attempt_1/`), and its recover checkpoint if any (`LATEST`).

    That of a supervised start is `supervised/LATEST`. Among the files are held-out trajectories (`rollouts/eval_…`),
    not those of steps.

    Returns:
        The files, and the seconds by which the host's clock is ahead of this machine's.
    """
    named = " -o ".join(f"-name {name}" for name in RECORDS)
    recover = shlex.quote(str(run.recover))
    script = (
        f"date +%s.%N\ncd {shlex.quote(str(run.logs))} 2>/dev/null || exit 0\n"
        "find . -ignore_readdir_race -maxdepth 2 -type f "
        f"\\( {named} -o -name exit.json -o -name '*.log' -o -path './{SCORES}/*.json' "
        f"-o -path './{HELDOUT}*.jsonl.zst' -o -path './{SUPERVISED}/start.json' \\) "
        "-printf '%s %T@ %P\\n'\n"
        "find . -ignore_readdir_race -maxdepth 1 -type d -name 'attempt_*' -printf '0 0 %P/\\n'\n"
        f"[ ! -d {recover} ] || find {recover} -ignore_readdir_race -maxdepth 2 -name LATEST -printf '%s %T@ %P\\n'\n"
    )
    facts: Facts = {}
    asked = time.time()
    clock, *lines = (await run_checked(head, script)).splitlines()
    ahead = float(clock) - (asked + time.time()) / 2
    for line in lines:
        size, moment, name = line.split(" ", 2)
        if name and ".." not in Path(name).parts:
            facts[name] = (int(size), float(moment))
    return facts, ahead


async def fetch_logs(head: Head, remote: RunDirectory, local: RunDirectory, facts: Facts, seen: Facts) -> None:
    """Bring main.log and what the last attempt printed into the copy of a run; of long files only the ends.

    Args:
        facts: its files now.
        seen: the files that were fetched before, as they were then; kept up to date.
    """
    newest = f"attempt_{(local.attempt_numbers() or [0])[-1]}/"
    for name, fact in facts.items():
        if not name.endswith(".log") or ("/" in name and not name.startswith(newest)) or seen.get(name) == fact:
            continue
        skipped = max(fact[0] - LOG_BYTES, 0)
        data = await read_from(head.session, remote.logs / name, skipped, LOG_BYTES)
        path = local.logs / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data.partition(b"\n")[2] if skipped else data)
        seen[name] = fact


async def run_checked(head: Head, script: str, stdin: bytes = b"", seconds: float = LOOK_SECONDS) -> str:
    """Run a script that looks at runs; returns what it prints."""
    result = await head.session.run(script, root=True, stdin=stdin, timeout=seconds)
    if not result.ok:
        reason = " ".join(result.stderr.split()[-20:]) or f"exit code {result.exit_code}"
        raise HostError(head.session.host.name, ErrorKind.WRITE, f"the runs cannot be looked at: {reason}")
    return result.stdout


async def any_exists(head: Head, paths: Iterable[str]) -> bool:
    """Whether one of the paths exists on the cluster."""
    listed = " ".join(shlex.quote(path) for path in paths)
    script = f'for path in {listed}; do [ ! -e "$path" ] || {{ echo yes; break; }}; done'
    return bool((await run_checked(head, script)).strip())


def localise_paths(value: T, folder: Path, fileroot: str, cluster: str) -> T:
    """Text, or what holds text, with the cluster's places and commands instead of those of the copy in `folder`."""

    def one(item: Any) -> Any:
        if isinstance(item, str):
            named = item.replace(f"--fileroot {shlex.quote(str(folder))}", f"--cluster {cluster}")
            return named.replace(str(folder), fileroot)
        if isinstance(item, dict):
            return {key: one(part) for key, part in item.items()}
        return [one(part) for part in item] if isinstance(item, list | tuple) else item

    result: T = one(value)
    return result
