"""`down` where Docker dies between the question and the answer: a real dockerd that is killed."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from localsession import LocalSession
from realparts import require

from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.ray.model import LABEL_CLUSTER, LABEL_ROLE
from clusterkit.provision.ray.remove import leftovers, remove

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="dockerd needs root")
CLUSTER = Cluster(name="lab-dead-docker", hosts=(Host(name="here"),))


class Engine:
    """A dockerd of this test's own."""

    def __init__(self, folder: Path) -> None:
        self.host = f"unix://{folder}/docker.sock"
        self._log = (folder / "log").open("wb")
        command = ["dockerd", "--host", self.host, "--pidfile", f"{folder}/pid", "--data-root", f"{folder}/data"]
        command += ["--exec-root", f"{folder}/exec", "--bridge", "none", "--iptables=false", "--ip6tables=false"]
        command += ["--storage-driver", "vfs"]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        deadline = time.monotonic() + 300
        while subprocess.run(["docker", "-H", self.host, "version"], capture_output=True, check=False).returncode:
            assert self.process.poll() is None, (folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
            time.sleep(0.1)

    def docker(self, *words: str, stdin: bytes = b"") -> str:
        done = subprocess.run(["docker", "-H", self.host, *words], input=stdin, capture_output=True, check=True)
        return done.stdout.decode().strip()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    require(shutil.which("dockerd") is not None, "dockerd is not installed (apt-get install docker.io)")
    folder = tmp_path_factory.mktemp("d")
    engine = Engine(folder)
    yield engine
    if engine.process.poll() is None:
        engine.process.terminate()
        engine.process.wait()
    # A killed dockerd leaves its data folder mounted on itself, and the containerd that it started.
    subprocess.run(["umount", "--lazy", str(folder / "data")], check=False, capture_output=True)
    for pid in folder.glob("exec/containerd/*.pid"):
        os.kill(int(pid.read_text()), signal.SIGTERM)


def test_what_could_not_be_removed_is_told_and_stays_for_the_next_try(engine: Engine) -> None:
    empty = io.BytesIO()
    with tarfile.open(fileobj=empty, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("file"))
    engine.docker("import", "-", "nothing:1", stdin=empty.getvalue())
    labels = ["--label", f"{LABEL_CLUSTER}={CLUSTER.name}", "--label", f"{LABEL_ROLE}=head"]
    made = engine.docker("create", *labels, "--network", "host", "nothing:1", "/file")
    session = LocalSession(environment={"DOCKER_HOST": engine.host})

    async def down() -> dict[str, object]:
        found, silent = await leftovers({"here": session}, CLUSTER.name)
        assert not silent
        assert [container.id for container in found["here"].containers] == [made]
        engine.kill()  # while the user thinks about the question
        return dict(await remove({"here": session}, CLUSTER, found))

    failed = asyncio.run(down())
    assert set(failed) == {"here"}
    assert "Cannot connect to the Docker daemon" in str(failed["here"])


def test_what_is_there_is_removed(engine: Engine) -> None:
    empty = io.BytesIO()
    with tarfile.open(fileobj=empty, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("file"))
    engine.docker("import", "-", "nothing:1", stdin=empty.getvalue())
    engine.docker("create", "--label", f"{LABEL_CLUSTER}={CLUSTER.name}", "--network", "host", "nothing:1", "/file")
    others = engine.docker("create", "--network", "host", "nothing:1", "/file")
    session = LocalSession(environment={"DOCKER_HOST": engine.host})

    async def down() -> dict[str, object]:
        found, _ = await leftovers({"here": session}, CLUSTER.name)
        return dict(await remove({"here": session}, CLUSTER, found))

    assert asyncio.run(down()) == {}
    assert engine.docker("ps", "--all", "--quiet", "--no-trunc") == others
