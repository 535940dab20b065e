"""Check that hosts reach one another on Ray's ports: each listens for a moment, each connects to all others."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from clusterkit.common.finding import Finding, Level
from clusterkit.provision.ray.ports import Ports
from clusterkit.ssh.api import HostError, Result, Session, or_error

LISTEN_SECONDS = 60
CONNECT_SECONDS = 3
READY_SECONDS = 15.0

# Listens on an address, prints which ports it could bind, resets every connection (so that no port stays in TIME_WAIT,
# which would keep Ray from binding it), and ends by itself after a while. It resets them once the other end is closed:
# a busy host may come to see that it is connected only after a reset, and would take it for a firewall's. It keeps few
# enough connections for any limit of open files.
_PYTHON = """
import os, select, signal, socket, struct, sys
address, seconds, *ports = sys.argv[1:]
signal.alarm(int(seconds))
listeners = []
for port in ports:
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listeners.append(socket.create_server((address, int(port)), family=family))
        print("bound", port)
    except OSError as error:
        print("unbound", port, error.strerror)
print("pid", os.getpid(), flush=True)
connections = []
while True:
    for ready in select.select(listeners + connections, [], [])[0]:
        if ready in connections:
            connections.remove(ready)
            ready.close()
        elif ready in listeners:
            connections.append(ready.accept()[0])
            connections[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if len(connections) > 256:
                connections.pop(0).close()
"""
_PERL = """
use IO::Socket::INET; use IO::Select; use Socket;
$| = 1;
my ($address, $seconds, @ports) = @ARGV;
alarm $seconds;
my $all = IO::Select->new;
for my $port (@ports) {
  my $listener = IO::Socket::INET->new(LocalAddr => $address, LocalPort => $port, Proto => "tcp", Listen => 64,
    ReuseAddr => 1);
  if ($listener) { $all->add($listener); print "bound $port\\n" } else { print "unbound $port $!\\n" }
}
print "pid $$\\n";
my %listens = map { fileno($_) => 1 } $all->handles;
my @connections;
sub drop { my ($old) = @_; @connections = grep { $_ != $old } @connections; $all->remove($old); close $old }
while (1) {
  sleep 1 unless $all->count;
  for my $ready ($all->can_read) {
    next unless defined fileno $ready;
    if (!$listens{fileno $ready}) { drop($ready); next }
    my $connection = $ready->accept or next;
    setsockopt $connection, SOL_SOCKET, SO_LINGER, pack("ii", 1, 0);
    push @connections, $connection;
    $all->add($connection);
    drop($connections[0]) if @connections > 256;
  }
}
"""


@dataclass
class _Peer:
    """One host as the others see it."""

    session: Session
    address: str
    ports: list[int]  # to listen on
    bound: list[int] = field(default_factory=list)  # ports that it listens on
    unbound: dict[int, str] = field(default_factory=dict)  # why it does not, by port
    pid: int = 0
    error: str = ""

    @property
    def name(self) -> str:
        return self.session.host.name


async def reachable(sessions: Sequence[Session], addresses: Mapping[str, str], head: str) -> list[Finding]:
    """Try every host's ports of Ray from every other host, at once. It takes a few seconds and leaves nothing behind.

    A port that something listens on already is left out. Of the range of worker processes both ends are tried.

    Args:
        addresses: where the others reach a host, by name.

    Returns:
        Which hosts reach which; also the hosts that could not be checked, since they can neither listen nor connect.
    """
    peers = [
        _Peer(session, addresses[session.host.name], _ports_to_try(session.host.name == head))
        for session in sessions
        if session.host.name in addresses
    ]
    if len(peers) < 2:
        return []
    listening = [asyncio.create_task(_listen(peer)) for peer in peers]
    try:
        await asyncio.gather(*(_until_ready(peer, task) for peer, task in zip(peers, listening, strict=True)))
        seen = await asyncio.gather(*(_connect(peer, peers) for peer in peers))
    finally:
        await asyncio.gather(*(_end(peer) for peer in peers))
        for task in listening:
            task.cancel()
        await asyncio.gather(*listening, return_exceptions=True)
    return [finding for peer in peers for finding in _cannot_listen(peer)] + [
        finding for peer, result in zip(peers, seen, strict=True) for finding in _judge(peer, peers, result)
    ]


def _ports_to_try(is_head: bool) -> list[int]:
    ports = Ports()
    return [
        *([ports.gcs] if is_head else []),  # the dashboard listens on loopback only
        *ports.on_every_node().values(),
        ports.first_worker,
        ports.last_worker,
    ]


async def _listen(peer: _Peer) -> None:
    port_list = " ".join(map(str, peer.ports))
    arguments = f"{shlex.quote(peer.address)} {LISTEN_SECONDS} {port_list}"
    script = f"""
for python in python3 /usr/libexec/platform-python python; do
  if "$python" -c 'import socket; socket.create_server' 2>/dev/null; then
    exec "$python" -c {shlex.quote(_PYTHON)} {arguments} </dev/null
  fi
done
if perl -MIO::Socket::INET -e 1 2>/dev/null; then exec perl -e {shlex.quote(_PERL)} {arguments} </dev/null; fi
echo "nothing there can listen (no python3, no perl)"
"""

    def note(line: str) -> None:
        words = line.split(" ", 2)
        if words[0] == "bound":
            peer.bound.append(int(words[1]))
        elif words[0] == "unbound":
            peer.unbound[int(words[1])] = words[2] if len(words) > 2 else "?"
        elif words[0] == "pid":
            peer.pid = int(words[1])
        elif line.startswith("nothing there"):
            peer.error = line

    try:
        await peer.session.run(script, timeout=LISTEN_SECONDS + 10.0, on_output=note)
    except HostError as error:
        peer.error = peer.error or error.message


async def _until_ready(peer: _Peer, task: asyncio.Task[None]) -> None:
    try:
        async with asyncio.timeout(READY_SECONDS):
            while not peer.pid and not task.done():
                await asyncio.sleep(0.01)
    except TimeoutError:
        peer.error = f"its listener was not ready within {READY_SECONDS:.0f} s"


async def _end(peer: _Peer) -> None:
    if peer.pid:  # where that fails, it ends by itself
        await or_error(peer.session.run(f"kill {peer.pid} 2>/dev/null; true", timeout=15.0))


async def _connect(peer: _Peer, peers: Sequence[_Peer]) -> Result | HostError:
    others = [(index, other) for index, other in enumerate(peers) if other is not peer]
    targets = [f"{index} {shlex.quote(other.address)} {port}" for index, other in others for port in other.bound]
    lines = "\n".join(f"try {target} &" for target in targets)
    # Bash itself opens the connection; every host that runs Docker has it.
    script = f"""
command -v bash >/dev/null || {{ echo "no bash"; exit 0; }}
try() {{
  said=$(timeout -s KILL {CONNECT_SECONDS} bash -c 'exec 3<>"/dev/tcp/$1/$2"' bash "$2" "$3" 2>&1) && said=ok
  [ $? != 137 ] || said=silence
  echo "$1 $3 ${{said##*: }}"
}}
{lines}
wait
echo done
"""
    return await or_error(peer.session.run(script, timeout=CONNECT_SECONDS + 60.0))


def _cannot_listen(peer: _Peer) -> list[Finding]:
    if peer.error:
        return [_finding(peer, Level.WARN, f"not checked whether others reach its ports: {peer.error}")]
    wrong = [why for why in peer.unbound.values() if re.search(r"assign", why)]
    if wrong:
        message = f"{peer.address} is on none of its interfaces, so Ray cannot listen there"
        fix = f"Give {peer.name} its private_address in the inventory."
        return [_finding(peer, Level.FAIL, message, fix)]
    return []


def _judge(peer: _Peer, peers: Sequence[_Peer], result: Result | HostError) -> list[Finding]:
    if isinstance(result, HostError):
        return [_finding(peer, Level.FAIL, f"while it connected to the others: {result.message}", result.fix)]
    if "no bash" in result.stdout:
        return [_finding(peer, Level.WARN, "not checked whether it reaches the others: it has no bash")]
    failures: dict[int, dict[str, list[str]]] = {}
    tried = set()
    for line in result.stdout.splitlines():
        words = line.split(" ", 2)
        if len(words) == 3 and words[0].isdigit():
            tried.add(int(words[0]))
            if words[2] != "ok":
                failures.setdefault(int(words[0]), {}).setdefault(words[2], []).append(words[1])
    findings = [_unreached(peer, peers[index], why) for index, why in sorted(failures.items())]
    if tried and not findings:
        names = ", ".join(peers[index].name for index in sorted(tried))
        findings.append(_finding(peer, Level.OK, f"reaches {names} on Ray's ports"))
    return findings


def _unreached(peer: _Peer, other: _Peer, why: Mapping[str, Sequence[str]]) -> Finding:
    parts = [
        f"ports {', '.join(sorted(ports, key=int))}: {'no answer' if reason == 'silence' else reason}"
        for reason, ports in why.items()
    ]
    message = f"cannot reach {other.name} at {other.address} on {'; '.join(parts)}"
    if len(other.bound) == sum(map(len, why.values())):
        fix = (
            f"Is {other.address} the right address (private_address)? Else a firewall between them closes Ray's ports."
        )
    else:
        fix = f"Open these TCP ports from {peer.name} to {other.name} in the firewall or security group."
    return _finding(peer, Level.FAIL, message, fix)


def _finding(peer: _Peer, level: Level, message: str, fix: str = "") -> Finding:
    return Finding(peer.name, "reach", level, message, fix)
