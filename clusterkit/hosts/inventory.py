"""Clusters by name: one YAML file each, in the configuration folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from clusterkit.common.suggest import did_you_mean
from clusterkit.hosts.folders import config_folder, write_private
from clusterkit.hosts.model import Cluster, Host
from clusterkit.hosts.names import parse_hosts
from trainer.disk import file_failure
from trainer.errors import UserError

DEFAULT = "default"
NAME = r"[a-z0-9][a-z0-9._-]{0,62}"
"""Pattern of a cluster's name."""

_HEADER = """\
# Written by clusterkit; edit it as you like. A host may be a name (node[01-04], root@10.0.0.5:2222) or have settings:
# name, address, port, username, identity_files, proxy_jump, private_address, interface, host_key
"""


def path_of(name: str) -> Path:
    """Return the file of a cluster. Raises UserError where the name is not valid."""
    if not re.fullmatch(NAME, name):
        raise UserError(f"'{name}' is no name for a cluster: use small letters, digits, '.', '_' and '-', 63 at most.")
    return config_folder() / "clusters" / f"{name}.yaml"


def cluster_names() -> list[str]:
    """Return the names of the saved clusters."""
    return sorted(path.stem for path in (config_folder() / "clusters").glob("*.yaml"))


def load(name: str = DEFAULT) -> Cluster:
    """Return the saved cluster of a name. Raises UserError where there is none, or its file is malformed."""
    path = path_of(name)
    if not path.exists():
        names = cluster_names()
        if not names and name == DEFAULT:
            raise UserError(
                "there is no cluster on this machine yet. Name its hosts: clusterkit check --hostnames H1 H2 looks at "
                "them and changes nothing, clusterkit setup --hostnames H1 H2 makes them a cluster, and later commands "
                "need no names"
            )
        known = f" Clusters: {', '.join(names)}." if names else ""
        raise UserError(
            f"there is no cluster '{name}'.{did_you_mean(name, names)}{known}\n"
            f"Keep its hosts under that name: clusterkit init H1 H2 --cluster {name}, or make it: clusterkit setup "
            f"--hostnames H1 H2 --cluster {name}"
        )
    cluster = load_file(path, name)
    if cluster.name != name:
        # Ray's token and the containers have this name: two clusters of one name would share them.
        raise UserError(
            f"{path} describes cluster '{cluster.name}', not '{name}': rename the file to {cluster.name}.yaml, or "
            f"write name: {name} in it for a cluster of its own"
        )
    return cluster


def load_file(path: Path, name: str = "") -> Cluster:
    """Return the cluster that a file describes.

    Args:
        name: of the cluster where the file has no name; default: the file's own.

    Raises:
        UserError: the file cannot be read, is no YAML, or has wrong settings; the message names the nearest right one.
    """
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_unique_keys_loader())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is no text in UTF-8.") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is no YAML: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} describes no cluster: it needs 'hosts:' with a list of hosts.")
    return _build(path, {"name": name or path.stem} | data)


def save(cluster: Cluster) -> Path:
    """Save a cluster under its name, in place of one that had the name. Return the path of its file."""
    path = path_of(cluster.name)
    data = {"name": cluster.name, **cluster.model_dump(mode="json", exclude_defaults=True, exclude={"name"})}
    data["hosts"] = [_short(host) for host in cluster.hosts]
    try:
        write_private(path, _HEADER + yaml.safe_dump(data, sort_keys=False, allow_unicode=True))
    except OSError as error:
        raise file_failure(error, path, "set CLUSTERKIT_CONFIG to a folder that is yours") from None
    return path


def remove(name: str) -> list[Path]:
    """Remove the file of a cluster, and what this machine keeps beside it. Return what was removed."""
    path = path_of(name)
    found = [one for one in (path, path.parent / name) if one.exists()]
    try:
        for one in reversed(found):  # the cluster is known until the last
            shutil.rmtree(one) if one.is_dir() else one.unlink()
    except OSError as error:
        raise file_failure(error, path, "remove it by hand") from None
    return found


def _short(host: Host) -> dict[str, Any]:
    data = host.model_dump(mode="json", exclude_defaults=True)
    return {key: list(value) if isinstance(value, tuple) else value for key, value in data.items()}


def _build(path: Path, data: Mapping[str, Any]) -> Cluster:
    hosts = data.get("hosts")
    if not isinstance(hosts, list) or not hosts:
        raise UserError(f"{path}: 'hosts' must be a list with at least one host.")
    try:
        return Cluster.model_validate({**data, "hosts": _hosts(path, hosts)})
    except ValidationError as error:
        raise UserError(f"{path}: {_reason(error, dict(data))}") from None


def _hosts(path: Path, entries: list[Any]) -> list[Any]:
    """Return the entries, with hosts in place of mere names."""
    found: list[Any] = []
    for entry in entries:
        try:
            found += parse_hosts([entry]) if isinstance(entry, str) else [entry]
            if isinstance(entry, dict) and isinstance(entry.get("name"), str) and not entry.get("address"):
                parse_hosts([entry["name"]])
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    return found


def _reason(error: ValidationError, data: dict[str, Any]) -> str:
    first = error.errors(include_url=False)[0]
    where = _where(first["loc"], data)
    if first["type"] == "extra_forbidden":
        wrong = str(first["loc"][-1])
        fields = list((Host if len(first["loc"]) > 1 else Cluster).model_fields)
        return f"{where} is no setting.{did_you_mean(wrong, fields)} Settings: {', '.join(fields)}."
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message[0].lower()}{message[1:]}" if where else message


def _where(location: tuple[int | str, ...], data: dict[str, Any]) -> str:
    parts = list(location)
    if len(parts) > 1 and parts[0] == "hosts" and isinstance(parts[1], int):
        entry = data["hosts"][parts[1]] if parts[1] < len(data["hosts"]) else None
        name = entry.get("name") if isinstance(entry, dict) else entry
        rest = ".".join(map(str, parts[2:]))
        return f"host {name or parts[1] + 1}" + (f": '{rest}'" if rest else "")
    return f"'{'.'.join(map(str, parts))}'" if parts else ""


def _unique_keys_loader() -> Any:
    """Return a YAML loader that refuses a key that stands twice; otherwise the first one would be lost silently."""

    class Loader(yaml.SafeLoader):
        pass

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[str, Any]:
        keys = [str(loader.construct_object(key, deep=True)) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"'{key}' stands there twice", node.start_mark)
        return dict(zip(keys, (loader.construct_object(v, deep=True) for _, v in node.value), strict=True))

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    return Loader
