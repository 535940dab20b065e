"""Clusters kept by name."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from clusterkit.hosts import inventory
from clusterkit.hosts.model import Cluster, Host, Login
from trainer.errors import RunError, UserError


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTERKIT_CONFIG", str(tmp_path / "config"))
    return tmp_path / "config"


FULL = Cluster(
    name="lab",
    hosts=(
        Host(name="a", address="10.0.0.5", port=2222, username="root", identity_files=("~/k",), interface="e1"),
        Host(name="b", private_address="192.168.0.2", host_key="SHA256:abc", proxy_jump="gate"),
    ),
    head="b",
    storage="/data",
    login=Login(username="ubuntu", identity_files=("/k",)),
)


@pytest.mark.parametrize("cluster", [FULL, Cluster(hosts=(Host(name="a"),))])
def test_what_is_saved_is_loaded(cluster: Cluster) -> None:
    path = inventory.save(cluster)
    assert inventory.load(cluster.name) == cluster
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == [f"{cluster.name}.yaml"]


def test_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CLUSTERKIT_CONFIG")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert inventory.path_of("lab") == tmp_path / ".config/clusterkit/clusters/lab.yaml"


def test_unknown_cluster_lists_those_there_are() -> None:
    with pytest.raises(UserError, match="clusterkit setup --hostnames"):
        inventory.load()
    inventory.save(FULL)
    with pytest.raises(UserError, match=r"no cluster 'lib'. Did you mean lab\? Clusters: lab\."):
        inventory.load("lib")


@pytest.mark.parametrize("name", ["", "-x", "A", "../x", "a/b", "a" * 64])
def test_name_that_is_none(name: str) -> None:
    with pytest.raises(UserError, match="no name for a cluster"):
        inventory.load(name)


def written(config: Path, text: str) -> str:
    path = config / "clusters" / "lab.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return text


def test_names_and_ranges_in_the_file(config: Path) -> None:
    written(config, "hosts:\n  - node[01-02]\n  - root@gate:2222\n  - name: big\n    address: 10.0.0.9\n")
    cluster = inventory.load("lab")
    assert (cluster.name, [host.name for host in cluster.hosts]) == ("lab", ["node01", "node02", "gate", "big"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hosts: [a", "is no YAML"),
        ("- a\n", "'hosts:' with a list"),
        ("", "'hosts:' with a list"),
        ("hosts: []\n", "'hosts' must be a list with at least one host"),
        ("hosts: a\n", "'hosts' must be a list"),
        ("hosts: [a]\nhaed: a\n", "'haed' is no setting. Did you mean head?"),
        ("hosts:\n  - name: a\n    usernam: root\n", "host a: 'usernam' is no setting. Did you mean username?"),
        ("hosts:\n  - name: a\n    port: ssh\n", "host a: 'port': "),
        ("hosts:\n  - name: a\n    port: 99999\n", "host a: 'port': "),
        ("hosts:\n  - address: a\n", "host 1: 'name': "),
        ("hosts: [a, a]\n", "a: named twice"),
        ("hosts: [a]\nhead: b\n", "head b is none of the hosts (a)"),
        ("hosts: [-x]\n", "cannot begin with '-'"),
        ("hosts:\n  - name: -x\n", "cannot begin with '-'"),
        ("hosts: [a]\nhosts: [b]\n", "'hosts' stands there twice"),
        ("hosts: [a]\nstorage: data\n", "'storage'"),
        ("hosts: [3]\n", "host 3"),
        ("hosts: [a]\n? [1]\n: 2\n", "is no setting"),
    ],
)
def test_mistakes_are_told_with_file_and_place(config: Path, text: str, said: str) -> None:
    written(config, text)
    with pytest.raises(UserError) as caught:
        inventory.load("lab")
    assert str(inventory.path_of("lab")) in str(caught.value)
    assert said in str(caught.value)


def test_file_that_is_no_text(config: Path) -> None:
    written(config, "x")
    inventory.path_of("lab").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="no text"):
        inventory.load("lab")


def test_folder_that_cannot_be_written(config: Path) -> None:
    config.write_text("a file in the way")
    with pytest.raises(UserError, match=r"is a file, and a folder is wanted there.*CLUSTERKIT_CONFIG"):
        inventory.save(FULL)


def test_interrupted_write_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch) -> None:
    inventory.save(FULL)

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full_disk)
        with pytest.raises(RunError, match="no space left"):
            inventory.save(FULL.model_copy(update={"head": ""}))
    assert inventory.load("lab") == FULL
    assert len(list(inventory.path_of("lab").parent.iterdir())) == 1
