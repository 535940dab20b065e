"""Four idempotent steps on real SSH hosts: clusterkit against pyinfra and ansible-core, in one run.

    .venv/bin/python benchmarks/provision.py [--hosts 5 50] [--repeat 3] [--memory-hosts 100] [--json]
        [--tools clusterkit pyinfra ansible-core] [--tools-venv FOLDER] [--calm-wait 60]

Every host is an sshd of its own on a port of 127.0.0.1. The steps: two packages are installed (they are, on this
machine), a folder with a mode, a configuration file with content and mode, a JSON file from a template with mode. Cold:
none of the files is there; warm: all are. Every time is that of a whole process, interpreter start-up included; the
tools take turns, and every run is followed by a look at the files: a cold run has to have made all of them, a warm run
must not have touched any. Before anything is timed each tool has to repair a wrong mode and wrong content, so that all
do the same work. CPU seconds are those of the tool and of all that it starts on the hosts: here both share the same
processors, and unlike the time on the clock they depend little on what else this machine is doing.

Needs root, Debian or Ubuntu with python3-apt (which Ansible's apt module wants), git and curl. pyinfra and ansible-core
are installed into an environment of their own, which is kept for the next time; everything else is removed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provision_hosts import Hosts
from provision_tools import Ansible, Clusterkit, Pyinfra, Tool, clean_environment, install_tools, versions

CACHE = Path("~/.cache/clusterkit-bench/venv").expanduser()
STATES = ("cold", "warm")
TARGETS = {"pyinfra": 0.5, "ansible-core": 0.1}
"""Most that clusterkit's warm time may be of the other tool's."""
MOST_MEMORY = 150e6
MOST_OVERHEAD = 1.15


def cpu_idle(seconds: float = 0.5) -> float:
    """Share of this machine's processors that nobody uses."""

    def read() -> tuple[int, int]:
        values = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return values[3] + values[4], sum(values)

    idle, total = read()
    time.sleep(seconds)
    later_idle, later_total = read()
    return (later_idle - idle) / max(later_total - total, 1)


def wait_until_calm(seconds: float) -> bool:
    """Wait until hardly anything else runs on this machine; False where that does not come about."""
    give_up = time.monotonic() + seconds
    while (idle := cpu_idle()) < 0.9 and time.monotonic() < give_up:
        pass
    return idle >= 0.9


@dataclass(frozen=True)
class Run:
    """One process: wall seconds, CPU seconds of the tool and of the hosts, and the JSON object that it printed."""

    seconds: float
    cpu: dict[str, float]
    said: dict[str, Any]


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Bench:
    """Runs of all tools on one set of hosts."""

    def __init__(self, hosts: Hosts, tools: list[Tool], calm_wait: float) -> None:
        self.hosts, self.tools, self.calm_wait = hosts, tools, calm_wait
        self.runs: dict[tuple[str, str], list[Run]] = defaultdict(list)
        """By tool and state."""
        self.disturbed = 0

    def run(self, tool: Tool) -> Run:
        """One process from start to end."""
        command = tool.command(self.hosts)
        environment = clean_environment() | tool.environment(self.hosts)
        if not wait_until_calm(self.calm_wait):
            self.disturbed += 1
        own, servers, began = cpu_of_children(), self.hosts.cpu_seconds(), time.perf_counter()
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1800, env=environment)
        seconds, own = time.perf_counter() - began, cpu_of_children() - own
        tool.close(self.hosts)
        self.hosts.wait_until_left()
        if ended.returncode:
            tail = "\n".join((ended.stdout + ended.stderr).splitlines()[-30:])
            raise SystemExit(f"{tool.name} failed with exit code {ended.returncode}:\n{tail}")
        last = ended.stdout.strip().rpartition("\n")[2]
        cpu = {"tool": own, "hosts": self.hosts.cpu_seconds() - servers}
        return Run(seconds, cpu, json.loads(last) if last.startswith("{") else {})

    def same_work(self, tool: Tool) -> None:
        """Let a tool make everything, then repair it."""
        for spoil in (self.hosts.wipe, self.hosts.spoil):
            spoil()
            self.run(tool)
            if wrong := self.hosts.wrong():
                raise SystemExit(f"{tool.name} did not do the work: {wrong[:3]}")

    def measure(self, tool: Tool) -> None:
        """One cold and one warm run."""
        self.hosts.wipe()
        self._timed(tool, "cold")
        if wrong := self.hosts.wrong():
            raise SystemExit(f"{tool.name} did not do the work: {wrong[:3]}")
        before = [place.state() for place in self.hosts.places]
        self._timed(tool, "warm")
        if before != [place.state() for place in self.hosts.places]:
            raise SystemExit(f"{tool.name} changed something although nothing was to be done")

    def _timed(self, tool: Tool, state: str) -> None:
        run = self.run(tool)
        self.runs[tool.name, state].append(run)
        cpu = " + ".join(f"{seconds:.1f} s ({where})" for where, seconds in run.cpu.items())
        count = len(self.hosts.places)
        print(f"  {count} hosts, {tool.name}, {state}: {run.seconds:.2f} s, CPU {cpu}", file=sys.stderr)

    def result(self) -> dict[str, Any]:
        """Medians, ratios, and what clusterkit says about itself."""
        return {
            "hosts": len(self.hosts.places),
            "seconds": (seconds := self._medians(lambda run: run.seconds)),
            "ratios": ratios_of(seconds),
            "cpu_seconds": (cpu := self._medians(lambda run: sum(run.cpu.values()))),
            "cpu_ratios": ratios_of(cpu),
            "clusterkit": {state: self._own(state) for state in STATES if ("clusterkit", state) in self.runs},
            "every": {
                f"{name} {state}": [{"seconds": round(run.seconds, 3), "cpu": run.cpu} for run in runs]
                for (name, state), runs in self.runs.items()
            },
            "disturbed": self.disturbed,
        }

    def _medians(self, of: Callable[[Run], float]) -> dict[str, dict[str, float]]:
        return {
            state: {tool.name: statistics.median(map(of, self.runs[tool.name, state])) for tool in self.tools}
            for state in STATES
        }

    def _own(self, state: str) -> dict[str, Any]:
        said = [run.said for run in self.runs["clusterkit", state]]
        return {
            "wall_seconds": statistics.median(s["wall_seconds"] for s in said),
            # A host's own sum ends with its last step; the whole run must not be much longer than the longest.
            "overhead": max(s["wall_seconds"] / s["slowest_host_seconds"] for s in said),
            "peak_memory": max(s["peak_memory"] for s in said),
            "seconds": said[-1]["seconds"],
        }


def ratios_of(medians: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """clusterkit's value over each other tool's, by state."""
    return {
        state: {name: values["clusterkit"] / values[name] for name in values if name != "clusterkit"}
        for state, values in medians.items()
        if "clusterkit" in values
    }


def bench(count: int, tools: list[Tool], repeat: int, calm_wait: float, *, prove: bool = False) -> dict[str, Any]:
    with scratch() as folder, Hosts(folder, count) as hosts:
        it = Bench(hosts, tools, calm_wait)
        if prove:
            for tool in tools:
                it.same_work(tool)
            it.disturbed = 0
        for _ in range(repeat):
            for tool in tools:
                it.measure(tool)
        return it.result()


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder with a short name, for sockets have short paths; removed in the end."""
    with tempfile.TemporaryDirectory(prefix="ckb-", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield Path(name) / "b"


def verdict(value: float, most: float) -> str:
    return "met" if value <= most else "MISSED"


def lines_of(results: list[dict[str, Any]], memory: dict[str, Any] | None) -> list[str]:
    """The tables as people read them."""
    lines = []
    for result in results:
        lines += ["", f"{result['hosts']} hosts         cold      warm    CPU: cold      warm"]
        for name in result["seconds"]["warm"]:
            times = [result[kind][state][name] for kind in ("seconds", "cpu_seconds") for state in STATES]
            lines.append(f"{name:<12}" + "".join(f"{seconds:8.2f} s" for seconds in times))
        for name, ratio in result["ratios"].get("warm", {}).items():
            cold, target = result["ratios"]["cold"][name], TARGETS[name]
            cpu = result["cpu_ratios"]["warm"][name]
            lines.append(
                f"clusterkit / {name}: cold {cold:.2f}, warm {ratio:.3f} (CPU {cpu:.3f}); target warm {target:g}: "
                f"{verdict(ratio, target)}"
            )
        for state, own in result["clusterkit"].items():
            lines.append(
                f"clusterkit {state}: run {own['wall_seconds']:.2f} s of the process, "
                f"{own['overhead']:.3f} x the slowest host's own sum (target {MOST_OVERHEAD}: "
                f"{verdict(own['overhead'], MOST_OVERHEAD)}), peak memory {own['peak_memory'] / 1e6:.0f} MB"
            )
        if result["disturbed"]:
            lines.append(f"{result['disturbed']} runs began while something else was using the processors")
    if memory is not None:
        peak = max(own["peak_memory"] for own in memory["clusterkit"].values())
        lines += [
            "",
            f"clusterkit at {memory['hosts']} hosts: peak memory {peak / 1e6:.0f} MB "
            f"(target {MOST_MEMORY / 1e6:.0f} MB: {verdict(peak, MOST_MEMORY)})",
        ]
    return lines


def machine() -> str:
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return f"{os.cpu_count()} cores {model.partition(':')[2].strip()}, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[5, 50], help="numbers of hosts to measure with")
    parser.add_argument("--repeat", type=int, default=3, help="cold and warm runs of every tool; medians count")
    parser.add_argument("--memory-hosts", type=int, default=100, help="hosts for clusterkit's peak memory; 0: skip")
    parser.add_argument("--tools", nargs="+", default=["clusterkit", *TARGETS], choices=["clusterkit", *TARGETS])
    parser.add_argument("--tools-venv", type=Path, default=CACHE, help="environment of pyinfra and ansible-core")
    parser.add_argument("--calm-wait", type=float, default=60.0, help="seconds to wait for idle processors, each run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("dpkg-query") is None:
        parser.error("root on Debian or Ubuntu is needed")
    others = [name for name in options.tools if name != "clusterkit"]
    if others:
        install_tools(options.tools_venv)
    every: dict[str, Tool] = {
        tool.name: tool for tool in (Clusterkit(), Pyinfra(options.tools_venv), Ansible(options.tools_venv))
    }
    tools = [every[name] for name in dict.fromkeys(options.tools)]
    wait = options.calm_wait
    results = [bench(count, tools, options.repeat, wait, prove=not at) for at, count in enumerate(options.hosts)]
    memory = bench(options.memory_hosts, [every["clusterkit"]], 1, wait) if options.memory_hosts else None
    about = {"machine": machine(), "versions": versions(options.tools_venv) if others else {}}
    if options.json:
        print(json.dumps({**about, "results": results, "memory": memory}, indent=2))
        return
    named = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    print("\n".join([f"{about['machine']}; {named}".rstrip("; "), *lines_of(results, memory)]))


if __name__ == "__main__":
    main()
