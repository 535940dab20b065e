"""Submit a run to Slurm, or attach to it where it waits or runs already."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from clusterkit.backends.local.launch import require_trainer, require_writable, write_config
from clusterkit.backends.own_code import own_files
from clusterkit.backends.ray.submit import SubmittedRun, fingerprint_of
from clusterkit.backends.slurm.script import APPTAINER, PYXIS, SlurmContainer, Wishes, sbatch_options, script
from clusterkit.common.node_code import content_of, node_files
from clusterkit.config.resolve import Resolved
from clusterkit.hosts.folders import write_private
from clusterkit.provision.images.versions import versions
from clusterkit.runs.directory import FILEROOT, RunDirectory, hold_lock, user_name
from clusterkit.runs.slurm.commands import SlurmError, slurm
from clusterkit.runs.slurm.queue import FOLDER, SlurmJob, our_jobs
from clusterkit.runs.trials import Trial, TrialState, choose_trial, require_free, require_unchanged
from trainer.config import RunConfig
from trainer.disk import file_failures
from trainer.errors import UserError
from trainer.files import write_atomic
from trainer.paths import cache_folder


@dataclass(frozen=True)
class Submission:
    """What a command means: the configuration for inside the allocation, the trial, and what Slurm would be told.

    code: folder of the node side, with the user's own classes. files: what is in it, paths and contents.
    """

    config: RunConfig
    trial: Trial
    options: tuple[str, ...]
    text: str
    code: Path
    files: tuple[tuple[str, bytes], ...]


def for_slurm(resolved: Resolved) -> Resolved:
    """The configuration as the job needs it: its ranks run in Ray, and its paths are absolute."""
    changed = {"mode": "ray", "cache_dir": str(cache_folder(resolved.config))}
    return replace(resolved, config=resolved.config.model_copy(update=changed))


def container(image: str, mounts: tuple[str, ...]) -> SlurmContainer:
    """How an image is run here: pyxis where srun has it, else apptainer.

    Raises:
        UserError: neither is here, or a mount cannot be written.

    """
    for mount in mounts:
        if "," in mount or not mount.startswith("/"):
            raise UserError(f"--container-mount={mount}: write it as /SRC or /SRC:/DST")
    if "--container-image" in slurm(["srun", "--help"]):
        return SlurmContainer(image, PYXIS, mounts)
    for runtime in (APPTAINER, "singularity"):
        if shutil.which(runtime):
            return SlurmContainer(image, runtime, mounts)
    raise UserError(
        "--container-image needs pyxis (srun here knows no --container-image) or apptainer, and neither is installed: "
        "leave it out and run clusterkit from a Python on the shared file system that has clusterkit[train] and Ray"
    )


def require_slurm() -> None:
    """Refuse a machine that cannot submit.

    Raises:
        UserError: it has no sbatch.

    """
    if not shutil.which("sbatch"):
        raise UserError(
            "no sbatch on PATH: run this command on a login node of a Slurm cluster (some want `module load slurm` "
            "first); for hosts that SSH reaches there is --cluster NAME"
        )


def require_python() -> None:
    """Refuse a Python that could not run the job, where that is the one to run it.

    Raises:
        UserError: it lacks packages.

    """
    require_trainer()
    if not find_spec("ray"):
        raise UserError(
            f"a job on Slurm starts Ray, which this Python ({sys.executable}) does not have: pip install "
            f"'ray[default]=={versions()['RAY_VERSION']}', or give --container-image REF"
        )


def planned(resolved: Resolved, wishes: Wishes) -> Submission:
    """What would be submitted; writes nothing.

    Raises:
        UserError: an unfinished run of other settings stands in the way.

    """
    trial = choose_trial(resolved.config, resolved.trial_is_named)
    require_writable(trial.run)
    files = (*node_files(), *own_files(resolved.config))
    # The user's files are packed beside ours, where PYTHONPATH leads: what waits in the queue does not change there.
    config = resolved.config.model_copy(update={"trial_name": trial.run.trial, "code_dir": ""})
    options = sbatch_options(trial.run, config, _fingerprint(resolved), wishes)
    storage = Path(config.fileroot).parent
    code = storage / "codes" / content_of(files)[:16]
    shared = dict.fromkeys([str(storage), config.cache_dir, *_own_paths(config)])
    text = script(trial.run, config, options, wishes, code=str(code), shared=list(shared))
    return Submission(config, trial, tuple(options), text, code, files)


def attached(resolved: Resolved) -> SubmittedRun | None:
    """The same run where it waits or runs already.

    Raises:
        UserError: another run of this experiment, with other settings, is alive. SlurmError: Slurm does not answer.

    """
    config, wanted = resolved.config, _fingerprint(resolved)
    mine = [job for job in our_jobs() if Path(job.run_dir).parent == _experiment(config)]
    for job in mine:
        if job.fingerprint == wanted:
            return SubmittedRun("attached", _run_of(config, job), job.number)
    for job in mine:
        if not resolved.trial_is_named or job.trial == config.trial_name:
            raise UserError(
                f"{config.experiment_name}/{job.trial} is in Slurm's queue with other settings, as job {job.number} "
                f"({job.state.lower()}). To train beside it: add trial_name=NEW. To end it: clusterkit stop --fileroot "
                f"{config.fileroot} --experiment {config.experiment_name} --trial {job.trial}"
            )
    return None


def submit(
    resolved: Resolved,
    wishes: Wishes,
    apply: Callable[[RunConfig, RunDirectory], RunConfig],
    say: Callable[[str], None],
) -> SubmittedRun:
    """Submit the run; where the same run is alive, attach to it instead.

    Args:
        resolved: as `for_slurm` gives it. wishes: what Slurm is asked for. apply: a run's configuration with what was
            applied to it since. say: told what is being done.

    Raises:
        UserError: another run is in the way, or sbatch refuses. SlurmError: Slurm does not answer.

    """
    if (found := attached(resolved)) is not None:
        return found
    order = planned(resolved, wishes)
    run = order.trial.run
    if order.trial.state is TrialState.COMPLETE:
        return SubmittedRun("complete", run)
    require_free(run)
    with _taken(run):
        if (found := attached(resolved)) is not None:  # submitted by somebody a moment ago
            return found
        require_unchanged(order.trial)
        say(f"packing the node side to {order.code}")
        with file_failures(order.code, FILEROOT):
            _put_code(order.code, order.files)
        write_config(run, apply(order.config, run))
        file = run.logs / FOLDER / "job.sbatch"
        with file_failures(run.logs, FILEROOT):
            file.parent.mkdir(exist_ok=True)
            write_private(file.with_name("ray_token"), secrets.token_hex(32) + "\n")
            write_atomic(file, order.text)
        number = _sbatch(order.options, file)
    return SubmittedRun("started", run, number, order.trial.resume_step)


def _sbatch(options: tuple[str, ...], file: Path) -> str:
    # On the command line as well: variables such as SBATCH_TIMELIMIT count more than lines of the script.
    inside = {"SLURM_", "SLURMD_", "SRUN_"}
    environment = {
        name: value
        for name, value in os.environ.items()
        # A job that is submitted from within another one is none of that one's business.
        if not name.startswith(tuple(inside)) or name == "SLURM_CONF"
    }
    try:
        said = slurm(["sbatch", "--parsable", *options, str(file)], environment)
    except SlurmError as error:
        raise UserError(
            f"sbatch refused the job: {error.output}\n  sinfo lists partitions and their limits; the script is {file}"
        ) from error
    return said.strip().split(";")[0]


@contextmanager
def _taken(run: RunDirectory) -> Iterator[None]:
    """Hold the run against other `train` commands while it is being submitted."""
    with file_failures(run.logs, FILEROOT):
        run.logs.mkdir(parents=True, exist_ok=True)
    with hold_lock(run.logs / "launch.lock") as ours:
        if not ours:
            require_free(run)
            raise UserError(f"{run.experiment}/{run.trial} is being started by another command: the same one attaches")
        yield


def _put_code(folder: Path, files: tuple[tuple[str, bytes], ...]) -> None:
    """Have these files in `folder`, all or none."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        new.chmod(0o755)
        for name, data in files:
            path = new / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        try:
            new.rename(folder)
        except OSError:
            if not folder.is_dir():  # else somebody else was faster, with the same content
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _own_paths(config: RunConfig) -> list[str]:
    """Folders outside the storage that the configuration names."""
    path = config.model.path
    return [path] if path and Path(path).is_absolute() else []


def _fingerprint(resolved: Resolved) -> str:
    """As of a run on a cluster: what was resolved, and the user's own code."""
    plain = fingerprint_of(resolved.config.model_copy(update={"code_dir": ""}), resolved.trial_is_named)
    own = own_files(resolved.config)
    return content_of(own, plain)[:16] if own else plain


def _experiment(config: RunConfig) -> Path:
    return RunDirectory(Path(config.fileroot), user_name(), config.experiment_name, "x").logs.parent


def _run_of(config: RunConfig, job: SlurmJob) -> RunDirectory:
    return RunDirectory(Path(config.fileroot), user_name(), config.experiment_name, job.trial)
