"""Classes of the user's own (agent.name=module:Class): looked at before a run starts, and packed for the nodes.

Their modules are never imported into this process: a Python of its own does that, as the trainer's will.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from clusterkit.common.node_code import NODE_SIDE
from trainer.config import RunConfig
from trainer.custom import UNKNOWN_HERE
from trainer.errors import UserError

LOOK_SECONDS = 120
MOST_BYTES = 20 << 20
_LEFT_OUT = frozenset({"__pycache__", ".git", ".venv", "venv", "node_modules"})


def require_own(config: RunConfig) -> None:
    """Refuse a class that cannot be imported or lacks a method; what wants the nodes' packages is left to the nodes."""
    if not config.custom:
        return
    named = [f"{setting}={name}" for setting, name in config.custom.items()]
    command = [sys.executable, "-P", "-m", "trainer.custom", config.code_dir, *named]
    root = str(Path(__file__).parents[2])  # where trainer lies, be it installed or not
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, root])}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=LOOK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{' '.join(named)}: importing takes more than {LOOK_SECONDS} s: let the module do its work in the class"
        ) from None
    if done.returncode in (0, UNKNOWN_HERE):
        return
    try:
        message = str(json.loads(done.stdout.splitlines()[-1])["error"])
    except (IndexError, KeyError, TypeError, ValueError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        message = f"{' '.join(named)}: importing ends the process: {last}"
    raise UserError(message)


def own_files(config: RunConfig) -> tuple[tuple[str, bytes], ...]:
    """Path and content of the files that the user's classes need, in order of the paths.

    The module or package of each class, and what its files import from the same folder. Packages that are installed
    are not packed: the nodes have their own.

    Raises:
        UserError: a module is not found, bears the name of one of ours, or there is too much.
    """
    packed: dict[str, bytes] = {}
    roots = [(name.partition(":")[0].partition(".")[0], setting) for setting, name in config.custom.items()]
    for module, setting in dict(roots).items():
        if module in (*NODE_SIDE, "clusterkit"):
            raise UserError(f"{setting}: a module of your own cannot be called {module}: rename it")
        root = _root_of(module, config.code_dir)
        if root is None:
            raise UserError(
                f"{setting}: there is no module {module} in PYTHONPATH or {config.code_dir}: run the command in the "
                f"folder that holds {module}.py"
            )
        _pack(module, root, packed)
    if (total := sum(map(len, packed.values()))) > MOST_BYTES:
        raise UserError(
            f"the code of {', '.join(name for name, _ in roots)} has {total >> 20} MiB with all that lies beside it, "
            f"and at most {MOST_BYTES >> 20} are sent: keep it in a folder of its own, data elsewhere"
        )
    return tuple(sorted(packed.items()))


def _root_of(module: str, code_dir: str) -> Path | None:
    """Folder that a top-level module is imported from, without importing it."""
    for folder in _search_path(code_dir):
        spec = PathFinder.find_spec(module, [folder])
        if spec is not None and (spec.origin or spec.submodule_search_locations):
            return Path(folder)
    return None


def _search_path(code_dir: str) -> Sequence[str]:
    """What is the user's: PYTHONPATH and the folder of the run, not what is installed."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return [*paths, code_dir] if code_dir else paths


def _pack(module: str, root: Path, packed: dict[str, bytes]) -> None:
    """Add a module's file, or its package, and what they import from the same folder."""
    for path in _files(module, root):
        name = path.relative_to(root).as_posix()
        if name in packed:
            continue
        packed[name] = path.read_bytes()
        if sum(map(len, packed.values())) > MOST_BYTES:
            return  # the caller says so
        if path.suffix == ".py":
            for other in _imported(packed[name]):
                if other not in (*NODE_SIDE, "clusterkit"):
                    _pack(other, root, packed)


def _files(module: str, root: Path) -> list[Path]:
    if (root / f"{module}.py").is_file():
        return [root / f"{module}.py"]
    folder = root / module
    found = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(path for path in found if not _LEFT_OUT.intersection(path.relative_to(root).parts))


def _imported(source: bytes) -> Iterator[str]:
    """Top-level names of the modules that a file imports; none where it is not Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
