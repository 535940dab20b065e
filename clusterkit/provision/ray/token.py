"""The token that Ray asks all clients for: one per cluster, readable for its owner alone, sent over stdin."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from clusterkit.hosts.folders import config_folder, write_private
from clusterkit.provision.ray.model import token_file
from clusterkit.ssh.api import ErrorKind, HostError, Session
from trainer.disk import file_failure
from trainer.errors import UserError

_TOKEN = re.compile(r"[0-9a-f]{64}")


def local_file(cluster: str) -> Path:
    """Return the path of the operator's copy."""
    return config_folder() / "clusters" / cluster / "ray_token"


def read_token(cluster: str) -> str:
    """Return the operator's copy, or "" when there is none.

    Raises:
        UserError: the file cannot be read or holds no token.
    """
    path = local_file(cluster)
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if not _TOKEN.fullmatch(text):
        raise UserError(
            f"{path} holds no Ray token: remove it, and clusterkit setup takes the cluster's own or makes one"
        )
    if path.stat().st_mode & 0o077:
        path.chmod(0o600)
    return text


async def cluster_token(head: Session, cluster: str) -> str:
    """Return the operator's copy, else the head node's (set up from another machine), else a new one.

    The last two are saved on this machine.

    Raises:
        UserError: the operator's copy is damaged, or a new one cannot be written.
    """
    token = read_token(cluster)
    if token:
        return token
    remote = token_file(cluster)
    result = await head.run(f"[ ! -e {remote} ] || cat {remote}", root=True, timeout=30)
    if not result.ok:
        raise HostError(head.host.name, ErrorKind.LOST, f"{remote} cannot be read: {result.reason}", "")
    found = result.stdout.strip()
    token = found if _TOKEN.fullmatch(found) else secrets.token_hex(32)
    path = local_file(cluster)
    try:
        write_private(path, token + "\n")
    except OSError as error:
        raise file_failure(error, path, "set CLUSTERKIT_CONFIG to a folder that is yours") from error
    return token


def forget_token(cluster: str) -> None:
    """Remove the operator's copy and its folder where nothing else is in it."""
    path = local_file(cluster)
    path.unlink(missing_ok=True)
    if path.parent.is_dir() and not any(path.parent.iterdir()):
        path.parent.rmdir()
