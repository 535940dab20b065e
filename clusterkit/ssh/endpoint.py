"""What a connection needs to know of a host."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a connection needs to know. Without required and optional keys ssh's default keys are tried."""

    name: str
    address: str
    port: int
    username: str
    key_name: str  # the host's name in known_hosts files
    required_keys: tuple[Path, ...] = ()  # private keys that someone named: they must exist
    optional_keys: tuple[Path, ...] = ()  # those of ~/.ssh/config
    identities_only: bool = False
    agent: str = ""  # path of the agent's socket
    jump: tuple[str, ...] = ()  # bastions, the nearest first
    proxy_command: str = ""
    host_key: str | None = None  # pinned fingerprint

    @property
    def known_as(self) -> str:
        """The host in the form of known_hosts files."""
        return self.key_name.lower() if self.port == 22 else f"[{self.key_name.lower()}]:{self.port}"
