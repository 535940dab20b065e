"""`clusterkit use`: choose the current cluster, or list the clusters."""

from __future__ import annotations

import os

import typer

from clusterkit.hosts import inventory
from clusterkit.provision.ray.current import VARIABLE, choose, current, ready_clusters
from clusterkit.ui import output
from trainer.errors import UserError


def use(name: str | None, as_json: bool) -> None:
    """Make the cluster the current one; without a name, list all."""
    if name is not None:
        choose(name)
        output.note(f"commands go to cluster {name} now")
        if name not in ready_clusters():
            output.note(f"this machine knows no Ray of it yet: clusterkit setup --cluster {name}")
        if (shell := os.environ.get(VARIABLE, name)) != name:
            output.note(f"in this shell they still go to {shell}, until: unset {VARIABLE}")
        if as_json:
            output.result_json({"current": name})
        return
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
    elif not chosen and not damaged:
        output.note("none is the current one: clusterkit use NAME")
    if damaged:
        output.error(damaged)
        raise typer.Exit(2)
