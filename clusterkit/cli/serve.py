"""`clusterkit serve`: the engine servers of a run: which there are, one more, one less."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from clusterkit.cli.hostoptions import takes_hosts
from clusterkit.cli.serve_judge import judge
from clusterkit.cli.target import (
    FILEROOT_OPTION,
    HERE_OPTION,
    USER_OPTION,
    Kind,
    checked_user,
    folder_of_runs,
    hosts_of_run,
    kind_for,
)
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import select
from clusterkit.ui import output

if TYPE_CHECKING:
    from clusterkit.runs.directory import RunDirectory
    from clusterkit.ssh.selection import Selection

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="Engine servers of a run: list them, add one while it trains, end one.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_EXPERIMENT = typer.Option(None, "--experiment", help="Experiment; the newest run's when left out.")
_TRIAL = typer.Option(None, "--trial", help="Trial; the newest when left out.")


@app.command("list")
@takes_hosts
def list_servers(
    *,
    hosts: HostOptions,
    experiment: str | None = _EXPERIMENT,
    trial: str | None = _TRIAL,
    fileroot: str | None = FILEROOT_OPTION,
    here: bool = HERE_OPTION,
    user: str | None = USER_OPTION,
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show a run's servers: state, node, GPUs, address, and why one is not there.

    Of the run that was started last, on this machine or on the current cluster; --here and --cluster NAME say which.
    Only your own runs, unless --user names somebody else.
    """
    from clusterkit.serving.engines import here as servers_here  # noqa: PLC0415
    from clusterkit.serving.engines import run_there, table, there, views  # noqa: PLC0415
    from trainer.serving.registry import folder_of  # noqa: PLC0415

    place = hosts_of_run(hosts, here, fileroot, experiment, trial, kind=kind_for(user, Kind.NEWEST_RUN))
    if place is None:
        found = views(servers_here(_run(fileroot, experiment, trial, user)))
    else:
        import asyncio  # noqa: PLC0415

        async def look(selection: Selection) -> Any:
            from clusterkit.backends.ray.head import head_of  # noqa: PLC0415

            async with head_of(selection) as head:
                run = await run_there(head, experiment, trial, checked_user(user))
                return await there(head, folder_of(run.logs))

        found = views(asyncio.run(look(select(place))))
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
    fileroot: str | None = FILEROOT_OPTION,
    here: bool = HERE_OPTION,
    user: str | None = USER_OPTION,
    gpus: str = typer.Option("", "--gpus", help="On this machine: the server's GPUs by number, such as 4,5."),
    model: str = typer.Option("", "--model", help="Folder of weights to start with; that of the other servers."),
) -> None:
    """Add one server to a run, also while it trains: it is given the present weights and requests from then on.

    It stays until `clusterkit serve stop`, also when the trainer ends. On a cluster, Ray looks for its GPUs. Without a
    name it goes to the run that was started last, here or on the current cluster; --here and --cluster NAME say which.
    Only your own runs, unless --user names somebody else.
    """
    on_this = here or (bool(gpus) and hosts.cluster is None)
    place = hosts_of_run(hosts, on_this, fileroot, experiment, trial, kind=kind_for(user, Kind.NEWEST_RUN))
    if place is None:
        from clusterkit.serving.engines import add_here  # noqa: PLC0415
        from trainer.errors import UserError  # noqa: PLC0415

        try:
            numbers = tuple(int(number) for number in gpus.split(",") if number.strip())
        except ValueError:
            raise UserError(f"--gpus {gpus}: give numbers with commas, such as 4,5") from None
        one = add_here(_run(fileroot, experiment, trial, user), numbers, model, output.note)
        output.result(f"{one.name} answers at {one.url}")
        return
    output.result(_on_cluster(select(place), experiment, trial, "add", "", user))


@app.command()
@takes_hosts
def stop(
    *,
    hosts: HostOptions,
    names: list[str] = typer.Argument(None, help="Servers to end; without names all of the run."),  # noqa: B008
    experiment: str | None = _EXPERIMENT,
    trial: str | None = _TRIAL,
    fileroot: str | None = FILEROOT_OPTION,
    here: bool = HERE_OPTION,
    user: str | None = USER_OPTION,
) -> None:
    """End servers of a run; what they were sampling is sampled again by the others.

    Of the run that was started last, on this machine or on the current cluster; --here and --cluster NAME say which.
    Only your own runs, unless --user names somebody else.
    """
    place = hosts_of_run(hosts, here, fileroot, experiment, trial, kind=kind_for(user, Kind.NEWEST_RUN))
    if place is None:
        from clusterkit.serving.engines import stop_here  # noqa: PLC0415

        ended = stop_here(_run(fileroot, experiment, trial, user), names or [])
        output.result(f"ended: {', '.join(ended)}" if ended else "the run has no engine servers")
        return
    from clusterkit.serving.engines import run_there, there  # noqa: PLC0415
    from trainer.errors import RunError  # noqa: PLC0415
    from trainer.serving.registry import folder_of  # noqa: PLC0415

    selection = select(place)
    if not names:
        import asyncio  # noqa: PLC0415

        async def look() -> list[str]:
            from clusterkit.backends.ray.head import head_of  # noqa: PLC0415

            async with head_of(selection) as head:
                run = await run_there(head, experiment, trial, checked_user(user))
                return [one.name for one in await there(head, folder_of(run.logs))]

        names = asyncio.run(look())
        if not names:
            raise RunError("the run has no engine servers")
    for name in names:
        output.result(_on_cluster(selection, experiment, trial, "stop", name, user))


app.command()(takes_hosts(judge))


def _run(fileroot: str | None, experiment: str | None, trial: str | None, user: str | None) -> RunDirectory:
    from clusterkit.runs.status import find_run  # noqa: PLC0415

    return find_run(folder_of_runs(fileroot), experiment, trial, None if user is None else checked_user(user))


def _on_cluster(
    selection: Selection, experiment: str | None, trial: str | None, action: str, name: str, user: str | None
) -> str:
    import asyncio  # noqa: PLC0415

    async def do() -> str:
        from clusterkit.backends.ray.head import head_of  # noqa: PLC0415
        from clusterkit.serving.engines import change_there, run_there  # noqa: PLC0415

        async with head_of(selection) as head:
            return await change_there(head, await run_there(head, experiment, trial, checked_user(user)), action, name)

    return asyncio.run(do())
