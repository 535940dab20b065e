"""`--help` of every command: what it is for, examples that work, in 60 and 80 columns; and what it says of mistakes."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from clusterkit.cli.hostoptions import expand_arguments
from clusterkit.cli.main import COMMANDS, EXAMPLES, HOST_COMMANDS, app, main, sections
from clusterkit.runs.directory import RunDirectory, user_name

ROOT = typer.main.get_command(app)


def _paths() -> Iterator[tuple[str, ...]]:
    yield ()
    for name in COMMANDS:
        command = ROOT.get_command(None, name)  # type: ignore[attr-defined, arg-type]
        yield (name,)
        yield from ((name, inner) for inner in getattr(command, "commands", {}))


PATHS = list(_paths())


def _help(path: tuple[str, ...], columns: int) -> str:
    command: Any = ROOT
    context = command.make_context("clusterkit", [], resilient_parsing=True, terminal_width=columns - 2)
    for name in path:
        command = command.get_command(context, name)
        context = command.make_context(name, [], parent=context, resilient_parsing=True)
    return str(command.get_help(context))


def _parsed(words: list[str]) -> dict[str, Any]:
    """Parameters of a command line, parsed by the command itself and not run."""
    words = expand_arguments(words) if words[0] in HOST_COMMANDS else words
    group: Any = ROOT
    context = group.make_context("clusterkit", words)
    name, command, rest = group.resolve_command(context, words)
    context = command.make_context(name, rest, parent=context)
    words = context._protected_args + context.args if hasattr(command, "resolve_command") else []
    if words:
        name, command, rest = command.resolve_command(context, words)
        context = command.make_context(name, rest, parent=context)
    return dict(context.params)


def _examples(text: str) -> list[str]:
    _, _, found = text.partition("\nExamples:\n")
    return re.sub(r"\\\n\s*", "", found).strip().splitlines()


def _said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["clusterkit", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_help_says_what_a_command_is_for_and_fits_the_terminal(path: tuple[str, ...]) -> None:
    for columns in (60, 80):
        text = _help(path, columns)
        assert [line for line in text.splitlines() if len(line) > columns] == []
        assert text.isascii(), "what a locale without UTF-8 cannot show"
        usage, _, rest = text.partition("\n\n")
        assert usage.startswith("Usage: ")
        assert "[[" not in usage
        assert not re.search(r"<(str|int|float|path|list)\b", text), "a type of Python's"
        assert not rest.startswith(("Options:", "Arguments:", "Commands:")), "it begins with options, not a sentence"


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_the_examples_of_help_are_command_lines_that_are_understood(path: tuple[str, ...]) -> None:
    examples = _examples(_help(path, 80))

    assert examples
    for line in examples:
        typed = re.sub(r'^eval "\$\((.*)\)"$', r"\1", line.strip())
        words = shlex.split(re.split(r" >>? ", typed)[0])
        assert words[0] == "clusterkit"
        assert list(path) == words[1 : 1 + len(path)]
        _parsed(words[1:])


def test_every_command_is_in_one_section() -> None:
    names = [name for found in sections().values() for name in found]

    assert sorted(names) == sorted(COMMANDS)
    assert list(sections()) == ["Cluster", "Train", "Watch", "Score", "Data", "More"]
    assert EXAMPLES.strip() in "\n".join(line.strip() for line in _help((), 80).splitlines())


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("eval --output_path o --model_path m --watch w", "eval --out o --model-path m --watch-dir w"),
        ("eval stop --output-path o", "eval stop --out o"),
        ("eval --server-flag --flags --set agent.chunk_tokens=5", "eval --server-flag=--flags agent.chunk_tokens=5"),
        ("ask -q x agent.chunk_tokens=5 a.txt", "ask -q x --set agent.chunk_tokens=5 a.txt"),
        ("setup --hostnames a b --preset tiny seed=2", "setup --hostnames a --hostnames b --preset tiny --set seed=2"),
        ("train --preset tiny --set seed=2 --set=a.b=3", "train --preset tiny seed=2 a.b=3"),
        ("recover check --set seed=2", "recover check seed=2"),
        ("presets plan tiny --set seed=2", "presets plan tiny seed=2"),
        ("serve judge --model m --server_flag --a", "serve judge --model-path m --server-flag=--a"),
        ("serve judge --per-server 2", "serve judge --tensor-parallel 2"),
        ("serve add --model m", "serve add --model-path m"),
        ("trace --task 3", "trace --task-id 3"),
        ("train --preset tiny --task sft", "train --task sft --preset tiny"),
    ],
)
def test_an_older_spelling_is_the_same_command(words: str, same: str) -> None:
    assert _parsed(shlex.split(words)) == _parsed(shlex.split(same))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("dashboard --port 99999", "--port 99999: give at most 65535"),
        ("dashboard --port x", "--port x: give a whole number"),
        ("ask", "--question is missing: What is asked about the texts"),
        ("train --train.total_steps=6", "settings are typed without dashes, as train.total_steps=VALUE"),
        ("train --preset tiny --trial-name x", "settings are typed without dashes, as trial_name=VALUE"),
        ("train --preset tiny --learning_rate 1e-5", "as train.learning_rate=VALUE"),
        ("train tiny", "no preset chosen. Did you mean --preset tiny? Add --preset NAME"),
        ("train --preset tiny agent.name=foo", "error: agent.name=foo is not known: choose memagent"),
        (
            "train --preset tiny task.name=foo",
            "choose it with --task, or name a class of yours: task.name=module:Class",
        ),
        ("report --tril x", "clusterkit report has no option --tril. Did you mean --trial?"),
        ("status a/run1 --trial run2", "a/run1 and --experiment or --trial name the run twice"),
        ("report a/run1 --log main.log", "--log FILE names the log itself: leave a/run1 out"),
        (
            "report a/run1 a/run2 b",
            "more words than it takes: a/run2 b. Runs to draw over it: --compare a/run2 --compare b",
        ),
        ("presets difff tiny 7B_n4", "clusterkit presets has no command 'difff'. Did you mean diff?\nCommands: list"),
        ("use a b", "more words than it takes: b"),
        (
            "data prepare reading --from a.md b.md --out set",
            "more words than it takes: b.md. Every input has a --from of its own; files of a folder are taken",
        ),
        ("eval --model-path /nonexistent", "--model-path /nonexistent: there is no such folder"),
        ("train ppo-math --config c/ppo-7B-distill-gpus-128.yaml", "clusterkit train --preset 7B_n16 --task math"),
        ("train --preset memalpha-4B allocation_mode=sglang:d3p1t1 --dry-run", "clusterkit serve judge --model-path"),
        ("train --preset memalpha-tiny allocation_mode=sglang:d3p1t1", "clusterkit serve judge --model-path"),
        ("train --preset tiny valid_dataset.path=x", "held-out tasks come from the data of task.path"),
    ],
)
def test_a_mistake_is_told_once_and_in_plain_words(
    words: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, err = _said(capsys, monkeypatch, *shlex.split(words))

    assert code == 2
    assert said in err
    assert err.startswith("error: ")
    assert "Error:" not in err
    assert "Usage:" not in err


@pytest.mark.parametrize(
    "words",
    [
        *("status", "logs", "stop", "diagnose", "report", "trace", "recover check", "alerts --once --command true"),
        *("serve list", "serve add", "serve stop", "eval", "ask -q x -"),
        "train --preset tiny --recover-from nobody/nothing",
    ],
)
def test_that_there_is_no_run_has_one_exit_code(
    words: str, tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, err = _said(capsys, monkeypatch, *shlex.split(words))

    assert (code, err.startswith("error: no ")) == (1, True), err


@pytest.mark.parametrize(
    "words",
    [
        *("status", "logs", "stop", "diagnose", "report --out -", "trace", "recover check"),
        *("alerts --once --command true", "serve list", "serve add", "serve stop"),
    ],
)
def test_a_run_is_named_in_one_word(
    words: str, tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    RunDirectory(tmp_path / "runs", user_name(), "another", "run1").logs.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    code, err = _said(capsys, monkeypatch, *shlex.split(words), "there/run7")

    assert code == 1, err
    assert "no run there/run7" in err
