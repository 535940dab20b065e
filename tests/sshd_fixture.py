"""The fixture `ssh`; a module of its own, so that pytest loads it before the tests import its parts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sshd import Ssh, require_sshd


@pytest.fixture
def ssh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ssh]:
    """Servers for one test. Their folder can be entered by every user, which pytest's own cannot."""
    require_sshd()
    with tempfile.TemporaryDirectory(prefix="ck-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        monkeypatch.setenv("HOME", str(folder / "home"))
        monkeypatch.setenv("CLUSTERKIT_CONFIG", str(folder / "config"))
        monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
        monkeypatch.delenv("CLUSTERKIT_SUDO_PASSWORD", raising=False)
        world = Ssh(folder)
        try:
            yield world
        finally:
            world.servers.close()
