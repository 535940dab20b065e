"""Whether a cluster is ready: what the containers and Ray say, compared with what is expected."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from localsession import LocalSession

from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.ray import start
from clusterkit.provision.ray import token as tokens
from clusterkit.provision.ray.observe import ContainerState, RayAnswer, RayNode, parse_answer, parse_containers
from clusterkit.provision.ray.start import NodeEndedError, NotReadyError, wait_for_head
from clusterkit.provision.ray.state import ClusterState, assess, status_counts
from clusterkit.ssh.api import ErrorKind, HostError, Result
from trainer.errors import UserError

CASES = Path(__file__).parents[1] / "cases" / "raycluster"
CLUSTER = Cluster(name="lab", hosts=(Host(name="n1"), Host(name="n2")))


def container(role: str, state: str = "running", **values: object) -> ContainerState:
    described = {
        "id": "a" * 64,
        "name": f"clusterkit-lab-{role}",
        "role": role,
        "state": state,
        "exit_code": 0 if state == "running" else 137,
        "image_id": "sha256:" + "1" * 64,
        "image": "runtime:1",
        "labels": {"clusterkit.gpus": "8", "clusterkit.role": role},
        "ray": "2.60.0",
        "python": "3.12.3",
        "gpus_seen": 8,
        **values,
    }
    return ContainerState(**described)  # type: ignore[arg-type]


def alive(name: str, gpus: float = 8.0, state: str = "ALIVE", its_id: str = "") -> RayNode:
    return RayNode(name, "10.0.0.1", state, name == "n1", 96.0, gpus, 2e12, its_id or f"{name}-now")


def state_of(
    containers: dict[str, tuple[ContainerState, ...]], answer: RayAnswer, silent: dict[str, HostError] | None = None
) -> ClusterState:
    return assess(CLUSTER, {"n1": None, "n2": None}, containers, silent or {}, answer)


HEALTHY = {"n1": (container("head"),), "n2": (container("worker"),)}
BOTH = RayAnswer("2.60.0", (alive("n1"), alive("n2")), ("raysubmit_1",))


def test_all_there_is_ready() -> None:
    state = state_of(HEALTHY, BOTH)
    assert state.ready
    assert state.all_problems == ()
    assert state.jobs == ("raysubmit_1",)
    assert [(node.name, node.role, node.gpus, node.ray_state) for node in state.nodes] == [
        ("n1", "head", 8, "ALIVE"),
        ("n2", "worker", 8, "ALIVE"),
    ]
    assert json.loads(json.dumps(state.as_dict()))["ready"] is True


@pytest.mark.parametrize(
    ("containers", "answer", "wrong"),
    [
        ({**HEALTHY, "n2": ()}, BOTH, "n2: no Ray container"),
        # Ray takes a while to notice; the container tells at once.
        (
            {**HEALTHY, "n2": (container("worker", "exited"),)},
            BOTH,
            "n2: the container clusterkit-lab-worker is exited (137)",
        ),
        (HEALTHY, RayAnswer("2.60.0", (alive("n1"),)), "n2: its container runs, but it is not alive in Ray"),
        (HEALTHY, RayAnswer("2.60.0", (alive("n1"), alive("n2", state="DEAD"))), "n2: its container runs"),
        (HEALTHY, RayAnswer("2.60.0", (alive("n1"), alive("n2", gpus=7.0))), "n2: 7 of 8 GPUs in Ray"),
        ({**HEALTHY, "n2": (container("worker", gpus_seen=None),)}, BOTH, "n2: nvidia-smi fails in the container"),
        ({**HEALTHY, "n2": (container("worker", gpus_seen=6),)}, BOTH, "n2: nvidia-smi in the container shows 6 of 8"),
        ({**HEALTHY, "n2": (container("worker", ray="2.59.0"),)}, BOTH, "not the same Ray everywhere: n2 2.59.0"),
        ({**HEALTHY, "n2": (container("worker", image_id="sha256:2"),)}, BOTH, "not the same image everywhere: n2 2"),
        (
            {**HEALTHY, "n2": (container("worker", ray=""),)},
            BOTH,
            "n2: the versions in its container could not be read",
        ),
        ({**HEALTHY, "n2": (container("head"),)}, BOTH, "n2: runs as head, not as worker"),
        # A worker that was killed and is started again: Ray lists its node of before for some time.
        (
            {**HEALTHY, "n2": (container("worker", node_ids=()),)},
            RayAnswer("2.60.0", (alive("n1"), alive("n2", its_id="before"))),
            "n2: Ray has not started in its container yet",
        ),
        (
            {**HEALTHY, "n2": (container("worker", node_ids=("n2-now",)),)},
            RayAnswer("2.60.0", (alive("n1"), alive("n2", its_id="before"))),
            "n2: the node in its container has not joined yet",
        ),
    ],
)
def test_whatever_is_missing_is_named(
    containers: dict[str, tuple[ContainerState, ...]], answer: RayAnswer, wrong: str
) -> None:
    state = state_of(containers, answer)
    assert not state.ready
    assert [text for text in state.all_problems if text.startswith(wrong)], state.all_problems


def test_of_two_nodes_with_one_name_the_one_in_the_container_counts() -> None:
    containers = {**HEALTHY, "n2": (container("worker", node_ids=("n2-now",)),)}
    for order in ((alive("n2"), alive("n2", 7.0, its_id="before")), (alive("n2", 7.0, its_id="before"), alive("n2"))):
        assert state_of(containers, RayAnswer("2.60.0", (alive("n1"), *order))).ready


def test_host_that_cannot_be_asked_is_named() -> None:
    silent = {"n2": HostError("n2", ErrorKind.UNREACHABLE, "no route to host")}
    state = state_of({"n1": HEALTHY["n1"]}, BOTH, silent)
    assert state.all_problems == ("n2: no route to host",)
    assert state.cannot_recover


def test_waiting_goes_on_while_containers_run_and_ends_when_one_is_dead() -> None:
    joining = state_of(HEALTHY, RayAnswer("2.60.0", (alive("n1"),)))
    assert not joining.ready
    assert not joining.cannot_recover
    assert state_of({**HEALTHY, "n2": (container("worker", "exited"),)}, BOTH).cannot_recover


def test_node_that_is_not_expected_is_shown_and_does_no_harm() -> None:
    state = state_of(HEALTHY, RayAnswer("2.60.0", (*BOTH.nodes, alive("n9"))))
    assert state.ready
    assert state.nodes[-1].name == "n9"


def test_failure_shows_the_last_lines_of_the_container() -> None:
    dead = container("worker", "exited", log=("raylet: cannot bind 6380", "Some Ray subprocesses exited"))
    text = str(NotReadyError(state_of({**HEALTHY, "n2": (dead,)}, BOTH), 3.0))
    assert "raylet: cannot bind 6380" in text
    assert "n2" in text


def test_ray_that_does_not_answer_is_counted_by_its_text() -> None:
    status = (CASES / "ray_status_16_nodes.txt").read_text()
    state = state_of(HEALTHY, RayAnswer(error="URLError: refused", status=status))
    assert state.all_problems == (
        "Ray on the head does not answer: URLError: refused (by `ray status` 16 nodes and 128 GPUs)",
    )


def test_counts_in_the_text_of_ray_status() -> None:
    assert status_counts("ConnectionError: Could not find any running Ray instance.") == ""
    text = (
        "======== Autoscaler status ========\nNode status\n-----\nActive:\n 2 worker\nIdle:\n 1 head\nPending:\n"
        " 10.0.0.9: worker, setting-up\nRecent failures:\n worker: NodeTerminated (ip: 10.0.0.8)\n\nResources\n-----\n"
        "Total Usage:\n 1.0/6.0 CPU (1.0 used of 1.0 reserved in placement groups)\n 0B/2.50GiB memory\n"
    )
    assert status_counts(text) == " (by `ray status` 3 nodes and 0 GPUs)"


def test_an_image_is_the_same_by_its_content_where_engines_count_its_id_otherwise() -> None:
    one, other = (container(role, image_id=f"sha256:{n}", content="c") for n, role in enumerate(("head", "worker")))
    assert state_of({"n1": (one,), "n2": (other,)}, BOTH).ready
    changed = replace(other, content="d")
    assert "not the same image" in state_of({"n1": (one,), "n2": (changed,)}, BOTH).problems[0]


def test_output_of_a_host_is_read_with_the_log_of_a_dead_container() -> None:
    # As the script printed it for a head that runs and a helper container that ended; the log looks like JSON itself.
    record = {"image": "sha256:1", "reference": "runtime:1", "labels": {"clusterkit.role": "head"}}
    lines = [
        json.dumps({"id": "a1", "name": "/clusterkit-lab-head", "state": "running", "exit": 0, **record}),
        '@@image {"Id": "sha256:1", "RootFS": {"Layers": ["sha256:a"]}, "Config": {"Env": ["A=b"]}}',
        '@@inside {"ray": "2.60.0", "python": "3.12.3", "gpus": null}',
        json.dumps({"id": "b2", "name": "/helper", "state": "exited", "exit": 1, **record, "labels": None}),
        "@@image null",
        "@@log",
        '{"id": "not a container"}',
        "\x1b[36mlast words\x1b[39m",
        "",
        "@@log",
    ]
    head, helper = parse_containers("\n".join(lines))
    assert (head.name, head.ray, head.gpus_seen, head.running) == ("clusterkit-lab-head", "2.60.0", None, True)
    assert (len(head.content), helper.content) == (64, "")
    assert (helper.phrase, helper.role, helper.log) == ("exited (1)", "", ('{"id": "not a container"}', "last words"))


def test_answer_of_the_api_is_read() -> None:
    # Taken from Ray 2.60.0 and shortened.
    node = {
        "node_id": "bef7",
        "node_ip": "192.0.2.2",
        "is_head_node": True,
        "state": "ALIVE",
        "node_name": "n1",
        "resources_total": {"node:192.0.2.2": 1.0, "memory": 23778938624.0, "CPU": 2.0, "GPU": 8.0},
    }
    gone = {**node, "is_head_node": False, "state": "DEAD", "node_name": "n2", "resources_total": {}}
    jobs = [{"submission_id": "a", "status": "RUNNING"}, {"submission_id": "b", "status": "SUCCEEDED"}]
    jobs += [{"submission_id": None, "job_id": "01000000", "status": "RUNNING"}]
    text = "a warning\n" + json.dumps({"ray": "2.60.0", "nodes": [node, gone], "jobs": jobs})
    answer = parse_answer(Result(0, text, "", 0.1))
    assert answer.alive() == {"n1": RayNode("n1", "192.0.2.2", "ALIVE", True, 2.0, 8.0, 23778938624.0, "bef7")}
    assert answer.jobs == ("a", "01000000")
    silent = parse_answer(Result(1, "", "the head container does not run\n", 0.1))
    assert silent.error == "the head container does not run"


def test_token_of_the_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERKIT_CONFIG", str(tmp_path))
    assert tokens.read_token("lab") == ""
    file = tokens.local_file("lab")
    file.parent.mkdir(parents=True)
    file.write_text("0" * 64 + "\n")
    file.chmod(0o644)
    assert tokens.read_token("lab") == "0" * 64
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text("")
    with pytest.raises(UserError, match="holds no Ray token"):
        tokens.read_token("lab")
    tokens.forget_token("lab")
    assert not file.exists()
    assert not file.parent.exists()


def test_a_head_that_gives_its_own_node_up_after_its_api_answered_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake: on a real host the moment depends on how busy it is."""
    ended = container("head", "exited", exit_code=1, log=("Exception: The current node timed out during startup.",))
    answers = iter([RayAnswer("2.60.0"), RayAnswer("2.60.0", (alive("n1", state="DEAD"),)), BOTH])
    seen = iter([container("head"), container("head"), ended, container("head")])

    async def look(*_: object) -> tuple[ContainerState, ...]:
        return (next(seen),)

    async def ask(*_: object) -> RayAnswer:
        return next(answers)

    monkeypatch.setattr(start, "containers_on", look)
    monkeypatch.setattr(start, "ask_ray", ask)
    monkeypatch.setattr(start, "POLL_SECONDS", 0.0)
    with pytest.raises(NodeEndedError, match=r"Ray's head ended: container exited \(1\)\n.*timed out during startup"):
        asyncio.run(wait_for_head(LocalSession("n1"), "lab"))

    assert asyncio.run(wait_for_head(LocalSession("n1"), "lab")).running
