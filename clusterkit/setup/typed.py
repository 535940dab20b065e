"""The options of `clusterkit setup` as they were typed. Few imports, since `--help` loads this."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from clusterkit.provision.site import Site
from clusterkit.ssh.uploads import UPLOADS


@dataclass(frozen=True)
class SetupOptions:
    """The options of `clusterkit setup` beside those that name hosts, unchecked; see its --help."""

    site: Site = field(default_factory=Site)
    preset: str = ""
    task: str | None = None
    image_from: str = "auto"
    image_refresh: bool = False
    image_torch: bool = True
    hf_token_file: Path | None = None
    bundle: Path | None = None
    model_path: str = ""
    dataset_path: str = ""
    settings: tuple[str, ...] = ()
    train: bool = True
    gpus: bool | None = None
    privileged: bool = False
    recreate: bool = False
    force: bool = False
    dry_run: bool = False
    uploads: int = UPLOADS
    retries: int = 0
