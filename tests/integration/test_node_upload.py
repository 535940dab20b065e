"""Folders copied to a host through a real SSH server: whole or not at all, resumed, verified, never over the user's."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from sshd import Ssh, Sshd

from clusterkit.data.assets.manifest import MANIFEST, differences, read_manifest, write_manifest
from clusterkit.hosts.model import Cluster
from clusterkit.provision.assets import upload as module
from clusterkit.provision.assets.hub import Hub
from clusterkit.provision.assets.model import NodeAsset, Origin
from clusterkit.provision.assets.provide import compare, provide
from clusterkit.provision.assets.upload import upload
from clusterkit.provision.assets.view import asset_problem, look
from clusterkit.provision.steps.step import Refused
from clusterkit.ssh.api import ErrorKind, HostError
from clusterkit.ssh.session import SshSession

pytest_plugins = ["sshd_fixture"]

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 6000000\n"
WEIGHTS = random.Random(1).randbytes(3_000_000)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "here" / "my model"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("no part of the model")
    (folder / "config.json").write_text("{}")
    (folder / "empty.txt").touch()
    (folder / "tokenizer" / "it's.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    return folder


@pytest.fixture
def asset(source: Path, tmp_path: Path) -> NodeAsset:
    target = tmp_path / "there" / "models" / source.name
    return NodeAsset("model", source.name, str(target), Origin.UPLOAD, str(source), setting="model.path")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks for a file of a few megabytes."""
    monkeypatch.setattr(module, "BLOCK", 256 * 1024)


def send(ssh: Ssh, asset: NodeAsset, told: list[tuple[int, int]] | None = None, server: Sshd | None = None) -> bool:
    async def work(session: SshSession) -> bool:
        tell = None if told is None else lambda sent, total: told.append((sent, total))
        return await upload(session, asset, Path(asset.source), await look(session, asset), tell)

    return ssh.with_session(server or ssh.servers(), work)


def test_folder_arrives_whole_and_a_second_run_changes_nothing(ssh: Ssh, source: Path, asset: NodeAsset) -> None:
    told: list[tuple[int, int]] = []
    assert send(ssh, asset, told)
    target = Path(asset.folder)
    assert {p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file()} == {
        "config.json",
        "empty.txt",
        "tokenizer/it's.json",
        "model.safetensors",
        MANIFEST,
    }
    assert (target / "model.safetensors").read_bytes() == WEIGHTS
    manifest = read_manifest(target)
    assert manifest is not None
    assert differences(target, manifest) == ""
    assert manifest["source"] == str(source)
    assert [path.name for path in target.parent.iterdir()] == [source.name]
    assert (target / "config.json").stat().st_mode & 0o777 == 0o644
    assert told[-1][0] == told[-1][1] == len(WEIGHTS) + 4
    assert [sent for sent, _ in told] == sorted(sent for sent, _ in told)
    before = {path: path.stat().st_mtime_ns for path in [target, *target.rglob("*")]}
    assert not send(ssh, asset)
    assert {path: path.stat().st_mtime_ns for path in [target, *target.rglob("*")]} == before


def test_copy_that_loses_its_connection_goes_on_where_it_stopped(ssh: Ssh, asset: NodeAsset) -> None:
    server = ssh.servers()

    async def cut(session: SshSession) -> None:
        def tell(sent: int, total: int) -> None:
            if sent > total // 2:
                server.kill_connections()

        await upload(session, asset, Path(asset.source), await look(session, asset), tell)

    with pytest.raises(HostError) as caught:
        ssh.with_session(server, cut)
    assert caught.value.kind in {ErrorKind.LOST, ErrorKind.TIMEOUT}
    assert not Path(asset.folder).exists()
    told: list[tuple[int, int]] = []
    assert send(ssh, asset, told, server)
    assert any(sent > len(WEIGHTS) // 2 for sent, _ in told[:3])  # the first block of the file is past the middle
    assert (Path(asset.folder) / "model.safetensors").read_bytes() == WEIGHTS


def test_half_of_another_file_is_found_out(ssh: Ssh, asset: NodeAsset) -> None:
    staging = Path(asset.folder).parent / f".{asset.name}.partial"
    staging.mkdir(parents=True)
    (staging / "model.safetensors").write_bytes(b"x" * 1_000_000)
    (staging / "stray").write_text("of another model")
    assert send(ssh, asset)
    assert (Path(asset.folder) / "model.safetensors").read_bytes() == WEIGHTS
    assert not (Path(asset.folder) / "stray").exists()


def test_damage_is_repaired(ssh: Ssh, asset: NodeAsset) -> None:
    assert send(ssh, asset)
    (Path(asset.folder) / "model.safetensors").write_bytes(WEIGHTS[:5])
    (Path(asset.folder) / "config.json").unlink()
    assert send(ssh, asset)
    assert (Path(asset.folder) / "model.safetensors").read_bytes() == WEIGHTS
    assert not send(ssh, asset)


def test_folder_that_somebody_put_there_is_taken_over_or_left_alone(ssh: Ssh, asset: NodeAsset) -> None:
    target = Path(asset.folder)
    target.mkdir(parents=True)
    (target / "config.json").write_text('{"mine": 1}')
    with pytest.raises(Refused, match="was put there by somebody") as refusal:
        send(ssh, asset)
    assert "mv " in refusal.value.fix
    assert {path.name for path in target.iterdir()} == {"config.json"}
    (target / "config.json").write_text("{}")  # the same as ours after all, and a clone without its large file
    (target / "model.safetensors").write_text(POINTER)
    (target / "notes").write_text("mine")
    assert send(ssh, asset)
    assert (target / "model.safetensors").read_bytes() == WEIGHTS
    assert (target / "notes").read_text() == "mine"


def test_copy_of_something_else_is_not_overwritten(ssh: Ssh, source: Path, asset: NodeAsset) -> None:
    assert send(ssh, asset)
    (source / "config.json").write_text('{"newer": true}')
    with pytest.raises(Refused, match="is another copy"):
        send(ssh, asset)
    assert (Path(asset.folder) / "config.json").read_text() == "{}"


def test_pointers_here_are_refused_before_anything_is_sent(ssh: Ssh, source: Path, asset: NodeAsset) -> None:
    (source / "model.safetensors").write_text(POINTER)
    with pytest.raises(Refused, match="Git LFS pointer") as refusal:
        send(ssh, asset)
    assert "git lfs pull" in refusal.value.fix
    assert not Path(asset.folder).parent.exists()


def test_storage_that_cannot_be_written_is_told(ssh: Ssh, asset: NodeAsset, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("a file where a folder should be")
    with pytest.raises(HostError, match="the shared storage cannot be written") as caught:
        send(ssh, asset)
    assert caught.value.fix


def test_other_host_is_compared_with_the_head(ssh: Ssh, asset: NodeAsset, tmp_path: Path) -> None:
    assert send(ssh, asset)
    elsewhere = NodeAsset("model", asset.name, str(tmp_path / "nowhere"), Origin.UPLOAD, asset.source)

    async def scenario() -> tuple[str, str]:
        async with ssh.session(ssh.servers()) as head, ssh.session(ssh.servers()) as other:
            return await compare(head, other, asset), asset_problem(elsewhere, await look(other, elsewhere))

    same, missing = asyncio.run(scenario())
    assert same == ""
    assert "is not there" in missing


def test_asset_of_the_cache_is_copied_without_being_fetched_again(
    ssh: Ssh, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    kept = cache / "models" / "smollm2-135m"
    kept.parent.mkdir(parents=True)
    source.rename(kept)
    write_manifest(kept, "smollm2-135m", {"source": "test"})
    monkeypatch.setenv("CLUSTERKIT_CACHE", str(cache))
    folder = str(tmp_path / "there" / "models" / "smollm2-135m")
    asset = NodeAsset("model", "smollm2-135m", folder, Origin.CACHE, "smollm2-135m", setting="model.path")
    cluster = Cluster(name="lab", hosts=(ssh.servers().host(),))

    async def never(actions: object) -> None:
        raise AssertionError(actions)

    async def work(session: SshSession) -> bool:
        return await provide(session, asset, cluster, Hub("runtime:1"), never)

    server = ssh.servers()
    assert ssh.with_session(server, work)
    assert (Path(folder) / "model.safetensors").read_bytes() == WEIGHTS
    kept.rename(kept.with_name("gone"))  # the second run needs nothing of this machine
    assert not ssh.with_session(server, work)


def test_missing_asset_on_the_host_itself_is_refused(ssh: Ssh, tmp_path: Path) -> None:
    asset = NodeAsset("model", "m", str(tmp_path / "m"), Origin.HOST, setting="model.path")
    cluster = Cluster(name="lab", hosts=(ssh.servers().host(),))

    async def never(actions: object) -> None:
        raise AssertionError(actions)

    with pytest.raises(Refused, match="is not there"):
        ssh.with_session(ssh.servers(), lambda session: provide(session, asset, cluster, Hub("r"), never))
