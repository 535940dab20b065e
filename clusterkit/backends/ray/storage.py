"""What dispatch keeps on the cluster's shared storage: packed code by content, runs; and a look at runs from here.

`fileroot` is where the runs lie there, `into` the fileroot of the copies.
"""

from __future__ import annotations

import hashlib
import io
import secrets
import shlex
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from clusterkit.common.node_code import archive, content_of, node_files
from clusterkit.hosts.model import Cluster
from clusterkit.runs.directory import RunDirectory
from clusterkit.ssh.api import ErrorKind, HostError, Session
from clusterkit.ssh.shell import pipe
from evaluation.steps import SCORES
from trainer.config import RunConfig
from trainer.paths import SUPERVISED

PACK_SECONDS = 120.0
FETCH_SECONDS = 3600.0
METRICS = "metrics.jsonl"
RECORDS = ("config.yaml", METRICS, "summary.json", "overrides.yaml")
SUBMITTED = "submitted"
"""In a run's folder: the configuration of every submission, each in a file of its own."""
_MOST_RECORDS = 2 << 30


def fileroot_of(cluster: Cluster) -> str:
    """Where the cluster's runs lie."""
    return f"{cluster.storage}/ray/experiments"


def cache_of(cluster: Cluster) -> str:
    """Where its runs keep what can be made again, such as warmed-up weights."""
    return f"{cluster.storage}/ray/cache"


async def put_code(head: Session, cluster: Cluster, own: Sequence[tuple[str, bytes]] = ()) -> str:
    """Have the node side on the storage, once for every content. Returns its folder.

    Args:
        own: the user's files beside it, path and content.
    """
    files = sorted([*node_files(), *own])
    folder = f"{cluster.storage}/codes/{content_of(files)[:16]}"
    script = f"""umask 022
[ ! -d {shlex.quote(folder)} ] || exit 0
new=$(mktemp -d {shlex.quote(cluster.storage)}/codes/.new-XXXXXX)
trap 'rm -rf "$new"' EXIT
chmod 755 "$new"
tar -xzf - -C "$new" --no-same-owner
mv -T "$new" {shlex.quote(folder)} 2>/dev/null || [ -d {shlex.quote(folder)} ]
"""
    result = await head.run(script, root=True, stdin=archive(files), timeout=PACK_SECONDS)
    if not result.ok:
        raise _cannot_write(head, folder, result.stderr)
    return folder


async def put_config(head: Session, run: RunDirectory, config: RunConfig) -> tuple[Path, str]:
    """Write what a job is to run with, under a name that no other submission has; its place and its SHA-256.

    Not config.yaml: two commands may submit the same trial at this moment. The job that Ray takes puts it there.
    """
    text = yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True).encode()
    digest = hashlib.sha256(text).hexdigest()
    path = run.logs / SUBMITTED / f"{digest[:12]}-{secrets.token_hex(4)}.yaml"
    made = await head.run(f"umask 022 && mkdir -p {shlex.quote(str(path.parent))}", root=True)
    if not made.ok:
        raise _cannot_write(head, str(run.logs), made.stderr)
    await head.put(text, str(path), root=True)
    return path, digest


async def drop_config(head: Session, path: Path) -> None:
    """Take away the configuration of a submission that Ray did not take."""
    folder = shlex.quote(str(path.parent))
    await head.run(f"rm -f {shlex.quote(str(path))} && rmdir {folder} 2>/dev/null || :", root=True)


async def fetch_records(
    head: Session, fileroot: str, user: str, experiment: str, into: Path, *, trial: str = "*", metrics: bool = True
) -> None:
    """Copy what the trials of an experiment tell about themselves, for the code that reads runs of this machine.

    These are configurations, metrics, summaries, consoles' ends, exit markers, scores, whether there are recover
    checkpoints, and whether a supervised start is done; no checkpoints and no trajectories.

    Args:
        metrics: metrics.jsonl as well.
    """
    logs, recover = (shlex.quote(f"{folder}/{user}/{experiment}") for folder in ("logs", "recover"))
    chosen = "" if trial == "*" else f"/{shlex.quote(trial)}"
    names = " -o ".join(f"-name {name}" for name in RECORDS if metrics or name != METRICS)
    listing = rf"""  look {logs}{chosen or "/."} -maxdepth {0 if chosen else 1} -type d || return 1
  for run in {logs}{chosen or "/*"}; do
    look "$run" -mindepth 1 -maxdepth 1 -type d -name 'attempt_*' &&
      look "$run" -mindepth 2 -maxdepth 2 -type f -name exit.json &&
      look "$run" -mindepth 2 -maxdepth 2 -type f -path '*/{SCORES}/*.json' &&
      look "$run" -mindepth 2 -maxdepth 2 -type f -name console.log -size -4096k &&
      look "$run" -mindepth 2 -maxdepth 2 -type f -path '*/{SUPERVISED}/start.json' &&
      look "$run" -mindepth 1 -maxdepth 1 -type f \( {names} \) || return 1
  done
  look {recover} -mindepth 2 -maxdepth 2 -name LATEST &&
    look {recover} -mindepth 3 -maxdepth 3 -path '*/{SUPERVISED}/LATEST'"""
    await fetch_listed(head, fileroot, listing, into)


@dataclass(frozen=True)
class ListedRun:
    """A run as it lies on the storage."""

    run: RunDirectory  # its folder there
    started: float  # Unix seconds of its last start, by the storage's clock
    started_ago: float  # seconds since then


async def list_runs(head: Session, fileroot: str, user: str) -> list[ListedRun]:
    """A user's runs, the one that was started last at the end."""
    script = rf"""date +%s.%N
cd {shlex.quote(f"{fileroot}/logs/{user}")} 2>/dev/null || exit 0
find . -ignore_readdir_race -mindepth 3 -maxdepth 3 -type f \
  \( -name metrics.jsonl -o -name config.yaml \) -printf '%T@ %P\n'
"""
    now, *lines = (await read_output(head, script, fileroot)).decode(errors="replace").splitlines()
    written: dict[tuple[str, str], dict[str, float]] = {}
    for line in lines:
        moment, _, path = line.partition(" ")
        parts = path.split("/")
        if len(parts) == 3 and ".." not in parts:
            written.setdefault((parts[0], parts[1]), {})[parts[2]] = float(moment)
    found = []
    for name, files in written.items():
        started = files.get("config.yaml", max(files.values()))  # every start writes it
        found.append(ListedRun(RunDirectory(Path(fileroot), user, *name), started, float(now) - started))
    return sorted(found, key=lambda one: one.started)


async def newest_run(
    head: Session, fileroot: str, user: str, experiment: str | None, trial: str | None
) -> ListedRun | None:
    """The run that was started last, among those of a name; None without any. Raises HostError as `list_runs`."""
    for one in reversed(await list_runs(head, fileroot, user)):
        if experiment in (None, one.run.experiment) and trial in (None, one.run.trial):
            return one
    return None


async def read_from(head: Session, path: Path, offset: int, most: int = 8 << 20) -> bytes:
    """At most `most` bytes of a file from `offset` on; empty where it is not there or not that long."""
    name = shlex.quote(str(path))
    script = f"""[ -e {name} ] || exit 0
size=$(stat -c %s {name})
[ "$size" -gt {offset} ] || exit 0
exec dd if={name} bs=1M iflag=skip_bytes,count_bytes,fullblock skip={offset} count={most} status=none
"""
    return await read_output(head, script, str(path))


async def read_whole(head: Session, path: Path) -> bytes:
    """All of a file; empty where it is not there. Raises HostError as `read_from`."""
    data = b""
    while piece := await read_from(head, path, len(data)):
        data += piece
    return data


async def fetch_folders(head: Session, root: str, names: Sequence[str], into: Path, leave_out: str = "") -> None:
    """Copy whole folders, with their paths.

    Args:
        root: the folder that they are in.
        names: of the folders, below `root`.
        leave_out: name of folders and files that stay there.
    """
    left_out = f"--exclude {shlex.quote(leave_out)} " if leave_out else ""
    listed = " ".join(shlex.quote(name) for name in names)
    script = f"cd {shlex.quote(root)} && tar -czf - {left_out}-- {listed}"
    with tempfile.TemporaryFile() as packed:  # answers of a large evaluation are more than fits into memory
        async with head.stream(script, root=True, timeout=FETCH_SECONDS) as stream:
            await stream.write_eof()
            while data := await stream.read():
                packed.write(data)
            if code := await stream.wait():
                message = stream.errors.last_lines() or f"exit code {code}"
                raise HostError(head.host.name, ErrorKind.WRITE, f"{root} cannot be read: {message}")
        packed.seek(0)
        with tarfile.open(fileobj=packed, mode="r:*") as tar:
            tar.extractall(into, filter="data")


async def size_of(head: Session, path: Path) -> int:
    """Bytes of a file. Raises HostError: the head was lost, or cannot read there; there is no such file."""
    return int(await read_output(head, f"stat -L -c %s -- {shlex.quote(str(path))}", str(path)))


async def newest_attempt(head: Session, run: RunDirectory) -> int:
    """Number of a run's last attempt; 0 without one. Raises HostError where the head was lost, or cannot read there."""
    listed = await read_output(head, f"ls {shlex.quote(str(run.logs))}", str(run.logs))
    names = [name.removeprefix("attempt_") for name in listed.decode(errors="replace").split()]
    return max((int(name) for name in names if name.isdigit()), default=0)


async def fetch_listed(head: Session, fileroot: str, listing: str, into: Path) -> None:
    """Copy files below fileroot; nothing where it does not exist.

    Args:
        listing: shell that prints their paths, relative to fileroot, with `look FOLDER FIND-OPTIONS…`.
    """
    # What grows while it is read, as a living run's files do, is fine: tar ends with 1.
    packing = pipe(
        ("listing", "list"), ("packing", "tar -czf - --no-recursion --ignore-failed-read -T - || [ $? = 1 ]")
    )
    script = rf"""[ -d {shlex.quote(fileroot)} ] || exec tar -cf - -T /dev/null
cd {shlex.quote(fileroot)}
look() {{
  folder=$1
  shift
  [ ! -d "$folder" ] || find "$folder" -ignore_readdir_race "$@"
}}
list() {{
{listing}
}}
{packing}"""
    packed = io.BytesIO(await read_output(head, script, fileroot))
    with tarfile.open(fileobj=packed, mode="r:*") as tar:
        tar.extractall(into, filter="data")


async def read_output(head: Session, script: str, what: str) -> bytes:
    """All that a script prints, which is run there as root.

    Args:
        what: what it reads, for the message.
    """
    parts, size = [], 0
    async with head.stream(script, root=True, timeout=600.0) as stream:
        await stream.write_eof()
        while data := await stream.read():
            parts.append(data)
            size += len(data)
            if size > _MOST_RECORDS:
                raise HostError(head.host.name, ErrorKind.LOST, f"{what} holds more records than fit here")
        code = await stream.wait()
        message = stream.errors.last_lines()
        if code:
            raise HostError(head.host.name, ErrorKind.WRITE, f"{what} cannot be read: {message or f'exit code {code}'}")
    return b"".join(parts)


def _cannot_write(head: Session, where: str, message: str) -> HostError:
    reason = " ".join(message.split()[-30:]) or "no reason given"
    fix = f"is there space, and may root write there? df -h {shlex.quote(where)}; clusterkit check"
    return HostError(head.host.name, ErrorKind.WRITE, f"{where} cannot be written: {reason}", fix)
