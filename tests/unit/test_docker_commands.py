"""Docker's command lines: words stay words, and an answer is read or told."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

import pytest
from localsession import LocalSession

from clusterkit.provision import docker


def test_filters_and_names_are_quoted_as_one_word_each() -> None:
    line = docker.ps("name=^a b$", "label=x=$(id)", stopped=True, whole_ids=True)

    assert shlex.split(line) == [
        *("docker", "ps", "--all", "--quiet", "--no-trunc"),
        *("--filter", "name=^a b$", "--filter", "label=x=$(id)"),
    ]
    assert docker.ps() == "docker ps --quiet"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("""echo '{"Id": "sha256:1"}'""", {"Id": "sha256:1"}),
        ("echo 'Error: No such image: x' >&2; exit 1", docker.NotFoundError),
        (
            "echo 'Cannot connect to the Docker daemon' >&2; exit 1",
            "Docker does not answer: Cannot connect",
        ),
        (
            # What a client of today says of an engine that does not run.
            "echo 'failed to connect to the docker API at unix:///var/run/docker.sock; check if the "
            "daemon is running: dial unix /var/run/docker.sock: connect: no such file or directory' >&2; exit 1",
            "Docker does not answer: failed to connect",
        ),
        ("exit 125", "Docker does not answer: exit code 125"),
    ],
)
def test_an_answer_is_read_or_told(tmp_path: Path, script: str, expected: object) -> None:
    # A stand-in: the real one cannot be made to answer all of this.
    command = tmp_path / "docker"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    session = LocalSession(environment={"PATH": f"{tmp_path}:/usr/bin:/bin"})

    def ask() -> object:
        return asyncio.run(docker.ask(session, "image", "inspect", "x", timeout=30))

    if isinstance(expected, str):
        with pytest.raises(docker.NoAnswerError, match=expected):
            ask()
    elif isinstance(expected, type):
        with pytest.raises(docker.NotFoundError):
            ask()
    else:
        assert ask() == expected
