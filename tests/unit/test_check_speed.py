"""Bandwidth and all-reduce: the real scripts on this machine's disk, loopback and CPU."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from localsession import LocalSession

from clusterkit.common.finding import Level
from clusterkit.provision.checks import speed
from clusterkit.provision.checks.nccl import all_reduce, judge_all_reduce, rank_script
from clusterkit.provision.checks.speed import send_rates, write_rates
from clusterkit.provision.facts.model import Container, Docker, Facts, Gpu
from clusterkit.ssh.api import Result

GPU_FACTS = Facts(gpus=tuple(Gpu(index=index, name="NVIDIA H200") for index in range(2)))


def test_the_write_rate_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "WRITE_MEBIBYTES", 16)

    (finding,) = asyncio.run(write_rates([LocalSession()], str(tmp_path), root=False))

    assert finding.level is Level.OK
    assert "GB/s" in finding.message
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_not_written_to(tmp_path: Path) -> None:
    (finding,) = asyncio.run(write_rates([LocalSession()], f"{tmp_path}/no", root=False))

    assert finding.level is Level.WARN
    assert list(tmp_path.iterdir()) == []


def test_hosts_send_to_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SEND_SECONDS", 0.2)
    addresses = {"a": "127.0.72.1", "b": "127.0.72.2"}

    findings = asyncio.run(send_rates([LocalSession("a"), LocalSession("b")], addresses))

    assert [finding.host for finding in findings] == ["a", "b"]
    assert all("Gbit/s" in finding.message for finding in findings)


def test_a_host_without_python_is_not_measured(tmp_path: Path) -> None:
    for tool in ("sh", "timeout"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or "/bin/true")
    bare = LocalSession("a", environment={"PATH": str(tmp_path)})

    findings = asyncio.run(send_rates([bare, LocalSession("b")], {"a": "127.0.72.1", "b": "127.0.72.2"}))

    assert [finding.level for finding in findings] == [Level.WARN, Level.WARN]


def test_two_ranks_reduce_on_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    done = subprocess.run(
        ["bash", "-c", rank_script(0, 2, 2, "127.0.0.1")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )

    (finding,) = judge_all_reduce({"h1": Result(done.returncode, done.stdout, done.stderr, 1.0)}, 2)
    assert finding.level is Level.OK, done.stderr
    assert "all-reduce over 2 GPUs" in finding.message


def test_a_rank_that_fails_is_told_with_its_own_words() -> None:
    result = Result(1, "", "Traceback\nncclSystemError: NCCL Error 2: no route to 10.0.0.2\nbye", 3.0)

    (finding,) = judge_all_reduce({"h1": result}, 8)

    assert finding.level is Level.FAIL
    assert "no route to 10.0.0.2" in finding.message


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (Facts(), "one host alone"),
        (GPU_FACTS, "no runtime container of cluster default runs on h1"),
        (GPU_FACTS.model_copy(update={"gpus": GPU_FACTS.gpus[:1]}), "one GPU alone"),
        (
            GPU_FACTS.model_copy(
                update={"docker": Docker(containers=(Container(id="1", name="x", state="exited"),))},
            ),
            "no runtime container",
        ),
    ],
)
def test_why_no_all_reduce_was_run(facts: Facts, says: str) -> None:
    session = LocalSession("h1")

    (finding,) = asyncio.run(all_reduce([session], {"h1": facts}, "default", "10.0.0.1"))

    assert finding.level is Level.WARN
    assert says in finding.message
    assert session.scripts == []
