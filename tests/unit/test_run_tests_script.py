"""How `make test` judges: parts side by side, what failed once more alone, everything named at the end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import run_tests as script

PASSES = "def test_passes(): pass\n"
FAILS = "def test_fails(): assert False, 'for good'\n"
ONCE = """
from pathlib import Path
def test_first(): pass
def test_fails_once():
    mark = Path(__file__).with_suffix(".mark")
    known = mark.exists()
    mark.touch()
    print("ERROR    asyncio:base_events.py:1771 of the test's own log")
    assert known, "in the way"
"""


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the time that pytest takes to start is theirs."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def judge(
    root: Path,
    capfd: pytest.CaptureFixture[str],
    left: dict[str, str],
    right: dict[str, str],
    *options: str,
) -> tuple[int, str]:
    """Exit code and output for two parts of test files, without the seconds."""
    (root / "pytest.ini").write_text("[pytest]\nmarkers = long\n")
    for part, files in {"left": left, "right": right}.items():
        (root / part).mkdir()
        for name, text in files.items():
            (root / part / f"test_{name}.py").write_text(text)
    parts = {"left": ("left",), "right": ("right",)}
    if "long" in options:
        parts = script.marked(parts, root)
    code = script.all_tests(parts, ["-p", "no:cacheprovider", *options], root)
    return code, re.sub(r" \(\d+ s, \d+ s of CPU\)\n", "\n", capfd.readouterr().out)


def test_all_pass(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, said = judge(tmp_path, capfd, {"a": PASSES}, {"b": PASSES})
    assert code == 0
    assert said.endswith("left: passed\nright: passed\n")
    assert "once more" not in said


def test_what_passes_alone_is_named_and_fails_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, said = judge(tmp_path, capfd, {"a": PASSES}, {"b": ONCE})
    assert code == 0
    assert "once more, alone: right/test_b.py\n" in said
    first, *rest = said.splitlines()[-4:]
    assert first.startswith("FAILED right/test_b.py::test_fails_once - AssertionError: in the way")
    assert rest == ["left: passed", "right: exit code 1", "alone, right/test_b.py: passed"]


def test_what_fails_alone_too_fails_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, said = judge(tmp_path, capfd, {"a": FAILS}, {"b": ONCE})
    assert code == 1
    assert "once more, alone: left/test_a.py right/test_b.py\n" in said or "right/test_b.py left/test_a.py\n" in said
    assert said.splitlines()[-2].startswith("FAILED left/test_a.py::test_fails - AssertionError: for good")
    assert said.endswith(": exit code 1\n")


def test_many_failures_are_no_accident(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    many = dict.fromkeys("abcd", ONCE)
    code, said = judge(tmp_path, capfd, many, {"z": PASSES})
    assert code == 1
    assert "once more" not in said
    assert said.count("\nFAILED left/") == 4


@pytest.mark.parametrize("broken", ["import nothing_of_that_name\n", "def test_x(:\n"])
def test_tests_that_cannot_be_run_are_not_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], broken: str
) -> None:
    code, said = judge(tmp_path, capfd, {"a": broken}, {"b": PASSES})
    assert code != 0
    assert "once more" not in said
    assert "ERROR left/test_a.py" in said.splitlines()[-3]


MARKED = f"""
import time
import pytest
@pytest.{script.MARK}
def test_long(): time.sleep(0.01)
def test_short(): time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("chosen", "named", "last"),
    [("not long", "test_short", ["left: passed", "right: passed"]), ("long", "test_long", ["left: passed"])],
)
def test_long_tests_are_run_by_themselves_and_the_slowest_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], chosen: str, named: str, last: list[str]
) -> None:
    options = ("-m", chosen, "--durations-min=0.005")
    code, said = judge(tmp_path, capfd, {"a": MARKED}, {"b": PASSES}, *options)
    assert code == 0
    _, _, after = said.partition("\nslowest:\n")
    assert {"test_long", "test_short"} & {line.split("::")[-1] for line in after.splitlines()} == {named}
    assert after.splitlines()[-len(last) :] == last


def test_a_part_without_tests_of_the_kind_fails_nothing_and_no_test_at_all_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, said = judge(tmp_path, capfd, {"a": MARKED}, {"b": PASSES}, "-k", "short")
    assert (code, said.splitlines()[-2:]) == (0, ["left: passed", "right: has no such tests"])
    assert script.all_tests({"left": ("left",)}, ["-k", "nothing", "-p", "no:cacheprovider"], tmp_path) == 5


def test_every_test_of_the_repository_is_in_one_part() -> None:
    parts = script.with_rest(script.ROOT)
    files = [file for paths in parts.values() for file in script.files_in(paths, script.ROOT)]
    there = [str(path.relative_to(script.ROOT)) for path in (script.ROOT / "tests").rglob("test_*.py")]
    assert sorted(files) == sorted(path for path in there if not path.startswith("tests/gpu/"))


def test_a_mark_that_a_module_beside_gives_counts(tmp_path: Path) -> None:
    for name, text in {"test_a.py": PASSES, "seeds.py": MARKED}.items():
        (tmp_path / name).write_text(text)

    assert script.marked({"left": (".",)}, tmp_path) == {"left": ["test_a.py"]}


def test_each_run_begins_with_another_file_of_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("test_a.py", "test_b.py", "test_c.py"):
        (tmp_path / name).write_text(MARKED)

    def order(turn: str) -> list[str]:
        monkeypatch.setenv(script.TURN, turn)
        return [file[5] for file in script.marked({"left": (".",)}, tmp_path)["left"]]

    assert [order(turn) for turn in ("", "4", "2")] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]


def test_long_tests_that_would_begin_too_late_are_left_out_and_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERKIT_TEST_UNTIL", "1")
    monkeypatch.setenv("PYTHONPATH", f"{script.ROOT}:{script.ROOT / 'tests'}")
    code, said = judge(tmp_path, capfd, {"a": MARKED}, {"b": PASSES}, "-p", "tests.conftest")
    assert code == 0
    assert "1 passed, 1 skipped" in said
    assert said.splitlines()[-3] == "LEFT OUT, no time was left: left/test_a.py::test_long"


def test_what_failed_has_more_time_to_begin_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERKIT_TEST_UNTIL", "1000")
    seen = "import os\nprint('until', os.environ['CLUSTERKIT_TEST_UNTIL'])\n"
    code, said = judge(tmp_path, capfd, {"a": PASSES}, {"b": seen + ONCE}, "-s")
    assert code == 0
    assert [line.split()[-1] for line in said.splitlines() if "until " in line] == ["1000.0", "1600.0"]


def test_what_failed_and_is_left_out_alone_has_not_passed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{script.ROOT}:{script.ROOT / 'tests'}")
    left_out = "    if known: LATE.append(request.node.nodeid); pytest.skip()\n"
    late = ONCE.replace("    assert known", f"{left_out}    assert known")
    late = "import pytest\nfrom tests.conftest import LATE\n" + late.replace("fails_once()", "fails_once(request)")
    code, said = judge(tmp_path, capfd, {"a": PASSES}, {"b": late}, "-p", "tests.conftest")
    assert code == 1
    assert said.splitlines()[-2:] == [
        "LEFT OUT, no time was left: right/test_b.py::test_fails_once",
        "alone, right/test_b.py: passed",
    ]


def test_a_part_that_died_without_a_word_is_no_success(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dies = "import os\ndef test_dies(): os._exit(1)\ndef test_never(): assert False\n"
    code, said = judge(tmp_path, capfd, {"a": dies}, {"b": ONCE})
    assert code == 1
    assert "once more" not in said


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("tests/unit/test_losses.py -k gspo", True),
        ("-x tests/unit", True),
        ("-k trainer", False),
        ("--deselect tests/unit/test_losses.py", False),
        ("-k gspo -x", False),
    ],
)
def test_which_words_name_tests(words: str, named: bool) -> None:
    assert script.names_tests(words.split()) is named


def test_a_part_tells_its_own_processor_time_and_that_of_its_children(tmp_path: Path) -> None:
    burn = "import time\nwhile time.process_time() < 1.0: pass"
    test = f"import subprocess, sys\ndef test_burns(): subprocess.run([sys.executable, '-c', {burn!r}], check=True)\n"
    (tmp_path / "test_a.py").write_text(test)
    (tmp_path / "test_b.py").write_text(PASSES)

    busy, idle = script.run_parts({"busy": ["test_a.py"], "idle": ["test_b.py"]}, ["-p", "no:cacheprovider"], tmp_path)

    assert (busy.code, idle.code) == (0, 0)
    assert busy.cpu >= 1.0 + 0.5 * idle.cpu


def test_what_a_part_compiles_is_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    keeps = "import sys\ndef test_keeps(): assert not sys.dont_write_bytecode\n"

    assert judge(tmp_path, capfd, {"a": keeps}, {"b": PASSES})[0] == 0
