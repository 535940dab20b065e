"""What `clusterkit setup` does with its options: check them, set up, keep the inventory, say what came of it."""

from __future__ import annotations

import asyncio
import os
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from clusterkit.check.needs import Needs, needs_of_preset
from clusterkit.dispatch.submit import Order, on_cluster
from clusterkit.hosts import inventory
from clusterkit.hosts.model import Cluster, Host
from clusterkit.images.identity import is_tag
from clusterkit.node_assets.hub import Hub
from clusterkit.node_assets.model import NodeAsset, needed
from clusterkit.planning.runnable import missing_parts
from clusterkit.provision import view
from clusterkit.provision.assetstage import AssetStage
from clusterkit.provision.claim import Claim, claimed
from clusterkit.provision.failed import failed_hosts, keep_failed
from clusterkit.provision.hostlog import new_log_folder, state_folder
from clusterkit.provision.imagestage import ImageStage, ImageWish
from clusterkit.provision.model import Report
from clusterkit.provision.raystage import RayStage
from clusterkit.provision.setup import Request, Setup
from clusterkit.provision.sharedstage import SharedStage
from clusterkit.provision.site import Site, keep, with_kept
from clusterkit.provision.trainstage import TrainStage
from clusterkit.raycluster.model import shm_bytes
from clusterkit.ssh.uploads import UPLOADS
from clusterkit.steps.api import Refused, Wish
from trainer.errors import InterruptedRunError, UserError

if TYPE_CHECKING:
    from clusterkit.bundle import Bundle
    from clusterkit.cli.hostoptions import Selection
    from clusterkit.ssh.api import Session

HF_TOKEN = "HF_TOKEN"


@dataclass(frozen=True)
class SetupOptions:
    """The options of `clusterkit setup` beside those that name hosts, unchecked; see its --help."""

    site: Site = field(default_factory=Site)
    preset: str = ""
    task: str | None = None
    image_from: str = "auto"
    image_refresh: bool = False
    image_torch: bool = True
    hf_token_file: Path | None = None
    bundle: Path | None = None
    model_path: str = ""
    dataset_path: str = ""
    settings: tuple[str, ...] = ()
    train: bool = True
    gpus: bool | None = None
    privileged: bool = False
    recreate: bool = False
    force: bool = False
    dry_run: bool = False
    uploads: int = UPLOADS
    retries: int = 0


@dataclass(frozen=True)
class Outcome:
    """What the command prints and ends with."""

    text: str
    report: Report
    cluster: Cluster
    ray: dict[str, Any] | None = None
    training: dict[str, Any] | None = None

    @property
    def exit_code(self) -> int:
        """0 done, 1 failed, 3 partly done."""
        return self.report.exit_code

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "cluster": self.cluster.name,
            "exit_code": self.exit_code,
            **self.report.as_dict(),
            "ray": self.ray,
            "training": self.training,
        }


def run_setup(selection: Selection, options: SetupOptions) -> Outcome:
    """Set the selected hosts up.

    Raises:
        UserError: impossible options, fewer hosts than the preset needs, another cluster under the name, somebody else
            at work on the cluster.
        InterruptedRunError: Ctrl-C; what is done stays done.

    """
    cluster = selection.cluster
    needs = _needs(cluster, options)
    options = replace(options, site=with_kept(cluster.name, options.site))
    _check(options)
    assets, order = _preset(cluster, options)
    bundle = _bundle(options)
    image = ImageStage(_image(options, bundle))
    _check_refresh(image.wish, selection)
    token = _hub_token(options)
    wish = _wish(cluster, options, bundle)
    if not options.dry_run:
        refuse_forgetting(cluster)
    ray = RayStage(image, options.privileged, options.recreate, shm_bytes(options.site.shm))
    training = TrainStage(order, ray)
    hub = Hub(image="", endpoint=options.site.hf_endpoint, token=token, environment=_proxies(options.site))
    request = Request(
        cluster=cluster,
        hosts=selection.hosts,
        wish=wish,
        needs=needs,
        log_folder=new_log_folder(cluster.name, "setup"),
        dry=options.dry_run,
        secrets=(token,),
        stages=(SharedStage(), image, AssetStage(assets, hub, image), ray, training),
        bundle=bundle,
        uploads=options.uploads,
        retries=options.retries,
    )
    with nullcontext() if options.dry_run else claimed(cluster.name, "setup") as claim:
        report = asyncio.run(_run(request, selection, options.site, claim))
        if not options.dry_run:
            _keep_failed(request, report)
    return _outcome(request, report, training, options)


def only_failed(selection: Selection) -> Selection | None:
    """Of the selected hosts those that failed when they were last set up; None where no host of the cluster did.

    Raises:
        UserError: some did, and --limit and --exclude leave none of them.

    """
    failed = failed_hosts(selection.cluster)
    hosts = tuple(host for host in selection.hosts if host.name in failed)
    if failed and not hosts:
        raise UserError(f"--retry: {', '.join(failed)} failed last time, and --limit and --exclude leave none of them.")
    return replace(selection, hosts=hosts) if failed else None


def nothing_failed(cluster: Cluster) -> Outcome:
    """What `--retry` comes to where no host failed last time."""
    text = f"nothing failed in the last set-up of cluster {cluster.name}: nothing to do"
    return Outcome(text, Report({}, notes=[text]), cluster)


def _keep_failed(request: Request, report: Report) -> None:
    try:
        keep_failed(request.cluster, report)
    except OSError as error:
        report.notes.append(f"--retry will not know who failed: {error.filename}: {error.strerror}")


async def _run(request: Request, selection: Selection, site: Site, claim: Claim | None) -> Report:
    from clusterkit.ssh.connection import connect  # noqa: PLC0415 (a tenth of a second)

    async def connect_and_keep(host: Host) -> Session:
        session = await connect(host, selection.ssh)
        # From the first host that lets us in, later commands need not be told; a mistyped key is not kept.
        if not request.dry:
            keep_inventory(request.cluster)
            keep(request.cluster.name, site)
        return session

    setup = Setup(request, connect_and_keep, lambda _: None, claim)
    with view.watching(list(setup.report.hosts.values()), setup.step_names) as watch:
        setup.watch = watch
        selection.ssh.secrets.around_prompt = watch.aside
        try:
            return await setup.run()
        except asyncio.CancelledError:
            raise InterruptedRunError(
                f"interrupted: what is done stays done; the same command goes on from there\nlogs: {request.log_folder}"
            ) from None


def _outcome(request: Request, report: Report, training: TrainStage, options: SetupOptions) -> Outcome:
    steps = next(iter(report.hosts.values())).states
    lines = [view.summary(report, tuple(steps), dry=options.dry_run)]
    if not options.dry_run:
        lines += ["", *_next(request, report, training)]
    ray = None if training.ray.state is None else training.ray.state.as_dict()
    run = None if training.dispatched is None else training.dispatched.as_dict()
    return Outcome("\n".join(lines), report, request.cluster, ray, run)


def _next(request: Request, report: Report, training: TrainStage) -> list[str]:
    named = "" if request.cluster.name == inventory.DEFAULT else f" --cluster {request.cluster.name}"
    if report.failed:
        lines = [
            "Repair what is named above and run the same command again: it goes on from there.",
            f"Only what failed: the same with --retry (clusterkit setup{named} --retry)",
            f"Logs: {request.log_folder}",
        ]
        if len(report.failed) < len(report.hosts):
            lines.append(f"Without them: clusterkit setup{named} --exclude {' '.join(h.name for h in report.failed)}")
        return lines
    lines = []
    if training.ray.state is not None:
        from clusterkit.cli.ray_status import lines_of  # noqa: PLC0415

        lines += [*lines_of(training.ray.state), ""]
    if training.dispatched is not None:
        lines += [f"{training.dispatched.sentence}; its files: {training.dispatched.run.logs}", ""]
    lines.append(f"Next: clusterkit ray-status{named}    take it down: clusterkit down{named}")
    return lines


def keep_inventory(cluster: Cluster) -> None:
    """Keep the cluster under its name, so that later commands need no hosts."""
    if not inventory.path_of(cluster.name).exists() or inventory.load(cluster.name) != cluster:
        inventory.save(cluster)


def refuse_forgetting(cluster: Cluster) -> None:
    """Refuse a shorter list of hosts under a name that is kept.

    Raises:
        UserError: it names the hosts that would be forgotten.

    """
    if not inventory.path_of(cluster.name).exists():
        return
    if lost := {host.name for host in inventory.load(cluster.name).hosts} - {host.name for host in cluster.hosts}:
        raise UserError(
            f"the cluster '{cluster.name}' is kept with {', '.join(sorted(lost))}, which --hostnames leaves out.\n"
            f"For a part of it: --limit. For another cluster: --cluster NAME. To replace it: clusterkit init "
            f"{' '.join(host.name for host in cluster.hosts)} --cluster {cluster.name} --force"
        )


def _needs(cluster: Cluster, options: SetupOptions) -> Needs:
    needs = needs_of_preset(options.preset) if options.preset else Needs()
    if len(cluster.hosts) < needs.hosts:
        raise UserError(
            f"preset {options.preset} needs {needs.hosts} hosts; {len(cluster.hosts)} named: name more, or choose a "
            "smaller preset (clusterkit presets)"
        )
    return replace(needs, gpus_per_host=0) if options.gpus is False else needs


def _check(options: SetupOptions) -> None:
    for name, value, allowed in (
        ("--docker-source", options.site.docker_source, ("auto", "docker", "distribution")),
        ("--image-from", options.image_from, ("auto", "pull", "storage", "fanout")),
    ):
        if value not in allowed:
            raise UserError(f"{name} {value}: choose {', '.join(allowed[:-1])} or {allowed[-1]}")
    for name in (
        "docker_url",
        "nvidia_url",
        "apt_mirror",
        "pip_index_url",
        "torch_index",
        "hf_endpoint",
        "http_proxy",
        "https_proxy",
    ):
        value = getattr(options.site, name)
        if value and (urlsplit(value).scheme not in ("http", "https") or not urlsplit(value).hostname):
            raise UserError(f"--{name.replace('_', '-')} {value}: this is no URL; it begins with http:// or https://")
    shm_bytes(options.site.shm)


def _wish(cluster: Cluster, options: SetupOptions, bundle: Bundle | None) -> Wish:
    from clusterkit.bundle import HOST_FOLDER  # noqa: PLC0415

    return Wish(
        cluster=cluster,
        docker_source=options.site.docker_source,
        docker_url=options.site.docker_url,
        nvidia_url=options.site.nvidia_url,
        apt_mirror=options.site.apt_mirror,
        pip_index_url=options.site.pip_index_url,
        pip_find_links=options.site.pip_find_links,
        hf_endpoint=options.site.hf_endpoint,
        ca_bundle=_certificates(options.site.ca_bundle),
        http_proxy=options.site.http_proxy,
        https_proxy=options.site.https_proxy,
        no_proxy=options.site.no_proxy,
        bundle=HOST_FOLDER if bundle else "",
        force=options.force,
        image=options.site.image,
        gpus=options.gpus,
    )


def _image(options: SetupOptions, bundle: Bundle | None) -> ImageWish:
    reference = options.site.image
    if bundle is not None and not reference:
        reference = next(iter(bundle.manifest.images), "")
    return ImageWish(
        reference=reference,
        how=options.image_from,
        refresh=options.image_refresh,
        base=options.site.image_base,
        torch=options.image_torch,
        pip_find_links=options.site.pip_find_links,
        torch_index=options.site.torch_index,
        bundle=bundle,
    )


def _check_refresh(wish: ImageWish, selection: Selection) -> None:
    if not wish.refresh:
        return
    if not wish.reference or not is_tag(wish.reference):
        kind = (
            "an image that is built follows its recipe" if not wish.reference else f"{wish.reference} names one image"
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


def _preset(cluster: Cluster, options: SetupOptions) -> tuple[tuple[NodeAsset, ...], Order | None]:
    """What the preset needs on the storage, and the run to start."""
    if not options.preset:
        if options.model_path or options.dataset_path or options.task or options.settings:
            raise UserError("--model-path, --dataset-path, --task and --set belong to a preset: add --preset NAME")
        return (), None
    from clusterkit.resolve import resolve  # noqa: PLC0415

    wanted = resolve(options.preset, options.task, options.settings).config
    try:
        assets = needed(wanted, cluster, options.model_path, options.dataset_path)
    except Refused as refusal:
        raise UserError(f"{refusal.message}: {refusal.fix}") from refusal
    if not options.train:
        return assets, None
    if missing := missing_parts(wanted):
        raise UserError(
            f"preset {options.preset} cannot be trained by this version: it asks for {'; '.join(missing)}.\nTo make "
            "the hosts ready for it and fetch what it needs: add --no-train"
        )
    there = [*options.settings, *(asset.override for asset in assets)]
    resolved = resolve(options.preset, options.task, there)
    config = on_cluster(resolved.config, cluster, own_fileroot="fileroot" in resolved.settings)
    return assets, Order(cluster, config, resolved.trial_is_named, once=True)


def _bundle(options: SetupOptions) -> Bundle | None:
    if options.bundle is None:
        return None
    from clusterkit.bundle import load  # noqa: PLC0415

    return load(options.bundle.expanduser(), state_folder() / "bundles")


def _hub_token(options: SetupOptions) -> str:
    if options.hf_token_file is None:
        return os.environ.get(HF_TOKEN, "")
    try:
        return options.hf_token_file.expanduser().read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UserError(f"--hf-token-file {options.hf_token_file}: {error.strerror}") from error


def _proxies(site: Site) -> dict[str, str]:
    pairs = {"http_proxy": site.http_proxy, "https_proxy": site.https_proxy, "no_proxy": site.no_proxy}
    return {name: value for name, value in pairs.items() if value}
