"""All that a connection needs to know of a host."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class Endpoint:
    """All that a connection needs to know.

    key_name: the name that known_hosts files have the host under. required_keys: private keys that someone named and
    that must be there; optional_keys: those of ~/.ssh/config. Where both are empty, ssh's default keys are tried.
    agent: path of the agent's socket, or empty. jump: bastions, the nearest first. host_key: pinned fingerprint.
    """

    name: str
    address: str
    port: int
    username: str
    key_name: str
    required_keys: tuple[Path, ...] = ()
    optional_keys: tuple[Path, ...] = ()
    identities_only: bool = False
    agent: str = ""
    jump: tuple[str, ...] = ()
    proxy_command: str = ""
    host_key: str | None = None

    @property
    def known_as(self) -> str:
        """The host as known_hosts files write it."""
        return self.key_name.lower() if self.port == 22 else f"[{self.key_name.lower()}]:{self.port}"
