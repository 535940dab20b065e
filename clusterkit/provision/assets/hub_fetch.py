"""Downloads a repository of the Hugging Face hub into a folder of the shared storage, on a node.

Runs inside the runtime container, from stdin, with one argument: '{"repository": …, "folder": …}'. Needs
huggingface_hub and nothing of clusterkit. Progress goes to stdout; the last line is `done` with a JSON record. What was
downloaded before an interruption is used again; every file is checked by size and hash; Git LFS pointers are replaced
by the files they stand for; other files of the user are kept.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import http.client
import json
import os
import re
import shutil
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

try:
    from huggingface_hub import HfApi, get_token, hf_hub_url
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
except ImportError:
    if __name__ == "__main__":
        sys.exit("error: the image has no huggingface_hub")
    raise

MANIFEST = "clusterkit-asset.json"
LFS_MARK = b"version https://git-lfs.github.com/spec/"
WORKERS = 4
TELL_SECONDS = 5.0
SILENCE_SECONDS = 60.0
"""Longest silence of a server."""
ATTEMPTS = 5
"""Failures in a row, without a byte in between, until a file is given up."""
WAIT_SECONDS = 0.5
"""Before the first further attempt; doubled each time."""
SPARE_BYTES = 1 << 30
# Weights in formats that are not read when safetensors are there.
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".tflite", ".ot")


class FetchError(Exception):
    """The repository cannot be had; the message says why and what to do."""


def fetch(
    repository: str, folder: Path, kind: str = "model", revision: str = "main", files: tuple[str, ...] = ()
) -> Any:
    """Fill `folder`; return the manifest. files: only those; empty: all that a training needs.

    Raises:
        FetchError: no such repository, no access, no network, no space, or a file that stays damaged.

    """
    wanted, commit = _listing(repository, kind, revision, files)
    own = _manifest(folder)
    left = {name: entry for name, entry in wanted.items() if not _good(folder, name, entry)}
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
    for name in wanted:
        if name in kept:
            wanted[name] = {"bytes": (folder / name).stat().st_size, "sha256": _sha256(folder / name)}
        elif "sha256" not in wanted[name]:
            wanted[name] = {"bytes": wanted[name]["bytes"], "sha256": _sha256(folder / name)}
    manifest = {
        "asset": folder.name,
        "source": repository,
        "revision": commit,
        "kept": kept,
        "files": {name: {"bytes": entry["bytes"], "sha256": entry["sha256"]} for name, entry in wanted.items()},
    }
    _write(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    shutil.rmtree(staging, ignore_errors=True)
    return {"fetched": len(left), "files": len(wanted), "bytes": sum(e["bytes"] for e in wanted.values())}


def _listing(
    repository: str, kind: str, revision: str, files: tuple[str, ...]
) -> tuple[dict[str, dict[str, Any]], str]:
    """Files of the repository with size and hash (`sha256` of large files, `git` of others), and the commit."""
    with _explained(repository):
        info = HfApi().repo_info(repository, repo_type=kind, revision=revision, files_metadata=True)
    entries: dict[str, dict[str, Any]] = {}
    for item in getattr(info, "siblings", None) or []:
        if item.lfs is not None:
            entries[item.rfilename] = {"bytes": item.lfs.size, "sha256": item.lfs.sha256}
        else:
            entries[item.rfilename] = {"bytes": item.size or 0, "git": item.blob_id}
    if files:
        if missing := [name for name in files if name not in entries]:
            raise FetchError(f"{repository} has no {', '.join(missing)}")
        entries = {name: entries[name] for name in files}
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
        # Once more from the start where the bytes of an earlier run were of another file.
        for _ in range(2):
            with _explained(repository):
                _transfer(url, staging / name, left[name]["bytes"])
            if _good(staging, name, left[name]):
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
    """Get a file over HTTP, from where an earlier attempt or run stopped (the hub's own library begins anew)."""
    if target.is_file():
        return
    part = target.with_name(f"{target.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    attempt = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        if before > size:
            part.unlink()
            before = 0
        try:
            if before < size or not part.exists():
                _append(url, part, before)
            if part.stat().st_size == size:
                part.rename(target)
                return
            raise ConnectionError(f"{target.name} ends after {part.stat().st_size} of {size} bytes")
        except (OSError, http.client.HTTPException) as error:
            if getattr(error, "filename", None) and not isinstance(error, urllib.error.HTTPError):
                raise  # this machine's disk
            final = isinstance(error, urllib.error.HTTPError) and error.code not in (408, 416, 429, 500, 502, 503, 504)
            # What got further is no failure in a row.
            attempt = 0 if part.exists() and part.stat().st_size > before else attempt + 1
            if final or attempt >= ATTEMPTS:
                raise
            time.sleep(WAIT_SECONDS * 2**attempt)


def _append(url: str, part: Path, offset: int) -> None:
    # Compressed, the bytes could not be counted.
    headers = {"User-Agent": "clusterkit", "Accept-Encoding": "identity", "Range": f"bytes={offset}-"}
    if token := get_token():
        headers["Authorization"] = f"Bearer {token}"
    opener = urllib.request.build_opener(_Redirects)
    with opener.open(urllib.request.Request(url, headers=headers), timeout=SILENCE_SECONDS) as response:
        mode = "ab" if response.status == 206 else "wb"  # a server that knows no ranges sends everything
        with part.open(mode) as file:
            shutil.copyfileobj(response, file, 1 << 20)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Shows the token to nobody but the hub itself: files come from other servers' signed addresses."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            request.remove_header("Authorization")
        return request


def _good(folder: Path, name: str, entry: dict[str, Any]) -> bool:
    """Whether the file is there with the size and hash that the hub names."""
    path = folder / name
    if not path.is_file() or path.stat().st_size != entry["bytes"]:
        return False
    if "sha256" in entry:
        return _sha256(path) == str(entry["sha256"])
    content = path.read_bytes()
    digest = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
    return digest.hexdigest() == str(entry["git"])


def _is_users(folder: Path, name: str, own: dict[str, Any]) -> bool:
    """Whether a file that differs was put there by somebody: not by us, and no pointer, which holds nothing."""
    path = folder / name
    if name in own or not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        return file.read(len(LFS_MARK)) != LFS_MARK


def _manifest(folder: Path) -> dict[str, Any]:
    """Files that an earlier run put there."""
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
    """One download of a folder at a time. The lock goes with the process, however that ends."""
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
    """Print how much is there, every few seconds."""
    over = threading.Event()

    def tell() -> None:
        while not over.wait(TELL_SECONDS):
            with contextlib.suppress(OSError):
                here = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())
                print(f"{here / 1e9:.2f} of {total / 1e9:.2f} GB", flush=True)

    thread = threading.Thread(target=tell, daemon=True)
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
        digest = hashlib.sha256()
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def main(argument: str) -> int:
    """Read the order (a JSON object with the arguments of `fetch`), run it, print the outcome; return the exit code."""
    order = json.loads(argument)
    try:
        record = fetch(
            order["repository"],
            Path(order["folder"]),
            order.get("kind", "model"),
            order.get("revision", "main"),
            tuple(order.get("files", ())),
        )
    except FetchError as error:
        # An address may hold a user and a password.
        print(f"error: {re.sub(r'//[^/@ ]+@', '//', str(error))}", file=sys.stderr)
        return 1
    print(f"done {json.dumps(record)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
