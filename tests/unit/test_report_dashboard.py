"""The dashboard's server: who it answers, what it refuses, that it changes nothing."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from heldout_writer import careful, forgetful, write_heldout
from run_writer import RunWriter

from clusterkit.observe.report.dashboard import Dashboard, Views
from trainer.errors import UserError

CLUSTERKIT = str(Path(sys.executable).with_name("clusterkit"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Dashboard]:
    with Dashboard(0, Views(tmp_path, None, None)) as dashboard:
        thread = threading.Thread(target=dashboard.serve_forever, args=(0.01,))
        thread.start()
        yield dashboard
        dashboard.shutdown()
        thread.join()


def _ask(server: Dashboard, path: str = "/", method: str = "GET", **headers: str) -> tuple[HTTPResponse, str]:
    """As a browser that has been here before, unless `headers` hold another cookie."""
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    given = {"Host": f"127.0.0.1:{server.server_port}", "Cookie": f"other=1; {server.cookie}={server.token}"}
    connection.request(method, path, headers=given | headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response, text


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def test_other_users_of_this_machine_see_nothing(server: Dashboard, tmp_path: Path) -> None:
    RunWriter(tmp_path, "secret").attempt().steps(1, 3)
    wrong = [f"{server.cookie}=", f"{server.cookie}={'x' * len(server.token)}", f"clusterkit={server.token}", "", "é"]

    for path in ("/", "/page", "/nothing", "/?token=", "/page?token=x", f"/page?token={server.token}x", "/?token=%ff"):
        for cookie in wrong:
            response, text = _ask(server, path, Cookie=cookie)
            assert response.status == 403
            assert "secret" not in text
            assert "address that `clusterkit dashboard` has printed" in text
            assert "Set-Cookie" not in response.headers


def test_a_browser_gets_in_by_the_printed_address_and_keeps_no_token_in_its_own(
    server: Dashboard, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    RunWriter(tmp_path).config().attempt().steps(1, 3)
    path = server.url.partition(f":{server.server_port}")[2]

    first, _ = _ask(server, f"{path}&run=tiny-recall/run1", Cookie="")
    assert (first.status, first.headers["Location"]) == (303, "/?run=tiny-recall%2Frun1")
    assert first.headers["Referrer-Policy"] == "no-referrer"
    cookie, *marks = first.headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Lax"} <= set(marks)

    then, text = _ask(server, first.headers["Location"], Cookie=cookie)
    assert then.status == 200
    assert server.token not in text
    assert _ask(server, f"/page?token={server.token}", Cookie="")[0].status == 200  # a program without cookies
    assert server.token not in "".join(capfd.readouterr())


def test_every_start_has_a_token_of_its_own(server: Dashboard, tmp_path: Path) -> None:
    with Dashboard(0, Views(tmp_path, None, None)) as second:
        assert len({server.token, second.token}) == 2
        assert server.cookie != second.cookie
    assert len(server.token) >= 40


def test_it_listens_on_loopback_alone(server: Dashboard) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9999", "LOCALHOST", "[::1]:8400", "[::1]"])
def test_it_answers_to_the_names_of_this_machine(server: Dashboard, host: str) -> None:
    assert _ask(server, Host=host)[0].status == 200


@pytest.mark.parametrize(
    "host",
    "evil.example evil.example:8400 127.0.0.1.evil.example localhost.evil.example:80 evil@localhost:x 10.0.0.1 0.0.0.0 "
    "[::] localhost:80:80 127.0.0.1:evil :80 .localhost".split(),
)
def test_it_refuses_every_other_host_header(server: Dashboard, tmp_path: Path, host: str) -> None:
    RunWriter(tmp_path, "secret").attempt().steps(1, 3)

    for path in ("/", "/page"):
        response, text = _ask(server, path, Host=host)
        assert response.status == 403
        assert "secret" not in text


@pytest.mark.parametrize("hosts", [[], ["localhost", "evil.example"]])
def test_it_refuses_requests_with_no_or_with_two_host_headers(server: Dashboard, hosts: list[str]) -> None:
    lines = ["GET / HTTP/1.1", *(f"Host: {host}" for host in hosts), "Connection: close", "", ""]
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
        connection.sendall("\r\n".join(lines).encode())
        assert b" 403 " in connection.recv(100)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_it_has_no_operation_that_writes(server: Dashboard, method: str) -> None:
    assert _ask(server, method=method)[0].status in (405, 501)


def test_looking_changes_nothing_on_disk(server: Dashboard, tmp_path: Path) -> None:
    RunWriter(tmp_path).config().attempt().steps(1, 5).recover(5)
    before = _files(tmp_path)

    for path in ("/", "/page", "/?run=tiny-recall/run1", "/nothing", "/?run=x/y"):
        _ask(server, path)

    assert _files(tmp_path) == before


def test_answers_forbid_framing_guessing_and_other_origins(server: Dashboard) -> None:
    headers = _ask(server)[0].headers

    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers


def test_it_waits_for_the_first_run_and_follows_the_newest(server: Dashboard, tmp_path: Path) -> None:
    assert "no runs found" in _ask(server)[1]

    RunWriter(tmp_path, trial="run1").attempt().steps(1, 3)
    assert "tiny-recall/run1" in _ask(server, "/page")[1]

    RunWriter(tmp_path, trial="run2").attempt().steps(1, 7)
    page = _ask(server, "/page")[1]
    assert "tiny-recall/run2" in page
    assert "7 of 30" in page


def test_plots_that_the_page_has_already_are_not_sent_again(server: Dashboard, tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 3)
    first = _ask(server, "/page")[1]
    version = first.partition('id="plots" data-version="')[2].partition('"')[0]

    again = _ask(server, f"/page?drawn={version}")[1]
    assert 'id="shared"' in first
    assert 'id="shared"' not in again
    assert "3 of 30" in again

    writer.steps(4, 4)
    assert 'id="shared"' in _ask(server, f"/page?drawn={version}")[1]


def test_held_out_questions_are_shown_and_not_sent_again(
    server: Dashboard, tmp_path: Path, mini_hotpotqa: Path
) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 3)
    write_heldout(writer.run.logs, mini_hotpotqa, "before", forgetful)
    first = _ask(server, "/page")[1]
    versions = "+".join(re.findall(r'data-version="(\w+)"', first))
    assert "where Kit Lark was born" in first
    assert "Yarrow" not in _ask(server, f"/page?drawn={versions}")[1]

    write_heldout(writer.run.logs, mini_hotpotqa, "after", careful)
    again = _ask(server, f"/page?drawn={versions}")[1]
    assert "\\\\boxed{Yarrow}" in again
    assert 'id="shared"' not in again


def test_several_runs_can_be_chosen(server: Dashboard, tmp_path: Path) -> None:
    for trial in ("run1", "run2", "run3"):
        RunWriter(tmp_path, trial=trial).config().attempt().steps(1, 3)

    text = _ask(server, "/?run=tiny-recall/run1&compare=tiny-recall/run2")[1]
    assert "Both runs have the same settings" in text

    text = _ask(server, "/?run=tiny-recall/run1&compare=tiny-recall/run2&compare=tiny-recall/run3")[1]
    assert "All runs have the same settings" in text
    assert text.count(" checked") >= 2 + 3  # the runs over it, and above the plots all of them


def test_runs_of_the_command_are_drawn_until_the_reader_chooses_others(tmp_path: Path) -> None:
    for trial in ("run1", "run2", "run3"):
        RunWriter(tmp_path, trial=trial).attempt().steps(1, 3)
    with Dashboard(0, Views(tmp_path, "tiny-recall", "run1", ["run2"])) as dashboard:
        thread = threading.Thread(target=dashboard.serve_forever, args=(0.01,))
        thread.start()
        heads = {
            path: _ask(dashboard, path)[1].partition("<h1>")[2].partition("</h1>")[0]
            for path in ("/", "/?run=", "/?run=&compare=tiny-recall/run3", "/?run=tiny-recall/run3")
        }
        dashboard.shutdown()
        thread.join()

    shown = {path: re.findall(r"tiny-recall/(\w+)", head) for path, head in heads.items()}
    assert shown == {
        "/": ["run1", "run2"],
        "/?run=": ["run1"],
        "/?run=&compare=tiny-recall/run3": ["run1", "run3"],
        "/?run=tiny-recall/run3": ["run3"],
    }


@pytest.mark.parametrize("name", ["../../etc/passwd", "tiny-recall/..", "*/*", "tiny-recall/run1/x", "a/%00"])
def test_names_that_are_paths_or_patterns_are_refused(server: Dashboard, tmp_path: Path, name: str) -> None:
    RunWriter(tmp_path).attempt().steps(1, 3)

    for key in ("run", "compare"):
        response, text = _ask(server, f"/page?{key}={name}")
        assert response.status == 400
        assert "is no name of an experiment or trial" in text


def test_a_port_that_is_taken_is_said(server: Dashboard, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"port {server.server_port} of 127.0.0.1 cannot be had"):
        Dashboard(server.server_port, Views(tmp_path, None, None))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_command_says_where_it_is_and_ends_well(tmp_path: Path, number: signal.Signals) -> None:
    command = [CLUSTERKIT, "dashboard", "--port", "0", "--fileroot", str(tmp_path)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As at a terminal: a test run in the background ignores Ctrl-C, and its children would, too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        parts = urlsplit(address)
        for path, status in ((f"/page?{parts.query}", 200), ("/page", 403)):
            connection = HTTPConnection(parts.netloc, timeout=10)
            connection.request("GET", path)
            assert connection.getresponse().status == status
            connection.close()
        process.send_signal(number)
        _, said = process.communicate(timeout=300)
    finally:
        process.kill()

    assert process.returncode == 0
    assert "Traceback" not in said
