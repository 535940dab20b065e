"""Download a repository of the Hugging Face hub into a folder of the shared storage, on a node.

This runs inside the runtime container, from stdin, with one argument: '{"repository": …, "folder": …}'. It needs
huggingface_hub and nothing of clusterkit. It prints progress to stdout; the last line is `done` with a JSON record. It
goes on where an earlier run was interrupted, checks every file by size and hash, replaces Git LFS pointers by their
files, and keeps all other files of the user's.

Why not `snapshot_download`: since huggingface_hub 2 it begins every interrupted file anew, after a kill too.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    from huggingface_hub import HfApi, get_token, hf_hub_url
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.file_download import http_get
except ImportError:
    if __name__ == "__main__":
        sys.exit("error: the image has no huggingface_hub")
    raise

MANIFEST = "clusterkit-asset.json"
LFS_MARK = b"version https://git-lfs.github.com/spec/"
WORKERS = 4
PROGRESS_SECONDS = 5.0
RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0)
"""Waits before further attempts where the server fails (5xx); the library itself tries again after other failures."""
SPARE_BYTES = 1 << 30
# Weights in formats that nothing reads where there are safetensors.
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".tflite", ".ot")


class FetchError(Exception):
    """The repository cannot be downloaded; the message says why and what to do."""


def fetch(repository: str, folder: Path, kind: str = "model", revision: str = "main") -> dict[str, int]:
    """Download the files that a training reads into `folder`.

    Returns:
        Number of files downloaded, number of files, and their bytes.

    Raises:
        FetchError: no such repository, no access, no network, no space, or a file that stays damaged.
    """
    files, commit = _listing(repository, kind, revision)
    own = _manifest(folder)
    left = {name: entry for name, entry in files.items() if not _matches(folder, name, entry)}
    kept = [name for name in left if _is_users(folder, name, own)]
    for name in kept:
        print(f"{folder / name} differs from the one of {repository}: it is kept as it is", flush=True)
        del left[name]
    staging = folder.with_name(f".{folder.name}.partial")
    if left:
        with _locked(staging), _progress(staging, sum(entry["bytes"] for entry in left.values())):
            _require_space(folder, staging, left)
            _download(repository, kind, commit, left, staging, folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in files:
        if name in kept:
            files[name] = {"bytes": (folder / name).stat().st_size, "sha256": _sha256(folder / name)}
        elif "sha256" not in files[name]:
            files[name]["sha256"] = _sha256(folder / name)
    manifest = {
        "asset": folder.name,
        "source": repository,
        "revision": commit,
        "kept": kept,
        "files": {name: {"bytes": entry["bytes"], "sha256": entry["sha256"]} for name, entry in files.items()},
    }
    _write(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    shutil.rmtree(staging, ignore_errors=True)
    return {"fetched": len(left), "files": len(files), "bytes": sum(e["bytes"] for e in files.values())}


def _listing(repository: str, kind: str, revision: str) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the repository's files with size and hash (`sha256` of large files, `git` of others), and the commit."""
    with _explained(repository):
        info = HfApi().repo_info(repository, repo_type=kind, revision=revision, files_metadata=True)
    entries: dict[str, dict[str, Any]] = {}
    for item in getattr(info, "siblings", None) or []:
        if item.lfs is not None:
            entries[item.rfilename] = {"bytes": item.lfs.size, "sha256": item.lfs.sha256}
        else:
            entries[item.rfilename] = {"bytes": item.size or 0, "git": item.blob_id}
    if any(name.endswith(".safetensors") for name in entries):
        entries = {name: entry for name, entry in entries.items() if not name.endswith(OTHER_WEIGHTS)}
    entries = {name: entry for name, entry in entries.items() if not name.startswith("original/")}
    for name in entries:
        if name.startswith("/") or ".." in Path(name).parts:
            raise FetchError(f"{repository} has a file with the impossible name {name}")
    return entries, str(info.sha)


def _download(
    repository: str, kind: str, commit: str, left: dict[str, dict[str, Any]], staging: Path, folder: Path
) -> None:
    def one(name: str) -> None:
        url = hf_hub_url(repository, name, repo_type=kind, revision=commit)
        # The second time from the start: the bytes of an earlier run may be of another file.
        for _ in range(2):
            with _explained(repository):
                _transfer(url, staging / name, left[name]["bytes"])
            if _matches(staging, name, left[name]):
                return
            (staging / name).unlink()
        raise FetchError(f"{name} of {repository} arrives damaged (its hash differs): try another --hf-endpoint")

    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        outcomes = [pool.submit(one, name) for name in sorted(left, key=lambda name: -left[name]["bytes"])]
        try:
            for outcome in concurrent.futures.as_completed(outcomes):
                outcome.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for path in [path for path in staging.rglob("*") if path.is_file()]:
        if path.relative_to(staging).as_posix() not in left:
            path.unlink()  # of an earlier, different revision
    if not folder.exists():
        staging.rename(folder)
        return
    for name in left:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).replace(folder / name)


def _transfer(url: str, target: Path, size: int) -> None:
    """Download a file over HTTP, from the byte at which an earlier attempt or run stopped."""
    if target.is_file():
        return
    part = target.with_name(f"{target.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    if part.exists() and part.stat().st_size > size:
        part.unlink()
    headers = {"Accept-Encoding": "identity"}  # compressed, the bytes could not be counted
    if token := get_token():
        headers["Authorization"] = f"Bearer {token}"
    for wait in (*RETRY_SECONDS, None):
        try:
            with part.open("ab") as file:
                http_get(url, file, resume_size=file.tell(), headers=headers, expected_size=size)
            break
        except HfHubHTTPError as error:
            if wait is None or error.response.status_code < 500:
                raise
            time.sleep(wait)
    part.rename(target)


def _matches(folder: Path, name: str, entry: dict[str, Any]) -> bool:
    """Return whether the folder has the file with the size and hash that the hub names."""
    path = folder / name
    if not path.is_file() or path.stat().st_size != entry["bytes"]:
        return False
    if "sha256" in entry:
        return _sha256(path) == str(entry["sha256"])
    content = path.read_bytes()
    digest = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
    return digest.hexdigest() == str(entry["git"])


def _is_users(folder: Path, name: str, ours: dict[str, Any]) -> bool:
    """Return whether somebody else put a file there. Empty files and Git LFS pointers hold nothing and do not count."""
    path = folder / name
    if name in ours or not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        return file.read(len(LFS_MARK)) != LFS_MARK


def _manifest(folder: Path) -> dict[str, Any]:
    """Return the files that an earlier run put there."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return {name: entry for name, entry in manifest["files"].items() if name not in manifest.get("kept", ())}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _require_space(folder: Path, staging: Path, left: dict[str, dict[str, Any]]) -> None:
    here = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())
    needed = sum(entry["bytes"] for entry in left.values()) - here + SPARE_BYTES
    free = shutil.disk_usage(staging).free
    if free < needed:
        raise FetchError(
            f"no space left for {folder}: {free / 1e9:.1f} GB are free, {needed / 1e9:.1f} GB are needed: free some"
        )


@contextlib.contextmanager
def _locked(staging: Path) -> Iterator[None]:
    """Allow one download of a folder at a time. The lock ends with the process, however that ends."""
    staging.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(staging, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FetchError(f"another download into {staging} is going on: wait for its end") from None
        except OSError as error:
            raise FetchError(
                f"{staging} cannot be locked ({error.strerror}), so that two downloads could spoil one another: mount "
                "the storage with file locks (Lustre: -o flock; NFS: without nolock)"
            ) from None
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _progress(staging: Path, total: int) -> Iterator[None]:
    """Print how many bytes have arrived, every few seconds."""
    over = threading.Event()

    def report() -> None:
        while not over.wait(PROGRESS_SECONDS):
            with contextlib.suppress(OSError):
                here = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())
                print(f"{here / 1e9:.2f} of {total / 1e9:.2f} GB", flush=True)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def _explained(repository: str) -> Iterator[None]:
    where = os.environ.get("HF_ENDPOINT") or "the Hugging Face hub"
    try:
        yield
    except GatedRepoError as error:
        raise FetchError(
            f"{repository} is gated: accept its terms on its page, and give a token with --hf-token-file"
        ) from error
    except RepositoryNotFoundError as error:
        raise FetchError(
            f"{where} has no {repository}, or it is private: check the name, or --hf-token-file"
        ) from error
    except RevisionNotFoundError as error:
        raise FetchError(f"{repository} has no such revision") from error
    except Exception as error:
        if isinstance(error, OSError) and error.filename:
            raise FetchError(f"{error.filename}: {error.strerror}") from error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FetchError(f"{repository} from {where}: {reason}: check the network, or --hf-endpoint") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def main(argument: str) -> int:
    """Run `fetch` with the arguments of a JSON object and print what it returns; return the exit code."""
    arguments = json.loads(argument)
    try:
        record = fetch(**{**arguments, "folder": Path(arguments["folder"])})
    except FetchError as error:
        # An address may hold a user and a password.
        print(f"error: {re.sub(r'//[^/@ ]+@', '//', str(error))}", file=sys.stderr)
        return 1
    print(f"done {json.dumps(record)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
