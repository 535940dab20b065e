"""Pull images from a registry: one digest for all hosts, with progress in bytes, and again after a failure."""

from __future__ import annotations

import asyncio
import json
import re
import shlex

from clusterkit.provision import docker
from clusterkit.provision.images.identity import Image, ImageError, inspect, is_id, is_tag, repository
from clusterkit.provision.images.meter import Progress
from clusterkit.ssh.api import ErrorKind, HostError, Session
from clusterkit.ssh.shell import pipe

ATTEMPTS, PAUSE = 3, 2.0
"""Tries, and seconds before the second one; doubled for the third."""
_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}$")
_LAYER = re.compile(r"([0-9a-f]{12}): Downloading\s.*?([0-9.]+)\s?([kMGT]?B)/([0-9.]+)\s?([kMGT]?B)")
_LAYER_DONE = re.compile(r"([0-9a-f]{12}): (?:Download complete|Pull complete|Verifying Checksum|Extracting)")
_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# No second try changes these.
_FINAL = ("manifest unknown", "not found", "denied", "unauthorized", "invalid reference", "no matching manifest")


async def resolve(session: Session, reference: str) -> str:
    """Return what a reference means in its registry now: NAME@sha256:…; empty where only a pull can tell."""
    if "@" in reference:
        return reference
    if is_id(reference):
        return ""
    try:
        command = f"docker manifest inspect --verbose {shlex.quote(reference)}"
        result = await session.run(command, root=True, timeout=60.0)
    except HostError as error:
        if error.kind is not ErrorKind.TIMEOUT:
            raise
        return ""
    digest = _manifest_digest(result.stdout) if result.ok else ""
    return f"{repository(reference)}@{digest}" if digest else ""


def _manifest_digest(text: str) -> str:
    """Return the digest in `docker manifest inspect --verbose`, which prints a list for tags of several platforms."""
    try:
        described = json.loads(text)
    except ValueError:
        return ""
    for entry in described if isinstance(described, list) else [described]:
        descriptor = entry.get("Descriptor") or {}
        platform = descriptor.get("platform") or {}
        fits = platform.get("os", "linux") == "linux" and platform.get("architecture", "amd64") == "amd64"
        if fits and _DIGEST.match(str(descriptor.get("digest"))):
            return str(descriptor["digest"])
    return ""


async def pull(
    session: Session, reference: str, digest: str = "", *, progress: Progress | None = None, timeout: float
) -> Image:
    """Pull an image and give it its tag.

    Args:
        digest: NAME@sha256:… to pull in place of the tag.
        timeout: of one try, in seconds.

    Raises:
        ImageError: the image cannot be pulled.
    """
    host, wanted = session.host.name, digest or reference
    meter = _Meter(host, progress)
    failure = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            await asyncio.sleep(PAUSE * 2 ** (attempt - 1))
        result = await session.run(_script(wanted), root=True, timeout=timeout, on_output=meter)
        if result.ok:
            break
        failure = _reason(result.stdout + result.stderr)
        if any(word in failure.lower() for word in _FINAL):
            raise _failed(host, wanted, failure)
    else:
        raise _failed(host, wanted, f"{failure} ({ATTEMPTS} tries)")
    if digest and is_tag(reference):
        tagged = await session.run(docker.command("tag", digest, reference), root=True, timeout=60.0)
        if not tagged.ok:
            raise _failed(host, wanted, _reason(tagged.stdout + tagged.stderr))
    image = await inspect(session, reference)
    if image is None:
        raise _failed(host, wanted, "Docker says that it was pulled and does not have it")
    meter.finish()
    return image


def _failed(host: str, reference: str, reason: str) -> ImageError:
    return ImageError(
        host,
        f"{reference} cannot be pulled: {reason}",
        "check the name and that the host reaches the registry (a proxy: --https-proxy; a private registry: `docker "
        "login` there), or leave --image out: the head node then builds it",
    )


def _script(reference: str) -> str:
    """Return a script that runs `docker pull` on a terminal where the host has `script`: only there it prints bytes."""
    plain = docker.command("pull", reference)
    on_terminal = pipe(
        ("docker pull", f"script -qec {shlex.quote(plain)} /dev/null </dev/null 2>&1"),
        ("showing", "stdbuf -o0 tr '\\r' '\\n'"),
    )
    return f"""export TERM=xterm COLUMNS=200
if command -v script >/dev/null 2>&1 && command -v stdbuf >/dev/null 2>&1; then
{on_terminal}else
  {plain} 2>&1
fi
"""


def _reason(output: str) -> str:
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip() for line in output.splitlines()]
    errors = [line for line in lines if "error" in line.lower() or "denied" in line.lower()]
    others = [line for line in lines if line and line != "failed: docker pull"]
    return (errors or others or ["no reason given"])[-1][:500]


class _Meter:
    """Adds up the bytes of the layers that `docker pull` prints."""

    def __init__(self, host: str, progress: Progress | None) -> None:
        self._host, self._progress = host, progress
        self._layers: dict[str, tuple[int, int]] = {}

    def __call__(self, line: str) -> None:
        if found := _LAYER.search(line):
            layer, done, unit, size, size_unit = found.groups()
            self._layers[layer] = (_bytes(done, unit), _bytes(size, size_unit))
        elif (ended := _LAYER_DONE.search(line)) and ended[1] in self._layers:
            size_of = self._layers[ended[1]][1]
            self._layers[ended[1]] = (size_of, size_of)
        else:
            return
        self._report()

    def finish(self) -> None:
        """Report the image as complete."""
        self._layers = {layer: (size, size) for layer, (_, size) in self._layers.items()}
        self._report()

    def _report(self) -> None:
        if self._progress is not None and self._layers:
            done, size = (sum(numbers) for numbers in zip(*self._layers.values(), strict=True))
            self._progress(self._host, done, size)


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])
