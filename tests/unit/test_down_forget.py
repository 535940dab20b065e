"""`down --forget`: this machine forgets a cluster, and no host is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from clusterkit.cli.main import app
from clusterkit.hosts import inventory
from clusterkit.hosts.folders import write_private
from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.cluster_lock import local_lock
from clusterkit.provision.ray.current import choose, current
from clusterkit.provision.ray.token import local_file
from clusterkit.setup.command import failed_hosts
from clusterkit.setup.command import path_of as failures_of
from trainer.errors import UserError


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two clusters of hosts that no name server knows; `lab` is the current one."""
    monkeypatch.setenv("CLUSTERKIT_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("CLUSTERKIT_STATE", str(tmp_path / "state"))
    monkeypatch.setattr("asyncssh.connect", lambda *_, **__: pytest.fail("a host was asked"))
    for name in ("lab", "sea"):
        inventory.save(Cluster(name=name, hosts=(Host(name="gone1.invalid"), Host(name="gone2.invalid"))))
        write_private(local_file(name), "0" * 64 + "\n")
    choose("lab")
    return tmp_path / "config"


def forget(*words: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(app, ["down", "--forget", *words], input=typed)


def test_a_cluster_is_forgotten_and_what_may_run_there_is_named(config: Path) -> None:
    write_private(failures_of("lab"), '{"failed": ["gone1.invalid"]}\n')
    done = forget("--cluster", "lab", "-y", "--json")

    assert done.exit_code == 0, done.exception
    inventory.save(Cluster(name="lab", hosts=(Host(name="gone1.invalid"),)))
    assert failed_hosts(inventory.load("lab")) == (), "a new cluster of that name begins without failures"
    inventory.remove("lab")
    assert json.loads(done.stdout)["not_touched"] == ["gone1.invalid", "gone2.invalid"]
    for part in ("gone1.invalid gone2.invalid", "clusterkit.cluster=lab", "/storage", "lab is no longer the current"):
        assert part in done.stderr
    assert inventory.cluster_names() == ["sea"]
    assert sorted(path.name for path in (config / "clusters").iterdir()) == ["sea", "sea.yaml"]
    assert current().name == "sea"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-y",), "name the cluster"),
        (("--cluster", "lab"), "stdin is no terminal"),
        (("--cluster", "lab", "--json"), "add -y"),
        (("--cluster", "lab", "-y", "--limit", "gone1.invalid"), "leave --limit out"),
        (("--cluster", "lob", "-y"), "Did you mean lab?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_is_not_clear_is_refused(words: tuple[str, ...], message: str) -> None:
    refused = forget(*words)

    assert isinstance(refused.exception, UserError)
    assert message in str(refused.exception)
    assert inventory.cluster_names() == ["lab", "sea"]


def test_a_cluster_that_another_command_works_on_is_kept() -> None:
    with local_lock("lab", "setup"):
        refused = forget("--cluster", "lab", "-y")

    assert "cluster lab is being worked on by" in str(refused.exception)
    assert local_file("lab").exists()
