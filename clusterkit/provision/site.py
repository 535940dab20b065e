"""What a cluster's site needs (mirrors, proxies, certificates, image), kept so that later set-ups need not be told."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from clusterkit.hosts.folders import config_folder, write_private
from trainer.errors import UserError

OF_RAY = ("image", "image_base", "shm")
"""Options that Ray's containers are made from."""
ADDRESSES = (
    *("docker_url", "nvidia_url", "apt_mirror", "pip_index_url", "pip_find_links", "torch_index", "hf_endpoint"),
    *("http_proxy", "https_proxy"),
)
"""Options that are addresses, which may hold a user and password."""
USER_PART = re.compile(r"[a-z]+://([^/]+)@")
SHORT = 3
"""A password of so few letters is no word to be left out wherever it appears."""
FORGET = "none"
"""Given as an option's value, it takes back what was kept."""


@dataclass(frozen=True)
class Site:
    """Options of `clusterkit setup` that describe the site rather than one run; see its --help."""

    image: str = ""
    image_base: str = ""
    docker_source: str = "auto"
    docker_url: str = "https://download.docker.com"
    nvidia_url: str = "https://nvidia.github.io/libnvidia-container"
    apt_mirror: str = ""
    pip_index_url: str = ""
    pip_find_links: str = ""
    torch_index: str = ""
    hf_endpoint: str = ""
    ca_bundle: str = ""
    http_proxy: str = ""
    https_proxy: str = ""
    no_proxy: str = ""
    shm: str = ""


def passwords_of(site: Site) -> tuple[str, ...]:
    """Texts that no log may hold: of addresses with a user and password that part, and the password as it is typed."""
    found: list[str] = []
    for name in ADDRESSES:
        there = USER_PART.match(getattr(site, name))
        if there is None:
            continue
        password = there[1].partition(":")[2]
        found += [there[1], *(text for text in (password, unquote(password)) if len(text) > SHORT)]
    return tuple(dict.fromkeys(found))


def with_secrets(site: Site) -> tuple[Site, list[str]]:
    """The site with every address that was given as env:NAME or file:PATH, and options whose password was typed.

    Raises:
        UserError: an address is not there, or cannot be read.

    """
    options = {name: f"--{name.replace('_', '-')}" for name in ADDRESSES}
    typed = [options[name] for name in ADDRESSES if USER_PART.match(getattr(site, name))]
    return replace(site, **{name: _read_secret(options[name], getattr(site, name)) for name in ADDRESSES}), typed


def _read_secret(option: str, value: str) -> str:
    kind, _, place = value.partition(":")
    if kind == "env":
        if not (found := os.environ.get(place, "")):
            raise UserError(f"{option} {value}: the environment has no {place}")
        return found
    if kind == "file":
        try:
            return Path(place).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise UserError(f"{option} {value}: {getattr(error, 'strerror', None) or error}") from None
    return value


def path_of(cluster: str) -> Path:
    """Where it is kept; a proxy's address may hold a password, so for the owner alone."""
    return config_folder() / "clusters" / cluster / "site.json"


def with_kept(cluster: str, given: Site) -> Site:
    """What was given, and for everything left at its default what was kept; `none` goes back to the default.

    Raises:
        UserError: the file is damaged.

    """
    kept, plain = _read(cluster), Site()
    chosen: dict[str, Any] = {}
    for field in fields(Site):
        value, default = getattr(given, field.name), getattr(plain, field.name)
        chosen[field.name] = kept.get(field.name, default) if value == default else value
        if value == FORGET:
            chosen[field.name] = default
    return replace(plain, **chosen)


def until_ready(cluster: str, site: Site) -> Site:
    """What to keep before the hosts are ready: of a cluster that was set up before, what its Ray runs with stays.

    A wish that is refused (another image under running jobs) must not be taken for granted by the next command.
    """
    if not path_of(cluster).exists():
        return site
    before = with_kept(cluster, Site())
    return replace(site, **{name: getattr(before, name) for name in OF_RAY})


def keep(cluster: str, site: Site) -> None:
    """Keep what differs from the defaults."""
    plain = Site()
    told = {f.name: getattr(site, f.name) for f in fields(Site) if getattr(site, f.name) != getattr(plain, f.name)}
    if told != _read(cluster):
        write_private(path_of(cluster), json.dumps(told, indent=2) + "\n")


def _read(cluster: str) -> dict[str, str]:
    path = path_of(cluster)
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): remove it, and give the site's options again") from error
    names = {field.name for field in fields(Site)}
    return {name: str(value) for name, value in found.items() if name in names} if isinstance(found, dict) else {}


HF_TOKEN = "HF_TOKEN"


def proxies_of(site: Site) -> dict[str, str]:
    """Variables that name the site's proxies."""
    pairs = {"http_proxy": site.http_proxy, "https_proxy": site.https_proxy, "no_proxy": site.no_proxy}
    return {name: value for name, value in pairs.items() if value}
