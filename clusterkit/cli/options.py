"""Options that several commands have, spelled and explained alike, and the settings of every command's Typer app."""

from __future__ import annotations

import typer

JSON_OPTION = typer.Option(False, "--json", help="Print JSON.")

LOOPBACK = "127.0.0.1"
"""Where servers listen that nobody but this machine asks."""


def new_app(text: str | None = None, *, no_args_is_help: bool = False) -> typer.Typer:
    """The Typer app of a command. text: of its --help, where no function of it has one."""
    app = typer.Typer(
        no_args_is_help=no_args_is_help,
        rich_markup_mode=None,  # rich's help panels cost more CPU time than everything else together
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    if text is not None:  # None, given to Typer as help, would hide the docstring of a callback
        app.info.help = text
    return app
