"""Which of a host's addresses Ray uses, and the interface that carries it."""

from __future__ import annotations

import ipaddress

from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.facts.model import Facts
from clusterkit.provision.steps.step import Refused


def node_address(host: Host, facts: Facts, alone: bool = False) -> str:
    """Return the address at which the other nodes reach this host.

    The first usable one of: the inventory's private_address, the address that the route to the head leaves from, the
    host's own address of our SSH connection (right also where only our ssh configuration knows the host's name, or the
    host resolves its own name to loopback), the inventory's address.

    Args:
        alone: the host is the whole cluster, so a loopback address is good enough.

    Raises:
        Refused: other nodes can use none of them.
    """
    ssh_address = "" if alone else facts.ssh_address
    for candidate in (host.private_address or "", facts.route_to_head, ssh_address, host.target):
        if _usable(candidate, alone):
            return candidate
    if alone:
        return "127.0.0.1"
    raise Refused(
        f"no address of {host.name} is known that the other nodes could reach it at",
        f"give one: private_address for {host.name} in the inventory",
    )


def head_address(cluster: Cluster, facts: Facts) -> str:
    """Return the address of the head node. facts: of the head. Raises Refused as `node_address`."""
    return node_address(cluster.head_host, facts, alone=len(cluster.hosts) == 1)


def interface(host: Host, facts: Facts, address: str) -> str:
    """Return the network interface for NCCL and gloo: the inventory's, else that of the address; "" if unknown."""
    if host.interface:
        return host.interface
    found = (name for name, addresses in facts.addresses.items() if address in addresses)
    return next((name for name in found if name != "lo"), "")


def _usable(text: str, alone: bool) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return alone or not (address.is_loopback or address.is_link_local or address.is_unspecified)
