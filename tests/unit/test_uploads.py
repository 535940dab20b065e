"""What this machine sends to many hosts goes to a few of them at once, and a wait for that is no host's own work."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from localsession import LocalSession
from realparts import require

from clusterkit.hosts.model import Host
from clusterkit.provision.bundle.folder import Bundle, Manifest, digest, send
from clusterkit.provision.facts.model import Facts
from clusterkit.setup.hostlog import HostLog
from clusterkit.setup.model import HostReport
from clusterkit.setup.runner import HostRunner
from clusterkit.ssh.api import Session
from clusterkit.ssh.uploads import Uploads


class Counting(LocalSession):
    """Counts how many sessions send at once; every file takes a moment."""

    now = most = 0

    async def put(
        self,
        source: bytes | Path,
        target: str,
        *,
        mode: int = 0o644,
        root: bool = False,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        Counting.now += 1
        Counting.most = max(Counting.most, Counting.now)
        await asyncio.sleep(0.02)
        await super().put(source, target, mode=mode, root=root, on_bytes=on_bytes)
        Counting.now -= 1


def bundle_in(folder: Path) -> Bundle:
    packages = folder / "packages" / "debian-12"
    packages.mkdir(parents=True)
    names = [f"packages/debian-12/{name}" for name in ("a.deb", "b.deb")]
    for name in names:
        (folder / name).write_text(name)
    files = {name: found for name in names if (found := digest(folder / name)) is not None}
    return Bundle(folder, Manifest(systems=("debian-12",), files=files))


def test_a_bundle_goes_to_as_many_hosts_at_once_as_may_be(tmp_path: Path) -> None:
    require(os.geteuid() == 0, "the scripts run as root")
    bundle = bundle_in(tmp_path / "bundle")
    told: list[tuple[str, float]] = []

    async def to_all() -> list[int]:
        uploads = Uploads(2, lambda host, seconds: told.append((host, seconds)))
        return await asyncio.gather(
            *(
                send(Counting(f"n{n}"), bundle, "debian-12", folder=str(tmp_path / f"n{n}"), slot=uploads.slot)
                for n in range(6)
            )
        )

    Counting.most = 0
    size = sum(file.size for file in bundle.manifest.files.values())
    assert asyncio.run(to_all()) == [size] * 6
    assert Counting.most == 2
    assert len(told) == 6
    assert max(seconds for _, seconds in told) > 0

    told.clear()
    assert asyncio.run(to_all()) == [0] * 6
    assert told == [], "where nothing has to be sent, nobody waits for a turn"


def test_waiting_for_a_turn_is_no_work_of_the_host(tmp_path: Path) -> None:
    async def look(session: Session) -> Facts:
        return Facts()

    async def work() -> HostRunner:
        host = Host(name="one")
        runner = HostRunner(host, HostReport("one"), HostLog(tmp_path, "one"), look, lambda _: None, dry=False)

        def waited(_host: str, seconds: float) -> None:
            runner.waited += seconds

        uploads = Uploads(1, waited)
        async with asyncio.TaskGroup() as group:
            entered = asyncio.Event()

            async def other() -> None:
                async with uploads.slot("other"):
                    entered.set()
                    await asyncio.sleep(0.3)

            group.create_task(other())
            await entered.wait()
            async with runner.timed("image"), uploads.slot("one"):
                pass
        return runner

    runner = asyncio.run(work())
    assert runner.waited > 0.2
    assert runner.report.seconds["image"] < 0.1
