"""What `clusterkit runs` shows of a cluster's runs, copied from its storage: of their numbers only the ends."""

from __future__ import annotations

import os
import shlex
import zlib
from pathlib import Path

from clusterkit.backends.ray.storage import METRICS, fetch_listed, read_output
from clusterkit.runs.directory import RunDirectory
from clusterkit.ssh.api import Session
from clusterkit.ssh.shell import pipe
from trainer.paths import SUPERVISED

TAIL_BYTES = 256 << 10
"""Of each run's records: some 60 steps, in megabytes for hundreds of runs."""
_MARK = b"\x1e"
"""Begins the line before a run's records; no record has it."""


async def fetch_overviews(head: Session, fileroot: str, user: str, into: Path) -> None:
    """Copy what `clusterkit.runs.overview` reads of a user's runs, and make an empty folder for every run of others."""
    await fetch_listed(head, fileroot, _files(user), into)
    (into / "logs").mkdir(parents=True, exist_ok=True)
    ends = zlib.decompress(await read_output(head, _ends(fileroot, user), fileroot), wbits=31)
    for part in ends.split(_MARK)[1:]:
        first, _, records = part.partition(b"\n")
        written, size, name = (*first.decode(errors="replace").split(" ", 2), "", "")[:3]
        if not (written.isdigit() and size.isdigit()):
            continue  # the mark stood within damaged records
        if int(size) > TAIL_BYTES:
            records = records.partition(b"\n")[2]  # the first line is half a one
        experiment, _, trial = name.removesuffix(f"/{METRICS}").partition("/")
        run = RunDirectory(into, user, experiment, trial)
        if run.logs.is_dir():  # a run that has been listed
            run.metrics.write_bytes(records)
            os.utime(run.metrics, (int(written), int(written)))


def _files(user: str) -> str:
    """Shell that lists the small files of the user's runs, and the folders of all."""
    logs, recover = shlex.quote(f"logs/{user}"), shlex.quote(f"recover/{user}")
    return rf"""  look logs -mindepth 3 -maxdepth 3 -type d &&
    look {logs} -mindepth 3 -maxdepth 3 -type d -name 'attempt_*' &&
    look {logs} -mindepth 3 -maxdepth 3 -type f \( -name config.yaml -o -name summary.json -o -name before.json \) &&
    look {logs} -mindepth 4 -maxdepth 4 -type f -name exit.json &&
    look {logs} -mindepth 4 -maxdepth 4 -type f -name console.log -size -64k &&
    look {logs} -mindepth 4 -maxdepth 4 -type f -path '*/{SUPERVISED}/start.json' &&
    look {recover} -mindepth 3 -maxdepth 3 -type f -name LATEST &&
    look {recover} -mindepth 4 -maxdepth 4 -type f -path '*/{SUPERVISED}/LATEST'"""


def _ends(fileroot: str, user: str) -> str:
    """Script that prints the end of the records of each of the user's runs, each below a line that names it."""
    return rf"""ends() {{
  cd {shlex.quote(f"{fileroot}/logs/{user}")} 2>/dev/null || return 0
  for file in */*/{METRICS}; do
    [ -f "$file" ] || continue
    stat -L --printf '\036%Y %s %n\n' "$file" && tail -c {TAIL_BYTES} "$file" || [ ! -e "$file" ] || return 1
  done
}}
{pipe(("reading", "ends"), ("packing", "gzip -c"))}"""
