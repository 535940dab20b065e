"""Which of a host's addresses Ray uses, and the interface that carries it."""

from __future__ import annotations

import ipaddress

from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.facts.model import Facts
from clusterkit.provision.steps.step import Refused


def node_address(host: Host, facts: Facts, alone: bool = False) -> str:
    """Address that the other nodes reach this host at.

    In order: the inventory's private_address, the address that the route to the head leaves from, the one that we met
    the host at (its own, also where it is named by an alias that only our ssh configuration knows, or has its own name
    on loopback), the inventory's address. alone: the host is the whole cluster, so that a loopback address will do.

    Raises:
        Refused: none of them is an address that other nodes can use.

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
    """Address of the head node. facts: of the head.

    Raises:
        Refused: as `node_address`.

    """
    return node_address(cluster.head_host, facts, alone=len(cluster.hosts) == 1)


def interface(host: Host, facts: Facts, address: str) -> str:
    """Network interface for NCCL and gloo: the inventory's, else the one that has the address; "" if unknown."""
    if host.interface:
        return host.interface
    found = (name for name, addresses in facts.addresses.items() if address in addresses)
    return next((name for name in found if name != "lo"), "")


def with_port(address: str, port: int) -> str:
    """ADDRESS:PORT, or [ADDRESS]:PORT for IPv6."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _usable(text: str, alone: bool) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return alone or not (address.is_loopback or address.is_link_local or address.is_unspecified)
