"""`clusterkit assets`: what the local cache has, and fetching more."""

from __future__ import annotations

from clusterkit.data.assets import CATALOGUE, get_asset, list_assets
from clusterkit.ui import output
from trainer.errors import InterruptedRunError


def list_all(cache_dir: str, as_json: bool) -> None:
    """Print the assets, and which of them the cache has."""
    states = list_assets(cache_dir)
    if as_json:
        output.result_json(states)
        return
    for state in states:
        held = f"{state['bytes'] / 1e6:.0f} MB at {state['path']}" if state["present"] else "not fetched"
        step = state["use"] if state["present"] else f"clusterkit assets get {state['name']}"
        details = [held, f"{state['description']}; {state['licence']}", f"next: {step}"]
        output.lines(f"{name:14}{text}" for name, text in zip((state["name"], "", ""), details, strict=True))


def get(name: str, source: str, cache_dir: str, force: bool, as_json: bool) -> None:
    """Fetch one asset, unless a good copy is there."""
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
    output.result(f"next: {CATALOGUE[record['name']].next_command(cache_dir)}")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 1_000_000 else f"{size / 1e3:.0f} kB"
