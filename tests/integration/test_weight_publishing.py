"""Weights reach servers through folders and over process groups, and no fault leaves half of a version in use."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import publishing
import pytest
import torch
from builders import sampled_rows, small_parts
from forkserver import run_ranks
from publishing import MODELS, Servers, Trainer, digest_of, folder_tensors, save_model, servers
from runs import wait_for
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.checkpoint.export import export
from trainer.config_parts import WeightsConfig
from trainer.engines.base import EngineError
from trainer.engines.http import Server
from trainer.errors import CrashError, RunError, UserError
from trainer.rollout.controller import RolloutController, SamplingPlan
from trainer.rollout.server_sampler import Served, ServedSampler
from trainer.schedule import Schedule
from trainer.serving import registry
from trainer.serving.fleet import Fleet
from trainer.train.distributed import join_world, leave_world, single_world
from trainer.types import SamplingParams
from trainer.weights.adapters import AdapterPublisher
from trainer.weights.choose import make_adapter_publisher, make_publisher
from trainer.weights.colocated import ColocatedPublisher
from trainer.weights.folders import SHARED_MEMORY, FolderPublisher


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Servers]:
    with servers(save_model("llama", tmp_path / "model")) as found:
        yield found


def trainer(rig: Servers, tmp_path: Path) -> Trainer:
    one = Trainer("llama", single_world(), rig.outlet, tmp_path / "weights")
    one.learn()
    return one


def expected(one: Trainer) -> str:
    """The policy's weights in bfloat16, as transformers names them."""
    lm = one.learner.policy.lm
    return digest_of({name: p.detach().to(torch.bfloat16) for name, p in lm.named_parameters()})


def in_use(rig: Servers) -> dict[str, str]:
    """Name -> digest of every server that gets requests."""
    return {server.name: rig.state(server)["digest"] for server in rig.pool.usable()}


def test_a_folder_holds_the_policy_as_servers_load_it(rig: Servers, tmp_path: Path) -> None:
    rig.add()
    one = trainer(rig, tmp_path)
    stats = one.folders.publish(1)
    assert (stats.transport, stats.servers, rig.engine.version) == ("disk", 1, 1)
    assert in_use(rig) == {"s0": expected(one)}
    folder = tmp_path / "weights" / "v1"
    assert len(list(folder.glob("*.safetensors"))) > 1
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.dtype is torch.bfloat16
    assert digest_of(dict(loaded.named_parameters())) == expected(one)
    assert AutoTokenizer.from_pretrained(folder).eos_token_id is not None


def test_old_folders_go_but_never_the_one_that_servers_hold(rig: Servers, tmp_path: Path) -> None:
    rig.add()
    one = trainer(rig, tmp_path)
    for left in (8, 9):  # by an attempt that was killed, and had come further than its recover checkpoint
        (tmp_path / "weights" / f"v{left}").mkdir(parents=True)
    for version in (1, 2, 3):
        one.folders.publish(version)
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["v2", "v3"]
    rig.processes[0].kill()
    for version in (4, 5, 6):
        with pytest.raises(EngineError):
            one.folders.publish(version)
    assert (tmp_path / "weights" / "v3").is_dir()
    one.folders.close()
    assert not (tmp_path / "weights").exists()


def test_adapters_go_into_memory_only_where_all_that_stay_have_room(
    rig: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer(rig, tmp_path)
    rig.pool.add(Server("s0", "http://127.0.0.1:9"))  # on this host
    rig.engine.versions = 3  # four folders stay, one is being written and one removed
    bytes_of_one = 4 * sum(p.numel() for p in one.learner.policy.parameters())

    def root(room: float) -> Path:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=room * bytes_of_one))
        made = make_adapter_publisher(one.learner, rig.outlet, None, WeightsConfig(), tmp_path)
        assert isinstance(made, AdapterPublisher)
        return made.root

    assert root(6.5).parent == SHARED_MEMORY
    assert root(5.5) == tmp_path / "weights"


def test_a_folder_that_cannot_be_written_is_told_and_nothing_changes(rig: Servers, tmp_path: Path) -> None:
    rig.add()
    one = trainer(rig, tmp_path)
    one.folders.root = tmp_path / "file" / "weights"
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write weights for the servers to .*v1: .*weights\.folder"):
        one.folders.publish(1)
    assert rig.engine.version == 0


def test_servers_of_another_model_are_refused(tmp_path: Path) -> None:
    with servers(save_model("qwen2", tmp_path / "other")) as rig:
        rig.add()
        with pytest.raises(UserError, match=r"cannot take the trained weights: the trained model lacks .* tensors"):
            trainer(rig, tmp_path)


@pytest.mark.parametrize("per_group", [0, 1])
def test_several_servers_receive_broadcasts_again_and_again(rig: Servers, tmp_path: Path, per_group: int) -> None:
    both = [rig.add(), rig.add()]
    one = trainer(rig, tmp_path)
    publisher = one.nccl(servers_per_group=per_group)
    for version in (1, 2):
        one.learn()
        stats = publisher.publish(version)
        assert (stats.transport, stats.servers, rig.engine.version) == ("nccl", 2, version)
        assert stats.bytes == sum(p.numel() * 2 for p in one.learner.policy.parameters())
        assert in_use(rig) == {"s0": expected(one), "s1": expected(one)}
    calls = rig.state(both[0])["calls"]
    assert calls.count("/init_weights_update_group") == 1  # met once, used twice
    publisher.close()
    assert [rig.state(server)["groups"] for server in both] == [0, 0]


def test_servers_that_leave_and_join_between_versions(rig: Servers, tmp_path: Path) -> None:
    rig.add()
    rig.add()
    one = trainer(rig, tmp_path)
    publisher = one.nccl(servers_per_group=0)
    publisher.publish(1)
    rig.processes[0].kill()  # nobody knows of it until the servers are paused: the other one gets it from the folder
    stats = publisher.publish(2, folder=True)
    assert (stats.transport, stats.servers) == ("disk", 1)
    rig.add()  # takes version 2 from its folder
    assert in_use(rig) == {"s1": expected(one), "s2": expected(one)}
    one.learn()
    stats = publisher.publish(3)
    assert (stats.transport, stats.servers) == ("nccl", 2)
    assert in_use(rig) == {"s1": expected(one), "s2": expected(one)}


def test_after_the_last_server_died_others_take_its_place(rig: Servers, tmp_path: Path) -> None:
    rig.add()
    one = trainer(rig, tmp_path)
    publisher = one.nccl()
    publisher.publish(1)
    rig.processes[0].kill()
    rig.pool.servers[0].died("it was killed")
    late = rig.start()
    with pytest.raises(EngineError, match="version 1 is in no folder"):
        rig.join(late)
    publisher.offer()  # in the middle of a step: the weights are still those of version 1
    rig.join(late)
    assert in_use(rig) == {"s1": expected(one)}
    rig.processes[1].kill()
    late.died("it was killed, too")
    one.learn()
    rig.pool.patience = 60.0
    newest = rig.start()

    async def come_back() -> None:
        while rig.engine.version == 1:  # somebody starts it while the trainer publishes
            await asyncio.sleep(0.01)
        await rig.engine.join(newest)

    coming = rig.loop.submit(come_back())
    assert publisher.publish(2).servers == 1
    coming.result(10)
    assert in_use(rig) == {"s2": expected(one)}
    assert publisher.publish(3).transport == "nccl"


@pytest.mark.parametrize(
    ("way", "fault"),
    [("folder", {}), ("nccl", {}), ("nccl", {"die_at": 1}), ("nccl", {"die_at": 2})],
    ids=["folder-unnoticed", "nccl-unnoticed", "nccl-first-bucket", "nccl-second-bucket"],
)
def test_a_version_waits_where_the_last_server_dies_while_it_is_published(
    rig: Servers, tmp_path: Path, way: str, fault: dict[str, int]
) -> None:
    lost = rig.add(**fault)
    one = trainer(rig, tmp_path)
    publisher = one.nccl(deadline_s=2.0) if way == "nccl" else one.folders
    if not fault:
        rig.processes[0].kill()  # nobody knows of it until it is to be paused
    rig.pool.patience = 60.0
    next_one = rig.start()

    async def come_back() -> None:
        while not lost.problem:
            await asyncio.sleep(0.01)
        next_one.version = -1
        while not (rig.engine.has_folder and rig.engine.version == 1):
            await asyncio.sleep(0.01)
        await rig.engine.join(next_one)

    coming = rig.loop.submit(come_back())
    stats = publisher.publish(1)
    coming.result(10)
    assert (stats.transport, stats.servers, rig.engine.version) == ("disk", 1, 1)
    assert in_use(rig) == {"s1": expected(one)}


def test_a_run_that_is_to_stop_waits_for_no_server_and_keeps_the_version(rig: Servers, tmp_path: Path) -> None:
    rig.add()
    one, stop = trainer(rig, tmp_path), threading.Event()
    rig.processes[0].kill()
    rig.pool.patience = 600.0
    folders = FolderPublisher(
        one.learner, replace(rig.outlet, stop=stop.is_set), small_parts().tokenizer, tmp_path / "more"
    )
    asking = threading.Thread(target=lambda: wait_for(lambda: rig.engine.version == 1) and stop.set())
    asking.start()
    stats = folders.publish(1)
    asking.join()
    assert (stats.servers, rig.engine.has_folder) == (0, True)
    rig.add()  # whoever comes after all gets it
    assert in_use(rig) == {"s1": expected(one)}


def test_a_server_that_comes_back_with_torn_weights_is_given_them_anew(rig: Servers, tmp_path: Path) -> None:
    torn, one, folder = rig.start(refuse_at=2), trainer(rig, tmp_path), tmp_path / "servers"
    node = registry.Registration(torn.name, "sglang", "", os.uname().nodename, 1, time.time(), "ready", torn.url)
    registry.write(folder, node)
    fleet = Fleet(rig.engine, folder, small_parts().config)
    rig.loop.run(fleet.look())
    first = in_use(rig)["s0"]
    with pytest.raises(EngineError, match="no server took weight version 1"):
        one.nccl(transport="nccl").publish(1)
    assert in_use(rig) == {}
    assert rig.state(torn)["digest"] not in {first, expected(one)}  # yet it says that it holds version 0
    rig.loop.run(fleet.look())
    assert in_use(rig) == {"s0": first}


def test_rollouts_go_on_when_their_only_server_is_replaced(rig: Servers, tmp_path: Path) -> None:
    one, parts = trainer(rig, tmp_path), small_parts()
    folder = tmp_path / "servers"

    def register(server: Server) -> None:
        node = registry.Registration(
            server.name, "sglang", "", os.uname().nodename, 1, time.time(), "ready", server.url
        )
        registry.write(folder, node)

    register(rig.start())
    controller = RolloutController(parts.agent, rig.engine, seed=1)
    served = Served(rig.engine, Fleet(rig.engine, folder, parts.config), controller, rig.loop)
    course = Schedule.of(parts.config, parts.config.task.train_size)
    sampler = ServedSampler(parts.config, parts.source, course, single_world(), lambda: False, served, one.nccl)
    sampler.publish(1)
    assert not rig.engine.has_folder
    rig.processes[0].kill()
    rig.pool.servers[0].died("it was killed")
    rig.pool.patience = 60.0
    register(rig.start())
    groups = sampler.groups([parts.source.train(0)], SamplingPlan("train-1", 2, 1.0))
    assert len(groups[0].trajectories) == 2
    assert rig.engine.version == 1
    assert in_use(rig) == {"s1": expected(one)}


def test_a_server_that_refuses_in_the_middle_gets_everything_from_a_folder(rig: Servers, tmp_path: Path) -> None:
    rig.add()
    rig.add(refuse_at=2)
    one = trainer(rig, tmp_path)
    publisher = one.nccl()
    for version in (1, 2):
        one.learn()
        assert publisher.publish(version).transport == "disk"
        assert rig.engine.version == version
        assert in_use(rig) == {"s0": expected(one), "s1": expected(one)}


def test_without_a_fallback_it_is_used_no_more(rig: Servers, tmp_path: Path) -> None:
    rig.add()
    torn = rig.add(refuse_at=2)
    one = trainer(rig, tmp_path)
    stats = one.nccl(transport="nccl", servers_per_group=1).publish(1)
    assert (stats.transport, stats.servers) == ("nccl", 1)
    assert in_use(rig) == {"s0": expected(one)}
    assert "in doubt" in torn.problem


@pytest.mark.parametrize("fault", [{"die_at": 2}, {"hang_at": 2}])
def test_a_server_that_is_lost_in_the_middle_does_not_hold_up_other_groups(
    rig: Servers, tmp_path: Path, fault: dict[str, int]
) -> None:
    rig.add()
    lost = rig.add(**fault)
    one = trainer(rig, tmp_path)
    publisher = one.nccl(servers_per_group=1, deadline_s=1.0)
    for version in (1, 2):
        one.learn()
        stats = publisher.publish(version)
        assert (stats.transport, stats.servers) == ("nccl", 1)
        assert in_use(rig) == {"s0": expected(one)}
    assert "s1 stopped answering in the middle of a weight update" in lost.problem


@pytest.mark.parametrize(("count", "per_group"), [(6, 0), pytest.param(64, 16, marks=pytest.mark.long)])
def test_others_of_the_group_of_a_lost_server_get_the_version_from_a_folder(
    rig: Servers, tmp_path: Path, count: int, per_group: int
) -> None:
    for number in range(count):
        rig.add(**({"die_at": 1} if number == 3 else {}))
    one = trainer(rig, tmp_path)
    publisher = one.nccl(servers_per_group=per_group, deadline_s=30.0)
    stats = publisher.publish(1)
    assert stats.transport == "disk"
    assert count - 3 <= stats.servers < count  # one that waits for the lost one alone is lost with it
    assert set(in_use(rig).values()) == {expected(one)}
    one.learn()
    assert publisher.publish(2).transport == "nccl"
    assert set(in_use(rig).values()) == {expected(one)}


@pytest.mark.parametrize("transport", ["auto", "nccl"])
def test_a_missing_peer_is_named_and_not_waited_for(rig: Servers, tmp_path: Path, transport: str) -> None:
    rig.add()
    missing = rig.add(hang_join=True)
    one = trainer(rig, tmp_path)
    stats = one.nccl(transport=transport, servers_per_group=1, deadline_s=1.0).publish(1)
    assert (stats.transport, stats.servers) == ("nccl", 1)
    assert missing.problem.startswith("s1 did not join the weight transfer group within 1 s")
    assert in_use(rig) == {"s0": expected(one)}


def test_without_any_peer_the_error_names_them(rig: Servers, tmp_path: Path) -> None:
    rig.add(hang_join=True)
    with pytest.raises(EngineError, match=r"no inference server is left \(s0: s0 did not join .* within 1 s"):
        trainer(rig, tmp_path).nccl(deadline_s=1.0).publish(1)


def test_a_server_on_the_same_device_gives_its_memory_away_and_gets_it_back(rig: Servers, tmp_path: Path) -> None:
    server = rig.add()
    one = trainer(rig, tmp_path)
    publisher = ColocatedPublisher(one.folders, rig.outlet, bucket_mb=1)
    for version in (1, 2):
        publisher.release()
        waiting = rig.loop.submit(rig.engine.generate([1], SamplingParams(1)))
        one.learn()
        stats = publisher.publish(version)
        assert (stats.transport, stats.servers) == ("ipc", 1)
        assert waiting.result(10).version == version  # nothing was asked of a server without weights
        assert in_use(rig) == {"s0": expected(one)}
    calls = [path for path in rig.state(server)["calls"] if "memory" in path or "tensor" in path or path == "/generate"]
    # SGLang ends itself when it is to give memory away and is not idle to the last: it is asked to wait until it is.
    for before, after in pairwise(rig.state(server)["calls"]):
        assert after != "/release_memory_occupation" or before == "/flush_cache"
    again = ["/release_memory_occupation", "/resume_memory_occupation", "/update_weights_from_tensor"]
    assert calls == ["/generate", *([*again, "/resume_memory_occupation", "/generate"] * 2)]  # the first is a probe


def test_a_server_on_the_same_device_that_is_lost_ends_the_run_with_its_fate(rig: Servers, tmp_path: Path) -> None:
    rig.add()
    publisher = ColocatedPublisher(trainer(rig, tmp_path).folders, rig.outlet, bucket_mb=1)
    rig.pool.patience = 600.0
    rig.processes[0].kill()
    with pytest.raises(RunError, match=r"no inference server is left \(s0: it could not be paused") as lost:
        publisher.publish(1)
    assert not isinstance(lost.value, EngineError)  # which says that servers were waited for
    with pytest.raises(EngineError, match=r"no inference server is left \(s0: "):
        publisher.release()


def test_servers_that_do_not_suit_the_ranks_are_no_mistake_in_the_settings(rig: Servers, tmp_path: Path) -> None:
    rig.add(memory_saver=False)
    folders = trainer(rig, tmp_path).folders
    with pytest.raises(RunError, match=r"s0 cannot share its GPU, as it runs without --enable-memory-saver") as error:
        ColocatedPublisher(folders, rig.outlet)
    assert error.value.exit_code == RunError.exit_code
    rig.add()
    with pytest.raises(RunError, match=r"there are 1 ranks, and s0, s1 with 1 GPUs each; start the run again") as error:
        ColocatedPublisher(folders, rig.outlet, trades=False)
    assert not isinstance(error.value, CrashError)

    rig.processes[0].kill()  # nobody has asked it since
    with pytest.raises(CrashError, match=r"s0 \(http.*/server_info"):
        ColocatedPublisher(folders, rig.outlet)
    rig.pool.servers[0].discard("it does not answer")
    with pytest.raises(CrashError, match=r"servers on the trainer's GPUs were lost \(s0: it does not answer; s1: in"):
        ColocatedPublisher(folders, rig.outlet)


def test_the_publisher_follows_the_servers_and_the_settings(rig: Servers, tmp_path: Path) -> None:
    rig.add()
    one = Trainer("llama", single_world(), rig.outlet, tmp_path / "unused")
    tokenizer = small_parts().tokenizer
    chosen = make_publisher(one.learner, rig.outlet, tokenizer, WeightsConfig(), tmp_path / "run")
    assert isinstance(chosen, FolderPublisher)  # no GPU here
    assert chosen.root.parent == Path("/dev/shm")
    assert chosen.publish(1).servers == 1
    chosen.close()
    assert not chosen.root.exists()
    with pytest.raises(UserError, match=r"no GPU to send weights from\. Change that, or set weights\.transport=auto"):
        make_publisher(one.learner, rig.outlet, tokenizer, WeightsConfig(transport="nccl"), tmp_path / "run")


def run_rank(rank: int, size: int, folder: Path, model: str, there: list[Server]) -> None:
    """One of several trainer ranks: publishes twice over groups; rank 0 has the servers."""
    torch.set_num_threads(1)
    world = join_world(rank, size, f"file://{folder}/rendezvous")
    with servers(folder / "model") if rank == 0 else contextlib.nullcontext() as rig:
        for server in there if rig else ():
            rig.join(server)
        one = Trainer(model, world, rig.outlet if rig else None, folder / "weights")
        publisher = one.nccl(deadline_s=5.0)
        lm = publishing.make_lm(model)
        rows = sampled_rows(lm, 3, lm.config.vocab_size)
        stats = []
        for version in (1, 2):
            one.learn()
            one.learner.logprobs(rows)  # leaves some weights gathered
            stats.append(publisher.publish(version, folder=version == 2 and rank == 0))
        export(one.learner, small_parts().tokenizer, folder / "export")
    torch.save(stats, folder / f"rank{rank}.pt")
    leave_world(world)


@pytest.mark.parametrize(("model", "fault"), [(MODELS[0], {}), (MODELS[1], {}), (MODELS[1], {"refuse_at": 3})])
def test_three_ranks_gather_the_bytes_of_an_export(tmp_path: Path, model: str, fault: dict[str, int]) -> None:
    with servers(save_model(model, tmp_path / "model")) as rig:
        there = [rig.start(), rig.start(**fault)]
        told = run_ranks(run_rank, 3, tmp_path, model, there)
        digests = [rig.state(server)["digest"] for server in there]
    whole = {name: tensor.to(torch.bfloat16) for name, tensor in folder_tensors(tmp_path / "export").items()}
    assert digests == [digest_of(whole)] * 2
    assert digest_of(folder_tensors(tmp_path / "weights" / "v2")) == digest_of(whole)
    first, *others = told
    assert others == [first, first]
    assert [stats.transport for stats in first] == (["disk", "disk"] if fault else ["nccl", "nccl"])
