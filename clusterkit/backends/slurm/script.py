"""The batch script: Ray on every node of the allocation, the job on its first, an end in good order. Pure text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.slurm.queue import FOLDER, job_name
from trainer.config import RunConfig
from trainer.errors import UserError

WARNING_SECONDS = 300
"""So long before the time limit Slurm tells the script, which has a recover checkpoint written."""
END_SECONDS = 60
"""So long after the first node's task the others may take to end."""
PYXIS, APPTAINER = "pyxis", "apptainer"
_OURS = ("job-name", "chdir", "output", "error", "nodes", "array", "wrap", "ntasks", "ntasks-per-node", "open-mode")
_OURS_SHORT = ("J", "D", "o", "e", "N", "a", "n")


@dataclass(frozen=True)
class SlurmContainer:
    """What the nodes' processes run in."""

    image: str  # as its runtime names it
    runtime: str  # PYXIS, or the name of the apptainer command
    mounts: tuple[str, ...] = ()  # further folders, as SRC[:DST]


@dataclass(frozen=True)
class SlurmOptions:
    """What the user asks Slurm for."""

    partition: str = ""  # sbatch's own default where it is empty
    account: str = ""  # sbatch's own default where it is empty
    time: str = ""  # the time limit, as sbatch takes it
    options: tuple[str, ...] = ()  # further options, as sbatch takes them
    requeue: bool = False  # go on after the time limit, or when a node fails
    image: str = ""  # image to run in, as typed; `container` is how that is done here
    mounts: tuple[str, ...] = ()  # folders that the image sees besides the run's, as /SRC[:/DST]
    python: str = "python3"  # runs the node side where there is no container
    container: SlurmContainer | None = None  # runs it otherwise

    def __post_init__(self) -> None:
        for option in self.options:
            name = option.lstrip("-").split("=", 1)[0].split(" ", 1)[0]
            short = not option.startswith("--") and name[:1] in _OURS_SHORT
            if not option.startswith("-") or not option.isprintable():
                raise UserError(
                    f"--sbatch-option={option}: write it as sbatch takes it, such as --sbatch-option=--mem=0"
                )
            if name in _OURS or short:
                raise UserError(f"--sbatch-option={option} is clusterkit's own to set (the nodes: n_nodes=N)")


def sbatch_options(run: RunDirectory, config: RunConfig, fingerprint: str, slurm_options: SlurmOptions) -> list[str]:
    """Everything that sbatch is told; the user's own options come last, where they win.

    Raises:
        UserError: the job would throw away what it has learned each time that it comes back from the queue.
    """
    if config.recover_mode == "disabled" and (slurm_options.requeue or "--requeue" in slurm_options.options):
        raise UserError(
            "--requeue with recover_mode=disabled: each return from the queue would start afresh. Start afresh with "
            "trial_name=NEW instead, or leave --requeue out"
        )
    nodes, ranks = config.n_nodes, config.train.ranks
    chosen = {"--partition": slurm_options.partition, "--account": slurm_options.account, "--time": slurm_options.time}
    return [
        f"--job-name={job_name(run, fingerprint)}",
        f"--chdir={run.logs}",
        f"--output={run.logs / FOLDER}/job_%j.log",
        "--open-mode=append",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={-(-ranks // nodes)}",
        *([f"--gres=gpu:{config.n_gpus_per_node}"] if config.n_gpus_per_node else []),
        f"--signal=B:USR1@{WARNING_SECONDS}",
        "--requeue" if slurm_options.requeue else "--no-requeue",
        *(f"{name}={value}" for name, value in chosen.items() if value),
        *slurm_options.options,
    ]


def script(
    run: RunDirectory,
    config: RunConfig,
    options: Sequence[str],
    slurm_options: SlurmOptions,
    *,
    code: str,
    shared: Sequence[str],
) -> str:
    """Text of the batch script.

    Args:
        options: of sbatch.
        code: folder of the node side.
        shared: folders that a container has to see.
    """
    directives = "\n".join(f"#SBATCH {shlex.quote(option)}" for option in options)
    folder = shlex.quote(str(run.logs / FOLDER))
    python_path = shlex.quote(code) + ("" if slurm_options.container else '"${PYTHONPATH:+:$PYTHONPATH}"')
    return f"""#!/bin/bash
{directives}
# Written by clusterkit train --slurm. `sbatch` with this file goes on with the same run.
set -u
here={folder}
stop=$here/job_$SLURM_JOB_ID.stop
ended=$here/job_$SLURM_JOB_ID.exit
rm -f "$stop" "$ended"
# TERM: somebody wants it to end (clusterkit stop). USR1: the time limit is near. Ray must not get either: the trainer
# needs it for its last checkpoint. So the first node's task looks for a file.
asked=
trap 'asked=stop; : > "$stop"' TERM
trap 'asked=${{asked:-limit}}; : > "$stop"' USR1
# An address of this node, the first one, that the others can reach.
address=$(getent ahostsv4 "$(hostname)" | awk '$1 !~ /^127\\./ {{ print $1; exit }}')
address=${{address:-$(hostname -I | awk '{{ print $1 }}')}}
export CLUSTERKIT_HEAD=${{CLUSTERKIT_HEAD:-${{address:-127.0.0.1}}}}
export PYTHONPATH={python_path}
export USER={shlex.quote(run.user)} LOGNAME={shlex.quote(run.user)} PYTHONUNBUFFERED=1
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$here/ray_token RAY_USAGE_STATS_ENABLED=0
srun --wait={END_SECONDS} --cpu-bind=none {_task(config, slurm_options, shared)} {shlex.quote(str(run.config))} &
step=$!
told=
while kill -0 "$step" 2>/dev/null; do
  if [ -z "$told" ] && [ -e "$ended" ]; then
    told=1
    scancel --quiet --signal=TERM "$SLURM_JOB_ID.0"
  fi
  sleep 1 &
  wait $!
done
wait "$step"
code=$?
[ ! -s "$ended" ] || code=$(cat "$ended")
rm -f "$stop" "$ended"
{_last(slurm_options)}rm -f "$here/ray_token"
exit "$code"
"""


def _task(config: RunConfig, slurm_options: SlurmOptions, shared: Sequence[str]) -> str:
    """What srun starts on every node."""
    node = ["-m", "trainer.launch.slurm"]
    container = slurm_options.container
    if container is None:
        return shlex.join([slurm_options.python, *node])
    mounts = [*shared, *container.mounts]
    if container.runtime == PYXIS:
        pairs = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in mounts)
        return shlex.join([f"--container-image={container.image}", f"--container-mounts={pairs}", "python3", *node])
    image = container.image
    if "://" not in image and not Path(image).is_absolute():
        image = f"docker://{image}"
    nvidia = ["--nv"] if config.n_gpus_per_node else []
    return shlex.join(
        [container.runtime, "exec", *nvidia, "--bind", ",".join(mounts), image, "python3", *node],
    )


def _last(slurm_options: SlurmOptions) -> str:
    """What becomes of a job that its time limit has stopped."""
    if not slurm_options.requeue:
        return ""
    return """if [ "$asked" = limit ] && [ "$code" = 130 ]; then
  echo "clusterkit: the time limit is near; back into the queue"
  scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
"""
