"""`clusterkit bundle`: collect packages and images in a folder or file."""

from __future__ import annotations

from pathlib import Path

from clusterkit.provision.bundle.build import Contents, build
from clusterkit.provision.bundle.packages import Sources
from clusterkit.ui import output
from trainer.errors import InterruptedRunError, UserError


def bundle(
    out: Path,
    os: list[str],
    image: list[str],
    *,
    docker_source: str,
    docker_url: str,
    nvidia_url: str,
    apt_mirror: str,
    rpm_mirror: str,
    gpus: bool,
    as_json: bool,
) -> None:
    """Collect what hosts without a network need, and say what it is."""
    if docker_source not in {"auto", "docker", "distribution"}:
        raise UserError(f"--docker-source {docker_source}: choose auto, docker or distribution")
    sources = Sources(docker_source, docker_url, nvidia_url, apt_mirror, rpm_mirror, gpus)
    try:
        manifest = build(out, Contents(tuple(os), tuple(image), sources), say=output.note)
    except KeyboardInterrupt as error:
        raise InterruptedRunError("interrupted. The same command goes on with what is still missing") from error
    if as_json:
        output.result_json(manifest.model_dump())
        return
    size = sum(file.size for file in manifest.files.values())
    output.result(f"{out} is ready: {len(manifest.files)} file(s), {size / 1e6:,.0f} MB")
    for name in manifest.systems:
        output.result(f"  packages for {name}")
    for reference, saved in manifest.images.items():
        output.result(f"  image {reference} ({saved.id[:19]})")
    output.result(f"next: clusterkit setup --bundle {out} --hostnames …")
