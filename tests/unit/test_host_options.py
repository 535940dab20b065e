"""The options that name hosts: what may be typed, and what becomes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from clusterkit.cli.hostoptions import expand_arguments, takes_hosts
from clusterkit.cli.init import app as init_app
from clusterkit.hosts import inventory
from clusterkit.hosts.model import Cluster, Host
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import Selection, select
from trainer.errors import UserError


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTERKIT_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "config"


def run(command: str) -> Selection:
    """The selection that a command gets for a line as a user types it."""
    got: list[Selection] = []
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    @takes_hosts
    def check(
        words: list[str] = typer.Argument(None),  # noqa: B008
        *,
        hosts: HostOptions,
        preset: str = typer.Option("", "--preset"),
    ) -> None:
        got.append(select(hosts))

    result = CliRunner().invoke(app, expand_arguments(command.split()), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return got[0]


def names(selection: Selection) -> list[str]:
    return [host.name for host in selection.hosts]


@pytest.mark.parametrize(
    ("typed", "expanded"),
    [
        ("setup --hostnames a b c", "setup --hostnames a --hostnames b --hostnames c"),
        ("setup --hostnames a b --username root", "setup --hostnames a --hostnames b --username root"),
        ("setup --hostnames=a b", "setup --hostnames=a b"),
        ("setup --hostnames a --hostnames b c", "setup --hostnames a --hostnames b --hostnames c"),
        ("setup --hostnames a b seed=2", "setup --hostnames a --hostnames b seed=2"),
        ("setup --hostnames a -- b --c_d", "setup --hostnames a -- b --c_d"),
        ("setup --private_key_file k_1 --ssh_port 22", "setup --private-key-file k_1 --ssh-port 22"),
        ("setup --private_key_file=k_1", "setup --private-key-file=k_1"),
        ("setup --train_param 1.5B_n4", "setup --preset 1.5B_n4"),
        ("check --limit n1 n2 --exclude n3 n4", "check --limit n1 --limit n2 --exclude n3 --exclude n4"),
        ("train --preset tiny loss.kl_weight=0.1", "train --preset tiny loss.kl_weight=0.1"),
        ("serve judge --flags --trust_remote_code", "serve judge --flags --trust_remote_code"),
        ("setup --hostnames --bad", "setup --hostnames --bad"),
        ("setup --hostnames", "setup --hostnames"),
        ("", ""),
    ],
)
def test_spellings(typed: str, expanded: str) -> None:
    assert expand_arguments(typed.split()) == expanded.split()


@pytest.mark.parametrize("option", [["--flags", ""], ["--flags="]])
def test_options_of_another_program_are_passed_on_as_they_are(option: list[str]) -> None:
    flags = "--chat-template /models/my_judge.jinja --hf_overrides={} --load_format auto"
    words = ["serve", "judge", *option[:-1], option[-1] + flags, "--max_model_len", "8"]
    assert expand_arguments(words) == [*words[:-2], "--max-model-len", "8"]


def test_line_of_the_old_script() -> None:
    line = "--private_key_file /k --ssh_port 2222 --username root --hostnames H1 H2 H3 H4 --train_param 1.5B_n4"
    selection = run(line)
    assert names(selection) == ["H1", "H2", "H3", "H4"]
    ssh = selection.ssh
    assert (ssh.private_key_files, ssh.port, ssh.username) == (("/k",), 2222, "root")


def test_what_was_typed_is_kept_with_the_cluster() -> None:
    inventory.save(run("--hostnames a b --username root --ssh-port 2222 --private-key-file k --cluster lab").cluster)
    later = run("--cluster lab")
    assert names(later) == ["a", "b"]
    assert (later.ssh.username, later.ssh.port) == ("root", 2222)
    assert later.ssh.private_key_files == (str(Path("k").absolute()),)
    assert run("--cluster lab --username me").ssh.username == "me"


def test_host_typed_again_keeps_its_settings() -> None:
    inventory.save(Cluster(hosts=(Host(name="a", private_address="10.0.0.1"), Host(name="b")), head="b", storage="/d"))
    cluster = run("--hostnames root@a c").cluster
    assert cluster.hosts == (Host(name="a", private_address="10.0.0.1", username="root"), Host(name="c"))
    assert (cluster.head_host.name, cluster.storage) == ("a", "/d")


def test_no_hosts_and_no_cluster() -> None:
    with pytest.raises(UserError, match=r"no cluster on this machine yet.*clusterkit setup --hostnames"):
        run("")


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ("--limit n2", ["n2"]),
        ("--limit n[1-2] m", ["n1", "n2", "m"]),
        ("--limit n*", ["n1", "n2", "n3"]),
        ("--limit n1,m", ["n1", "m"]),
        ("--exclude n*", ["m"]),
        ("--limit n* --exclude n2", ["n1", "n3"]),
    ],
)
def test_limit_and_exclude(limits: str, expected: list[str]) -> None:
    selection = run(f"--hostnames n[1-3] m {limits}")
    assert names(selection) == expected
    assert len(selection.cluster.hosts) == 4


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--hostnames node1 --limit nodel", r"--limit nodel: no such host. Did you mean node1\?"),
        ("--hostnames a --exclude a", "leave no host"),
        ("--hostnames a a", "named twice"),
        ("--hostnames --username root", "cannot begin with '-'"),
        ("--hostnames a --head b", "head b is none of the hosts"),
        ("--hostnames a --storage data", "--storage: "),
        ("--hostnames a --ssh-port 0", "--ssh-port 0"),
        ("--hostnames a --username -x", "no user name"),
        ("--hostnames a --bastion -x", "cannot begin with '-'"),
        ("--hostnames a --host-key-policy off", "accept-new or strict"),
        ("--hostnames a --cluster Lab", "no name for a cluster"),
        ("--hostnames a --connect-timeout 0", "above 0"),
    ],
)
def test_bad_usage(line: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        run(line)


def init(line: str) -> str:
    result = CliRunner().invoke(init_app, line.split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_init_writes_an_inventory_and_says_what_is_next() -> None:
    path = inventory.path_of("lab")
    shown = CliRunner().invoke(init_app, "n[1-2] root@m:2222 --cluster lab --head m --username me".split())
    assert shown.stdout == f"{path}\n"
    assert "clusterkit check --cluster lab" in shown.stderr
    cluster = inventory.load("lab")
    assert [host.name for host in cluster.hosts] == ["n1", "n2", "m"]
    assert (cluster.head, cluster.hosts[2].port, cluster.login.username) == ("m", 2222, "me")


def test_init_again_changes_nothing_and_overwrites_only_when_told() -> None:
    assert json.loads(init("a b --json"))["changed"] is True
    before = inventory.path_of("default").stat().st_mtime_ns
    assert json.loads(init("a b --json"))["changed"] is False
    assert inventory.path_of("default").stat().st_mtime_ns == before
    with pytest.raises(UserError, match=r"kept with other settings \(hosts a, b\)"):
        init("a c")
    assert json.loads(init("a c --force --json"))["cluster"]["hosts"][1]["name"] == "c"
