"""Recover checkpoints: two slots, written in turn, each complete or absent, and a pointer to the newer one.

    recover/USER/EXPERIMENT/TRIAL/
      slot-a/  slot-b/    DCP shards, state.json, MANIFEST.json (size and SHA-256 of every file)
      LATEST              name of the slot to go on from

A slot is written under a temporary name, synced and renamed; only then LATEST changes. So one complete slot is left
whatever is killed, and when. Where a slot's files do not match its manifest, the other slot is used. Slots are numbered
in the order in which they were written (`serial`), so that the newer one is known even without LATEST.

Every rank hashes and syncs the files that it wrote; rank 0 gathers the hashes into the manifest.

In the background (`checkpoint.async_recover`) the training waits only for the copy to host memory.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.utils._pytree import tree_leaves

from trainer.checkpoint.background import BackgroundWriter, HostCopy, Record
from trainer.checkpoint.slots import LATEST, MANIFEST, SLOTS, STATE, RunState, Slot, Slots, serial_of
from trainer.disk import disk_of
from trainer.errors import RunError, UserError
from trainer.files import disk_error, is_full, remove_tree, replace_tree, sha256, sync, tree_bytes, write_atomic
from trainer.train.distributed import World, local_part
from trainer.train.learner import Learner
from trainer.train.lora import has_adapters, is_adapter

MOST_WRITERS = 8
"""Most threads that write and hash one rank's files."""
WRITER_BYTES = 1 << 30
"""Bytes for which a thread, with a file of its own, is worth it."""
KINDS = 2
"""Groups of parameters in a checkpoint: matrices, and biases and norms."""

log = logging.getLogger("trainer")

Manifest = dict[str, dict[str, Any]]
"""Name -> bytes and sha256 of files in a slot."""

__all__ = ["RecoverStore", "RunState", "Slot"]


class RecoverStore(Slots):
    """The two slots of one run. `folder` is made when the first checkpoint is written.

    writer: writes those that are saved in the background.
    """

    def __init__(self, folder: Path, writer: BackgroundWriter | None = None) -> None:
        super().__init__(folder)
        self._kept = ""  # the slot that holds the present run's last checkpoint
        self._kept_step = 0
        self._copy = HostCopy()
        self._writer = writer or BackgroundWriter()
        self._saving: Future[Record] | None = None

    def save(self, learner: Learner, state: RunState, fingerprint: dict[str, Any], world: World) -> Record:
        """Write the older slot and make it the latest. Collective: every rank calls it. Returns a metrics record.

        Raises:
            RunError: the disk is full or the folder cannot be written; the other slot is untouched.
        """
        self._writer.wait()
        began = time.perf_counter()
        record = self._write(_tensors(learner), state, _facts(learner, fingerprint), world)
        seconds = round(time.perf_counter() - began, 4)
        return record | {"seconds": seconds, "stall_s": seconds}

    def reserve(self, learner: Learner) -> None:
        """Begin to allocate the host memory of `save_in_background`, so that its first call need not wait for that.

        Collective; further calls change nothing. Does nothing before the optimizer's first step, which makes its state.
        """
        if learner.optimizer.state and not self._copy.reserved:
            self._copy.reserve(_tensors(learner))

    def save_in_background(
        self,
        learner: Learner,
        state: RunState,
        fingerprint: dict[str, Any],
        world: World,
        done: Callable[[Record], None],
    ) -> None:
        """As `save`, but returns when the tensors are copied to host memory. Collective.

        Args:
            done: is given the metrics record when the checkpoint is whole, in the writer's thread. `stall_s` is the
                time that this call took, `seconds` the time until the checkpoint was whole.

        Raises:
            RunError: the checkpoint before this one, or what the writer had to write before that, could not be written.
        """
        began = time.perf_counter()
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()  # until then it reads from the host memory
        tensors = self._copy.take(_tensors(learner))
        stall = round(time.perf_counter() - began, 4)

        def work(apart: World) -> Record:
            record = self._write(tensors, state, _facts(learner, fingerprint), apart)
            record |= {"seconds": round(time.perf_counter() - began, 4), "stall_s": stall}
            done(record)
            return record

        self._saving = self._writer.start(world, work)

    def _write(self, tensors: dict[str, Any], state: RunState, facts: dict[str, Any], world: World) -> Record:
        """Write the older slot and make it the latest. Collective among the ranks of `world`. facts: see `_facts`."""
        name, serial = world.gather(self._turn() if world.is_main else ("", 0))[0]
        temporary, final = self.folder / f"{name}.tmp", self.folder / name
        with self._reporting(temporary, world):
            if world.is_main:
                self.folder.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
        own: Manifest = {}
        with self._reporting(temporary, world):
            with _one_process_is_fine():
                # Not synced file by file: that is done beside the hashing.
                writer = FileSystemWriter(temporary, sync_files=False, thread_count=_writers(tensors))
                dcp_save(tensors, storage_writer=writer, process_group=world.messages, no_dist=world.size == 1)
            own = _settled(temporary, temporary.glob(f"__{world.rank}_*"))  # DCP's names of this rank's files
        manifests = world.collect(own)
        with self._reporting(temporary, world):
            if world.is_main:
                record = {"serial": serial, "state": asdict(state), **facts}
                _finish(temporary, final, record, manifests)
                write_atomic(self.folder / LATEST, name + "\n")
                if not self._kept:
                    # A fresh start leaves an earlier run's checkpoint until here; from now on it would only mislead.
                    remove_tree(self.folder / SLOTS[name == SLOTS[0]])
        self._kept, self._kept_step = name, state.global_step
        return {
            "global_step": state.global_step,
            "slot": name,
            "path": str(final),
            "bytes": tree_bytes(final) if world.is_main else 0,
        }

    def load(self, learner: Learner, slot: Slot) -> None:
        """Load a slot's tensors into the learner. Collective. The number of ranks may differ from the writer's.

        Raises:
            UserError: its adapters belong to another base model than the learner's.
            RunError: its tensors do not fit.
        """
        _require_base(learner, slot)
        learner.wake()
        tensors = _tensors(learner)
        try:
            with _one_process_is_fine():
                dcp_load(tensors, checkpoint_id=slot.path, no_dist=learner.world.size == 1)
        except CheckpointException as error:
            raise RunError(
                f"the recover checkpoint {slot.path} is whole but does not fit this model: {_reason(error)}. Was "
                "model.path changed? To start afresh: trial_name=NEW, or recover_mode=disabled"
            ) from error
        if len(learner.optimizer.param_groups) > KINDS:
            tensors["optimizer"]["param_groups"] = _groups_apart(learner, tensors["optimizer"]["param_groups"])
        set_state_dict(
            learner.policy,
            learner.optimizer,
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimizer"],
            options=StateDictOptions(strict=not has_adapters(learner.policy)),
        )
        torch.set_rng_state(tensors["rng"])
        learner.optimizer_steps = slot.state.optimizer_steps
        self._kept, self._kept_step = slot.name, slot.state.global_step

    def _turn(self) -> tuple[str, int]:
        """The slot to write now (never the one to go on from), and its serial number."""
        serials = {name: serial_of(self.folder / name) for name in SLOTS}
        kept = self._kept or max(SLOTS, key=lambda name: serials[name])
        fresh = max(serials.values()) < 0
        return SLOTS[0] if fresh or kept == SLOTS[1] else SLOTS[1], max(serials.values()) + 1

    @contextmanager
    def _reporting(self, temporary: Path, world: World) -> Iterator[None]:
        """Raise a failure to write of any rank on all ranks, so that none waits for another."""
        problem, system, cause, ours = "", None, None, True
        try:
            yield
        except (Exception, CheckpointException) as error:
            cause, system = error, disk_error(error)
            ours = not isinstance(error, CheckpointException) or world.rank in error.failures  # DCP raises it on all
            unknown = f"the recover checkpoint could not be written{world.place}: {_reason(error)}"
            problem = unknown if system is None else self._explain(system, world.place)
        problems = [one for one in world.gather((problem, system is not None, ours)) if one[0]]
        told = max(problems, key=lambda one: one[2], default=None)  # the first of those that it went wrong on
        if told is not None:
            if world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise (RunError if told[1] else RuntimeError)(told[0]) from cause

    def _explain(self, error: OSError, place: str) -> str:
        kept = f"the one of step {self._kept_step} is untouched" if self._kept else "this run has none yet"
        if is_full(error):
            return (
                f"no space left for a recover checkpoint under {self.folder}{place} ({kept}): free some space there, "
                f"then start the same command again to go on. {disk_of(self.folder)}"
            )
        return (
            f"cannot write a recover checkpoint under {self.folder}{place}: {error.strerror or error} ({kept}): make "
            "the folder writable, then start the same command again to go on"
        )


def _facts(learner: Learner, fingerprint: dict[str, Any]) -> dict[str, Any]:
    """What a slot's record says beside the state: settings, and the model that adapters belong to."""
    return {"fingerprint": fingerprint} | ({"base": learner.base} if learner.base else {})


def _require_base(learner: Learner, slot: Slot) -> None:
    """Raise UserError where a slot's adapters were trained on other weights than the learner's base has."""
    if not learner.base or learner.base == slot.base:
        return
    if slot.base:
        raise UserError(
            f"the adapters of {slot.path} belong to another base model: the weights that this run begins with are not "
            "those that they were trained on (other files at model.path, a supervised start that was made anew, or a "
            "tiny model that was warmed up with other train.threads or versions): bring those weights back, or start "
            "afresh with trial_name=NEW or recover_mode=disabled"
        )
    if learner.world.is_main:
        log.warning(
            f"{slot.path} does not say which base model its adapters belong to, as it was written by an earlier "
            "version: going on as if it were this one."
        )


def _writers(tensors: dict[str, Any]) -> int:
    """Threads that write this rank's share: one per GiB.

    Each has a file of its own. A thread waits for the training's thread at every tensor, and one thread hashes a file.
    """
    pieces = (leaf for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor))
    local = map(local_part, pieces)
    size = sum(piece.numel() * piece.element_size() for piece in local)
    return max(1, min(MOST_WRITERS, size // WRITER_BYTES))


def _reason(error: BaseException) -> str:
    """First line of the first rank's error; the text of DCP's own error, which is no Exception, is a traceback."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _tensors(learner: Learner) -> dict[str, Any]:
    """State dict in DCP's form, keyed by parameter name so that it does not depend on the number of ranks.

    Of a model with adapters it has these alone: its base is read from where the run began.
    """
    unused = not learner.optimizer.state
    model, optimizer = cast(tuple[dict[str, Any], dict[str, Any]], get_state_dict(learner.policy, learner.optimizer))
    if unused:
        # DCP steps an unused optimizer once, with zero gradients, to have a state to save. That step must not count:
        # Adam's bias correction would differ from that of a run which was saved at another moment.
        for state in learner.optimizer.state.values():
            state["step"].zero_()
    if has_adapters(learner.policy):
        model = {name: tensor for name, tensor in model.items() if is_adapter(name)}
    if len(optimizer["param_groups"]) > KINDS:
        optimizer["param_groups"] = _groups_joined(learner, optimizer["param_groups"])
    return {"model": model, "optimizer": optimizer, "rng": torch.get_rng_state()}


def _kinds(learner: Learner) -> list[int]:
    """Kind of every group of the optimizer: matrices (0), or biases and norms (1)."""
    return [int(group["params"][0].ndim < 2) for group in learner.optimizer.param_groups]


def _groups_joined(learner: Learner, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the groups of a tensor parallel optimizer, which are by kind and mesh, to one group per kind.

    So runs with and without tensor parallelism can go on from the same checkpoint.
    """
    joined: list[dict[str, Any]] = []
    for kind in range(KINDS):
        members = [group for group, its in zip(groups, _kinds(learner), strict=True) if its == kind]
        joined.append({**members[0], "params": [name for group in members for name in group["params"]]})
    return joined


def _groups_apart(learner: Learner, joined: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The inverse of `_groups_joined`: this learner's groups with what was loaded for their kinds."""
    optimizer: dict[str, Any] = get_state_dict(learner.policy, learner.optimizer)[1]
    names = [group["params"] for group in optimizer["param_groups"]]
    return [{**joined[kind], "params": own} for kind, own in zip(_kinds(learner), names, strict=True)]


def _settled(folder: Path, files: Iterable[Path]) -> Manifest:
    """Make files below `folder` durable, and describe them."""

    def settled(path: Path) -> tuple[str, dict[str, Any]]:
        digest = sha256(path)
        sync(path)
        return str(path.relative_to(folder)), {"bytes": path.stat().st_size, "sha256": digest}

    with ThreadPoolExecutor(MOST_WRITERS) as pool:  # hashing leaves the interpreter to others
        return dict(pool.map(settled, files))


def _finish(temporary: Path, final: Path, record: dict[str, Any], manifests: list[Manifest]) -> None:
    """Add state and manifest, which holds those of all ranks, make both durable, and give the slot its name."""
    (temporary / STATE).write_text(json.dumps(record, indent=1), encoding="utf-8")
    manifest = {name: facts for its in manifests for name, facts in its.items()}
    files = (path for path in temporary.rglob("*") if path.is_file())
    manifest |= _settled(temporary, [path for path in files if str(path.relative_to(temporary)) not in manifest])
    write_atomic(temporary / MANIFEST, json.dumps(dict(sorted(manifest.items())), indent=1))
    replace_tree(temporary, final)


@contextmanager
def _one_process_is_fine() -> Iterator[None]:
    """Silence DCP's warning that there is no process group: one rank needs none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
