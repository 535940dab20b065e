"""Every command line of README and of the quick starts under docs/ is run, as far as a machine without GPUs goes.

They find a finished run, and files and folders of the names that the pages use. What trains is run with --dry-run here:
tests/learning trains the tiny preset, tests/cluster goes the way of the cluster's commands on real hosts, and
tests/unit/test_gpu_setup.py that of `make gpu`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from docpages import PAGES, README, REPOSITORY, lines_of_code, literal, quick_start
from runs import Trial

from trainer.paths import RunPaths

LOG = REPOSITORY / "tests/cases/runlog/areal_v0.2_master_worker.log"
NAMED = ("tiny-recall/run1", "tiny-recall/run2", "OTHER-EXPERIMENT/run1", "EXPERIMENT/TRIAL")
"""Runs that pages name."""
SECONDS = 120
REFUSED = {
    "train --preset (7B_n4|1.5B)": "make a cluster with clusterkit setup",
    "train --preset 135M(_read)?( |$)": "takes 1 GPU, and none is usable here",
    "train --preset 135M_cpu": "has not been fetched yet",
    **({} if shutil.which("sbatch") else {"train .*--slurm": "sbatch|Slurm"}),
    "setup .*--private-key-file": "there is no private key",
    "(setup|check) --hostnames": "gpu04 is not known",
    "eval --model-path (7B_n4-math/run1|ADAPTER)": "no run 7B_n4-math/run1|no folder and no asset",
    "eval .*(math_500|ruler_hqa)": "clusterkit assets get (math_500|hotpotqa)",
    "diagnose --apply": "nothing to apply",
    "assets get hotpotqa --from FOLDER": "lacks questions.jsonl and documents.jsonl",
    "assets get smollm2-135m": "Check the network",
    "serve add": "has not started engine servers",
}
"""What needs GPUs, hosts, a network or a fault, by its words, and how it is refused without."""
ENDLESS = r"dashboard|eval --watch-dir"
"""What goes on until Ctrl-C."""


def quick_starts() -> list[str]:
    """The command lines, each once."""
    return list(dict.fromkeys(line for page in PAGES for line in literal(lines_of_code(quick_start(page)))))


LINES = [
    pytest.param(line, marks=pytest.mark.long) if "recall@64" in line else line
    for line in quick_starts()
    if not line.startswith("make ")
]


@pytest.fixture(scope="module")
def place(reference: Trial, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the command lines name."""
    folder = tmp_path_factory.mktemp("place")
    fileroot, own = folder / "runs", reference.paths
    for name in NAMED:
        experiment, trial = name.split("/")
        config = reference.config.model_copy(
            update={"fileroot": str(fileroot), "experiment_name": experiment, "trial_name": trial}
        )
        paths = RunPaths.of(config)
        shutil.copytree(own.logs, paths.logs)
        shutil.copytree(own.checkpoints, paths.checkpoints)
        (paths.logs / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    own_classes = re.search(
        r"```python\n(.*?)```", (REPOSITORY / "docs/custom.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert own_classes is not None
    (folder / "shopping.py").write_text(own_classes[1], encoding="utf-8")
    for name in ("FILE", "main.log"):
        shutil.copy(LOG, folder / name)
    (folder / "FOLDER").mkdir()
    for number in range(60):
        text = (
            f"Arnby {number} is a town in Greth {number}. Its mill was built by Ada {number} Quill in {1700 + number}."
        )
        (folder / "FOLDER" / f"{number}.txt").write_text(f"Arnby {number}\n\n{text}\n", encoding="utf-8")
    (folder / "chapter-1.txt").write_text("The works were founded by Ada Quill.\n", encoding="utf-8")
    return folder


def _run(line: str, place: Path) -> tuple[int, str]:
    """Run a line in a shell, and end with Ctrl-C what does not end by itself; its exit code and all that it printed."""
    line = re.sub(r"^(\.venv-gpu/bin/)?clusterkit", "clusterkit", line)
    line = line.replace("CHECKPOINT", str(next((place / "runs/checkpoints").rglob("config.json")).parent))
    line += " --port 0" if "dashboard" in line else ""
    line += " --dry-run" if " train " in line and "--dry-run" not in line else ""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PIP_NO_INDEX": "1"}
    environment |= {f"CLUSTERKIT_{name}": str(place / name.lower()) for name in ("CACHE", "STATE", "DATA")}
    environment |= {"PYTHONPATH": str(REPOSITORY), "HOME": str(place)}
    process = subprocess.Popen(
        ["bash", "-c", f"exec {line}"],
        cwd=place,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    first = ""
    if re.search(ENDLESS, line):
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=SECONDS)
    return process.returncode, first + rest


@pytest.mark.parametrize("line", LINES, ids=str)
def test_a_quick_start_works_or_says_what_it_lacks(line: str, place: Path) -> None:
    code, said = _run(line, place)

    refusal = next((told for words, told in REFUSED.items() if re.search(f"clusterkit {words}", line)), None)
    assert "Traceback" not in said
    if refusal is None:
        assert code == (130 if "--watch-dir" in line else 0), said
        assert said.strip()
    else:
        assert code in (1, 2), said
        assert re.search(refusal, said), said


def test_the_targets_of_make_exist() -> None:
    targets = {word for line in quick_starts() if line.startswith("make ") for word in shlex.split(line)[1:]}
    names = sorted(word for word in targets if "=" not in word)
    done = subprocess.run(["make", "-n", *names], cwd=REPOSITORY, capture_output=True, text=True, check=False)

    assert {"demo", "gpu", "test"} <= set(names)
    assert done.returncode == 0, done.stderr


def test_the_commands_after_the_demo_leave_a_page(place: Path) -> None:
    text = README.read_text(encoding="utf-8")
    laptop = text[text.index("**A laptop.**") : text.index("**One NVIDIA GPU**")]
    assert {"clusterkit report", "clusterkit trace --heldout"} <= set(literal(lines_of_code(laptop)))
    code, said = _run("clusterkit report", place)

    assert code == 0, said
    assert list(place.glob("*.html"))
