"""`clusterkit serve judge`: what is refused before anything is started. Real servers: tests/integration."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from clusterkit.cli.serve import app
from trainer.errors import UserError
from trainer.judge.serve import gpu_groups


@pytest.mark.parametrize(
    ("wanted", "per_server", "groups"),
    [
        ("", 1, [()]),
        ("3", 1, [(0,), (1,), (2,)]),
        ("2,3,4", 1, [(2,), (3,), (4,)]),
        ("4", 2, [(0, 1), (2, 3)]),
        ("5,", 1, [(5,)]),
    ],
)
def test_gpus_are_counted_or_named(wanted: str, per_server: int, groups: list[tuple[int, ...]]) -> None:
    assert gpu_groups(wanted, per_server) == groups


@pytest.mark.parametrize(("wanted", "per_server"), [("three", 1), ("3", 2), ("1,2,3", 2)])
def test_gpus_that_make_no_servers_are_refused(wanted: str, per_server: int) -> None:
    with pytest.raises(UserError, match="--gpus"):
        gpu_groups(wanted, per_server)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--address", "0.0.0.0"), "private address only"),
        (("--address", "8.8.8.8"), "private address only"),
        (("--address", "gpu03"), "is no address"),
        (("--engine", "ollama"), "choose sglang or vllm"),
        (("--preset", "memalpha-9B"), "unknown preset"),
        ((), r"--model .*is neither a folder nor the name of an asset"),
    ],
)
def test_what_cannot_serve_is_refused(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    arguments = ["judge", "--model", str(tmp_path / "none"), "--fileroot", str(tmp_path), *options]
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert list(tmp_path.iterdir()) == []
