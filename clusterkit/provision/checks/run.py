"""`clusterkit check`: look at all hosts at once, judge what they answered, and try what takes several of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from clusterkit.common.finding import Finding, Level, worst
from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.checks.nccl import all_reduce
from clusterkit.provision.checks.needs import Needs
from clusterkit.provision.checks.reach import reachable
from clusterkit.provision.checks.speed import send_rates, write_rates
from clusterkit.provision.checks.storage import storage_shared
from clusterkit.provision.checks.verdicts import judge
from clusterkit.provision.facts.model import Facts
from clusterkit.provision.facts.probe import ProbeRequest, gather
from clusterkit.provision.ray.addresses import node_address
from clusterkit.provision.ray.model import LABEL_CLUSTER
from clusterkit.provision.ray.ports import Ports
from clusterkit.provision.steps.step import Refused
from clusterkit.ssh.api import HostError, Session

Connect = Callable[[Host], Awaitable[Session]]


@dataclass(frozen=True)
class CheckRequest:
    """What to check. hosts: those of the cluster to look at. probes: also try ports and storage between the hosts."""

    cluster: Cluster
    hosts: tuple[Host, ...]
    needs: Needs = field(default_factory=Needs)
    probes: bool = True
    bandwidth: bool = False
    nccl: bool = False


@dataclass
class CheckReport:
    """What came out. answers: facts or the error by host. seconds: wall time of the whole."""

    answers: dict[str, Facts | HostError] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def unreached(self) -> list[str]:
        """Hosts that could not be worked with."""
        return [name for name, answer in self.answers.items() if isinstance(answer, HostError)]

    def of(self, host: str) -> list[Finding]:
        """Findings on one host; on the cluster for an empty name."""
        return [finding for finding in self.findings if finding.host == host]

    def verdict(self, host: str) -> str:
        """ok, warn, fail, or unreachable."""
        return "unreachable" if host in self.unreached else str(worst(self.of(host)))

    @property
    def exit_code(self) -> int:
        """0: no failure; 1: one of the hosts checked (or all hosts together) failed; 3: only some were not reached."""
        unreached = self.unreached
        if len(unreached) == len(self.answers):
            return 1
        failed = any(finding.level is Level.FAIL and finding.host not in unreached for finding in self.findings)
        return 1 if failed else 3 if unreached else 0


async def check(request: CheckRequest, connect: Connect, told: Callable[[str], None] = lambda _: None) -> CheckReport:
    """Check all hosts. told: gets a line on what is going on.

    Raises:
        UserError: `connect`'s, such as a private key file that is missing. A host's trouble is in the report.

    """
    began = time.monotonic()
    report = CheckReport()
    sessions: dict[str, Session] = {}

    async def look(host: Host) -> Facts | HostError:
        try:
            sessions[host.name] = await connect(host)
            return await gather(sessions[host.name], _wants(request.cluster, host))
        except HostError as error:
            return error

    try:
        answers = await asyncio.gather(*(look(host) for host in request.hosts))
        report.answers = {host.name: answer for host, answer in zip(request.hosts, answers, strict=True)}
        left_out = len(request.cluster.hosts) - len(request.hosts)
        needs = replace(request.needs, hosts=max(1, request.needs.hosts - left_out))
        report.findings = judge(report.answers, request.cluster, needs)
        await _between(request, report, sessions, told)
    finally:
        await asyncio.gather(*(session.close() for session in sessions.values()), return_exceptions=True)
    report.seconds = time.monotonic() - began
    return report


async def _between(
    request: CheckRequest, report: CheckReport, sessions: dict[str, Session], told: Callable[[str], None]
) -> None:
    """What takes several hosts, or leaves a file behind for a moment."""
    facts = {name: answer for name, answer in report.answers.items() if isinstance(answer, Facts)}
    cluster, able = request.cluster, [sessions[name] for name, fact in facts.items() if fact.sudo != "none"]
    everyone = [sessions[name] for name in facts]
    addresses, refused = _addresses(cluster, facts)
    if request.probes:
        told(f"{cluster.storage} and Ray's ports between {len(everyone)} hosts")
        storage, ports = await asyncio.gather(
            storage_shared(
                [session for session in able if _answers(facts[session.host.name], cluster)], cluster.storage
            ),
            reachable(everyone, addresses, cluster.head_host.name),
        )
        report.findings += [*_without_repeats(storage.findings, report.findings), *ports, *refused]
        report.findings += await _inside(cluster, facts, able)
    if request.bandwidth:
        told("bandwidth, one host after the other")
        report.findings += await write_rates(able, cluster.storage)
        report.findings += await send_rates(everyone, addresses)
    if request.nccl:
        told("an all-reduce over all GPUs")
        head = addresses.get(cluster.head_host.name, cluster.head_host.target)
        report.findings += await all_reduce(able, facts, cluster.name, head)


async def _inside(cluster: Cluster, facts: dict[str, Facts], able: list[Session]) -> list[Finding]:
    """The storage as the runtime containers see it, where they run."""
    containers = {
        name: container.name
        for name, fact in facts.items()
        for container in fact.docker.containers
        if container.state == "running" and container.labels.get(LABEL_CLUSTER) == cluster.name
    }
    inhabited = [session for session in able if session.host.name in containers]
    if not inhabited:
        return []
    report = await storage_shared(inhabited, cluster.storage, run_in=lambda name: ("docker", "exec", containers[name]))
    return [replace(finding, check="container storage") for finding in report.findings]


def _wants(cluster: Cluster, host: Host) -> ProbeRequest:
    head, ports = cluster.head_host, Ports()
    return ProbeRequest(
        storage=cluster.storage,
        head_address=head.private_address or head.target,
        ports=tuple(ports.listening(head=host.name == head.name).values()),
    )


def _addresses(cluster: Cluster, facts: dict[str, Facts]) -> tuple[dict[str, str], list[Finding]]:
    """Where the hosts reach one another, and findings on those of which that is not known."""
    addresses, refused = {}, []
    for host in cluster.hosts if len(cluster.hosts) > 1 else ():
        if host.name in facts:
            try:
                addresses[host.name] = node_address(host, facts[host.name])
            except Refused as error:
                message = f"not checked whether the others reach it: {error.message}"
                refused.append(Finding(host.name, "reach", Level.WARN, message, error.fix))
    return addresses, refused


def _answers(facts: Facts, cluster: Cluster) -> bool:
    disk = facts.disks.get(cluster.storage)
    return disk is None or not disk.timed_out


def _without_repeats(new: list[Finding], old: list[Finding]) -> list[Finding]:
    """Leave out what the facts have already told: a folder that is not there, a read-only one."""
    told = {(finding.host, finding.check) for finding in old if finding.level is not Level.OK}
    return [finding for finding in new if finding.level is Level.OK or (finding.host, finding.check) not in told]
