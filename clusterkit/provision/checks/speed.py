"""Measure how fast the shared folder is written and how fast hosts send to one another, for seconds."""

from __future__ import annotations

import asyncio
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence

from clusterkit.common.finding import Finding, Level
from clusterkit.ssh.api import HostError, Result, Session, or_error

WRITE_MEBIBYTES = 512
SEND_SECONDS = 3
_LIMIT = 30
_MEBIBYTE = 1024**2

# One side sends zeros to the first that connects, for a few seconds; the other counts what arrives.
_SEND = f"""
import signal, socket, sys, time
signal.alarm({_LIMIT})
address, seconds = sys.argv[1], float(sys.argv[2])
listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
listener.settimeout(20)
print("port", listener.getsockname()[1], flush=True)
connection, block = listener.accept()[0], bytes(1 << 20)
end = time.monotonic() + seconds
try:
    while time.monotonic() < end:
        connection.sendall(block)
except OSError:
    pass
"""
_RECEIVE = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)
connection.settimeout(10)
buffer, total, began = bytearray(1 << 20), 0, time.monotonic()
while count := connection.recv_into(buffer):
    total += count
print("rate", round(total / (time.monotonic() - began)))
"""


async def write_rates(sessions: Sequence[Session], folder: str, *, root: bool = True) -> list[Finding]:
    """Return how fast each host, one after the other, writes half a GiB to the folder and syncs it (30 s at most)."""
    findings = []
    for session in sessions:  # at once, each would measure the others
        target = shlex.quote(f"{folder.rstrip('/')}/.clusterkit-check-{secrets.token_hex(8)}")
        script = f"""
[ -d {shlex.quote(folder)} ] || {{ echo absent; exit 0; }}
trap 'rm -f {target}' EXIT
timeout -s KILL {_LIMIT} dd if=/dev/zero of={target} bs=1M count={WRITE_MEBIBYTES} conv=fsync 2>&1
"""
        result = await or_error(session.run(script, root=root, timeout=_LIMIT + 20.0))
        findings.append(_judge_write(session.host.name, folder, result))
    return findings


async def send_rates(sessions: Sequence[Session], addresses: Mapping[str, str]) -> list[Finding]:
    """Return how fast each host receives from the one before it, for three seconds (needs python3 on both)."""
    known = [session for session in sessions if session.host.name in addresses]
    if len(known) < 2:
        return []
    return [
        await _send(known[index - 1], receiver, addresses[known[index - 1].host.name])
        for index, receiver in enumerate(known)
    ]


async def _send(sender: Session, receiver: Session, address: str) -> Finding:
    ports: asyncio.Queue[str] = asyncio.Queue()

    def note(line: str) -> None:
        if line.startswith("port "):
            ports.put_nowait(line.split()[1])

    # It limits itself: `timeout` would put it into a process group that does not end with the session's command.
    script = f"exec python3 -c {shlex.quote(_SEND)} {shlex.quote(address)} {SEND_SECONDS} </dev/null"
    sending = asyncio.create_task(or_error(sender.run(script, timeout=_LIMIT + 20.0, on_output=note)))
    sending.add_done_callback(lambda _: ports.put_nowait(""))
    name, other = receiver.host.name, sender.host.name
    if not (port := await ports.get()):
        return Finding(name, "bandwidth", Level.WARN, f"not measured: {other} could not send (is python3 there?)")
    script = f"timeout {_LIMIT} python3 -c {shlex.quote(_RECEIVE)} {shlex.quote(address)} {port} </dev/null"
    received = await or_error(receiver.run(script, timeout=_LIMIT + 20.0))
    if not isinstance(received, Result) or not received.ok:
        sending.cancel()  # it would wait for a connection that does not come
    await asyncio.gather(sending, return_exceptions=True)
    rate = re.search(r"^rate (\d+)", received.stdout, re.MULTILINE) if isinstance(received, Result) else None
    if rate is None:
        return Finding(name, "bandwidth", Level.WARN, f"not measured: nothing arrived from {other} at {address}")
    bits = int(rate[1]) * 8 / 1e9
    return Finding(name, "bandwidth", Level.OK, f"receives {bits:.1f} Gbit/s from {other} over one connection")


def _judge_write(host: str, folder: str, result: Result | HostError) -> Finding:
    if isinstance(result, HostError):
        return Finding(host, "bandwidth", Level.FAIL, f"while writing to {folder}: {result.message}", result.fix)
    if result.stdout.startswith("absent"):
        return Finding(host, "bandwidth", Level.WARN, f"not measured: {folder} is not there")
    if result.exit_code in {124, 137}:
        message = f"writes less than {WRITE_MEBIBYTES // _LIMIT} MiB/s to {folder}"
        return Finding(host, "bandwidth", Level.WARN, message, "Checkpoints of gigabytes will take very long there.")
    # GNU: "…, 1.23 s, 436 MB/s"; busybox: "…, 1.23 seconds, 416.2MB/s".
    seconds = re.search(r", ([\d.]+) s", result.stdout)
    if not result.ok or seconds is None:
        reason = (result.stdout.strip().splitlines() or ["no reason given"])[0]
        return Finding(host, "bandwidth", Level.FAIL, f"cannot write to {folder}: {reason}", "Is there space on it?")
    rate = WRITE_MEBIBYTES * _MEBIBYTE / max(float(seconds[1]), 0.001) / 1e9
    return Finding(host, "bandwidth", Level.OK, f"writes {rate:.2f} GB/s to {folder} (one file, synced)")
