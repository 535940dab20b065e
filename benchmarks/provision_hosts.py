"""The hosts of benchmarks/provision.py: real SSH servers on loopback, each with a folder that stands for its disk."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from string import Template
from types import TracebackType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from sshd import SshdFactory, wait_until

PACKAGES = ["git", "curl"]
FOLDER_MODE, CONFIG_MODE, JSON_MODE = "0750", "0640", "0600"
CONFIG = "".join(f"setting_{number} = {number * number}\n" for number in range(40))
# No line end at the end: Jinja drops it, Ansible keeps it.
TEMPLATE = '{\n  "host": "$name",\n  "data": "$folder",\n  "features": {"cdi": true}\n}'


def template(name: str, folder: str) -> str:
    """The text of step 4 with these words in it: values, or another template language's names for them."""
    return Template(TEMPLATE).substitute(name=name, folder=folder)


@dataclass(frozen=True)
class Place:
    """One host: its name, where its server listens, and the folder that its steps work in."""

    name: str
    address: str
    port: int
    root: Path

    @property
    def folder(self) -> Path:
        """Step 2: a folder three levels down."""
        return self.root / "srv" / "data" / "app"

    @property
    def config(self) -> Path:
        """Step 3: a file with given content."""
        return self.folder / "app.conf"

    @property
    def json(self) -> Path:
        """Step 4: a file from a template."""
        return self.folder / "host.json"

    def as_dict(self) -> dict[str, Any]:
        paths = {"folder": str(self.folder), "config": str(self.config), "json": str(self.json)}
        return {"name": self.name, "address": self.address, "port": self.port, **paths}

    def wrong(self) -> list[str]:
        """What is not as the four steps want it."""
        filled = template(self.name, str(self.folder))
        wanted = ((self.folder, FOLDER_MODE, None), (self.config, CONFIG_MODE, CONFIG), (self.json, JSON_MODE, filled))
        found = []
        for path, mode, text in wanted:
            if not path.exists():
                found.append(f"{path} is missing")
            elif path.stat().st_mode & 0o7777 != int(mode, 8):
                found.append(f"{path} has mode {path.stat().st_mode & 0o7777:04o}")
            elif text is not None and path.read_text() != text:
                found.append(f"{path} has other content")
        return found

    def state(self) -> list[tuple[int, int, int]]:
        """Changes with every write to what the steps made."""
        paths = (self.folder, self.config, self.json)
        return [(s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for s in (path.stat() for path in paths)]


class Hosts:
    """Running servers, and a file with their keys."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        self.servers = SshdFactory(folder / "servers")
        self.known_hosts = folder / "known_hosts"
        self.places: list[Place] = []
        self.pids: list[int] = []
        """Of the servers."""

    def __enter__(self) -> Hosts:
        width = len(str(self.count))
        for number in range(1, self.count + 1):
            server = self.servers("Subsystem sftp internal-sftp")  # pyinfra sends files through it
            name = f"h{number:0{width}}"
            self.pids.append(int((server.folder / "pid").read_text()))
            self.places.append(Place(name, server.address, server.port, self.folder / "disks" / name))
        key = (self.folder / "servers" / "host_key.pub").read_text().rsplit(" ", 1)[0]
        self.known_hosts.write_text("".join(f"[{place.address}]:{place.port} {key}\n" for place in self.places))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.servers.close()
        shutil.rmtree(self.folder)

    def wipe(self) -> None:
        """Back to nothing, but for the packages."""
        for place in self.places:
            shutil.rmtree(place.root, ignore_errors=True)
            place.root.mkdir(parents=True)

    def spoil(self) -> None:
        """Something wrong at each of the three things that the steps made."""
        for place in self.places:
            place.folder.chmod(0o700)
            place.config.chmod(0o666)
            place.json.write_text("{}\n")

    def wrong(self) -> list[str]:
        """All that is not as wished."""
        return [text for place in self.places for text in place.wrong()]

    def cpu_seconds(self) -> float:
        """What all servers and all that ran in their sessions have used; sessions count once they are over."""
        ticks = 0
        for pid in self.pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(field) for field in fields[11:15])  # its own time and that of its children
        return ticks / os.sysconf("SC_CLK_TCK")

    def wait_until_left(self) -> None:
        """Wait until nobody is logged in any more."""
        for server in self.pids:
            path = Path(f"/proc/{server}/task/{server}/children")
            wait_until(lambda path=path: not path.read_text().strip(), seconds=10.0)

    def work(self) -> Path:
        """The work as a file, for clusterkit's side."""
        path = self.folder / "work.json"
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        work = {
            "user": "root",
            "key": str(self.servers.key),
            "known_hosts": str(self.known_hosts),
            "logs": str(logs),
            "packages": PACKAGES,
            "folder_mode": FOLDER_MODE,
            "config_mode": CONFIG_MODE,
            "config_text": CONFIG,
            "json_mode": JSON_MODE,
            "template_text": TEMPLATE,
            "hosts": [place.as_dict() for place in self.places],
        }
        path.write_text(json.dumps(work))
        return path
