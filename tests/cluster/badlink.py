"""A bad link, in user space: packets of a network namespace wait for a while, and some are lost.

Stands in for `tc qdisc … netem` where the kernel has no such queue. It is run inside a node's network namespace, where
iptables hands packets to it (NFQUEUE); it gives each one back late or not at all. What TCP makes of that is the
kernel's own doing, as on a real link.

    python badlink.py QUEUE DELAY_MS LOSS SEED      says "ready" once packets may come
"""

from __future__ import annotations

import heapq
import random
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator

NFNL_SUBSYS_QUEUE = 3
PACKET, VERDICT, CONFIG = 0, 1, 2
ACCEPT, DROP = 1, 0
COMMAND, PARAMETERS, LONGEST = 1, 2, 3
HEADER = 1
VERDICT_HEADER = 2
REQUEST = 1
NETLINK_NETFILTER = 12


def message(kind: int, queue: int, *attributes: tuple[int, bytes]) -> bytes:
    """Make a message to the kernel, of one kind, about one queue."""
    body = struct.pack("!BBH", 0, 0, queue)
    for number, value in attributes:
        padding = b"\0" * (-len(value) % 4)
        body += struct.pack("=HH", len(value) + 4, number) + value + padding
    return struct.pack("=IHHII", len(body) + 16, NFNL_SUBSYS_QUEUE << 8 | kind, REQUEST, 0, 0) + body


def packet_ids(data: bytes) -> Iterator[int]:
    """The numbers of the packets that the kernel handed over in one datagram."""
    at = 0
    while at + 16 <= len(data):
        length, kind, *_ = struct.unpack_from("=IHHII", data, at)
        if kind == NFNL_SUBSYS_QUEUE << 8 | PACKET:
            inner, end = at + 20, at + length
            while inner + 4 <= end:
                size, number = struct.unpack_from("=HH", data, inner)
                if number & 0x7FFF == HEADER:
                    yield struct.unpack_from("!I", data, inner + 4)[0]
                inner += (size + 3) & ~3
        at += (length + 3) & ~3


def main(queue: int, delay: float, loss: float, seed: int) -> None:
    """Serve a queue for ever."""
    rng = random.Random(seed)
    netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
    netlink.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    netlink.setsockopt(270, 5, 1)  # SOL_NETLINK, NETLINK_NO_ENOBUFS
    netlink.bind((0, 0))
    netlink.send(message(CONFIG, queue, (COMMAND, struct.pack("!BBH", 1, 0, socket.AF_INET))))
    netlink.send(message(CONFIG, queue, (PARAMETERS, struct.pack("!IB", 0, 1))))  # the numbers suffice
    netlink.send(message(CONFIG, queue, (LONGEST, struct.pack("!I", 65536))))
    print("ready", flush=True)
    waiting: list[tuple[float, int]] = []
    while True:
        while waiting and waiting[0][0] <= time.monotonic():
            _, packet = heapq.heappop(waiting)
            netlink.send(message(VERDICT, queue, (VERDICT_HEADER, struct.pack("!II", ACCEPT, packet))))
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        if not select.select([netlink], [], [], left)[0]:
            continue
        for packet in packet_ids(netlink.recv(1 << 20)):
            if rng.random() < loss:
                netlink.send(message(VERDICT, queue, (VERDICT_HEADER, struct.pack("!II", DROP, packet))))
            else:
                heapq.heappush(waiting, (time.monotonic() + delay, packet))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]) / 1000, float(sys.argv[3]), int(sys.argv[4]))
