"""Ranks that wait for others say who did not come; real stores, and a thread for every rank that is there."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from trainer.engines.process import free_port
from trainer.errors import RunError
from trainer.train.rendezvous import meet

HERE = os.uname().nodename


def said(ranks: list[int], size: int, rendezvous: str, seconds: float = 2.0) -> list[str]:
    """What each of these ranks ends with; empty where it has met all."""
    stores = []  # as in a run, where rank 0's serves the others longer than it waits itself

    def one(rank: int) -> str:
        try:
            stores.append(meet(rank, size, rendezvous, timedelta(seconds=seconds)))
        except RunError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_who_is_missing_is_named(scheme: str, tmp_path: Path) -> None:
    rendezvous = f"file://{tmp_path}/rendezvous" if scheme == "file" else f"tcp://127.0.0.1:{free_port()}"
    first, *others = said([0, 2], 4, rendezvous)
    assert (
        f"of 4 ranks these did not come within 2 s: 1, 3 (there are 0 on {HERE}, 2 on {HERE}). They hang or have ended"
    ) in first
    # Rank 0 keeps the store: where it leaves first, the others know no more than that.
    assert others == [first] or "rank 0 of 4 has ended while the others waited" in others[0]


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_all_who_come_in_time_go_on(scheme: str, tmp_path: Path) -> None:
    rendezvous = f"file://{tmp_path}/rendezvous" if scheme == "file" else f"tcp://127.0.0.1:{free_port()}"
    assert said([0, 1, 2], 3, rendezvous, 60.0) == ["", "", ""]


def test_a_rank_0_that_cannot_be_reached() -> None:
    port = free_port()
    (message,) = said([1], 2, f"tcp://127.0.0.1:{port}", 1.0)
    assert f"rank 1 of 2 on {HERE} could not reach rank 0 at 127.0.0.1:{port} within 1 s" in message


def test_the_store_listens_on_its_own_address_alone() -> None:
    port = free_port()
    store = meet(0, 1, f"tcp://127.0.0.1:{port}", timedelta(seconds=5))
    store.set("key", "value")

    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
