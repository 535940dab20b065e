"""How `make test` judges: halves side by side, what failed once more alone, everything named at the end."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_tests.py"
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


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_tests", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def judge(
    script: ModuleType, root: Path, capfd: pytest.CaptureFixture[str], left: dict[str, str], right: dict[str, str]
) -> tuple[int, str]:
    """Exit code and output for two halves of test files."""
    (root / "pytest.ini").write_text("[pytest]\n")
    for half, files in {"left": left, "right": right}.items():
        (root / half).mkdir()
        for name, text in files.items():
            (root / half / f"test_{name}.py").write_text(text)
    code = script.all_tests({"left": ("left",), "right": ("right",)}, ["-p", "no:cacheprovider"], root)
    return code, capfd.readouterr().out


def test_all_pass(script: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, said = judge(script, tmp_path, capfd, {"a": PASSES}, {"b": PASSES})
    assert code == 0
    assert said.endswith("left: passed\nright: passed\n")
    assert "once more" not in said


def test_what_passes_alone_is_named_and_fails_nothing(
    script: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, said = judge(script, tmp_path, capfd, {"a": PASSES}, {"b": ONCE})
    assert code == 0
    assert "once more, alone: right/test_b.py\n" in said
    first, *rest = said.splitlines()[-4:]
    assert first.startswith("FAILED right/test_b.py::test_fails_once - AssertionError: in the way")
    assert rest == ["left: passed", "right: exit code 1", "alone, right/test_b.py: passed"]


def test_what_fails_alone_too_fails_the_run(
    script: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, said = judge(script, tmp_path, capfd, {"a": FAILS}, {"b": ONCE})
    assert code == 1
    assert "once more, alone: left/test_a.py right/test_b.py\n" in said or "right/test_b.py left/test_a.py\n" in said
    assert said.splitlines()[-2].startswith("FAILED left/test_a.py::test_fails - AssertionError: for good")
    assert said.endswith(": exit code 1\n")


def test_many_failures_are_no_accident(script: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    many = dict.fromkeys("abcd", ONCE)
    code, said = judge(script, tmp_path, capfd, many, {"z": PASSES})
    assert code == 1
    assert "once more" not in said
    assert said.count("\nFAILED left/") == 4


@pytest.mark.parametrize("broken", ["import nothing_of_that_name\n", "def test_x(:\n"])
def test_tests_that_cannot_be_run_are_not_tried_again(
    script: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str], broken: str
) -> None:
    code, said = judge(script, tmp_path, capfd, {"a": broken}, {"b": PASSES})
    assert code != 0
    assert "once more" not in said
    assert "ERROR left/test_a.py" in said.splitlines()[-3]
