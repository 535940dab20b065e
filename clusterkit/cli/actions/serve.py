"""`clusterkit serve`: list, add and end the engine servers of a run, here or on a cluster."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from clusterkit.backends.base import Place, RunSelector, folder_of_runs
from clusterkit.backends.ray.backend import RayBackend
from clusterkit.backends.ray.head import Head
from clusterkit.backends.ray.newest import require_newest
from clusterkit.cli.actions.target import place_of_run, selector_of
from clusterkit.cli.runoptions import RunOptions
from clusterkit.provision.ray.current import has_current
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.status import find_run
from clusterkit.serving.engines import (
    add_local,
    change_remote,
    local_servers,
    remote_servers,
    stop_local,
    table,
    views,
)
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ui import output
from trainer.errors import RunError, UserError
from trainer.serving.registry import Registration, folder_of

T = TypeVar("T")


def list_servers(run: RunOptions, hosts: HostOptions, *, as_json: bool) -> None:
    """Print a run's servers."""
    found = views(_servers(*_find(run, hosts)))
    output.outcome("\n".join(table(found)), {"servers": [view.as_dict() for view in found]}, as_json=as_json)


def add(run: RunOptions, hosts: HostOptions, *, gpus: str, model: str, as_json: bool) -> None:
    """Add one server to a run."""
    place, selector = _find(run, hosts)
    if place.hosts is not None:
        said = _on_cluster(place, selector, partial(change_remote, action="add", argument=""))
        name = said.partition(" ")[0]
        output.outcome(said, {"servers": [{"name": name, "state": "starting"}]}, as_json=as_json)
        _print_next(run, f"--cluster {place.hosts.cluster}" if place.hosts.cluster else "")
        return
    try:
        numbers = tuple(int(number) for number in gpus.split(",") if number.strip())
    except ValueError:
        raise UserError(f"--gpus {gpus}: give numbers with commas, such as 4,5") from None
    one = add_local(_run(place, selector), numbers, model, output.note)
    output.outcome(f"{one.name} answers at {one.url}", {"servers": [views([one])[0].as_dict()]}, as_json=as_json)
    _print_next(run, "--here" if has_current() and run.fileroot is None else "", one.name)


def stop(run: RunOptions, hosts: HostOptions, names: list[str], *, as_json: bool) -> None:
    """End servers of a run by their names; without names all."""
    place, selector = _find(run, hosts)
    if place.hosts is None:
        ended = stop_local(_run(place, selector), names)
        sentence = f"ended: {', '.join(ended)}" if ended else "the run has no engine servers"
        output.outcome(sentence, {"ended": ended}, as_json=as_json)
        return
    names = names or [one.name for one in _servers(place, selector)]
    if not names:
        raise RunError("the run has no engine servers")
    said = [_on_cluster(place, selector, partial(change_remote, action="stop", argument=name)) for name in names]
    output.outcome("\n".join(said), {"ended": names}, as_json=as_json)


def _print_next(run: RunOptions, place: str, name: str = "NAME") -> None:
    """Print what may come after a server was added. place: the option that names where it is."""
    both = run.experiment and run.trial
    word = shlex.quote(f"{run.experiment}/{run.trial}") if both else ""
    options = [("--experiment", run.experiment), ("--trial", run.trial)] if not both else []
    options += [("--fileroot", run.fileroot)]
    more = [place, *(f"{option} {shlex.quote(value)}" for option, value in options if value)]

    def command(*words: str) -> str:
        return " ".join(filter(None, ("clusterkit serve", *words, *more)))

    output.advice(["Next:", f"  all servers  {command('list', word)}", f"  end it       {command('stop', word, name)}"])


def _find(run: RunOptions, hosts: HostOptions) -> tuple[Place, RunSelector]:
    selector = selector_of(run)
    return place_of_run(run, hosts=hosts), selector


def _run(place: Place, selector: RunSelector) -> RunDirectory:
    return find_run(folder_of_runs(place.fileroot), selector.experiment, selector.trial, selector.user)


def _servers(place: Place, selector: RunSelector) -> list[Registration]:
    if place.hosts is None:
        return local_servers(_run(place, selector))
    return _on_cluster(place, selector, lambda head, run: remote_servers(head, folder_of(run.logs)))


def _on_cluster(place: Place, selector: RunSelector, work: Callable[[Head, RunDirectory], Awaitable[T]]) -> T:
    with RayBackend(place, output.note) as cluster:
        wanted = cluster.in_folder(selector)

        async def do(head: Head) -> T:
            return await work(head, await require_newest(head, wanted))

        return cluster.do(do)
