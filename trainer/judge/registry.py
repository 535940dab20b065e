"""Where the servers that answer and judge for a run are registered: experiment and trial are all to agree on.

    FILEROOT/judges/USER/EXPERIMENT/TRIAL/judge-0.json        as trainer.serving.registry, one file a server
    FILEROOT/judges/USER/EXPERIMENT/TRIAL/judge-0.log

They may be started before there is a run, so they have a folder of their own. Each server's host writes its file; a run
looks at its start, and again while it waits for servers that are gone, so that new ones at other addresses are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.serving import registry
from trainer.serving.registry import Registration

HOST_MODULE = "trainer.judge.serve"
"""What `python -m` runs as the host of judge servers."""


def judges_folder(fileroot: str | Path, user: str, experiment: str, trial: str) -> Path:
    """Where the servers of a trial are registered."""
    return Path(fileroot).expanduser().absolute() / "judges" / user / experiment / trial


def judge_urls(folder: Path) -> list[str]:
    """Addresses of those in a folder that answer."""
    return urls_of(registry.read(folder))


def urls_of(servers: Sequence[Registration]) -> list[str]:
    """Addresses of those that answer."""
    return [one.url for one in servers if one.state == "ready" and one.url]
