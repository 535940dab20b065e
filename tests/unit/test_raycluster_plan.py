"""What starts a Ray node: the docker command by the host's facts, and when it is refused, replaced or left alone."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace

import pytest

from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.facts.model import Container, Docker, Facts, Gpu
from clusterkit.provision.ray.addresses import head_address, node_address
from clusterkit.provision.ray.model import RaySettings, shm_bytes
from clusterkit.provision.ray.plan import MustReplace, plan_node
from clusterkit.provision.ray.ports import Ports
from clusterkit.provision.ray.start import settings_for_plan
from clusterkit.provision.steps.step import Refused
from trainer.errors import UserError

TOKEN = "0123456789abcdef" * 4
IMAGE = "registry.example/runtime:1"
GIB = 1 << 30

CLUSTER = Cluster(name="lab", hosts=(Host(name="node1"), Host(name="node2"), Host(name="node3")))
NODE1, NODE2, _ = CLUSTER.hosts
SETTINGS = RaySettings(CLUSTER, IMAGE, "10.0.0.1", token=TOKEN)


def facts_of(number: int = 1, **values: object) -> Facts:
    """A host with 64 GiB, Docker and the image; more by name."""
    address = f"10.0.0.{number}"
    docker = values.pop("docker", Docker(server="29.1.0", images={IMAGE: "sha256:aaaa"}))
    return Facts(
        memory=64 * GIB,
        route_to_head=address,
        addresses={"lo": ("127.0.0.1",), "eth1": (address, "fe80::1")},
        docker=docker,
        **values,
    )


def gpus(count: int) -> tuple[Gpu, ...]:
    return tuple(Gpu(index=n, name="NVIDIA H100 80GB HBM3") for n in range(count))


def command(host: Host, facts: Facts, settings: RaySettings = SETTINGS) -> list[str]:
    """Words of the docker command that the only action runs, as a shell would split them."""
    (action,) = plan_node(host, facts, settings)
    line = next(line for line in action.script.splitlines() if line.startswith("docker run"))
    return shlex.split(line)


def option(words: list[str], name: str) -> list[str]:
    """Values of an option of `docker run`."""
    return [words[n + 1] for n, word in enumerate(words[: words.index("--entrypoint")]) if word == name]


def running(host: Host, facts: Facts, settings: RaySettings = SETTINGS, state: str = "running") -> Facts:
    """The facts once the plan has been applied: the container is there, with the labels of the command."""
    words = command(host, facts, settings)
    labels = dict(label.split("=", 1) for label in option(words, "--label"))
    own = Container(id="f" * 64, name=option(words, "--name")[0], image=settings.image, state=state, labels=labels)
    return with_containers(facts, own)


def with_containers(facts: Facts, *containers: Container) -> Facts:
    return facts.model_copy(update={"docker": facts.docker.model_copy(update={"containers": containers})})


def test_head_and_worker_are_told_apart() -> None:
    head, worker = command(NODE1, facts_of(1)), command(NODE2, facts_of(2))
    assert {"start", "--block", "--head", "--dashboard-host=127.0.0.1", "--port=6379"} <= set(head)
    assert {"start", "--block", "--address=10.0.0.1:6379", "--node-ip-address=10.0.0.2"} <= set(worker)
    assert "--head" not in worker
    assert not any(word.startswith(("--dashboard-host", "--dashboard-port", "--port=")) for word in worker)
    assert option(head, "--name") == ["clusterkit-lab-head"]
    assert option(worker, "--name") == ["clusterkit-lab-worker"]
    assert {"clusterkit.cluster=lab", "clusterkit.role=worker"} <= set(option(worker, "--label"))
    assert head[head.index("--entrypoint") + 1] == "ray"  # Ray is the main process: when it dies, the container does
    assert option(head, "--restart") == ["no"]


def test_every_port_is_pinned_and_outside_the_range_of_outgoing_connections() -> None:
    ports = Ports()
    numbers = [*ports.listening(head=True).values(), ports.first_worker, ports.last_worker]
    assert len(numbers) == len(set(numbers))
    assert max(numbers) < 32768
    text = " ".join(command(NODE1, facts_of(1)))
    for number in numbers:
        assert f"={number}" in text
    assert not any(ports.first_worker <= number <= ports.last_worker for number in ports.listening(head=True).values())


def test_token_is_only_in_stdin_and_its_file_is_for_root_alone() -> None:
    (action,) = plan_node(NODE1, facts_of(1), SETTINGS)
    assert action.stdin == TOKEN.encode()
    assert TOKEN not in action.script + action.title
    assert TOKEN not in repr(SETTINGS)
    lines = action.script.splitlines()
    assert lines.index("umask 077") < next(n for n, line in enumerate(lines) if "ray_token" in line)
    words = command(NODE1, facts_of(1))
    assert {"RAY_AUTH_MODE=token", "RAY_AUTH_TOKEN_PATH=/run/clusterkit/ray_token"} <= set(option(words, "--env"))
    mounts = option(words, "--mount")
    assert "type=bind,src=/etc/clusterkit/lab/ray_token,dst=/run/clusterkit/ray_token,readonly" in mounts
    assert "type=bind,src=/storage,dst=/storage" in mounts


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, []),
        ({"nofile": None, "memlock": None}, ["nofile=1048576:1048576", "memlock=-1:-1"]),
        ({"nofile": 20_000, "memlock": 65_536}, ["nofile=20000:20000"]),
        ({"nofile": 4_000_000}, ["nofile=1048576:1048576"]),
    ],
)
def test_limits_are_only_asked_for_where_the_host_grants_them(
    limits: dict[str, int | None], expected: list[str]
) -> None:
    assert option(command(NODE1, facts_of(1, hard_limits=limits)), "--ulimit") == expected


@pytest.mark.parametrize(
    ("server", "engine_lists", "toolkit_lists", "cdi"),
    [
        ("29.1.0", ("nvidia.com/gpu=all",), (), True),
        ("28.2.2", (), ("nvidia.com/gpu=0", "nvidia.com/gpu=all"), True),
        ("28.1.1", (), ("nvidia.com/gpu=all",), False),  # reads no CDI unless told to
        ("20.10.24+dfsg1", (), ("nvidia.com/gpu=all",), False),
        ("29.1.0", (), (), False),
    ],
)
def test_gpus_come_by_cdi_where_the_engine_reads_it(
    server: str, engine_lists: tuple[str, ...], toolkit_lists: tuple[str, ...], cdi: bool
) -> None:
    docker = Docker(server=server, cdi_devices=engine_lists, images={IMAGE: "sha256:aaaa"})
    words = command(NODE1, facts_of(1, docker=docker, gpus=gpus(8), cdi_devices=toolkit_lists))
    assert option(words, "--device") == (["nvidia.com/gpu=all"] if cdi else [])
    assert option(words, "--gpus") == ([] if cdi else ["all"])
    assert "--num-gpus=8" in words
    assert "clusterkit.gpus=8" in option(words, "--label")


def test_host_without_gpus_asks_for_none() -> None:
    words = command(NODE1, facts_of(1))
    assert "--num-gpus=0" in words
    assert not option(words, "--gpus")
    assert not option(words, "--device")
    off = command(NODE1, facts_of(1, gpus=gpus(8)), replace(SETTINGS, gpus=False))
    assert "--num-gpus=0" in off
    with pytest.raises(Refused, match="Driver/library version mismatch"):
        plan_node(NODE1, facts_of(1, nvidia_error="Driver/library version mismatch"), replace(SETTINGS, gpus=True))


@pytest.mark.parametrize(("memory", "asked", "shm"), [(64 * GIB, 0, "32768m"), (64 * GIB, 4 * GIB, "4096m")])
def test_shared_memory_follows_the_memory(memory: int, asked: int, shm: str) -> None:
    words = command(NODE1, facts_of(1).model_copy(update={"memory": memory}), replace(SETTINGS, shm=asked))
    assert option(words, "--shm-size") == [shm]


def test_rights_are_few_unless_asked_for() -> None:
    words = command(NODE1, facts_of(1))
    assert "--privileged" not in words
    assert option(words, "--cap-add") == ["IPC_LOCK"]
    assert "no-new-privileges" in option(words, "--security-opt")
    assert "--privileged" in command(NODE1, facts_of(1), replace(SETTINGS, privileged=True))
    (action,) = plan_node(NODE1, facts_of(1), SETTINGS)
    assert "[ ! -d /dev/infiniband ] || set -- --device /dev/infiniband" in action.script


def test_words_of_the_user_are_quoted() -> None:
    settings = replace(SETTINGS, image="a b;$(touch /tmp/x)", environment={"NOTE": "it's $HOME"})
    words = command(NODE1, facts_of(1), settings)
    assert "a b;$(touch /tmp/x)" in words
    assert "NOTE=it's $HOME" in option(words, "--env")


def test_no_setting_turns_the_token_off() -> None:
    words = command(NODE1, facts_of(1), replace(SETTINGS, environment={"RAY_AUTH_MODE": "disabled"}))
    assert [value for value in option(words, "--env") if value.startswith("RAY_AUTH_MODE")] == ["RAY_AUTH_MODE=token"]


def test_interface_is_the_one_with_the_address() -> None:
    assert {"NCCL_SOCKET_IFNAME==eth1", "GLOO_SOCKET_IFNAME=eth1"} <= set(option(command(NODE1, facts_of(1)), "--env"))
    cluster = Cluster(name="lab", hosts=(Host(name="node1", interface="bond0"), NODE2))
    words = command(cluster.hosts[0], facts_of(1), replace(SETTINGS, cluster=cluster))
    assert "GLOO_SOCKET_IFNAME=bond0" in option(words, "--env")


@pytest.mark.parametrize(
    ("host", "route", "expected"),
    [
        (Host(name="a", private_address="10.9.0.1", address="203.0.113.5"), "192.168.0.1", "10.9.0.1"),
        (Host(name="a", address="203.0.113.5"), "192.168.0.1", "192.168.0.1"),
        (Host(name="10.1.1.1"), "", "10.1.1.1"),
        (Host(name="10.1.1.1"), "127.0.0.1", "10.1.1.1"),
    ],
)
def test_address_of_a_node(host: Host, route: str, expected: str) -> None:
    assert node_address(host, Facts(route_to_head=route)) == expected


def test_node_without_an_address_is_refused_unless_it_is_alone() -> None:
    with pytest.raises(Refused, match=r"no address of a is known") as refusal:
        node_address(Host(name="a"), Facts(route_to_head="127.0.0.1"))
    assert "private_address" in refusal.value.fix
    assert node_address(Host(name="a"), Facts(route_to_head="127.0.0.1"), alone=True) == "127.0.0.1"


@pytest.mark.parametrize("route", ["", "127.0.0.1", "127.0.1.1"])
def test_a_head_that_only_our_ssh_configuration_knows_is_reached_where_we_met_it(route: str) -> None:
    """The alias says nothing to the hosts, or a host has its own name on loopback, as Debian does."""
    facts = Facts(route_to_head=route, ssh_address="10.0.0.5", addresses={"lo": ("127.0.0.1",), "eth0": ("10.0.0.5",)})
    cluster = Cluster(hosts=(Host(name="gpu-a"), Host(name="gpu-b")))
    assert head_address(cluster, facts) == "10.0.0.5"
    assert node_address(cluster.workers[0], facts.model_copy(update={"ssh_address": "10.0.0.6"})) == "10.0.0.6"
    with pytest.raises(Refused, match="no address of gpu-a is known"):
        head_address(cluster, facts.model_copy(update={"ssh_address": "127.0.0.1"}))  # through a tunnel
    private = Cluster(hosts=(Host(name="gpu-a", private_address="192.168.1.1"), Host(name="gpu-b")))
    assert head_address(private, facts) == "192.168.1.1"


def test_ipv6_address_of_the_head_is_bracketed() -> None:
    words = command(NODE2, facts_of(2), replace(SETTINGS, head_address="fd00::5"))
    assert "--address=[fd00::5]:6379" in words


def test_second_plan_is_empty() -> None:
    facts = running(NODE1, facts_of(1))
    assert plan_node(NODE1, facts, SETTINGS) == ()
    # A plan made where the token is not known compares everything else.
    assert plan_node(NODE1, facts, replace(SETTINGS, token="")) == ()


def other_image(facts: Facts, settings: RaySettings) -> tuple[Facts, RaySettings]:
    return facts, replace(settings, image="registry.example/runtime:2")


def rebuilt_image(facts: Facts, settings: RaySettings) -> tuple[Facts, RaySettings]:
    docker = facts.docker.model_copy(update={"images": {IMAGE: "sha256:bbbb"}})
    return facts.model_copy(update={"docker": docker}), settings


def other_token(facts: Facts, settings: RaySettings) -> tuple[Facts, RaySettings]:
    return facts, replace(settings, token="f" * 64)


def lost_gpu(facts: Facts, settings: RaySettings) -> tuple[Facts, RaySettings]:
    return facts.model_copy(update={"gpus": gpus(7)}), settings


def became_worker(facts: Facts, settings: RaySettings) -> tuple[Facts, RaySettings]:
    return facts, replace(settings, cluster=CLUSTER.model_copy(update={"head": "node2"}))


@pytest.mark.parametrize("change", [other_image, rebuilt_image, other_token, lost_gpu, became_worker])
def test_changed_settings_replace_a_running_container_only_when_allowed(
    change: Callable[[Facts, RaySettings], tuple[Facts, RaySettings]],
) -> None:
    facts, settings = change(running(NODE1, facts_of(1, gpus=gpus(8))), SETTINGS)
    with pytest.raises(MustReplace) as refusal:
        plan_node(NODE1, facts, settings)
    assert "--recreate" in refusal.value.fix
    assert "job" in refusal.value.fix
    (action,) = plan_node(NODE1, facts, replace(settings, recreate=True))
    assert action.title.startswith("replace the Ray")
    # Only by ID and only while it still carries the label.
    assert f"--filter id={'f' * 64} --filter label=clusterkit.cluster=lab" in action.script


def test_dead_container_is_made_anew() -> None:
    facts = running(NODE1, facts_of(1), state="exited")
    (action,) = plan_node(NODE1, facts, SETTINGS)
    assert action.title == "restart the Ray head (its container is exited)"
    assert "docker logs --tail 20" in action.script  # why it died is in the host's log before it is gone


def test_workers_of_a_head_that_is_gone_are_made_anew() -> None:
    first = replace(SETTINGS, head_container="1" * 64)
    facts = running(NODE2, facts_of(2), first)
    assert plan_node(NODE2, facts, first) == ()
    assert plan_node(NODE2, facts, replace(SETTINGS, head_container=None)) == ()
    (action,) = plan_node(NODE2, facts, replace(SETTINGS, head_container="2" * 64))
    assert action.title == "restart the Ray worker (the head is a new one)"
    assert option(command(NODE2, facts, replace(SETTINGS, head_container="2" * 64)), "--name")


def test_plan_before_the_head_runs_says_that_workers_follow_it() -> None:
    healthy = running(NODE1, facts_of(1))
    assert settings_for_plan(SETTINGS, healthy).head_container == "f" * 64
    dead = running(NODE1, facts_of(1), state="exited")
    assert settings_for_plan(SETTINGS, dead).head_container == ""
    assert settings_for_plan(SETTINGS, facts_of(1)).head_container == ""


def test_container_of_a_former_role_is_removed() -> None:
    facts = running(NODE1, facts_of(1))
    (own,) = facts.docker.containers
    former = Container(
        id="e" * 64,
        name="clusterkit-lab-worker",
        state="exited",
        labels={"clusterkit.cluster": "lab", "clusterkit.role": "worker"},
    )
    (action,) = plan_node(NODE1, with_containers(facts, own, former), SETTINGS)
    assert action.title.startswith("remove")
    assert "e" * 64 in action.script
    assert own.id not in action.script
    assert "docker run" not in action.script


def test_foreign_container_with_our_name_is_never_touched() -> None:
    foreign = Container(id="d" * 64, name="clusterkit-lab-head", state="exited", labels={"who": "somebody"})
    with pytest.raises(Refused, match="clusterkit-lab-head is taken by a container that is not clusterkit's"):
        plan_node(NODE1, with_containers(facts_of(1), foreign), replace(SETTINGS, recreate=True))


def test_foreign_containers_are_left_alone() -> None:
    foreign = Container(id="d" * 64, name="database", state="running", labels={"clusterkit.role": "head"})
    (action,) = plan_node(NODE1, with_containers(facts_of(1), foreign), SETTINGS)
    assert foreign.id not in action.script


def test_host_of_another_cluster_is_refused() -> None:
    labels = {"clusterkit.cluster": "prod", "clusterkit.role": "worker"}
    other = Container(id="d" * 64, name="clusterkit-prod-worker", state="running", labels=labels)
    with pytest.raises(Refused, match="Ray of cluster prod") as refusal:
        plan_node(NODE1, with_containers(facts_of(1), other), SETTINGS)
    assert "clusterkit down --cluster prod" in refusal.value.fix


def test_taken_ports_are_named_unless_our_own_container_has_them() -> None:
    with pytest.raises(Refused, match=r"6379 \(GCS\), 6381 \(object manager\)"):
        plan_node(NODE1, facts_of(1, listening=(22, 6379, 6381)), SETTINGS)
    assert plan_node(NODE2, facts_of(2, listening=(22, 6379)), SETTINGS)  # a worker has no GCS
    ours = running(NODE1, facts_of(1)).model_copy(update={"listening": (6379, 6381)})
    assert plan_node(NODE1, ours, SETTINGS) == ()


def test_image_that_is_not_there_yet_is_planned_and_never_pulled() -> None:
    words = command(NODE1, facts_of(1, docker=Docker()))
    assert option(words, "--pull") == ["never"]


@pytest.mark.parametrize(
    ("text", "megabytes"), [("64g", 65536), ("512M", 512), ("1.5g", 1536), ("2GiB", 2048), ("67108864", 64)]
)
def test_shared_memory_is_as_wished(text: str, megabytes: int) -> None:
    settings = replace(SETTINGS, shm=shm_bytes(text))
    assert option(command(NODE1, facts_of(1), settings), "--shm-size") == [f"{megabytes}m"]
    assert option(command(NODE1, facts_of(1)), "--shm-size") == ["32768m"]
    with pytest.raises(MustReplace, match="shared memory"):
        plan_node(NODE1, running(NODE1, facts_of(1)), settings)


def test_more_shared_memory_than_memory_is_refused() -> None:
    with pytest.raises(Refused, match=r"asks for 65.0 GiB of shared memory, and the host has 64.0 GiB"):
        plan_node(NODE1, facts_of(1), replace(SETTINGS, shm=shm_bytes("65g")))


@pytest.mark.parametrize("text", ["", "none at all", "-1g", "64 g b", "1x", "1m", "9999999t", "1e3g"])
def test_sizes_that_are_none(text: str) -> None:
    if not text:
        assert shm_bytes(text) == 0
        return
    with pytest.raises(UserError, match="--shm"):
        shm_bytes(text)


def test_a_token_that_others_may_read_is_closed_again_without_a_restart() -> None:
    path = "/etc/clusterkit/lab/ray_token"
    facts = running(NODE1, facts_of(1)).model_copy(update={"files": {path: "any"}, "modes": {path: 0o644}})
    (action,) = plan_node(NODE1, facts, SETTINGS)
    assert (action.title, action.script) == (
        f"put back the mode of Ray's token ({path}: 0644, wanted 0600)",
        f"chmod 0600 {path}\n",
    )
    assert plan_node(NODE1, facts.model_copy(update={"modes": {path: 0o600}}), SETTINGS) == ()
