"""`python -m trainer.launch.ray_judges start|stop …`: judge servers on the nodes of a Ray cluster, one actor a server.

The options are those of `python -m trainer.judge.serve`; `--gpus` is a number. A second start adds the servers that are
missing, and nothing else. The servers stay until `stop`.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import ray

from trainer.errors import UserError
from trainer.judge.servers import HOST_MODULE, RESTARTS, folder_of, gpu_groups, parser, require_model
from trainer.launch.ray_servers import await_place, end_actors, find_actor, forget_dead, make_actor, namespace
from trainer.serving import registry

PREFIX = "judge-"


def start(arguments: argparse.Namespace) -> list[str]:
    """Start the servers that are not there yet; returns the names of all.

    Raises:
        UserError: the GPUs do not divide, or another model is served already. RunError: there is no place for them.
    """
    folder = folder_of(arguments)
    folder.mkdir(parents=True, exist_ok=True)
    forget_dead(folder)
    given_up = {one.name for one in registry.read(folder) if one.state == "ended"}
    _end(folder, given_up)
    require_model(folder, arguments.model)
    command = [sys.executable, "-m", HOST_MODULE, "--tied"]
    for name in ("model", "fileroot", "user", "experiment", "trial", "engine", "per_server", "context_length"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    command += [f"--flags={arguments.flags}"]
    groups = gpu_groups(arguments.gpus, arguments.per_server)
    names = [f"{PREFIX}{number}" for number in range(len(groups))]
    new = {
        name: make_actor(name, [*command, "--name", name], folder, len(gpus), RESTARTS, detached=True)
        for name, gpus in zip(names, groups, strict=True)
        if find_actor(name) is None
    }
    await_place(new, len(groups[0]))
    return names


def stop(arguments: argparse.Namespace) -> list[str]:
    """End all judge servers of a run; returns their names."""
    folder = folder_of(arguments)
    actors = {str(name) for name in ray.util.list_named_actors() if str(name).startswith(PREFIX)}
    names = actors | {one.name for one in registry.read(folder)}
    _end(folder, names)
    return sorted(names)


def _end(folder: Path, names: set[str]) -> None:
    end_actors([actor for name in names if (actor := find_actor(name)) is not None])
    for name in names:
        registry.remove(folder, name)


def main() -> int:
    """Entry point; returns the exit code. The last line printed is what became of it."""
    options = parser(__doc__ or "")
    options.prog = "python -m trainer.launch.ray_judges"
    options.add_argument("action", choices=("start", "stop"))
    arguments = options.parse_args()
    try:
        ray.init(
            address="auto", namespace=namespace(arguments.experiment, arguments.trial), logging_level=logging.WARNING
        )
        if arguments.action == "start":
            print(f"starting: {', '.join(start(arguments))}")
        else:
            names = stop(arguments)
            print(f"ended: {', '.join(names)}" if names else "the run has no judge servers")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
