"""All scripts that clusterkit runs on hosts as root, rendered with sample data: for shellcheck and tests of faults."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clusterkit.backends.ray import files as run_files
from clusterkit.backends.ray import overviews as run_overviews
from clusterkit.backends.ray import storage as run_storage
from clusterkit.backends.ray.head import Head
from clusterkit.evaluate import job, remote
from clusterkit.evaluate.request import SubmittedEval
from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision import cluster_lock
from clusterkit.provision.assets import upload, view
from clusterkit.provision.assets.hub import Hub, fetch_action
from clusterkit.provision.assets.model import NodeAsset, Origin
from clusterkit.provision.bundle import folder as bundle
from clusterkit.provision.checks import nccl, nccl_kept, storage
from clusterkit.provision.facts.model import Container, Docker, Facts
from clusterkit.provision.facts.probe import ProbeRequest, probe_script
from clusterkit.provision.images import archive, identity, lock, pull, relay
from clusterkit.provision.images.archive import Archive
from clusterkit.provision.images.build import _script as build_script
from clusterkit.provision.images.context import Recipe
from clusterkit.provision.images.identity import Image
from clusterkit.provision.ray import observe, plan, remove
from clusterkit.provision.ray.model import LEASE_FILE, RaySettings
from clusterkit.provision.steps.all import STEPS
from clusterkit.provision.steps.daemon import DAEMON_JSON
from clusterkit.provision.steps.shell import sha
from clusterkit.provision.steps.step import DesiredState, Refused
from clusterkit.runs.directory import RunDirectory
from clusterkit.serving import engines
from clusterkit.ssh import session as ssh_session
from clusterkit.ssh.api import Result
from clusterkit.ssh.root import PROBE
from clusterkit.ssh.shell import STRICT
from trainer.launch.nccl_settings import KeptSettings

CASES = Path(__file__).parent / "cases" / "steps"
ID = "0123456789abcdef" * 4
SAMPLE = "sample"


@dataclass(frozen=True)
class HostScript:
    """A script as it runs. files: what lies on the host before it, bytes as Latin-1. step: an action of a step.

    up: whether Docker runs. only_read: not to be run here."""

    name: str
    script: str
    stdin: bytes = b""
    files: dict[str, str] = field(default_factory=dict)
    step: bool = False
    up: bool = True
    bash: bool = False
    only_read: bool = False


class Recorder:
    """Stands for a session: keeps what it is given to run, and says that all went well."""

    def __init__(self) -> None:
        self.host = Host(name="node1")
        self.seen: list[tuple[str, bytes]] = []

    async def run(self, script: str, *, root: bool = False, stdin: bytes = b"", **_: Any) -> Result:
        """Keep it."""
        self.seen.append((STRICT + script if root else script, stdin))
        return Result(0, "", "", 0.0)

    async def put(self, *_: Any, **__: Any) -> None:
        """Writing files has a script of its own."""

    @asynccontextmanager
    async def stream(self, script: str, **_: Any) -> AsyncIterator[Any]:
        """Keep it."""
        self.seen.append((STRICT + script, b""))
        raise StopAsyncIteration
        yield


def recorded(call: Callable[[Any], Awaitable[Any]]) -> list[tuple[str, bytes]]:
    """Scripts that a function has run, as far as it comes with empty answers."""
    session = Recorder()

    async def run() -> None:
        await call(session)

    try:
        asyncio.run(run())
    except Exception:
        # An empty answer is none that everybody can do with.
        if not session.seen:
            raise
    return session.seen


def all_scripts() -> list[HostScript]:
    """Every script, each shape once."""
    shapes: dict[str, HostScript] = {}
    for script in (*_steps(), *_ray(), *_images(), *_storage(), *_others()):
        shape = re.sub(r"\b[0-9a-f]{8,64}\b|[\w.+=-]+-[\w.+=-]+", "-", script.script)
        shapes.setdefault(shape, script)
    return list(shapes.values())


def _steps() -> list[HostScript]:
    from test_steps import CASES as PATHS  # noqa: PLC0415 (only where tests/unit is in the path)
    from test_steps import desired_state, facts_of, load  # noqa: PLC0415

    found = []
    for path in PATHS:
        case = load(path)
        if "refused" in case:
            continue
        facts, wish = facts_of(case), desired_state(case)
        texts = dict(facts.apt_sources)
        if facts.docker.daemon_json is not None:
            texts[DAEMON_JSON] = facts.docker.daemon_json
            sums = {**facts.files, DAEMON_JSON: sha(facts.docker.daemon_json.encode())}
            facts = facts.model_copy(update={"files": sums})
            texts[f"{DAEMON_JSON}.before-{sums[DAEMON_JSON][:12]}"] = facts.docker.daemon_json or ""
        texts |= {name: SAMPLE for name in {*facts.files, *facts.modes} if name != DAEMON_JSON}
        texts |= _bundle(wish)
        found += [
            HostScript(
                f"{path.parent.name}/{path.stem}: {action.title}",
                STRICT + action.script,
                action.stdin,
                texts,
                step=True,
                up="without_systemd" not in path.stem and not action.title.startswith("start Docker"),
            )
            for step in STEPS
            for action in _planned(step, facts, wish)
        ]
    return found


def _planned(step: Any, facts: Facts, wish: DesiredState) -> Any:
    with suppress(Refused):
        return step.plan(facts, wish)
    return ()


def _bundle(wish: DesiredState) -> dict[str, str]:
    if not wish.bundle:
        return {}
    names = {path.parent.name for path in CASES.glob("*/*.json")}
    systems = json.loads((CASES / "systems.json").read_text())
    return {
        f"{wish.bundle}/packages/{system}/{file}": "docker-ce\n"
        for system in systems
        for file in ("Packages", "repodata/repomd.xml", *(f"{name}.names" for name in (*names, "nvidia")))
    }


def _ray() -> list[HostScript]:
    cluster = Cluster(name="lab", hosts=(Host(name="node1"),))
    settings = RaySettings(cluster, "runtime:1", "10.0.0.1", token="a" * 64)
    own = (Container(id=ID, name="clusterkit-lab-head", state="exited", labels={"clusterkit.cluster": "lab"}),)
    facts = Facts(
        memory=1 << 36,
        route_to_head="10.0.0.1",
        addresses={"eth1": ("10.0.0.1",)},
        docker=Docker(server="29.1.0", images={"runtime:1": "sha256:aaaa"}),
    )
    (start,) = plan.plan_node(cluster.hosts[0], facts, settings)
    left = remove.Leftovers("node1", (observe.ContainerState(ID, "x", "head", "running", 0, "", "", {}),), files=True)
    folder = "/var/lib/clusterkit/lab"
    run = [
        ("ray: start", start.script, start.stdin),
        ("ray: drop a container", plan._drop(own, settings), b""),
        ("ray: remove", remove._script("lab", left), b""),
        ("ray: containers", observe._containers_script("lab", inside=False), b""),
        ("ray: containers and inside", observe._containers_script("lab", inside=True), b"program"),
    ]
    found = [HostScript(name, STRICT + script, stdin, {f"{folder}/ray_token": SAMPLE}) for name, script, stdin in run]
    for name, call in (
        ("ray: ask", lambda session: observe.ask_ray(session, "lab")),
        ("ray: leftovers", lambda session: session.run(f"test -e {remove.node_folder('lab')}", root=True)),
    ):
        files = {f"{remove.node_folder('lab')}/ray_token": SAMPLE}
        found += [HostScript(name, script, stdin, files) for script, stdin in recorded(call)]
    return found


def _images() -> list[HostScript]:
    image = Image("runtime:1", "sha256:" + "1" * 64, size=5)
    stored = Archive(
        f"/storage/images/{'1' * 64}.tar.gz", "runtime:1", image.image_id, "", 5, "gzip", 7, sha(b"sample\n")
    )
    files = {stored.path: "sample\n", f"/storage/images/{'1' * 64}.json": "{}"}
    compressed = {stored.path: _gzipped().decode("latin-1")}
    small = replace(stored, size=len(_gzipped()))
    found = []
    for name, call in (
        ("images: archives", lambda session: archive.archives(session, "/storage/images")),
        ("images: room", lambda session: archive.has_room(session, "/storage", image)),
        ("images: whole", lambda session: archive.is_whole(session, stored, timeout=1)),
        ("images: write", lambda session: archive.write(session, image, "/storage/images", zstd=False, timeout=1)),
        ("images: discard", lambda session: archive.discard(session, stored)),
        ("images: resolve", lambda session: pull.resolve(session, "team/app:1")),
        ("images: inspect", lambda session: identity.inspect(session, "runtime:1")),
        ("images: read the lock", lambda session: lock.read_shared(session, "/storage")),
    ):
        more = {"/storage/clusterkit/image.lock.json": "{}"} | files
        found += [HostScript(name, script, stdin, more) for script, stdin in recorded(call)]
    recipe = build_script(Recipe("cpu", "", True), {"APT_MIRROR": "http://mirror"}, {"http_proxy": "http://proxy"})
    return [
        *found,
        HostScript("images: pull", STRICT + pull._script("team/app@sha256:" + "1" * 64)),
        HostScript("images: build", STRICT + recipe, b"context"),
        HostScript("images: send", STRICT + relay.save_script(image)),
        HostScript("images: take", STRICT + relay.LOAD, _gzipped()),
        HostScript("images: load", recorded(lambda s: archive.load(s, small, timeout=1))[0][0], b"", compressed),
    ]


def _gzipped() -> bytes:
    import gzip  # noqa: PLC0415

    return gzip.compress(b"image", mtime=0)


def _storage() -> list[HostScript]:
    cluster = Cluster(name="lab", hosts=(Host(name="node1"),))
    run = RunDirectory(Path("/storage/ray/experiments"), "user", "tiny", "run1")
    logs = str(run.logs)
    files = {
        f"{logs}/config.yaml": "a: 1\n",
        f"{logs}/metrics.jsonl": "{}\n",
        f"{logs}/attempt_1/console.log": "line\n",
        f"{run.recover}/LATEST": "1\n",
        "/storage/evals/one/results.json": "{}",
        "/storage/evals/records/a/samples.jsonl": "",
        "/storage/evals/logs/a.yaml": "",
        "/storage/servers/a.json": "{}",
        "/storage/checkpoints/epoch1step1globalstep1/config.json": "{}",
    }

    def head(session: Any) -> Head:
        return Head(session, cluster, "")

    submitted = SubmittedEval("a", "/storage/evals", "/storage/evals/logs/a.log", "")
    found = []
    for name, call in (
        ("runs: records", lambda s: run_storage.fetch_records(s, str(run.fileroot), "user", "tiny", Path("/nowhere"))),
        (
            "runs: overviews",
            lambda s: run_overviews.fetch_overviews(s, str(run.fileroot), "user", Path("/nowhere")),
        ),
        ("runs: newest", lambda s: run_storage.list_runs(s, str(run.fileroot), "user")),
        ("runs: read", lambda s: run_storage.read_from(s, run.config, 1)),
        ("runs: folders", lambda s: run_storage.fetch_folders(s, "/storage/evals", ["one"], Path("/nowhere"))),
        ("runs: size", lambda s: run_storage.size_of(s, run.metrics)),
        ("runs: attempts", lambda s: run_storage.newest_attempt(s, run)),
        ("runs: listing", lambda s: run_files.listing(head(s), run)),
        ("evaluation: results", lambda s: job.newest_results(head(s), "/storage/evals")),
        ("evaluation: refused", lambda s: job.remove_refused(head(s), submitted)),
        ("evaluation: checkpoint", lambda s: remote._checkpoint_in(head(s), "/storage/checkpoints")),
        ("serving: servers", lambda s: engines.remote_servers(head(s), Path("/storage/servers"))),
    ):
        found += [HostScript(name, script, stdin, files) for script, stdin in recorded(call)]
    ends = STRICT + run_overviews._ends(str(run.fileroot), "user")
    found.append(HostScript("runs: ends of records", ends, b"", files))
    code = recorded(lambda s: run_storage.put_code(s, cluster))
    asset = NodeAsset("model", "small", "/storage/models/small", Origin.CACHE)
    staging = upload._staging(asset)
    present = {f"{staging}/config.json": SAMPLE}
    there_already = {"/storage/models/small/config.json": SAMPLE, "/storage/models/small/manifest.json": "{}"}
    hub = fetch_action(asset, cluster, Hub("runtime:1", token="secret"))
    return [
        *found,
        *(HostScript("runs: code", script, stdin, {"/storage/codes/.keep": ""}) for script, stdin in code),
        HostScript("files: put", ssh_session._put_script("/storage/file", 4, 0o644), b"text"),
        HostScript("files: publish", STRICT + upload._publish(asset.folder, staging, ["config.json"]), b"{}", present),
        HostScript(
            "files: publish into a folder",
            STRICT + upload._publish(asset.folder, staging, ["config.json"]),
            b"{}",
            present | there_already,
        ),
        *(
            HostScript("files: block", script, stdin, present)
            for script, stdin in recorded(
                lambda s: upload._send(s, Path(__file__), f"{staging}/a", 10**6, 0, lambda _: None)
            )
        ),
        *(
            HostScript("files: sizes", script, stdin, present)
            for script, stdin in recorded(lambda s: upload._sizes(s, staging))
        ),
        *(
            HostScript("assets: look", script, b"", there_already)
            for script, _ in recorded(lambda s: view.look(s, asset))
        ),
        HostScript("assets: download", STRICT + hub.script, hub.stdin),
        HostScript(
            "bundle: present",
            STRICT
            + bundle._present_script({"a/b": bundle.BundleFile(size=6, sha256=sha(SAMPLE.encode()))}, "/var/bundle"),
            b"",
            {"/var/bundle/a/b": SAMPLE},
        ),
    ]


def _others() -> list[HostScript]:
    probe = storage._Probe("/storage", None, True, 0.1)
    write = recorded(lambda s: probe.write([s], storage.StorageReport()))
    clean = recorded(lambda s: probe.clean_up([s]))
    files = {f"{probe.mine}/nonce-0": "a" * 32}
    mine = cluster_lock.LockOwner("lab", "setup", "ab-12", "me", 1, "now")
    lease = {f"{remove.node_folder('lab')}/{LEASE_FILE}": f"{mine.identity}\n"}
    return [
        *(HostScript("check: write", script, b"", {"/storage/.keep": ""}) for script, _ in write),
        *(HostScript("check: clean up", script, b"", files) for script, _ in clean),
        HostScript("check: all-reduce", nccl.rank_script(0, 2, 2, "10.0.0.1"), bash=True),
        HostScript("check: keep NCCL's settings", nccl_kept.keep_script(KeptSettings({"NCCL_IB_DISABLE": "1"}))),
        HostScript("lease: take", STRICT + cluster_lock._take_script(mine, "", renew=False), b"lease", lease),
        HostScript("lease: release", STRICT + cluster_lock._release_script(mine), b"", lease),
        HostScript("ssh: end a command", ssh_session._kill_script(99), only_read=True),
        HostScript("ssh: how to be root", PROBE, only_read=True),
        HostScript("probe", probe_script(ProbeRequest(packages=("dash",), files=("/etc/fstab",)))),
    ]
