"""Scripts, files, streams and ports over real SSH connections."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import threading
import time
from pathlib import Path

import pytest
from sshd import Ssh, account

from clusterkit.ssh.api import ErrorKind, HostError
from clusterkit.ssh.stream import relay

pytest_plugins = ["sshd_fixture"]
AWKWARD = """
# quotes, backslashes, $ and here documents reach the shell as they are
x='a "b" \\n $HOME'
printf '%s\\n' "$x" 'it'"'"'s' "{" \\
  ü
cat <<'END'
$x } ) '
END
f() { return 7; }
f
"""


def test_script_arrives_as_it_is(ssh: Ssh) -> None:
    result = ssh.with_session(ssh.servers(), lambda session: session.run(AWKWARD))
    assert result.stdout == "a \"b\" \\n $HOME\nit's\n{\nü\n$x } ) '\n"
    assert (result.exit_code, result.stderr) == (7, "")


@pytest.mark.parametrize(
    ("script", "code"), [("set -eu; false; echo no", 1), ("exit 3", 3), ("if", 2), ("kill -9 $$", 137), ("}", 2)]
)
def test_failing_script_is_a_result(ssh: Ssh, script: str, code: int) -> None:
    result = ssh.with_session(ssh.servers(), lambda session: session.run(script))
    assert result.exit_code == code
    assert result.stdout == ""


def test_stdin_reaches_the_script_and_nothing_else(ssh: Ssh) -> None:
    """Bytes that look like commands are never run, even where the script reads only a part of them."""
    marker = ssh.folder / "ran"
    stdin = f"first\ntouch {marker}\n\x00\xff".encode("latin-1") + b"x" * 300_000

    async def work(session):  # type: ignore[no-untyped-def]
        whole = await session.run("wc -c", stdin=stdin)
        part = await session.run("read -r line; echo $line", stdin=stdin)
        none = await session.run("cat; echo end")
        return whole.stdout.strip(), part.stdout, none.stdout

    assert ssh.with_session(ssh.servers(), work) == (str(len(stdin)), "first\n", "end\n")
    assert not marker.exists()


def test_neither_script_nor_stdin_shows_in_any_process_list(ssh: Ssh) -> None:
    async def work(session):  # type: ignore[no-untyped-def]
        script = "word=tulip-in-script; cat >/dev/null; tr '\\0' ' ' </proc/self/cmdline; cat /proc/[0-9]*/cmdline"
        return await session.run(script, stdin=b"orchid-in-stdin")

    shown = ssh.with_session(ssh.servers(), work).stdout
    assert "sshd" in shown
    assert "tulip" not in shown
    assert "orchid" not in shown


def test_large_script_is_no_trouble(ssh: Ssh) -> None:
    """An argument may have 128 KiB; this is eight times as much."""
    script = "".join(f"echo {n:020d} >/dev/null\n" for n in range(30_000)) + "echo done"
    assert ssh.with_session(ssh.servers(), lambda session: session.run(script)).stdout == "done\n"


def test_output_beyond_every_window_does_not_stop(ssh: Ssh) -> None:
    """The script that reads the exit code first, then the output, hangs here."""
    lines: list[str] = []

    async def work(session):  # type: ignore[no-untyped-def]
        script = "yes out | head -c 15000000; yes err | head -c 15000000 >&2; echo last"
        return await session.run(script, on_output=lines.append)

    result = ssh.with_session(ssh.servers(), work)
    assert (len(result.stdout), len(result.stderr)) == (15_000_005, 15_000_000)
    assert len(lines) == 2 * 15_000_000 // 4 + 1
    assert set(lines) == {"out", "err", "last"}


def test_output_comes_line_by_line_while_the_script_runs(ssh: Ssh) -> None:
    seen: list[tuple[str, bool]] = []
    gate = ssh.folder / "gate"

    async def work(session):  # type: ignore[no-untyped-def]
        def on_output(line: str) -> None:
            seen.append((line, gate.exists()))
            gate.touch()

        script = f"printf 'one\\ntw'; while [ ! -e {gate} ]; do sleep 0.02; done; printf 'o\\nend'"
        return await session.run(script, on_output=on_output)

    assert ssh.with_session(ssh.servers(), work).stdout == "one\ntwo\nend"
    assert seen == [("one", False), ("two", True), ("end", True)]


def test_noise_of_login_scripts_is_no_output(ssh: Ssh) -> None:
    server = ssh.servers("SetEnv A=b")
    with account(shell="/bin/bash") as user:
        startup = Path(f"~{user.name}/.bashrc").expanduser()
        startup.write_text("echo welcome; echo beware >&2\n")
        result = ssh.with_session(server.host(username=user.name), lambda session: session.run("echo hi; echo ho >&2"))
    assert (result.stdout, result.stderr) == ("hi\n", "ho\n")


def test_many_commands_at_once_share_one_connection(ssh: Ssh) -> None:
    """More than sshd's MaxSessions of 10."""

    async def work(session):  # type: ignore[no-untyped-def]
        return await asyncio.gather(*(session.run(f"sleep 0.1; echo {n}") for n in range(25)))

    assert [r.stdout for r in ssh.with_session(ssh.servers(), work)] == [f"{n}\n" for n in range(25)]


def test_daemon_left_behind_does_not_hold_the_command_up(ssh: Ssh) -> None:
    async def work(session):  # type: ignore[no-untyped-def]
        return await session.run("sleep 300 & echo $!", timeout=30)

    result = ssh.with_session(ssh.servers(), work)
    assert result.ok
    os.kill(int(result.stdout), 15)  # it has outlived the connection


@pytest.mark.parametrize("stubborn", [False, True])
def test_time_limit_ends_all_processes_of_the_script(ssh: Ssh, stubborn: bool) -> None:
    trap = "trap '' TERM; " if stubborn else ""

    async def work(session):  # type: ignore[no-untyped-def]
        script, pids = f"{trap}echo $$; echo waiting >&2; sleep 300 | sleep 301", []
        with pytest.raises(HostError) as caught:
            await session.run(script, timeout=1.0, on_output=pids.append)
        # Without those that are dead and wait for their parent to notice.
        still = await session.run(f"pgrep -g {pids[0]} --runstates D,R,S")
        return caught.value, still.stdout

    error, still = ssh.with_session(ssh.servers(), work)
    assert error.kind is ErrorKind.TIMEOUT
    assert "limit of 1 s" in error.message
    assert "waiting" in error.message
    assert still == ""


def test_cancelled_command_is_ended_on_the_host(ssh: Ssh) -> None:
    """Ctrl-C."""

    async def work(session):  # type: ignore[no-untyped-def]
        pids: list[str] = []
        begun = asyncio.Event()

        def on_output(line: str) -> None:
            pids.append(line)
            begun.set()

        task = asyncio.ensure_future(session.run("echo $$; sleep 300", timeout=600, on_output=on_output))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return (await session.run(f"kill -0 {pids[0]} && echo there")).stdout

    assert ssh.with_session(ssh.servers(), work) == ""


def test_put_replaces_a_file_in_one_step(ssh: Ssh) -> None:
    target = ssh.folder / "it's a file"
    target.write_text("before")
    sent: list[int] = []

    async def work(session):  # type: ignore[no-untyped-def]
        await session.put(b"x" * 3_000_000, str(target), mode=0o640, on_bytes=sent.append)

    ssh.with_session(ssh.servers(), work)
    assert target.read_bytes() == b"x" * 3_000_000
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert sent == sorted(sent)
    assert sent[-1] == 3_000_000
    assert [path.name for path in ssh.folder.glob(".it*")] == []


def test_put_of_a_large_file_keeps_little_in_memory(ssh: Ssh) -> None:
    import resource  # noqa: PLC0415

    source, target = ssh.folder / "large", ssh.folder / "copy"
    with source.open("wb") as file:
        file.truncate(300_000_000)
        file.seek(200_000_000)
        file.write(b"end")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ssh.with_session(ssh.servers(), lambda session: session.put(source, str(target)))
    assert target.stat().st_size == 300_000_000
    assert target.read_bytes()[200_000_000:200_000_003] == b"end"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000  # KiB


def test_put_into_a_missing_folder_says_why(ssh: Ssh) -> None:
    with pytest.raises(HostError) as caught:
        ssh.with_session(ssh.servers(), lambda session: session.put(b"x", "/nowhere/at/all"))
    assert caught.value.kind is ErrorKind.WRITE
    assert "/nowhere/at/all" in caught.value.message
    assert "nonexistent" in caught.value.message or "No such" in caught.value.message


def test_put_on_a_full_disk_says_so_and_leaves_nothing(ssh: Ssh) -> None:
    import subprocess  # noqa: PLC0415

    disk = ssh.folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], check=False)
    assert mounted.returncode == 0, "a tmpfs is needed to fill a disk"
    try:
        (disk / "f").write_text("before")
        with pytest.raises(HostError) as caught:
            ssh.with_session(ssh.servers(), lambda session: session.put(b"x" * 5_000_000, str(disk / "f")))
        assert caught.value.kind is ErrorKind.WRITE
        assert "No space left" in caught.value.message
        assert [(path.name, path.read_text()) for path in disk.iterdir()] == [("f", "before")]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_put_that_is_cut_off_leaves_the_old_file(ssh: Ssh) -> None:
    server = ssh.servers()
    target = ssh.folder / "target"
    target.write_text("before")

    async def work(session):  # type: ignore[no-untyped-def]
        def on_bytes(sent: int) -> None:
            if sent > 5_000_000:
                server.kill_connections()

        await session.put(b"x" * 100_000_000, str(target), on_bytes=on_bytes)

    with pytest.raises(HostError) as caught:
        ssh.with_session(server, work)
    assert caught.value.kind is ErrorKind.LOST
    assert target.read_text() == "before"


def test_one_host_streams_into_another(ssh: Ssh) -> None:
    """`docker save` here, `docker load` there: bytes pass through us, and little of them is held at a time."""
    moved: list[int] = []

    async def scenario() -> tuple[int, int, str]:
        async with (
            ssh.session(ssh.servers()) as one,
            ssh.session(ssh.servers()) as two,
            one.stream("head -c 50000000 /dev/zero | tr '\\0' x; echo bye >&2") as source,
            two.stream(f"wc -c >{ssh.folder}/count; sleep 0.2") as target,
        ):
            await relay(source, target, moved.append)
            return await source.wait(), await target.wait(), source.errors.stderr

    assert asyncio.run(scenario()) == (0, 0, "bye\n")
    assert (ssh.folder / "count").read_text().strip() == "50000000"
    assert moved[-1] == 50_000_000


def test_stream_that_nobody_reads_stops_the_host(ssh: Ssh) -> None:
    """Back pressure: what waits in memory is bounded."""
    written = ssh.folder / "written"

    async def work(session):  # type: ignore[no-untyped-def]
        script = f"n=0; while :; do head -c 1000000 /dev/zero; n=$((n + 1)); echo $n >{written}; done"
        async with session.stream(script) as stream:
            await stream.read()
            seen = -1
            while seen != (now := int(written.read_text() or 0) if written.exists() else 0) or now == 0:
                seen = now
                await asyncio.sleep(0.5)
            return now

    assert 1 <= ssh.with_session(ssh.servers(), work) < 20


def test_stream_into_a_command_that_fails_says_why(ssh: Ssh) -> None:
    async def work(session):  # type: ignore[no-untyped-def]
        async with session.stream("echo 'no space' >&2; exit 1") as stream:
            for _ in range(1000):
                await stream.write(b"x" * 1_000_000)

    with pytest.raises(HostError) as caught:
        ssh.with_session(ssh.servers(), work)
    assert "exit code 1" in caught.value.message
    assert "no space" in caught.value.message


def test_stream_ends_with_its_time(ssh: Ssh) -> None:
    async def work(session):  # type: ignore[no-untyped-def]
        async with session.stream("sleep 300", timeout=0.5) as stream:
            await stream.read()

    with pytest.raises(HostError) as caught:
        ssh.with_session(ssh.servers(), work)
    assert caught.value.kind is ErrorKind.TIMEOUT


def test_forwarded_port(ssh: Ssh) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(sock.recv(100).upper())

        threading.Thread(target=answer, daemon=True).start()

        async def work(session):  # type: ignore[no-untyped-def]
            port = await session.forward("127.0.0.1", listener.getsockname()[1])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"dashboard")
            answered = await reader.read(100)
            writer.close()
            return answered

        assert ssh.with_session(ssh.servers(), work) == b"DASHBOARD"


def test_seconds_are_wall_time(ssh: Ssh) -> None:
    before = time.monotonic()
    result = ssh.with_session(ssh.servers(), lambda session: session.run("sleep 0.3"))
    assert 0.3 <= result.seconds <= time.monotonic() - before
