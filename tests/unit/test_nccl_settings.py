"""NCCL's settings: what `check --nccl` finds, keeps in the containers and tells, and what ranks and servers take.

There are no GPUs here. A program named python3 prints what NCCL prints, and docker runs its command on this machine.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from localsession import LocalSession

from clusterkit.common.finding import Finding, Level
from clusterkit.provision.checks.nccl import all_reduce
from clusterkit.provision.checks.nccl_kept import kept_findings, settings_of
from clusterkit.provision.facts.model import Container, Docker, Facts, Gpu
from clusterkit.provision.ray.model import LABEL_CLUSTER
from trainer.launch import nccl_settings
from trainer.launch.nccl_settings import FILE, FILE_VARIABLE, KeptSettings, NodeSettings, log_lines, take

HOSTS = ("n1", "n2")
RDMA = """\
n1:984:984 [0] NCCL INFO Bootstrap: Using bond0.7:172.36.134.184<0>
n1:984:990 [0] NCCL INFO NET/IB : Using [0]mlx5_10:1/RoCE [1]mlx5_11:1/RoCE [RO]; OOB bond0.7:172.36.134.184<0>
n1:984:990 [0] NCCL INFO Using network IB
"""
SOCKETS = "n1:9:9 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>\nn1:9:9 [0] NCCL INFO Using network Socket\n"
RANK = """#!/bin/bash
[ "$NCCL_DEBUG" != INFO ] || printf '%s' "$PRINTED"
if [ -n "$FAILS_UNLESS" ] && [ "${!FAILS_UNLESS}" = "" ]; then
  echo "n1:9:9 [0] NCCL WARN NET/IB : Got completion from peer with status=12"
  exit 1
fi
[ "$RANK" != 0 ] || echo busbw 41.5
"""
DOCKER = """#!/bin/bash
[ "$1" = exec ] || exit 9
mkdir -p "{folder}/$2"
exec "${{@:3:2}}" "${{5//\\/run\\/clusterkit/{folder}/$2}}"
"""


class Hosts:
    """Two hosts with two GPUs each, and a running container. without_gpus: a host that has none."""

    def __init__(self, folder: Path, printed: str, fails_unless: str = "", without_gpus: str = "") -> None:
        self.folder, self.without_gpus = folder, without_gpus
        for name, text in {"python3": RANK, "docker": DOCKER.format(folder=folder)}.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.environment = {"PATH": f"{folder}:/usr/bin:/bin", "PRINTED": printed, "FAILS_UNLESS": fails_unless}
        self.sessions = [LocalSession(name, environment=self.environment) for name in HOSTS]
        self.containers = {name: f"{name}-container" for name in HOSTS}

    def facts(self) -> dict[str, Facts]:
        gpus = tuple(Gpu(index=index, name="NVIDIA H200") for index in range(2))
        return {
            name: Facts(
                gpus=() if name == self.without_gpus else gpus,
                docker=Docker(
                    containers=(Container(id="1", name=container, state="running", labels={LABEL_CLUSTER: "c"}),)
                ),
            )
            for name, container in self.containers.items()
        }

    def reduce(self) -> list[Finding]:
        return asyncio.run(all_reduce(self.sessions, self.facts(), "c", "127.0.0.1", root=False))

    def kept(self, host: str) -> KeptSettings | None:
        path = self.folder / self.containers[host] / Path(FILE).name
        return nccl_settings.parse(path.read_text()) if path.exists() else None

    def told_later(self) -> list[Finding]:
        return asyncio.run(kept_findings(self.sessions, self.containers, root=False))


def test_what_nccl_chose_is_kept_on_every_host_and_told(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, RDMA)

    speed, runs = hosts.reduce()

    assert (speed.level, speed.message) == (Level.OK, "all-reduce over 4 GPUs: 41.5 GB/s bus bandwidth")
    wanted = {
        "NCCL_SOCKET_IFNAME": "=bond0.7",
        "GLOO_SOCKET_IFNAME": "bond0.7",
        "NCCL_IB_HCA": "=mlx5_10:1,mlx5_11:1",
    }
    assert [dict(kept.settings) for host in HOSTS if (kept := hosts.kept(host))] == [wanted, wanted]
    assert runs.level is Level.OK
    assert "NCCL_IB_HCA==mlx5_10:1,mlx5_11:1 on n1, n2" in runs.message
    (later,) = hosts.told_later()
    assert "on n1, n2, from the all-reduce of 20" in later.message


def test_where_rdma_is_at_fault_runs_do_without_it_and_people_are_told(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, RDMA, fails_unless="NCCL_IB_DISABLE")

    speed, _ = hosts.reduce()

    assert speed.level is Level.WARN
    assert "without RDMA (NCCL_IB_DISABLE=1)" in speed.message
    assert "Got completion from peer with status=12" in speed.message
    kept = hosts.kept("n2")
    assert kept is not None
    assert kept.settings["NCCL_IB_DISABLE"] == "1"


def test_hosts_that_do_not_reach_one_another_any_more_keep_nothing(tmp_path: Path) -> None:
    Hosts(tmp_path, RDMA).reduce()
    hosts = Hosts(tmp_path, RDMA, fails_unless="NOTHING_HELPS")
    assert hosts.kept("n1") is not None

    (first, _) = hosts.reduce()

    assert first.level is Level.FAIL
    assert "status=12" in first.message
    assert [hosts.kept(host) for host in HOSTS] == [None, None]
    assert hosts.told_later() == []


def test_where_gpus_are_in_use_what_was_kept_stays_and_nothing_is_left_out(tmp_path: Path) -> None:
    Hosts(tmp_path, RDMA).reduce()
    busy = Hosts(tmp_path, RDMA + "torch.OutOfMemoryError: CUDA out of memory.\n", fails_unless="NCCL_IB_DISABLE")

    findings = busy.reduce()

    assert {one.level for one in findings} == {Level.FAIL}
    assert [kept.settings.get("NCCL_IB_DISABLE") for host in HOSTS if (kept := busy.kept(host))] == [None, None]


def test_a_failure_that_has_passed_leaves_nothing_out(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, RDMA, fails_unless="FAILED_ONCE")
    rank = (tmp_path / "python3").read_text()
    mark = f"{tmp_path}/failed-$RANK"
    once = f"[ ! -e {mark} ] || export FAILED_ONCE=1\ntouch {mark}\n"
    (tmp_path / "python3").write_text(rank.replace("#!/bin/bash\n", f"#!/bin/bash\n{once}"))

    speed, _ = hosts.reduce()

    assert speed.level is Level.OK
    assert (kept := hosts.kept("n1")) is not None
    assert "NCCL_IB_DISABLE" not in kept.settings


def test_a_head_without_gpus_is_no_rank_and_is_not_warned_about(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, RDMA, without_gpus="n2")

    speed, runs = hosts.reduce()

    assert speed.message.startswith("all-reduce over 2 GPUs")
    assert runs.message.endswith("on n1")
    assert [one.level for one in hosts.told_later()] == [Level.OK]


def test_a_host_with_a_new_container_is_named(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, RDMA)
    hosts.reduce()
    (tmp_path / "n2-container" / "nccl.json").unlink()

    runs, without = hosts.told_later()

    assert "on n1, from the all-reduce" in runs.message
    assert without.level is Level.WARN
    assert "no settings are kept on n2" in without.message


def test_without_rdma_only_the_interface_is_kept() -> None:
    assert settings_of(SOCKETS, {}) == {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    assert settings_of("busbw 1.0\n", {}) == {}  # gloo


@pytest.fixture
def kept_file(tmp_path: Path) -> Path:
    return tmp_path / "nccl.json"


def taken(file: Path, **environment: str) -> tuple[NodeSettings, dict[str, str]]:
    found = {FILE_VARIABLE: str(file), **environment}
    return take(found), found


def test_a_rank_takes_what_its_node_keeps_but_not_what_the_user_has_set(kept_file: Path) -> None:
    settings = {"NCCL_SOCKET_IFNAME": "=lo", "NCCL_IB_DISABLE": "1", "PATH": "/bad"}
    kept_file.write_text(KeptSettings(settings, 1.0).as_json())

    found, environment = taken(kept_file, NCCL_IB_DISABLE="0")

    assert (dict(found.taken), found.problem) == ({"NCCL_SOCKET_IFNAME": "=lo"}, "")
    assert environment == {FILE_VARIABLE: str(kept_file), "NCCL_IB_DISABLE": "0", "NCCL_SOCKET_IFNAME": "=lo"}


def test_devices_that_have_gone_make_it_stale(kept_file: Path) -> None:
    settings = {"NCCL_SOCKET_IFNAME": "=lo", "NCCL_IB_HCA": "=mlx5_gone:1"}
    kept_file.write_text(KeptSettings(settings, 1.0).as_json())

    found, environment = taken(kept_file)

    assert found == NodeSettings(problem="mlx5_gone is not there any more")
    assert environment == {FILE_VARIABLE: str(kept_file)}


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"settings": 3, "made": 1}'])
def test_without_a_file_that_can_be_read_nothing_changes(kept_file: Path, content: str | None) -> None:
    if content is not None:
        kept_file.write_text(content)

    found, environment = taken(kept_file)

    assert found == NodeSettings(problem="" if content is None else "it cannot be read")
    assert environment == {FILE_VARIABLE: str(kept_file)}


def test_the_log_says_what_each_node_got() -> None:
    same, stale = NodeSettings({"NCCL_IB_DISABLE": "1"}), NodeSettings(problem="eth9 is not there any more")

    notes, warnings = log_lines(["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.3"], [same, same, same, stale])

    assert notes == ["from clusterkit check --nccl on 10.0.0.1, 10.0.0.2: NCCL_IB_DISABLE=1"]
    (warning,) = warnings
    assert "10.0.0.3 is not used: eth9 is not there any more; run it again" in warning
