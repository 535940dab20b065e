"""`clusterkit check`: read the facts of all hosts at once, judge them, and run the probes between hosts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from clusterkit.common.finding import Finding, Level, worst
from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.checks.cluster import judge_cluster
from clusterkit.provision.checks.gpu import judge_gpus
from clusterkit.provision.checks.host import judge_host
from clusterkit.provision.checks.nccl import all_reduce
from clusterkit.provision.checks.nccl_kept import kept_findings
from clusterkit.provision.checks.needs import Needs
from clusterkit.provision.checks.reach import reachable
from clusterkit.provision.checks.speed import send_rates, write_rates
from clusterkit.provision.checks.storage import storage_shared
from clusterkit.provision.facts.model import Facts
from clusterkit.provision.facts.probe import ProbeRequest, gather
from clusterkit.provision.ray.addresses import node_address
from clusterkit.provision.ray.hosts import Connect
from clusterkit.provision.ray.model import running_containers
from clusterkit.provision.ray.ports import Ports
from clusterkit.provision.steps.step import Refused
from clusterkit.ssh.api import HostError, Session


@dataclass(frozen=True)
class CheckRequest:
    """What to check."""

    cluster: Cluster
    hosts: tuple[Host, ...]  # of the cluster
    needs: Needs = field(default_factory=Needs)
    probes: bool = True  # also try ports and storage between the hosts
    bandwidth: bool = False
    nccl: bool = False


@dataclass
class CheckReport:
    """The result of a check."""

    answers: dict[str, Facts | HostError] = field(default_factory=dict)  # by host
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0  # wall time

    @property
    def unreached(self) -> list[str]:
        """Hosts that could not be worked with."""
        return [name for name, answer in self.answers.items() if isinstance(answer, HostError)]

    def of(self, host: str) -> list[Finding]:
        """Return the findings on one host, or on the cluster for an empty name."""
        return [finding for finding in self.findings if finding.host == host]

    def verdict(self, host: str) -> str:
        """Return ok, warn, fail or unreachable."""
        return "unreachable" if host in self.unreached else str(worst(self.of(host)))

    @property
    def exit_code(self) -> int:
        """0: no failure; 1: one of the hosts checked (or all hosts together) failed; 3: only some were not reached."""
        unreached = self.unreached
        if len(unreached) == len(self.answers):
            return 1
        failed = any(finding.level is Level.FAIL and finding.host not in unreached for finding in self.findings)
        return 1 if failed else 3 if unreached else 0


async def check(request: CheckRequest, connect: Connect, say: Callable[[str], None] = lambda _: None) -> CheckReport:
    """Check all hosts. say: gets a line on each part of the check.

    Raises:
        UserError: as `connect`, such as a missing private key file. Failures of one host are in the report.
    """
    began = time.monotonic()
    report = CheckReport()
    sessions: dict[str, Session] = {}

    async def look(host: Host) -> Facts | HostError:
        try:
            sessions[host.name] = await connect(host)
            return await gather(sessions[host.name], _probe_request(request.cluster, host))
        except HostError as error:
            return error

    try:
        answers = await asyncio.gather(*(look(host) for host in request.hosts))
        report.answers = {host.name: answer for host, answer in zip(request.hosts, answers, strict=True)}
        left_out = len(request.cluster.hosts) - len(request.hosts)
        needs = replace(request.needs, hosts=max(1, request.needs.hosts - left_out))
        report.findings = judge(report.answers, request.cluster, needs)
        await _between(request, report, sessions, say)
    finally:
        await asyncio.gather(*(session.close() for session in sessions.values()), return_exceptions=True)
    report.seconds = time.monotonic() - began
    return report


def judge(answers: Mapping[str, Facts | HostError], cluster: Cluster, needs: Needs | None = None) -> list[Finding]:
    """Return the findings on all hosts in their order, then those on the cluster.

    Args:
        answers: facts by host, or the error of a host that could not be worked with.
    """
    needs = needs or Needs()
    findings = []
    for host in cluster.hosts:
        answer = answers.get(host.name)
        if isinstance(answer, HostError):
            findings.append(Finding(host.name, "connection", Level.FAIL, answer.message, answer.fix))
        elif answer is not None:
            findings += judge_host(host, answer, cluster, needs)
            findings += judge_gpus(host, answer, cluster, needs)
    facts = {name: answer for name, answer in answers.items() if isinstance(answer, Facts)}
    findings += judge_cluster(facts, needs)
    order = [host.name for host in cluster.hosts]
    return sorted(findings, key=lambda finding: order.index(finding.host) if finding.host in order else len(order))


async def _between(
    request: CheckRequest, report: CheckReport, sessions: dict[str, Session], say: Callable[[str], None]
) -> None:
    """Run the probes that need several hosts, or write a file for a moment."""
    facts = {name: answer for name, answer in report.answers.items() if isinstance(answer, Facts)}
    cluster, able = request.cluster, [sessions[name] for name, fact in facts.items() if fact.sudo != "none"]
    everyone = [sessions[name] for name in facts]
    addresses, refused = _addresses(cluster, facts)
    if request.probes and everyone:
        between = f" between {len(everyone)} hosts" if len(everyone) > 1 else ""
        say(f"trying {cluster.storage} and Ray's ports{between}")
        storage, ports = await asyncio.gather(
            storage_shared(
                [session for session in able if _answers(facts[session.host.name], cluster)], cluster.storage
            ),
            reachable(everyone, addresses, cluster.head_host.name),
        )
        report.findings += [*_without_repeats(storage.findings, report.findings), *ports, *refused]
        report.findings += await _inside(cluster, facts, able, nccl=request.nccl)
    if request.bandwidth:
        say("bandwidth, one host after the other")
        report.findings += await write_rates(able, cluster.storage)
        report.findings += await send_rates(everyone, addresses)
    if request.nccl:
        say("an all-reduce over all GPUs")
        head = addresses.get(cluster.head_host.name, cluster.head_host.target)
        report.findings += await all_reduce(able, facts, cluster.name, head, say=say)


async def _inside(cluster: Cluster, facts: dict[str, Facts], able: list[Session], *, nccl: bool) -> list[Finding]:
    """Check the storage from inside the runtime containers, where they run, and what NCCL is told there.

    Args:
        able: hosts where commands can run as root.
        nccl: an all-reduce follows, which finds the settings anew.
    """
    containers = {name: c.name for name, fact in facts.items() for c in running_containers(fact, cluster.name)}
    running = [session for session in able if session.host.name in containers]
    if not running:
        return []
    report = await storage_shared(running, cluster.storage, run_in=lambda name: ("docker", "exec", containers[name]))
    findings = [replace(finding, check="container storage") for finding in report.findings]
    return findings if nccl else [*findings, *await kept_findings(running, containers)]


def _probe_request(cluster: Cluster, host: Host) -> ProbeRequest:
    head, ports = cluster.head_host, Ports()
    return ProbeRequest(
        storage=cluster.storage,
        head_address=head.private_address or head.target,
        ports=tuple(ports.listening(head=host.name == head.name).values()),
    )


def _addresses(cluster: Cluster, facts: dict[str, Facts]) -> tuple[dict[str, str], list[Finding]]:
    """Return the addresses at which hosts reach one another, and findings on hosts whose address is unknown."""
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
    """Leave out what the facts have shown already: a missing folder, a read-only one."""
    known = {(finding.host, finding.check) for finding in old if finding.level is not Level.OK}
    return [finding for finding in new if finding.level is Level.OK or (finding.host, finding.check) not in known]
