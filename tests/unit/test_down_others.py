"""`down` and `setup --recreate` while others train: the head is asked, whichever hosts are meant.

What the hosts say is a stand-in: the moment between question and answer cannot be met with a real Ray.
`tests/cluster` has the real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner, Result

from clusterkit.cli.main import app
from clusterkit.hosts import inventory
from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.ray.model import RaySettings
from clusterkit.provision.ray.observe import RayAnswer
from clusterkit.provision.ray.plan import MustReplace
from clusterkit.provision.ray.remove import Leftovers
from clusterkit.provision.ray.start import require_replaceable
from clusterkit.runs.directory import user_name


class Hosts:
    """A head and a worker that have something of the cluster. users: of the jobs that are alive, by job."""

    def __init__(self) -> None:
        self.users = {"mine": user_name()}
        self.looked: list[str] = []
        self.removed: list[str] = []

    async def connect(self, host: Host, _options: object) -> Any:
        class Session:
            def __init__(self) -> None:
                self.host = host

            async def close(self) -> None:
                pass

        return Session()

    async def leftovers(
        self, sessions: Mapping[str, Any], _cluster: str
    ) -> tuple[dict[str, Leftovers], dict[str, Any]]:
        self.looked = list(sessions)
        return {name: Leftovers(name, files=True) for name in sessions}, {}

    async def ask_ray(self, head: Any, _cluster: str) -> RayAnswer:
        assert head.host.name == "head"
        return RayAnswer(jobs=tuple(self.users), users=dict(self.users))

    async def remove(self, _sessions: object, _cluster: Cluster, found: Mapping[str, Leftovers]) -> dict[str, str]:
        self.removed = list(found)
        return {}


@asynccontextmanager
async def leased(_claim: object, _hosts: object) -> AsyncIterator[dict[str, Any]]:
    yield {}


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    monkeypatch.setenv("CLUSTERKIT_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("CLUSTERKIT_STATE", str(tmp_path / "state"))
    inventory.save(Cluster(name="default", hosts=(Host(name="head"), Host(name="worker"))))
    hosts = Hosts()
    monkeypatch.setattr("clusterkit.cli.actions.down.connect", hosts.connect)
    monkeypatch.setattr("clusterkit.cli.actions.down.leftovers", hosts.leftovers)
    monkeypatch.setattr("clusterkit.cli.actions.down.remove", hosts.remove)
    monkeypatch.setattr("clusterkit.cli.actions.down.ask_ray", hosts.ask_ray)
    monkeypatch.setattr("clusterkit.cli.actions.down.remote_lease", leased)
    return hosts


def down(*words: str) -> Result:
    return CliRunner().invoke(app, ["down", *words])


@pytest.mark.parametrize("words", [(), ("--limit", "worker"), ("--exclude", "head")])
def test_the_head_is_asked_whose_runs_are_alive_whichever_hosts_are_meant(hosts: Hosts, words: tuple[str, ...]) -> None:
    hosts.users["bobs"] = "bob"
    refused = down("-y", *words)
    assert "running now, and not yours: bobs of bob" in str(refused.exception)
    assert hosts.removed == []
    assert down("-y", "--user", "bob", *words).exit_code == 0
    assert hosts.looked == hosts.removed == (["worker"] if words else ["head", "worker"])


def test_a_run_that_somebody_starts_while_the_question_is_thought_about(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def agreed() -> bool:
        hosts.users["bobs"] = "bob"
        return True

    monkeypatch.setattr("clusterkit.cli.actions.down._agreed", agreed)
    refused = down()
    assert "running now, and ended by this: mine" in refused.output
    assert "not yours: bobs of bob" in str(refused.exception)
    assert hosts.removed == []


@pytest.mark.parametrize("user", [user_name(), "alice"])
def test_a_ray_is_replaced_only_under_jobs_of_ones_own(user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask_ray(*_: object) -> RayAnswer:
        return RayAnswer(jobs=("job-1",), users={"job-1": user})

    monkeypatch.setattr("clusterkit.provision.ray.start.ask_ray", ask_ray)
    settings = RaySettings(Cluster(hosts=(Host(name="head"),)), "image", "10.0.0.1", recreate=True)
    refusal = MustReplace("runs with other settings", "add --recreate")

    async def ask() -> str:
        try:
            await require_replaceable(refusal, cast(Any, None), settings)
        except MustReplace as refused:
            return f"{refused.message} {refused.fix}"
        return "replaced"

    told = asyncio.run(ask())
    if user == user_name():
        assert told == "replaced"
    else:
        assert "job-1 of alice" in told
        assert "clusterkit stop --user" in told
