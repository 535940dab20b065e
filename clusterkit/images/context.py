"""What a runtime image is built from, as one small tar: Dockerfile, node-side code, the site's certificates, wheels."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

from clusterkit.images.versions import folder, versions
from trainer.errors import UserError

NODE_SIDE = ("trainer", "evaluation", "presets")
"""What runs inside the container."""
DOCKERFILES = {"gpu": "runtime.Dockerfile", "cpu": "runtime-cpu.Dockerfile"}
REPOSITORIES = {"gpu": "clusterkit-runtime", "cpu": "clusterkit-runtime-cpu"}
CONTENT_LABEL = "clusterkit.content"


@dataclass(frozen=True)
class Recipe:
    """What to build, apart from how the site reaches its mirrors.

    kind: "gpu" or "cpu". base: image to build on instead of the pinned one. torch: leave it out of the CPU image
    (False) where nothing trains.
    """

    kind: str = "gpu"
    base: str = ""
    torch: bool = True

    def __post_init__(self) -> None:
        if self.kind not in DOCKERFILES:
            raise UserError(f"{self.kind!r} is no kind of runtime image; expected {' or '.join(DOCKERFILES)}")

    @property
    def content(self) -> str:
        """Hash of all that the image is made of: Dockerfile, versions, node-side code, and the choices above."""
        hashed = hashlib.sha256(f"{self.kind}\0{self.base}\0{self.torch}\0".encode())
        for name, data in (*self.files(), ("versions.env", (folder() / "versions.env").read_bytes())):
            hashed.update(f"{name}\0{len(data)}\0".encode())
            hashed.update(data)
        return hashed.hexdigest()

    @property
    def reference(self) -> str:
        """The tag that it is built under: another one for every content."""
        return f"{REPOSITORIES[self.kind]}:{self.content[:12]}"

    @property
    def arguments(self) -> dict[str, str]:
        """Build arguments: the pins that this Dockerfile names, and the choices above."""
        text = (folder() / DOCKERFILES[self.kind]).read_text(encoding="utf-8")
        named = {line.split()[1].split("=", 1)[0] for line in text.splitlines() if line.startswith("ARG ")}
        chosen = {name: value for name, value in versions().items() if name in named}
        if self.base:
            chosen["CPU_BASE" if self.kind == "cpu" else "CUDA_BASE"] = self.base
        if self.kind == "cpu":
            chosen["WITH_TORCH"] = "1" if self.torch else "0"
        return chosen

    def files(self) -> list[tuple[str, bytes]]:
        """The Dockerfile and the node side, by path in the context."""
        top = folder().parent
        found = [("Dockerfile", (folder() / DOCKERFILES[self.kind]).read_bytes())]
        for package in NODE_SIDE:
            root = _package(top, package)
            paths = (path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
            found += [(f"node/{package}/{path.relative_to(root).as_posix()}", path.read_bytes()) for path in paths]
        return sorted(found)


def context(recipe: Recipe, *, ca_bundle: bytes = b"", wheels: Path | None = None) -> bytes:
    """Pack the build context. The same input gives the same bytes, so that Docker's build cache holds.

    ca_bundle: PEM certificates to trust while building. wheels: folder whose *.whl files pip may use.
    """
    entries = [*recipe.files(), ("site/ca.pem", ca_bundle), ("wheels/README", b"Wheels that pip may use.\n")]
    if wheels is not None:
        entries += [(f"wheels/{path.name}", path.read_bytes()) for path in sorted(wheels.glob("*.whl"))]
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name, data in entries:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    return gzip.compress(raw.getvalue(), compresslevel=6, mtime=0)


def _package(top: Path, name: str) -> Path:
    """Where a package of ours is: beside images/ in the repository; beside or inside clusterkit once installed."""
    for root in (top / name, top.parent / name, top / f"_{name}"):
        if root.is_dir():
            return root
    raise UserError(f"the {name} package is not installed beside clusterkit; install clusterkit again")
