"""`clusterkit bundle`: packages and images for hosts without a network, in one folder or file."""

from __future__ import annotations

from pathlib import Path

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import new_app

app = new_app("Collect packages and images for hosts without a network.", no_args_is_help=True)

_OUT = typer.Argument(..., metavar="OUT", help="Folder to write, or a file whose name ends in .tar.")
_OS = typer.Option([], "--os", metavar="SYSTEM", help="Release of the hosts, such as debian-12; repeatable.")
_IMAGE = typer.Option([], "--image", metavar="REF", help="Image to include; repeatable.")


@app.command(
    examples="""
clusterkit bundle offline --os ubuntu-24.04
clusterkit bundle offline.tar --os debian-12 --no-gpus
"""
)
def bundle(
    out: Path = _OUT,
    os: list[str] = _OS,
    image: list[str] = _IMAGE,
    docker_source: str = typer.Option(
        "auto",
        "--docker-source",
        metavar="auto|docker|distribution",
        help="Whose Docker packages; docker: its own.",
    ),
    docker_url: str = typer.Option(
        "https://download.docker.com", "--docker-url", metavar="URL", help="Docker's packages, or a mirror."
    ),
    nvidia_url: str = typer.Option(
        "https://nvidia.github.io/libnvidia-container",
        "--nvidia-url",
        metavar="URL",
        help="NVIDIA's packages, or a mirror.",
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
    actions.bundle.bundle(
        out,
        os,
        image,
        docker_source=docker_source,
        docker_url=docker_url,
        nvidia_url=nvidia_url,
        apt_mirror=apt_mirror,
        rpm_mirror=rpm_mirror,
        gpus=gpus,
        as_json=as_json,
    )
