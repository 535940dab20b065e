"""Read all facts about a host with one script in one round trip (two where sudo asks for a password)."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from clusterkit.provision.facts.model import Facts
from clusterkit.provision.facts.parse import facts_of
from clusterkit.provision.facts.sections import is_whole, split
from clusterkit.ssh.api import ErrorKind, HostError, Result, Session

PATHS = ("/", "/tmp", "/dev/shm", "/var/lib/docker", "/var/lib/containerd")
"""Paths whose disks are always read, beside the engine's own data root and the storage folder."""
COMMANDS = (
    "apt-get dnf yum rpm dpkg systemctl service sudo git git-lfs curl wget tar zstd gpg python3 docker dockerd "
    "containerd podman nvidia-smi nvidia-ctk nv-fabricmanager ip ss iptables nc needrestart cloud-init getenforce"
).split()

# Runs the probe as root, directly or through a sudo without a password; otherwise prints how root can be had.
_AS_ROOT = """
export LC_ALL=C PATH="$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Without a process where the kernel tells.
while read -r key _ probe_uid _; do [ "$key" != Uid: ] || break; done </proc/self/status
[ -n "$probe_uid" ] || probe_uid=$(id -u)
# Asked of the login itself: sudo forgets it.
printf "@@connection\\n%s\\n" "${SSH_CONNECTION-}"
if [ "$probe_uid" = 0 ]; then
  eval "$probe"
  exit
elif ! command -v sudo >/dev/null 2>&1; then
  said="sudo is not installed" sudo=none
elif said=$(timeout 10 sudo -n -k true </dev/null 2>&1); then
  echo @@sudo
  echo nopasswd
  printf "%s" "$probe" | exec sudo -n sh -s
  exit
else
  sudo=password
fi
printf "@@sudo\\n%s\\n%s\\n@@end\\n" "$sudo" "$said"
"""


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """What to read beyond what is always read."""

    storage: str = ""  # the shared folder
    paths: tuple[str, ...] = ()  # further paths whose disks matter
    packages: tuple[str, ...] = ()  # names, for their versions
    files: tuple[str, ...] = ()  # paths, for SHA-256 and modes
    head_address: str = ""  # name or address of the head node, for the route to it
    ports: tuple[int, ...] = ()  # TCP ports, for the names of their listeners (which takes a look at every process)
    commands: tuple[str, ...] = tuple(COMMANDS)  # names, to look up in PATH
    docker: bool = True  # ask Docker's engine
    network: bool = True  # read addresses, the route and listeners
    limit: int = 45  # seconds that one command of a busy host (docker, nvidia-smi …) may take; they run in parallel


async def gather(session: Session, request: ProbeRequest, *, timeout: float = 90.0) -> Facts:
    """Return the facts, read as root where the login user is root or can become it (`Facts.sudo` says how).

    Without root, what needs it stays empty, and `extra` has `sudo_error` and `sudo_fix`.

    Raises:
        HostError: as `Session.run`, except SUDO; also LOST where the probe did not run to its end.
    """
    script = probe_script(request)
    probe = _ClockedRun(session, timeout)
    result = await probe.run(f"probe={shlex.quote(script)}\n{_AS_ROOT}")
    sections = split(result.stdout)
    state, connection = sections["sudo"], sections["connection"].first.split()
    sudo, extra = state.first, {}
    if sudo == "password":
        try:
            result = await probe.run(script, root=True)
        except HostError as error:
            if error.kind is not ErrorKind.SUDO:
                raise
            sudo, extra = "none", {"sudo_error": error.message, "sudo_fix": error.fix}
    elif sudo == "none":
        extra = {"sudo_error": " ".join(state.lines[1:]).strip(), "sudo_fix": ""}
    if sudo == "none":
        result = await probe.run(script)
    if sudo in ("password", "none"):
        sections = split(result.stdout)
    if not is_whole(sections):
        last = (result.stderr or result.stdout).strip().splitlines()[-3:]
        raise HostError(
            session.host.name,
            ErrorKind.LOST,
            f"the probe ended early (exit code {result.exit_code}): {' / '.join(last) or 'it printed nothing'}",
            "Log in and run `sh -c 'id; uname -a'`: a shell start-up file that prints or exits gets in its way.",
        )
    facts = facts_of(sections)
    offset, error_bound = probe.clock(facts.clock)
    return facts.model_copy(
        update={
            "sudo": sudo or facts.sudo,
            "ssh_address": connection[2] if len(connection) == 4 else "",
            "clock_offset": offset,
            "clock_error": error_bound,
            "extra": {**facts.extra, **extra},
        }
    )


def probe_script(request: ProbeRequest) -> str:
    """Return the probe as one POSIX sh script. It reads no stdin and writes no file."""
    paths = dict.fromkeys([*PATHS, *([request.storage] if request.storage else []), *request.paths])
    lists = {
        "paths": [path.rstrip("/") or "/" for path in paths],
        "packages": request.packages,
        "files": request.files,
        "commands": request.commands,
        "ports": [str(port) for port in request.ports],
    }
    lines = [f"{name}={shlex.quote(shlex.join(values))}" for name, values in lists.items()]
    lines += [
        f"head={shlex.quote(request.head_address)}",
        f"docker={'yes' if request.docker else ''}",
        f"network={'yes' if request.network else ''}",
        f"limit={request.limit}",
    ]
    return "\n".join(lines) + "\n" + _body()


@cache
def _body() -> str:
    lines = Path(__file__).with_name("probe.sh").read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("#")) + "\n"


class _ClockedRun:
    """Runs the probe, and remembers between which two moments of our clock the host read its own."""

    def __init__(self, session: Session, timeout: float) -> None:
        self._session, self._timeout = session, timeout
        self._began_wall = self._began = 0.0
        self._seen: float | None = None

    async def run(self, script: str, root: bool = False) -> Result:
        self._began_wall, self._began, self._seen = time.time(), time.monotonic(), None
        result = await self._session.run(script, root=root, timeout=self._timeout, on_output=self._note)
        if self._seen is None:
            self._seen = time.monotonic()
        return result

    def _note(self, line: str) -> None:
        if self._seen is None and line.startswith("@@uid"):
            self._seen = time.monotonic()

    def clock(self, theirs: float) -> tuple[float, float]:
        """Return their clock minus ours, and the largest error of that, both in seconds."""
        half = ((self._seen or self._began) - self._began) / 2
        if theirs == 0.0:
            return 0.0, 0.0
        # A reading in whole seconds (busybox) is up to one second old.
        return theirs - (self._began_wall + half), half + (1.0 if theirs == int(theirs) else 0.0)
