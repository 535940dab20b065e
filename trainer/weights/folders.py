"""Publishing through a folder: the policy as a Hugging Face checkpoint in the servers' dtype, which every server loads.

It works with every kind of server, on this host or on others that see the folder, and other ways fall back to it. The
folder is written before generation is interrupted, and complete before any server hears of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trainer.engines.base import EngineError, EngineGoneError
from trainer.errors import RunError
from trainer.files import disk_error, is_full, replace_tree, sync_tree, write_atomic
from trainer.train.learner import Learner
from trainer.train.model import save_description
from trainer.weights.publisher import Outlet, PublishStats, agree, may_come_back, measured, same_host, wait_together
from trainer.weights.source import WeightSource

SHARED_MEMORY = Path("/dev/shm")


class FolderPublisher:
    """Publisher over folders `root/v{version}`.

    Args:
        outlet: rank 0's way to the servers; None on other ranks.
        tokenizer: saved beside the weights.
        root: where folders go; this publisher's alone.
        keep: versions that stay, that which servers hold and those before it.
        bucket_bytes: bytes of weights that are in memory a second time while they are written.

    Raises:
        UserError: the trained tensors are not those that the servers were started with.
    """

    def __init__(
        self,
        learner: Learner,
        outlet: Outlet | None,
        tokenizer: Any,
        root: Path,
        keep: int = 2,
        bucket_bytes: int = 1 << 30,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.world = learner.world
        self.source = WeightSource(learner, bucket_bytes, dtype)
        self.root, self.keep = root, keep
        self._lm, self._tokenizer, self._outlet = learner.policy.lm, tokenizer, outlet
        agree(self.world, caught(lambda: outlet.check(self.source.shapes)) if outlet else None)

    def publish(self, version: int, *, folder: bool = False) -> PublishStats:  # noqa: ARG002 (there always is one)
        """See Publisher."""
        began = time.perf_counter()
        written = self.write(version)
        prepared = time.perf_counter() - began
        stats = PublishStats(version, "disk", self.nbytes, prepared)
        outlet = self._outlet
        update = outlet.submit(_hand_over(outlet, written, version)) if outlet is not None else None
        wait_together(self.world, update)
        if outlet is not None and update is not None:
            agree(self.world, update.exception())
            stats = measured(outlet, stats)
            self.used(written)
        else:
            agree(self.world, None)
        return self.world.broadcast(replace(stats, total_seconds=time.perf_counter() - began))

    @property
    def nbytes(self) -> int:
        """Bytes of one version."""
        return self.source.nbytes

    def offer(self) -> None:
        """See Publisher: every version is in a folder."""

    def write(self, version: int) -> Path:
        """Write the present weights as this version and return their folder, complete and durable. Collective.

        Raises:
            RunError: it cannot be written; nothing is left of it.
        """
        folder = self.root / f"v{version}"
        temporary = folder.with_name(folder.name + ".tmp")
        main = self.world.is_main
        problem = caught(lambda: fresh(temporary)) if main else None
        flat = self.source.buffer() if main else None
        files: dict[str, str] = {}
        self.source.open()
        for number, bucket in enumerate(self.source.buckets):
            self.source.fill(bucket, flat)
            if flat is None or problem is not None:
                continue  # the other ranks must not wait for this one
            one = len(self.source.buckets) == 1
            file = (
                "model.safetensors" if one else f"model-{number + 1:05d}-of-{len(self.source.buckets):05d}.safetensors"
            )
            host = flat[: bucket.nbytes].cpu()
            tensors = {piece.name: view for piece, view in zip(bucket.pieces, bucket.views(host), strict=True)}
            problem = caught(partial(save_file, tensors, temporary / file, metadata={"format": "pt"}))
            files.update(dict.fromkeys(tensors, file))
        self.source.close()
        if main and problem is None:
            problem = caught(lambda: self._finish(temporary, folder, files))
        if problem is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        agree(self.world, explained(problem, folder))
        return folder

    def used(self, folder: Path) -> None:
        """Servers hold this version now: older ones beyond `keep` go, and what a killed attempt left of later ones.

        These would count as the newest, and take the places of versions in use. Rank 0.
        """
        found = {int(path.name[1:]): path for path in self.root.glob("v*") if path.name[1:].isdigit()}
        stay = sorted((version for version in found if version <= int(folder.name[1:])), reverse=True)[: self.keep]
        for version in found.keys() - stay:
            shutil.rmtree(found[version], ignore_errors=True)

    def close(self) -> None:
        """Remove all versions. No server may join afterwards."""
        if self.world.is_main:
            shutil.rmtree(self.root, ignore_errors=True)

    def _finish(self, temporary: Path, folder: Path, files: dict[str, str]) -> None:
        save_description(self._lm, self.source.dtype, self._tokenizer, temporary)
        if len(set(files.values())) > 1:
            index = {"metadata": {"total_size": self.source.nbytes}, "weight_map": files}
            write_atomic(temporary / "model.safetensors.index.json", json.dumps(index))
        sync_tree(temporary)
        replace_tree(temporary, folder)


def offer(folders: FolderPublisher, outlet: Outlet | None, version: int) -> None:
    """Write the present weights for servers that join, where the engine has no folder of this version. Collective."""
    needs_folder = outlet is not None and not outlet.engine.has_folder
    if not folders.world.broadcast(needs_folder):
        return
    written = folders.write(version)
    problem: Exception | None = None
    if outlet is not None:
        problem = caught(lambda: outlet.submit(outlet.engine.offer(written, version)).result())
        folders.used(written)
    agree(folders.world, problem)


async def _hand_over(outlet: Outlet, folder: Path, version: int) -> None:
    """Have the servers load a folder; where none is left, wait for some to come back, which load it as they join."""
    engine = outlet.engine
    while True:
        if engine.pool.usable():
            try:
                await engine.update_from_folder(folder, version)
                return
            except EngineGoneError as error:
                if not may_come_back(outlet, error):
                    raise
        try:
            await engine.offer(folder, version)
        except EngineError:
            if not engine.pool.usable():
                raise
            continue  # one came back meanwhile, with the weights of before
        await engine.pool.enough(outlet.stop)
        if not outlet.stop():
            engine.pool.choose("")  # raises when none came: says what became of them
        return


def choose_root(named: str, run: Path, outlet: Outlet | None, nbytes: int, keep: int = 2) -> Path:
    """Where versions go: `named` if given, memory where all servers share this host and it has room, else the run.

    nbytes: of one version. On ranks without an outlet the answer does not matter.
    """
    name = f"clusterkit-{os.getuid()}-{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:12]}"
    if named:
        return Path(named) / name
    if outlet is not None and same_host(outlet.engine) and SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
        root = SHARED_MEMORY / name
        shutil.rmtree(root, ignore_errors=True)  # what a killed attempt left
        if shutil.disk_usage(SHARED_MEMORY).free > (keep + 2) * nbytes:
            return root
    return run / "weights"


def caught(work: Callable[[], object]) -> Exception | None:
    """Call `work`; returns its exception, for the other ranks to hear of."""
    try:
        work()
    except Exception as error:
        return error
    return None


def fresh(folder: Path) -> None:
    """Make an empty folder."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def explained(problem: Exception | None, folder: Path) -> Exception | None:
    """The same problem, in words where it is the disk's."""
    system = disk_error(problem) if problem is not None else None
    if system is None:
        return problem
    reason, remedy = system.strerror or str(system), "make the folder writable, or name another one"
    if is_full(system):
        reason, remedy = "no space left", "free some, or name another folder"
    return RunError(f"cannot write weights for the servers to {folder}: {reason}; {remedy} (weights.folder)")
