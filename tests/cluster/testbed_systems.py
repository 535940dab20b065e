"""The distributions that nodes can run: where their packages come from, and the key that signs these."""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from testbed_engine import KEYRING, TestbedError, command

from clusterkit.provision.bundle.packages import MIRRORS

CHOSEN = "CLUSTERKIT_TESTBED_SYSTEM"
UBUNTU_KEYRING = "pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb"
"""Its package, for a machine whose distribution has none; it stays where it is as long as Ubuntu 24.04 does."""
UBUNTU_KEYRING_SHA256 = "36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8"


@dataclass(frozen=True)
class System:
    """A release. suites, components: what its hosts have in their sources.list. script: debootstrap's, of the
    releases that work alike; debootstrap itself may be older than the release.
    """

    name: str
    suites: tuple[str, ...]
    components: str
    script: str

    @property
    def vendor(self) -> str:
        """debian or ubuntu."""
        return self.name.partition("-")[0]

    def mirror(self, apt_mirror: str) -> str:
        """Where its packages are. apt_mirror: the site's own mirror of Debian, if it has one."""
        own = apt_mirror if self.vendor == "debian" else os.environ.get("CLUSTERKIT_TEST_UBUNTU_MIRROR", "")
        return own or MIRRORS[self.vendor]

    def sources(self, apt_mirror: str) -> list[str]:
        """Lines of its hosts' sources.list."""
        return [f"deb {self.mirror(apt_mirror)} {suite} {self.components}" for suite in self.suites]

    def keyring(self, cache: Path, apt_mirror: str) -> Path:
        """The keys that its packages are signed with; fetched and kept where this machine does not have them.

        Raises:
            TestbedError: they cannot be had.
        """
        if self.vendor == "debian":
            return KEYRING
        installed = Path("/usr/share/keyrings/ubuntu-archive-keyring.gpg")
        return installed if installed.exists() else _fetched_keyring(cache, self.mirror(apt_mirror))


DEBIAN = System("debian-12", ("bookworm", "bookworm-updates"), "main", "bookworm")
SYSTEMS = {
    system.name: system
    for system in (
        DEBIAN,
        *(
            System(f"ubuntu-{version}", (suite, f"{suite}-updates", f"{suite}-security"), "main universe", "gutsy")
            for version, suite in (("22.04", "jammy"), ("24.04", "noble"))
        ),
    )
}


def chosen() -> System:
    """What $CLUSTERKIT_TESTBED_SYSTEM names; Debian 12 where it is not set.

    Raises:
        TestbedError: there is no such system.
    """
    name = os.environ.get(CHOSEN) or DEBIAN.name
    if name not in SYSTEMS:
        raise TestbedError(f"{CHOSEN}={name}: expected one of {', '.join(SYSTEMS)}")
    return SYSTEMS[name]


def _fetched_keyring(cache: Path, mirror: str) -> Path:
    kept = cache / f"ubuntu-keyring-{UBUNTU_KEYRING_SHA256[:12]}.gpg"
    if kept.exists():
        return kept
    try:
        with urllib.request.urlopen(f"{mirror}/{UBUNTU_KEYRING}", timeout=60) as answer:
            package = answer.read()
    except OSError as error:
        raise TestbedError(f"Ubuntu's keys cannot be fetched from {mirror}: {error}") from error
    if hashlib.sha256(package).hexdigest() != UBUNTU_KEYRING_SHA256:
        raise TestbedError(f"{mirror}/{UBUNTU_KEYRING} is not the file that it should be")
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        deb, root = Path(folder) / "keyring.deb", Path(folder) / "root"
        deb.write_bytes(package)
        command("dpkg-deb", "-x", deb, root)
        (root / "usr/share/keyrings/ubuntu-archive-keyring.gpg").rename(kept)
    return kept
