"""`clusterkit serve`: the engine servers of a run: which there are, one more, one less."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from clusterkit.cli import output
from clusterkit.cli.hostoptions import HostOptions, select, takes_hosts
from clusterkit.cli.serve_judge import judge

if TYPE_CHECKING:
    from clusterkit.cli.hostoptions import Selection
    from clusterkit.rundir import RunDirectory

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="Engine servers of a run: list them, add one while it trains, end one.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_EXPERIMENT = typer.Option(None, "--experiment", help="Experiment; the newest run's when left out.")
_TRIAL = typer.Option(None, "--trial", help="Trial; the newest when left out.")
_FILEROOT = typer.Option("runs", "--fileroot", help="Without --cluster: folder under which runs are.")


@app.command("list")
@takes_hosts
def list_servers(
    *,
    hosts: HostOptions,
    experiment: str | None = _EXPERIMENT,
    trial: str | None = _TRIAL,
    fileroot: str = _FILEROOT,
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show a run's servers: state, node, GPUs, address, and why one is not there."""
    from clusterkit.serving import here, run_there, table, there, views  # noqa: PLC0415
    from trainer.serving.registry import folder_of  # noqa: PLC0415

    if _is_here(hosts):
        found = views(here(_run(fileroot, experiment, trial)))
    else:
        import asyncio  # noqa: PLC0415

        async def look(selection: Selection) -> Any:
            from clusterkit.dispatch.head import head_of  # noqa: PLC0415

            async with head_of(selection) as head:
                run = await run_there(head, experiment, trial)
                return await there(head, folder_of(run.logs))

        found = views(asyncio.run(look(select(hosts))))
    if as_json:
        output.result_json({"servers": [view.as_dict() for view in found]})
        return
    for line in table(found):
        output.result(line)


@app.command()
@takes_hosts
def add(
    *,
    hosts: HostOptions,
    experiment: str | None = _EXPERIMENT,
    trial: str | None = _TRIAL,
    fileroot: str = _FILEROOT,
    gpus: str = typer.Option("", "--gpus", help="Without --cluster: the server's GPUs by number, such as 4,5."),
    model: str = typer.Option("", "--model", help="Folder of weights to start with; that of the other servers."),
) -> None:
    """Add one server to a run, also while it trains: it is given the present weights and requests from then on.

    It stays until `clusterkit serve stop`, also when the trainer ends. On a cluster, Ray looks for its GPUs.
    """
    if _is_here(hosts):
        from clusterkit.serving import add_here  # noqa: PLC0415
        from trainer.errors import UserError  # noqa: PLC0415

        try:
            numbers = tuple(int(number) for number in gpus.split(",") if number.strip())
        except ValueError:
            raise UserError(f"--gpus {gpus}: give numbers with commas, such as 4,5") from None
        one = add_here(_run(fileroot, experiment, trial), numbers, model, output.note)
        output.result(f"{one.name} answers at {one.url}")
        return
    output.result(_on_cluster(select(hosts), experiment, trial, "add", ""))


@app.command()
@takes_hosts
def stop(
    *,
    hosts: HostOptions,
    names: list[str] = typer.Argument(None, help="Servers to end; without names all of the run."),  # noqa: B008
    experiment: str | None = _EXPERIMENT,
    trial: str | None = _TRIAL,
    fileroot: str = _FILEROOT,
) -> None:
    """End servers of a run; what they were sampling is sampled again by the others."""
    if _is_here(hosts):
        from clusterkit.serving import stop_here  # noqa: PLC0415

        ended = stop_here(_run(fileroot, experiment, trial), names or [])
        output.result(f"ended: {', '.join(ended)}" if ended else "the run has no engine servers")
        return
    from clusterkit.serving import run_there, there  # noqa: PLC0415
    from trainer.errors import RunError  # noqa: PLC0415
    from trainer.serving.registry import folder_of  # noqa: PLC0415

    selection = select(hosts)
    if not names:
        import asyncio  # noqa: PLC0415

        async def look() -> list[str]:
            from clusterkit.dispatch.head import head_of  # noqa: PLC0415

            async with head_of(selection) as head:
                run = await run_there(head, experiment, trial)
                return [one.name for one in await there(head, folder_of(run.logs))]

        names = asyncio.run(look())
        if not names:
            raise RunError("the run has no engine servers")
    for name in names:
        output.result(_on_cluster(selection, experiment, trial, "stop", name))


app.command()(takes_hosts(judge))


def _is_here(hosts: HostOptions) -> bool:
    return hosts.cluster is None and hosts.hostnames is None


def _run(fileroot: str, experiment: str | None, trial: str | None) -> RunDirectory:
    from clusterkit.status import find_run  # noqa: PLC0415

    return find_run(Path(fileroot).expanduser().absolute(), experiment, trial)


def _on_cluster(selection: Selection, experiment: str | None, trial: str | None, action: str, name: str) -> str:
    import asyncio  # noqa: PLC0415

    async def do() -> str:
        from clusterkit.dispatch.head import head_of  # noqa: PLC0415
        from clusterkit.serving import change_there, run_there  # noqa: PLC0415

        async with head_of(selection) as head:
            return await change_there(head, await run_there(head, experiment, trial), action, name)

    return asyncio.run(do())
