"""SECURITY.md names every port that the code pins."""

from __future__ import annotations

import re
from pathlib import Path

from clusterkit.cli.dashboard import DEFAULT_PORT
from clusterkit.provision.checks import nccl
from clusterkit.provision.ray.ports import Ports
from trainer.launch.slurm import FIRST_PORT, PORTS, SLOTS

TEXT = (Path(__file__).parents[2] / "SECURITY.md").read_text(encoding="utf-8")
NUMBERS = set(map(int, re.findall(r"\d+", TEXT)))


def test_ports_of_ray() -> None:
    ports = Ports()
    pinned = {*ports.listening(head=True).values(), ports.first_worker, ports.last_worker}
    (alone,) = (line for line in TEXT.splitlines() if "127.0.0.1:8265" in line)

    assert pinned <= NUMBERS
    assert alone.startswith("| Ray's dashboard")
    assert f"{FIRST_PORT} + {PORTS} " in TEXT
    assert f"(job number mod {SLOTS})" in TEXT


def test_ports_of_commands() -> None:
    assert f"127.0.0.1:{DEFAULT_PORT}" in TEXT
    assert nccl.PORT in NUMBERS
