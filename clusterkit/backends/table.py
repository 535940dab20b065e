"""All places where runs can live, by name. A new one is a folder beside this file and a line in `BACKENDS`."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from clusterkit.backends.base import Backend, Place, Say
from clusterkit.runs.directory import RunDirectory


class Entry(NamedTuple):
    """Where a backend is written: its module, imported when it is used, and its class, made from a `Place` and a `Say`.

    marker: folder in a run's own that says that the run was submitted to it; empty where it keeps runs elsewhere.
    """

    module: str
    name: str
    marker: str = ""


BACKENDS = {
    "local": Entry("clusterkit.backends.local.backend", "LocalBackend"),
    "ray": Entry("clusterkit.backends.ray.backend", "RayBackend"),
    "slurm": Entry("clusterkit.backends.slurm.backend", "SlurmBackend", "slurm"),
}


def open_backend(place: Place, say: Say) -> Backend:
    """The backend of a place, to be entered.

    Raises:
        UserError: the place is not known, or this machine cannot reach it.
    """
    entry = BACKENDS[place.mode]
    backend: Backend = getattr(import_module(entry.module), entry.name)(place, say)
    return backend


def mode_of(run: RunDirectory) -> str:
    """Which backend a run was started with whose folder is on this machine."""
    return next(
        (mode for mode, entry in BACKENDS.items() if entry.marker and (run.logs / entry.marker).is_dir()), "local"
    )
