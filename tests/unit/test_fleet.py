"""Which engine servers a run waits for, and which of those that are there it uses."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from builders import small_config
from httpstub import Answer, Drop, HttpStub
from safetensors.torch import load_file, save_file
from servedrig import FAST, FaultyServer, write_model

from trainer.config import RunConfig
from trainer.config_parts import SupervisedConfig
from trainer.engines.dialects import make_dialect
from trainer.engines.http import ServerLostError, ServerPool
from trainer.engines.served import ServedEngine
from trainer.hf_folder import weights_digest
from trainer.paths import RunPaths
from trainer.serving import fleet as fleet_module
from trainer.serving import registry
from trainer.serving.fleet import Fleet
from trainer.serving.keeper import LocalServers, with_other_weights
from trainer.start_mark import mark_done


@pytest.mark.parametrize(
    ("allocation", "minimum", "required"),
    [
        ("sglang:d2|fsdp:d2", 1, 2),  # one that is missing takes memory of the trainer's GPU when it comes
        ("sglang:d2|fsdp:d2", 0, 2),
        ("sglang:d1+fsdp:d1", 0, 1),
        ("sglang:d3+fsdp:d1", 2, 2),
    ],
)
def test_servers_on_the_trainers_gpus_are_waited_for_all(
    allocation: str, minimum: int, required: int, tmp_path: Path
) -> None:
    gpus = 4 if "d3" in allocation else 2
    servers = {"engine": "sglang", "min_required": minimum}
    config = RunConfig(allocation_mode=allocation, n_gpus_per_node=gpus, servers=servers)  # type: ignore[arg-type]

    assert Fleet(cast("Any", None), tmp_path, config).required == required


def folder_of(path: Path, seed: int) -> Path:
    """A folder of weights, all of one shape, so that headers and sizes tell nothing."""
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    save_file({"a": torch.zeros(9), "b": torch.rand(3, 4, generator=generator)}, path / "model.safetensors")
    return path


def started(folder: Path, name: str, base: str, adapters: int, *targets: str, versions: int = 1) -> None:
    one = registry.Registration(
        name, "vllm", "/m", "node", 1, 1.0, "ready", base=base, adapters=adapters, targets=targets, versions=versions
    )
    registry.write(folder, one)


def test_servers_of_other_weights_or_adapters_are_told_from_the_runs_own(tmp_path: Path) -> None:
    model = folder_of(tmp_path / "base", 0)
    own = weights_digest(model)
    assert own == weights_digest(Path(shutil.copytree(model, tmp_path / "elsewhere")))
    tensors = load_file(model / "model.safetensors")
    for number, name in enumerate(("b", "a")):  # a copy in other files
        (tmp_path / "split").mkdir(exist_ok=True)
        save_file({name: tensors[name]}, tmp_path / "split" / f"model-{number}.safetensors")
    assert own == weights_digest(tmp_path / "split")
    config = small_config(f"fileroot={tmp_path}", "servers.engine=vllm", "model.lora.rank=4")
    folder = registry.folder_of(RunPaths.of(config).logs)
    assert with_other_weights(config, model) == set()
    for name, base, adapters in (
        ("same", own, 4),
        ("rank", own, 8),
        ("whole", own, 0),
        ("old", "", 0),
        ("other", "x", 4),
    ):
        started(folder, name, base, adapters)
    assert with_other_weights(config, model) == {"rank", "whole", "old", "other"}
    whole = small_config(f"fileroot={tmp_path}", "servers.engine=vllm")
    assert with_other_weights(whole, model) == {"same", "rank", "other"}  # an earlier version wrote "old"
    stale = small_config(f"fileroot={tmp_path}", "servers.engine=vllm", "model.lora.rank=4", "rollout.max_staleness=1")
    started(folder, "two versions", own, 4, versions=2)
    assert with_other_weights(stale, model) == {"same", "rank", "whole", "old", "other"}
    folder_of(model, 1)
    assert with_other_weights(whole, model) == {"same", "rank", "other", "whole", "two versions"}


def test_servers_that_lack_a_layer_that_adapters_are_for_are_told_from_the_runs_own(tmp_path: Path) -> None:
    layers = ("self_attn.q_proj", "mlp.up_proj")
    save_file({f"model.layers.0.{name}.weight": torch.zeros(2, 2) for name in layers}, tmp_path / "model.safetensors")
    own = weights_digest(tmp_path)

    def others(*settings: str) -> set[str]:
        gpus = ("n_gpus_per_node=2", "allocation_mode=sglang:d1+fsdp:d1") if "servers.engine=sglang" in settings else ()
        settings = ("weights.adapters=alone", "model.lora.rank=4", *gpus, *settings)
        config = small_config(f"fileroot={tmp_path}", *settings)
        folder = registry.folder_of(RunPaths.of(config).logs)
        started(folder, "attention", own, 4, "q_proj")
        started(folder, "all", own, 4, "q_proj", "up_proj")
        started(folder, "any", own, 4)
        old = json.loads((folder / "any.json").read_text())
        del old["targets"]  # as an earlier version wrote it
        (folder / "any.json").write_text(json.dumps(old))
        return with_other_weights(config, tmp_path)

    assert others("servers.engine=sglang") == {"attention"}
    assert others("servers.engine=sglang", "model.lora.targets=[q_proj]") == set()
    assert others("servers.engine=sglang", "model.lora.targets=[q_proj,v_proj]") == {"attention", "all"}
    assert others("servers.engine=vllm") == set()


def test_a_kept_server_of_another_base_is_started_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = folder_of(tmp_path / "base", 0)
    config = small_config(f"fileroot={tmp_path}", "servers.engine=vllm", "model.lora.rank=4", "servers.count=1")
    folder = registry.folder_of(RunPaths.of(config).logs)
    # Only something that looks like a server's host.
    host = subprocess.Popen([sys.executable, "-c", "input()", registry.HOST_MODULE], stdin=subprocess.PIPE)
    one = registry.Registration("server-0", "vllm", "/m", os.uname().nodename, host.pid, 1.0, "ready", adapters=4)
    registry.write(folder, replace(one, base="another"))
    begun: list[str] = []
    servers = LocalServers(config)
    monkeypatch.setattr(servers._keeper, "_start", lambda name: begun.append(name) or host)
    with servers:
        servers.start(model)
        assert (begun, host.wait(10) != 0) == (["server-0"], True)


def test_a_server_with_the_weights_from_before_the_supervised_start_is_given_the_present_ones(tmp_path: Path) -> None:
    before, after = folder_of(tmp_path / "before", 0), folder_of(tmp_path / "after", 1)
    supervised = SupervisedConfig(dataset="traces.jsonl")
    settings = (f"fileroot={tmp_path}", "servers.engine=vllm")
    config = small_config(*settings).model_copy(update={"supervised": supervised})
    folder, paths = registry.folder_of(RunPaths.of(config).logs), RunPaths.of(config).supervised
    for path in (paths.logs, paths.checkpoints):
        path.mkdir(parents=True)
    for model in (paths.checkpoints, after):
        (model / "config.json").write_text("{}")
    mark_done(paths, {}, weights_digest(before), {})
    dialect = make_dialect("sglang")

    def loaded(stub: HttpStub) -> list[str]:
        return [body["model_path"] for _, path, body in stub.seen if path == "/update_weights_from_disk"]

    async def main() -> None:
        engine = ServedEngine(ServerPool(dialect.health_path, FAST), dialect, after, set())
        fleet = Fleet(engine, folder, config)
        async with HttpStub(server := FaultyServer()) as stub:
            one = registry.Registration("server-0", "sglang", "/m", os.uname().nodename, 1, 1.0, "ready", stub.url)
            one = replace(one, base=weights_digest(before))
            registry.write(folder, one)
            await fleet.look()
            assert (fleet.usable(), loaded(stub)) == (1, [str(after)])
            await engine.update_from_folder(folder_of(tmp_path / "v1", 2), 1)
            server.version = 0  # as one that was killed and started again, with what it was started with
            registry.write(folder, replace(one, started=2.0))
            await fleet.look()
            assert (fleet.usable(), loaded(stub)[1:]) == (1, [str(tmp_path / "v1")] * 2)
            server.version = 0  # and again, when its host could not read the weights to tell which they are
            registry.write(folder, replace(one, started=3.0, base=""))
            await fleet.look()
            assert (fleet.usable(), loaded(stub)[3:]) == (1, [str(tmp_path / "v1")])
            await engine.pool.close()

    asyncio.run(main())
    assert with_other_weights(config, after) == set()
    adapters = small_config(*settings, "model.lora.rank=4").model_copy(update={"supervised": supervised})
    started(folder, "server-0", weights_digest(before), 4)
    assert with_other_weights(adapters, after) == {"server-0"}  # adapters belong to the weights of the start


def test_a_server_of_another_base_is_refused_by_name(tmp_path: Path) -> None:
    config = small_config(f"fileroot={tmp_path}", "servers.engine=vllm", "model.lora.rank=4")
    folder, dialect = tmp_path / "servers", make_dialect("vllm", adapters=True)
    engine = ServedEngine(ServerPool(dialect.health_path), dialect, folder_of(tmp_path / "base", 0), set())
    started(folder, "server-3", "another", 4)
    fleet = Fleet(engine, folder, config)
    (engine.model / "model.safetensors").rename(tmp_path / "away")  # shared storage that is away for a moment
    found = asyncio.run(fleet.look())
    assert "the weights that the run begins with cannot be read" in fleet.missing(found)
    (tmp_path / "away").rename(engine.model / "model.safetensors")
    found = asyncio.run(fleet.look())
    assert fleet.usable() == 0
    assert "server-3 on" in fleet.missing(found)
    assert "it was started with other weights than the run begins with (/m, now" in fleet.missing(found)


def test_a_server_that_comes_back_joins_once_where_two_look_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A run's watch, and a step that waits for all servers before it takes their memory for training.
    config = small_config(f"fileroot={tmp_path}", "servers.engine=vllm")
    folder, dialect = tmp_path / "servers", make_dialect("vllm")
    engine = ServedEngine(ServerPool(dialect.health_path), dialect, folder_of(tmp_path / "base", 0), set())
    started(folder, "server-0", weights_digest(engine.model), 0)

    async def answer(*_: Any) -> Any:  # as a server does, after a moment
        await asyncio.sleep(0.01)
        return 0

    for name in ("go_on", "held_version", "probe"):
        monkeypatch.setattr(dialect, name, answer)
    fleet = Fleet(engine, folder, config)

    async def two() -> None:
        await asyncio.gather(fleet.look(), fleet.look())

    asyncio.run(two())
    assert [server.name for server in fleet.engine.pool.usable()] == ["server-0"]


@pytest.mark.parametrize(("answer", "joins"), [(Drop(), True), ((503, {}), True), ((400, {"error": "no"}), False)])
def test_a_server_that_fails_to_answer_while_it_joins_is_tried_again_and_one_that_says_no_is_not(
    answer: Answer, joins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(FaultyServer):
        well = False

        async def __call__(self, method: str, path: str, body: dict[str, Any]) -> Answer:
            return await super().__call__(method, path, body) if self.well else answer

    config = small_config(f"fileroot={tmp_path}", "servers.engine=vllm")
    folder, dialect = tmp_path / "servers", make_dialect("sglang")
    engine = ServedEngine(ServerPool(dialect.health_path, FAST), dialect, folder_of(tmp_path / "base", 0), set())

    now = 0.0
    monkeypatch.setattr(fleet_module, "time", SimpleNamespace(monotonic=lambda: now))

    async def main() -> list[tuple[float, int, int]]:
        nonlocal now
        seen = []
        async with HttpStub(failing := Failing()) as stub:
            one = registry.Registration("server-0", "sglang", "/m", os.uname().nodename, 1, 1.0, "ready", stub.url)
            registry.write(folder, replace(one, base=weights_digest(engine.model)))
            fleet = Fleet(engine, folder, config)
            for now in (0.0, 4.0, 6.0, 15.0, 17.0):
                failing.well = now == 17.0
                before = len(stub.seen)
                await fleet.look()
                seen.append((now, len(stub.seen) - before > 0, fleet.usable()))
            await engine.pool.close()
        return seen

    tried = [(0.0, True, 0), (4.0, False, 0), (6.0, joins, 0), (15.0, False, 0), (17.0, joins, int(joins))]
    assert asyncio.run(main()) == tried


def test_a_server_whose_connection_broke_in_a_load_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(FaultyServer):
        breaks, gone = False, False

        async def __call__(self, method: str, path: str, body: dict[str, Any]) -> Answer:
            self.gone = self.gone or (self.breaks and path.startswith("/update_weights"))
            return Drop() if self.gone else await super().__call__(method, path, body)

    config = small_config(f"fileroot={tmp_path}", "servers.engine=vllm")
    folder, dialect = tmp_path / "servers", make_dialect("sglang")
    engine = ServedEngine(ServerPool(dialect.health_path, FAST), dialect, write_model(tmp_path / "base"), set())
    now = 0.0
    monkeypatch.setattr(fleet_module, "time", SimpleNamespace(monotonic=lambda: now))

    async def main() -> list[int]:
        nonlocal now
        usable = []
        faults = [Gone(), Gone()]
        async with HttpStub(faults[0]) as first, HttpStub(faults[1]) as second:
            for number, stub in enumerate((first, second)):
                one = registry.Registration(
                    f"server-{number}", "sglang", "/m", os.uname().nodename, 1, 1.0, "ready", stub.url
                )
                registry.write(folder, replace(one, base=weights_digest(engine.model)))
            fleet = Fleet(engine, folder, config)
            await fleet.look()
            usable.append(fleet.usable())
            faults[1].breaks = True
            await engine.update_from_folder(write_model(tmp_path / "v1"), 1)
            await fleet.look()
            usable.append(fleet.usable())
            faults[1].breaks = faults[1].gone = False
            now = 10.0
            await fleet.look()
            usable.append(fleet.usable())
            await engine.pool.close()
        return usable

    assert asyncio.run(main()) == [2, 1, 2]


@asynccontextmanager
async def looking(tmp_path: Path) -> AsyncIterator[tuple[Fleet, Path, registry.Registration, HttpStub]]:
    """A fleet that uses one server; its folder, the server's registration and the server."""
    config = small_config(f"fileroot={tmp_path}", "servers.engine=vllm")
    folder, dialect = tmp_path / "servers", make_dialect("sglang")
    engine = ServedEngine(ServerPool(dialect.health_path, FAST), dialect, folder_of(tmp_path / "base", 0), set())
    async with HttpStub(FaultyServer()) as stub:
        one = registry.Registration("server-0", "sglang", "/m", os.uname().nodename, 1, 1.0, "ready", stub.url)
        one = replace(one, base=weights_digest(engine.model))
        registry.write(folder, one)
        fleet = Fleet(engine, folder, config)
        await fleet.look()
        yield fleet, folder, one, stub
        await engine.pool.close()


def test_a_server_that_hangs_is_not_used_until_its_host_has_started_it_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with looking(tmp_path) as (fleet, folder, one, stub):
            assert registry.restart_reason(folder, one) == ""
            fleet.engine.pool.usable()[0].hang("it hangs")
            asked = len(stub.seen)
            for _ in range(2):
                await fleet.look()
                assert (registry.restart_reason(folder, one), fleet.usable(), len(stub.seen)) == ("it hangs", 0, asked)
                written = (folder / "server-0.restart").stat()
                await fleet.look()  # its host has not followed yet, or is gone
                assert (folder / "server-0.restart").stat() == written
                (folder / "server-0.restart").unlink()  # storage that lost it: it is written until it was followed
            await fleet.look()
            again = replace(one, started=2.0)
            registry.write(folder, again)
            await fleet.look()
            assert (registry.restart_reason(folder, again), fleet.usable()) == ("", 1)
            registry.remove(folder, "server-0")
            assert list(folder.iterdir()) == []

    asyncio.run(main())
    assert caplog.text.count("server-0 hangs: its host is asked to kill it and to start it again") == 1


def test_others_join_while_the_host_of_a_server_that_hangs_cannot_be_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with looking(tmp_path) as (fleet, folder, one, _):
            fleet.engine.pool.usable()[0].hang("it hangs")
            (folder / "server-0.restart").mkdir()  # no file can be written there
            registry.write(folder, replace(one, name="server-1"))
            for _ in range(2):
                await fleet.look()
                assert [server.name for server in fleet.engine.pool.usable()] == ["server-1"]
            (folder / "server-0.restart").rmdir()
            await fleet.look()
            assert registry.restart_reason(folder, one) == "it hangs"

    asyncio.run(main())
    assert caplog.text.count("server-0 cannot be used yet: its host cannot be asked to start it again: ") == 1


@pytest.mark.parametrize(("limit", "reason"), [(600.0, "it could not join for 615 s: server-0 ("), (0.0, "")])
def test_a_server_that_does_not_answer_while_it_joins_is_started_again_in_the_end(
    limit: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that hung in an update, when it had no requests."""
    now = 0.0
    monkeypatch.setattr(fleet_module, "time", SimpleNamespace(monotonic=lambda: now))
    config = small_config(f"fileroot={tmp_path}", "servers.engine=vllm", f"servers.hang_seconds={limit}")
    folder, dialect = tmp_path / "servers", make_dialect("sglang")
    engine = ServedEngine(ServerPool(dialect.health_path, FAST), dialect, folder_of(tmp_path / "base", 0), set())

    async def down(method: str, path: str, body: dict[str, Any]) -> Answer:
        return Drop()

    async def main() -> None:
        nonlocal now
        async with HttpStub(down) as stub:
            one = registry.Registration("server-0", "sglang", "/m", os.uname().nodename, 1, 1.0, "ready", stub.url)
            one = replace(one, base=weights_digest(engine.model))
            registry.write(folder, one)
            fleet = Fleet(engine, folder, config)
            for now, wanted in ((0.0, ""), (300.0, ""), (595.0, ""), (615.0, ""), (616.0, reason)):
                await fleet.look()
                found = registry.restart_reason(folder, one)
                assert (found.startswith(wanted), bool(found)) == (True, bool(wanted)), now
            await engine.pool.close()

    asyncio.run(main())


def test_the_wait_before_a_server_is_tried_again_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "time", SimpleNamespace(monotonic=lambda: 0.0))
    fleet = Fleet(cast("Any", None), tmp_path, RunConfig())
    one = registry.Registration("server-0", "sglang", "/m", "node", 1, 1.0, "ready")
    for _ in range(2000):
        fleet._refuse(one, ServerLostError("gone"), for_good=False)
    assert fleet._refused["server-0"] == (1.0, 320.0)


def test_a_server_that_was_left_paused_joins(tmp_path: Path) -> None:
    """As by an attempt that was killed while it changed the weights, of a server that stays."""

    class Paused(FaultyServer):
        def __init__(self) -> None:
            super().__init__()
            self.goes_on = asyncio.Event()

        async def __call__(self, method: str, path: str, body: dict[str, Any]) -> Answer:
            if path == "/continue_generation":
                self.goes_on.set()
            if path == "/generate":
                await self.goes_on.wait()
            return await super().__call__(method, path, body)

    config = small_config(f"fileroot={tmp_path}", "servers.engine=vllm")
    folder, dialect = tmp_path / "servers", make_dialect("sglang")
    engine = ServedEngine(ServerPool(dialect.health_path, FAST), dialect, folder_of(tmp_path / "base", 0), set())

    async def main() -> list[str]:
        async with HttpStub(Paused()) as stub:
            one = registry.Registration("server-0", "sglang", "/m", os.uname().nodename, 1, 1.0, "ready", stub.url)
            registry.write(folder, replace(one, base=weights_digest(engine.model)))
            fleet = Fleet(engine, folder, config)
            await fleet.look()
            await engine.pool.close()
            return [server.name for server in fleet.engine.pool.usable()]

    assert asyncio.run(main()) == ["server-0"]


@pytest.mark.parametrize("version", [0, 12])
def test_a_server_that_outlived_an_attempt_gets_its_weights_anew_once(version: int, tmp_path: Path) -> None:
    """It says a version that the run has now: of that attempt's weights, or of ones that a kill has torn."""
    config = small_config(f"fileroot={tmp_path}", "servers.engine=vllm")
    folder, dialect = tmp_path / "servers", make_dialect("sglang")
    model = write_model(tmp_path / "base")
    engine = ServedEngine(ServerPool(dialect.health_path, FAST), dialect, model, set(), version)

    async def main() -> list[int]:
        loads, fleet = [], Fleet(engine, folder, config)
        async with HttpStub(FaultyServer(version)) as stub:
            one = registry.Registration(
                "server-0", "sglang", "/m", os.uname().nodename, 1, 1.0, "ready", stub.url, kept=True
            )
            for state in ("ready", "leaving", "ready"):
                registry.write(folder, replace(one, base=weights_digest(model), state=state))
                await fleet.look()
                loads.append(stub.count("/update_weights_from_disk"))
            assert fleet.usable() == 1
            await engine.pool.close()
        return loads

    assert asyncio.run(main()) == [1, 1, 1]


def test_servers_of_a_machine_or_container_that_is_gone_are_started_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their registrations stay; at their address, which only that machine could ask, somebody else may listen here."""
    config = small_config(f"fileroot={tmp_path}", "servers.engine=vllm")
    folder, model = registry.folder_of(RunPaths.of(config).logs), write_model(tmp_path / "base")
    dialect, begun = make_dialect("vllm"), list[str]()

    def start(_: LocalServers, name: str) -> Any:
        begun.append(name)
        return SimpleNamespace(pid=0, poll=lambda: 0, terminate=lambda: None, wait=lambda _: 0)

    monkeypatch.setattr(LocalServers, "_start", start)

    async def main() -> int:
        async with HttpStub(FaultyServer()) as somebody:
            for name in ("server-0", "server-7"):
                one = registry.Registration(name, "vllm", str(model), "a-pod-of-before", 7, 1.0, "ready", somebody.url)
                registry.write(folder, replace(one, base=weights_digest(model)))
            with LocalServers(config) as servers:
                assert begun == []
                servers.start(model)
                servers.start(model / "another")  # they are there
                assert begun == ["server-0"]
                engine = ServedEngine(ServerPool(dialect.health_path, FAST), dialect, model, set())
                await Fleet(engine, folder, config).look()
                await engine.pool.close()
            return len(somebody.seen)

    assert asyncio.run(main()) == 0
