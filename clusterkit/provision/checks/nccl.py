"""One all-reduce over all GPUs of the cluster, or its hosts where it has no GPUs, inside its running containers."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Mapping, Sequence

from clusterkit.common.finding import Finding, Level
from clusterkit.provision.facts.model import Facts
from clusterkit.provision.ray.model import running_containers
from clusterkit.ssh.api import HostError, Result, Session, or_error

PORT = 29461
SECONDS = 180
MEBIBYTES = 256

# Bus bandwidth as nccl-tests counts it: bytes / seconds * 2 (n - 1) / n.
_ALL_REDUCE = f"""
import datetime, os, time, torch, torch.distributed as dist
cuda = torch.cuda.is_available()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda: torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(seconds={SECONDS // 2}))
data = torch.ones({MEBIBYTES} * 1024**2 // 4, device=device)
def once():
    dist.all_reduce(data)
    if cuda: torch.cuda.synchronize()
data.fill_(1.0); once()
assert data[0].item() == world, "the sum of all ranks is wrong"
for _ in range(2): once()
dist.barrier(); began = time.perf_counter()
for _ in range(5): once()
seconds = (time.perf_counter() - began) / 5
if rank == 0: print("busbw", data.numel() * 4 / seconds * 2 * (world - 1) / world / 1e9, flush=True)
dist.destroy_process_group()
"""


async def all_reduce(
    sessions: Sequence[Session], facts: Mapping[str, Facts], cluster: str, head_address: str
) -> list[Finding]:
    """Sum 256 MiB over all GPUs with NCCL, or over the hosts of a cluster without GPUs with gloo.

    Args:
        head_address: where the ranks meet.

    Returns:
        The bus bandwidth, or why it could not be measured.
    """
    names = [session.host.name for session in sessions]
    containers = {name: next((c.name for c in running_containers(facts[name], cluster)), "") for name in names}
    ranks = {name: len(facts[name].gpus) for name in containers}
    kind = "GPU" if any(ranks.values()) else "host"
    if kind == "host":
        ranks = dict.fromkeys(ranks, 1)
    without = [name for name, container in containers.items() if not container]
    if sum(ranks.values()) < 2:
        return [Finding("", "nccl", Level.WARN, f"not run: one {kind} alone has nobody to talk to")]
    if without:
        message = f"not run: no runtime container of cluster {cluster} runs on {', '.join(without)}"
        return [Finding("", "nccl", Level.WARN, message, "`clusterkit setup` starts them; then check again.")]
    first, tasks = 0, []
    for session in sessions:
        name = session.host.name
        if ranks[name]:
            script = rank_script(first, ranks[name], sum(ranks.values()), head_address)
            command = shlex.join(["docker", "exec", containers[name], "bash", "-c", script])
            script = f"timeout -k 5 {SECONDS} {command} </dev/null"
            tasks.append((name, or_error(session.run(script, root=True, timeout=SECONDS + 30.0))))
        first += ranks[name]
    results = await asyncio.gather(*(task for _, task in tasks))
    return judge_all_reduce(
        {name: result for (name, _), result in zip(tasks, results, strict=True)}, sum(ranks.values()), kind
    )


def rank_script(first: int, count: int, world: int, address: str) -> str:
    """Return bash that runs `count` ranks from `first` on; it fails where one of them fails."""
    return f"""
export MASTER_ADDR={shlex.quote(address)} MASTER_PORT={PORT} WORLD_SIZE={world} NCCL_DEBUG=WARN
pids=
for local in {" ".join(map(str, range(count)))}; do
  RANK=$(({first} + local)) LOCAL_RANK=$local timeout -k 5 {SECONDS - 10} python3 -c {shlex.quote(_ALL_REDUCE)} &
  pids="$pids $!"
done
failed=0
for pid in $pids; do wait "$pid" || failed=1; done
exit $failed
"""


def judge_all_reduce(results: Mapping[str, Result | HostError], world: int, kind: str = "GPU") -> list[Finding]:
    """Return the findings on what the ranks printed."""
    findings = []
    for name, result in results.items():
        if isinstance(result, HostError):
            findings.append(Finding(name, "nccl", Level.FAIL, f"all-reduce: {result.message}", result.fix))
        elif not result.ok:
            lines = [line.strip() for line in (result.stdout + result.stderr).splitlines() if line.strip()]
            telling = [line for line in lines if "NCCL" in line or "Error" in line] or lines
            reason = telling[-1] if telling else f"exit code {result.exit_code}"
            fix = "Is NCCL on the right network interface (the inventory's `interface`), and is the firewall open?"
            findings.append(Finding(name, "nccl", Level.FAIL, f"all-reduce failed: {reason[:300]}", fix))
        elif found := re.search(r"^busbw ([\d.]+)", result.stdout, re.MULTILINE):
            message = f"all-reduce over {world} {kind}s: {float(found[1]):.1f} GB/s bus bandwidth"
            findings.append(Finding("", "nccl", Level.OK, message))
    return findings
