"""Whether a runtime image has what a preset's trainer and engine import: looked at before Ray starts, in the image."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

from clusterkit.provision.images.errors import ImageError
from clusterkit.provision.images.versions import versions
from clusterkit.ssh.api import Session
from trainer.config import RunConfig

PYTHON = (3, 11)
LOOK_SECONDS = 180.0
"""The first start of a container from a large image reads a lot."""
_NODE = {"ray": "2.60", "pydantic": "2", "pyyaml": "6", "httpx": "0"}
_TRAINER = {"torch": "2.6", "transformers": "5.6", "tokenizers": "0", "safetensors": "0", "numpy": "0"}
# Run in the image by its own Python, whatever that is: plain enough for an old one.
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
    """Packages that an image must have, the least version of each ("0": any). who: the preset that wants them."""

    who: str
    packages: dict[str, str]


def needs_of_image(config: RunConfig) -> ImageNeeds:
    """What the nodes import for a run."""
    packages = _NODE | _TRAINER
    if config.engine != "embedded":
        packages = packages | {config.engine: "0", "aiohttp": "0"}
    return ImageNeeds(config.experiment_name, packages)


async def check_image(session: Session, reference: str, needs: ImageNeeds) -> None:
    """Look into the image, on a host that has it, with one `docker run` that prints versions.

    Raises:
        ImageError: it lacks something, or cannot be run.
        HostError: as `Session.run`.

    """
    command = ["docker", "run", "--rm", "--pull", "never", "--network", "none", "--entrypoint", "python3", reference]
    result = await session.run(shlex.join([*command, "-c", _PROBE, *needs.packages]), root=True, timeout=LOOK_SECONDS)
    found = _last_object(result.stdout)
    if not result.ok or found is None:
        said = (result.stderr.strip() or f"exit code {result.exit_code}").splitlines()[-1][-300:]
        problems = [f"its python3 cannot be run: {said}"]
    else:
        problems = problems_of(found, needs)
    if problems:
        raise ImageError(
            session.host.name,
            f"the image {reference} cannot run {needs.who}: {'; '.join(problems)}",
            "give an image that has them (--image REF), or let the head build ours (--image none; its Dockerfiles and "
            f"versions are in images/: torch {versions()['TORCH_VERSION']}, transformers "
            f"{versions()['TRANSFORMERS_VERSION']} on GPUs). To set up hosts and Ray alone: without --preset, or "
            "--no-train",
        )


def problems_of(found: dict[str, Any], needs: ImageNeeds) -> list[str]:
    """What is missing or too old, one phrase each. found: "python" and "packages", as the probe prints them."""
    problems = []
    python = found.get("python") or [0]
    if tuple(python[:2]) < PYTHON:
        problems.append(f"Python is {'.'.join(map(str, python))}, and {'.'.join(map(str, PYTHON))} is the oldest")
    there = found.get("packages") or {}
    if missing := [name for name in needs.packages if not there.get(name)]:
        problems.append(f"it has no {', '.join(missing)}")
    problems += [
        f"{name} is {there[name]}, and {least} is the oldest"
        for name, least in needs.packages.items()
        if there.get(name) and _numbers(there[name]) < _numbers(least)
    ]
    return problems


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu: (2, 13, 0)."""
    numbers = []
    for part in version.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _last_object(text: str) -> dict[str, Any] | None:
    for line in reversed(text.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        return found if isinstance(found, dict) else None
    return None
