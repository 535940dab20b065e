"""Host names as people type them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterkit.hosts.names import MOST_HOSTS, parse_hosts
from trainer.errors import UserError


def names(*words: str) -> list[str]:
    return [host.name for host in parse_hosts(words)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a", "b", "c"], ["a", "b", "c"]),
        (["a,b,c"], ["a", "b", "c"]),
        (["a, b", "c,"], ["a", "b", "c"]),
        (["a b  c"], ["a", "b", "c"]),
        (["node[01-03]"], ["node01", "node02", "node03"]),
        (["node[8-11]"], ["node8", "node9", "node10", "node11"]),
        (["node[098-101]"], ["node098", "node099", "node100", "node101"]),
        (["n[1-3,7],m"], ["n1", "n2", "n3", "n7", "m"]),
        (["r[1-2]n[1-2].lab"], ["r1n1.lab", "r1n2.lab", "r2n1.lab", "r2n2.lab"]),
        (["10.0.0.[5-6]"], ["10.0.0.5", "10.0.0.6"]),
        (["::1", "fd00::5"], ["::1", "fd00::5"]),
        (["gpu_1", "my-host.prod.example.com"], ["gpu_1", "my-host.prod.example.com"]),
    ],
)
def test_lists_and_ranges(words: list[str], expected: list[str]) -> None:
    assert names(*words) == expected


@pytest.mark.parametrize(
    ("word", "name", "address", "username", "port"),
    [
        ("a", "a", "a", None, None),
        ("root@a", "a", "a", "root", None),
        ("root@a:2222", "a", "a", "root", 2222),
        ("a:22", "a", "a", None, 22),
        ("[::1]:22", "::1", "::1", None, 22),
        ("u@[fd00::5]", "fd00::5", "fd00::5", "u", None),
        ("me@site.org@a", "a", "a", "me@site.org", None),
        ("LAB\\me@a", "a", "a", "LAB\\me", None),
    ],
)
def test_user_host_and_port(word: str, name: str, address: str, username: str | None, port: int | None) -> None:
    (host,) = parse_hosts([word])
    assert (host.name, host.target, host.username, host.port) == (name, address, username, port)


def test_user_and_port_go_for_every_host_of_a_range() -> None:
    hosts = parse_hosts(["root@n[1-2]:2222"])
    assert [(host.name, host.username, host.port) for host in hosts] == [("n1", "root", 2222), ("n2", "root", 2222)]


def test_servers_of_one_machine_are_told_apart_by_their_port() -> None:
    hosts = parse_hosts(["127.0.0.1:2201", "127.0.0.1:2202", "[::1]:1", "[::1]:2", "b"])
    assert [host.name for host in hosts] == ["127.0.0.1:2201", "127.0.0.1:2202", "[::1]:1", "[::1]:2", "b"]
    assert [host.target for host in hosts] == ["127.0.0.1", "127.0.0.1", "::1", "::1", "b"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-oProxyCommand=x"], "cannot begin with '-'"),
        (["root@-a"], "cannot begin with '-'"),
        (["--hostnames"], "cannot begin with '-'"),
        (["a", "b", "a"], "a: named twice"),
        (["a", "root@a"], "a: named twice"),
        (["n[1-3]", "n2"], "n2: named twice"),
        (["a:1", "a:1"], "a:1: named twice"),
        ([], "no host is named"),
        ([""], "no host is named"),
        ([","], "no host is named"),
        (["a b;c"], "'b;c' is no host name"),
        (["$(id)"], "is no host name"),
        (["a/b"], "is no host name"),
        (["ä"], "is no host name"),
        (["ssh://a"], "this is a URL"),
        (["@a"], "the user name before @ is missing"),
        (["-x@a"], "'-x' is no user name"),
        (["root@"], "the host name is missing"),
        ([":22"], "the host name is missing"),
        (["a:"], "'' is no port"),
        (["a:0"], "'0' is no port"),
        (["a:65536"], "'65536' is no port"),
        (["a:ssh"], "'ssh' is no port"),
        (["1.2.3.400"], "'1.2.3.400' is no IP address"),
        (["10.0.0"], "is no IP address"),
        (["[::1"], "bracket"),
        (["[::g]:22"], "is no [IPv6 address]:port"),
        (["n[1-3"], "a bracket has no partner"),
        (["n1-3]"], "a bracket has no partner"),
        (["n[3-1]"], "runs backwards: write 1-3"),
        (["n[a-c]"], "is no range"),
        (["n[]"], "is no range"),
        (["n[1-]"], "is no range"),
        (["n[1-99999999999]"], f"more than {MOST_HOSTS} hosts"),
        (["n[1-100]m[1-100]"], f"more than {MOST_HOSTS} hosts"),
        (["a" * 254], "is no host name"),
    ],
)
def test_malformed_names_are_refused_with_the_word_and_what_is_right(words: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_hosts(words)
    assert said in str(caught.value)
    assert caught.value.exit_code == 2


@given(st.lists(st.text(max_size=12), max_size=4))
def test_no_text_breaks_it(words: list[str]) -> None:
    try:
        hosts = parse_hosts(words)
    except UserError:
        return
    for host in hosts:
        assert not host.target.startswith("-")
        assert not (host.username or "").startswith("-")
        assert host.target.isascii()
        assert not set(host.target) & set(" ;$`'\"\\/|&<>()\n\x00")
