"""What a cluster's site needs is told once, kept for its owner alone, and can be taken back."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterkit.hosts import inventory
from clusterkit.provision.site import (
    Site,
    passwords_in,
    path_of,
    resolve_secrets,
    save_site,
    site_before_ready,
    with_saved,
)
from clusterkit.setup.command import refuse_dropped_hosts, run_setup, save_inventory
from clusterkit.setup.hostlog import HostLog
from clusterkit.setup.typed import SetupOptions
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import select
from trainer.errors import UserError


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTERKIT_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("CLUSTERKIT_STATE", str(tmp_path / "state"))
    return tmp_path / "config"


def test_what_was_given_once_holds_until_something_else_or_none_is_given() -> None:
    first = with_saved("a", Site(apt_mirror="http://mirror", http_proxy="http://user:secret@proxy:3128"))
    save_site("a", first)

    assert with_saved("a", Site()) == first
    assert with_saved("a", Site(apt_mirror="http://other")).apt_mirror == "http://other"
    assert with_saved("a", Site(http_proxy="none")) == Site(apt_mirror="http://mirror")
    assert with_saved("b", Site()) == Site()
    assert path_of("a").stat().st_mode & 0o077 == 0


def test_what_ray_runs_with_is_kept_once_it_runs_with_it() -> None:
    wanted = Site(image="runtime:1", apt_mirror="http://mirror")
    assert site_before_ready("a", wanted) == wanted
    save_site("a", wanted)
    refused = with_saved("a", Site(image="runtime:2", shm="100m", apt_mirror="http://other"))
    assert site_before_ready("a", refused) == Site(image="runtime:1", apt_mirror="http://other")


def test_a_damaged_file_is_named() -> None:
    save_site("a", Site(apt_mirror="http://mirror"))
    path_of("a").write_text("{")
    with pytest.raises(UserError, match=r"site\.json cannot be read .* remove it"):
        with_saved("a", Site())


def chosen(*names: str) -> HostOptions:
    return HostOptions(hostnames=list(names))


def test_hosts_of_a_kept_cluster_are_not_forgotten_by_a_shorter_list() -> None:
    save_inventory(select(chosen("a", "b")).cluster)
    grown = select(chosen("a", "b", "c")).cluster
    refuse_dropped_hosts(grown)
    save_inventory(grown)

    with pytest.raises(UserError, match=r"kept with b, c, which --hostnames leaves out") as caught:
        refuse_dropped_hosts(select(chosen("a")).cluster)
    assert "--limit" in str(caught.value)
    assert [host.name for host in inventory.load().hosts] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (SetupOptions(preset="1.5B_n4"), "preset 1.5B_n4 needs 4 hosts; 2 named: name more"),
        (SetupOptions(preset="tinny"), "unknown preset 'tinny'.*tiny"),
        (SetupOptions(image_from="air"), "--image-from air: choose auto, pull, storage or fanout"),
        (SetupOptions(site=Site(docker_source="snap")), "--docker-source snap: choose auto, docker or distribution"),
        (SetupOptions(site=Site(apt_mirror="mirror.example")), "--apt-mirror mirror.example: this is no URL"),
        (SetupOptions(site=Site(ca_bundle="/nowhere/ca.pem")), "--ca-bundle /nowhere/ca.pem: No such file"),
        (SetupOptions(site=Site(image="-v /:/host")), "is no image reference"),
        (SetupOptions(site=Site(shm="lots")), "--shm lots: this is no size; it looks like 64g or 512m"),
        (SetupOptions(site=Site(shm="1m")), "--shm 1m: Ray needs at least 64m"),
        (SetupOptions(image_refresh=True), "an image that is built follows its recipe: add --image NAME:TAG"),
        (SetupOptions(site=Site(image="a@sha256:" + "0" * 64), image_refresh=True), "names one image: add --image"),
        (SetupOptions(model_path="org/name"), "belong to a preset: add --preset"),
        (SetupOptions(), "there is no private key /nowhere/id"),
        (SetupOptions(bundle=Path("/nowhere/bundle")), "/nowhere/bundle"),
    ],
)
def test_impossible_options_are_refused_before_any_host_is_asked_or_anything_kept(
    config: Path, options: SetupOptions, says: str
) -> None:
    with pytest.raises(UserError, match=says) as caught:
        run_setup(select(HostOptions(hostnames=["127.0.0.9", "127.0.0.8"], private_key_file=["/nowhere/id"])), options)
    assert caught.value.exit_code == 2
    assert not (config / "clusters").exists()


def test_an_address_with_a_password_is_read_from_where_it_is_and_left_out_of_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proxy").write_text("http://ann:w%40rd@proxy.example:3128\n")
    monkeypatch.setenv("MIRROR", "https://pip:t0ken@mirror.example/simple")
    given = Site(
        http_proxy=f"file:{tmp_path}/proxy", pip_index_url="env:MIRROR", apt_mirror="http://x:typed@apt.example"
    )
    site, typed = resolve_secrets(given)
    assert site.http_proxy == "http://ann:w%40rd@proxy.example:3128"
    assert site.pip_index_url == "https://pip:t0ken@mirror.example/simple"
    assert typed == ["--apt-mirror"]
    for missing in ("env:NONE", f"file:{tmp_path}/none"):
        with pytest.raises(UserError, match=f"--https-proxy {missing}: "):
            resolve_secrets(Site(https_proxy=missing))

    log = HostLog(tmp_path, "h1", passwords_in(site))
    log.line("curl: http://ann:w%40rd@proxy.example:3128 said 407; pip w@rd; https://pip:t0ken@mirror.example; x:typed")
    log.close()
    text = log.path.read_text()
    assert [secret for secret in ("w%40rd", "w@rd", "t0ken", "typed") if secret in text] == []
    assert "proxy.example:3128 said 407" in text
