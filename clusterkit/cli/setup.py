"""`clusterkit setup`: from SSH hosts to a ready Ray cluster, and with a preset to a training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from clusterkit.cli import actions
from clusterkit.cli.hostoptions import takes, takes_hosts
from clusterkit.cli.options import new_app
from clusterkit.provision.site import Site
from clusterkit.setup.typed import SetupOptions
from clusterkit.ssh.host_options import HostOptions

app = new_app()

_SETTINGS = typer.Option([], "--set", metavar="KEY=VALUE", help="With a preset: a setting that differs from its own.")
_SITE: dict[str, Any] = {
    "image": typer.Option(metavar="REF", help="Runtime image; built on the head when left out."),
    "image_base": typer.Option(metavar="REF", help="Build on this instead of the pinned base."),
    "docker_source": typer.Option(metavar="auto|docker|distribution", help="Whose Docker packages."),
    "docker_url": typer.Option(metavar="URL", help="Docker's packages, or a mirror."),
    "nvidia_url": typer.Option(metavar="URL", help="NVIDIA's packages, or a mirror."),
    "apt_mirror": typer.Option(metavar="URL", help="Mirror of Debian or Ubuntu."),
    "pip_index_url": typer.Option(metavar="URL", help="Python package index for the image."),
    "pip_find_links": typer.Option(metavar="URL|FOLDER", help="Further Python wheels."),
    "torch_index": typer.Option(metavar="URL", help="Mirror of PyTorch's index of CPU wheels."),
    "hf_endpoint": typer.Option(metavar="URL", help="Mirror of the Hugging Face hub."),
    "ca_bundle": typer.Option(metavar="FILE", help="PEM certificates that hosts shall trust."),
    "http_proxy": typer.Option(metavar="URL", help="Proxy of the hosts; env:NAME, file:PATH."),
    "https_proxy": typer.Option(metavar="URL", help="Proxy of the hosts; env:NAME, file:PATH."),
    "no_proxy": typer.Option(metavar="LIST", help="What the hosts reach without a proxy."),
    "shm": typer.Option(metavar="SIZE", help="Shared memory for Ray, such as 64g; half of the memory when left out."),
}
"""How each field of `Site` is typed."""
_SETUP: dict[str, Any] = {
    "preset": typer.Option(metavar="NAME", help="Fetch what this preset needs, and train it."),
    "task": typer.Option(metavar="NAME", help="Task; the preset's default when left out."),
    "image_from": typer.Option(
        metavar="auto|pull|storage|fanout",
        help="How hosts get the image; storage: saved once, loaded everywhere; fanout: host to host, through here.",
    ),
    "image_refresh": typer.Option(
        "--image-refresh", help="Take what the image's tag means now, not what the lock file remembers."
    ),
    "image_torch": typer.Option("--image-torch/--no-image-torch", help="PyTorch in a built CPU image."),
    "hf_token_file": typer.Option(metavar="FILE", help="Token for gated models; $HF_TOKEN when left out."),
    "bundle": typer.Option(metavar="FILE|FOLDER", help="Install from what `clusterkit bundle` wrote."),
    "model_path": typer.Option(metavar="MODEL", help="Model in place of the preset's: folder or repository."),
    "dataset_path": typer.Option(metavar="DATA", help="Data set in place of the preset's."),
    "train": typer.Option("--train/--no-train", help="With a preset: start its training, or only fetch."),
    "gpus": typer.Option("--gpus/--no-gpus", help="Demand or ignore GPUs; take what there is when left out."),
    "privileged": typer.Option("--privileged", help="Run the Ray containers with --privileged."),
    "recreate": typer.Option("--recreate", help="Replace running Ray containers whose settings differ."),
    "force": typer.Option("--force", help="Restart Docker although other containers run."),
    "dry_run": typer.Option("--dry-run", help="Show what would be done on each host; write nothing."),
    "uploads": typer.Option(min=1, metavar="N", help="Hosts that are sent large files at once."),
    "retries": typer.Option(
        min=0, metavar="N", help="Connect again so often to a host that cannot be reached or is lost."
    ),
}
"""How each field of `SetupOptions` is typed; --set takes several values."""


def _takes_all(command: Callable[..., Any]) -> Callable[..., Any]:
    return takes_hosts(takes(takes(command, "options", SetupOptions, _SETUP), "site", Site, _SITE))


@app.command(
    examples="""
clusterkit setup --hostnames gpu[01-04] --cluster lab
clusterkit setup --cluster lab --preset 7B_n4 --dry-run
clusterkit setup --cluster lab --retry
"""
)
@_takes_all
def setup(
    *,
    hosts: HostOptions,
    site: Site,
    options: SetupOptions,
    settings: list[str] = _SETTINGS,
    retry: bool = typer.Option(False, "--retry", help="Only the hosts that failed in the cluster's last set-up."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Take SSH hosts to a ready Ray cluster; run it again to resume, repair or extend.

    Checks every host, installs base packages, git-lfs, Docker and (with GPUs) NVIDIA Container Toolkit, makes the
    folders of the shared storage, brings one runtime image to all, fetches the preset's models and data, starts Ray,
    and starts the preset's training; the same command again attaches to it. Image, Docker source, mirrors, proxies,
    certificates and --shm are kept with the cluster; `none` as the value forgets one. Exit code: 0 ready, 1 failed,
    2 bad usage, 3 some hosts failed, 130 interrupted.
    """
    if site.ca_bundle not in ("", "none"):  # kept for set-ups that are started in another folder
        site = replace(site, ca_bundle=str(Path(site.ca_bundle).expanduser().absolute()))
    options = replace(options, site=site, settings=tuple(settings))
    actions.setup.setup(hosts, options, retry=retry, as_json=as_json)
