"""Parse what the docker command prints about its engine, containers and images."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from clusterkit.common.records import json_object
from clusterkit.provision.facts.model import Container, Docker
from clusterkit.provision.facts.sections import Section

_LABEL = re.compile(r"^[A-Za-z0-9._/-]+=")


def parse(sections: Mapping[str, Section]) -> Docker:
    """Return the engine's state. Where it does not answer, `server` is empty and `error` says why."""
    info_section = sections["docker.info"]
    info = next(filter(None, map(json_object, info_section.lines)), {})
    client = info.get("ClientInfo") or {}
    return Docker(
        client=client.get("Version", "") or ("unknown" if info_section.exit_code is not None else ""),
        server=info.get("ServerVersion") or "",
        error=_error(sections, info),
        root=info.get("DockerRootDir") or "",
        driver=info.get("Driver") or "",
        runtimes=tuple(sorted(info.get("Runtimes") or ())),
        cdi_devices=tuple(
            device["ID"] for device in info.get("DiscoveredDevices") or () if device.get("Source") == "cdi"
        ),
        containers=tuple(_containers(sections["docker.containers"])),
        images=_images(sections["docker.images"]),
        daemon_json=_daemon_json(sections),
        pid=int(sections["docker.pid"].first) if sections["docker.pid"].first.isdigit() else None,
    )


def parse_labels(text: str) -> dict[str, str]:
    """Return {'a': '1', 'b': 'x,y'} for `a=1,b=x,y`: docker joins labels with commas, and values may have commas."""
    labels: dict[str, str] = {}
    key = ""
    for piece in text.split(",") if text else ():
        if _LABEL.match(piece) or not key:
            key, _, labels_value = piece.partition("=")
            labels[key] = labels_value
        else:
            labels[key] += f",{piece}"
    return labels


def _error(sections: Mapping[str, Section], info: dict[str, Any]) -> str:
    section = sections["docker.info"]
    if section.exit_code is None or info.get("ServerVersion"):
        return ""
    if section.timed_out:
        return "`docker info` gave no answer in time"
    if "host" in info and "ClientInfo" not in info:
        return "the docker command of this host is Podman's"
    errors = list(info.get("ServerErrors") or ()) or [
        line.strip() for line in section.lines if line.strip() and not line.startswith(("{", "WARNING"))
    ]
    unit = sections["docker.unit"].lines
    if "ActiveState=failed" in unit:
        errors.append(f"(docker.service: failed, {next((line for line in unit if line.startswith('Result=')), '')})")
    return " ".join(errors) or f"`docker info` ended with exit code {section.exit_code}"


def _containers(section: Section) -> list[Container]:
    return [
        Container(id=str(id), name=str(name), image=str(image), state=str(state), labels=parse_labels(labels or ""))
        for id, name, image, state, labels in _rows(section, 5)
    ]


def _images(section: Section) -> dict[str, str]:
    images = {}
    for identifier, repository, tag, digest in _rows(section, 4):
        if repository != "<none>" and tag != "<none>":
            images[f"{repository}:{tag}"] = identifier
        if repository != "<none>" and digest not in {"<none>", ""}:
            images[f"{repository}@{digest}"] = identifier
    return images


def _rows(section: Section, width: int) -> list[list[Any]]:
    rows = []
    for line in section.lines:
        if not line.startswith("["):
            continue
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, list) and len(row) == width:
            rows.append(row)
    return rows


def _daemon_json(sections: Mapping[str, Section]) -> str | None:
    if "docker.daemon" not in sections:
        return None
    # The probe indents the file by a space, so that nothing in it reads as a heading.
    return "\n".join(line[1:] for line in sections["docker.daemon"].lines).rstrip("\n")
