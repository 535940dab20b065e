"""Images: what references and inspections mean, what a recipe's content is, who hands an image on to whom."""

from __future__ import annotations

import asyncio
import gzip
import io
import itertools
import os
import tarfile
from pathlib import Path
from typing import Any, cast

import pytest
from localsession import LocalSession

from clusterkit.hosts.model import Host
from clusterkit.provision.images import versions as pins
from clusterkit.provision.images.build import _script, build
from clusterkit.provision.images.context import Recipe, context
from clusterkit.provision.images.identity import Image, ImageError, check_reference, parse, repository
from clusterkit.provision.images.lock import Lock
from clusterkit.provision.images.lock import parse as parse_lock
from clusterkit.provision.images.meter import counter, readable
from clusterkit.provision.images.pull import _manifest_digest, _Meter, _reason
from clusterkit.provision.images.relay import NoSeederError, Seeders
from clusterkit.ssh.api import ErrorKind, HostError, Session
from trainer.errors import UserError

DIGEST = "sha256:" + "ab" * 32
REPOSITORY = Path(__file__).parents[2]


def record(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "Id": "sha256:" + "11" * 32,
        "RepoDigests": [],
        "Size": 5,
        "RootFS": {"Layers": ["sha256:aa", "sha256:bb"]},
        "Config": {"Env": ["A=1"], "Labels": {"x": "y"}, "Cmd": ["ray"]},
    }
    return base | changes


@pytest.mark.parametrize("text", ["-v", "--help", "Name:tag", "a b", "a;b", "$(x)", "", "name@sha256:12", "a\nb"])
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="no image reference"):
        check_reference(text)


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("ray:1", "ray"),
        ("registry.local:5000/team/app", "registry.local:5000/team/app"),
        ("registry.local:5000/team/app:v1.2_3-4", "registry.local:5000/team/app"),
        (f"ghcr.io/team/app@{DIGEST}", "ghcr.io/team/app"),
    ],
)
def test_repository_of_a_reference(reference: str, name: str) -> None:
    assert repository(check_reference(reference)) == name


def test_an_image_is_run_by_its_tag_or_else_by_its_id() -> None:
    assert parse("ray:1", record()).run_as == "ray:1"
    assert parse(f"ray@{DIGEST}", record()).run_as == "sha256:" + "11" * 32


def test_digest_is_that_of_the_repository_asked_for() -> None:
    digests = [f"other/app@{DIGEST}", f"team/app@{DIGEST}"]
    assert parse("docker.io/team/app:1", record(RepoDigests=digests)).repo_digest == f"team/app@{DIGEST}"
    assert parse("third/app:1", record(RepoDigests=digests)).repo_digest == ""


def test_engines_that_count_ids_differently_still_hold_the_same_image() -> None:
    here = parse("ray:1", record())
    assert here.same_as(parse("ray:1", record(Id="sha256:" + "22" * 32)))
    # The same image where an empty setting is null instead of missing.
    assert parse("r:1", record(Config={"Env": None})).content == parse("r:1", record(Config={})).content
    for change in ({"RootFS": {"Layers": ["sha256:aa"]}}, {"Config": {"Env": ["A=2"]}}):
        assert not here.same_as(parse("ray:1", record(Id="sha256:" + "22" * 32, **change)))


def test_a_lock_survives_being_written_and_names_its_image() -> None:
    image = parse("team/app:1", record(RepoDigests=[f"team/app@{DIGEST}"]))
    lock = Lock.of(image)
    assert parse_lock(lock.model_dump_json()) == lock
    assert lock.names(image)
    assert not lock.names(Image("team/app:1", "sha256:" + "33" * 32))
    assert parse_lock("{") is None
    assert parse_lock("") is None


# -- recipes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_every_argument_without_a_default_is_pinned(kind: str) -> None:
    text = (pins.folder() / ("runtime-cpu.Dockerfile" if kind == "cpu" else "runtime.Dockerfile")).read_text()
    needed = {line.split()[1] for line in text.splitlines() if line.startswith("ARG ") and "=" not in line}
    arguments = Recipe(kind).arguments
    assert needed <= set(arguments)
    assert arguments["RAY_VERSION"] == pins.versions()["RAY_VERSION"]


def test_pins_agree_with_what_the_project_installs() -> None:
    assert f'"torch=={pins.versions()["TORCH_CPU_VERSION"]}"' in (REPOSITORY / "pyproject.toml").read_text()


def test_content_names_the_tag_and_changes_with_every_choice() -> None:
    recipes = [Recipe("cpu"), Recipe("gpu"), Recipe("cpu", torch=False), Recipe("cpu", base="debian:13-slim")]
    assert len({recipe.content for recipe in recipes}) == 4
    assert Recipe("cpu").reference == f"clusterkit-runtime-cpu:{Recipe('cpu').content[:12]}"
    assert Recipe("cpu", base="mine:1").arguments["CPU_BASE"] == "mine:1"
    with pytest.raises(UserError, match="expected gpu or cpu"):
        Recipe("tpu")


def test_context_is_small_whole_and_always_the_same(tmp_path: Path) -> None:
    (tmp_path / "torch-1.whl").write_bytes(b"wheel")
    (tmp_path / "notes.txt").write_bytes(b"no wheel")
    packed = context(Recipe("cpu"), ca_bundle=b"PEM", wheels=tmp_path)
    assert packed == context(Recipe("cpu"), ca_bundle=b"PEM", wheels=tmp_path)
    assert len(packed) < 3_000_000
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(packed))) as tar:
        names = set(tar.getnames())
        assert tar.extractfile("site/ca.pem").read() == b"PEM"  # type: ignore[union-attr]
    assert {"Dockerfile", "node/trainer/__main__.py", "wheels/torch-1.whl"} <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith("notes.txt")]


def test_passwords_of_mirrors_and_proxies_are_in_no_argument_list() -> None:
    script = _script(Recipe("cpu"), {"PIP_INDEX_URL": "https://me:secret@mirror"}, {"https_proxy": "http://u:word@p"})
    (command,) = [line for line in script.splitlines() if line.startswith("docker build")]
    assert "secret" not in command
    assert "word" not in command
    assert "--build-arg PIP_INDEX_URL --build-arg https_proxy" in command


@pytest.mark.parametrize("option", ["apt_mirror", "pip_index_url", "pip_find_links", "torch_index"])
def test_no_image_is_built_with_a_password_that_its_history_would_keep(option: str, tmp_path: Path) -> None:
    address = {option: "https://me:secret@mirror.example/x"}
    docker = tmp_path / "docker"  # a stand-in of an engine without images
    docker.write_text('#!/bin/sh\n[ "$1" = image ] || : >"$0.built"\necho "Error: No such image" >&2; exit 1\n')
    docker.chmod(0o755)
    there = LocalSession(environment={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    with pytest.raises(ImageError, match="Docker keeps it in the image's history") as caught:
        asyncio.run(build(there, Recipe("cpu"), **address))  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)
    assert "--pip-find-links" in caught.value.fix
    assert not (tmp_path / "docker.built").exists()


# -- pulling ----------------------------------------------------------------------------------------------------------


def test_bytes_of_a_pull_are_those_of_all_its_layers() -> None:
    told: list[tuple[str, int, int]] = []
    meter = _Meter("h", lambda *told_now: told.append(told_now))
    for line in (
        "0123456789ab: Pulling fs layer ",
        "0123456789ab: Downloading [==>      ]  1.5MB/30MB",
        "\x1b[1A\x1b[2K\rfedcba987654: Downloading [>   ]  512kB/2.5GB",
        "0123456789ab: Download complete",
        "fedcba987654: Extracting [>   ]  1MB/2.5GB",
    ):
        meter(line)
    assert told == [
        ("h", 1_500_000, 30_000_000),
        ("h", 2_012_000, 2_530_000_000),
        ("h", 30_512_000, 2_530_000_000),
        ("h", 2_530_000_000, 2_530_000_000),
    ]


def test_digest_out_of_a_manifest() -> None:
    one = f'{{"Ref": "x", "Descriptor": {{"digest": "{DIGEST}"}}}}'
    other = (
        '{"Descriptor": {"digest": "sha256:' + "cd" * 32 + '", "platform": {"architecture": "arm64", "os": "linux"}}}'
    )
    assert _manifest_digest(one) == DIGEST
    assert _manifest_digest(f"[{other}, {one}]") == DIGEST
    assert _manifest_digest(f"[{other}]") == ""
    assert _manifest_digest("no such manifest") == ""


def test_why_a_pull_failed_is_its_error_line() -> None:
    output = "latest: Pulling from team/app\n\x1b[31mError response from daemon: manifest unknown\x1b[0m\n"
    output += "failed: docker pull \n"
    assert _reason(output) == "Error response from daemon: manifest unknown"
    assert _reason("failed: docker pull \n") == "no reason given"


def test_progress_lines_are_for_progress_only() -> None:
    told: list[tuple[str, int, int]] = []
    line = counter("h", 100, lambda *now: told.append(now))
    assert line is not None
    for text in ("@moved 40", "docker: hello", "@moved 100"):
        line(text)
    assert told == [("h", 0, 100), ("h", 40, 100), ("h", 100, 100)]
    assert readable("@moved 40\nno space left\n") == "no space left"


# -- from host to host ------------------------------------------------------------------------------------------------


class Named:
    """Stands for a session: only its name matters to who serves whom."""

    def __init__(self, name: str) -> None:
        self.host = Host(name=name)


def session(name: str) -> Session:
    return cast(Session, Named(name))


def test_holders_double_every_round() -> None:
    async def run() -> None:
        holders, order = Seeders(), itertools.count(1)
        await holders.add(session("h0"))
        # One transfer, then two at once, then four: with fewer at once a round is never full.
        rounds = [asyncio.Barrier(1), asyncio.Barrier(2), asyncio.Barrier(4)]

        async def receive(name: str) -> None:
            async with holders.one():
                await rounds[next(order).bit_length() - 1].wait()
            await holders.add(session(name))

        async with asyncio.timeout(5):
            await asyncio.gather(*(receive(f"h{n}") for n in range(1, 8)))

    asyncio.run(run())


async def lose(holders: Seeders, host: str) -> None:
    """A transfer in which a host is lost."""
    async with holders.one():
        raise HostError(host, ErrorKind.LOST, "gone")


def test_a_lost_holder_serves_nobody_any_more_and_the_last_one_lost_ends_the_wait() -> None:
    async def run() -> None:
        holders = Seeders()
        await holders.add(session("a"))
        await holders.add(session("b"))
        with pytest.raises(HostError):
            await lose(holders, "a")
        async with holders.one() as source:
            assert source.host.name == "b"
        with pytest.raises(HostError):
            await lose(holders, "b")
        with pytest.raises(NoSeederError):
            await lose(holders, "c")

    asyncio.run(run())


def test_a_holder_is_kept_when_the_receiver_was_lost() -> None:
    async def run() -> str:
        holders = Seeders()
        await holders.add(session("a"))
        with pytest.raises(HostError):
            await lose(holders, "receiver")
        async with holders.one() as source:
            return source.host.name

    assert asyncio.run(run()) == "a"
