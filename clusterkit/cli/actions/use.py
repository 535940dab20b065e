"""`clusterkit use`: choose the current cluster or this machine, or list the clusters."""

from __future__ import annotations

import os

import typer

from clusterkit.hosts import inventory
from clusterkit.provision.ray.current import VARIABLE, choose, choose_here, current, ready_clusters
from clusterkit.ui import output
from trainer.errors import UserError


def use(name: str | None, *, here: bool, as_json: bool) -> None:
    """Make the cluster the current one, or none of them; without either, list all."""
    if name is not None and here:
        raise UserError("--here and NAME are two places: choose one")
    if name is None and not here:
        _list(as_json)
        return
    if name is None:
        choose_here()
        output.note("commands go to this machine now")
    else:
        choose(name)
        output.note(f"commands go to cluster {name} now")
        if name not in ready_clusters():
            output.note(f"this machine knows no Ray of it yet: clusterkit setup --cluster {name}")
    if (shell := os.environ.get(VARIABLE, "").strip()) and shell != name:
        output.note(f"in this shell they still go to {shell}, until: unset {VARIABLE}")
    if as_json:
        output.result_json({"current": name})


def _list(as_json: bool) -> None:
    try:
        now, damaged = current(), ""
    except UserError as error:  # the list is what is needed to choose again
        now, damaged = None, str(error)
    chosen = now.name if now is not None else ""
    kept = inventory.cluster_names()
    if as_json:
        clusters = [{"name": one, "set_up": one in ready_clusters(), "current": one == chosen} for one in kept]
        output.result_json({"current": chosen or None, "why": now.why if now else damaged, "clusters": clusters})
    else:
        for one in kept:
            state = "" if one in ready_clusters() else "  not set up: clusterkit setup --cluster " + one
            why = f"  ({now.why})" if now is not None and one == chosen else ""
            output.result(f"{'*' if one == chosen else ' '} {one}{why}{state}")
    if not kept:
        output.note("there is no cluster: make one of SSH hosts with clusterkit setup --hostnames H1 H2 …")
    elif now is not None and not chosen:
        none = "commands go to this machine; to a cluster" if now.here else "none is the current one"
        output.note(f"{none}: clusterkit use NAME")
    if damaged:
        output.error(damaged)
        raise typer.Exit(2)
