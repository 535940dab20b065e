"""Check the options of `clusterkit setup`, and convert them for its parts."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from clusterkit.backends.base import RunRequest
from clusterkit.backends.own_code import own_files
from clusterkit.backends.ray.request import on_cluster
from clusterkit.capacity.needs import needs_of_preset
from clusterkit.capacity.runnable import missing_parts
from clusterkit.config.resolve import resolve
from clusterkit.hosts.folders import state_folder
from clusterkit.hosts.model import Cluster
from clusterkit.provision.assets.model import NodeAsset, required_assets
from clusterkit.provision.bundle.folder import HOST_FOLDER, Bundle, load
from clusterkit.provision.checks.needs import Needs
from clusterkit.provision.images.identity import is_tag
from clusterkit.provision.ray.model import shm_bytes
from clusterkit.provision.site import ADDRESSES, HF_TOKEN
from clusterkit.provision.steps.step import DesiredState, Refused
from clusterkit.setup.imagestage import ImageRequest
from clusterkit.setup.typed import SetupOptions
from clusterkit.ssh.selection import Selection
from trainer.errors import UserError


def needs_of(cluster: Cluster, options: SetupOptions) -> Needs:
    """Return what the preset needs of the hosts. Raises UserError: an unknown preset; fewer hosts than it needs."""
    needs = needs_of_preset(options.preset) if options.preset else Needs()
    if len(cluster.hosts) < needs.hosts:
        raise UserError(
            f"preset {options.preset} needs {needs.hosts} hosts; {len(cluster.hosts)} named: name more, or choose a "
            "smaller preset (clusterkit presets)"
        )
    return replace(needs, gpus_per_host=0) if options.gpus is False else needs


def check_values(options: SetupOptions) -> None:
    """Refuse values that no option takes. Raises UserError, which names the option and what it takes."""
    for name, value, allowed in (
        ("--docker-source", options.site.docker_source, ("auto", "docker", "distribution")),
        ("--image-from", options.image_from, ("auto", "pull", "storage", "fanout")),
    ):
        if value not in allowed:
            raise UserError(f"{name} {value}: choose {', '.join(allowed[:-1])} or {allowed[-1]}")
    for name in ADDRESSES:
        if name == "pip_find_links":  # may be a folder
            continue
        value = getattr(options.site, name)
        if value and (urlsplit(value).scheme not in ("http", "https") or not urlsplit(value).hostname):
            shown = f"--{name.replace('_', '-')} {value.rpartition('@')[2]}"
            raise UserError(f"{shown}: this is no URL; it begins with http:// or https://")
    shm_bytes(options.site.shm)


def desired_state(cluster: Cluster, options: SetupOptions, bundle: Bundle | None) -> DesiredState:
    """Return the desired state of the hosts, for the steps. Raises UserError where the certificates cannot be read."""
    return DesiredState(
        cluster=cluster,
        docker_source=options.site.docker_source,
        docker_url=options.site.docker_url,
        nvidia_url=options.site.nvidia_url,
        apt_mirror=options.site.apt_mirror,
        pip_index_url=options.site.pip_index_url,
        ca_bundle=_certificates(options.site.ca_bundle),
        http_proxy=options.site.http_proxy,
        https_proxy=options.site.https_proxy,
        no_proxy=options.site.no_proxy,
        bundle=HOST_FOLDER if bundle else "",
        force=options.force,
        gpus=options.gpus,
    )


def image_of(options: SetupOptions, bundle: Bundle | None) -> ImageRequest:
    """Return which runtime image hosts get, and how. Raises UserError where the reference is malformed."""
    reference = options.site.image
    if bundle is not None and not reference:
        reference = next(iter(bundle.manifest.images), "")
    return ImageRequest(
        reference=reference,
        method=options.image_from,
        refresh=options.image_refresh,
        base=options.site.image_base,
        torch=options.image_torch,
        pip_find_links=options.site.pip_find_links,
        torch_index=options.site.torch_index,
        bundle=bundle,
    )


def check_refresh(request: ImageRequest, selection: Selection) -> None:
    """Refuse --image-refresh without a tag to resolve again, or without the head, which resolves it."""
    if not request.refresh:
        return
    if not request.reference or not is_tag(request.reference):
        kind = (
            "an image that is built follows its recipe"
            if not request.reference
            else f"{request.reference} names one image"
        )
        raise UserError(f"--image-refresh asks a registry what a tag means now, and {kind}: add --image NAME:TAG")
    head = selection.cluster.head_host.name
    if head not in {host.name for host in selection.hosts}:
        raise UserError(f"--image-refresh: all hosts follow the head {head}, which --limit or --exclude leaves out")


def _certificates(path: str) -> bytes:
    if not path:
        return b""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"--ca-bundle {path}: {error.strerror}") from error
    if b"-----BEGIN CERTIFICATE-----" not in data:
        raise UserError(f"--ca-bundle {path}: no certificate in it; a PEM file with BEGIN CERTIFICATE is wanted")
    return data


def preset_of(cluster: Cluster, options: SetupOptions) -> tuple[tuple[NodeAsset, ...], RunRequest | None]:
    """Return what the preset needs on the storage, and the run to submit; nothing without a preset.

    Raises:
        UserError: as `resolve`; options of a preset without a preset; a preset that cannot be trained yet.
    """
    if not options.preset:
        if options.model_path or options.dataset_path or options.task or options.settings:
            raise UserError("--model-path, --dataset-path, --task and --set belong to a preset: add --preset NAME")
        return (), None
    config = resolve(options.preset, options.task, options.settings).config
    try:
        assets = required_assets(config, cluster, options.model_path, options.dataset_path)
    except Refused as refusal:
        raise UserError(f"{refusal.message}: {refusal.fix}") from refusal
    if not options.train:
        return assets, None
    if missing := missing_parts(config):
        raise UserError(
            f"preset {options.preset} cannot be trained by this version: it asks for {'; '.join(missing)}.\nTo make "
            "the hosts ready for it and fetch what it needs: add --no-train"
        )
    settings = [*options.settings, *(asset.override for asset in assets)]
    resolved = resolve(options.preset, options.task, settings)
    config = on_cluster(resolved.config, cluster, own_fileroot="fileroot" in resolved.settings)
    own_code = own_files(resolved.config)
    return assets, RunRequest(config, resolved.trial_is_named, once=True, own_code=own_code)


def bundle_of(options: SetupOptions) -> Bundle | None:
    """Open the bundle to install from; None without one. Raises UserError where it cannot be read, or is incomplete."""
    if options.bundle is None:
        return None
    return load(options.bundle.expanduser(), state_folder() / "bundles")


def hub_token(options: SetupOptions) -> str:
    """Return the token for gated models of the hub; empty without one. Raises UserError: its file cannot be read."""
    if options.hf_token_file is None:
        return os.environ.get(HF_TOKEN, "")
    try:
        return options.hf_token_file.expanduser().read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UserError(f"--hf-token-file {options.hf_token_file}: {error.strerror}") from error
