"""Which servers a run has: a JSON file for each in its log folder, `servers/NAME.json`, written by the server's host.

Trainer and servers need not know each other's processes: who sees the folder, on this machine or on the shared storage,
can add a server to a run or remove one. Standard library only, for both sides.
"""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from trainer.files import write_atomic

FOLDER = "servers"
HOST_MODULE = "trainer.serving"
"""What `python -m` runs as a server's host; host processes are recognised by it."""
HOST_MODULES = (HOST_MODULE, "trainer.judge.serve")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

State = Literal["starting", "ready", "leaving", "ended"]


@dataclass(frozen=True, slots=True)
class Registration:
    """One server of a run.

    name: unique within the run.
    engine: sglang or vllm.
    model: folder that it was started with.
    node: name of its machine.
    pid: its host process.
    started: Unix time of its present start.
    state: starting, ready, leaving (asked to end) or ended.
    url: where it answers; empty until it does.
    gpus: device numbers on its machine.
    reason: why it is not ready.
    kept: it stays when the trainer ends.
    starts: how often it was started.
    idle: seconds after which it closes an idle connection; the engines' own number where an older version wrote this.
    base: digest of the weights that it was started with (`hf_folder.weights_digest`); empty where an older version
        wrote this.
    adapters: rank of the adapters that it was started for; 0: it gets whole weights.
    targets: names of the layers that it can have adapters for; empty: any, or an older version wrote this.
    versions: adapters that it can use beside one another.
    born: when its host began (`birth_of`), which tells it from a later process of its number; 0 where an older version
        wrote this.
    """

    name: str
    engine: str
    model: str
    node: str
    pid: int
    started: float
    state: State
    url: str = ""
    gpus: tuple[int, ...] = ()
    reason: str = ""
    kept: bool = False
    starts: int = 1
    idle: float = 5.0
    base: str = ""
    adapters: int = 0
    targets: tuple[str, ...] = ()
    versions: int = 1
    born: int = 0

    def serves(self, base: str, adapters: int, targets: tuple[str, ...], versions: int) -> bool:
        """Whether it was started with these weights, and for so many adapters of that rank and of all these layers.

        What is published later does not tell: version 0 is what a server was started with, and adapters stay beside it.
        """
        unknown = not self.base and not adapters
        prepared = versions <= self.versions and (not self.targets or set(targets) <= set(self.targets))
        return self.adapters == adapters and prepared and (self.base == base or unknown)

    @property
    def here(self) -> bool:
        """Whether it is on this machine. A container that was made anew is another one, mostly by its name, too."""
        return self.node == os.uname().nodename

    @property
    def out_of_reach(self) -> bool:
        """Whether it listens on another machine's loopback address, where this machine would ask somebody else."""
        return not self.here and urlsplit(self.url).hostname in ("127.0.0.1", "localhost", "::1")

    def alive_here(self) -> bool:
        """Whether its host process runs, as far as this machine can tell; one on another machine counts as alive."""
        return not self.here or self.host_runs()

    def host_runs(self) -> bool:
        """Whether its host process runs on this machine, and is no other server's that got the number later."""
        return process_runs(self.pid) and self.born in (0, birth_of(self.pid))


def folder_of(logs: Path) -> Path:
    """The servers' folder below a run's log folder."""
    return logs / FOLDER


def write(folder: Path, registration: Registration) -> None:
    """Write or replace a server's file."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{registration.name}.json", json.dumps(asdict(registration)))


def remove(folder: Path, name: str) -> None:
    """Take a server's file away; its log stays."""
    (folder / f"{name}.json").unlink(missing_ok=True)
    _restart_file(folder, name).unlink(missing_ok=True)


def ask_restart(folder: Path, one: Registration, reason: str) -> None:
    """Ask a server's host to kill it and start it again, if that has not happened since its present start.

    Asked so already, nothing is written: of a host that is gone this is wanted every second, to the end of the run.
    """
    if restart_reason(folder, one) != reason:
        write_atomic(_restart_file(folder, one.name), json.dumps({"started": one.started, "reason": reason}))


def restart_reason(folder: Path, one: Registration) -> str:
    """Why a server's host is asked to start it again; empty where it is not."""
    try:
        asked = json.loads(_restart_file(folder, one.name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(asked["reason"]) if asked["started"] == one.started else ""


def _restart_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.restart"


def read(folder: Path) -> list[Registration]:
    """All servers by name; files that cannot be read are skipped, since they are being written."""
    found = []
    for path in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError):
            found.append(parse(path.read_text(encoding="utf-8")))
    return found


def parse(text: str) -> Registration:
    """A registration from its file's text, that of a newer version too. Raises ValueError for anything else."""
    try:
        known = {field.name for field in fields(Registration)}
        values = {name: value for name, value in json.loads(text).items() if name in known}
        return Registration(**values | {name: tuple(values.get(name, ())) for name in ("gpus", "targets")})
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error


def free_name(folder: Path, prefix: str = "server") -> str:
    """A name that no server of the run has, `server-0` first. Its file is made, so that no other takes it."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        path = folder / f"{prefix}-{number}.json"
        try:
            path.open("x").close()
        except FileExistsError:
            number += 1
            continue
        placeholder = Registration(path.stem, "", "", os.uname().nodename, os.getpid(), time.time(), "starting")
        write(folder, placeholder)
        return path.stem


def birth_of(pid: int) -> int:
    """Clock ticks from the machine's start to that of a process, which no change of its clock changes; 0: unknown."""
    try:
        # "PID (name) state parent …", and the name may hold anything.
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def process_runs(pid: int) -> bool:
    """Whether the process of this number on this machine is a server's host, not one that got the number later."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(module.encode() in command for module in HOST_MODULES)
