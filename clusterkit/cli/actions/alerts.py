"""`clusterkit alerts`: look again and again, and send what happened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import typer

from clusterkit.backends.table import open_backend
from clusterkit.cli.actions.target import place_of_run
from clusterkit.cli.runoptions import RunOptions
from clusterkit.hosts.folders import config_folder
from clusterkit.observe.alerts.delivery import Receiver, command_from, webhook_from
from clusterkit.observe.alerts.watch import Watcher
from clusterkit.ui import output
from trainer.errors import UserError


@dataclass(frozen=True)
class Printed:
    """A receiver whose alerts are printed, too, once it has them."""

    receiver: Receiver

    @property
    def name(self) -> str:
        """See `Receiver.name`: what was delivered without --json is not delivered again."""
        return self.receiver.name

    def send(self, body: dict[str, Any]) -> None:
        """See `Receiver.send`."""
        self.receiver.send(body)
        output.line_json(body)


def alerts(
    run: RunOptions, webhook: str | None, command: str | None, *, every: float, once: bool, as_json: bool
) -> None:
    """Watch a run until it is complete, or look once."""
    if command is not None and webhook is not None:
        raise UserError("--webhook and --command are two receivers: give one, and start a second watcher for the other")
    receiver: Receiver = command_from(command) if command is not None else webhook_from(webhook)
    if as_json:
        receiver = Printed(receiver)
    place = place_of_run(run)
    with open_backend(place, output.note) as backend:
        runs = backend.runs()
        found = runs.find(run.experiment, run.trial)
        record = None
        if place.hosts is not None:  # what was delivered is noted on this machine
            folder = config_folder() / "clusters" / str(place.hosts.cluster) / "alerts"
            record = folder / found.experiment / f"{found.trial}.json"
        watcher = Watcher(found, receiver, output.note, mirror=runs, record=record)
        if once:
            _, sent = watcher.look()
            raise typer.Exit(0 if sent else 1)
        output.note(f"watching {found.name} every {every:g} s; Ctrl-C ends it")
        try:
            watcher.watch(every)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
