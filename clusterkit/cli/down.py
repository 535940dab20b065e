"""`clusterkit down`: take the cluster's containers and files off its hosts, after showing them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import typer

from clusterkit.cli import output
from clusterkit.cli.hostoptions import HostOptions, Selection, select, takes_hosts

if TYPE_CHECKING:
    from clusterkit.raycluster.hosts import Connected
    from clusterkit.raycluster.remove import Leftovers
    from clusterkit.ssh.api import HostError

app = typer.Typer(
    help="Remove what carries the cluster's label, and nothing else.",
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
@takes_hosts
def down(
    *,
    hosts: HostOptions,
    yes: bool = typer.Option(False, "-y", "--yes", help="Do not ask."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON; needs -y."),
) -> None:
    """Remove what carries the cluster's label, and nothing else.

    Shows the containers and files first, and asks. Docker, images, shared storage and everything of others stay. Exit
    code: 0 nothing of the cluster is left, 1 no host could be reached or the user said no, 2 bad usage, 3 some hosts
    could not be reached or kept something.
    """
    import asyncio  # noqa: PLC0415

    if as_json and not yes:
        from trainer.errors import UserError  # noqa: PLC0415

        raise UserError("--json asks no questions: add -y to remove what is found")
    code = asyncio.run(_down(select(hosts), yes, as_json))
    if code:
        raise typer.Exit(code)


async def _down(selection: Selection, yes: bool, as_json: bool) -> int:
    from clusterkit.provision.claim import claimed, leased  # noqa: PLC0415
    from clusterkit.raycluster.hosts import connected  # noqa: PLC0415
    from clusterkit.raycluster.remove import leftovers  # noqa: PLC0415
    from clusterkit.ssh.connection import connect  # noqa: PLC0415

    cluster = selection.cluster
    with claimed(cluster.name, "down") as claim:
        async with connected(selection.hosts, lambda host: connect(host, selection.ssh)) as hosts:
            found, silent = await leftovers(hosts.sessions, cluster.name)
            silent = {**hosts.silent, **silent}
            # Where nothing is of ours, a lease would be the first thing that is.
            any_there = not all(what.empty for what in found.values())
            head = hosts.sessions.get(cluster.head_host.name) if any_there else None
            async with leased(claim, head, output.note):
                return await _remove(selection, hosts, found, silent, yes, as_json)


async def _remove(
    selection: Selection,
    hosts: Connected,
    found: Mapping[str, Leftovers],
    silent: Mapping[str, HostError],
    yes: bool,
    as_json: bool,
) -> int:
    import asyncio  # noqa: PLC0415

    from clusterkit.raycluster.remove import remove  # noqa: PLC0415
    from clusterkit.raycluster.token import forget_token, local_file  # noqa: PLC0415
    from clusterkit.ssh.api import HostError  # noqa: PLC0415

    cluster = selection.cluster
    troubles = {name: error.message for name, error in silent.items()}
    there = {name: what for name, what in found.items() if not what.empty}
    if there and not as_json:
        output.note("\n".join([f"of cluster {cluster.name}:", *_shown(there, cluster.name)]))
        if jobs := await _jobs(selection, hosts):
            output.note(f"running now, and ended by this: {', '.join(jobs)}")
    # In a thread, so that the connections stay alive while somebody thinks.
    if there and not yes and not await asyncio.to_thread(_agreed):
        output.note("nothing was removed")
        return 1
    failed = await remove(hosts.sessions, cluster, there)
    troubles |= {name: error.message if isinstance(error, HostError) else error for name, error in failed.items()}
    # The token goes when no host has it any more.
    if not troubles and len(selection.hosts) == len(cluster.hosts) and local_file(cluster.name).exists():
        forget_token(cluster.name)
    removed = {name: what.lines(cluster.name) for name, what in there.items() if name not in failed}
    if as_json:
        output.result_json({"cluster": cluster.name, "removed": removed, "failed": troubles})
    else:
        output.result(_summary(cluster.name, removed, len(found)))
        for name, message in troubles.items():
            output.note(f"{name}: {message}; what it has is still there: run the same command again later")
    if not troubles:
        return 0
    return 1 if len(troubles) == len(selection.hosts) else 3


async def _jobs(selection: Selection, hosts: Connected) -> tuple[str, ...]:
    from clusterkit.raycluster.observe import ask_ray  # noqa: PLC0415
    from clusterkit.ssh.api import HostError  # noqa: PLC0415

    head = hosts.sessions.get(selection.cluster.head_host.name)
    if head is None:
        return ()
    try:
        return (await ask_ray(head, selection.cluster.name)).jobs
    except HostError:
        return ()


def _shown(there: Mapping[str, Leftovers], cluster: str) -> list[str]:
    return [f"  {name}: {line}" for name, what in there.items() for line in what.lines(cluster)]


def _summary(cluster: str, removed: Mapping[str, list[str]], num_hosts: int) -> str:
    if not removed:
        return f"nothing of cluster {cluster} was removed from {num_hosts} host(s)"
    count = sum(len(lines) for lines in removed.values())
    return f"removed {count} thing(s) of cluster {cluster} from {len(removed)} host(s)"


def _agreed() -> bool:
    import sys  # noqa: PLC0415

    from trainer.errors import UserError  # noqa: PLC0415

    if not sys.stdin.isatty():
        raise UserError("stdin is no terminal to ask on: add -y to remove this")
    return typer.confirm("Remove this?", default=False, err=True)
