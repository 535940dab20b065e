"""Options that several commands have, spelled and explained alike, and the Typer app that every command makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from clusterkit.cli.command import Command, Group

JSON_OPTION = typer.Option(False, "--json", help="Print JSON.")

CACHE_HELP = "Cache folder of assets [$CLUSTERKIT_CACHE or ~/.cache/clusterkit]."
CACHE_OPTION = typer.Option("", "--cache-dir", metavar="FOLDER", help=CACHE_HELP)
ENGINE_OPTION = typer.Option(
    "auto", "--engine", metavar="auto|embedded|sglang|vllm|openai", help="What samples; openai with --server-url."
)
SERVER_URL_OPTION = typer.Option(
    "",
    "--server-url",
    metavar="URL",
    help="A running server: with OpenAI's /v1/completions, or of the --engine that is named.",
)
SERVER_PYTHON_OPTION = typer.Option("", "--server-python", metavar="FILE", help="Interpreter that has SGLang or vLLM.")
COMPARE_OPTION = typer.Option(
    None, "--compare", metavar="EXPERIMENT/TRIAL", help="A run to draw over it; TRIAL alone, too; repeatable."
)

LOOPBACK = "127.0.0.1"
"""Where servers listen that nobody but this machine asks."""


class App(typer.Typer):
    """A Typer app whose commands understand older spellings and show examples under their options."""

    def command(self, name: str | None = None, *, examples: str = "", **options: Any) -> Callable[[Any], Any]:
        """Add a command, as Typer does. examples: command lines, one a line."""
        return super().command(name, **{"cls": Command, "epilog": examples, **options})

    def callback(self, *, examples: str = "", **options: Any) -> Callable[[Any], Any]:
        """Make the app a group, as Typer does. examples: command lines, one a line."""
        return super().callback(**{"cls": Group, "epilog": examples, **options})


def new_app(text: str | None = None, *, no_args_is_help: bool = False, examples: str = "") -> App:
    """The Typer app of a command.

    Args:
        text: of its --help, where no function of it has one.
        no_args_is_help: a group that does nothing by itself.
        examples: command lines of a group without a callback, one a line.
    """
    app = App(
        cls=Group,
        no_args_is_help=no_args_is_help,
        rich_markup_mode=None,  # rich's help panels cost more CPU time than everything else together
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog=examples or None,
    )
    if text is not None:  # None, given to Typer as help, would hide the docstring of a callback
        app.info.help = text
    return app
