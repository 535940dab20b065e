"""What `clusterkit setup` does with its options: check them, set up, save the inventory, return the outcome.

Which hosts failed is saved for `setup --retry`.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clusterkit.common.records import json_object
from clusterkit.hosts import inventory
from clusterkit.hosts.folders import state_folder, write_private
from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.assets.hub import Hub
from clusterkit.provision.cluster_lock import LockOwner, local_lock
from clusterkit.provision.images.needs import needs_of_image
from clusterkit.provision.ray.current import choose, current, option, ready_clusters
from clusterkit.provision.ray.model import shm_bytes
from clusterkit.provision.ray.state import ClusterState
from clusterkit.provision.ray.view import lines_of
from clusterkit.provision.site import (
    Site,
    passwords_in,
    proxies_of,
    resolve_secrets,
    save_site,
    site_before_ready,
    with_saved,
)
from clusterkit.setup import view
from clusterkit.setup.hostlog import new_log_folder
from clusterkit.setup.imagestage import ImageStage
from clusterkit.setup.model import Report
from clusterkit.setup.nextsteps import NextStep, next_steps
from clusterkit.setup.nextsteps import lines_of as next_lines
from clusterkit.setup.options import (
    bundle_of,
    check_refresh,
    check_values,
    desired_state,
    hub_token,
    image_of,
    needs_of,
    preset_of,
)
from clusterkit.setup.raystage import RayStage
from clusterkit.setup.setup import Request, Setup
from clusterkit.setup.storagestages import AssetStage, SharedStage
from clusterkit.setup.trainstage import TrainStage
from clusterkit.setup.typed import SetupOptions
from clusterkit.ssh.api import Session
from clusterkit.ssh.connection import connect
from clusterkit.ssh.selection import Selection
from clusterkit.ui.width import terminal_width
from trainer.errors import InterruptedRunError, UserError


@dataclass(frozen=True)
class SetupOutcome:
    """What the command prints, and its exit code."""

    text: str
    report: Report
    cluster: Cluster
    ray: dict[str, Any] | None = None
    training: dict[str, Any] | None = None
    following: tuple[str, ...] = ()  # commands that may come next

    @property
    def exit_code(self) -> int:
        """0: done; 1: failed; 3: partly done."""
        return self.report.exit_code

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "cluster": self.cluster.name,
            "exit_code": self.exit_code,
            **self.report.as_dict(),
            "ray": self.ray,
            "training": self.training,
            "next": list(self.following),
        }


def run_setup(selection: Selection, options: SetupOptions) -> SetupOutcome:
    """Set the selected hosts up.

    Raises:
        UserError: impossible options, fewer hosts than the preset needs, another cluster under the name, or another
            command that works on the cluster.
        InterruptedRunError: Ctrl-C; what is done stays done.
    """
    cluster = selection.cluster
    is_new = cluster.name not in ready_clusters()
    needs = needs_of(cluster, options)
    given, typed = resolve_secrets(options.site)
    options = replace(options, site=with_saved(cluster.name, given))
    check_values(options)
    assets, run = preset_of(cluster, options)
    bundle = bundle_of(options)
    image = ImageStage(image_of(options, bundle), None if run is None else needs_of_image(run.config))
    check_refresh(image.request, selection)
    token = hub_token(options)
    desired = desired_state(cluster, options, bundle)
    if not options.dry_run:
        refuse_dropped_hosts(cluster)
    ray = RayStage(image, options.privileged, options.recreate, shm_bytes(options.site.shm))
    training = TrainStage(run, ray)
    hub = Hub(image="", endpoint=options.site.hf_endpoint, token=token, environment=proxies_of(options.site))
    request = Request(
        cluster=cluster,
        hosts=selection.hosts,
        desired=desired,
        needs=needs,
        log_folder=new_log_folder(cluster.name, "setup"),
        dry=options.dry_run,
        secrets=(token, *passwords_in(options.site)),
        stages=(SharedStage(), image, AssetStage(assets, hub, image), ray, training),
        bundle=bundle,
        uploads=options.uploads,
        retries=options.retries,
    )
    with nullcontext() if options.dry_run else local_lock(cluster.name, "setup") as owner:
        report = asyncio.run(_run(request, selection, options.site, owner))
        if not options.dry_run:
            _save_failed(request, report)
    if typed:
        report.notes.append(
            f"{', '.join(typed)}: other users of this machine could see the password as it was typed. Next time say "
            "env:NAME or file:PATH in place of the address. It is kept with the cluster, readable for you alone."
        )
    return _outcome(request, report, training, options, is_new=is_new)


def only_failed(selection: Selection) -> Selection | None:
    """Keep the selected hosts that failed in their last set-up. Return None where no host of the cluster did.

    Raises:
        UserError: the cluster has had no set-up; or some failed, and --limit and --exclude leave none of them.
    """
    name = selection.cluster.name
    if not path_of(name).exists() and name not in ready_clusters():
        raise UserError(f"--retry: cluster {name} has had no set-up from this machine yet: leave --retry out")
    failed = failed_hosts(selection.cluster)
    hosts = tuple(host for host in selection.hosts if host.name in failed)
    if failed and not hosts:
        raise UserError(f"--retry: {', '.join(failed)} failed last time, and --limit and --exclude leave none of them.")
    return replace(selection, hosts=hosts) if failed else None


def nothing_failed(cluster: Cluster) -> SetupOutcome:
    """Return the outcome of `--retry` where no host failed last time."""
    text = f"nothing failed in the last set-up of cluster {cluster.name}: nothing to do"
    return SetupOutcome(text, Report({}, notes=[text]), cluster)


def _save_failed(request: Request, report: Report) -> None:
    try:
        save_failed(request.cluster, report)
    except OSError as error:
        report.notes.append(f"--retry will not know who failed: {error.filename}: {error.strerror}")


async def _run(request: Request, selection: Selection, site: Site, owner: LockOwner | None) -> Report:
    early = site_before_ready(request.cluster.name, site)

    async def connect_and_save(host: Host) -> Session:
        session = await connect(host, selection.ssh)
        # Save only after the first login, so that a mistyped key is not saved.
        if not request.dry:
            save_inventory(request.cluster)
            save_site(request.cluster.name, early)
        return session

    setup = Setup(request, connect_and_save, lambda _: None, owner)
    with view.show(list(setup.report.hosts.values()), setup.step_names) as watch:
        setup.watch = watch
        selection.ssh.secrets.around_prompt = watch.paused
        try:
            report = await setup.run()
        except asyncio.CancelledError:
            raise InterruptedRunError(
                f"interrupted: what is done stays done; the same command goes on from there\nlogs: {request.log_folder}"
            ) from None
    head = report.hosts.get(request.cluster.head_host.name)
    if not request.dry and head is not None and (head.failure is None or head.failure.step == TrainStage.name):
        save_site(request.cluster.name, site)
    return report


def _outcome(
    request: Request, report: Report, training: TrainStage, options: SetupOptions, *, is_new: bool
) -> SetupOutcome:
    steps = next(iter(report.hosts.values())).states
    lines, following = [view.summary(report, tuple(steps), dry=options.dry_run, width=terminal_width())], []
    if not options.dry_run and report.failed:
        lines += ["", *_repair(request, report)]
    elif not options.dry_run and training.ray.state is not None:
        chosen = make_current(request.cluster.name, is_new=is_new)
        state, memory = training.ray.state, min((gpu.memory for gpu in training.ray.gpus), default=0)
        following = next_steps(request.cluster, state, memory, options, training.submitted)
        lines += ["", *_ready(training, state, following), *([chosen] if chosen else [])]
    ray = None if training.ray.state is None else training.ray.state.as_dict()
    run = None if training.submitted is None else training.submitted.as_dict()
    return SetupOutcome("\n".join(lines), report, request.cluster, ray, run, tuple(step.command for step in following))


def _repair(request: Request, report: Report) -> list[str]:
    named = option(request.cluster.name)
    lines = [
        "Repair what is named above and run the same command again: it goes on from there.",
        f"Logs: {request.log_folder}",
    ]
    # Where no host let us in, the cluster is not kept, and no command without its hosts finds it.
    if inventory.path_of(request.cluster.name).exists():
        lines.insert(1, f"Only what failed: the same with --retry (clusterkit setup{named} --retry)")
    if len(report.failed) < len(report.hosts):
        lines.append(f"Without them: clusterkit setup{named} --exclude {' '.join(h.name for h in report.failed)}")
    return lines


def make_current(name: str, *, is_new: bool) -> str:
    """Make a new cluster the current one, as minikube and gcloud do; return a line about it.

    A known cluster changes no choice: the line is empty then.
    """
    with suppress(UserError):  # a damaged choice is replaced
        if not is_new and ((now := current()).name or now.here):
            return ""
    try:
        choose(name)
    except UserError as error:
        return str(error)
    return f"commands go to cluster {name} now (clusterkit use)"


def _ready(training: TrainStage, state: ClusterState, following: list[NextStep]) -> list[str]:
    lines = [*lines_of(state), ""]
    if training.submitted is not None:
        lines += [f"{training.submitted.sentence}; its files: {training.submitted.run.logs}", ""]
    return [*lines, *next_lines(following)]


def save_inventory(cluster: Cluster) -> None:
    """Save the cluster under its name, so that later commands need no list of hosts."""
    if not inventory.path_of(cluster.name).exists() or inventory.load(cluster.name) != cluster:
        inventory.save(cluster)


def refuse_dropped_hosts(cluster: Cluster) -> None:
    """Refuse a list of hosts that lacks some of the saved cluster. Raises UserError, which names the missing hosts."""
    if not inventory.path_of(cluster.name).exists():
        return
    if lost := {host.name for host in inventory.load(cluster.name).hosts} - {host.name for host in cluster.hosts}:
        raise UserError(
            f"the cluster '{cluster.name}' is kept with {', '.join(sorted(lost))}, which --hostnames leaves out.\n"
            f"For a part of it: --limit. For another cluster: --cluster NAME. To replace it: clusterkit init "
            f"{' '.join(host.name for host in cluster.hosts)} --cluster {cluster.name} --force"
        )


def path_of(cluster: str) -> Path:
    """Return the file with the list."""
    return state_folder() / cluster / "failed.json"


def failed_hosts(cluster: Cluster) -> tuple[str, ...]:
    """Return the hosts that failed in their last set-up, in the cluster's order. A damaged list counts as empty."""
    try:
        failed = (json_object(path_of(cluster.name).read_bytes()) or {}).get("failed")
    except OSError:
        return ()
    return tuple(host.name for host in cluster.hosts if isinstance(failed, list) and host.name in failed)


def save_failed(cluster: Cluster, report: Report) -> None:
    """Add the hosts that failed and remove those that are done. Hosts without a report stay as they were.

    Raises:
        OSError: the state folder cannot be written to.
    """
    failed = {host.name for host in report.failed} | (set(failed_hosts(cluster)) - report.hosts.keys())
    names = [host.name for host in cluster.hosts if host.name in failed]
    write_private(path_of(cluster.name), json.dumps({"failed": names}) + "\n")
