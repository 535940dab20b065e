"""`clusterkit serve judge`: servers that answer from memories and judge them, for a run with reward.name=memalpha."""

from __future__ import annotations

import shlex

import typer

from clusterkit.cli import output


def judge(
    model: str = typer.Option(..., "--model", help="Folder of the model, or the name of an asset in the cache."),
    preset: str = typer.Option("memalpha-4B", "--preset", help="Preset of the run: gives its experiment's name."),
    experiment: str = typer.Option("", "--experiment", help="Experiment of the run; the preset's when left out."),
    trial: str = typer.Option("run1", "--trial", help="Trial of the run."),
    gpus: str = typer.Option("", "--gpus", help="How many GPUs, such as 3, or which, such as 2,3,4; none: the CPU."),
    per_server: int = typer.Option(1, "--per-server", min=1, help="GPUs of one server (tensor parallel)."),
    engine: str = typer.Option("sglang", "--engine", metavar="sglang|vllm", help="Kind of server."),
    address: str = typer.Option(
        "127.0.0.1", "--address", help="Address to listen on: this host's private one where the run is on another."
    ),
    context_length: int = typer.Option(0, "--context-length", min=0, help="Longest request; 0: the model's own."),
    flags: str = typer.Option("", "--flags", help="More options of the server's own, in one quoted text."),
    fileroot: str = typer.Option("runs", "--fileroot", help="Folder under which the run is; on shared storage."),
    cache_dir: str = typer.Option("", "--cache-dir", help="Cache folder of assets."),
) -> None:
    """Serve a reader and judge on this host until Ctrl-C, registered for a run by experiment and trial.

    The run needs no address: `clusterkit train --preset memalpha-4B` of the same experiment and trial under the same
    --fileroot finds the servers, checks their model, and waits for them when they are gone for a while.
    """
    import ipaddress  # noqa: PLC0415
    import os  # noqa: PLC0415
    import subprocess  # noqa: PLC0415
    import sys  # noqa: PLC0415

    from clusterkit.resolve import resolve  # noqa: PLC0415
    from clusterkit.rundir import user_name  # noqa: PLC0415
    from trainer.assets import resolve_model  # noqa: PLC0415
    from trainer.errors import UserError  # noqa: PLC0415

    if engine not in ("sglang", "vllm"):
        raise UserError(f"--engine {engine}: choose sglang or vllm")
    try:
        listening = ipaddress.ip_address(address)
    except ValueError:
        raise UserError(f"--address {address} is no address: give this host's private one, such as 10.0.0.5") from None
    if not (listening.is_loopback or listening.is_private) or listening.is_unspecified:
        raise UserError(
            f"--address {address} would let anybody ask: servers listen on 127.0.0.1 or a private address only"
        )
    config = resolve(preset).config
    try:
        folder = resolve_model(model, cache_dir).absolute()
    except UserError as error:
        raise UserError(str(error).replace("model.path=", "--model ")) from error
    name = experiment or config.experiment_name
    wanted = config.judge.model
    if wanted and folder.name.lower() != wanted.rpartition("/")[2].lower():
        output.note(f"note: {preset} wants {wanted} as its judge; train it with judge.model={folder.name}")
    command = [sys.executable, "-m", "trainer.judge.serve", "--model", str(folder), "--user", user_name()]
    command += ["--fileroot", os.path.abspath(os.path.expanduser(fileroot)), "--experiment", name, "--trial", trial]  # noqa: PTH100, PTH111
    command += ["--gpus", gpus, "--per-server", str(per_server), "--engine", engine, "--address", address]
    command += ["--context-length", str(context_length)]
    command += [f"--flags={flags}"] if flags else []
    train = ["clusterkit", "train", "--preset", preset, f"experiment_name={name}", f"trial_name={trial}"]
    train += [f"fileroot={fileroot}"] if fileroot != "runs" else []
    output.note(f"serving {folder.name} for {name}/{trial}; Ctrl-C ends it. Train with: {shlex.join(train)}")
    process = subprocess.Popen(command)
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:  # the servers have had it too, and end in order
            continue
    raise typer.Exit(code if code >= 0 else 1)
