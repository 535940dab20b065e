"""`clusterkit setup`: from SSH hosts to a ready Ray cluster, and with a preset to a training."""

from __future__ import annotations

from pathlib import Path

import typer

from clusterkit.cli import actions
from clusterkit.cli.hostoptions import takes_hosts
from clusterkit.provision.site import Site
from clusterkit.setup.typed import SetupOptions
from clusterkit.ssh.host_options import HostOptions

app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


_HF_TOKEN_FILE = typer.Option(None, "--hf-token-file", metavar="FILE", help="For gated models; else $HF_TOKEN.")
_BUNDLE = typer.Option(None, "--bundle", metavar="FILE|FOLDER", help="Install from what `clusterkit bundle` wrote.")
_SETTINGS = typer.Option([], "--set", metavar="KEY=VALUE", help="With a preset: a setting that differs from its own.")
_GPUS = typer.Option(None, "--gpus/--no-gpus", help="Demand or ignore GPUs; whatever there is when left out.")


@app.command()
@takes_hosts
def setup(
    *,
    hosts: HostOptions,
    preset: str = typer.Option("", "--preset", metavar="NAME", help="Fetch what this preset needs, and train it."),
    task: str | None = typer.Option(None, "--task", help="Task of the preset; its default when left out."),
    image: str = typer.Option("", "--image", metavar="REF", help="Runtime image; built on the head when left out."),
    image_from: str = typer.Option(
        "auto",
        "--image-from",
        help="auto, pull, storage (saved once, loaded everywhere) or fanout (host to host, through here).",
    ),
    image_refresh: bool = typer.Option(
        False, "--image-refresh", help="Take what the image's tag means now, not what the lock file remembers."
    ),
    image_base: str = typer.Option("", "--image-base", metavar="REF", help="Build on this instead of the pinned base."),
    image_torch: bool = typer.Option(True, "--image-torch/--no-image-torch", help="PyTorch in a built CPU image."),
    docker_source: str = typer.Option("auto", "--docker-source", help="auto, docker or distribution."),
    docker_url: str = typer.Option("https://download.docker.com", "--docker-url", metavar="URL", help="Or a mirror."),
    nvidia_url: str = typer.Option(
        "https://nvidia.github.io/libnvidia-container", "--nvidia-url", metavar="URL", help="Or a mirror."
    ),
    apt_mirror: str = typer.Option("", "--apt-mirror", metavar="URL", help="Mirror of Debian or Ubuntu."),
    pip_index_url: str = typer.Option("", "--pip-index-url", metavar="URL", help="Python package index for the image."),
    pip_find_links: str = typer.Option("", "--pip-find-links", metavar="URL|FOLDER", help="Further Python wheels."),
    torch_index: str = typer.Option(
        "", "--torch-index", metavar="URL", help="Mirror of PyTorch's index of CPU wheels."
    ),
    hf_endpoint: str = typer.Option("", "--hf-endpoint", metavar="URL", help="Mirror of the Hugging Face hub."),
    hf_token_file: Path | None = _HF_TOKEN_FILE,
    ca_bundle: str = typer.Option("", "--ca-bundle", metavar="FILE", help="PEM certificates that hosts shall trust."),
    http_proxy: str = typer.Option("", "--http-proxy", metavar="URL", help="Proxy of the hosts; env:NAME, file:PATH."),
    https_proxy: str = typer.Option(
        "", "--https-proxy", metavar="URL", help="Proxy of the hosts; env:NAME, file:PATH."
    ),
    no_proxy: str = typer.Option("", "--no-proxy", metavar="LIST", help="What the hosts reach without it."),
    bundle: Path | None = _BUNDLE,
    model_path: str = typer.Option("", "--model-path", help="Model in place of the preset's: folder or repository."),
    dataset_path: str = typer.Option("", "--dataset-path", help="Data set in place of the preset's."),
    settings: list[str] = _SETTINGS,
    train: bool = typer.Option(True, "--train/--no-train", help="With a preset: start its training, or only fetch."),
    gpus: bool | None = typer.Option(
        None, "--gpus/--no-gpus", help="Demand or ignore GPUs; what there is when left out."
    ),
    shm: str = typer.Option("", "--shm", metavar="SIZE", help="Shared memory for Ray: 64g; half of the memory else."),
    privileged: bool = typer.Option(False, "--privileged", help="Run the Ray containers with --privileged."),
    recreate: bool = typer.Option(False, "--recreate", help="Replace running Ray containers whose settings differ."),
    force: bool = typer.Option(False, "--force", help="Restart Docker although other containers run."),
    retry: bool = typer.Option(False, "--retry", help="Only the hosts that failed in the cluster's last set-up."),
    retries: int = typer.Option(
        0, "--retries", min=0, metavar="N", help="Connect again so often to a host that cannot be reached or is lost."
    ),
    uploads: int = typer.Option(4, "--uploads", min=1, metavar="N", help="Hosts that are sent large files at once."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Show what would be done on each host; write nothing."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Take SSH hosts to a ready Ray cluster; run it again to resume, repair or extend.

    Checks every host, installs base packages, git-lfs, Docker and (with GPUs) NVIDIA Container Toolkit, makes the
    folders of the shared storage, brings one runtime image to all, fetches the preset's models and data, starts Ray,
    and starts the preset's training; the same command again attaches to it. Image, Docker source, mirrors, proxies,
    certificates and --shm are kept with the cluster; `none` as the value forgets one. Exit code: 0 ready, 1 failed,
    2 bad usage, 3 some hosts failed, 130 interrupted.
    """
    site = Site(
        image=image,
        image_base=image_base,
        docker_source=docker_source,
        docker_url=docker_url,
        nvidia_url=nvidia_url,
        apt_mirror=apt_mirror,
        pip_index_url=pip_index_url,
        pip_find_links=pip_find_links,
        torch_index=torch_index,
        hf_endpoint=hf_endpoint,
        ca_bundle=_absolute(ca_bundle),
        http_proxy=http_proxy,
        https_proxy=https_proxy,
        no_proxy=no_proxy,
        shm=shm,
    )
    options = SetupOptions(
        site=site,
        preset=preset,
        task=task,
        image_from=image_from,
        image_refresh=image_refresh,
        image_torch=image_torch,
        hf_token_file=hf_token_file,
        bundle=bundle,
        model_path=model_path,
        dataset_path=dataset_path,
        settings=tuple(settings),
        train=train,
        gpus=gpus,
        privileged=privileged,
        recreate=recreate,
        force=force,
        dry_run=dry_run,
        uploads=uploads,
        retries=retries,
    )
    actions.setup.setup(hosts, options, retry=retry, as_json=as_json)


def _absolute(path: str) -> str:
    """Kept for set-ups that are started in another folder; `none` stays what it is."""
    return str(Path(path).expanduser().absolute()) if path not in ("", "none") else path
