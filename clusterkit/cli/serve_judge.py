"""`clusterkit serve judge`: servers that answer from memories and judge them, for a run with reward.name=memalpha."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from clusterkit.cli.target import FILEROOT_OPTION, HERE_OPTION, RUNS, Typed, for_training, told
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import select
from clusterkit.ui import output

if TYPE_CHECKING:
    from pathlib import Path

    from clusterkit.serving.judges import JudgeOrder
    from clusterkit.ssh.selection import Selection
    from trainer.serving.registry import Registration

LOOPBACK = "127.0.0.1"


def judge(
    *,
    hosts: HostOptions,
    model: str = typer.Option(
        "", "--model", help="Folder of the model, an asset's name; on a cluster also org/name. Needed to start."
    ),
    preset: str = typer.Option("memalpha-4B", "--preset", help="Preset of the run: gives its experiment's name."),
    experiment: str = typer.Option("", "--experiment", help="Experiment of the run; the preset's when left out."),
    trial: str = typer.Option("run1", "--trial", help="Trial of the run."),
    gpus: str = typer.Option("", "--gpus", help="How many GPUs, such as 3, or which, such as 2,3,4; none: the CPU."),
    per_server: int = typer.Option(1, "--per-server", min=1, help="GPUs of one server (tensor parallel)."),
    engine: str = typer.Option("sglang", "--engine", metavar="sglang|vllm", help="Kind of server."),
    address: str = typer.Option(
        LOOPBACK, "--address", help="Address to listen on: this host's private one where the run is on another."
    ),
    context_length: int = typer.Option(0, "--context-length", min=0, help="Longest request; 0: the model's own."),
    flags: str = typer.Option("", "--flags", help="More options of the server's own, in one quoted text."),
    fileroot: str | None = FILEROOT_OPTION,
    cache_dir: str = typer.Option("", "--cache-dir", help="On this machine: cache folder of assets."),
    here: bool = HERE_OPTION,
    list_them: bool = typer.Option(False, "--list", help="Show the run's judge servers."),
    stop_them: bool = typer.Option(False, "--stop", help="End the run's judge servers."),
    as_json: bool = typer.Option(False, "--json", help="With --list: print JSON."),
) -> None:
    """Serve a reader and judge, registered for a run by experiment and trial.

    It goes where train of the preset would go; --here and --cluster NAME say otherwise. On this machine it serves until
    Ctrl-C; on a cluster on GPUs that its Ray has free, until --stop, and the command returns when they answer.
    `clusterkit train` of the same experiment and trial (under the same --fileroot, or on the same cluster) finds them,
    checks their model, and waits for them when they are gone for a while.
    """
    from clusterkit.config.resolve import resolve  # noqa: PLC0415
    from clusterkit.serving.judges import JudgeOrder  # noqa: PLC0415
    from trainer.errors import UserError  # noqa: PLC0415
    from trainer.judge.gpu_groups import gpu_groups  # noqa: PLC0415

    resolved = resolve(preset)
    config = resolved.config
    if hosts.hostnames is None:
        local = here or (hosts.cluster is None and ("," in gpus or address != LOOPBACK or bool(cache_dir)))
        hosts = replace(hosts, cluster=told(for_training(resolved, Typed(hosts.cluster, local, fileroot), start=False)))
    there = hosts.cluster is not None or hosts.hostnames is not None
    name = experiment or config.experiment_name
    order = JudgeOrder(name, trial, model, 0, per_server, engine, context_length, flags)
    if list_them or stop_them:
        if there:
            _look_there(select(hosts), order, stop_them, as_json)
        else:
            _look_here(_folder_here(fileroot or RUNS, name, trial), stop_them, as_json)
        return
    if not model:
        raise UserError("--model is missing: name the folder of the model that is to read and judge")
    if engine not in ("sglang", "vllm"):
        raise UserError(f"--engine {engine}: choose sglang or vllm")
    groups = gpu_groups(gpus, per_server)
    wanted = config.judge.model.rpartition("/")[2]
    if there:
        if "," in gpus or address != LOOPBACK:
            raise UserError("on a cluster, Ray chooses GPUs and addresses: give --gpus as a number, and no --address")
        _start_there(select(hosts), JudgeOrder(**{**vars(order), "gpus": sum(map(len, groups))}), preset, wanted)
        return
    _serve_here(order, gpus, address, fileroot or RUNS, cache_dir, preset, wanted)


def _serve_here(
    order: JudgeOrder, gpus: str, address: str, fileroot: str, cache_dir: str, preset: str, wanted: str
) -> None:
    import ipaddress  # noqa: PLC0415
    import os  # noqa: PLC0415
    import signal  # noqa: PLC0415
    import subprocess  # noqa: PLC0415
    import sys  # noqa: PLC0415

    from clusterkit.runs.directory import user_name  # noqa: PLC0415
    from trainer.assets import resolve_model  # noqa: PLC0415
    from trainer.errors import UserError  # noqa: PLC0415
    from trainer.judge.registry import HOST_MODULE  # noqa: PLC0415

    try:
        listening = ipaddress.ip_address(address)
    except ValueError:
        raise UserError(f"--address {address} is no address: give this host's private one, such as 10.0.0.5") from None
    if not (listening.is_loopback or listening.is_private) or listening.is_unspecified:
        raise UserError(
            f"--address {address} would let anybody ask: servers listen on 127.0.0.1 or a private address only"
        )
    try:
        folder = resolve_model(order.model, cache_dir).absolute()
    except UserError as error:
        raise UserError(str(error).replace("model.path=", "--model ")) from error
    command = [sys.executable, "-m", HOST_MODULE, "--model", str(folder), "--user", user_name()]
    command += ["--fileroot", os.path.abspath(os.path.expanduser(fileroot))]  # noqa: PTH100, PTH111
    command += ["--experiment", order.experiment, "--trial", order.trial]
    command += ["--gpus", gpus, "--per-server", str(order.per_server), "--engine", order.engine, "--address", address]
    command += ["--context-length", str(order.context_length)]
    command += [f"--flags={order.flags}"] if order.flags else []
    _tell(order, folder.name, preset, wanted, [f"fileroot={fileroot}"] if fileroot != "runs" else [])
    output.note("Ctrl-C ends it")
    process = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())  # nobody else would tell the servers
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:  # the servers have had it too, and end in order
            continue
    raise typer.Exit(code if code >= 0 else 1)


def _start_there(selection: Selection, order: JudgeOrder, preset: str, wanted: str) -> None:
    import asyncio  # noqa: PLC0415

    from clusterkit.backends.ray.head import head_of  # noqa: PLC0415
    from clusterkit.serving.judges import start_there  # noqa: PLC0415

    async def do() -> list[Registration]:
        async with head_of(selection) as head:
            return await start_there(head, order, output.note)

    for one in asyncio.run(do()):
        output.result(f"{one.name} on {one.node} answers at {one.url}")
    name = order.model.rstrip("/").rpartition("/")[2]
    _tell(order, name, preset, wanted, ["--cluster", selection.cluster.name])


def _tell(order: JudgeOrder, model: str, preset: str, wanted: str, more: list[str]) -> None:
    """Say what to train with."""
    train = ["clusterkit", "train", "--preset", preset]
    if wanted and model.lower() != wanted.lower():
        output.note(f"note: {preset} wants {wanted} as its judge; train it with judge.model={model}")
        train += [f"judge.model={model}"]
    train += [f"experiment_name={order.experiment}", f"trial_name={order.trial}", *more]
    output.note(f"serving {model} for {order.experiment}/{order.trial}. Train with: {shlex.join(train)}")


def _folder_here(fileroot: str, experiment: str, trial: str) -> Path:
    from clusterkit.runs.directory import user_name  # noqa: PLC0415
    from trainer.judge.registry import judges_folder  # noqa: PLC0415

    return judges_folder(fileroot, user_name(), experiment, trial)


def _look_here(folder: Path, stop: bool, as_json: bool) -> None:
    from trainer.serving import registry  # noqa: PLC0415

    if stop:
        from clusterkit.serving.engines import end_all  # noqa: PLC0415

        ended = end_all(folder, registry.read(folder))
        output.result(f"ended: {', '.join(ended)}" if ended else "the run has no judge servers")
        return
    _show(registry.read(folder), as_json)


def _look_there(selection: Selection, order: JudgeOrder, stop: bool, as_json: bool) -> None:
    import asyncio  # noqa: PLC0415

    from clusterkit.backends.ray.head import head_of  # noqa: PLC0415
    from clusterkit.serving.judges import judges_there, stop_there  # noqa: PLC0415

    async def do() -> str | list[Registration]:
        async with head_of(selection) as head:
            return await (stop_there(head, order) if stop else judges_there(head, order))

    found = asyncio.run(do())
    if isinstance(found, str):
        output.result(found)
    else:
        _show(found, as_json)


def _show(found: list[Registration], as_json: bool) -> None:
    from clusterkit.serving.engines import table, views  # noqa: PLC0415

    seen = views(found)
    if as_json:
        output.result_json({"servers": [view.as_dict() for view in seen]})
        return
    for line in table(seen, "judge servers"):
        output.result(line)
