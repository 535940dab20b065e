"""`clusterkit`: global options, lazy sub-commands, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from types import FrameType
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

from clusterkit.cli.command import write_examples
from clusterkit.cli.hostoptions import expand_arguments
from clusterkit.cli.usage import show_usage_error
from clusterkit.common.suggest import did_you_mean
from clusterkit.ui import output
from trainer.errors import UserError


class Command(NamedTuple):
    """Where a sub-command lives and the line that `--help` shows for it without importing it."""

    module: str
    help: str


COMMANDS = {
    "setup": Command("clusterkit.cli.setup", "Take SSH hosts to a ready Ray cluster."),
    "check": Command("clusterkit.cli.check", "Check whether hosts are fit for a cluster; changes nothing."),
    "init": Command("clusterkit.cli.init", "Keep hosts under a name, so that later commands need none."),
    "use": Command("clusterkit.cli.use", "Choose the cluster that commands go to, or list them."),
    "ray-status": Command("clusterkit.cli.ray_status", "Show the cluster's nodes, GPUs and versions."),
    "down": Command("clusterkit.cli.down", "Take the cluster off its hosts; touches nothing of others."),
    "bundle": Command("clusterkit.cli.bundle", "Collect what hosts without a network need."),
    "train": Command("clusterkit.cli.train", "Train a memory agent from a preset, or go on with an unfinished run."),
    "ask": Command("clusterkit.cli.ask", "Have a checkpoint read text files with a memory, and answer a question."),
    "eval": Command("clusterkit.cli.eval", "Score a checkpoint on mathematics and memory suites."),
    "status": Command("clusterkit.cli.status", "Show how a run is doing: step, reward trend, ETA, checkpoints."),
    "runs": Command("clusterkit.cli.runs", "List all runs: state, step, reward, held-out score, settings that differ."),
    "stop": Command("clusterkit.cli.stop", "End a training: a recover checkpoint first; it can go on later."),
    "logs": Command("clusterkit.cli.logs", "Print a run's log, and go on printing it."),
    "serve": Command("clusterkit.cli.serve", "Engine servers of a run: list them, add one while it trains, end one."),
    "jobs": Command("clusterkit.cli.jobs", "List what a cluster, Slurm or this machine works on."),
    "report": Command("clusterkit.cli.report", "Write a run, or several over one another, as one web page."),
    "trace": Command("clusterkit.cli.trace", "Show how a memory grew chunk by chunk, and what each call was worth."),
    "dashboard": Command("clusterkit.cli.dashboard", "Serve that page live to a browser on this machine."),
    "diagnose": Command(
        "clusterkit.cli.diagnose", "Say why a run failed or stands still, and which setting to change."
    ),
    "recover": Command("clusterkit.cli.recover", "Check what a run would go on from, and whether it fits."),
    "alerts": Command("clusterkit.cli.alerts", "Send failures, stalls and the end of a run to a webhook or command."),
    "presets": Command("clusterkit.cli.presets", "List, show and explain presets."),
    "data": Command("clusterkit.cli.data", "Make training and evaluation files from files that you have."),
    "assets": Command("clusterkit.cli.assets", "Fetch models and data into the local cache."),
    "completion": Command("clusterkit.cli.completion", "Have bash, zsh or fish complete what is typed."),
    "doctor": Command("clusterkit.cli.doctor", "Say what this machine can run, and what to type next."),
}

SECTIONS = {
    "Cluster": ("doctor", "setup", "check", "init", "use", "ray-status", "down", "bundle"),
    "Train": ("presets", "train", "stop", "recover", "serve", "jobs"),
    "Watch": ("runs", "status", "logs", "diagnose", "report", "dashboard", "trace", "alerts"),
    "Score": ("eval", "ask"),
    "Data": ("data", "assets"),
}
"""The sections of `--help`, with the commands in the order in which people need them; "More" has all others."""
EXAMPLES = """
clusterkit train --preset tiny
clusterkit status --watch
clusterkit setup --hostnames gpu[01-04] --cluster lab
eval "$(clusterkit completion bash)"
"""

ALONE = "clusterkit.cli.actions.home"
"""Module of what `clusterkit` does without a command."""
HOST_COMMANDS = {"setup", "check", "init", "ray-status", "down", "stop", "logs", "jobs", "serve"}
"""Commands with `--hostnames a b c` and the spellings of older tools."""


class LazyGroup(TyperGroup):
    """Imports a sub-command's module when it is invoked, so that `--help` and every other command stay fast."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Names in the order of `--help`."""
        return [name for names in sections().values() for name in names]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Import the module of one command and turn its Typer app into a command."""
        if cmd_name not in COMMANDS:
            raise UserError(
                f"clusterkit has no command '{cmd_name}'.{did_you_mean(cmd_name, COMMANDS)}\n"
                f"Commands: {', '.join(COMMANDS)}. What each does: clusterkit --help"
            )
        return typer.main.get_command(import_module(COMMANDS[cmd_name].module).app)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the command lists of `--help` from the tables above, importing nothing."""
        width = max(map(len, COMMANDS))
        for title, names in sections().items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{width}}", COMMANDS[name].help) for name in names])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the examples."""
        write_examples(EXAMPLES, formatter)


def sections() -> dict[str, list[str]]:
    """The commands under the titles of `--help`."""
    found = {title: list(names) for title, names in SECTIONS.items()}
    placed = {name for names in found.values() for name in names}
    return {**found, "More": [name for name in COMMANDS if name not in placed]}


app = typer.Typer(
    cls=LazyGroup,
    # Rich's help panels cost more CPU time than everything else together.
    rich_markup_mode=None,
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 (slow, and for this option only)

        try:
            found = version("clusterkit")
        except PackageNotFoundError:  # a folder on PYTHONPATH that pip knows nothing of
            found = "0+unknown (not installed)"
        typer.echo(f"clusterkit {found}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: bool = typer.Option(  # noqa: ARG001 (its callback acts)
        False, "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
    ),
    debug: bool = typer.Option(  # noqa: ARG001 (`main` takes it out, wherever it stands)
        False, "--debug", help="Show tracebacks and the trainer's own output when something fails."
    ),
) -> None:
    """From SSH hosts to a language model that reads millions of tokens by keeping a memory.

    Start here: clusterkit train --preset tiny

    Without a command: the current cluster, the newest runs of this machine, and what to type next.
    """
    if context.invoked_subcommand is None:
        import_module(ALONE).home()


def _end_in_order() -> None:
    """Have a kill, or a terminal that is closed, end a command as Ctrl-C does: what it has in TMPDIR goes with it."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores the hang-up
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a terminal that closes sends two: the second would end the cleanup
    signal.default_int_handler(number, frame)


def main() -> None:
    """Run the command line; the process ends with 0 done, 1 failed, 2 bad usage or configuration, 130 interrupted."""
    _end_in_order()
    arguments = sys.argv[1:]
    # --debug is global: people add it to the end of the command that has just failed.
    if "--debug" in arguments:
        output.debug = True
        arguments = [argument for argument in arguments if argument != "--debug"]
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if arguments and arguments[0] in HOST_COMMANDS:
        arguments = expand_arguments(arguments)
    output.tolerate_any_encoding()
    try:
        sys.exit(app(args=arguments, prog_name="clusterkit", standalone_mode=False) or 0)
    except typer.Abort:
        output.error("aborted")
        sys.exit(1)
    except UserError as error:
        if output.debug:
            raise
        output.error(str(error))
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of our output (`| head`) has left
        output.silence_stdout()
        sys.exit(1)
    except Exception as error:
        if show_usage_error(error, arguments):
            sys.exit(2)
        if output.debug:
            raise
        if isinstance(error, OSError):
            from clusterkit.ui.file_errors import explain_file_error  # noqa: PLC0415 (slow, and every --help would pay for it)

            if explained := explain_file_error(error):
                output.error(str(explained))
                sys.exit(explained.exit_code)
        output.error(
            f"{type(error).__name__}: {error}\nThis is a fault of clusterkit or of this machine: "
            "add --debug to the command to see where it happened."
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
