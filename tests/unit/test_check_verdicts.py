"""Facts in, findings out: one JSON file for each matter. A host's facts are a healthy bare host's with its changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterkit.capacity.needs import needs_of_preset
from clusterkit.common.finding import Finding, Level, worst
from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.checks.gpu import OLDEST_DRIVER
from clusterkit.provision.checks.needs import GIB, Needs, image_cuda
from clusterkit.provision.checks.run import judge
from clusterkit.provision.facts.model import Facts
from clusterkit.provision.images.versions import versions
from clusterkit.ssh.api import ErrorKind, HostError
from trainer.errors import UserError

CASES = sorted((Path(__file__).parents[1] / "cases" / "check").glob("*.json"))
DISK = {"source": "/dev/nvme0n1p1", "fstype": "ext4", "size": 1000 * GIB, "free": 500 * GIB, "inodes_free": 10_000_000}
HEALTHY: dict[str, Any] = {
    "clock": 1.8e9,
    "uid": 0,
    "sudo": "root",
    "os": {"id": "ubuntu", "version": "24.04", "codename": "noble", "name": "Ubuntu 24.04 LTS", "arch": "x86_64"},
    "cpus": 64,
    "memory": 256 * GIB,
    "disks": {
        path: {"path": path, **DISK} for path in ("/", "/tmp", "/var/lib/docker", "/var/lib/containerd", "/storage")
    },
    "addresses": {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.7", "fe80::1"]},
    "route_to_head": "10.0.0.7",
    "listening": [22],
}


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path: Path) -> None:
    case = json.loads(path.read_text(encoding="utf-8"))
    answers = {name: answer_of(name, changes) for name, changes in case["facts"].items()}
    cluster = Cluster(hosts=tuple(Host(name=name) for name in answers))
    needs = needs_of_preset(case["preset"]) if "preset" in case else Needs(**case.get("needs", {}))

    findings = [
        finding
        for finding in judge(answers, cluster, needs)
        if finding.level is not Level.OK
        and finding.check in case.get("only", [finding.check])
        and case.get("ignore", "\0") not in finding.message
    ]

    wanted = case["findings"]
    assert [(f.host, f.check, f.level) for f in findings] == [(w["host"], w["check"], w["level"]) for w in wanted]
    for finding, wish in zip(findings, wanted, strict=True):
        assert wish["says"] in finding.message
        assert wish["fix"] in finding.fix


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_failure_and_warning_names_its_fix(path: Path) -> None:
    case = json.loads(path.read_text(encoding="utf-8"))
    answers = {name: answer_of(name, changes) for name, changes in case["facts"].items()}

    findings = judge(answers, Cluster(hosts=tuple(Host(name=name) for name in answers)), Needs())

    assert all(finding.fix for finding in findings if finding.level is not Level.OK)


def test_every_matter_of_a_healthy_host_is_told() -> None:
    findings = judge({"h1": answer_of("h1", {}), "h2": answer_of("h2", {})}, two_hosts())

    assert {finding.check for finding in findings if finding.host == "h2"} == {
        *("system", "root", "memory", "disk", "storage", "packages", "docker", "ports", "address"),
        *("gpus", "clock", "identity"),
    }
    assert worst(findings) is Level.OK


def test_facts_of_nothing_are_judged_too() -> None:
    assert worst(judge({"h1": Facts(), "h2": Facts()}, two_hosts())) is Level.FAIL


def test_the_needs_of_a_preset() -> None:
    assert (needs_of_preset("7B_n16").hosts, needs_of_preset("7B_n16").gpus_per_host) == (16, 8)
    assert needs_of_preset("tiny") == replace(Needs(), preset="tiny")
    with pytest.raises(UserError, match="unknown preset 'huge'"):
        needs_of_preset("huge")


def test_worst_of_findings() -> None:
    fine, bad = Finding("h", "c", Level.WARN, ""), Finding("h", "c", Level.FAIL, "")

    assert (worst([]), worst([fine]), worst([bad, fine])) == (Level.OK, Level.WARN, Level.FAIL)


def two_hosts() -> Cluster:
    return Cluster(hosts=(Host(name="h1"), Host(name="h2")))


def answer_of(name: str, changes: dict[str, Any]) -> Facts | HostError:
    if "error" in changes:
        trouble, message, fix = changes["error"]
        return HostError(name, ErrorKind(trouble), message, fix)
    return Facts.model_validate(merged({**HEALTHY, "hostname": name, "machine_id": f"id of {name}"}, changes))


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict) and key in {"os", "disks"}
        result[key] = merged(base[key], value) if both else value
    return result


def test_the_oldest_driver_is_that_of_the_cuda_that_the_image_is_built_with() -> None:
    assert f"nvidia/cuda:{image_cuda()}." in versions()["CUDA_BASE"]
    assert Needs().cuda == needs_of_preset("1.5B_n4").cuda == image_cuda()
    assert image_cuda() in OLDEST_DRIVER
