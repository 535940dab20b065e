"""The storage probe with real files: one folder for all, one for each, and the ways of being half shared."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import nolocks
import pytest
from localsession import LocalSession
from realparts import require

from clusterkit.common.finding import Level, worst
from clusterkit.provision.checks.storage import StorageReport, storage_shared
from clusterkit.ssh.api import ErrorKind, HostError, Result

HOSTS = ("h1", "h2", "h3")


def probe(folder: Path, patience: float = 0.3, sessions: list[LocalSession] | None = None) -> StorageReport:
    return asyncio.run(
        storage_shared(sessions or [LocalSession(name) for name in HOSTS], str(folder), root=False, delay=patience)
    )


def views(tmp_path: Path, own: Callable[[str], Path]) -> tuple[Path, Callable[[str], tuple[str, ...]]]:
    """One path that is another folder for every host, as on hosts of their own: mount namespaces."""
    require(os.geteuid() == 0 and shutil.which("unshare") is not None, "needs root and unshare")
    place = tmp_path / "storage"
    place.mkdir()

    def run_in(host: str) -> tuple[str, ...]:
        script = f'mount --bind "{own(host)}" "{place}" && exec "$@"'
        return ("unshare", "--mount", "sh", "-c", script, "sh")

    return place, run_in


def test_one_folder_for_all_hosts(tmp_path: Path) -> None:
    report = probe(tmp_path)

    assert [finding.level for finding in report.findings] == [Level.OK]
    assert "one folder on 3 host(s)" in report.findings[0].message
    assert report.unseen == []
    assert set(report.rename_seconds) == {"h2", "h3"}
    assert list(tmp_path.iterdir()) == []


def test_a_folder_for_each_host(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in HOSTS}
    for folder in folders.values():
        folder.mkdir()
    place, run_in = views(tmp_path, lambda host: folders["h2" if host == "h2" else "h1"])

    report = asyncio.run(storage_shared([LocalSession(n) for n in HOSTS], str(place), run_in=run_in, delay=0.3))

    # h1 and h3 share, h2 is alone.
    assert report.unseen == [("h1", "h2"), ("h2", "h1"), ("h2", "h3"), ("h3", "h2")]
    alone = next(finding for finding in report.findings if finding.host == "h2")
    assert alone.level is Level.FAIL
    assert "is not shared" in alone.message
    assert "h1 (" in alone.message
    assert "h3 (" in alone.message
    assert "Mount the same file system" in alone.fix
    assert set(report.rename_seconds) == {"h3"}
    assert all(list(folder.iterdir()) == [] for folder in folders.values())


def test_a_folder_that_is_nowhere_is_not_made(tmp_path: Path) -> None:
    report = probe(tmp_path / "storage")

    assert [finding.level for finding in report.findings] == [Level.WARN] * 3
    assert "setup would create it" in report.findings[0].message
    assert not (tmp_path / "storage").exists()


def test_a_folder_that_one_host_lacks(tmp_path: Path) -> None:
    class Without(LocalSession):
        """A host without the folder: what is asked of it is asked of a path that is not there."""

        async def run(self, script: str, **options: object) -> Result:
            return await super().run(script.replace(str(tmp_path), "/not/there"), **options)  # type: ignore[arg-type]

    report = probe(tmp_path, sessions=[LocalSession("h1"), Without("h2"), LocalSession("h3")])

    assert [(finding.host, finding.level) for finding in report.findings] == [("h2", Level.FAIL)]
    assert "is not there, but is on h1, h3" in report.findings[0].message
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_folder(tmp_path: Path) -> None:
    require(os.geteuid() == 0 and shutil.which("unshare") is not None, "needs root and unshare")
    place = tmp_path / "storage"
    place.mkdir()
    script = f'mount --bind "{place}" "{place}" && mount -o remount,bind,ro "{place}" && exec "$@"'

    report = asyncio.run(
        storage_shared(
            [LocalSession(n) for n in HOSTS],
            str(place),
            run_in=lambda host: ("unshare", "--mount", "sh", "-c", script if host == "h3" else 'exec "$@"', "sh"),
            delay=0.3,
        )
    )

    assert [(finding.host, finding.level) for finding in report.findings] == [("h3", Level.FAIL)]
    assert "Read-only file system" in report.findings[0].message
    assert list(place.iterdir()) == []


def test_root_that_the_server_maps_away(tmp_path: Path) -> None:
    # A stand-in for NFS's root_squash: a chown after every write of h1, as the server does it.
    require(os.geteuid() == 0, "needs root")

    class Squashed(LocalSession):
        async def run(self, script: str, **options: object) -> Result:
            result = await super().run(script, **options)  # type: ignore[arg-type]
            for file in tmp_path.glob(".clusterkit-check-*/nonce-*"):
                os.chown(file, 65534, 65534)
            return result

    report = probe(tmp_path, sessions=[Squashed("h1"), LocalSession("h2")])

    assert worst(report.findings) is Level.WARN
    assert "belongs to user 65534" in report.findings[0].message
    assert "no_root_squash" in report.findings[0].fix


def test_locks_that_do_not_reach_the_other_host(tmp_path: Path) -> None:
    # A stand-in for a mount with local locks: h2 gets every lock but a second one of its own.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "flock").write_text('#!/bin/sh\n[ "$2" = 9 ]\n')
    (tmp_path / "bin" / "flock").chmod(0o755)
    local = LocalSession("h2", environment={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"})
    (tmp_path / "storage").mkdir()

    report = probe(tmp_path / "storage", sessions=[LocalSession("h1"), local])

    assert [(finding.host, finding.level) for finding in report.findings] == [("h2", Level.WARN)]
    assert "locks are not shared" in report.findings[0].message


def test_a_host_that_is_lost_on_the_way_leaves_the_others_checked(tmp_path: Path) -> None:
    class Lost(LocalSession):
        """Gone after it has written."""

        async def run(self, script: str, **options: object) -> Result:
            if self.scripts:
                raise HostError("h2", ErrorKind.LOST, "the connection is gone", "Look at it.")
            return await super().run(script, **options)  # type: ignore[arg-type]

    report = probe(tmp_path, sessions=[LocalSession("h1"), Lost("h2"), LocalSession("h3")])

    assert {finding.host for finding in report.findings} == {"h2"}
    assert "the connection is gone" in report.findings[0].message
    assert set(report.rename_seconds) == {"h3"}


def test_many_probes_over_one_head_at_once(tmp_path: Path) -> None:
    """As setup does it: every worker against the head, over the head's one connection with its limit of commands."""

    class Limited(LocalSession):
        slots = asyncio.Semaphore(8)

        async def run(self, script: str, **options: object) -> Result:
            async with self.slots:
                return await super().run(script, **options)  # type: ignore[arg-type]

    async def all_at_once() -> list[StorageReport]:
        head = Limited("head")
        others = [LocalSession(f"w{number}") for number in range(20)]
        probes = (storage_shared([head, other], str(tmp_path), root=False, delay=2.0) for other in others)
        return await asyncio.gather(*probes)

    reports = asyncio.run(asyncio.wait_for(all_at_once(), 60))

    assert all(worst(report.findings) is Level.OK for report in reports)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["with space", "$(touch x)", "quo'te"])
def test_odd_folder_names(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()

    assert worst(probe(folder).findings) is Level.OK
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("error", "said"), [(errno.ENOLCK, "locks fail: No locks available"), (0, "locks do nothing")])
def test_a_host_without_working_locks_is_named(tmp_path: Path, error: int, said: str) -> None:
    def run_in(host: str) -> tuple[str, ...]:
        return nolocks.words(error) if host == "h2" else ("env",)

    report = asyncio.run(storage_shared([LocalSession(n) for n in HOSTS], str(tmp_path), run_in=run_in, root=False))

    (found,) = report.findings
    assert (found.host, found.level) == ("h2", Level.FAIL)
    assert said in found.message
    assert "rpc-statd" in found.fix
    assert list(tmp_path.iterdir()) == []
