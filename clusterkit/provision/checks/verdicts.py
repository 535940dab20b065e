"""All verdicts from what the hosts answered."""

from __future__ import annotations

from collections.abc import Mapping

from clusterkit.common.finding import Finding, Level
from clusterkit.hosts.model import Cluster
from clusterkit.provision.checks.cluster import judge_cluster
from clusterkit.provision.checks.gpu import judge_gpus
from clusterkit.provision.checks.host import judge_host
from clusterkit.provision.checks.needs import Needs
from clusterkit.provision.facts.model import Facts
from clusterkit.ssh.api import HostError


def judge(answers: Mapping[str, Facts | HostError], cluster: Cluster, needs: Needs | None = None) -> list[Finding]:
    """Findings on all hosts in their order, each host's own first, then what takes all hosts together.

    answers: by host name; a host that could not be worked with has its error there.
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
