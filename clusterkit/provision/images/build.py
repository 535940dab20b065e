"""Build a runtime image with a host's own Docker, from a build context that we send over the connection."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from clusterkit.provision.images.context import CONTENT_LABEL, Recipe, context
from clusterkit.provision.images.identity import Image, ImageError, inspect
from clusterkit.ssh.api import Session

BUILD_SECONDS = 2 * 3600.0
_PROXIES = ("http_proxy", "https_proxy", "no_proxy")


async def build(
    session: Session,
    recipe: Recipe,
    *,
    ca_bundle: bytes = b"",
    apt_mirror: str = "",
    pip_index_url: str = "",
    pip_find_links: str = "",
    proxies: Mapping[str, str] | None = None,
    torch_index: str | None = None,
    on_output: Callable[[str], None] | None = None,
) -> Image:
    """Build an image unless the host has it already, and return it.

    Args:
        ca_bundle: PEM certificates to trust while building.
        pip_find_links: a URL, or a folder on this machine whose wheels are sent along.
        torch_index: where the CPU build of torch comes from; None: the pinned address.

    Raises:
        UserError: a folder of wheels does not exist.
    """
    if (found := await find_built(session, recipe)) is not None:
        return found
    wheels = Path(pip_find_links).expanduser() if pip_find_links and "://" not in pip_find_links else None
    arguments = dict(recipe.arguments)
    arguments |= {"APT_MIRROR": apt_mirror, "PIP_INDEX_URL": pip_index_url}
    arguments |= {"PIP_FIND_LINKS": "" if wheels is not None else pip_find_links}
    if recipe.kind == "cpu" and torch_index is not None:
        arguments["TORCH_CPU_INDEX"] = torch_index
    for name in ("APT_MIRROR", "PIP_INDEX_URL", "PIP_FIND_LINKS", "TORCH_CPU_INDEX"):
        if re.match(r"[a-z]+://[^/]+@", arguments.get(name, "")):
            raise ImageError(
                session.host.name,
                f"the image cannot be built with a password in {name}: Docker keeps it in the image's history",
                "use a mirror on the network of the hosts that asks for none, a folder of wheels (--pip-find-links "
                "FOLDER), `clusterkit bundle`, or an image that was built elsewhere (--image REF)",
            )
    given = {name: value for name, value in (proxies or {}).items() if name.lower() in _PROXIES and value}
    result = await session.run(
        _script(recipe, arguments, given),
        root=True,
        stdin=context(recipe, ca_bundle=ca_bundle, wheels=wheels),
        timeout=BUILD_SECONDS,
        on_output=on_output,
    )
    image = await inspect(session, recipe.reference) if result.ok else None
    if image is None:
        base = arguments.get("CPU_BASE") or arguments.get("CUDA_BASE") or ""
        if base and await inspect(session, base) is None:
            last_line = ((result.stdout + result.stderr).strip().splitlines() or [f"exit code {result.exit_code}"])[-1]
            raise ImageError(
                session.host.name,
                f"{recipe.reference} cannot be built: its base {base} cannot be pulled: {last_line[-300:]}",
                "ways on: a base in a registry that the head reaches, a mirror of yours (--image-base "
                f"REGISTRY/{base}); a runtime image that exists already (--image REF); `clusterkit bundle` on a "
                "machine with a network, and --bundle here; a proxy (--https-proxy)",
            )
        last = "\n".join((result.stdout + result.stderr).strip().splitlines()[-15:])
        raise ImageError(
            session.host.name,
            f"building {recipe.reference} failed (exit code {result.exit_code}):\n{last}",
            "behind a proxy or with own mirrors: --ca-bundle, --pip-index-url, --pip-find-links, --apt-mirror",
        )
    return image


async def find_built(session: Session, recipe: Recipe) -> Image | None:
    """Return the host's image that was built from exactly this recipe; None where there is none."""
    image = await inspect(session, recipe.reference)
    return image if image is not None and (CONTENT_LABEL, recipe.content) in image.labels else None


def _script(recipe: Recipe, arguments: Mapping[str, str], proxies: Mapping[str, str]) -> str:
    """Return a script that builds from stdin. Values go through the environment: a proxy's address may hold a password,
    and Docker keeps proxies (nothing else) out of the image.
    """
    values = {name: value for name, value in arguments.items() if value} | dict(proxies)
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(values.items()))
    options = "".join(f" --build-arg {name}" for name in sorted(values))
    # With the host's network a build reaches all that the host reaches, also a proxy or name server on loopback.
    return (
        f"{exports}export DOCKER_BUILDKIT=0\n"
        f"docker build --network host --force-rm{options} --label {CONTENT_LABEL}={recipe.content} "
        f"--tag {shlex.quote(recipe.reference)} - 2>&1\n"
    )
