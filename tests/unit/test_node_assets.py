"""Models and data sets for the cluster: what a preset needs, what the hub sends, and what a folder must hold."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hub import FakeHub

from clusterkit.config.resolve import resolve
from clusterkit.data.assets.manifest import MANIFEST, differences, read_manifest
from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.assets import hub_fetch
from clusterkit.provision.assets.hub import Hub, fetch_action
from clusterkit.provision.assets.model import NodeAsset, Origin, required_assets
from clusterkit.provision.assets.view import View, asset_problem, difference, parse_view, require_usable
from clusterkit.provision.steps.step import Refused

CLUSTER = Cluster(name="lab", hosts=(Host(name="node1"),))
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 6000000\n"
MEGABYTE = 1_000_000
WEIGHTS = random.Random(1).randbytes(20 * MEGABYTE)
FILES = {
    "config.json": b'{"model_type": "tiny"}',
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"the same again in another format",
    "original/consolidated.00.pth": b"and again",
}
KEPT = {"config.json", "tokenizer.json", "model.safetensors"}


# -- what is needed ---------------------------------------------------------------------------------------------------


def needs(preset: str, *overrides: str, **paths: str) -> tuple[NodeAsset, ...]:
    return required_assets(resolve(preset, None, overrides).config, CLUSTER, **paths)


def test_presets_say_what_they_need() -> None:
    assert needs("tiny") == ()
    model, data = needs("135M_cpu")
    assert (model.origin, model.folder, model.override) == (
        Origin.CACHE,
        "/storage/models/smollm2-135m",
        "model.path=/storage/models/smollm2-135m",
    )
    assert (data.kind, data.folder, data.override) == (
        "dataset",
        "/storage/datasets/hotpotqa",
        "task.path=/storage/datasets/hotpotqa",
    )


def test_the_judges_model_is_fetched_with_the_others() -> None:
    assert [asset.override for asset in needs("memalpha-4B")] == [
        "model.path=/storage/models/Qwen3-4B",
        "task.path=/storage/datasets/Memalpha",
        "judge.model=/storage/models/Qwen3-14B",
    ]
    assert len(needs("memalpha-4B", "judge.url=http://10.0.0.5:8000")) == 2  # served elsewhere
    assert len(needs("memalpha-4B", "judge.model=what-a-server-calls-it")) == 2


def test_model_can_come_from_the_hub_from_here_or_from_the_storage(tmp_path: Path) -> None:
    hub, _ = needs("135M_cpu", model_path="deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B@v2")
    assert (hub.origin, hub.source, hub.revision, hub.folder) == (
        Origin.HUB,
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        "v2",
        "/storage/models/DeepSeek-R1-Distill-Qwen-1.5B",
    )
    folder = tmp_path / "My-Model"
    folder.mkdir()
    local, _ = needs("135M_cpu", model_path=str(folder))
    assert (local.origin, local.source, local.folder) == (Origin.UPLOAD, str(folder), "/storage/models/My-Model")
    there, _ = needs("135M_cpu", model_path="/storage/elsewhere/m/")
    assert (there.origin, there.folder) == (Origin.HOST, "/storage/elsewhere/m")
    assert needs("135M_cpu", "model.path=org/name")[0].source == "org/name"


def test_an_adapter_is_merged_where_its_base_is_so_one_of_this_machine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(Refused, match="is a low-rank adapter, which is merged on the cluster") as refusal:
        needs("135M_cpu", model_path=str(tmp_path))
    assert refusal.value.fix.startswith("copy it and its base below /storage")
    there = NodeAsset("model", "m", "/storage/m", Origin.HOST, setting="model.path")
    require_usable(there, View(True, {"adapter_config.json": 9, "adapter_model.safetensors": 5}))


@pytest.mark.parametrize("path", ["/home/nobody/model", "./missing", "name-only", "a/b/c", "org/"])
def test_unusable_path_is_refused(path: str) -> None:
    with pytest.raises(Refused, match=r"model\.path=") as refusal:
        needs("135M_cpu", model_path=path)
    assert refusal.value.fix


# -- the order to download --------------------------------------------------------------------------------------------

ASSET = NodeAsset("model", "name", "/storage/models/name", Origin.HUB, "org/name", setting="model.path")


PROXY = "http://ann:w0rd@proxy.example:3128"


def test_download_runs_in_the_image_and_its_variables_come_over_stdin() -> None:
    hub = Hub("runtime:1", "https://me:pw@mirror.example", "hf_secret", environment={"https_proxy": PROXY})
    action = fetch_action(ASSET, CLUSTER, hub)
    for secret in ("hf_secret", "w0rd", "pw@"):
        assert secret not in action.script + action.title + repr(hub)
    first, script = action.stdin.split(b"\n", 1)
    variables = json.loads(first)
    assert script == Path(hub_fetch.__file__).read_bytes()
    assert variables["HF_ENDPOINT"] == "https://me:pw@mirror.example"
    assert (variables["HF_HUB_DISABLE_XET"], variables["HF_TOKEN"], variables["https_proxy"]) == (
        "1",
        "hf_secret",
        PROXY,
    )
    words = shlex.split(action.script.splitlines()[-1])
    assert words[:2] == ["docker", "run"]
    assert "--env" not in words
    assert "type=bind,src=/storage,dst=/storage" in words
    assert {"clusterkit.cluster=lab", "clusterkit.role=fetch"} <= set(words)
    assert json.loads(words[-1])["repository"] == "org/name"
    assert b"HF_ENDPOINT" not in fetch_action(ASSET, CLUSTER, Hub("runtime:1")).stdin.split(b"\n", 1)[0]


def test_no_process_shows_a_password_while_a_download_runs(hub: FakeHub, tmp_path: Path) -> None:
    """Looks into every process's arguments and first environment (what `docker inspect` shows) until the end."""
    asset = replace(ASSET, folder=str(tmp_path / "model"))
    secrets = (b"hf_secret", b"w0rd")
    given = Hub("runtime:1", hub.url, "hf_secret", environment={"https_proxy": PROXY, "no_proxy": "127.0.0.1"})
    action = fetch_action(asset, CLUSTER.model_copy(update={"storage": str(tmp_path)}), given)
    docker = tmp_path / "docker"  # a stand-in that runs here what the container would run; all else is real
    docker.write_text(
        '#!/bin/sh\n[ "$1" = run ] || exit 0\n'
        f'while [ "$1" != --entrypoint ]; do shift; done\nshift 3\nexec {sys.executable} "$@"\n'
    )
    docker.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        ["sh", "-c", action.script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
    )
    seen, shown = 0, set()
    assert process.stdin is not None
    process.stdin.write(action.stdin)
    process.stdin.close()
    running = True
    while running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
            running = False
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                text = (entry / "cmdline").read_bytes()
                seen += b"hub_fetch.py" in text
                shown |= {secret for secret in secrets if secret in text + (entry / "environ").read_bytes()}
    assert process.stdout is not None
    output = process.stdout.read()
    assert process.returncode == 0, output.decode()
    assert (tmp_path / "model" / "config.json").exists()
    assert seen
    assert not shown
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"w0rd" in path.read_bytes()]


def test_a_folder_that_cannot_be_locked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:  # a stand-in: no file system without locks can be mounted here
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(hub_fetch.fcntl, "flock", refused)
    refusal = pytest.raises(hub_fetch.FetchError, match=r"cannot be locked \(No locks available\).*-o flock")
    with refusal, hub_fetch._locked(tmp_path / "model"):
        pass


# -- the download itself ----------------------------------------------------------------------------------------------


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub({"org/name": dict(FILES)}, large=("model.safetensors",)) as running:
        yield running


def command(folder: Path, repository: str = "org/name", **order: object) -> list[str]:
    return [sys.executable, "-", json.dumps({"repository": repository, "folder": str(folder), **order})]


def environment(hub: FakeHub, folder: Path, **more: str) -> dict[str, str]:
    clean = {
        key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()
    }
    places = {"HF_HOME": str(folder.parent / "hf-home"), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    return {**clean, **places, "HF_HUB_DISABLE_TELEMETRY": "1", **more}


def fetch(hub: FakeHub, folder: Path, repository: str = "org/name", **more: str) -> subprocess.CompletedProcess[str]:
    """Download as a node does: the script comes from stdin."""
    source = Path(hub_fetch.__file__).read_text()
    return subprocess.run(
        command(folder, repository),
        input=source,
        env=environment(hub, folder, **more),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def outcome(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    assert done.returncode == 0, done.stderr
    record: dict[str, int] = json.loads(done.stdout.splitlines()[-1].removeprefix("done "))
    return record


def view_of(folder: Path) -> View:
    sizes = {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    sizes.pop(MANIFEST, None)
    return View(True, sizes, (), read_manifest(folder))


def test_download_keeps_one_format_and_writes_a_manifest(hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "name"
    assert outcome(fetch(hub, folder)) == {"fetched": 3, "files": 3, "bytes": sum(len(FILES[name]) for name in KEPT)}
    assert {path.name for path in folder.iterdir()} == {*KEPT, MANIFEST}
    assert [path.name for path in folder.parent.iterdir()] == ["name"]
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest["files"]["model.safetensors"]["sha256"] == hashlib.sha256(WEIGHTS).hexdigest()
    assert differences(folder, manifest) == ""
    assert asset_problem(ASSET, view_of(folder)) == ""
    sent = dict(hub.sent)
    assert outcome(fetch(hub, folder))["fetched"] == 0
    assert {name: hub.sent[name] for name in KEPT} == {name: sent[name] for name in KEPT}


def test_transfer_that_breaks_off_goes_on_where_it_stopped(hub: FakeHub, tmp_path: Path) -> None:
    hub.break_after, hub.breaks = 12 * MEGABYTE, 1
    folder = tmp_path / "name"
    first = fetch(hub, folder)
    if first.returncode:  # whether the library or the next run goes on is its own affair
        assert "org/name" in first.stderr
        assert not folder.exists()
        outcome(fetch(hub, folder))
    assert hub.broke.is_set()
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.sent["model.safetensors"] < len(WEIGHTS) + 2 * MEGABYTE


def test_download_killed_in_the_middle_goes_on_where_it_stopped(hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "name"
    hub.hold_after = 12 * MEGABYTE
    process = subprocess.Popen(
        command(folder), stdin=subprocess.PIPE, env=environment(hub, folder), stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None
    process.stdin.write(Path(hub_fetch.__file__).read_bytes())
    process.stdin.close()
    part = tmp_path / ".name.partial" / "model.safetensors.part"
    deadline = time.monotonic() + 300
    while not part.exists() or part.stat().st_size < 8 * MEGABYTE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert not folder.exists()  # a half-loaded model never stands where a whole one is looked for
    hub.hold_after, hub.sent = 0, {}
    outcome(fetch(hub, folder))
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.sent["model.safetensors"] < len(WEIGHTS) - 8 * MEGABYTE
    assert not (tmp_path / ".name.partial").exists()


def test_git_lfs_pointers_are_replaced_and_files_of_the_user_kept(hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "name"  # as `git clone` without git-lfs leaves it, with a configuration that somebody edited
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(POINTER)
    (folder / "config.json").write_text('{"model_type": "tiny", "mine": true}')
    (folder / "notes.txt").write_text("mine")
    done = fetch(hub, folder)
    assert outcome(done)["fetched"] == 2
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert "mine" in (folder / "config.json").read_text()
    assert (folder / "notes.txt").read_text() == "mine"
    assert "config.json differs" in done.stdout
    assert asset_problem(ASSET, view_of(folder)) == ""
    assert outcome(fetch(hub, folder))["fetched"] == 0


def test_damaged_file_of_ours_is_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "name"
    outcome(fetch(hub, folder))
    (folder / "model.safetensors").write_bytes(WEIGHTS[:-10])
    assert "model.safetensors" in asset_problem(ASSET, view_of(folder))
    assert outcome(fetch(hub, folder))["fetched"] == 1
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_bytes_that_do_not_match_the_hash_are_never_published(hub: FakeHub, tmp_path: Path) -> None:
    hub.spoil = {"model.safetensors"}
    done = fetch(hub, tmp_path / "name")
    assert done.returncode == 1
    assert "model.safetensors of org/name arrives damaged" in done.stderr
    assert not (tmp_path / "name").exists()


def test_token_comes_from_a_file_and_a_refusal_says_what_to_do(hub: FakeHub, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    refused = fetch(hub, tmp_path / "name")
    assert refused.returncode == 1
    assert "gated" in refused.stderr
    assert "--hf-token-file" in refused.stderr
    assert "Traceback" not in refused.stderr
    file = tmp_path / "token"
    file.write_text("hf_secret")
    outcome(fetch(hub, tmp_path / "name", HF_TOKEN_PATH=str(file)))


def test_server_that_large_files_come_from_is_not_shown_the_token(hub: FakeHub, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("hf_secret")
    hub.token = "hf_secret"
    with FakeHub({"org/name": dict(FILES)}, large=("model.safetensors",)) as storage:
        hub.storage = storage.url
        outcome(fetch(hub, tmp_path / "name", HF_TOKEN_PATH=str(file)))
        assert storage.shown == [None]
    assert set(hub.shown) == {"Bearer hf_secret"}
    assert (tmp_path / "name" / "model.safetensors").read_bytes() == WEIGHTS


def test_unknown_repository_and_unreachable_hub_are_told_in_one_line(hub: FakeHub, tmp_path: Path) -> None:
    missing = fetch(hub, tmp_path / "name", "org/other")
    assert missing.returncode == 1
    assert "has no org/other" in missing.stderr
    began = time.monotonic()
    down = fetch(hub, tmp_path / "name", HF_ENDPOINT="http://127.0.0.1:9")
    assert down.returncode == 1
    assert len(down.stderr.strip().splitlines()) == 1
    assert "--hf-endpoint" in down.stderr
    assert time.monotonic() - began < 60


def test_only_one_download_at_a_time(hub: FakeHub, tmp_path: Path) -> None:
    staging = tmp_path / ".name.partial"
    staging.mkdir()
    descriptor = os.open(staging, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        done = fetch(hub, tmp_path / "name")
    finally:
        os.close(descriptor)
    assert done.returncode == 1
    assert "another download" in done.stderr


# -- what hosts see ---------------------------------------------------------------------------------------------------


def seen(**sizes: int) -> View:
    manifest = {"files": {"a": {"bytes": 5, "sha256": "0"}, "b": {"bytes": 7, "sha256": "1"}}}
    return View(True, sizes, (), manifest)


def test_view_is_read_and_judged() -> None:
    manifest = '{"asset": "x", "files": {"a b": {"bytes": 5, "sha256": "0"}}}'
    text = f"{manifest}\n@@sizes\n5\ta b\n9\tclusterkit-asset.json\n@@pointers\n"
    view = parse_view(text)
    assert view.sizes == {"a b": 5}
    assert asset_problem(ASSET, view) == ""
    assert "is not there" in asset_problem(ASSET, View(False))
    assert "no manifest" in asset_problem(ASSET, parse_view("null\n@@sizes\n5\ta\n@@pointers\n"))
    assert "Git LFS pointers" in asset_problem(ASSET, parse_view("null\n@@sizes\n130\ta\n@@pointers\n./a\n"))
    assert asset_problem(ASSET, seen(a=5, b=6)) == "b in /storage/models/name: missing or of another size"


def test_host_that_sees_another_storage_is_told_apart() -> None:
    head = seen(a=5, b=7)
    assert difference(head, seen(a=5, b=7)) == ""
    assert "really shared" in difference(head, View(False))
    assert "b missing or different here" in difference(head, seen(a=5))


def test_folder_of_the_user_with_pointers_is_refused_with_the_fix() -> None:
    asset = NodeAsset("model", "m", "/storage/m", Origin.HOST, setting="model.path")
    with pytest.raises(Refused, match="Git LFS pointers") as refusal:
        require_usable(asset, View(True, {"config.json": 9, "w": 130}, ("w",)))
    assert refusal.value.fix == "run git lfs pull in /storage/m"
    with pytest.raises(Refused, match="no config"):
        require_usable(asset, View(True, {"w": 130}))
    require_usable(asset, View(True, {"config.json": 9, "w": 5}))
