"""The folders of the shared storage. Missing ones are made; nothing is removed and no owner is changed."""

from __future__ import annotations

import shlex
from pathlib import PurePosixPath

from clusterkit.hosts.model import Cluster
from clusterkit.provision.facts.model import Facts
from clusterkit.provision.steps.step import Action, DesiredState, Refused

FOLDERS = ("models", "datasets", "codes", "ray", "images")


def plan(facts: Facts, desired: DesiredState) -> tuple[Action, ...]:
    """Make the shared folder and its sub-folders where they are missing.

    Raises:
        Refused: the storage is read-only or does not answer, or the folder to make it in does not exist.
    """
    root = desired.cluster.storage
    disk = facts.disks.get(root)
    if disk is not None and disk.timed_out:
        raise Refused(
            f"{root} does not answer (a dead network mount?)",
            f"`findmnt -T {root}` on the host shows the mount; repair or remount it, and run the command again.",
        )
    parent = facts.disks.get(str(PurePosixPath(root).parent))
    if not _exists(facts, root) and parent is not None and not parent.exists:
        raise Refused(
            f"{root} cannot be made: {parent.path} does not exist",
            f"Mount the shared storage at {root} or at {parent.path} on every host, or name another folder "
            "(--storage).",
        )
    if disk is not None and disk.read_only:
        raise Refused(
            f"{root} is on a read-only file system ({' '.join(filter(None, (disk.source, disk.fstype)))})",
            f"Mount it for writing (`mount -o remount,rw {disk.path}`, /etc/fstab, or the NFS export), and run the "
            "command again.",
        )
    paths = [path for path in storage_folders(desired.cluster) if not _exists(facts, path)]
    return (Action(f"make {', '.join(paths)}", make_script(paths), timeout=60.0),) if paths else ()


def storage_folders(cluster: Cluster) -> tuple[str, ...]:
    """Return all folders that this step makes, the shared folder itself first."""
    return (cluster.storage, *(f"{cluster.storage}/{name}" for name in FOLDERS))


def probed_paths(cluster: Cluster) -> tuple[str, ...]:
    """Return the paths that the step reads in `Facts.disks`, beside those that are always there."""
    return (str(PurePosixPath(cluster.storage).parent), *storage_folders(cluster))


def make_script(paths: list[str]) -> str:
    """Return a script that makes folders in a folder that exists. All hosts may run it on one storage at once."""
    return f"""umask 022
for path in {" ".join(map(shlex.quote, paths))}; do
  if [ -d "$path" ]; then continue; fi
  # Checked again: another host may have made it just now.
  if [ -e "$path" ] && ! [ -d "$path" ]; then
    echo "$path is there and is no folder" >&2
    exit 1
  fi
  # Another host may be making the same one.
  if ! said=$(mkdir -m 0755 "$path" 2>&1) && ! [ -d "$path" ]; then
    echo "$said" >&2
    case $said in
      *denied* | *permitted*)
        echo 'root of this host may not write there: export the storage with no_root_squash,' >&2
        echo 'or make the folders on its server' >&2
        ;;
    esac
    exit 1
  fi
done
"""


def _exists(facts: Facts, path: str) -> bool:
    disk = facts.disks.get(path)
    return disk is not None and disk.exists
