"""Connect to a host."""

from __future__ import annotations

import asyncio
import logging

from clusterkit.hosts.model import Host
from clusterkit.ssh.config_file import resolve
from clusterkit.ssh.login import open_link
from clusterkit.ssh.options import SshOptions
from clusterkit.ssh.session import SshSession

# It reports every connection at INFO and what we turn into errors of our own at WARNING.
logging.getLogger("asyncssh").setLevel(logging.ERROR)


async def connect(host: Host, options: SshOptions) -> SshSession:
    """Log in to a host; all hosts may be connected to at once.

    Raises:
        HostError: UNREACHABLE, SILENT, HOST_KEY, LOGIN.
        UserError: a named private key is missing or cannot be unlocked; ~/.ssh/config is malformed.

    """
    # Reading the configuration may run commands (Match exec) and must not hold up the others.
    endpoint = await asyncio.to_thread(resolve, host, options)
    return SshSession(host, endpoint, options, await open_link(endpoint, options))
