"""`clusterkit serve judge`: what is refused before anything is started. Real servers: tests/integration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clusterkit.cli.actions.serve import _print_next
from clusterkit.cli.judgeoptions import JudgeOptions
from clusterkit.cli.runoptions import RunOptions
from clusterkit.cli.serve import app
from trainer.engines.dialects import make_dialect
from trainer.engines.options import ServerOptions
from trainer.errors import UserError
from trainer.judge.serve import make_hosts
from trainer.judge.servers import gpu_groups, parser, require_model
from trainer.serving import registry


@pytest.mark.parametrize(
    ("wanted", "per_server", "groups"),
    [
        ("", 1, [()]),
        ("3", 1, [(0,), (1,), (2,)]),
        ("2,3,4", 1, [(2,), (3,), (4,)]),
        ("4", 2, [(0, 1), (2, 3)]),
        ("5,", 1, [(5,)]),
    ],
)
def test_gpus_are_counted_or_named(wanted: str, per_server: int, groups: list[tuple[int, ...]]) -> None:
    assert gpu_groups(wanted, per_server) == groups


@pytest.mark.parametrize(("wanted", "per_server"), [("three", 1), ("3", 2), ("1,2,3", 2)])
def test_gpus_that_make_no_servers_are_refused(wanted: str, per_server: int) -> None:
    with pytest.raises(UserError, match="--gpus"):
        gpu_groups(wanted, per_server)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--address", "0.0.0.0"), "private address only"),
        (("--address", "8.8.8.8"), "private address only"),
        (("--address", "gpu03"), "is no address"),
        (("--engine", "ollama"), "choose sglang or vllm"),
        (("--preset", "memalpha-9B"), "unknown preset"),
        (("--gpus", "3", "--per-server", "2"), "do not divide"),
        (("--cluster", "lab", "--gpus", "2,3"), "Ray chooses GPUs"),
        (("--cluster", "lab", "--address", "10.0.0.5"), "no --address"),
        (("mine/run2", "--trial", "run3"), "name the run twice"),
        ((), r"--model-path .*is neither a folder nor the name of an asset"),
    ],
)
def test_what_cannot_serve_is_refused(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    arguments = ["judge", "--model", str(tmp_path / "none"), "--fileroot", str(tmp_path), *options]
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert list(tmp_path.iterdir()) == []


def test_a_judge_is_asked_in_words_and_an_engine_server_in_tokens(tmp_path: Path) -> None:
    words = ["--model", str(tmp_path / "m"), "--fileroot", str(tmp_path), "--user", "u", "--experiment", "e"]
    (host,) = make_hosts(parser("").parse_args([*words, "--trial", "t", "--gpus", "1", "--engine", "sglang"]))
    dialect = make_dialect("sglang")
    judge, engine = dialect.argv(host.options, 1), dialect.argv(ServerOptions(tmp_path / "m", tmp_path / "log"), 1)
    without_words = {"--skip-tokenizer-init", "--grammar-backend"}  # no chat template; no JSON schema is kept to
    assert not without_words & set(judge)
    assert without_words <= set(engine)


def test_an_option_of_the_server_is_one_argument_of_it(tmp_path: Path) -> None:
    typed = JudgeOptions(flags="--bs 1 2", server_flag=["--chat-template", "my own.jinja"])
    words = ["--model", str(tmp_path / "m"), "--fileroot", str(tmp_path), "--user", "u", "--experiment", "e"]
    (host,) = make_hosts(parser("").parse_args([*words, "--trial", "t", f"--flags={typed.quoted_flags}"]))

    assert host.options.flags == ("--bs", "1", "2", "--chat-template", "my own.jinja")


def test_a_server_that_cannot_start_is_told_listed_and_cleared(tmp_path: Path) -> None:
    model = tmp_path / "judge-model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 2}))
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (model / "tokenizer.json").write_text("{}")
    where = ["--fileroot", str(tmp_path / "runs")]
    argv = [sys.executable, "-m", "clusterkit.cli.main", "serve", "judge", "mine/run2", *where, "--model", str(model)]
    # SGLang asks for a GPU; the interpreter is one that is there, so that nothing else is wrong.
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "CLUSTERKIT_SGLANG_PYTHON": "/bin/sh"},
    )  # fmt: skip
    assert done.returncode == 2
    assert "judge-0 was given no GPU" in done.stderr

    listed = CliRunner().invoke(app, ["judge", *where, "--experiment", "mine", "--trial", "run2", "--list", "--json"])
    (one,) = json.loads(listed.stdout)["servers"]
    assert (one["name"], one["state"]) == ("judge-0", "ended")
    assert "was given no GPU" in one["reason"]
    assert CliRunner().invoke(app, ["stop", "mine/run2", *where, "--judges"]).stdout == "ended: judge-0\n"
    assert CliRunner().invoke(app, ["list", "mine/run2", *where, "--judges"]).stdout == "the run has no judge servers\n"


def test_what_is_printed_after_a_server_was_added_names_the_run_in_one_word(capsys: pytest.CaptureFixture[str]) -> None:
    _print_next(RunOptions(name="mine/run 2"), "--cluster lab", "server-1")
    said = capsys.readouterr().err
    assert "clusterkit serve list 'mine/run 2' --cluster lab\n" in said
    assert "clusterkit serve stop 'mine/run 2' server-1 --cluster lab\n" in said


def test_a_second_model_beside_one_that_serves_is_refused(tmp_path: Path) -> None:
    here = registry.Registration("judge-0", "vllm", "/m/Qwen3-14B", "gpu03", 1, 0.0, "ready", "http://10.0.0.3:1")
    registry.write(tmp_path, here)
    require_model(tmp_path, Path("/storage/models/Qwen3-14B"))
    with pytest.raises(UserError, match=r"judge-0 on gpu03 serves Qwen3-14B .*serve stop --judges"):
        require_model(tmp_path, Path("/storage/models/Qwen3-32B"))
