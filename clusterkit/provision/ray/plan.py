"""Plan one host's Ray container: compare facts with settings and return the actions."""

from __future__ import annotations

import hashlib
import json
import shlex

from clusterkit.hosts.model import Host
from clusterkit.hosts.names import with_port
from clusterkit.provision import docker
from clusterkit.provision.facts.model import Container, Facts, version_numbers
from clusterkit.provision.ray.addresses import interface, node_address
from clusterkit.provision.ray.model import (
    HEAD,
    LABEL_CLUSTER,
    LABEL_CONFIG,
    LABEL_GPUS,
    LABEL_HEAD,
    LABEL_ROLE,
    LABEL_TOKEN,
    NODE_ROLES,
    SMALLEST_SHM,
    TOKEN_IN_CONTAINER,
    WORKER,
    RaySettings,
    container_name,
    container_with_role,
    fingerprint,
    node_containers,
    node_folder,
    token_file,
)
from clusterkit.provision.steps.shell import restore_mode
from clusterkit.provision.steps.step import Action, Refused
from clusterkit.ssh.shell import for_each

NOFILE = 1_048_576
SHM_SHARE = 0.5
"""Part of the memory for /dev/shm: Ray's object store takes 0.3 of it, NCCL and data loaders the rest."""
CDI_SINCE = (28, 2)
"""First Docker Engine that reads CDI specifications by default."""
ALL_GPUS = "nvidia.com/gpu=all"
START_SECONDS = 300.0


class MustReplace(Refused):
    """The running container would have to be replaced, which ends jobs, and --recreate was not given."""


def plan_node(host: Host, facts: Facts, settings: RaySettings) -> tuple[Action, ...]:
    """Return the actions that make the host's Ray container match the settings; none where it does.

    A dead container is replaced. A running one is replaced only where `settings.recreate` allows it.

    Raises:
        Refused: the name or a port belongs to something else, another cluster runs here, a GPU is missing, or the
            running container would have to be replaced and may not be.
    """
    cluster, role = settings.cluster.name, settings.role(host)
    labels = _labels(host, facts, settings)
    own = node_containers(facts, cluster)
    current = container_with_role(own, role)
    running = current is not None and current.state == "running"
    if current is not None and running and _same(current, labels):
        others = tuple(container for container in own if container is not current)
        former = Action("remove Ray containers of this host's former role", _drop(others, settings))
        token = restore_mode(facts, "Ray's token", token_file(cluster), 0o600)
        return (*token, *((former,) if others else ()))
    _refuse_foreign(facts, cluster, container_name(cluster, role))
    if not any(container.state == "running" for container in own):
        _refuse_taken_ports(facts, settings, role)
    title = f"start the Ray {role}"
    if current is not None and not running:
        title = f"restart the Ray {role} (its container is {current.state})"
    elif current is not None and _same(current, {key: labels[key] for key in labels if key != LABEL_HEAD}):
        title = "restart the Ray worker (the head is a new one)"
    elif own:
        _refuse_replacing(host, own, settings, labels)
        title = f"replace the Ray {role} (its settings have changed)"
    return (_action(title, docker_run(host, facts, settings, labels), settings, own),)


def docker_run(host: Host, facts: Facts, settings: RaySettings, labels: dict[str, str]) -> list[str]:
    """Return the docker command that starts the node, without the host's infiniband devices."""
    return [
        *("docker", "run", "--detach", "--pull", "never"),
        *("--name", container_name(settings.cluster.name, settings.role(host))),
        *(part for key, value in labels.items() for part in ("--label", f"{key}={value}")),
        *_arguments(host, facts, settings),
    ]


def _arguments(host: Host, facts: Facts, settings: RaySettings) -> list[str]:
    """Return all arguments after name and labels. The hash of the configuration is made of them."""
    cluster, head = settings.cluster, settings.role(host) == HEAD
    address = node_address(host, facts, alone=len(cluster.hosts) == 1)
    gpus = _num_gpus(host, facts, settings)
    environment = {
        **_sockets(interface(host, facts, address)),
        **settings.environment,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": TOKEN_IN_CONTAINER,
        "RAY_USAGE_STATS_ENABLED": "0",
        **settings.ports.environment(head),
    }
    return [
        # --init reaps processes that Ray's workers leave, and ends with Ray's exit code when Ray ends.
        "--init",
        # No restart by Docker, so that people see a Ray that died: a restarted head is another, empty cluster.
        *("--restart", "no", "--stop-timeout", "30"),
        *("--network", "host", "--shm-size", f"{_shm(facts, settings) >> 20}m"),
        *_limits(facts),
        *_rights(settings),
        *_devices(facts, gpus),
        *("--log-driver", "json-file", "--log-opt", "max-size=20m", "--log-opt", "max-file=3"),
        *("--mount", f"type=bind,src={cluster.storage},dst={cluster.storage}"),
        *("--mount", f"type=bind,src={token_file(cluster.name)},dst={TOKEN_IN_CONTAINER},readonly"),
        *(part for key, value in environment.items() for part in ("--env", f"{key}={value}")),
        *("--entrypoint", "ray", settings.image),
        *_ray_start(host, settings, address, gpus),
    ]


def _ray_start(host: Host, settings: RaySettings, address: str, gpus: int) -> list[str]:
    head = settings.role(host) == HEAD
    where = (
        ["--head", "--dashboard-host=127.0.0.1", "--include-dashboard=true"]
        if head
        else [f"--address={with_port(settings.head_address, settings.ports.gcs)}"]
    )
    return [
        *("start", "--block", *where),
        *(f"--node-ip-address={address}", f"--node-name={host.name}", f"--num-gpus={gpus}", "--disable-usage-stats"),
        *settings.ports.options(head),
    ]


def _labels(host: Host, facts: Facts, settings: RaySettings) -> dict[str, str]:
    image = settings.image_id or facts.docker.images.get(settings.image, "")
    text = json.dumps([image, _arguments(host, facts, settings)])
    role = settings.role(host)
    labels = {
        LABEL_CLUSTER: settings.cluster.name,
        LABEL_ROLE: role,
        LABEL_CONFIG: hashlib.sha256(text.encode()).hexdigest()[:16],
        LABEL_GPUS: str(_num_gpus(host, facts, settings)),
    }
    if settings.token:
        labels[LABEL_TOKEN] = fingerprint(settings.token)
    if role == WORKER and settings.head_container is not None:
        labels[LABEL_HEAD] = settings.head_container
    return labels


def _same(container: Container, labels: dict[str, str]) -> bool:
    return all(container.labels.get(key) == value for key, value in labels.items())


def _num_gpus(host: Host, facts: Facts, settings: RaySettings) -> int:
    if settings.gpus is False:
        return 0
    if settings.gpus and not facts.gpus:
        raise Refused(
            f"{host.name} has no GPU that nvidia-smi shows"
            + (f" ({facts.nvidia_error})" if facts.nvidia_error else ""),
            "repair its driver (clusterkit check says how), leave the host out with --exclude, or run without --gpus",
        )
    return len(facts.gpus)


def _shm(facts: Facts, settings: RaySettings) -> int:
    if facts.memory and settings.shm > facts.memory:
        raise Refused(
            f"--shm asks for {settings.shm / (1 << 30):.1f} GiB of shared memory, and the host has "
            f"{facts.memory / (1 << 30):.1f} GiB of memory",
            "give a smaller --shm (none: half of each host's memory), or leave the host out with --exclude",
        )
    return settings.shm or max(int(facts.memory * SHM_SHARE), SMALLEST_SHM)


def _limits(facts: Facts) -> list[str]:
    """Return the container's limits, at most those of the host: with more it would not start."""
    limits = []
    if "nofile" in facts.hard_limits:
        granted = facts.hard_limits["nofile"]
        nofile = NOFILE if granted is None else min(NOFILE, granted)
        limits += ["--ulimit", f"nofile={nofile}:{nofile}"]
    if "memlock" in facts.hard_limits and facts.hard_limits["memlock"] is None:
        limits += ["--ulimit", "memlock=-1:-1"]
    return limits


def _rights(settings: RaySettings) -> list[str]:
    if settings.privileged:
        return ["--privileged"]
    # RDMA registers memory. With SELinux, a container may not read shared storage unless labels are off.
    return ["--cap-add", "IPC_LOCK", "--security-opt", "no-new-privileges", "--security-opt", "label=disable"]


def _devices(facts: Facts, gpus: int) -> list[str]:
    if not gpus:
        return []
    return ["--device", ALL_GPUS] if _has_cdi(facts) else ["--gpus", "all"]


def _has_cdi(facts: Facts) -> bool:
    if ALL_GPUS in facts.docker.cdi_devices:
        return True
    return ALL_GPUS in facts.cdi_devices and version_numbers(facts.docker.server, 2) >= CDI_SINCE


def _sockets(name: str) -> dict[str, str]:
    # With "=", NCCL takes this interface only; without, eth1 matches eth10 too.
    return {"NCCL_SOCKET_IFNAME": f"={name}", "GLOO_SOCKET_IFNAME": name} if name else {}


def _refuse_foreign(facts: Facts, cluster: str, name: str) -> None:
    for container in facts.docker.containers:
        owner = container.labels.get(LABEL_CLUSTER)
        if container.name == name and owner != cluster:
            raise Refused(
                f"the container name {name} is taken by a container that is not clusterkit's ({container.id[:12]})",
                f"rename or remove it (docker rename {name} NEW), or use another --cluster name",
            )
        is_node = container.labels.get(LABEL_ROLE) in NODE_ROLES and container.state == "running"
        if owner is not None and owner != cluster and is_node:
            raise Refused(
                f"this host already carries the Ray of cluster {owner} ({container.name})",
                f"take that down first (clusterkit down --cluster {owner}), or leave the host out with --exclude",
            )


def _refuse_taken_ports(facts: Facts, settings: RaySettings, role: str) -> None:
    required_ports = settings.ports.listening(role == HEAD)
    taken = [f"{port} ({name})" for name, port in required_ports.items() if port in facts.listening]
    if taken:
        raise Refused(
            f"ports that Ray needs are taken: {', '.join(taken)}",
            "stop what listens there (ss -ltnp shows it; often an older Ray: ray stop), or leave the host out",
        )


def _refuse_replacing(host: Host, own: tuple[Container, ...], settings: RaySettings, labels: dict[str, str]) -> None:
    running = next((container for container in own if container.state == "running"), None)
    if settings.recreate or running is None:
        return
    raise MustReplace(
        f"the Ray {running.labels[LABEL_ROLE]} of {host.name} runs with other settings than asked for "
        f"({_difference(running, settings, labels)})",
        "add --recreate to replace it; this ends every job that runs on the cluster",
    )


def _difference(running: Container, settings: RaySettings, labels: dict[str, str]) -> str:
    if running.labels[LABEL_ROLE] != labels[LABEL_ROLE]:
        return f"it is to be {labels[LABEL_ROLE]}"
    if running.image and running.image != settings.image:
        return f"image {running.image} instead of {settings.image}"
    if running.labels.get(LABEL_GPUS) != labels[LABEL_GPUS]:
        return f"{running.labels.get(LABEL_GPUS)} GPUs, and the host shows {labels[LABEL_GPUS]}"
    if running.labels.get(LABEL_TOKEN) != labels.get(LABEL_TOKEN, running.labels.get(LABEL_TOKEN)):
        return "another token"
    return "a rebuilt image, address, shared memory, limits, ports or environment"


def _action(title: str, command: list[str], settings: RaySettings, own: tuple[Container, ...]) -> Action:
    folder, token = node_folder(settings.cluster.name), token_file(settings.cluster.name)
    position = command.index("--entrypoint")
    before, after = shlex.join(command[:position]), shlex.join(command[position:])
    script = (
        "umask 077\n"
        f"mkdir -p {folder}\n"
        f"cat > {token}.new\n"
        f"[ -s {token}.new ] || {{ echo 'no token was handed over' >&2; exit 1; }}\n"
        f"mv -f {token}.new {token}\n"
        f"{_drop(own, settings)}"
        "set --\n"
        "[ ! -d /dev/infiniband ] || set -- --device /dev/infiniband\n"
        # An interrupted start may have left a container that was created and never ran.
        f"{_drop_unstarted(settings, command)}"
        f'{before} "$@" {after}\n'
    )
    return Action(title, script, stdin=settings.token.encode(), timeout=START_SECONDS)


def _drop(containers: tuple[Container, ...], settings: RaySettings) -> str:
    """Return a script that removes containers where they still have the label, and prints their last lines."""
    return "".join(
        for_each(
            docker.ps(
                f"id={container.id}", f"label={LABEL_CLUSTER}={settings.cluster.name}", stopped=True, whole_ids=True
            ),
            f'docker logs --tail 20 "$id" 2>&1 || :\n{docker.REMOVE}',
        )
        for container in containers
    )


def _drop_unstarted(settings: RaySettings, command: list[str]) -> str:
    name = command[command.index("--name") + 1]
    return for_each(
        docker.ps(f"name=^{name}$", "status=created", f"label={LABEL_CLUSTER}={settings.cluster.name}", stopped=True),
        docker.REMOVE,
    )
