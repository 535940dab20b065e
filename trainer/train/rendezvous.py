"""Where the ranks of a trainer meet before they form a process group: whoever does not come is named."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from urllib.parse import urlparse

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from trainer.errors import RunError

AGAIN = "the same command goes on from the last recover checkpoint"


def meet(rank: int, size: int, rendezvous: str, patience: timedelta) -> Store:
    """Wait for all ranks; returns the store that they share.

    Args:
        rank: this one's number. size: how many there are. rendezvous: `file://PATH` or `tcp://HOST:PORT` of rank 0.

    Raises:
        RunError: some did not come in time, with their numbers, or rank 0 cannot be reached.
    """
    where = urlparse(rendezvous)
    within = f"within {patience.total_seconds():g} s"
    try:
        store: Store
        if where.scheme == "file":
            store = FileStore(where.path, size)
        else:
            assert where.hostname is not None
            assert where.port is not None
            store = tcp_store(where.hostname, where.port, size, rank == 0, patience)
        store.set_timeout(patience)
        store.set(_key(rank), os.uname().nodename)
    except (RuntimeError, OSError) as error:
        raise RunError(
            f"rank {rank} of {size} on {os.uname().nodename} could not reach rank 0 at {where.netloc} {within}: rank 0 "
            "has ended (its log says why), or a firewall or a wrong address is between their hosts (clusterkit check "
            f"shows it); {AGAIN}"
        ) from error
    try:
        store.wait([_key(other) for other in range(size)], patience)
    except RuntimeError as error:
        raise RunError(_absent(store, size, within)) from error
    return store


def tcp_store(host: str, port: int, size: int, is_server: bool, patience: timedelta) -> TCPStore:
    """A store that listens on this address alone; left to itself TCPStore listens on all of them, for everybody.

    port: the server's may be 0, for a free one.
    """
    listener = None
    if is_server:
        server = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port, listener = server.getsockname()[1], server.detach()
    return TCPStore(
        host,
        port,
        size,
        is_server,
        patience,
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def _absent(store: Store, size: int, within: str) -> str:
    try:
        arrived = {rank: store.get(_key(rank)).decode() for rank in range(size) if store.check([_key(rank)])}
    except RuntimeError:
        return f"rank 0 of {size} has ended while the others waited for all to come: its log says why; {AGAIN}"
    missing = ", ".join(str(rank) for rank in range(size) if rank not in arrived)
    came = ", ".join(f"{rank} on {node}" for rank, node in arrived.items())
    return (
        f"of {size} ranks these did not come {within}: {missing} (there are {came}). They hang or have ended (their "
        f"logs are in the run's attempt folder), or their hosts cannot reach rank 0's; {AGAIN}"
    )


def _key(rank: int) -> str:
    return f"clusterkit/rank-{rank}"
