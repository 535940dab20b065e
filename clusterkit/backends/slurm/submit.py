"""Submit a run to Slurm, or attach to it where it waits or runs already."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from clusterkit.backends.base import PlannedRun, RunRequest, Say, SubmittedRun, applied
from clusterkit.backends.local.launch import require_trainer, require_writable, write_config
from clusterkit.backends.own_code import own_files
from clusterkit.backends.slurm.script import APPTAINER, PYXIS, SlurmContainer, SlurmOptions, sbatch_options, script
from clusterkit.common.node_code import content_of, node_files
from clusterkit.common.origin import origin_environment
from clusterkit.config.resolve import Resolved
from clusterkit.hosts.folders import write_private
from clusterkit.provision.images.versions import versions
from clusterkit.runs.directory import FILEROOT, RunDirectory, hold_lock
from clusterkit.runs.slurm.commands import SlurmError, slurm
from clusterkit.runs.slurm.queue import FOLDER, forget_queue, our_jobs
from clusterkit.runs.trials import Trial, TrialState, choose_trial, require_free, require_unchanged, run_directory
from trainer.adapter_folder import is_adapter_folder
from trainer.assets import adapter_base
from trainer.disk import file_failures
from trainer.errors import UserError
from trainer.files import write_atomic
from trainer.paths import cache_folder


@dataclass(frozen=True)
class SlurmPlan(PlannedRun):
    """A `PlannedRun` for sbatch."""

    chosen: Trial = field(kw_only=True)  # the trial that is meant
    options: tuple[str, ...] = ()  # of sbatch
    code: Path = Path()  # folder of the node side, with the user's own classes
    files: tuple[tuple[str, bytes], ...] = ()  # what is in it, paths and contents


def request_for(resolved: Resolved) -> RunRequest:
    """The run as its job needs it: its ranks run in Ray, and its paths are absolute."""
    # The user's files are packed beside ours, where PYTHONPATH leads: what waits in the queue does not change there.
    changed = {"mode": "ray", "cache_dir": str(cache_folder(resolved.config)), "code_dir": ""}
    config = resolved.config.model_copy(update=changed)
    return RunRequest(config, resolved.trial_is_named, own_code=own_files(resolved.config), typed=resolved.config)


def options_here(slurm_options: SlurmOptions) -> SlurmOptions:
    """The options with how the node side is run on this cluster: in the image, or in the Python of this command.

    Raises:
        UserError: images cannot be run here, or this Python could not run the job.
    """
    if slurm_options.image:
        return replace(slurm_options, container=_container(slurm_options.image, slurm_options.mounts))
    require_trainer()
    if not find_spec("ray"):
        raise UserError(
            f"a job on Slurm starts Ray, which this Python ({sys.executable}) does not have: pip install "
            f"'ray[default]=={versions()['RAY_VERSION']}', or give --container-image REF"
        )
    return replace(slurm_options, python=sys.executable)


def _container(image: str, mounts: tuple[str, ...]) -> SlurmContainer:
    """Pyxis where srun has it, else apptainer."""
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
    """Refuse a machine that cannot submit. Raises UserError where it has no sbatch."""
    if not shutil.which("sbatch"):
        raise UserError(
            "no sbatch on PATH: run this command on a login node of a Slurm cluster (some want `module load slurm` "
            "first); for hosts that SSH reaches there is --cluster NAME"
        )


def plan(request: RunRequest, slurm_options: SlurmOptions) -> SlurmPlan:
    """See `Backend.plan`."""
    trial = choose_trial(request.config, request.named)
    require_writable(trial.run)
    files = (*node_files(), *request.own_code)
    config = request.config.model_copy(update={"trial_name": trial.run.trial})
    options = sbatch_options(trial.run, config, request.fingerprint, slurm_options)
    storage = Path(config.fileroot).parent
    code = storage / "codes" / content_of(files)[:16]
    model = [config.model.path] if config.model.path and Path(config.model.path).is_absolute() else []
    model += [str(adapter_base(Path(path), config.cache_dir)) for path in model if is_adapter_folder(Path(path))]
    shared = dict.fromkeys([str(storage), config.cache_dir, *model])
    text = script(trial.run, config, options, slurm_options, code=str(code), shared=list(shared))
    request = replace(request, config=config)
    facts = (("script", text),)
    return SlurmPlan(request, facts=facts, script=text, chosen=trial, options=tuple(options), code=code, files=files)


def attach(request: RunRequest) -> SubmittedRun | None:
    """See `Backend.attach`."""
    config, experiment = request.config, run_directory(request.config, "x").logs.parent
    mine = [job for job in our_jobs() if Path(job.run_dir).parent == experiment]
    for job in mine:
        if job.fingerprint == request.fingerprint:
            return SubmittedRun("attached", run_directory(config, job.trial), job.number)
    for job in mine:
        if not request.named or job.trial == config.trial_name:
            raise UserError(
                f"{config.experiment_name}/{job.trial} is in Slurm's queue with other settings, as job {job.number} "
                f"({job.state.lower()}). To train beside it: add trial_name=NEW. To end it: clusterkit stop "
                f"{run_directory(config, job.trial).word} --fileroot {config.fileroot}"
            )
    return None


def submit(planned: SlurmPlan, say: Say) -> SubmittedRun:
    """See `Backend.start`."""
    trial, run = planned.chosen, planned.chosen.run
    if trial.state is TrialState.COMPLETE:
        return SubmittedRun("complete", run)
    require_free(run)
    with _locked(run):
        if (found := attach(planned.request)) is not None:  # submitted by somebody a moment ago
            return found
        require_unchanged(trial)
        say(f"packing the node side to {planned.code}")
        with file_failures(planned.code, FILEROOT):
            _put_code(planned.code, planned.files)
        write_config(run, applied(planned.request.config, trial, say))
        file = run.logs / FOLDER / "job.sbatch"
        with file_failures(run.logs, FILEROOT):
            file.parent.mkdir(exist_ok=True)
            write_private(file.with_name("ray_token"), secrets.token_hex(32) + "\n")
            write_atomic(file, planned.script)
        number = sbatch(planned.options, file)
        forget_queue()
    return SubmittedRun("started", run, number, trial.resume_step)


def sbatch(options: tuple[str, ...], file: Path) -> str:
    """Submit a script, and return the job's number.

    Raises:
        UserError: sbatch refused it. SlurmError: Slurm does not answer.
    """
    # On the command line as well: variables such as SBATCH_TIMELIMIT count more than lines of the script.
    inside = {"SLURM_", "SLURMD_", "SRUN_"}
    environment = {
        name: value
        for name, value in os.environ.items()
        # A job that is submitted from within another one is none of that one's business.
        if not name.startswith(tuple(inside)) or name == "SLURM_CONF"
    }
    environment |= origin_environment()
    try:
        answer = slurm(["sbatch", "--parsable", *options, str(file)], environment)
    except SlurmError as error:
        if error.no_answer:
            raise
        raise UserError(
            f"sbatch refused the job: {error.output}\n  sinfo lists partitions and their limits; the script is {file}"
        ) from error
    return answer.strip().split(";")[0]


@contextmanager
def _locked(run: RunDirectory) -> Iterator[None]:
    """Hold the run against other `train` commands while it is being submitted."""
    with file_failures(run.logs, FILEROOT):
        run.logs.mkdir(parents=True, exist_ok=True)
    with hold_lock(run.logs / "launch.lock") as ours:
        if not ours:
            require_free(run)
            raise UserError(f"{run.name} is being started by another command: the same one attaches")
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
