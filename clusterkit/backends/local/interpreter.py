"""Which Python runs the node's code on this machine: that of `make gpu` for what takes GPUs, else this one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from trainer.errors import UserError

VARIABLE = "CLUSTERKIT_GPU_PYTHON"
FOLDER = ".venv-gpu"
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
"""The driver's list with one entry a GPU."""
REPOSITORY = Path(__file__).parents[3]
LOOK_SECONDS = 60
_LOOK = "import importlib.util, sys; print(*(n for n in sys.argv[1:] if not importlib.util.find_spec(n)))"


def gpus_present() -> int:
    """GPUs of this machine that the driver lists; under WSL, where it has no such folder, that nvidia-smi lists."""
    if NVIDIA_GPUS.is_dir():
        return sum(1 for _ in NVIDIA_GPUS.iterdir())
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=LOOK_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def gpu_python() -> str:
    """Return the interpreter for what takes GPUs.

    It is the one that $CLUSTERKIT_GPU_PYTHON names; else this one, where it has an engine; else that of `.venv-gpu` in
    the repository or beside this one's virtual environment; else this one.

    Raises:
        UserError: $CLUSTERKIT_GPU_PYTHON names no program.
    """
    if named := os.environ.get(VARIABLE):
        if shutil.which(named) is None:
            raise UserError(f"{VARIABLE}={named} is no program: name the interpreter that `make gpu` made, or unset it")
        return named
    if not find_spec("sglang") and not find_spec("vllm") and (found := _made_by_make_gpu()) is not None:
        return str(found)
    return sys.executable


def python_here() -> str:
    """Return the interpreter for what takes GPUs where there are some, and can do without."""
    return gpu_python() if gpus_present() else sys.executable


def missing_packages(python: str, names: Sequence[str]) -> list[str]:
    """Return those of these packages that an interpreter does not have. Raises UserError where it does not run."""
    if python == sys.executable:
        return [name for name in names if not find_spec(name)]
    # -P: a folder of the current directory is no package.
    command = [python, "-P", "-c", _LOOK, *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(
            f"{python} does not run ({error}): make gpu mends {FOLDER}; {VARIABLE} names another interpreter"
        ) from error
    return done.stdout.split()


def _made_by_make_gpu() -> Path | None:
    folders = (folder / FOLDER for folder in (REPOSITORY, Path(sys.prefix).parent))
    # Where others may make folders, as in /tmp, theirs is none of ours.
    ours = (folder for folder in folders if folder.is_dir() and folder.stat().st_uid in (0, os.geteuid()))
    return next((place for folder in ours if os.access(place := folder / "bin" / "python", os.X_OK)), None)
