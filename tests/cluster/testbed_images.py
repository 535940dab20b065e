"""What the nodes are made of: a small Debian or Ubuntu made by debootstrap, and on it a bare server with sshd."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from testbed_engine import LABEL, Engine, command, find
from testbed_systems import DEBIAN, System, chosen

# What `setup` installs on a bare host, already downloaded: installing stays real, and takes seconds.
DOWNLOADED = "docker.io git git-lfs iptables curl ca-certificates gnupg jq pciutils rsync zstd xz-utils"
PASSWORD = "correct horse"

NODE_DOCKERFILE = f"""\
FROM {{base}}
RUN printf '{{sources}}\\n' >/etc/apt/sources.list \\
 && printf '#!/bin/sh\\nexit 101\\n' >/usr/sbin/policy-rc.d && chmod 755 /usr/sbin/policy-rc.d \\
 && apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \\
    openssh-server sudo iproute2 procps curl gnupg \\
 && apt-get clean && rm -f /etc/ssh/ssh_host_* \\
 && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends --download-only {DOWNLOADED}
RUN useradd -m -s /bin/sh admin && useradd -m -s /bin/sh deploy && useradd -m -s /bin/sh guest \\
 && printf 'admin:{PASSWORD}\\ndeploy:{PASSWORD}\\nguest:{PASSWORD}\\n' | chpasswd \\
 && printf 'admin ALL=(ALL) ALL\\ndeploy ALL=(ALL) NOPASSWD: ALL\\n' >/etc/sudoers.d/testbed \\
 && printf 'PermitRootLogin prohibit-password\\nMaxStartups 100\\n' >/etc/ssh/sshd_config.d/testbed.conf
CMD ["sh", "-c", "mkdir -p /run/sshd && exec /usr/sbin/sshd -D -e"]
"""
SYSTEMD_DOCKERFILE = """\
FROM {base}
RUN rm /usr/sbin/policy-rc.d && apt-get update -q \\
 && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends systemd systemd-sysv dbus
STOPSIGNAL SIGRTMIN+3
CMD ["/sbin/init"]
"""
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


@dataclass(frozen=True)
class Site:
    """How this machine reaches package mirrors: what a user behind a proxy would hand to `setup`."""

    ca_bundle: Path | None
    pip_index_url: str
    pip_find_links: str
    apt_mirror: str
    proxies: dict[str, str]

    @classmethod
    def here(cls) -> Site:
        """Read from the environment, pip's own settings and CLUSTERKIT_TEST_APT_MIRROR."""
        bundles = (os.environ.get(name, "") for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"))
        bundle = next((Path(name) for name in bundles if name and Path(name).is_file()), None)
        return cls(
            ca_bundle=bundle,
            pip_index_url=_pip_setting("index-url"),
            pip_find_links=_pip_setting("find-links"),
            apt_mirror=os.environ.get("CLUSTERKIT_TEST_APT_MIRROR", ""),
            proxies={name: os.environ[name] for name in PROXIES if os.environ.get(name)},
        )

    def options(self) -> list[str]:
        """The options of `clusterkit setup` that say the same."""
        pairs = {
            "--ca-bundle": str(self.ca_bundle or ""),
            "--pip-index-url": self.pip_index_url,
            "--pip-find-links": self.pip_find_links,
            "--apt-mirror": self.apt_mirror if chosen() == DEBIAN else "",
        }
        return [word for option, value in pairs.items() if value for word in (option, value)]


def _pip_setting(name: str) -> str:
    if value := os.environ.get("PIP_" + name.upper().replace("-", "_")):
        return value
    for section in ("install", "global"):
        words = [sys.executable, "-m", "pip", "config", "get", f"{section}.{name}"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    return ""


def base_archive(cache: Path, site: Site, system: System) -> Path:
    """A minimal root file system as a tar, for `docker import`; made once and kept."""
    mirror = system.mirror(site.apt_mirror)
    words = ["--variant=minbase", "--include=ca-certificates", system.suites[0]]
    archive = cache / f"base-{_key(*words, mirror)}.tar"
    if archive.exists():
        return archive
    keyring = system.keyring(cache, site.apt_mirror)
    scripts = Path("/usr/share/debootstrap/scripts")
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        root, partial = Path(folder) / "root", Path(folder) / "base.tar"
        words = [find("debootstrap") or "debootstrap", f"--keyring={keyring}", *words]
        command(*words, root, mirror, scripts / system.script, timeout=600)
        for junk in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale", "usr/share/man", "dev"):
            shutil.rmtree(root / junk)
            (root / junk).mkdir()
        (root / "var/cache/apt/archives/partial").mkdir(parents=True)
        (root / "var/lib/apt/lists/partial").mkdir()
        command("tar", "-C", root, "--numeric-owner", "-cf", partial, ".", timeout=300)
        partial.rename(archive)
    return archive


def base_image(engine: Engine, archive: Path) -> str:
    """The minimal root file system as an image of the tests' engine; its name."""
    name = f"clusterkit-testbed/{archive.stem.replace('-', ':', 1)}"
    if engine.inspect("image", name) is None:
        engine.docker("import", archive, name, timeout=300)
    return name


def node_image(engine: Engine, base: str, site: Site, system: System) -> str:
    """The bare server that nodes start from; its name."""
    sources = "\\n".join(system.sources(site.apt_mirror))
    return _built(engine, "node", NODE_DOCKERFILE.format(base=base, sources=sources), site)


def systemd_image(engine: Engine, node: str, site: Site) -> str:
    """The bare server with systemd, which packages may start services with; its name.

    Args:
        node: the image of a bare server without it.
    """
    return _built(engine, "systemd", SYSTEMD_DOCKERFILE.format(base=node), site)


def _built(engine: Engine, kind: str, text: str, site: Site) -> str:
    name = f"clusterkit-testbed/{kind}:{_key(text)}"
    if engine.inspect("image", name) is None:
        # Both spellings of the proxies are build arguments that Docker knows and keeps out of the image.
        arguments = [word for key, value in site.proxies.items() for word in ("--build-arg", f"{key}={value}")]
        words = ["env", "DOCKER_BUILDKIT=0", *engine.argv("build", "-q", "--network", "host", "--force-rm")]
        command(*words, *arguments, "--label", f"{LABEL}=1", "-t", name, "-", stdin=text.encode(), timeout=900)
    return name


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
