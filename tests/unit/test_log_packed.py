"""Logs that are compressed, in another encoding, piped, or no logs at all: what `status` and `diagnose` say of them."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import zstandard
from areal_lines import lite_step, master, through_ray, v2_steps
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterkit.runs.diagnose.run import diagnose_log
from clusterkit.runs.log.reader import LogReader, log_reader, read_log
from clusterkit.runs.log.stream import StreamReader
from clusterkit.runs.log.unpack import MOST_BYTES, Unpacker, packing_of

LOG = v2_steps(1, 20)
NO_SPACE = "OSError: [Errno 28] No space left on device: '/x'\n"
TRACEBACK = """Traceback (most recent call last):
  File "/code/train.py", line 41, in main
    trainer.step(batch)
  File "/code/step.py", line 7, in step
    return weights[name]
           ~~~~~~~^^^^^^
KeyError: 'lm_head.bias'
"""
PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zstd": zstandard.compress,
    "xz": lzma.compress,
    "bzip2": bz2.compress,
    "utf-16": lambda data: data.decode().encode("utf-16"),
    "utf-16-le": lambda data: data.decode().encode("utf-16-le"),
    "utf-16-be": lambda data: data.decode().encode("utf-16-be"),
    "utf-32": lambda data: data.decode().encode("utf-32"),
    "gzip in utf-16": lambda data: gzip.compress(data.decode().encode("utf-16")),
}
CUT = ("gzip", "zstd", "xz", "bzip2")


def _run(
    *arguments: object, stdin: bytes | None = None, megabytes: int = 0, fds: Sequence[int] = ()
) -> subprocess.CompletedProcess[bytes]:
    def limited() -> None:
        if megabytes:
            resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))

    command = [sys.executable, "-m", "clusterkit.cli.main", *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        timeout=300,
        check=False,
        preexec_fn=limited,
        pass_fds=fds,
        **({"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}),
    )


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERKIT_STATE", str(tmp_path / "state"))


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_packed_log_says_what_the_plain_one_says(packing: str, tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "called-as-you-like"
    plain.write_text(LOG + NO_SPACE)
    packed.write_bytes(PACKINGS[packing]((LOG + NO_SPACE).encode()))

    expected, view = read_log(plain), read_log(packed)

    assert view.history.steps == expected.history.steps
    assert (view.kind, view.dialect) == (expected.kind, "AReaL v0.2")
    assert packing.split(maxsplit=1)[0].removesuffix("-le").removesuffix("-be") in view.notes[0]
    [finding] = [item for item in diagnose_log(packed).findings if item.id == "disk-full"]
    assert [item.line for item in finding.evidence] == [41]


@pytest.mark.parametrize("packing", CUT)
def test_what_could_be_read_of_a_truncated_log_is_shown_and_told(packing: str, tmp_path: Path) -> None:
    noise = "(model_worker/3 pid=7) 20250601-12:00:00.000 model worker INFO: Model worker 3 #gen#\n" * 100
    steps = "".join(noise + lite_step(n, 9.0 * n, {"grpo_actor/task_reward/avg": 1 / n}) for n in range(1, 300))
    whole = PACKINGS[packing](steps.encode())
    log = tmp_path / "log"
    log.write_bytes(whole[: len(whole) * 2 // 3])

    done = _run("status", "--log", log)
    view = read_log(log)

    assert done.returncode == 0, done.stderr
    assert b"end in the middle" in done.stdout
    assert view.history.global_step > 50
    assert any("end in the middle" in note for note in diagnose_log(log).notes)
    damaged = bytearray(whole)
    damaged[len(whole) // 2 : len(whole) // 2 + 40] = b"\xff" * 40
    log.write_bytes(bytes(damaged))
    assert any("damaged" in note for note in read_log(log).notes)


def test_members_one_after_another_and_padding_are_one_log(tmp_path: Path) -> None:
    for packing in CUT:
        pack = PACKINGS[packing]
        log = tmp_path / packing
        log.write_bytes(pack(v2_steps(1, 3).encode()) + pack(v2_steps(4, 5).encode()) + b"\0" * 8)
        view = read_log(log)
        assert view.history.global_step == 5, packing
        assert not [note for note in view.notes if "damaged" in note or "middle" in note]


@settings(max_examples=60, deadline=None, database=None)
@given(cuts=st.lists(st.integers(0, 4000), max_size=8), packing=st.sampled_from(sorted(PACKINGS)))
def test_wherever_the_pieces_begin(cuts: list[int], packing: str) -> None:
    packed = PACKINGS[packing](LOG.encode())
    unpacker, text, ends = Unpacker(), b"", sorted({*cuts, len(packed)})
    for begin, end in zip([0, *ends], ends, strict=False):
        text += b"".join(unpacker.feed(packed[begin:end]))
    text += b"".join(unpacker.end())
    assert text.decode().lstrip("\ufeff") == LOG
    assert unpacker.problem == ""


@settings(max_examples=200, deadline=None, database=None)
@given(
    data=st.binary(max_size=1500),
    begin=st.sampled_from([b"", b"\x1f\x8b\x08", b"(\xb5/\xfd", b"\xfd7zXZ\0", b"\xff\xfe"]),
)
def test_junk_does_no_harm(data: bytes, begin: bytes) -> None:
    unpacker = Unpacker()
    b"".join([*unpacker.feed(begin + data), *unpacker.end()])


def test_plain_text_is_plain() -> None:
    for text in (
        LOG.encode(),
        b"",
        b"a",
        b"\0" * 4000,
        "ümläut ".encode() * 99,
        "日本語".encode() * 99,
        os.urandom(4000),
    ):
        assert packing_of(text) == ""


def test_a_bomb_gives_a_piece_at_a_time() -> None:
    bomb = b"x" * (64 << 20)
    for packing in CUT:
        unpacker = Unpacker()
        packed = PACKINGS[packing](bomb)
        pieces = (piece for way in (unpacker.feed(packed), unpacker.end()) for piece in way)
        sizes = [len(piece) for piece in pieces]
        assert max(sizes) <= MOST_BYTES * (1 if packing != "zstd" else 64), packing


def test_a_log_that_does_not_fit_into_memory(tmp_path: Path) -> None:
    noise = b"(model_worker/3 pid=7) 20250601-12:00:00.000 model worker INFO: Model worker 3 #gen#\n" * 10_000
    log = tmp_path / "log"
    with log.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as stream:
        for _ in range(600):
            stream.write(noise)
        stream.write(LOG.encode() + NO_SPACE.encode())

    status = _run("status", "--log", log, "--json", megabytes=400)
    assert status.returncode == 0, status.stderr
    assert json.loads(status.stdout)["progress"]["global_step"] == 20
    found = _run("diagnose", "--log", "-", "--json", megabytes=400, stdin=log.read_bytes())
    assert found.returncode == 0, found.stderr
    finding = json.loads(found.stdout)["findings"][0]
    assert (finding["id"], finding["evidence"][0]["line"]) == ("disk-full", 6_000_041)


def test_standard_input_and_pipes(tmp_path: Path) -> None:
    packed = gzip.compress((LOG + NO_SPACE).encode())
    piped = _run("status", "--log", "-", stdin=packed)
    assert piped.returncode == 0, piped.stderr
    assert b"20/50" in piped.stdout
    assert b"standard input" in piped.stdout
    assert b"does not say how the run ended" in piped.stdout
    found = _run("diagnose", "--log", "-", stdin=packed)
    assert found.returncode == 0, found.stderr
    assert b"A disk is full" in found.stdout
    for command in ("status", "diagnose"):  # as of `clusterkit status --log <(zcat main.log.gz)`
        reading, writing = os.pipe()
        os.write(writing, packed)
        os.close(writing)
        done = _run(command, "--log", f"/dev/fd/{reading}", "--json", fds=[reading])
        os.close(reading)
        assert done.returncode == 0, done.stderr
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=fifo.write_bytes, args=(packed,))
    writer.start()
    assert read_log(fifo).history.global_step == 20
    writer.join()
    assert _run("status", "--log", "-").returncode == 0  # empty


def test_a_pipe_is_watched_until_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "clusterkit.cli.main", "status", "--log", "-", "--watch", "--json"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        giving_up = threading.Timer(60, process.kill)
        giving_up.start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(LOG.encode())
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["progress"]["global_step"] == 20
        process.stdin.write(v2_steps(21, 22).encode())
        process.stdin.close()
        seen = [json.loads(line) for line in process.stdout]
        giving_up.cancel()
    assert seen[-1]["progress"]["global_step"] == 22
    assert process.returncode == 0


@pytest.mark.parametrize(
    "content", [b"%PDF-1.7 nothing to see\n" * 40, os.urandom(3000), b"Dear diary,\ntoday nothing happened.\n"]
)
def test_what_is_no_log_is_said_to_be_none(content: bytes, tmp_path: Path) -> None:
    log = tmp_path / "letter"
    for data in (content, gzip.compress(content)):
        log.write_bytes(data)
        assert read_log(log).state == "unknown"
        assert diagnose_log(log).is_unknown


def test_what_is_no_log_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "letter"
    log.write_text("Dear diary,\ntoday nothing happened.\n")
    for command, words in (("status", b"not a log of AReaL or clusterkit"), ("diagnose", b"no log of a kind")):
        done, told = _run(command, "--log", log), _run(command, "--log", log, "--json")
        assert (done.returncode, told.returncode) == (1, 1)
        assert words in done.stderr
        assert b"running" not in done.stdout
        assert b"clusterkit diagnose --log" not in done.stderr  # it would say the same
        json.loads(told.stdout)


def test_a_log_of_areal_in_which_no_step_is_done_yet_is_one(tmp_path: Path) -> None:
    log = tmp_path / "main.log"
    log.write_text(master("Running ppo-math in ray mode", 0.0))
    assert (read_log(log).state, read_log(log).kind) == ("running", "AReaL or clusterkit")
    engine = tmp_path / "server.log"
    engine.write_text("[2025-06-01 12:00:00 TP0] Load weight begin. avail mem=78.5 GB\n")
    done = _run("status", "--log", engine)
    assert done.returncode == 1
    assert b"it looks like one of SGLang" in done.stderr
    assert _run("diagnose", "--log", engine).returncode == 0


@pytest.mark.parametrize("before", ["", LOG])
@pytest.mark.parametrize(
    "wrap",
    [
        str,
        through_ray,
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "".join(f"[rank0]: {line}\n" for line in text.splitlines()),
    ],
)
@pytest.mark.parametrize("end", ["", "[rank1] something else at the end\n" * 3])
def test_the_traceback_of_a_crashed_run_is_shown(
    before: str, wrap: Callable[[str], str], end: str, tmp_path: Path
) -> None:
    log = tmp_path / "console.log"
    log.write_bytes((before + wrap(TRACEBACK) + end).encode())

    view = read_log(log)

    assert (view.state, view.message) == ("failed", "KeyError: 'lm_head.bias'")
    assert view.traceback is not None
    assert [line.strip() for line in view.traceback.lines] == [line.strip() for line in TRACEBACK.splitlines()]
    finding = diagnose_log(log).findings[0]
    assert finding.id == "unknown-error"
    assert "KeyError: 'lm_head.bias'" in finding.evidence[0].text


def test_a_failed_run_is_told_by_the_exit_code_and_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "console.log"
    log.write_text(LOG + TRACEBACK.rstrip("\n"))  # killed before the end of the line
    done, found = _run("status", "--log", log), _run("diagnose", "--log", log)
    assert (done.returncode, found.returncode) == (1, 0)
    for text in (done.stdout, found.stdout):
        assert b"return weights[name]" in text
        assert b"KeyError: 'lm_head.bias'" in text
    assert b"failed" in done.stdout


def test_a_log_that_is_watched_may_go_on_after_a_traceback(tmp_path: Path) -> None:
    log = tmp_path / "main.log"
    log.write_text(v2_steps(1, 3) + TRACEBACK)
    reader = LogReader(log)
    assert (reader.refresh().state, reader.refresh().ended) == ("failed", False)
    with log.open("a") as file:
        file.write(v2_steps(4, 4))
    assert reader.refresh().state != "failed"
    log.write_text(v2_steps(1, 3) + TRACEBACK)
    os.utime(log, (0, 0))
    assert LogReader(log).refresh().ended


def test_an_error_after_which_the_run_goes_on_is_no_end(tmp_path: Path) -> None:
    log = tmp_path / "main.log"
    log.write_text(v2_steps(1, 3) + TRACEBACK + v2_steps(4, 5))
    assert read_log(log).state != "failed"
    log.write_text(v2_steps(1, 3) + TRACEBACK + "some engine goes on\n" * 60)
    assert read_log(log).state != "failed"


def test_predecessors_that_were_compressed_are_read_too(tmp_path: Path) -> None:
    log = tmp_path / "main.log"
    (tmp_path / "main.log.2.gz").write_bytes(gzip.compress(v2_steps(1, 2).encode()))
    (tmp_path / "main.log.1.zst").write_bytes(zstandard.compress(v2_steps(3, 4).encode()))
    (tmp_path / "main.log.0.txt").write_text("no predecessor")
    log.write_text(v2_steps(5, 6))
    reader = log_reader(log)
    assert isinstance(reader, LogReader)
    assert [step["global_step"] for step in reader.refresh().history.steps] == [1, 2, 3, 4, 5, 6]
    with log.open("a") as file:
        file.write(v2_steps(7, 7))
    assert reader.refresh().news == len(v2_steps(7, 7))


def test_a_compressed_log_that_is_replaced_is_read_anew(tmp_path: Path) -> None:
    log = tmp_path / "main.log.gz"
    log.write_bytes(gzip.compress(v2_steps(1, 2).encode()))
    reader = log_reader(log)
    assert isinstance(reader, StreamReader)
    assert reader.refresh().history.global_step == 2
    assert reader.refresh().news == 0
    log.write_bytes(gzip.compress(v2_steps(1, 9).encode()))
    assert reader.refresh().history.global_step == 9
