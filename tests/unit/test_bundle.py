"""Air-gapped bundles: built from a real mirror with real apt and dnf, damaged, resumed, and installed from."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clusterkit.cli.bundle import app
from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.bundle import packages
from clusterkit.provision.bundle.build import Contents, build
from clusterkit.provision.bundle.folder import Bundle, Manifest, load, send
from clusterkit.provision.bundle.packages import Sources
from clusterkit.provision.steps import apt, dnf, shell
from clusterkit.provision.steps.step import DesiredState
from clusterkit.provision.steps.systems import SYSTEMS
from tests.localsession import LocalSession
from tests.realparts import require
from trainer.errors import RunError, UserError

DEBIAN = next(system for system in SYSTEMS if system.name == "debian-12")
# Small, and with dependencies of their own.
SETS = {"base": ("ca-certificates",), "docker": ("tini",)}
SOURCES = Sources(docker_source="distribution", apt_mirror=os.environ.get("CLUSTERKIT_TEST_APT_MIRROR", ""), gpus=False)
CONTENTS = Contents(("debian-12",), sources=SOURCES, sets=SETS)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle for Debian 12, fetched from a mirror."""
    require(shutil.which("apt-get") is not None, "apt-get is not installed")
    out = tmp_path_factory.mktemp("bundle") / "out"
    try:
        build(out, CONTENTS)
    except (RunError, UserError) as error:
        require(False, f"no Debian mirror can be reached: {error}")
    return out


@pytest.fixture
def bundle(built: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(built, tmp_path / "bundle")


def packages_of(folder: Path) -> list[str]:
    return sorted(path.name.partition("_")[0] for path in (folder / "packages" / "debian-12").glob("*.deb"))


class TestBuilding:
    def test_it_holds_what_is_asked_for_with_all_that_it_depends_on(self, built: Path) -> None:
        assert {"ca-certificates", "openssl", "tini", "libc6"} <= set(packages_of(built))
        assert (built / "packages" / "debian-12" / "docker.names").read_text() == "tini\n"
        assert sorted(path.name for path in built.iterdir()) == ["manifest.json", "packages"]

    def test_a_second_build_fetches_nothing(self, bundle: Path) -> None:
        before = json.loads((bundle / "manifest.json").read_text())
        said: list[str] = []
        build(bundle, CONTENTS, say=said.append)
        assert any("(0 to fetch)" in line for line in said)
        assert json.loads((bundle / "manifest.json").read_text()) == before

    def test_an_interrupted_build_fetches_only_what_is_missing(self, bundle: Path) -> None:
        (bundle / "manifest.json").unlink()
        (bundle / ".work").mkdir()
        next((bundle / "packages" / "debian-12").glob("tini_*.deb")).unlink()
        said: list[str] = []
        build(bundle, CONTENTS, say=said.append)
        assert any("(1 to fetch)" in line for line in said)
        load(bundle, bundle)

    def test_a_damaged_package_is_fetched_again(self, bundle: Path) -> None:
        package = next((bundle / "packages" / "debian-12").glob("tini_*.deb"))
        good = package.read_bytes()
        package.write_bytes(good[:-1] + b"?")
        build(bundle, CONTENTS)
        assert package.read_bytes() == good

    def test_packages_of_an_earlier_choice_go(self, bundle: Path) -> None:
        build(bundle, Contents(("debian-12",), sources=SOURCES, sets={"docker": ("tini",)}))
        assert "ca-certificates" not in packages_of(bundle)
        load(bundle, bundle)

    def test_a_folder_with_other_things_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "mine.txt").write_text("x")
        with pytest.raises(UserError, match="no bundle"):
            build(tmp_path, CONTENTS)
        assert (tmp_path / "mine.txt").exists()

    def test_an_unknown_system_is_refused_with_the_known_ones(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"debian-11.*\n.*debian-12"):
            build(tmp_path / "out", Contents(("debian-11",)))
        with pytest.raises(UserError, match="--os"):
            build(tmp_path / "out", Contents(()))

    def test_a_mirror_that_cannot_be_reached_is_named(self, tmp_path: Path) -> None:
        sources = Sources("distribution", apt_mirror="http://127.0.0.1:1/debian", gpus=False)
        with pytest.raises(RunError, match=r"127\.0\.0\.1"):
            build(tmp_path / "out", Contents(("debian-12",), sources=sources, sets=SETS))

    def test_a_package_that_does_not_exist_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(RunError, match="no-such-package"):
            build(tmp_path / "out", Contents(("debian-12",), sources=SOURCES, sets={"base": ("no-such-package",)}))

    def test_the_usual_sets_are_what_the_steps_install(self) -> None:
        assert packages.package_sets(DEBIAN, Sources("distribution"))["docker"] == ("docker.io",)
        assert "git-lfs" in packages.package_sets(DEBIAN, Sources())["base"]
        assert "nvidia-container-toolkit=1.20.0-1" in packages.package_sets(DEBIAN, Sources())["toolkit"]
        rocky = next(system for system in SYSTEMS if system.name == "rocky-9")
        assert "nvidia-container-toolkit-1.20.0-1" in packages.package_sets(rocky, Sources())["toolkit"]
        with pytest.raises(UserError, match="no Docker Engine of its own"):
            packages.package_sets(rocky, Sources("distribution"))


class TestReading:
    def test_a_damaged_and_a_missing_file_are_named(self, bundle: Path) -> None:
        tini = next((bundle / "packages" / "debian-12").glob("tini_*.deb"))
        tini.write_bytes(b"x" * tini.stat().st_size)
        (bundle / "packages" / "debian-12" / "base.names").unlink()
        with pytest.raises(RunError, match=r"2 file\(s\).*base\.names.*tini_"):
            load(bundle, bundle)

    def test_what_is_no_bundle_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="no such bundle"):
            load(tmp_path / "none.tar", tmp_path)
        with pytest.raises(UserError, match=r"no manifest\.json"):
            load(tmp_path, tmp_path)
        (tmp_path / "text.tar").write_text("hello")
        with pytest.raises(UserError, match="no bundle"):
            load(tmp_path / "text.tar", tmp_path)

    def test_a_manifest_that_points_outside_is_refused(self, tmp_path: Path) -> None:
        file = {"size": 1, "sha256": "0" * 64}
        (tmp_path / "manifest.json").write_text(Manifest(files={"../../etc/passwd": file}).model_dump_json())
        with pytest.raises(UserError, match="build the bundle again"):
            load(tmp_path, tmp_path)

    def test_a_system_that_it_was_not_built_for_names_the_way_out(self, built: Path) -> None:
        with pytest.raises(UserError, match="bundle for debian-12, not for rocky-9") as refused:
            load(built, built).packages("rocky-9")
        assert "--os rocky-9" in str(refused.value)

    def test_one_file_holds_the_same_and_is_unpacked_once(self, built: Path, tmp_path: Path) -> None:
        out = tmp_path / "bundle.tar"
        manifest = build(out, CONTENTS)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle.tar"]
        with tarfile.open(out) as archive:
            assert archive.getnames()[0] == "manifest.json"
        first = load(out, tmp_path / "cache")
        assert first.manifest == manifest
        unpacked = (first.folder / "packages").stat().st_mtime_ns
        assert load(out, tmp_path / "cache").folder == first.folder
        assert (first.folder / "packages").stat().st_mtime_ns == unpacked

    def test_an_unpacking_that_was_cut_short_is_done_again(self, built: Path, tmp_path: Path) -> None:
        out = tmp_path / "bundle.tar"
        build(out, CONTENTS)
        folder = load(out, tmp_path / "cache").folder
        (folder / "manifest.json").unlink()
        shutil.rmtree(folder / "packages")
        load(out, tmp_path / "cache")


class TestOnTheHost:
    def install(self, bundle: Path, tmp_path: Path, names: str) -> subprocess.CompletedProcess[str]:
        """What the step's script does, with folders of its own, nothing installed, and no way to a network."""
        wish = DesiredState(cluster=Cluster(hosts=(Host(name="a"),)), bundle=str(bundle))
        prelude = apt.prelude(DEBIAN, wish).replace(shell.STATE, str(tmp_path / "state"))
        (tmp_path / "archives" / "partial").mkdir(parents=True)
        (tmp_path / "status").write_text("")
        own = f"-o Dir::State::status={tmp_path}/status -o Dir::Cache::archives={tmp_path}/archives"
        own += " -o Acquire::http::Proxy=http://127.0.0.1:1 -o Debug::NoLocking=true -o APT::Sandbox::User=root"
        script = f"set -eu\n{prelude}apt_update\napt_get {own} --download-only install {names}\n"
        return subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=300, check=False)

    def test_apt_resolves_everything_from_the_bundle_alone(self, built: Path, tmp_path: Path) -> None:
        done = self.install(built, tmp_path, f"$(cat {built}/packages/debian-12/docker.names) ca-certificates")
        assert done.returncode == 0, done.stderr
        assert "openssl" in done.stdout

    def test_apt_refuses_a_package_that_is_not_what_the_index_says(self, bundle: Path, tmp_path: Path) -> None:
        tini = next((bundle / "packages" / "debian-12").glob("tini_*.deb"))
        tini.write_bytes(tini.read_bytes()[:-1] + b"?")
        done = self.install(bundle, tmp_path, "tini")
        assert done.returncode != 0
        assert "Hash Sum mismatch" in done.stdout + done.stderr

    def test_a_host_of_another_release_is_told_how_to_build_for_it(self, tmp_path: Path) -> None:
        done = self.install(tmp_path / "empty", tmp_path, "tini")
        assert done.returncode == 1
        assert "--os debian-12" in done.stderr

    def test_only_what_the_host_lacks_is_sent(self, built: Path, tmp_path: Path) -> None:
        require(os.geteuid() == 0, "only root may play a host")
        bundle = load(built, built)
        folder = tmp_path / "on host"
        total = sum(file.size for file in bundle.packages("debian-12").values())
        seen: list[int] = []

        async def run() -> list[int]:
            session = LocalSession()
            sent = [await send(session, bundle, "debian-12", folder=str(folder), on_bytes=seen.append)]
            sent.append(await send(session, bundle, "debian-12", folder=str(folder)))
            (folder / "packages" / "debian-12" / "docker.names").write_text("xxxx\n")
            sent.append(await send(session, bundle, "debian-12", folder=str(folder)))
            return sent

        assert asyncio.run(run()) == [total, 0, 5]
        assert seen[-1] == total
        assert seen == sorted(seen)
        Bundle(folder, bundle.manifest).verify()


class TestImages:
    def docker(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A stand-in for docker that knows one image: which calls are made, and when, is what counts here."""
        script = f"""#!/bin/sh
echo "$*" >>{folder}/calls
case $1 in
  image) [ "$5" = app:1 ] && echo sha256:{"ab" * 32} ;;
  pull) echo 'no such host' >&2; exit 1 ;;
  save) echo archive >"$3" ;;
esac
"""
        (folder / "bin").mkdir()
        (folder / "bin" / "docker").write_text(script)
        (folder / "bin" / "docker").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
        return folder / "calls"

    def test_an_image_is_saved_once_under_its_id(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = self.docker(tmp_path, monkeypatch)
        for _ in range(2):
            build(tmp_path / "out", Contents((), images=("app:1",)))
        assert calls.read_text().count("save --output") == 1
        bundle = load(tmp_path / "out", tmp_path)
        found = bundle.image("app:1")
        assert found is not None
        assert found[0] == "sha256:" + "ab" * 32
        assert found[1].read_text() == "archive\n"
        assert stat.S_IMODE(found[1].stat().st_mode) == 0o644
        assert bundle.image("other:1") is None

    def test_the_command_prints_what_it_wrote(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.docker(tmp_path, monkeypatch)
        out = str(tmp_path / "out")
        shown = CliRunner().invoke(app, [out, "--image", "app:1"])
        assert "1 file(s)" in shown.stdout
        assert f"clusterkit setup --bundle {out}" in shown.stdout
        printed = json.loads(CliRunner().invoke(app, [out, "--image", "app:1", "--json"]).stdout)
        assert printed == json.loads((tmp_path / "out" / "manifest.json").read_text())
        wrong = CliRunner().invoke(app, [out, "--image", "app:1", "--docker-source", "snap"])
        assert isinstance(wrong.exception, UserError)

    def test_an_image_that_cannot_be_had_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.docker(tmp_path, monkeypatch)
        with pytest.raises(RunError, match=r"other:1.*no such host"):
            build(tmp_path / "out", Contents((), images=("other:1",)))
        with pytest.raises(UserError, match="no image reference"):
            build(tmp_path / "out", Contents((), images=("--help",)))


class TestRpm:
    SPEC = (
        "Name: {name}\nVersion: 1\nRelease: 1\nSummary: s\nLicense: MIT\nBuildArch: noarch\n{more}\n"
        "%description\nd\n%files\n"
    )

    @pytest.fixture
    def mirror(self, tmp_path: Path) -> str:
        """A mirror in the shape of RHEL's: BaseOS has a library, AppStream a tool that needs it."""
        for command in ("dnf", "createrepo_c", "rpmbuild"):
            require(
                shutil.which(command) is not None, f"{command} is not installed (apt-get install dnf createrepo-c rpm)"
            )
        for part, name, more in (("BaseOS", "library", ""), ("AppStream", "tool", "Requires: library")):
            folder = tmp_path / "mirror" / part / "x86_64" / "os"
            folder.mkdir(parents=True)
            spec = tmp_path / f"{name}.spec"
            spec.write_text(self.SPEC.format(name=name, more=more))
            defines = [f"--define=_rpmdir {folder}", f"--define=_topdir {tmp_path}/build"]
            subprocess.run(["rpmbuild", "-bb", "--quiet", *defines, str(spec)], check=True, capture_output=True)
            subprocess.run(["createrepo_c", "--quiet", str(folder)], check=True, capture_output=True)
        return (tmp_path / "mirror").as_uri()

    def test_dnf_fetches_the_set_with_what_it_depends_on(self, mirror: str, tmp_path: Path) -> None:
        sources = Sources(rpm_mirror=mirror, gpus=False)
        contents = Contents(("rhel-9",), sources=sources, sets={"base": ("tool",)})
        build(tmp_path / "out", contents)
        folder = tmp_path / "out" / "packages" / "rhel-9"
        assert sorted(path.name for path in folder.glob("*.rpm")) == ["library-1-1.noarch.rpm", "tool-1-1.noarch.rpm"]
        assert (folder / "repodata" / "repomd.xml").exists()
        load(tmp_path / "out", tmp_path)
        build(tmp_path / "out", contents)
        load(tmp_path / "out", tmp_path)

    def test_dnf_installs_from_the_bundle_alone(self, mirror: str, tmp_path: Path) -> None:
        require(os.geteuid() == 0, "dnf installs for root alone")
        rhel = next(system for system in SYSTEMS if system.name == "rhel-9")
        build(tmp_path / "out", Contents(("rhel-9",), sources=Sources(rpm_mirror=mirror), sets={"base": ("tool",)}))
        shutil.rmtree(tmp_path / "mirror")
        wish = DesiredState(cluster=Cluster(hosts=(Host(name="a"),)), bundle=str(tmp_path / "out"))
        own = f"--installroot={tmp_path}/root --releasever=9 --setopt=cachedir={tmp_path}/cache --setopt=reposdir=/none"
        script = f'set -eu\n{dnf.prelude(rhel, wish)}dnf_install {own} $(cat "$bundle/base.names")\n'
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        listed = subprocess.run(["rpm", f"--root={tmp_path}/root", "-qa"], capture_output=True, text=True, check=True)
        assert {"library-1-1.noarch", "tool-1-1.noarch"} <= set(listed.stdout.split())

    def test_a_subscription_needs_a_mirror(self, tmp_path: Path) -> None:
        require(shutil.which("dnf") is not None, "dnf is not installed")
        with pytest.raises(UserError, match="--rpm-mirror"):
            build(tmp_path / "out", Contents(("rhel-9",), sources=Sources(gpus=False), sets={"base": ("tool",)}))
