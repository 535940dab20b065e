"""`clusterkit check`: a verdict on every host, and what to do about each failure. It changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from clusterkit.cli.hostoptions import takes_hosts
from clusterkit.cli.target import hosts_of_cluster
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import select
from clusterkit.ui import output

if TYPE_CHECKING:
    from clusterkit.common.finding import Finding
    from clusterkit.provision.checks.run import CheckReport

app = typer.Typer(
    help="Check whether hosts are fit for a cluster; changes nothing on them.",
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_CHECKS = ("system", "gpus", "driver", "docker", "storage", "reach")
"""Columns of the table; everything else shows only where something is wrong."""
_MARKS = {"ok": "ok", "warn": "warn", "fail": "FAIL"}


@app.command()
@takes_hosts
def check(
    *,
    hosts: HostOptions,
    preset: str | None = typer.Option(None, "--preset", metavar="NAME", help="Also: is it enough for this preset?"),
    probes: bool = typer.Option(True, "--probes/--no-probes", help="Try ports and storage between the hosts."),
    bandwidth: bool = typer.Option(False, "--bandwidth", help="Measure storage and network; seconds per host."),
    nccl: bool = typer.Option(False, "--nccl", help="Run an all-reduce over all GPUs in the running containers."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Check whether hosts are fit for a cluster.

    Looks at every host at once and changes nothing; the probes' own small files are removed again. Exit code: 0 all
    fine, 1 a check failed, 3 some hosts could not be reached, 2 bad usage.
    """
    import asyncio  # noqa: PLC0415

    from clusterkit.capacity.needs import needs_of_preset  # noqa: PLC0415
    from clusterkit.provision.checks.needs import Needs  # noqa: PLC0415
    from clusterkit.provision.checks.run import CheckRequest  # noqa: PLC0415
    from clusterkit.provision.checks.run import check as check_hosts  # noqa: PLC0415
    from clusterkit.ssh.connection import connect  # noqa: PLC0415

    needs = needs_of_preset(preset) if preset else Needs()
    selection = select(hosts_of_cluster(hosts))
    request = CheckRequest(selection.cluster, selection.hosts, needs, probes, bandwidth, nccl)
    output.note(f"checking {len(request.hosts)} host(s)")
    report = asyncio.run(check_hosts(request, lambda host: connect(host, selection.ssh), output.note))
    if as_json:
        output.result_json(_json(report))
    else:
        output.result("\n".join([*_table(report), "", *_details(report), _summary(report)]))
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def _table(report: CheckReport) -> list[str]:
    rows = [["host", "verdict", *_CHECKS]]
    for name in report.answers:
        verdict = report.verdict(name)
        cells = [_cell([finding for finding in report.of(name) if finding.check == check]) for check in _CHECKS]
        rows.append([name, "FAIL" if verdict == "fail" else verdict, *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _cell(findings: list[Finding]) -> str:
    from clusterkit.common.finding import Level, worst  # noqa: PLC0415

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
    from clusterkit.provision.facts.model import Facts  # noqa: PLC0415

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
