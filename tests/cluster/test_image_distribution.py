"""Images on real hosts: every way of distribution with real Docker Engines, real SSH between hosts, a real registry."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import secrets
import tarfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from testbed import Node, Testbed
from testbed_registry import REGISTRY_PORT, install_docker, registry
from testbed_runtime import load_into

from clusterkit.hosts.model import Host
from clusterkit.provision.images import lock as locks
from clusterkit.provision.images.distribute import Distribution, ImageOutcome, Method
from clusterkit.provision.images.identity import Image, ImageError, inspect
from clusterkit.provision.images.lock import Lock
from clusterkit.ssh.api import HostError
from clusterkit.ssh.connection import connect
from clusterkit.ssh.options import SshOptions
from clusterkit.ssh.session import SshSession

pytestmark = pytest.mark.long
SMALL_BYTES = 20_000_000


@pytest.fixture(scope="module")
def docked(testbed: Testbed) -> list[Node]:
    """The nodes with Docker installed and running, for all tests of this file: they take images away, not engines."""
    testbed.reset()
    registry_address = f"{testbed.nodes[0].address}:{REGISTRY_PORT}"
    testbed.each(lambda node: install_docker(node, "--insecure-registry", registry_address))
    return testbed.nodes


@pytest.fixture
def hosts(docked: list[Node]) -> list[Node]:
    """Nodes with Docker and without images."""
    own = docked[0].testbed.key.with_suffix(".pub").read_bytes()
    for node in docked:
        node.exec("cat >/root/.ssh/authorized_keys", stdin=own)
        node.exec(
            "docker image ls -q | sort -u | xargs -r docker image rm -f >/dev/null; rm -rf /storage/*", timeout=120
        )
    return docked


@pytest.fixture
def small(testbed: Testbed) -> Iterator[str]:
    """An image of one test's own in the testbed's engine: a file that no compression makes smaller."""
    reference = f"small:{secrets.token_hex(4)}"
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        entry = tarfile.TarInfo("data")
        entry.size = SMALL_BYTES
        archive.addfile(entry, io.BytesIO(secrets.token_bytes(SMALL_BYTES)))
    testbed.engine.docker("import", "-", reference, stdin=tar.getvalue())
    yield reference
    testbed.engine.docker("image", "rm", reference, check=False)


@contextlib.asynccontextmanager
async def sessions(testbed: Testbed, hosts: list[Node], username: str = "root") -> AsyncIterator[list[SshSession]]:
    known = testbed.folder / "known_hosts"
    known.write_text(testbed.known_hosts())
    options = SshOptions(
        private_key_files=(str(testbed.key),),
        username=username,
        known_hosts=known,
        trusted_known_hosts=(),
        ssh_config=(),
    )
    opened = await asyncio.gather(
        *(connect(Host(name=node.name, address=node.address, port=node.ssh_port), options) for node in hosts)
    )
    try:
        yield opened
    finally:
        await asyncio.gather(*(session.close() for session in opened))


@dataclass
class Distributed:
    """What became of every host, by name."""

    outcomes: dict[str, ImageOutcome | ImageError | HostError]
    distribution: Distribution

    @property
    def image(self) -> Image:
        assert self.distribution.image is not None
        return self.distribution.image

    @property
    def notes(self) -> list[str]:
        return self.distribution.notes

    def require_all(self) -> None:
        failed = {name: outcome for name, outcome in self.outcomes.items() if isinstance(outcome, Exception)}
        if failed:
            reasons = "\n".join(map(str, failed.values()))
            raise ImageError(", ".join(failed), f"{self.image.reference} is not the same on all hosts:\n{reasons}")


async def distribute(sessions: Sequence[SshSession], reference: str, how: str, **more: object) -> Distributed:
    """Seed the first host that has the image, or the first of all, and let the others join, as set-up does."""
    held = [await inspect(session, reference) is not None for session in sessions]
    first = held.index(True) if True in held else 0
    found = [(await session.run("command -v zstd")).ok for session in sessions]
    distribution = Distribution(
        reference,
        Method(how),
        hosts=len(sessions),
        zstd=all(found),
        **more,  # type: ignore[arg-type]
    )
    others = [session for number, session in enumerate(sessions) if number != first]
    done = [await distribution.seed(sessions[first])]
    done += await asyncio.gather(*(distribution.join(session) for session in others), return_exceptions=True)
    for outcome in done:
        if isinstance(outcome, BaseException) and not isinstance(outcome, ImageError | HostError):
            raise outcome
    names = [session.host.name for session in (sessions[first], *others)]
    return Distributed(dict(zip(names, done, strict=True)), distribution)


def spread(
    testbed: Testbed, hosts: list[Node], reference: str, how: str, username: str = "root", **more: object
) -> Distributed:
    async def run() -> Distributed:
        async with sessions(testbed, hosts, username) as opened:
            return await distribute(opened, reference, how, **more)

    return asyncio.run(run())


def image_ids(hosts: list[Node], reference: str) -> set[str]:
    return {node.exec(f"docker image inspect -f '{{{{.Id}}}}' {reference}").stdout.strip() for node in hosts}


def ways(done: Distributed) -> dict[str, Method]:
    return {name: outcome.method for name, outcome in done.outcomes.items() if isinstance(outcome, ImageOutcome)}


class Moved:
    """Progress as a table would show it."""

    def __init__(self) -> None:
        self.last: dict[str, tuple[int, int]] = {}
        self.steps: dict[str, int] = {}

    def __call__(self, host: str, done: int, total: int) -> None:
        assert done >= 0
        self.last[host] = (done, total)
        self.steps[host] = self.steps.get(host, 0) + 1


def test_runtime_image_over_shared_storage(testbed: Testbed, hosts: list[Node], cpu_image: Image) -> None:
    load_into(testbed, cpu_image.reference, hosts[1])
    moved = Moved()
    done = spread(testbed, hosts, cpu_image.reference, "storage", storage="/storage", progress=moved)
    done.require_all()
    assert ways(done) == {"node1": Method.STORAGE, "node2": Method.PRESENT, "node3": Method.STORAGE}
    assert image_ids(hosts, cpu_image.reference) == {cpu_image.image_id}
    assert moved.last["node1"][0] == moved.last["node1"][1] > 50_000_000
    assert moved.steps["node2"] > 3, "the one that writes the archive tells bytes as well"
    assert {path.suffix for path in (testbed.storage / "images").iterdir()} == {".zst", ".json"}
    run = f"docker run --rm --network host {cpu_image.reference} sh -c"
    assert (
        "2.60.0" in hosts[2].exec(f"{run} 'ray --version && python -c \"import trainer.config\"'", timeout=120).stdout
    )

    moved = Moved()
    again = spread(testbed, hosts, cpu_image.reference, "auto", storage="/storage", progress=moved)
    assert set(ways(again).values()) == {Method.PRESENT}
    assert not moved.last


def test_image_from_host_to_host_without_a_key_of_theirs(testbed: Testbed, hosts: list[Node], small: str) -> None:
    """Hosts that cannot reach one another, one with a full disk below ~/.ssh: nobody's authorized_keys is touched."""
    load_into(testbed, small, hosts[0])
    rule = f"INPUT -p tcp --dport 22 -s {hosts[0].address} -j REJECT"
    hosts[1].exec(f"iptables -I {rule}")
    # What a transfer of an earlier release left, which used to be taken out through a second copy.
    left = "ssh-ed25519 AAAA clusterkit-once-1000-aa\n"
    hosts[1].exec("cat >>/root/.ssh/authorized_keys", stdin=left.encode())
    hosts[1].exec(
        "cp -a /root/.ssh /root/.ssh.was && mount -t tmpfs -o size=16k,mode=700 tmpfs /root/.ssh "
        "&& cp -a /root/.ssh.was/. /root/.ssh/ && dd if=/dev/zero of=/root/.ssh/fill bs=4k 2>/dev/null || :"
    )
    look = "cat /root/.ssh/authorized_keys; stat -c '%i %Y %Z' /root/.ssh/authorized_keys"
    try:
        before = [node.exec(look).stdout for node in hosts]
        moved = Moved()
        done = spread(testbed, hosts, small, "fanout", progress=moved)
        after = [node.exec(look).stdout for node in hosts]
    finally:
        hosts[1].exec(f"umount /root/.ssh; rm -rf /root/.ssh.was; iptables -D {rule}")
    done.require_all()
    assert ways(done) == {"node1": Method.PRESENT, "node2": Method.FANOUT, "node3": Method.FANOUT}
    assert len(image_ids(hosts, small)) == 1
    assert moved.last["node3"][0] == moved.last["node3"][1] > SMALL_BYTES // 2
    assert left in before[1]
    assert after == before
    assert [node.exec("ls /tmp").stdout for node in hosts] == ["", "", ""]


def test_truncated_archive_is_noticed_and_written_again(testbed: Testbed, hosts: list[Node], small: str) -> None:
    load_into(testbed, small, hosts[0])
    spread(testbed, hosts[:2], small, "storage", storage="/storage").require_all()
    (archive,) = (testbed.storage / "images").glob("*.zst")
    size = archive.stat().st_size
    for damage in (lambda: archive.write_bytes(archive.read_bytes()[: size // 2]), lambda: flip(archive)):
        damage()
        hosts[1].exec(f"docker image rm {small}")
        done = spread(testbed, hosts[:2], small, "storage", storage="/storage")
        done.require_all()
        assert [note for note in done.notes if "damaged" in note]
        assert ways(done)["node2"] is Method.STORAGE
        assert len(image_ids(hosts[:2], small)) == 1
        assert abs(archive.stat().st_size - size) < 10_000
    assert not list((testbed.storage / "images").glob(".*partial"))


def flip(path: Path) -> None:
    """One byte in the middle, at the same size."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_image_that_only_the_storage_has(testbed: Testbed, hosts: list[Node], small: str) -> None:
    load_into(testbed, small, hosts[0])
    spread(testbed, hosts[:2], small, "storage", storage="/storage").require_all()
    for node in hosts[:2]:
        node.exec(f"docker image rm {small}")
    done = spread(testbed, hosts[:2], small, "auto", storage="/storage")
    done.require_all()
    assert set(ways(done).values()) == {Method.STORAGE}


def test_account_that_is_not_root(testbed: Testbed, hosts: list[Node], small: str) -> None:
    load_into(testbed, small, hosts[0])
    before = hosts[1].exec("cat /home/deploy/.ssh/authorized_keys").stdout
    done = spread(testbed, hosts[:2], small, "fanout", username="deploy")
    done.require_all()
    assert hosts[1].exec("cat /home/deploy/.ssh/authorized_keys").stdout == before
    assert hosts[1].exec("stat -c '%U %a' /home/deploy/.ssh/authorized_keys").stdout == "deploy 600\n"


def test_storage_that_is_not_shared_is_given_up_in_auto_and_an_error_when_asked_for(
    testbed: Testbed, hosts: list[Node], small: str
) -> None:
    load_into(testbed, small, hosts[0])
    hosts[0].exec("mkdir -p /not-shared")
    asked = spread(testbed, hosts[:2], small, "storage", storage="/not-shared")
    with pytest.raises(ImageError, match=r"node2.*\n.*is the storage shared"):
        asked.require_all()
    done = spread(testbed, hosts[:2], small, "auto", storage="/not-shared")
    done.require_all()
    assert ways(done)["node2"] is Method.FANOUT
    assert [note for note in done.notes if "storage did not work" in note]


def test_one_digest_everywhere_although_the_tag_moves(testbed: Testbed, hosts: list[Node], small: str) -> None:
    """A registry of our own; its tag is given to another image between two hosts' set-ups."""
    head, address = hosts[0], f"{hosts[0].address}:{REGISTRY_PORT}"
    tag = f"{address}/team/app:latest"
    load_into(testbed, small, head)
    with registry(head):
        head.exec(f"docker tag {small} {tag} && docker push -q {tag} && docker image rm {tag}", timeout=120)
        moved = Moved()
        done = spread(testbed, hosts[:2], tag, "pull", progress=moved)
        done.require_all()
        assert done.image.repo_digest.startswith(f"{address}/team/app@sha256:")
        assert set(ways(done).values()) == {Method.PULL}
        assert moved.last["node2"][0] == moved.last["node2"][1] > 10_000_000

        build = f"printf 'FROM {small}\\nLABEL newer=1\\n' | DOCKER_BUILDKIT=0 docker build -q -t {tag} - "
        head.exec(f"{build} && docker push -q {tag}", timeout=120)
        lock = Lock.of(done.image)
        later = spread(testbed, hosts, tag, "auto", lock=lock)
        later.require_all()
        assert image_ids(hosts, tag) == {done.image.image_id}, "the lock brings the head back, and the third host along"

        newer = spread(testbed, hosts, tag, "auto", lock=lock, refresh=True)
        newer.require_all()
        assert newer.image.image_id != done.image.image_id
        assert image_ids(hosts, tag) == {newer.image.image_id}, "all follow the tag when that is asked for"
        again = spread(testbed, hosts, tag, "auto", lock=Lock.of(newer.image), refresh=True)
        assert set(ways(again).values()) == {Method.PRESENT}

        with pytest.raises(ImageError, match="cannot be pulled"):
            spread(testbed, hosts[:1], f"{address}/team/nothing:1", "auto")


def test_no_image_anywhere(testbed: Testbed, hosts: list[Node]) -> None:
    with pytest.raises(ImageError, match=r"node1: .*cannot be pulled") as caught:
        spread(testbed, hosts, "none:1", "auto")
    assert "leave --image out" in caught.value.fix


def test_lock_file_here_and_on_the_storage(
    testbed: Testbed, hosts: list[Node], small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERKIT_CONFIG", str(tmp_path))
    load_into(testbed, small, hosts[0])

    async def run() -> tuple[bool, bool, Lock | None, Image | None]:
        async with sessions(testbed, hosts[:1]) as (session,):
            image = await inspect(session, small)
            assert image is not None
            first = await locks.write("c1", Lock.of(image), session, "/storage")
            second = await locks.write("c1", Lock.of(image), session, "/storage")
            return first, second, await locks.read_shared(session, "/storage"), image

    first, second, shared, image = asyncio.run(run())
    assert (first, second) == (True, False)
    assert shared == locks.read_local("c1")
    assert shared is not None
    assert shared.names(image)
    assert json.loads((testbed.storage / "clusterkit/image.lock.json").read_text())["reference"] == small
