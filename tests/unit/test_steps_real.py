"""Scripts of steps, run by a real shell in a folder of their own: what they write, keep, refuse and survive."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterkit.provision.steps import apt, repositories
from clusterkit.provision.steps.daemon import merge, read_settings, write_script
from clusterkit.provision.steps.shell import fetch_key, sha, write_file
from clusterkit.provision.steps.step import Refused
from clusterkit.provision.steps.storage import make_script
from clusterkit.provision.steps.systems import SYSTEMS

NEW = b'{"debug": true}\n'


def sh(script: str, stdin: bytes = b"", path: str = "") -> subprocess.CompletedProcess[bytes]:
    """As the engine runs a script."""
    environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}" if path else os.environ["PATH"]}
    return subprocess.run(
        ["sh", "-c", f"set -eu\n{script}"], input=stdin, capture_output=True, check=False, timeout=300, env=environment
    )


def daemon_script(folder: Path, old: bytes | None, effect: str = "restart") -> str:
    return write_script(
        NEW, None if old is None else sha(old), effect, str(folder / "daemon.json"), str(folder / "state" / "docker")
    )


def no_dockerd(folder: Path) -> str:
    """Folder with a stand-in for an engine before 23.0, so that no dockerd of this machine takes part."""
    return stand_in(folder, "echo 'unknown flag: --validate' >&2; exit 125")


def stand_in(folder: Path, script: str) -> str:
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    (bin_folder / "dockerd").write_text(f"#!/bin/sh\n{script}\n")
    (bin_folder / "dockerd").chmod(0o755)
    return str(bin_folder)


def leftovers(folder: Path) -> list[str]:
    return [name.name for name in folder.iterdir() if name.name.startswith(".")]


class TestDaemonJson:
    def test_a_first_file_is_written_and_the_restart_is_noted(self, tmp_path: Path) -> None:
        done = sh(daemon_script(tmp_path, None), NEW, no_dockerd(tmp_path))
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "daemon.json").read_bytes() == NEW
        assert (tmp_path / "state" / "docker").read_text() == "restart\n"
        assert leftovers(tmp_path) == []

    def test_the_users_file_is_kept_as_a_copy_and_its_mode_stays(self, tmp_path: Path) -> None:
        old = b'{"mine": 1}'
        target = tmp_path / "daemon.json"
        target.write_bytes(old)
        target.chmod(0o600)
        assert sh(daemon_script(tmp_path, old), NEW, no_dockerd(tmp_path)).returncode == 0
        assert target.read_bytes() == NEW
        assert stat.S_IMODE(target.stat().st_mode) == 0o600
        assert (tmp_path / f"daemon.json.before-{sha(old)[:12]}").read_bytes() == old

    def test_running_it_again_changes_nothing(self, tmp_path: Path) -> None:
        path = no_dockerd(tmp_path)
        sh(daemon_script(tmp_path, None), NEW, path)
        before = (tmp_path / "daemon.json").stat().st_mtime_ns
        assert sh(daemon_script(tmp_path, None), NEW, path).returncode == 0
        assert (tmp_path / "daemon.json").stat().st_mtime_ns == before

    def test_a_file_that_changed_since_the_plan_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "daemon.json").write_bytes(b'{"newer": true}')
        done = sh(daemon_script(tmp_path, b'{"mine": 1}'), NEW, no_dockerd(tmp_path))
        assert done.returncode == 1
        assert b"changed by somebody else" in done.stderr
        assert (tmp_path / "daemon.json").read_bytes() == b'{"newer": true}'

    def test_settings_that_dockerd_rejects_are_not_put_in_place(self, tmp_path: Path) -> None:
        # A stand-in: no engine of today's releases is at hand, and its verdict is all that counts here.
        path = stand_in(tmp_path, "echo 'unable to configure: unknown directive' >&2; exit 1")
        done = sh(daemon_script(tmp_path, None), NEW, path)
        assert done.returncode == 1
        assert b"unknown directive" in done.stderr
        assert not (tmp_path / "daemon.json").exists()
        assert leftovers(tmp_path) == []

    def test_half_a_file_is_not_put_in_place(self, tmp_path: Path) -> None:
        done = sh(daemon_script(tmp_path, None), NEW[:5], no_dockerd(tmp_path))
        assert done.returncode == 1
        assert b"the connection broke" in done.stderr
        assert not (tmp_path / "daemon.json").exists()

    def test_a_link_stays_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "real" / "settings.json").write_bytes(b"{}")
        (tmp_path / "daemon.json").symlink_to(tmp_path / "real" / "settings.json")
        assert sh(daemon_script(tmp_path, b"{}"), NEW, no_dockerd(tmp_path)).returncode == 0
        assert (tmp_path / "daemon.json").is_symlink()
        assert (tmp_path / "real" / "settings.json").read_bytes() == NEW

    def test_an_owed_restart_is_not_forgotten_for_a_reload(self, tmp_path: Path) -> None:
        (tmp_path / "state").mkdir()
        (tmp_path / "state" / "docker").write_text("restart\n")
        assert sh(daemon_script(tmp_path, None, "reload"), NEW, no_dockerd(tmp_path)).returncode == 0
        assert (tmp_path / "state" / "docker").read_text() == "restart\n"


def settings() -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
    keys = st.sampled_from(["runtimes", "features", "nvidia", "cdi", "path", "hosts"]) | st.text(max_size=5)
    values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4))
    return st.dictionaries(keys, values, max_size=5)


def leaves_of(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if isinstance(value, dict) and value:
        return {key: leaf for name, inner in value.items() for key, leaf in leaves_of(inner, (*path, name)).items()}
    return {path: value}


def at(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        value = value[name]
    return value


@given(current=settings(), wanted=settings())
def test_the_merge_loses_no_key_and_changes_no_value_of_the_user(current: Any, wanted: Any) -> None:
    merged = merge(current, wanted)
    for path, leaf in leaves_of(current).items():
        kept = at(merged, path)
        # An empty object of the user's may have been filled; anything else is what it was.
        assert kept == leaf or (leaf == {} and isinstance(kept, dict))
    assert merge(merged, wanted) == merged
    assert read_settings(json.dumps(merged)) == merged


class TestStorage:
    def test_folders_are_made_and_what_is_there_is_left_alone(self, tmp_path: Path) -> None:
        root = tmp_path / "storage"
        (root / "models").mkdir(parents=True)
        (root / "models" / "mine").write_text("x")
        (root / "models").chmod(0o750)
        paths = [str(root), str(root / "models"), str(root / "ray")]
        for _ in range(2):
            assert sh(make_script(paths)).returncode == 0
        assert stat.S_IMODE((root / "models").stat().st_mode) == 0o750
        assert stat.S_IMODE((root / "ray").stat().st_mode) == 0o755
        assert (root / "models" / "mine").read_text() == "x"

    def test_a_missing_parent_is_an_error_and_not_a_new_tree(self, tmp_path: Path) -> None:
        done = sh(make_script([str(tmp_path / "nas" / "cluster")]))
        assert done.returncode == 1
        assert b"No such file" in done.stderr
        assert not (tmp_path / "nas").exists()

    def test_a_file_in_the_way_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "ray").write_text("")
        done = sh(make_script([str(tmp_path / "ray")]))
        assert done.returncode == 1
        assert b"is no folder" in done.stderr

    def test_many_hosts_may_make_the_same_folders_at_once(self, tmp_path: Path) -> None:
        script = "set -eu\n" + make_script([str(tmp_path / name) for name in "abcdefgh"])
        running = [subprocess.Popen(["sh", "-c", script], stderr=subprocess.PIPE) for _ in range(12)]
        assert [process.communicate()[1] for process in running] == [b""] * 12
        assert [process.returncode for process in running] == [0] * 12


class TestFiles:
    def test_a_file_appears_whole_with_its_mode(self, tmp_path: Path) -> None:
        target = tmp_path / "a b" / "file.conf"
        action = write_file("set it", str(target), b"secret", mode=0o600)
        assert sh(action.script, action.stdin).returncode == 0
        assert target.read_bytes() == b"secret"
        assert stat.S_IMODE(target.stat().st_mode) == 0o600
        assert b"secret" not in action.script.encode()

    @pytest.mark.parametrize("cut", [0, 3])
    def test_a_cut_connection_leaves_the_old_file(self, tmp_path: Path, cut: int) -> None:
        target = tmp_path / "file.conf"
        target.write_bytes(b"old")
        action = write_file("set it", str(target), b"secret")
        assert sh(action.script, action.stdin[:cut]).returncode == 1
        assert target.read_bytes() == b"old"
        assert leftovers(tmp_path) == []

    def test_a_kill_in_the_middle_leaves_the_old_file_and_nothing_that_apt_or_dnf_would_read(
        self, tmp_path: Path
    ) -> None:
        target = tmp_path / "x.sources"
        target.write_bytes(b"old")
        action = write_file("set it", str(target), b"new content")
        process = subprocess.Popen(
            ["sh", "-c", f"set -eu\n{action.script}"], stdin=subprocess.PIPE, start_new_session=True
        )
        assert process.stdin is not None
        process.stdin.write(b"new")
        process.stdin.flush()
        deadline = time.monotonic() + 300
        while not any(file.stat().st_size == 3 for file in tmp_path.glob(".*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert target.read_bytes() == b"old"
        assert list(tmp_path.glob("*.sources")) == [target]
        assert sh(action.script, action.stdin).returncode == 0
        assert target.read_bytes() == b"new content"
        assert leftovers(tmp_path) == []


DOCKER = "https://download.docker.com/linux/ubuntu"
CORP = f"""# ours
deb [arch=amd64 signed-by=/usr/share/keyrings/corp.gpg] {DOCKER} noble stable # Docker
deb-src http://packages.corp/internal noble main
  deb http://packages.corp/flat ./
#deb http://packages.corp/off noble main
"""
PARAGRAPHS = f"""# A comment
Types: deb
URIs: {DOCKER}/ http://packages.corp/x
Suites: noble
  noble-updates
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 -----END PGP PUBLIC KEY BLOCK-----

Enabled: no
Types: deb
URIs: http://packages.corp/off
Suites: noble
Components: main

Types: deb
URIs: http://packages.corp/flat/$(ARCH)
# in the middle
Suites: /
"""


def apt_reads(folder: Path) -> subprocess.CompletedProcess[bytes]:
    """What apt itself would ask for, of the lists of a folder."""
    options = f"-o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts={shlex.quote(str(folder))}"
    return sh(f"apt-get {options} -o APT::Architecture=amd64 update --print-uris")


def as_probed(*files: Path) -> dict[str, str]:
    """Texts as the probe reads them."""
    found: dict[str, list[str]] = {}
    for line in sh(f"grep -sHv '^[[:space:]]*#' {shlex.join(map(str, files))}").stdout.decode().splitlines():
        path, _, text = line.partition(":")
        found.setdefault(path, []).append(text)
    return {path: "\n".join(lines).rstrip("\n") for path, lines in found.items()}


class TestOthersSources:
    @pytest.mark.parametrize(("name", "text"), [("corp.list", CORP), ("corp.sources", PARAGRAPHS)])
    def test_files_are_read_as_apt_itself_reads_them(self, name: str, text: str, tmp_path: Path) -> None:
        (tmp_path / name).write_text(text)
        listed = apt_reads(tmp_path)
        assert listed.returncode == 0, listed.stderr
        asked = {line.split("'")[1] for line in listed.stdout.decode().splitlines() if "InRelease" in line}
        ours = repositories.repositories(name, text)
        wanted = {
            f"{uri}/{suite.lstrip('/')}" if suite.endswith("/") else f"{uri}/dists/{suite}/" for uri, suite in ours
        }
        assert {f"{folder}InRelease" for folder in wanted} == asked

    def test_a_list_of_the_same_repository_alone_is_renamed_and_apt_works_again(self, tmp_path: Path) -> None:
        parts = tmp_path / "parts"
        parts.mkdir()
        (parts / "mine.list").write_text(
            f"# mine\n\ndeb [signed-by=/usr/share/keyrings/a.gpg] {DOCKER} noble stable\n\n"
        )
        (parts / "corp.list").write_text("deb http://packages.corp/internal noble main\n")
        (parts / "clusterkit-docker.sources").write_text(
            apt.source(DOCKER, "noble", "stable", "/usr/share/keyrings/b.gpg")
        )
        assert b"Conflicting values set for option Signed-By" in apt_reads(parts).stderr
        sources = as_probed(*sorted(parts.iterdir()))
        found = repositories.conflicting_files("Docker", DOCKER, "noble", sources)
        assert list(found) == [str(parts / "mine.list")]
        done = sh(repositories.disable_script(found))
        assert done.returncode == 0, done.stderr
        assert f"renamed {parts}/mine.list to {parts}/mine.list.disabled".encode() in done.stdout
        assert sorted(file.name for file in parts.iterdir()) == [
            "clusterkit-docker.sources",
            "corp.list",
            "mine.list.disabled",
        ]
        assert apt_reads(parts).returncode == 0

    @pytest.mark.parametrize(("name", "text"), [("corp.list", CORP), ("corp.sources", PARAGRAPHS)])
    def test_a_file_that_holds_others_too_is_refused(self, name: str, text: str) -> None:
        with pytest.raises(Refused, match=f"{name} names Docker's repository") as refused:
            repositories.conflicting_files("Docker", DOCKER, "noble", {f"/etc/apt/sources.list.d/{name}": text})
        assert "a file of its own" in refused.value.fix

    @pytest.mark.parametrize("uri", ["https://mirror.corp", f"{DOCKER}/sub", "https://download.docker.com"])
    def test_another_address_on_the_same_server_is_others(self, uri: str) -> None:
        assert repositories.conflicting_files("Docker", uri, "noble", {"/etc/apt/sources.list.d/corp.list": CORP}) == {}

    def test_a_list_that_changed_since_the_plan_is_left_alone(self, tmp_path: Path) -> None:
        file = tmp_path / "docker.list"
        file.write_text(f"deb {DOCKER} noble stable\n")
        script = repositories.disable_script(as_probed(file, tmp_path / "none"))
        file.write_text(f"deb {DOCKER} noble stable\ndeb http://packages.corp/internal noble main\n")
        done = sh(script)
        assert done.returncode == 1
        assert b"changed by somebody else" in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["docker.list"]

    def test_an_earlier_renamed_list_is_not_overwritten(self, tmp_path: Path) -> None:
        (tmp_path / "docker.list.disabled").write_text("first")
        (tmp_path / "docker.list").write_text(f"deb {DOCKER} noble stable\n")
        assert sh(repositories.disable_script(as_probed(tmp_path / "docker.list", tmp_path / "none"))).returncode == 0
        assert (tmp_path / "docker.list.disabled").read_text() == "first"
        assert len(list(tmp_path.glob("docker.list.*.disabled"))) == 1


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """File with two public keys, and their fingerprints."""
    home = tmp_path_factory.mktemp("gpg")
    home.chmod(0o700)
    gpg = ["gpg", "--homedir", str(home), "--batch", "--quiet"]
    prints = []
    for name in ("wanted", "other"):
        subprocess.run([*gpg, "--passphrase", "", "--quick-gen-key", name, "ed25519", "sign", "never"], check=True)
        shown = subprocess.run([*gpg, "--with-colons", "--list-keys", name], capture_output=True, text=True, check=True)
        prints.append(next(line.split(":")[9] for line in shown.stdout.splitlines() if line.startswith("fpr")))
    exported = subprocess.run([*gpg, "--armor", "--export"], capture_output=True, check=True).stdout
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=False)
    (home / "served.asc").write_bytes(exported)
    return home / "served.asc", prints[0], prints[1]


class TestKeys:
    def test_of_what_is_served_only_the_key_with_the_fingerprint_is_stored(
        self, keys: tuple[Path, str, str], tmp_path: Path
    ) -> None:
        served, wanted, other = keys
        target = tmp_path / "rings" / "key.asc"
        done = sh(fetch_key(served.as_uri(), str(target), wanted))
        assert done.returncode == 0, done.stderr
        shown = subprocess.run(["gpg", "--show-keys", str(target)], capture_output=True, text=True, check=True).stdout
        assert wanted in shown
        assert other not in shown
        assert stat.S_IMODE(target.stat().st_mode) == 0o644

    def test_no_argument_of_a_process_names_the_address(self, keys: tuple[Path, str, str], tmp_path: Path) -> None:
        """A mirror's address may have a password in it."""
        served, wanted, _ = keys
        seen, curl = tmp_path / "arguments", tmp_path / "bin" / "curl"
        curl.parent.mkdir()
        curl.write_text(f'#!/bin/sh\necho "$@" >{seen}\nexec {shutil.which("curl")} "$@"\n')
        curl.chmod(0o755)
        done = sh(f"PATH={curl.parent}:$PATH\n" + fetch_key(served.as_uri(), str(tmp_path / "key.asc"), wanted))
        assert done.returncode == 0, done.stderr
        assert "--config -" in seen.read_text()
        assert served.name not in seen.read_text()

    def test_another_key_is_refused_with_the_fingerprint(self, keys: tuple[Path, str, str], tmp_path: Path) -> None:
        done = sh(fetch_key(keys[0].as_uri(), str(tmp_path / "key.asc"), "A" * 40))
        assert done.returncode == 1
        assert f"is not the one with fingerprint {'A' * 40}".encode() in done.stderr
        assert not (tmp_path / "key.asc").exists()

    def test_a_repository_that_cannot_be_reached_says_so(self, tmp_path: Path) -> None:
        script = fetch_key("http://127.0.0.1:1/gpg", str(tmp_path / "key.asc"), "A" * 40)
        done = sh(script.replace("--retry 3", "--retry 0"))
        assert done.returncode != 0
        assert b"127.0.0.1" in done.stderr


@pytest.mark.parametrize("mirror", ["http://mirror/debian", "http://mirror/elsewhere"])
def test_apt_itself_reads_the_sources_of_a_mirror(mirror: str, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    debian = next(system for system in SYSTEMS if system.name == "debian-12")
    (tmp_path / "parts" / "distribution.sources").write_bytes(apt.mirror_sources(debian, mirror))
    options = f"-o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts={shlex.quote(str(tmp_path / 'parts'))}"
    listed = sh(f"apt-get {options} update --print-uris")
    assert listed.returncode == 0, listed.stderr
    assert f"'{mirror}/dists/bookworm-updates/InRelease'" in listed.stdout.decode()
    assert (f"'{mirror}-security/dists/bookworm-security/InRelease'" in listed.stdout.decode()) is mirror.endswith(
        "/debian"
    )
