"""One all-reduce over all GPUs of the cluster, or its hosts where it has no GPUs, inside its running containers.

Where NCCL fails with what it chooses by itself, it is tried without the part that seems to be at fault. What worked is
kept for runs (`nccl_kept.py`).
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from clusterkit.common.finding import Finding, Level
from clusterkit.provision.checks import nccl_kept
from clusterkit.provision.facts.model import Facts
from clusterkit.provision.ray.model import running_containers
from clusterkit.ssh.api import HostError, Result, Session, or_error
from trainer.launch.nccl_settings import told

PORT = 29461
SECONDS = 180
MEBIBYTES = 256


@dataclass(frozen=True, slots=True)
class Remedy:
    """Settings that leave out a part of NCCL."""

    settings: Mapping[str, str]  # environment variables
    without: str  # the part, in words
    evidence: re.Pattern[str]  # what ranks print that have failed with it
    repair: str  # what to look at on the hosts


REMEDIES = (
    Remedy(
        {"NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0"},
        "NVLink multicast",
        re.compile(r"NCCL WARN .*(nvls|multicast|cuMem|'invalid argument')", re.IGNORECASE),
        "Is nvidia-fabricmanager of the driver's version active (clusterkit check says)?",
    ),
    Remedy(
        {"NCCL_IB_DISABLE": "1"},
        "RDMA",
        re.compile(r"NCCL INFO Using network IB|NCCL WARN .*(NET/IB|ibv_)"),
        "Are all ports up (ibstat), and for RoCE the right GID index and lossless switches set?",
    ),
    Remedy(
        {"NCCL_P2P_DISABLE": "1"},
        "direct access between GPUs",
        re.compile(r"NCCL INFO .* via P2P/"),
        "Are PCIe's access control services and the IOMMU off (nvidia-smi topo -p2p r)?",
    ),
)

_BUSY = re.compile(r"out of memory|address already in use|EADDRINUSE", re.IGNORECASE)

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
    sessions: Sequence[Session],
    facts: Mapping[str, Facts],
    cluster: str,
    head_address: str,
    *,
    root: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> list[Finding]:
    """Sum 256 MiB over all GPUs with NCCL, or over the hosts of a cluster without GPUs with gloo.

    Args:
        head_address: where the ranks meet.
        say: gets a line where it is tried again.

    Returns:
        The bus bandwidth and what runs get from now on, or why it could not be measured.
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

    async def run(settings: Mapping[str, str]) -> dict[str, Result | HostError]:
        first, tasks = 0, []
        for session in sessions:
            name = session.host.name
            if ranks[name]:
                script = rank_script(first, ranks[name], sum(ranks.values()), head_address, settings)
                command = shlex.join(["docker", "exec", containers[name], "bash", "-c", script])
                script = f"timeout -k 5 {SECONDS} {command} </dev/null"
                tasks.append((name, or_error(session.run(script, root=root, timeout=SECONDS + 30.0))))
            first += ranks[name]
        results = await asyncio.gather(*(task for _, task in tasks))
        return {name: result for (name, _), result in zip(tasks, results, strict=True)}

    results = await run({})
    findings = judge_all_reduce(results, sum(ranks.values()), kind)
    remedy: Remedy | None = None
    if kind == "GPU" and _failed(findings) and not _is_busy(results):
        remedy, results, findings = await _without_a_part(run, results, findings, sum(ranks.values()), say)
    if _failed(findings):
        # What was kept is not at fault where a connection of ours was lost, or GPUs or ports are another's.
        if all(isinstance(result, Result) for result in results.values()) and not _is_busy(results):
            await nccl_kept.forget(sessions, containers, root=root)
        return findings
    settings = {
        name: nccl_kept.settings_of(result.stdout, remedy.settings if remedy else {})
        for name, result in results.items()
        if isinstance(result, Result)
    }
    return findings + await nccl_kept.keep(sessions, containers, settings, root=root)


async def _without_a_part(
    run: Callable[[Mapping[str, str]], Awaitable[dict[str, Result | HostError]]],
    results: dict[str, Result | HostError],
    findings: list[Finding],
    world: int,
    say: Callable[[str], None],
) -> tuple[Remedy | None, dict[str, Result | HostError], list[Finding]]:
    """Try again without the parts that may be at fault, until one try goes through.

    Args:
        results: of the try with what NCCL chooses by itself.

    Returns:
        What was left out, the results and the findings on them; None with what was given where all tries fail, and with
        those of another try where nothing has to be left out.
    """
    printed = "".join(result.stdout + result.stderr for result in results.values() if isinstance(result, Result))
    for remedy in REMEDIES:
        if not remedy.evidence.search(printed):
            continue
        say(f"the all-reduce failed: once more without {remedy.without}")
        again = await run(remedy.settings)
        judged = judge_all_reduce(again, world)
        if _failed(judged):
            continue
        by_itself = await run({})  # what failed the first time may have passed by now
        if not _failed(found := judge_all_reduce(by_itself, world)):
            return None, by_itself, found
        settings = told(remedy.settings)
        reason = next(finding.message for finding in findings if finding.level is Level.FAIL)
        judged = [
            replace(
                finding,
                level=Level.WARN,
                message=f"{finding.message} without {remedy.without} ({settings}); with it the {reason}",
                fix=f"{remedy.repair} Until the next check --nccl, runs do without it.",
            )
            for finding in judged
        ]
        return remedy, again, judged
    return None, results, findings


def _is_busy(results: Mapping[str, Result | HostError]) -> bool:
    """Whether GPUs or ports of a host are in use, by a run say."""
    return any(
        isinstance(one, Result) and not one.ok and _BUSY.search(one.stdout + one.stderr) for one in results.values()
    )


def _failed(findings: Sequence[Finding]) -> bool:
    return any(finding.level is Level.FAIL for finding in findings)


def rank_script(first: int, count: int, world: int, address: str, settings: Mapping[str, str] | None = None) -> str:
    """Return bash that runs `count` ranks from `first` on; it fails where one of them fails.

    Args:
        world: ranks of all hosts.
        address: where they meet.
        settings: more environment variables.
    """
    more = "".join(f" {name}={shlex.quote(value)}" for name, value in (settings or {}).items())
    # Its first rank says what NCCL has chosen on this host.
    return f"""
export MASTER_ADDR={shlex.quote(address)} MASTER_PORT={PORT} WORLD_SIZE={world} NCCL_DEBUG=INFO{more}
export NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,NET,P2P
pids=
for local in {" ".join(map(str, range(count)))}; do
  RANK=$(({first} + local)) LOCAL_RANK=$local timeout -k 5 {SECONDS - 10} python3 -c {shlex.quote(_ALL_REDUCE)} &
  pids="$pids $!"
  export NCCL_DEBUG=WARN
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
            lines = [line for line in lines if "NCCL INFO" not in line]
            telling = [line for line in lines if "NCCL" in line or "Error" in line] or lines
            reason = telling[-1] if telling else f"exit code {result.exit_code}"
            fix = "Is NCCL on the right network interface (the inventory's `interface`), and is the firewall open?"
            findings.append(Finding(name, "nccl", Level.FAIL, f"all-reduce failed: {reason[:300]}", fix))
        elif found := re.search(r"^busbw ([\d.]+)", result.stdout, re.MULTILINE):
            message = f"all-reduce over {world} {kind}s: {float(found[1]):.1f} GB/s bus bandwidth"
            findings.append(Finding("", "nccl", Level.OK, message))
    return findings
