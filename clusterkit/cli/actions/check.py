"""`clusterkit check`: look at every host, and print the verdicts."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import typer

from clusterkit.capacity.needs import needs_of_preset
from clusterkit.cli.actions.target import hosts_of_cluster
from clusterkit.common.finding import Finding, Level, worst
from clusterkit.common.text_plot import columns
from clusterkit.provision.checks.needs import Needs
from clusterkit.provision.checks.run import CheckReport, CheckRequest
from clusterkit.provision.checks.run import check as check_hosts
from clusterkit.provision.facts.model import Facts
from clusterkit.provision.ray.current import ready_clusters
from clusterkit.ssh.connection import connect
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import select
from clusterkit.ui import output

_CHECKS = ("system", "gpus", "driver", "docker", "storage", "reach")
"""Columns of the table; everything else shows only where something is wrong."""
_ALONE = ("--probes", "--no-probes", "--bandwidth", "--nccl", "--json", "--debug")
"""Options that only a check has."""
_MARKS = {"ok": "ok", "warn": "warn", "fail": "FAIL"}


def check(hosts: HostOptions, preset: str | None, *, probes: bool, bandwidth: bool, nccl: bool, as_json: bool) -> None:
    """Check the hosts; the exit code is the report's."""
    needs = needs_of_preset(preset) if preset else Needs()
    selection = select(hosts_of_cluster(hosts))
    request = CheckRequest(selection.cluster, selection.hosts, needs, probes, bandwidth, nccl)
    output.note(f"checking {len(request.hosts)} host{'s' * (len(request.hosts) > 1)}")
    report = asyncio.run(check_hosts(request, lambda host: connect(host, selection.ssh), output.note))
    text = "\n".join([*_table(report), "", *_details(report), _summary(report)])
    output.outcome(text, _json(report), as_json=as_json)
    if report.exit_code:
        raise typer.Exit(report.exit_code)
    if not as_json and selection.cluster.name not in ready_clusters():
        output.advice(["Next:", f"  make them a cluster  {setup_command(sys.argv[1:])}"])


def setup_command(arguments: Sequence[str]) -> str:
    """The set-up of the hosts of a check, without training. arguments: the check's words behind `clusterkit`."""
    words = [word for word in arguments if word not in _ALONE]
    at = words.index("check") if "check" in words else 0
    words[at : at + 1] = ["setup"]
    with_preset = any(word.partition("=")[0] == "--preset" for word in words)
    return shlex.join(["clusterkit", *words, *(["--no-train"] if with_preset else [])])


def _table(report: CheckReport) -> list[str]:
    rows = [["host", "verdict", *_CHECKS]]
    for name in report.answers:
        verdict = report.verdict(name)
        cells = [_cell([finding for finding in report.of(name) if finding.check == check]) for check in _CHECKS]
        rows.append([name, "FAIL" if verdict == "fail" else verdict, *cells])
    return columns(rows)


def _cell(findings: list[Finding]) -> str:
    if not findings:
        return "-"
    level = worst(findings)
    if level is not Level.OK:
        return _MARKS[level]
    short = findings[0].message
    return short if len(short) <= 28 else "ok"


def _details(report: CheckReport) -> list[str]:
    lines = []
    for name in [*report.answers, ""]:
        telling = [finding for finding in report.of(name) if finding.level != "ok"]
        # The cluster's own good news (one storage, a bandwidth) has no row in the table.
        telling += [finding for finding in report.of(name) if finding.level == "ok" and _is_news(finding)]
        if not telling:
            continue
        lines.append(name or "all hosts")
        for finding in telling:
            lines.append(f"  {_MARKS[finding.level]:<4}  {finding.check}: {finding.message}")
            lines += [f"        {line}" for line in finding.fix.splitlines()]
        lines.append("")
    return lines


def _is_news(finding: Finding) -> bool:
    return not finding.host or finding.check in {"bandwidth", "nccl"}


def _summary(report: CheckReport) -> str:
    verdicts = [report.verdict(name) for name in report.answers]
    words = {"ok": "fine", "warn": "with warnings", "fail": "failed", "unreachable": "not reached"}
    counts = ", ".join(f"{verdicts.count(key)} {word}" for key, word in words.items() if key in verdicts)
    return f"{len(verdicts)} host(s): {counts} ({report.seconds:.1f} s)"


def _json(report: CheckReport) -> dict[str, Any]:
    return {
        "exit_code": report.exit_code,
        "seconds": round(report.seconds, 3),
        "hosts": {
            name: {
                "verdict": report.verdict(name),
                "findings": [finding.as_dict() for finding in report.of(name)],
                "facts": answer.model_dump(mode="json") if isinstance(answer, Facts) else None,
            }
            for name, answer in report.answers.items()
        },
        "cluster": [finding.as_dict() for finding in report.of("")],
    }
