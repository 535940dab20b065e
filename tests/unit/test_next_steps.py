"""The commands that a set-up ends with: right for the cluster, and each goes there as it is printed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clusterkit.cli.actions.check import setup_command
from clusterkit.cli.main import app
from clusterkit.hosts import inventory
from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.ray import current
from clusterkit.provision.ray.state import ClusterState, NodeState
from clusterkit.provision.ray.token import local_file
from clusterkit.provision.site import Site
from clusterkit.setup.command import make_current
from clusterkit.setup.nextsteps import fitting_preset, next_steps
from clusterkit.setup.typed import SetupOptions

GIB = 2**30


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERKIT_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(current.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)


def kept(name: str, hosts: int = 1) -> Cluster:
    """A cluster as a set-up leaves it."""
    cluster = Cluster(
        name=name, hosts=tuple(Host(name=f"{name}-{n}", address="127.0.0.1", port=1) for n in range(hosts))
    )
    inventory.save(cluster)
    local_file(name).parent.mkdir(parents=True)
    local_file(name).write_text("0" * 64)
    return cluster


def ray(cluster: Cluster, gpus: int) -> ClusterState:
    nodes = (NodeState(host.name, "worker", ray_state="ALIVE", gpus=gpus, gpus_expected=gpus) for host in cluster.hosts)
    return ClusterState(cluster.name, tuple(nodes))


def commands(cluster: Cluster, gpus: int, memory: float = 79.6, preset: str = "") -> list[str]:
    options = SetupOptions(site=Site(), preset=preset)
    return [step.command for step in next_steps(cluster, ray(cluster, gpus), int(memory * GIB), options, None)]


@pytest.mark.parametrize(
    ("hosts", "gpus", "memory", "expected"),
    [
        (4, 8, 79.6, "7B_n4"),
        (16, 8, 79.6, "32B_n16"),
        (1, 8, 79.6, "4B"),
        (3, 8, 79.6, "4B"),
        (4, 8, 23.6, "tiny"),
        (1, 1, 79.6, "135M"),
        (3, 0, 0.0, "tiny"),
    ],
)
def test_the_preset_fits_the_hosts(hosts: int, gpus: int, memory: float, expected: str) -> None:
    cluster = kept("lab", hosts)
    assert fitting_preset(cluster, ray(cluster, gpus), int(memory * GIB)) == expected


def test_the_commands_of_the_only_cluster_need_no_name() -> None:
    assert commands(kept("lab", 4), 8) == [
        "clusterkit train --preset 7B_n4",
        "clusterkit status",
        "clusterkit logs -f",
        "clusterkit eval --model-path 7B_n4-math/run1",
        "clusterkit stop",
        "clusterkit ray-status",
        "clusterkit down",
    ]


def test_what_would_train_here_is_named() -> None:
    train, status, *_ = commands(kept("lab", 3), 0)
    assert (train, status) == ("clusterkit train --preset tiny --cluster lab", "clusterkit status")


def test_another_cluster_than_the_current_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sea, lab = kept("sea"), kept("lab", 4)
    current.choose("sea")
    assert all(command.endswith(" --cluster lab") for command in commands(lab, 8))
    assert not any("--cluster" in command for command in commands(sea, 8))
    monkeypatch.setenv(current.VARIABLE, "lab")
    assert not any("--cluster" in command for command in commands(lab, 8))


@pytest.mark.parametrize(("hosts", "gpus"), [(4, 8), (1, 8), (3, 0)])
def test_each_goes_there_as_it_is_printed(hosts: int, gpus: int) -> None:
    for command in commands(kept("lab", hosts), gpus):
        words = shlex.split(command)[1:]
        answer = CliRunner().invoke(app, [*words, *(["--dry-run"] if words[0] in ("train", "eval") else [])])
        said = answer.output + str(answer.exception or "")
        assert "lab-0" in said or "The plan, on cluster lab" in said, said


def test_nothing_is_promised_of_a_ray_that_is_not_ready() -> None:
    cluster = kept("lab")
    broken = ClusterState("lab", (), problems=("the head is gone",))
    steps = next_steps(cluster, broken, 0, SetupOptions(site=Site()), None)
    assert [step.command for step in steps] == ["clusterkit ray-status", "clusterkit down"]


def test_a_new_cluster_becomes_the_current_one_and_an_old_one_does_not() -> None:
    kept("lab")
    assert make_current("lab", is_new=True) == "commands go to cluster lab now (clusterkit use)"
    kept("sea")
    assert make_current("sea", is_new=False) == ""
    assert current.current().name == "lab"
    assert "cluster sea now" in make_current("sea", is_new=True)
    assert current.current().name == "sea"
    current.path().write_text("not a name\n")
    assert "cluster lab now" in make_current("lab", is_new=False)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("check --hostnames a check --nccl", "clusterkit setup --hostnames a check"),
        ("--debug check --json --preset 7B_n4 --no-probes", "clusterkit setup --preset 7B_n4 --no-train"),
    ],
)
def test_a_check_leads_to_the_set_up_of_its_hosts(words: str, command: str) -> None:
    assert setup_command(words.split()) == command
