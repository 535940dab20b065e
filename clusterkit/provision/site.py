"""What a cluster's site needs (mirrors, proxies, certificates, image), saved so that later set-ups know it."""

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
"""Options that Ray's containers are started with."""
ADDRESSES = (
    *("docker_url", "nvidia_url", "apt_mirror", "pip_index_url", "pip_find_links", "torch_index", "hf_endpoint"),
    *("http_proxy", "https_proxy"),
)
"""Options that are addresses, which may contain a user and password."""
USER_PART = re.compile(r"[a-z]+://([^/]+)@")
SHORT = 3
"""Longest password that is not masked by itself: so short a text stands in many other words."""
FORGET = "none"
"""As an option's value it removes what was saved."""


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


def passwords_in(site: Site) -> tuple[str, ...]:
    """Return the texts that no log may hold: user and password of every address, and the password alone."""
    found: list[str] = []
    for name in ADDRESSES:
        if login := USER_PART.match(getattr(site, name)):
            password = login[1].partition(":")[2]
            found += [login[1], *(text for text in (password, unquote(password)) if len(text) > SHORT)]
    return tuple(dict.fromkeys(found))


def resolve_secrets(site: Site) -> tuple[Site, list[str]]:
    """Read the addresses that were given as env:NAME or file:PATH.

    Returns:
        The site with these addresses, and the options whose password was typed on the command line.

    Raises:
        UserError: the variable or file of an address is missing or cannot be read.
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
    """Return the file of a cluster's site, which only its owner can read: an address may hold a password."""
    return config_folder() / "clusters" / cluster / "site.json"


def with_saved(cluster: str, given: Site) -> Site:
    """Return `given` with the saved value of every option that is at its default; `none` stands for the default."""
    saved, plain = _read(cluster), Site()
    chosen: dict[str, Any] = {}
    for field in fields(Site):
        value, default = getattr(given, field.name), getattr(plain, field.name)
        chosen[field.name] = saved.get(field.name, default) if value == default else value
        if value == FORGET:
            chosen[field.name] = default
    return replace(plain, **chosen)


def site_before_ready(cluster: str, site: Site) -> Site:
    """Return what to save before the hosts are ready: `site`, with the options that a running Ray was started with.

    A change of these may still be refused (another image under running jobs); the next command must not assume it.
    """
    if not path_of(cluster).exists():
        return site
    before = with_saved(cluster, Site())
    return replace(site, **{name: getattr(before, name) for name in OF_RAY})


def save_site(cluster: str, site: Site) -> None:
    """Save what differs from the defaults."""
    plain = Site()
    values = {f.name: getattr(site, f.name) for f in fields(Site) if getattr(site, f.name) != getattr(plain, f.name)}
    if values != _read(cluster):
        write_private(path_of(cluster), json.dumps(values, indent=2) + "\n")


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
    """Return the environment variables that name the site's proxies."""
    pairs = {"http_proxy": site.http_proxy, "https_proxy": site.https_proxy, "no_proxy": site.no_proxy}
    return {name: value for name, value in pairs.items() if value}
