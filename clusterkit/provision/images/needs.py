"""Check, before Ray starts, that a runtime image has the packages that a preset's trainer and engine import."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from clusterkit.common.records import json_object
from clusterkit.provision.facts.model import version_numbers
from clusterkit.provision.images.identity import ImageError
from clusterkit.provision.images.versions import versions
from clusterkit.ssh.api import Session
from trainer.config import RunConfig

PYTHON = (3, 11)
LOOK_SECONDS = 180.0
"""Long, since the first start of a container reads much of a large image."""
_NODE = {"ray": "2.60", "pydantic": "2", "pyyaml": "6", "httpx": "0"}
_TRAINER = {"torch": "2.6", "transformers": "5.6", "tokenizers": "0", "safetensors": "0", "numpy": "0"}
# Runs in the image's own Python, which may be an old one.
_PROBE = """
import json, sys
found = {"python": list(sys.version_info[:3]), "packages": {}}
try:
    from importlib.metadata import version
except ImportError:
    version = None
for name in sys.argv[1:]:
    try:
        found["packages"][name] = version(name)
    except Exception:
        found["packages"][name] = None
print(json.dumps(found))
"""


@dataclass(frozen=True)
class ImageNeeds:
    """Packages that an image must have."""

    preset: str
    packages: dict[str, str]  # least version by name; "0": any version


def needs_of_image(config: RunConfig) -> ImageNeeds:
    """Return the packages that the nodes import for a run."""
    packages = _NODE | _TRAINER
    if config.engine != "embedded":
        packages = packages | {config.engine: "0", "aiohttp": "0"}
    return ImageNeeds(config.experiment_name, packages)


async def check_image(session: Session, reference: str, needs: ImageNeeds) -> None:
    """Check an image on a host that has it, with one `docker run` that prints versions.

    Raises:
        ImageError: the image lacks a package, or cannot be run.
    """
    command = ["docker", "run", "--rm", "--pull", "never", "--network", "none", "--entrypoint", "python3", reference]
    result = await session.run(shlex.join([*command, "-c", _PROBE, *needs.packages]), root=True, timeout=LOOK_SECONDS)
    found = next(filter(None, map(json_object, reversed(result.stdout.splitlines()))), None)
    if not result.ok or found is None:
        problems = [f"its python3 cannot be run: {result.reason}"]
    else:
        problems = problems_of(found, needs)
    if problems:
        raise ImageError(
            session.host.name,
            f"the image {reference} cannot run {needs.preset}: {'; '.join(problems)}",
            "give an image that has them (--image REF), or let the head build ours (--image none; its Dockerfiles and "
            f"versions are in images/: torch {versions()['TORCH_VERSION']}, transformers "
            f"{versions()['TRANSFORMERS_VERSION']} on GPUs). To set up hosts and Ray alone: without --preset, or "
            "--no-train",
        )


def problems_of(found: dict[str, Any], needs: ImageNeeds) -> list[str]:
    """Return what is missing or too old, one phrase each. found: "python" and "packages" as the probe prints them."""
    problems = []
    python = found.get("python") or [0]
    if tuple(python[:2]) < PYTHON:
        problems.append(f"Python is {'.'.join(map(str, python))}, and {'.'.join(map(str, PYTHON))} is the oldest")
    installed = found.get("packages") or {}
    if missing := [name for name in needs.packages if not installed.get(name)]:
        problems.append(f"it has no {', '.join(missing)}")
    problems += [
        f"{name} is {installed[name]}, and {least} is the oldest"
        for name, least in needs.packages.items()
        if installed.get(name) and version_numbers(installed[name], 3) < version_numbers(least, 3)
    ]
    return problems
