"""clusterkit's side of benchmarks/provision.py: four steps through the engine that `clusterkit setup` runs its own on.

    .venv/bin/python benchmarks/provision_clusterkit.py WORK.json

Connects to all hosts at once, reads their facts with the real probe, plans, applies, looks again after every change,
and prints one JSON object. WORK.json is written by provision.py.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.facts.model import Facts
from clusterkit.provision.facts.probe import ProbeRequest, gather
from clusterkit.provision.steps.packages import install_action
from clusterkit.provision.steps.shell import place_file
from clusterkit.provision.steps.step import Action, DesiredState, Step
from clusterkit.provision.steps.systems import system_of
from clusterkit.setup import view
from clusterkit.setup.hostlog import HostLog
from clusterkit.setup.model import HostReport, Report, State, StepFailedError
from clusterkit.setup.runner import HostRunner, Watch
from clusterkit.ssh.connection import connect
from clusterkit.ssh.options import SshOptions


@dataclass(frozen=True)
class Packages:
    """Packages that have to be installed."""

    packages: tuple[str, ...]
    name: str = "packages"

    def plan(self, facts: Facts, wish: DesiredState) -> tuple[Action, ...]:
        missing = tuple(package for package in self.packages if package not in facts.packages)
        return (install_action(system_of(facts), wish, missing),) if missing else ()


@dataclass(frozen=True)
class Folder:
    """A folder below others that may be missing too, with its mode."""

    path: str
    mode: int
    name: str = "folder"

    def plan(self, facts: Facts, wish: DesiredState) -> tuple[Action, ...]:  # noqa: ARG002
        disk = facts.disks.get(self.path)
        if disk is None or not disk.exists:
            return (Action(f"make {self.path}", f"mkdir -p -m {self.mode:04o} {shlex.quote(self.path)}\n"),)
        return _with_mode(facts, self.path, self.mode)


@dataclass(frozen=True)
class File:
    """A file with its content and mode."""

    name: str
    path: str
    content: bytes
    mode: int

    def plan(self, facts: Facts, wish: DesiredState) -> tuple[Action, ...]:  # noqa: ARG002
        written = place_file(facts, self.name, self.path, self.content, mode=self.mode)
        return written or _with_mode(facts, self.path, self.mode)


def _with_mode(facts: Facts, path: str, mode: int) -> tuple[Action, ...]:
    if facts.modes.get(path) == mode:
        return ()
    return (Action(f"set the mode of {path}", f"chmod {mode:04o} {shlex.quote(path)}\n"),)


@dataclass(frozen=True)
class Run:
    """All hosts of WORK.json, with what each is to be."""

    work: dict[str, Any]

    @property
    def cluster(self) -> Cluster:
        return Cluster(
            hosts=tuple(
                Host(name=host["name"], address=host["address"], port=host["port"], username=self.work["user"])
                for host in self.work["hosts"]
            )
        )

    def steps(self, host: dict[str, Any]) -> tuple[Step, ...]:
        """The four steps; the template is filled in on this side, as the other tools do."""
        work = self.work
        filled = Template(work["template_text"]).substitute(name=host["name"], folder=host["folder"])
        return (
            Packages(tuple(work["packages"])),
            Folder(host["folder"], int(work["folder_mode"], 8)),
            File("config", host["config"], work["config_text"].encode(), int(work["config_mode"], 8)),
            File("json", host["json"], filled.encode(), int(work["json_mode"], 8)),
        )

    def wants(self, host: dict[str, Any]) -> ProbeRequest:
        """What the four steps have to know."""
        return ProbeRequest(
            paths=(host["folder"],),
            packages=tuple(self.work["packages"]),
            files=(host["config"], host["json"]),
            commands=(),
            docker=False,
            network=False,
        )

    async def host(self, runner: HostRunner, entry: dict[str, Any], wish: DesiredState, options: SshOptions) -> None:
        try:
            async with runner.timed("connect"):
                runner.session = await connect(runner.host, options)
            runner.show("connect", State.OK)
            async with runner.timed("check"):
                runner.facts = await runner.look(runner.session)
            runner.show("check", State.OK)
            await runner.run_steps(self.steps(entry), wish)
        except StepFailedError as failure:
            runner.report.failure = failure

    async def all(self, watch: Watch, report: Report) -> None:
        began = time.monotonic()
        cluster = self.cluster
        options = SshOptions(
            private_key_files=(self.work["key"],), host_key_policy="strict", known_hosts=Path(self.work["known_hosts"])
        )
        logs = Path(self.work["logs"])
        runners = []
        for host, entry in zip(cluster.hosts, self.work["hosts"], strict=True):
            log = HostLog(logs, host.name)
            look = partial(gather, request=self.wants(entry))
            runners.append(HostRunner(host, report.hosts[host.name], log, look, watch, dry=False))
        wish = DesiredState(cluster=cluster)
        await asyncio.gather(
            *(
                self.host(runner, entry, wish, options)
                for runner, entry in zip(runners, self.work["hosts"], strict=True)
            )
        )
        await asyncio.gather(*(runner.session.close() for runner in runners if runner.session is not None))
        for runner in runners:
            runner.log.close()
        report.wall_seconds = time.monotonic() - began


def peak_memory() -> int:
    """Bytes that this process has held at most. (getrusage would count what its parent held when it was forked.)"""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> int:
    work = json.loads(Path(sys.argv[1]).read_text())
    run = Run(work)
    names = ("connect", "check", *(step.name for step in run.steps(work["hosts"][0])))
    report = Report({h["name"]: HostReport(h["name"], dict.fromkeys(names, State.WAITING)) for h in work["hosts"]})
    with view.show(list(report.hosts.values()), names) as watch:
        asyncio.run(run.all(watch, report))
    print(view.summary(report, names, dry=False), file=sys.stderr)
    rows = report.as_dict()
    rows["seconds"] = {name: max(host["seconds"].get(name, 0.0) for host in rows["hosts"]) for name in names}
    print(json.dumps({k: rows[k] for k in rows if k != "hosts"} | {"peak_memory": peak_memory()}))
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
