"""Print one JSON object inside the runtime container (`docker exec -i … python3 - MODE`, standard library only).

MODE is `node` for the versions and GPUs that this container sees, or `head PORT` for what Ray's API says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from importlib import metadata
from pathlib import Path
from typing import Any

HTTP_SECONDS = 15
COMMAND_SECONDS = 30
MANY = 10_000


def node() -> dict[str, Any]:
    """Return versions of Ray and Python, the IDs of Ray's node here, and how many GPUs nvidia-smi lists (None: failed).

    There is no ID before Ray's node process runs, and an empty one where its command line has none.
    """
    try:
        ray = metadata.version("ray")
    except metadata.PackageNotFoundError:
        ray = ""
    return {"ray": ray, "python": sys.version.split()[0], "node_ids": _node_ids(), "gpus": _gpus()}


def head(port: int) -> dict[str, Any]:
    """Return what the API says; `error` and the text of `ray status` where it does not answer."""
    try:
        nodes = _get(port, f"/api/v0/nodes?limit={MANY}")["data"]["result"]["result"]
        jobs = _get(port, "/api/jobs/")
        return {"ray": _get(port, "/api/version")["ray_version"], "nodes": nodes, "jobs": jobs}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {"error": f"{type(error).__name__}: {error}", "status": _run(["ray", "status"])[1]}


def _get(port: int, path: str) -> Any:
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text(encoding="utf-8").strip()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {token}"})
    # Not through a proxy that the container's environment may name.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=HTTP_SECONDS) as response:
        return json.load(response)


def _node_ids() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it ended meanwhile
            continue
        if words[0].rpartition("/")[2] == "raylet":
            found.append(next((w.partition("=")[2] for w in words if w.startswith("--node_id=")), ""))
    return found


def _gpus() -> int | None:
    code, text = _run(["nvidia-smi", "-L"])
    return sum(line.startswith("GPU ") for line in text.splitlines()) if code == 0 else None


def _run(command: list[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout


if __name__ == "__main__":
    print(json.dumps(node() if sys.argv[1] == "node" else head(int(sys.argv[2]))))
