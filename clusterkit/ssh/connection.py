"""Connect to a host."""

from __future__ import annotations

import asyncio
import logging

from clusterkit.hosts.model import Host
from clusterkit.ssh.config_file import resolve
from clusterkit.ssh.login import open_link
from clusterkit.ssh.options import SshOptions
from clusterkit.ssh.session import SshSession

# asyncssh reports every connection at INFO, and at WARNING what we raise as errors.
logging.getLogger("asyncssh").setLevel(logging.ERROR)


async def connect(host: Host, options: SshOptions) -> SshSession:
    """Log in to a host. All hosts may be connected to at once.

    Raises:
        HostError: UNREACHABLE, SILENT, HOST_KEY, LOGIN.
        UserError: a named private key is missing or cannot be unlocked; ~/.ssh/config is malformed.
    """
    # In a thread: reading the configuration may run commands (Match exec), which must not delay other hosts.
    endpoint = await asyncio.to_thread(resolve, host, options)
    return SshSession(host, endpoint, options, await open_link(endpoint, options))
