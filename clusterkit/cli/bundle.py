"""`clusterkit bundle`: packages and images for hosts without a network, in one folder or file."""

from __future__ import annotations

from pathlib import Path

import typer

from clusterkit.ui import output

app = typer.Typer(
    help="Collect packages and images for hosts without a network.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_OUT = typer.Argument(..., metavar="OUT", help="Folder to write, or a file whose name ends in .tar.")
_OS = typer.Option([], "--os", metavar="SYSTEM", help="Release of the hosts, such as debian-12; repeat for several.")
_IMAGE = typer.Option([], "--image", metavar="REF", help="Image to include; repeat for several.")


@app.command()
def bundle(
    out: Path = _OUT,
    os: list[str] = _OS,
    image: list[str] = _IMAGE,
    docker_source: str = typer.Option(
        "auto", "--docker-source", help="auto, docker (its own packages) or distribution."
    ),
    docker_url: str = typer.Option(
        "https://download.docker.com", "--docker-url", help="Docker's packages, or a mirror."
    ),
    nvidia_url: str = typer.Option(
        "https://nvidia.github.io/libnvidia-container", "--nvidia-url", help="NVIDIA's packages, or a mirror."
    ),
    apt_mirror: str = typer.Option("", "--apt-mirror", metavar="URL", help="Mirror of Debian or Ubuntu."),
    rpm_mirror: str = typer.Option(
        "", "--rpm-mirror", metavar="URL", help="Mirror of RHEL, Rocky or AlmaLinux: the folder with BaseOS, AppStream."
    ),
    gpus: bool = typer.Option(True, "--gpus/--no-gpus", help="Include NVIDIA Container Toolkit."),
    as_json: bool = typer.Option(False, "--json", help="Print the manifest as JSON."),
) -> None:
    """Collect what `clusterkit setup --bundle OUT` installs on hosts that reach no package mirror.

    Run it on a machine with a network, again after an interruption, and copy OUT to where `setup` runs.
    """
    from clusterkit.provision.bundle.build import Contents, build  # noqa: PLC0415
    from clusterkit.provision.bundle.packages import Sources  # noqa: PLC0415
    from trainer.errors import InterruptedRunError, UserError  # noqa: PLC0415

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
