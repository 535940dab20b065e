"""The build context of a runtime image, as one small tar: Dockerfile, node code, the site's certificates, wheels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from clusterkit.common.node_code import archive, content_of, node_files
from clusterkit.provision.images.versions import folder, versions
from trainer.errors import UserError

DOCKERFILES = {"gpu": "runtime.Dockerfile", "cpu": "runtime-cpu.Dockerfile"}
REPOSITORIES = {"gpu": "clusterkit-runtime", "cpu": "clusterkit-runtime-cpu"}
CONTENT_LABEL = "clusterkit.content"


@dataclass(frozen=True)
class Recipe:
    """What to build, apart from the site's mirrors. Its files are read once, so `content` describes what is built."""

    kind: str = "gpu"  # gpu or cpu
    base: str = ""  # image to build on instead of the pinned one
    torch: bool = True  # False leaves torch out of the CPU image, for hosts that train nothing

    def __post_init__(self) -> None:
        if self.kind not in DOCKERFILES:
            raise UserError(f"{self.kind!r} is no kind of runtime image; expected {' or '.join(DOCKERFILES)}")

    @cached_property
    def content(self) -> str:
        """Hash of all that the image is made of: Dockerfile, versions, node code, and the choices above."""
        pins = ("versions.env", (folder() / "versions.env").read_bytes())
        return content_of((*self.files, pins), self.kind, self.base, str(self.torch))

    @property
    def reference(self) -> str:
        """The tag of the image; every content has another one."""
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

    @cached_property
    def files(self) -> list[tuple[str, bytes]]:
        """The Dockerfile and the node side, by path in the context."""
        dockerfile = ("Dockerfile", (folder() / DOCKERFILES[self.kind]).read_bytes())
        return sorted([dockerfile, *((f"node/{name}", data) for name, data in node_files())])


def context(recipe: Recipe, *, ca_bundle: bytes = b"", wheels: Path | None = None) -> bytes:
    """Return the build context. The same input gives the same bytes, so that Docker's build cache works.

    Args:
        wheels: folder whose *.whl files pip may use.
    """
    entries = [*recipe.files, ("site/ca.pem", ca_bundle), ("wheels/README", b"Wheels that pip may use.\n")]
    if wheels is not None:
        entries += [(f"wheels/{path.name}", path.read_bytes()) for path in sorted(wheels.glob("*.whl"))]
    return archive(entries)
