"""An image straight from one host to another over SSH, with a key that exists for this one transfer.

The sending host makes the key; the private half never leaves it. The receiving host lets it in for `docker load` and
nothing else, until a time that stands in the same line. Both are removed afterwards, also after a failure; a line that
a killed clusterkit left is worthless after its time and removed by the next transfer.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shlex
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from clusterkit.images.errors import ImageError
from clusterkit.images.identity import Image
from clusterkit.images.meter import PRELUDE, Progress, counter, readable
from clusterkit.ssh.api import HostError, Session

MARK = "clusterkit-once"
_SHORT = 30.0
_NO_WAY = "the hosts cannot reach one another by SSH"


@dataclass(frozen=True)
class _Door:
    """How the sender gets in: user@address, port, and the host keys that it must meet there."""

    user: str
    address: str
    port: int
    host_keys: tuple[str, ...]


class _Streaming(Protocol):
    """A session whose scripts can be read from and written to while they run."""

    def stream(self, script: str, *, root: bool = False, timeout: float = 3600.0) -> AbstractAsyncContextManager[Any]:
        """Run a script as a pair of streams."""


async def send(
    source: Session, target: Session, image: Image, *, progress: Progress | None = None, timeout: float
) -> None:
    """Send an image from host to host.

    Raises:
        ImageError: they cannot reach one another, or the transfer failed.
        HostError: as `Session.run`.

    """
    async with _one_time_key(source) as (folder, public), _open_door(target, public, timeout) as door:
        known = "".join(f"receiver {key}\n" for key in door.host_keys)
        options = ["-F", "/dev/null", "-i", f"{folder}/key", "-p", str(door.port)]
        for option in (
            "IdentitiesOnly=yes",
            "BatchMode=yes",
            "StrictHostKeyChecking=yes",
            "HostKeyAlias=receiver",
            f"UserKnownHostsFile={folder}/known_hosts",
            "GlobalKnownHostsFile=/dev/null",
            "ConnectTimeout=10",
            "ServerAliveInterval=15",
            "ServerAliveCountMax=4",
            "Compression=no",
        ):
            options += ["-o", option]
        ssh = shlex.join(["ssh", *options, "--", f"{door.user}@{door.address}"])
        script = f"""{PRELUDE}
trap 'kill "$ticker" 2>/dev/null || :; rm -rf "$work" {folder}' EXIT
printf %s {shlex.quote(known)} >{folder}/known_hosts
{{ docker save {shlex.quote(image.run_as)} || failed 'docker save'; }} \\
  | {{ moved || failed copying; }} \\
  | {{ {ssh} || failed 'ssh or docker load'; }}
all_went_well
"""
        on_output = counter(target.host.name, image.size, progress)
        result = await source.run(script, root=True, timeout=timeout, on_output=on_output)
        if not result.ok:
            said = readable(result.stderr) or f"exit code {result.exit_code}"
            raise ImageError(target.host.name, f"{source.host.name} could not send the image: {said}")
    if progress is not None:
        progress(target.host.name, image.size, image.size)


async def relay(
    source: Session, target: Session, image: Image, *, progress: Progress | None = None, timeout: float
) -> None:
    """Send an image through this machine, over the two connections that it has.

    Raises:
        ImageError: the transfer failed, or these sessions cannot do it.
        HostError: as `Session.run`.

    """
    from clusterkit.ssh.stream import relay as copy  # noqa: PLC0415 (asyncssh is slow to import)

    if not hasattr(source, "stream") or not hasattr(target, "stream"):
        raise ImageError(target.host.name, f"{_NO_WAY}, and this machine has no stream to either")
    save = f"docker save {shlex.quote(image.run_as)} | gzip -1"
    host = target.host.name

    def moved(done: int) -> None:
        if progress is not None:
            progress(host, done, 0)

    async with (
        _streaming(source).stream(save, root=True, timeout=timeout) as reading,
        _streaming(target).stream("gzip -dc | docker load -q", root=True, timeout=timeout) as writing,
    ):
        await copy(reading, writing, moved)
        for session, stream in ((source, reading), (target, writing)):
            if await stream.wait():
                said = stream.errors.last_lines()
                raise ImageError(host, f"{session.host.name} failed to hand the image on: {said}")


def _streaming(session: Any) -> _Streaming:
    streaming: _Streaming = session
    return streaming


@asynccontextmanager
async def _one_time_key(source: Session) -> AsyncIterator[tuple[str, str]]:
    """Folder with the private key on the sending host, and the public key."""
    script = """set -eu
umask 077
find /tmp -maxdepth 1 -name 'clusterkit-once.*' -mmin +300 -exec rm -rf {} + 2>/dev/null || :
folder=$(mktemp -d /tmp/clusterkit-once.XXXXXX)
ssh-keygen -q -t ed25519 -N '' -C '' -f "$folder/key" || { rm -rf "$folder"; exit 1; }
echo "$folder"
cat "$folder/key.pub"
"""
    result = await source.run(script, root=True, timeout=_SHORT)
    lines = result.stdout.splitlines()
    if not result.ok or len(lines) < 2:
        said = result.stderr.strip()[-300:]
        raise ImageError(source.host.name, f"a key for one transfer cannot be made: {said}", "install openssh-client")
    folder = shlex.quote(lines[0])
    try:
        yield folder, " ".join(lines[1].split()[:2])
    finally:
        await _afterwards(source, f"rm -rf {folder}", root=True)


@asynccontextmanager
async def _open_door(target: Session, public: str, seconds: float) -> AsyncIterator[_Door]:
    """Let the key in, as the account that we are logged in as ourselves."""
    until = int(time.time() + seconds + 300)
    mark = f"{MARK}-{until}-{secrets.token_hex(4)}"
    result = await target.run(_open_script(public, mark, int(seconds // 60) + 5), timeout=_SHORT)
    try:
        told: dict[str, list[str]] = {}
        for line in result.stdout.splitlines():
            name, _, value = line.partition(" ")
            told.setdefault(name, []).append(value)
        connection = (told.get("@connection") or [""])[0].split()
        if not result.ok or len(connection) != 4 or not told.get("@key"):
            said = result.stderr.strip()[-300:] or "its sshd does not say where it listens"
            raise ImageError(target.host.name, f"no other host can be let in for the image: {said}")
        # Where sshd met us is where it listens, behind whatever address translation; the user may know better.
        yield _Door(
            user=told["@user"][0],
            address=target.host.private_address or connection[2],
            port=int(connection[3]),
            host_keys=tuple(" ".join(key.split()[:2]) for key in told["@key"]),
        )
    finally:
        await _afterwards(target, _close_script(mark), root=False)


def _open_script(public: str, mark: str, minutes: int) -> str:
    return f"""set -eu
docker=$(command -v docker)
if [ "$(id -u)" = 0 ] || docker version >/dev/null 2>&1; then load="$docker load -q"
elif sudo -n true 2>/dev/null; then load="sudo -n $docker load -q"
else echo "$(id -un) may not use Docker without a password" >&2; exit 1
fi
umask 077
mkdir -p ~/.ssh
file=~/.ssh/authorized_keys
until=$(date -d '+{minutes} minutes' +%Y%m%d%H%M)
if [ -f "$file" ] && grep -q ' {MARK}-' "$file"; then
  # Lines of transfers that are over by now: their clusterkit was killed.
  awk -v now="$(date +%s)" '{{ n = split($NF, part, "-") }}
    n == 4 && part[1] "-" part[2] == "{MARK}" && part[3] < now {{ next }} {{ print }}' "$file" >"$file.{mark}"
  cat "$file.{mark}" >"$file"; rm -f "$file.{mark}"
fi
if [ -s "$file" ] && [ -n "$(tail -c 1 "$file")" ]; then echo >>"$file"; fi
printf 'restrict,expiry-time="%s",command="%s" %s {mark}\\n' "$until" "$load" '{public}' >>"$file"
command -v restorecon >/dev/null 2>&1 && restorecon -R ~/.ssh || :
echo "@user $(id -un)"
echo "@connection ${{SSH_CONNECTION-}}"
for key in /etc/ssh/ssh_host_*_key.pub; do echo "@key $(cat "$key")"; done
"""


def _close_script(mark: str) -> str:
    return f"""umask 077
file=~/.ssh/authorized_keys
if grep -q ' {mark}$' "$file"; then
  grep -v ' {mark}$' "$file" >"$file.{mark}"
  cat "$file.{mark}" >"$file"
  rm -f "$file.{mark}"
fi
"""


async def _afterwards(session: Session, script: str, *, root: bool) -> None:
    """Clean up, whatever else goes wrong and even when we are being cancelled."""
    with contextlib.suppress(HostError):
        await asyncio.shield(session.run(script, root=root, timeout=_SHORT))
