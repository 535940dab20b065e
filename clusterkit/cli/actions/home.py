"""`clusterkit` alone: the current cluster, this machine's newest runs, and what to type next. Reads files, no more."""

from __future__ import annotations

from itertools import islice

from clusterkit.backends.words_here import words_here
from clusterkit.hosts import inventory
from clusterkit.provision.ray.current import Current, current
from clusterkit.runs.directory import RUNS, folder_of_runs, runs
from clusterkit.runs.overview import RunOverview, overviews
from clusterkit.runs.status import UNREADABLE
from clusterkit.runs.trace.heldout import AFTER, heldout_file
from clusterkit.ui import output
from clusterkit.ui.runs_table import runs_lines
from clusterkit.ui.width import terminal_width
from trainer.errors import UserError

SHOWN_RUNS = 5


def home() -> None:
    """Print where commands go, the newest runs here, and commands that fit."""
    lines, now = _cluster_lines()
    folder = folder_of_runs(RUNS)
    newest, refused = list[RunOverview](), ""
    try:
        newest = list(islice(overviews(folder, ask_queue=False), SHOWN_RUNS))
    except OSError as error:
        refused = f"{error.filename or folder} may not be read: {error.strerror}"
    if refused:
        lines += [f"Runs under {folder}: {refused}"]
    elif newest:
        count = len(runs(folder))
        which = f"the newest {len(newest)} of {count}" if count > len(newest) else f"{count}"
        lines += ["", f"Runs under {folder}: {which}", *_table(newest[::-1])]
    else:
        lines += [f"Runs under {folder}: none yet"]
    steps = list[tuple[str, str]]()
    if readable := [one for one in newest if one.state != UNREADABLE]:
        # Commands mean the newest run of this machine, if nothing else is said.
        here = "--here" if now else ""
        steps = _of_run(readable[0], here if readable[0] is newest[0] else words_here(readable[0].run))
    if newest:
        steps.append(("all of them", "clusterkit runs --here" if now else "clusterkit runs"))
    if now:
        steps += [("the cluster's runs", "clusterkit runs"), ("its nodes and GPUs", "clusterkit ray-status")]
    if refused:
        steps.append(("runs of another folder", "clusterkit runs --fileroot FOLDER"))
    elif not newest:
        steps.append(("train a small one here", "clusterkit train --preset tiny"))
    if not inventory.cluster_names():
        steps.append(("make a cluster", "clusterkit setup --hostnames H1 H2 ..."))
    steps += [
        ("what this machine can run", "clusterkit doctor"),
        ("what can be trained", "clusterkit presets"),
        ("all commands", "clusterkit --help"),
    ]
    width = max(len(purpose) for purpose, _ in steps)
    lines += ["", "Next:", *(f"  {purpose:<{width}}  {command}" for purpose, command in steps)]
    output.lines(lines)


def _cluster_lines() -> tuple[list[str], str]:
    """Return what there is to say of clusters, and the name of the current one."""
    try:
        now = current()
    except UserError as error:
        return [f"Cluster: {error}"], ""
    if not now.name:
        return [_without_current(now)], ""
    try:
        hosts = len(inventory.load(now.name).hosts)
    except UserError as error:
        return [f"Cluster {now.name} ({now.why}): {error}"], now.name
    told = f"Cluster {now.name} ({now.why}), {hosts} {'host' if hosts == 1 else 'hosts'}"
    if now.name not in now.ready:
        return [f"{told}, not set up: clusterkit setup --cluster {now.name}; this machine: --here"], now.name
    return [f"{told}: commands go there; this machine: --here"], now.name


def _without_current(now: Current) -> str:
    kept = inventory.cluster_names()
    if now.ready:
        names = ", ".join(name if name in now.ready else f"{name} (not set up)" for name in kept)
        none = "commands go to this machine; to one of them" if now.here else "none is the current one"
        return f"Clusters: {names}; {none}: clusterkit use NAME"
    if kept:
        return f"Clusters: {', '.join(kept)}, not set up: clusterkit setup --cluster {kept[0]}"
    return "Cluster: none; commands go to this machine"


def _of_run(one: RunOverview, named: str) -> list[tuple[str, str]]:
    """Return what may be typed about a run, by its state. named: words that name it, where they are needed."""

    def command(words: str) -> str:
        return f"clusterkit {words} {named}".rstrip()

    if one.alive or one.state == "submitted":
        return [("watch it", command("status --watch")), ("its log", command("logs -f")), ("end it", command("stop"))]
    if one.state == "finished":
        steps = [("how it went", command("status")), ("as a web page", command("report"))]
        if heldout_file(one.run, AFTER).is_file():
            steps.append(("see it read", command("trace --heldout")))
        return steps
    return [
        ("why it ended", command("diagnose")),
        (
            "once put right" if one.run.is_refused else "go on with it",
            one.again or "the same clusterkit train command again",
        ),
    ]


def _table(listed: list[RunOverview]) -> list[str]:
    width = terminal_width()
    return [f"  {line}" for line in runs_lines(listed, [], None if width is None else width - 2)]
