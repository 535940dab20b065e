"""Models, checkpoints and data for the storage of a cluster, brought there where they are missing."""

from __future__ import annotations

import hashlib
import os
import shlex
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath

from clusterkit.backends.base import Say, StoredInput
from clusterkit.backends.ray.files import any_exists, run_checked
from clusterkit.backends.ray.head import Head
from clusterkit.provision.assets.hub import Hub
from clusterkit.provision.assets.model import JUDGE, NodeAsset, Origin
from clusterkit.provision.assets.provide import provide
from clusterkit.provision.assets.upload import local_files
from clusterkit.provision.assets.view import asset_problem, look
from clusterkit.provision.cluster_lock import local_lock, remote_lease
from clusterkit.provision.images import lock
from clusterkit.provision.site import HF_TOKEN, Site, proxies_of, with_saved
from clusterkit.provision.steps.step import Action, Refused
from evaluation.suites import MEMORY, PROBLEMS
from evaluation.suites.hqa import official_places
from evaluation.suites.memory import find_texts, text_places
from evaluation.suites.problems import find_problems, places_of
from trainer.assets import cache_root
from trainer.errors import RunError, UserError
from trainer.tasks.hotpotqa_data import DOCUMENTS, QUESTIONS, find_file, is_prepared

OFFICIAL = "ruler_hqa_official"
HOTPOTQA = ("ruler_hqa", "ruler_qa")
FILES = (".jsonl", ".jsonl.gz", ".json")
TELL_SECONDS = 5.0
_ENDS = ("", ".gz")


@dataclass
class InputStager:
    """Brings to the storage what a run or an evaluation needs of it: nothing is changed before `bring`."""

    head: Head
    say: Say
    output: str  # folder of the answers on the storage
    data: str = ""  # --data-path as typed
    own: Path | None = None  # a folder or file of this machine that the run was trained on, which is looked in as well
    _to_copy: dict[str, Path] = field(default_factory=dict)
    _missing: dict[str, Callable[[], Awaitable[None]]] = field(default_factory=dict)  # by place there

    async def bring(self) -> None:
        """Download or copy all that was found to be missing. Raises as `provide`."""
        for one in self._missing.values():
            await one()

    # -- models and whole data sets -----------------------------------------------------------------------------------

    async def asset(self, asset: NodeAsset) -> str:
        """The folder on the storage of a model or data set, which `bring` puts there where it is missing.

        A folder of this machine whose name has another content there gets a name of its own.

        Raises:
            UserError: it cannot be had. HostError: the storage cannot be looked at.
        """
        if asset.origin is Origin.UPLOAD:
            return await self._upload(asset)
        problem = asset_problem(asset, await look(self.head.session, asset))
        if not problem:
            return asset.folder
        if asset.origin is Origin.HOST:
            raise UserError(f"{problem}: name a folder that the hosts have, or one of this machine")
        self._missing[asset.folder] = partial(self.provide, asset)
        return asset.folder

    async def _upload(self, asset: NodeAsset) -> str:
        try:
            files = local_files(Path(asset.source))
        except Refused as refusal:
            raise UserError(f"{refusal.message}: {refusal.fix}") from refusal
        view = await look(self.head.session, asset)
        if view.exists and (view.manifest is None or view.manifest["files"] != files):
            content = hashlib.sha256("".join(f"{name} {one['sha256']}\n" for name, one in files.items()).encode())
            name = f"{asset.name}-{content.hexdigest()[:8]}"
            asset = replace(asset, name=name, folder=f"{asset.folder.rpartition('/')[0]}/{name}")
        self._missing[asset.folder] = partial(self.provide, asset)
        return asset.folder

    async def provide(self, asset: NodeAsset) -> None:
        """Download or copy it to its folder.

        Raises:
            UserError: a folder of the user's stands in the way. RunError, HostError: the download or copy failed.
        """
        remote = asset.origin is Origin.HUB
        self.say(f"{'downloading' if remote else 'copying'} {asset.kind} {asset.source} to {asset.folder}")
        hub = await self._hub() if remote else Hub(image="")
        try:
            session, cluster = self.head.session, self.head.cluster
            await provide(
                session, asset, cluster, hub, self._apply, say=self.say, on_bytes=self._upload_report(asset.name)
            )
        except Refused as refusal:
            raise UserError(f"{refusal.message}: {refusal.fix}") from refusal

    def _upload_report(self, name: str) -> Callable[[int, int], None]:
        """Tells every few seconds how much of an upload is there."""
        last = time.monotonic()

        def report(done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last >= TELL_SECONDS:
                last = time.monotonic()
                self.say(f"{name}: {done / max(total, 1):.0%} of {total / 1e9:.1f} GB")

        return report

    async def _hub(self) -> Hub:
        """How the head reaches the hub: from within its runtime image, as `clusterkit setup` was told."""
        cluster = self.head.cluster
        locked = await lock.read_shared(self.head.session, cluster.storage)
        if locked is None:
            raise UserError(f"cluster {cluster.name} has no runtime image to download with: run clusterkit setup again")
        site = with_saved(cluster.name, Site())
        token = os.environ.get(HF_TOKEN, "")
        return Hub(locked.reference, site.hf_endpoint, token, environment=proxies_of(site))

    async def _apply(self, actions: Sequence[Action]) -> None:
        for action in actions:
            problem = ""
            for _ in range(action.retries + 1):
                result = await self.head.session.run(
                    action.script, root=True, stdin=action.stdin, timeout=action.timeout
                )
                if result.ok:
                    break
                problem = " ".join(result.stderr.strip().splitlines()[-2:]) or f"exit code {result.exit_code}"
            else:
                raise RunError(f"{action.title} failed on {self.head.session.host.name}: {problem}")

    # -- data by name -------------------------------------------------------------------------------------------------

    async def suite_data(self, name: str) -> None:
        """Have `bring` put the data of a suite there: of a folder that was named here, else what is there, else ours.

        Raises:
            UserError: they are in neither place. HostError: the storage cannot be looked at.
        """
        base, _, size = name.partition("@")
        if base in PROBLEMS:
            files = {f"{base}/test.jsonl{_end(p)}": p for p in (find_problems(base, self._local_folders), None) if p}
            await self._require_data(base, files, _packed(places_of(base)), asset=base)
        elif base in HOTPOTQA:
            shapes = [f"{part}{QUESTIONS}" for part in ("hotpotqa/", "hotpotqa/test/", *(("",) if self.data else ()))]
            await self._require_data("hotpotqa", self._hotpotqa(), _packed(shapes), asset="hotpotqa")
        elif base == OFFICIAL:
            shapes = official_places(int(size) if size.isdigit() else 0)
            found = next(
                (root / shape for root in self._local_folders for shape in shapes if (root / shape).is_file()), None
            )
            await self._require_data(name, {found.name: found} if found else {}, shapes)
        elif base == MEMORY:
            found = find_texts(self._local_folders)
            await self._require_data(name, {f"{MEMORY}/{found.name}": found} if found else {}, text_places())

    def file(self, path: Path) -> str:
        """Where `bring` copies a file of this machine to: beside the answers, by a name that its content has a part in.

        Raises:
            UserError: there is no such file.
        """
        source = next((file for file in (path / "test.jsonl", path / "test.jsonl.gz") if file.is_file()), path)
        if not source.is_file():
            raise UserError(
                f"{path}: there is no such file on this machine: name one, or a file on the cluster's storage"
            )
        folder = f"{self.output}/data/{_digest([source])}/{source.absolute().parent.name}"
        self._missing[f"{folder}/{source.name}"] = partial(self._put, {source.name: source}, folder)
        return f"{folder}/{source.name}"

    def data_path(self) -> str:
        """--data-path there, to which `bring` copies all that was named. Raises UserError: that lacks some of it."""
        if not self._to_copy:
            return self.data if self._is_on_storage(self.data) else ""
        if self._is_on_storage(self.data):
            named = ", ".join(map(str, self._to_copy.values()))
            raise UserError(
                f"--data-path {self.data} lacks what this machine has ({named}): copy that there, or leave it out"
            )
        folder = f"{self.output}/data/{_digest(self._to_copy.values())}"
        self._missing[folder] = partial(self._put, self._to_copy, folder)
        return folder

    async def _require_data(self, name: str, found: dict[str, Path], shapes: Sequence[str], asset: str = "") -> None:
        """Take the files of this machine, unless the cluster has its own and no folder here was named.

        Args:
            name: of the suite.
            found: files of this machine by their places below a folder of data.
            shapes: places that count on the cluster.
            asset: its name in the catalogue, where it is one.
        """
        typed = bool(self.data) and not self._is_on_storage(self.data)
        folder = Path(self.data).expanduser().absolute()
        if found and typed and all(path.is_relative_to(folder) for path in found.values()):
            self._to_copy |= found
            return
        roots = [*([self.data.rstrip("/")] if self._is_on_storage(self.data) else []), self._datasets]
        if await any_exists(self.head, (f"{root}/{shape}" for root in roots for shape in shapes)):
            return
        if found:
            self._to_copy |= found
        elif asset:
            await self.asset(NodeAsset("dataset", asset, f"{self._datasets}/{asset}", Origin.CACHE, asset))
        else:
            looked = ", ".join([*roots, *map(str, self._local_folders)])
            raise UserError(
                f"no data of {name} on the cluster or on this machine (looked for {', '.join(shapes[:2])} and the like "
                f"in {looked}): name a folder that has them with --data-path"
            )

    @property
    def _datasets(self) -> str:
        return f"{self.head.cluster.storage}/datasets"

    @property
    def _local_folders(self) -> list[Path]:
        """Folders of this machine that are looked in."""
        typed = [] if self._is_on_storage(self.data) else [self.data]
        chosen = [*typed, os.environ.get("CLUSTERKIT_DATA", "")]
        folders = [Path(folder).expanduser().absolute() for folder in chosen if folder]
        return [*folders, *([self.own.absolute()] if self.own else []), cache_root("")]

    def _is_on_storage(self, path: str) -> bool:
        return path.startswith(f"{self.head.cluster.storage}/")

    def _hotpotqa(self) -> dict[str, Path]:
        for root in self._local_folders:
            for folder in (root / "hotpotqa", root):
                if is_prepared(folder):
                    files = [find_file(folder / split, name) for split in ("train", "dev", "test") for name in _PAIR]
                    return {f"hotpotqa/{file.relative_to(folder)}": file for file in files}
                found = [
                    next((folder / f"{n}{e}" for e in _ENDS if (folder / f"{n}{e}").is_file()), None) for n in _PAIR
                ]
                if all(found):
                    return {f"hotpotqa/{path.name}": path for path in found if path}
        return {}

    async def _put(self, files: dict[str, Path], folder: str) -> None:
        """Copy files of this machine, each unless it is there: the folder's name holds their content."""
        for name, source in files.items():
            target = f"{folder}/{name}"
            if not await any_exists(self.head, [target]):
                self.say(f"copying {source} to {target}")
                await run_checked(self.head, f"umask 022; mkdir -p {shlex.quote(str(PurePosixPath(target).parent))}")
                await self.head.session.put(source, target, root=True)


async def stored_inputs(head: Head, assets: Sequence[NodeAsset]) -> list[StoredInput]:
    """How the storage has the models and data sets of a run; `have_assets` brings what is missing."""
    found = []
    for asset, problem in await _problems(head, assets):
        if not problem:
            found.append(StoredInput(f"{asset.kind} {asset.folder} is there"))
        elif asset.origin is Origin.HOST:
            found.append(StoredInput(f"{asset.kind}: {problem}", _refusal(asset, problem)))
        else:
            how = "would be downloaded" if asset.origin is Origin.HUB else "would be copied from this machine"
            found.append(StoredInput(f"{asset.kind} {asset.source} {how}: {problem}"))
    return found


async def _problems(head: Head, assets: Sequence[NodeAsset]) -> list[tuple[NodeAsset, str]]:
    """The models and data sets that a run itself reads, and why each cannot be used as it is; empty where it can."""
    # The model of a judge is for whoever serves it; that may be another machine.
    own = [asset for asset in assets if asset.setting != JUDGE]
    return [(asset, asset_problem(asset, await look(head.session, asset))) for asset in own]


def _refusal(asset: NodeAsset, problem: str) -> str:
    return f"{asset.kind} {asset.name} is not on the cluster: {problem}"


async def have_assets(head: Head, assets: Sequence[NodeAsset], say: Callable[[str], None]) -> None:
    """Have all models and data sets of a run on the storage, except the model of its judge.

    Raises:
        UserError: one cannot be had, or somebody else sets the cluster up. RunError, HostError: a download or a copy
            failed.
    """
    missing = []
    for asset, problem in await _problems(head, assets):
        if problem and asset.origin is Origin.HOST:
            raise UserError(_refusal(asset, problem))
        if problem:
            missing.append(asset)
    if not missing:
        return
    # A download ends the one that is under way: one command at a time, as with a set-up, which downloads the same.
    with local_lock(head.cluster.name, "train") as owner:
        async with remote_lease(owner, [head.session]) as refused:
            for error in refused.values():
                raise error
            for asset in missing:
                await InputStager(head, say, "").provide(asset)


_PAIR = (QUESTIONS, DOCUMENTS)


def _digest(files: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()[:12]


def _packed(shapes: Iterable[str]) -> list[str]:
    return [f"{shape}{end}" for shape in shapes for end in _ENDS]


def _end(path: Path) -> str:
    return ".gz" if path.suffix == ".gz" else ""
