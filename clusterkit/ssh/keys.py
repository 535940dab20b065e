"""Private keys to log in with: named files, keys of the agent, ssh's default keys."""

from __future__ import annotations

import asyncio
import base64
import copy
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import asyncssh

from clusterkit.ssh.endpoint import Endpoint
from clusterkit.ssh.secrets import Once, Secrets
from trainer.errors import UserError

DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa", "id_ed25519_sk", "id_ecdsa_sk")
_ATTEMPTS = 3


def fingerprint(public_data: bytes) -> str:
    """Return SHA256:… of a public key, as ssh-keygen -l prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(public_data).digest()).decode().rstrip("=")


@dataclass
class Offers:
    """Keys for one host, in the order in which they are offered."""

    pairs: list[tuple[asyncssh.SSHKeyPair, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # keys that could not be offered, and why

    def add(self, pair: asyncssh.SSHKeyPair, origin: str) -> None:
        """Add a key, once. origin: where it comes from."""
        if all(pair.public_data != other.public_data for other, _ in self.pairs):
            algorithm = pair.algorithm.decode()
            # Signing sets the signature algorithm in the pair, so parallel connections need a copy each.
            self.pairs.append((copy.copy(pair), f"{origin} ({algorithm} {fingerprint(pair.public_data)})"))


class KeyRing:
    """Loads each key file once, however many hosts it is for."""

    def __init__(self) -> None:
        self._once = Once()

    @asynccontextmanager
    async def offers(self, endpoint: Endpoint, secrets: Secrets) -> AsyncIterator[Offers]:
        """Yield the keys for one host. Keys of the agent can sign while the block runs.

        Raises:
            UserError: a named key is missing or unreadable, or there is no terminal to ask for its passphrase.
        """
        async with _agent_keys(endpoint.agent) as agent:
            offers = Offers()
            named = [(path, True) for path in endpoint.required_keys]
            named += [(path, False) for path in endpoint.optional_keys if path not in endpoint.required_keys]
            for path, required in named:
                await self._add_named(offers, path, required, agent, secrets)
            if not endpoint.identities_only:
                for pair in agent:
                    offers.add(pair, f"agent: {pair.get_comment()}")
            if not named:
                await self._add_defaults(offers, agent, secrets)
            yield offers

    async def _add_named(
        self, offers: Offers, path: Path, required: bool, agent: list[asyncssh.SSHKeyPair], secrets: Secrets
    ) -> None:
        if not path.exists():
            if required:
                raise UserError(f"there is no private key {path}.\nName one that the hosts know: --private-key-file")
            offers.notes.append(f"{path} (named in the ssh configuration, not there)")
            return
        # An agent (or a token behind it) may hold the key whose public half is in the file or beside it.
        if held := _held_by(agent, path):
            offers.add(held, f"{path}, from the agent")
            return
        for pair in await self._load(path, secrets):
            offers.add(pair, str(path))

    async def _add_defaults(self, offers: Offers, agent: list[asyncssh.SSHKeyPair], secrets: Secrets) -> None:
        locked: list[Path] = []
        for path in (Path("~/.ssh").expanduser() / name for name in DEFAULT_KEYS):
            if not path.exists() or _held_by(agent, path):
                continue
            try:
                pairs = _read(path, None)
            except asyncssh.KeyImportError:
                locked.append(path)
            except OSError as error:
                offers.notes.append(f"{path} ({error.strerror})")
            else:
                for pair in pairs:
                    offers.add(pair, str(path))
        for path in locked:
            if offers.pairs:
                # Do not ask for the passphrase of a key that may not be needed.
                offers.notes.append(f"{path} (has a passphrase: name it with --private-key-file, or ssh-add {path})")
                continue
            for pair in await self._load(path, secrets):
                offers.add(pair, str(path))

    async def _load(self, path: Path, secrets: Secrets) -> list[asyncssh.SSHKeyPair]:
        pairs: list[asyncssh.SSHKeyPair] = await self._once.get(str(path), lambda: _unlock(path, secrets))
        return pairs


async def _unlock(path: Path, secrets: Secrets) -> list[asyncssh.SSHKeyPair]:
    try:
        return _read(path, None)
    except OSError as error:
        raise UserError(f"the private key {path} cannot be read: {error.strerror}") from None
    except asyncssh.KeyImportError as error:
        if "assphrase" not in str(error):
            private = path.with_suffix("")
            if path.suffix == ".pub" and private.exists():
                raise UserError(f"{path} is the public half of a key: name the private one, {private}") from None
            raise UserError(f"{path} is no private key: {error}\nMake one: ssh-keygen -t ed25519") from None
    for attempt in range(_ATTEMPTS):
        passphrase = await secrets.passphrase(path, attempt)
        try:
            return await asyncio.to_thread(_read, path, passphrase)
        except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
            if "bcrypt" in str(error):
                raise UserError(f"{path} cannot be unlocked here: {error}\nInstall it: pip install bcrypt") from None
    raise UserError(f"{_ATTEMPTS} wrong passphrases for {path}")


def _read(path: Path, passphrase: str | None) -> list[asyncssh.SSHKeyPair]:
    """Return the key pairs of a file, the one with a certificate (FILE-cert.pub) first."""
    path.open("rb").close()  # asyncssh reports some unreadable files as malformed ones
    return list(asyncssh.load_keypairs([str(path)], passphrase))


def _held_by(agent: list[asyncssh.SSHKeyPair], path: Path) -> asyncssh.SSHKeyPair | None:
    for candidate in (path.with_name(path.name + ".pub"), path):
        try:
            public = asyncssh.read_public_key(candidate).public_data
        except (OSError, asyncssh.KeyImportError):
            continue
        return next((pair for pair in agent if pair.public_data == public), None)
    return None


@asynccontextmanager
async def _agent_keys(path: str) -> AsyncIterator[list[asyncssh.SSHKeyPair]]:
    try:
        agent = await asyncssh.connect_agent(path) if path else None
    except OSError:  # a stale SSH_AUTH_SOCK is common and no reason to fail
        agent = None
    if agent is None:
        yield []
        return
    try:
        keys: list[asyncssh.SSHKeyPair] = []
        with suppress(ValueError, OSError):
            keys = list(await agent.get_keys())
        yield keys
    finally:
        agent.close()
        await agent.wait_closed()
