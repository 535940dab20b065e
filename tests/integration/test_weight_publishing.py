"""Weights reach servers through folders and over process groups, and no fault leaves half of a version in use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import publishing
import pytest
import torch
from publishing import CONTEXT, MODELS, Servers, Trainer, digest_of, folder_tensors, save_model, servers
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.checkpoint.export import export
from trainer.engines.http import EngineError
from trainer.errors import RunError, UserError
from trainer.train.distributed import join_world, leave_world, single_world


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
    stats = one.nccl(transport="nccl").publish(1)
    assert (stats.transport, stats.servers) == ("nccl", 1)
    assert in_use(rig) == {"s0": expected(one)}
    assert "in doubt" in torn.problem


@pytest.mark.parametrize("fault", [{"die_at": 2}, {"hang_at": 2}])
def test_a_server_that_is_lost_in_the_middle_does_not_hold_up_the_others(
    rig: Servers, tmp_path: Path, fault: dict[str, int]
) -> None:
    rig.add()
    lost = rig.add(**fault)
    one = trainer(rig, tmp_path)
    publisher = one.nccl(deadline_s=1.0)
    for version in (1, 2):
        one.learn()
        stats = publisher.publish(version)
        assert (stats.transport, stats.servers) == ("nccl", 1)
        assert in_use(rig) == {"s0": expected(one)}
    assert "s1 stopped answering in the middle of a weight update" in lost.problem


def test_in_one_group_all_are_lost_and_the_message_says_why(rig: Servers, tmp_path: Path) -> None:
    rig.add()
    rig.add(die_at=1)
    publisher = trainer(rig, tmp_path).nccl(servers_per_group=0, deadline_s=2.0)
    with pytest.raises(EngineError, match=r"no server took weight version 1"):
        publisher.publish(1)
    assert rig.pool.usable() == []
    assert all("s1 stopped answering in the middle" in server.problem for server in rig.pool.servers)


@pytest.mark.parametrize("transport", ["auto", "nccl"])
def test_a_missing_peer_is_named_and_not_waited_for(rig: Servers, tmp_path: Path, transport: str) -> None:
    rig.add()
    missing = rig.add(hang_join=True)
    one = trainer(rig, tmp_path)
    stats = one.nccl(transport=transport, deadline_s=1.0).publish(1)
    assert (stats.transport, stats.servers) == ("nccl", 1)
    assert missing.problem.startswith("s1 did not join the weight transfer group within 1 s")
    assert in_use(rig) == {"s0": expected(one)}


def test_without_any_peer_the_error_names_them(rig: Servers, tmp_path: Path) -> None:
    rig.add(hang_join=True)
    with pytest.raises(EngineError, match=r"no inference server is left \(s0: s0 did not join .* within 1 s"):
        trainer(rig, tmp_path).nccl(deadline_s=1.0).publish(1)


def run_rank(rank: int, size: int, model: str, folder: Path, fault: dict[str, int]) -> None:
    """One of several trainer ranks: publishes twice over groups, once through a folder; rank 0 has the servers."""
    torch.set_num_threads(1)
    world = join_world(rank, size, f"file://{folder}/rendezvous")
    report: dict[str, Any] = {}
    with servers(folder / "model") if rank == 0 else publishing.contextlib.nullcontext() as rig:
        if rig is not None:
            for number in range(2):
                rig.add(**(fault if number else {}))
        one = Trainer(model, world, rig.outlet if rig else None, folder / "weights")
        publisher = one.nccl(deadline_s=2.0)
        for version in (1, 2):
            one.learn()
            report[f"v{version}"] = publisher.publish(version, folder=version == 2 and rank == 0)
        export(one.learner, publishing.small_parts().tokenizer, folder / "export")
        if rig is not None:
            report["served"] = in_use(rig)
        publisher.world.barrier()
    torch.save(report, folder / f"rank{rank}.pt")
    leave_world(world)


@pytest.mark.parametrize(("model", "fault"), [(MODELS[0], {}), (MODELS[1], {}), (MODELS[1], {"refuse_at": 3})])
def test_three_ranks_gather_the_bytes_of_an_export(tmp_path: Path, model: str, fault: dict[str, int]) -> None:
    save_model(model, tmp_path / "model")
    processes = [CONTEXT.Process(target=run_rank, args=(r, 3, model, tmp_path, fault)) for r in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    reports = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(3)]
    whole = {name: tensor.to(torch.bfloat16) for name, tensor in folder_tensors(tmp_path / "export").items()}
    assert reports[0]["served"] == dict.fromkeys(("s0", "s1"), digest_of(whole))
    assert digest_of(folder_tensors(tmp_path / "weights" / "v2")) == digest_of(whole)
    for report in reports[1:]:
        assert (report["v1"], report["v2"]) == (reports[0]["v1"], reports[0]["v2"])
    assert reports[0]["v2"].transport == ("disk" if fault else "nccl")
