"""Low-rank adapters on servers that keep the weights they were started with: one for each version, beside one another.

A request names its adapter, so an update needs no pause: the new one is loaded while requests go on under theirs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from trainer.adapter_folder import is_adapter_folder
from trainer.engines.base import EngineError
from trainer.engines.http import Server, ServerPool

log = logging.getLogger(__name__)

LOAD_DEADLINE = 900.0
"""Seconds that a server may take to load weights from a folder."""


def adapter_name(version: int) -> str:
    """What servers call the adapter of a version."""
    return f"v{version}"


@dataclass(frozen=True, slots=True)
class AdapterRoutes:
    """A server's routes for adapters."""

    load: str
    unload: str

    async def versions(self, pool: ServerPool, server: Server) -> list[int]:
        """Versions whose adapters the server has."""
        names = await self._names(pool, server)
        return [int(name[1:]) for name in names if name[:1] == "v" and name[1:].isdecimal()]

    async def add(self, pool: ServerPool, server: Server, folder: Path, version: int) -> None:
        """Load a version's adapter beside those that are there; one of an earlier attempt at the run gives way."""
        name = adapter_name(version)
        if name in await self._names(pool, server):
            await self._remove(pool, server, name)
        body = {"lora_name": name, "lora_path": str(folder)}
        await pool.call(server, "POST", self.load, body, LOAD_DEADLINE)

    async def replace(self, pool: ServerPool, server: Server, folder: Path, version: int) -> None:
        """Have a paused server load an adapter in place of all that it has, or none where the folder is its model's."""
        for name in await self._names(pool, server):
            await self._remove(pool, server, name)
        if is_adapter_folder(folder):
            await self.add(pool, server, folder, version)

    async def remove_before(self, pool: ServerPool, server: Server, oldest: int) -> None:
        """Unload the adapters of versions before `oldest`, which no request uses; one that stays costs only memory."""
        try:
            for version in await self.versions(pool, server):
                if version < oldest:
                    await self._remove(pool, server, adapter_name(version))
        except EngineError as error:
            log.warning("adapters before version %d were not all unloaded: %s", oldest, error)

    async def _names(self, pool: ServerPool, server: Server) -> list[str]:
        listed = (await pool.call(server, "GET", "/v1/models", None, pool.limits.control)).get("data") or []
        return [str(one["id"]) for one in listed if one.get("parent")]

    async def _remove(self, pool: ServerPool, server: Server, name: str) -> None:
        await pool.call(server, "POST", self.unload, {"lora_name": name}, pool.limits.control)
