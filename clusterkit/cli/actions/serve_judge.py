"""`clusterkit serve judge`: serve a reader and judge, list the servers, end them."""

from __future__ import annotations

import ipaddress
import os
import shlex
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import typer

from clusterkit.backends.base import RUNS
from clusterkit.backends.local.interpreter import python_here
from clusterkit.backends.ray.backend import RayBackend
from clusterkit.cli.actions.target import announce, place_of
from clusterkit.cli.actions.target_of_run import for_training
from clusterkit.cli.judgeoptions import JudgeOptions
from clusterkit.cli.options import LOOPBACK
from clusterkit.cli.runoptions import RunOptions
from clusterkit.config.resolve import resolve
from clusterkit.provision.ray.current import has_current
from clusterkit.runs.directory import user_name
from clusterkit.serving.engines import end_all, table, views
from clusterkit.serving.judges import JudgeRequest, remote_judges, start_remote, stop_remote
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ui import output
from trainer.adapter_folder import is_adapter_folder
from trainer.assets import resolve_model
from trainer.errors import UserError
from trainer.judge.servers import HOST_MODULE, gpu_groups, judges_folder
from trainer.serving import registry
from trainer.serving.registry import Registration

FIRST_TRIAL = "run1"
"""Name that `train` gives the first trial of an experiment."""


def judge(
    hosts: HostOptions, run: RunOptions, options: JudgeOptions, *, list_them: bool, stop_them: bool, as_json: bool
) -> None:
    """Serve here until Ctrl-C, or on a cluster until they are ended; or list or end what serves."""
    resolved = resolve(options.preset)
    config = resolved.config
    own_address = options.address != LOOPBACK
    if hosts.hostnames is None:
        local = hosts.cluster is None and ("," in options.gpus or own_address or bool(options.cache_dir))
        typed = replace(run, cluster=hosts.cluster, here=run.here or local)
        hosts = replace(hosts, cluster=announce(for_training(resolved, typed, start=False)))
    on_cluster = hosts.cluster is not None or hosts.hostnames is not None
    request = JudgeRequest(
        run.experiment or config.experiment_name,
        run.trial or FIRST_TRIAL,
        options.model,
        0,
        options.tensor_parallel,
        options.engine,
        options.context_length,
        options.quoted_flags,
    )
    if list_them or stop_them:
        if on_cluster:
            with RayBackend(place_of(hosts), output.note) as cluster:
                _show_remote(cluster, request, stop_them, as_json)
        else:
            folder = judges_folder(run.fileroot or RUNS, user_name(), request.experiment, request.trial)
            _show_local(folder, stop_them, as_json)
        return
    if not options.model:
        raise UserError("--model-path is missing: name the folder of the model that is to read and judge")
    if options.engine not in ("sglang", "vllm"):
        raise UserError(f"--engine {options.engine}: choose sglang or vllm")
    groups = gpu_groups(options.gpus, options.tensor_parallel)
    expected_model = config.judge.model.rpartition("/")[2]
    if on_cluster:
        if "," in options.gpus or own_address:
            raise UserError("on a cluster, Ray chooses GPUs and addresses: give --gpus as a number, and no --address")
        with RayBackend(place_of(hosts), output.note) as cluster:
            _start_remote(cluster, replace(request, gpus=sum(map(len, groups))), options.preset, expected_model)
        return
    _serve_local(request, options, run.fileroot or RUNS, expected_model)


def _serve_local(request: JudgeRequest, options: JudgeOptions, fileroot: str, expected_model: str) -> None:
    address = options.address
    try:
        listening = ipaddress.ip_address(address)
    except ValueError:
        raise UserError(f"--address {address} is no address: give this host's private one, such as 10.0.0.5") from None
    if not (listening.is_loopback or listening.is_private) or listening.is_unspecified:
        raise UserError(
            f"--address {address} would let anybody ask: servers listen on 127.0.0.1 or a private address only"
        )
    try:
        folder = resolve_model(request.model, options.cache_dir).absolute()
    except UserError as error:
        raise UserError(str(error).replace("model.path=", "--model-path ")) from error
    if is_adapter_folder(folder):
        raise UserError(f"--model-path {folder} is an adapter, and servers here take whole models: name a merged one")
    command = [python_here(), "-m", HOST_MODULE, "--model", str(folder), "--user", user_name()]
    command += ["--fileroot", os.path.abspath(os.path.expanduser(fileroot))]  # noqa: PTH100, PTH111
    command += ["--experiment", request.experiment, "--trial", request.trial]
    command += ["--gpus", options.gpus, "--per-server", str(request.per_server)]
    command += ["--engine", request.engine, "--address", address]
    command += ["--context-length", str(request.context_length)]
    command += [f"--flags={request.flags}"] if request.flags else []
    place = [f"fileroot={fileroot}"] if fileroot != RUNS else []
    place += ["--here"] if has_current() else []  # these servers are none of the cluster's
    _print_train_command(request, folder.name, options.preset, expected_model, place)
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


def _start_remote(cluster: RayBackend, request: JudgeRequest, preset: str, expected_model: str) -> None:
    for one in cluster.do(lambda head: start_remote(head, request, output.note)):
        output.result(f"{one.name} on {one.node} answers at {one.url}")
    name = request.model.rstrip("/").rpartition("/")[2]
    place = ["--cluster", cluster.cluster.name]
    _print_train_command(request, name, preset, expected_model, place)
    names = [f"{request.experiment}/{request.trial}", "--judges", *place]
    output.note(f"  all of them  {shlex.join(['clusterkit', 'serve', 'list', *names])}")
    output.note(f"  end them     {shlex.join(['clusterkit', 'serve', 'stop', *names])}")


def _print_train_command(request: JudgeRequest, model: str, preset: str, expected_model: str, more: list[str]) -> None:
    """Say what to train with."""
    train = ["clusterkit", "train", "--preset", preset]
    if expected_model and model.lower() != expected_model.lower():
        output.note(f"note: {preset} wants {expected_model} as its judge; train it with judge.model={model}")
        train += [f"judge.model={model}"]
    train += [f"experiment_name={request.experiment}", f"trial_name={request.trial}", *more]
    output.note(f"serving {model} for {request.experiment}/{request.trial}. Train with: {shlex.join(train)}")


def _show_local(folder: Path, stop: bool, as_json: bool) -> None:
    if stop:
        stopped = end_all(folder, registry.read(folder))
        _show_stopped(f"ended: {', '.join(stopped)}" if stopped else "the run has no judge servers", as_json)
    else:
        _show(registry.read(folder), as_json)


def _show_remote(cluster: RayBackend, request: JudgeRequest, stop: bool, as_json: bool) -> None:
    if stop:
        _show_stopped(cluster.do(lambda head: stop_remote(head, request)), as_json)
    else:
        _show(cluster.do(lambda head: remote_judges(head, request)), as_json)


def _show_stopped(said: str, as_json: bool) -> None:
    """Print the sentence of the node side about what was ended, or the names in it."""
    names = said.removeprefix("ended: ").split(", ") if said.startswith("ended: ") else []
    output.outcome(said, {"ended": names}, as_json=as_json)


def _show(found: list[Registration], as_json: bool) -> None:
    seen = views(found)
    text = "\n".join(table(seen, "judge servers"))
    output.outcome(text, {"servers": [view.as_dict() for view in seen]}, as_json=as_json)
