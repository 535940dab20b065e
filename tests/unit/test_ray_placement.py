"""Which nodes, in which order, the ranks of a run get."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.realparts import require
from trainer.config import RunConfig
from trainer.errors import UserError

require(importlib.util.find_spec("ray") is not None, "needs Ray: pip install ray")

from trainer.launch.rank_host import RankHost  # noqa: E402 (needs Ray)
from trainer.launch.ray_placement import (  # noqa: E402 (needs Ray)
    FreeNode,
    await_nodes,
    bundle_size,
    choose_nodes,
    over_network,
    rank_order,
)
from trainer.launch.ray_servers import GpusOfNode, add  # noqa: E402 (needs Ray)


def test_full_hosts_come_first_and_the_head_only_where_it_is_needed() -> None:
    nodes = [FreeNode("head", 8, 64, spared=True), FreeNode("b", 8, 64), FreeNode("a", 4, 64), FreeNode("c", 8, 64)]

    assert choose_nodes(nodes, 16, 1) == ["b"] * 8 + ["c"] * 8
    assert choose_nodes(nodes, 20, 1) == ["b"] * 8 + ["c"] * 8 + ["a"] * 4
    assert choose_nodes(nodes, 24, 1) == ["b"] * 8 + ["c"] * 8 + ["a"] * 4 + ["head"] * 4
    assert choose_nodes(nodes, 29, 1) == []  # Ray waits for what comes back


def test_places_that_are_being_freed_are_waited_for() -> None:
    """What has just ended, such as a supervised start on the same GPUs, holds them a moment longer."""
    busy = [FreeNode("a", 0, 64), FreeNode("head", 8, 64, spared=True)]
    looks = iter([busy, busy, [FreeNode("a", 8, 64), FreeNode("head", 8, 64, spared=True)]])

    assert await_nodes(lambda: next(looks), 10, 1, lambda: False) == ["a"] * 8 + ["head"] * 2
    assert await_nodes(lambda: busy, 10, 1, lambda: False, seconds=0.0) == []
    assert await_nodes(lambda: busy, 10, 1, lambda: True) == []


def test_a_bundle_is_on_one_host_and_wants_its_cpus_there() -> None:
    nodes = [FreeNode("a", 3, 64), FreeNode("b", 8, 5), FreeNode("c", 2, 64)]

    assert choose_nodes(nodes, 4, 2) == ["b", "b", "a", "c"]
    assert choose_nodes(nodes, 5, 2) == []


def test_ranks_are_ordered_by_host_and_gpu() -> None:
    places = [
        GpusOfNode("x", ("10",)), GpusOfNode("y", ("1",)), GpusOfNode("x", ("9",)), GpusOfNode("y", ("0",)),
    ]  # fmt: skip

    assert rank_order(places) == [2, 0, 3, 1]
    assert rank_order(places, first_node="y") == [3, 1, 2, 0]


def test_ranks_without_gpus_keep_their_order_within_a_host() -> None:
    places = [GpusOfNode(node, ()) for node in ("a", "b", "a", "b")]

    assert rank_order(places, first_node="a") == [0, 2, 1, 3]


@pytest.mark.parametrize(
    ("allocation", "size"),
    [
        ("sglang:d16|fsdp:d16", 1), ("sglang:d8t2|fsdp:d16", 2), ("sglang:d2t4+fsdp:d4t2", 2), ("sglang:d8+fsdp:d8", 1),
        ("sglang:d8+fsdp:d8s4", 4), ("sglang:d8+fsdp:d4s2t2", 4), ("sglang:d4t4|fsdp:d16s2", 4),
        ("sglang:d4+fsdp:d12s6", 1),  # no host has a whole number of them
    ],
)  # fmt: skip
def test_what_shares_a_layer_a_replica_or_a_server_shares_a_host(allocation: str, size: int) -> None:
    config = RunConfig(allocation_mode=allocation, n_nodes=2, n_gpus_per_node=8)

    assert bundle_size(config) == size


def test_a_folder_on_the_network_is_known_by_the_longest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "overlay / overlay rw 0 0\n"
        "disk:/export /storage nfs4 rw 0 0\n"
        "/dev/sda1 /storage/local ext4 rw 0 0\n"
        "/dev/sdb1 /with\\040space ext4 rw 0 0\n"
    )

    assert over_network("/storage/ray/experiments", mounts)
    assert not over_network("/storage/local/runs", mounts)
    assert not over_network("/storage2", mounts)


def test_no_server_is_added_beside_those_that_share_the_ranks_gpus(tmp_path: Path) -> None:
    config = RunConfig(
        allocation_mode="sglang:d2|fsdp:d2", n_nodes=1, n_gpus_per_node=2, servers={"engine": "sglang"},
        train={"ranks": 2},
    )  # fmt: skip

    with pytest.raises(UserError, match=r"one on other GPUs cannot; give servers GPUs of their own"):
        add(config, tmp_path / "config.yaml", tmp_path)


def test_what_a_rank_has_left_goes_with_its_folder() -> None:
    host = RankHost()
    folder = host._meeting
    (folder / "outcome").write_text("{}")

    assert host.left() == {"outcome": "{}"}
    assert not folder.exists()


def test_actors_are_started_without_pytorch() -> None:
    """Each is a process beside a rank's or a server's own, and waits."""
    modules = sorted({RankHost.__module__, add.__module__})
    program = f"import sys, {', '.join(modules)}; print(*{{'torch', 'transformers', 'numpy'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
