"""What dispatch keeps on the cluster's shared storage: packed code by content, runs; and a look at runs from here."""

from __future__ import annotations

import io
import shlex
import tarfile
from pathlib import Path
from typing import Protocol

import yaml

from clusterkit.hosts.model import Cluster
from clusterkit.nodecode import archive, content_of, node_files
from clusterkit.rundir import RunDirectory
from clusterkit.ssh.api import HostError, Session, Trouble
from clusterkit.ssh.stream import Stream
from trainer.config import RunConfig

PACK_SECONDS = 120.0
RECORDS = ("config.yaml", "metrics.jsonl", "summary.json")
_MOST_RECORDS = 2 << 30


class _Streaming(Session, Protocol):
    def stream(self, script: str, *, root: bool = False, timeout: float = 3600.0) -> _Opening: ...


class _Opening(Protocol):
    async def __aenter__(self) -> Stream: ...
    async def __aexit__(self, *_: object) -> None: ...


def fileroot_of(cluster: Cluster) -> str:
    """Where the cluster's runs lie."""
    return f"{cluster.storage}/ray/experiments"


def cache_of(cluster: Cluster) -> str:
    """Where its runs keep what can be made again, such as warmed-up weights."""
    return f"{cluster.storage}/ray/cache"


async def put_code(head: Session, cluster: Cluster) -> str:
    """Have the node side on the storage, once for every content; return its folder.

    Raises:
        HostError: the head was lost, or cannot write there.

    """
    files = node_files()
    folder = f"{cluster.storage}/codes/{content_of(files)[:16]}"
    script = f"""set -eu
umask 022
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


async def put_config(head: Session, run: RunDirectory, config: RunConfig) -> None:
    """Write the run's resolved configuration, whole or not at all.

    Raises:
        HostError: the head was lost, or cannot write there.

    """
    made = await head.run(f"umask 022 && mkdir -p {shlex.quote(str(run.logs))}", root=True)
    if not made.ok:
        raise _cannot_write(head, str(run.logs), made.stderr)
    text = yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)
    await head.put(text.encode(), str(run.config), root=True)


async def fetch_records(head: Session, fileroot: str, user: str, experiment: str, into: Path) -> None:
    """Copy what the trials of an experiment tell about themselves, for the code that reads runs of this machine.

    Configurations, metrics, summaries and whether there are recover checkpoints; no checkpoints, no trajectories.

    Raises:
        HostError: the head was lost, or cannot read there.

    """
    logs, recover = f"logs/{user}/{experiment}", f"recover/{user}/{experiment}"
    names = " -o ".join(f"-name {name}" for name in RECORDS)
    script = f"""set -eu
cd {shlex.quote(fileroot)} 2>/dev/null || exec tar -cf - -T /dev/null
{{
  find {shlex.quote(logs)} -mindepth 1 -maxdepth 1 -type d 2>/dev/null || :
  find {shlex.quote(logs)} -mindepth 2 -maxdepth 2 -type d -name 'attempt_*' 2>/dev/null || :
  find {shlex.quote(logs)} -mindepth 2 -maxdepth 2 -type f \\( {names} \\) 2>/dev/null || :
  find {shlex.quote(recover)} -mindepth 2 -maxdepth 2 -name LATEST 2>/dev/null || :
}} | tar -czf - --no-recursion --ignore-failed-read -T -
"""
    streaming: _Streaming = head  # type: ignore[assignment]  # every session over asyncssh can
    packed = io.BytesIO()
    async with streaming.stream(script, root=True, timeout=600.0) as stream:
        await stream.write_eof()
        while data := await stream.read():
            packed.write(data)
            if packed.tell() > _MOST_RECORDS:
                raise HostError(head.host.name, Trouble.LOST, f"{fileroot} holds more records than fit here")
        # tar: 1 says that a file grew while it was read, as metrics of a living run do.
        if await stream.wait() not in (0, 1):
            message = f"{fileroot} cannot be read: {stream.errors.last_lines()}"
            raise HostError(head.host.name, Trouble.WRITE, message)
    packed.seek(0)
    with tarfile.open(fileobj=packed, mode="r:*") as tar:
        tar.extractall(into, filter="data")


def _cannot_write(head: Session, where: str, said: str) -> HostError:
    reason = " ".join(said.split()[-30:]) or "no reason given"
    fix = f"is there space, and may root write there? df -h {shlex.quote(where)}; clusterkit check"
    return HostError(head.host.name, Trouble.WRITE, f"{where} cannot be written: {reason}", fix)
