"""Open a connection to one endpoint: through bastions, within a time limit, with errors that say what to do."""

from __future__ import annotations

import asyncio
import os
import random
import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import asyncssh
from asyncssh.encryption import get_default_encryption_algs
from asyncssh.public_key import get_default_certificate_algs, get_default_public_key_algs

from clusterkit.ssh import known_hosts
from clusterkit.ssh.api import ErrorKind, HostError
from clusterkit.ssh.bastions import Bastion, Link
from clusterkit.ssh.client import Client
from clusterkit.ssh.config_file import resolve_bastion
from clusterkit.ssh.endpoint import Endpoint
from clusterkit.ssh.keys import Offers
from clusterkit.ssh.options import SshOptions
from trainer.errors import UserError

RETRIES = 4
"""Further tries where an SSH server drops a connection before the login, as it does with too many at once."""
_KEEPALIVES = 3
_CIPHERS = sorted((name.decode() for name in get_default_encryption_algs()), key=lambda name: "gcm" not in name)
"""AES-GCM first: processors have it in hardware, so it costs half as much as ChaCha20, which ssh prefers."""
_LONGEST_CHAIN = 8


async def open_link(endpoint: Endpoint, options: SshOptions) -> Link:
    """Log in to an endpoint through its bastions.

    Raises:
        HostError: UNREACHABLE, SILENT, HOST_KEY, LOGIN.
        UserError: a private key cannot be used, or bastions need each other.
    """
    if not endpoint.jump:
        return Link(await _log_in(endpoint, options, None))
    # Checked before anything is opened: each bastion would wait for the other.
    _refuse_circle(endpoint, options)
    try:
        bastion = await options.bastions.acquire(
            endpoint.jump,
            options.bastion_limit,
            lambda: open_link(resolve_bastion(endpoint.jump, options), options),
        )
    except HostError as error:
        raise HostError(endpoint.name, error.kind, f"{error.host}: {error.message}", error.fix) from None
    try:
        async with bastion.opening:
            return Link(await _log_in(endpoint, options, bastion), bastion)
    except BaseException:
        await bastion.release()
        raise


def _refuse_circle(endpoint: Endpoint, options: SshOptions) -> None:
    jump = endpoint.jump
    for _ in range(_LONGEST_CHAIN):
        if not jump:
            return
        jump = resolve_bastion(jump, options).jump
    raise UserError(f"{endpoint.name}: the bastions lead in a circle. Look at ProxyJump in ~/.ssh/config.")


async def _log_in(endpoint: Endpoint, options: SshOptions, bastion: Bastion | None) -> asyncssh.SSHClientConnection:
    password = await options.secrets.login_password(endpoint.username)
    async with options.keys.offers(endpoint, options.secrets) as offers:
        for attempt in range(RETRIES + 1):
            try:
                return await _attempt(endpoint, options, offers, password, bastion)
            except _Dropped as dropped:
                if attempt == RETRIES:
                    raise dropped.error from None
            # At random times, or all hosts come back at the same moment.
            await asyncio.sleep(0.2 * 2**attempt * random.uniform(0.5, 1.5))
    raise AssertionError


class _Dropped(Exception):  # noqa: N818 (not seen outside)
    """The connection ended before the login began. `error` is for the last try."""

    def __init__(self, error: HostError) -> None:
        super().__init__()
        self.error = error


async def _attempt(
    endpoint: Endpoint, options: SshOptions, offers: Offers, password: str | None, bastion: Bastion | None
) -> asyncssh.SSHClientConnection:
    known = known_hosts.lookup(endpoint, options)
    # A lossy network makes a login slow without making it hang, so each part of it has the limit for itself.
    limit, ended = asyncio.timeout(options.connect_timeout), asyncio.Event()

    @contextmanager
    def paused() -> Iterator[None]:
        limit.reschedule(None)
        yield
        progressed()

    def progressed() -> None:
        if not ended.is_set() and not limit.expired():
            limit.reschedule(asyncio.get_running_loop().time() + options.connect_timeout)

    client = Client(endpoint, options, known, offers, password, paused, progressed)
    try:
        async with limit:
            return await asyncssh.connect(
                endpoint.address,
                endpoint.port,
                username=endpoint.username,
                client_factory=lambda: client,
                config=None,  # `endpoint` has its values already
                tunnel=bastion.link.connection if bastion else (),
                proxy_command=endpoint.proxy_command or (),
                known_hosts=known.for_asyncssh(endpoint),
                server_host_key_algs=_algorithms(known),
                x509_trusted_certs=None,
                client_keys=None,  # the client offers them, in our order
                gss_kex=False,
                gss_auth=False,
                encryption_algs=_CIPHERS,
                compression_algs=["none"],
                login_timeout=0,
                keepalive_interval=options.keepalive,
                keepalive_count_max=_KEEPALIVES,
            )
    except TimeoutError:
        raise _no_answer(endpoint, options, client) from None
    except asyncssh.HostKeyNotVerifiable as error:
        raise client.problem or _bad_host_key(endpoint, str(error)) from None
    except asyncssh.PermissionDenied:
        raise _refused_login(endpoint, client, offers) from None
    except asyncssh.ChannelOpenError as error:
        raise _no_way_on(endpoint, error) from None
    except (asyncssh.DisconnectError, OSError) as error:
        raise _failed(endpoint, client, offers, error) from None
    finally:
        ended.set()


def _algorithms(known: known_hosts.Known) -> list[str]:
    """Return host key algorithms, those of the known keys first: else the host shows another key, which we refuse."""
    preferred = list(get_default_certificate_algs()) if known.authorities else []
    for key in known.trusted:
        preferred += key.sig_algorithms
    return [name.decode() for name in dict.fromkeys([*preferred, *get_default_public_key_algs()])]


_UP = "Is the host up, its SSH server running, and port {port} open in its firewall?"


def _try_it(endpoint: Endpoint) -> str:
    jump = f"-J {shlex.quote(','.join(endpoint.jump))} " if endpoint.jump else ""
    keys = "".join(f"-i {shlex.quote(str(key))} " for key in endpoint.required_keys)
    return f"Try: ssh {keys}{jump}-p {endpoint.port} {shlex.quote(f'{endpoint.username}@{endpoint.address}')}"


def _no_answer(endpoint: Endpoint, options: SshOptions, client: Client) -> HostError:
    where, seconds = f"{endpoint.address} port {endpoint.port}", f"{options.connect_timeout:g} s"
    slow = f"Over a slow or lossy network wait longer: --connect-timeout {4 * options.connect_timeout:g}."
    if client.verified:
        message = f"the login did not end within {seconds}"
        fix = f"The host may be overloaded. {slow} {_try_it(endpoint)}"
        return HostError(endpoint.name, ErrorKind.SILENT, message, fix)
    if client.reached:
        message = f"{where} takes connections, but no SSH server answered within {seconds}"
        fix = f"The host may hang, or something else listens on this port. {slow} {_try_it(endpoint)}"
        return HostError(endpoint.name, ErrorKind.SILENT, message, fix)
    message = f"no answer from {where} within {seconds}"
    return HostError(endpoint.name, ErrorKind.UNREACHABLE, message, _UP.format(port=endpoint.port))


def _no_way_on(endpoint: Endpoint, error: asyncssh.ChannelOpenError) -> HostError:
    where, bastion = f"{endpoint.address} port {endpoint.port}", endpoint.jump[-1]
    if error.code == asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED:
        message = f"the bastion {bastion} does not hand connections on to {where}"
        fix = "Allow it there: AllowTcpForwarding yes in its sshd_config"
        return HostError(endpoint.name, ErrorKind.UNREACHABLE, message, fix)
    message = f"the bastion {bastion} cannot reach {where}: {error.reason}"
    return HostError(endpoint.name, ErrorKind.UNREACHABLE, message, _UP.format(port=endpoint.port))


def _bad_host_key(endpoint: Endpoint, reason: str) -> HostError:
    fix = f"Look at its entries in the known_hosts files: ssh-keygen -F {shlex.quote(endpoint.known_as)}"
    return HostError(endpoint.name, ErrorKind.HOST_KEY, reason, fix)


def _refused_login(endpoint: Endpoint, client: Client, offers: Offers, reason: str = "") -> HostError:
    tried = "; ".join(client.tried) or "nothing: there was no key that could be offered"
    message = f"{reason or 'the host'} did not let {endpoint.username} in. Tried: {tried}."
    if not reason and client.offered:
        message += f" The host offers: {', '.join(client.offered)}."
    if offers.notes:
        message += f" Not tried: {'; '.join(offers.notes)}."
    fix = f"Name the key that the host knows (--private-key-file) and the user (--username). {_try_it(endpoint)}"
    if not client.tried:
        fix += "\nWithout a key: ssh-keygen -t ed25519 makes one, ssh-copy-id takes it to the host"
    if {"password", "keyboard-interactive"} & set(client.offered):
        fix += "\nWith a password: --ask-password"
    return HostError(endpoint.name, ErrorKind.LOGIN, message, fix)


def _failed(
    endpoint: Endpoint, client: Client, offers: Offers, error: asyncssh.DisconnectError | OSError
) -> HostError | _Dropped:
    where = f"{endpoint.address} port {endpoint.port}"
    if isinstance(error, socket.gaierror):
        message = f"the name {endpoint.address} is not known ({error.strerror})"
        fix = "Correct the name, give its address in the inventory, or add an alias to ~/.ssh/config"
        return HostError(endpoint.name, ErrorKind.UNREACHABLE, message, fix)
    if "oo many authentication failures" in str(error):
        reason = "after too many keys the host"
        return _refused_login(endpoint, client, offers, reason)
    if isinstance(error, asyncssh.KeyExchangeFailed | asyncssh.ProtocolNotSupported):
        message = f"{where} speaks no SSH that we know: {error.reason}"
        return HostError(endpoint.name, ErrorKind.UNREACHABLE, message, _try_it(endpoint))
    if client.verified:
        message = f"the host ended the connection during the login: {error}"
        return HostError(endpoint.name, ErrorKind.LOST, message, _try_it(endpoint))
    if client.reached:
        message = f"{where} closed the connection before the login: {error}"
        fix = f"Its SSH server may be overloaded or refuse our address (MaxStartups, fail2ban). {_try_it(endpoint)}"
        return _Dropped(HostError(endpoint.name, ErrorKind.UNREACHABLE, message, fix))
    # asyncio words them "Connect call failed (address)".
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return HostError(endpoint.name, ErrorKind.UNREACHABLE, f"{where}: {reason}", _UP.format(port=endpoint.port))
