"""`clusterkit doctor`: what this machine can run, what is wrong with it, and what to type next."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpuhost import broken_nvidia_smi, first_in_path, nvidia_smi, stand_in
from realparts import require


class Host:
    """A machine with other programs first in its PATH, an empty cache, and no runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.programs = folder, folder / "bin"
        self.programs.mkdir()
        self.settings: dict[str, str] = {}

    def doctor(self, *options: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "clusterkit.cli.main", "doctor", "--fileroot", str(self.folder / "runs")]
        cache = str(self.folder / "cache")
        environment = {**os.environ, "PATH": first_in_path(self.programs), "CLUSTERKIT_CACHE": cache}
        done = subprocess.run(
            [*command, *options],
            env={**environment, **self.settings},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done.stdout

    def text(self) -> str:
        """What it prints for people, without the breaks of its lines."""
        return " ".join(self.doctor().split())

    def report(self, **more: Any) -> dict[str, Any]:
        return dict(json.loads(self.doctor("--json", **more)))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def presets_of(report: dict[str, Any], state: str) -> dict[str, str]:
    return {one["preset"]: one["why"] for one in report["presets"] if one["state"] == state}


def python_with(host: Host, **packages: str) -> None:
    """Have GPUs run on a Python that says it has these packages."""
    answer = {"version": "3.12.3", "packages": packages, "cuda": "13.0"}
    file = host.folder / "packages.json"
    file.write_text(json.dumps(answer))
    lacks = "" if "sglang" in packages else "echo sglang"
    stand_in(host.programs, "gpu-python", f'case "$*" in *find_spec\\(n\\)*) {lacks} ;; *) cat {file} ;; esac')
    host.settings["CLUSTERKIT_GPU_PYTHON"] = str(host.programs / "gpu-python")


def test_a_machine_without_a_gpu(host: Host) -> None:
    require(shutil.which("nvidia-smi") is None, "needs a machine without nvidia-smi")
    report = host.report()
    assert report["can_run"]
    assert report["cores"] >= 1
    assert report["memory_bytes"] > 1e9
    assert report["pythons"][0]["path"] == sys.executable
    assert report["pythons"][0]["packages"]["torch"].startswith("2.")
    assert {"tiny", "memalpha-tiny"} <= set(presets_of(report, "ready"))
    assert "clusterkit assets get smollm2-135m" in presets_of(report, "wants")["135M_cpu"]
    assert presets_of(report, "no")["7B_n4"] == "takes 4 hosts of 8 GPUs"
    assert report["assets"]["smollm2-135m"] is False
    assert all(free > 0 for free in report["free_bytes"].values())
    assert report["next"][0]["command"] == "clusterkit train --preset tiny"
    text = host.text()
    assert "GPUs no GPU" in text
    assert "train here clusterkit train --preset tiny" in text


def test_it_fits_a_narrow_terminal(host: Host) -> None:
    nvidia_smi(host.programs)
    host.settings["COLUMNS"] = "60"
    long = [line for line in host.doctor().splitlines() if len(line) > 60]
    assert [line for line in long if str(host.folder) not in line and sys.prefix not in line] == []


def test_gpus_without_an_engine(host: Host) -> None:
    nvidia_smi(host.programs)
    report = host.report()
    assert [gpu["name"] for gpu in report["gpus"]] == ["NVIDIA H200"] * 2
    assert report["gpus"][0]["compute_capability"] == "9.0"
    assert (report["driver"], report["cuda"]) == ("580.159.04", "13.0")
    assert presets_of(report, "no")["135M"].endswith("make gpu")
    assert report["next"][0] == {"purpose": "install SGLang", "command": "make gpu"}
    assert "GPUs 2 NVIDIA H200 (140 GiB), driver 580.159.04, CUDA 13.0" in host.text()


def test_gpus_with_what_make_gpu_installs(host: Host) -> None:
    nvidia_smi(host.programs)
    python_with(host, torch="2.11.0", sglang="0.5.17", transformers="5.12.1")
    report = host.report()
    assert "clusterkit assets get smollm2-135m" in presets_of(report, "wants")["135M"]
    fitted = next(one["command"] for one in report["presets"] if one["preset"] == "1.5B_n1")
    assert fitted.startswith("clusterkit train --preset 1.5B_n1 n_gpus_per_node=2 "), "made for 8 GPUs, put on 2"
    assert [step["command"] for step in report["next"]][:2] == [
        "clusterkit assets get smollm2-135m",
        "clusterkit train --preset 135M",
    ]
    assert f"3.12.3 {host.programs}/gpu-python: PyTorch 2.11.0 (CUDA 13.0), sglang 0.5.17" in host.text()


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "modprobe nvidia"),
        ("Failed to initialize NVML: Driver/library version mismatch", "reboot the host"),
    ],
)
def test_a_driver_that_does_not_run(host: Host, message: str, fix: str) -> None:
    broken_nvidia_smi(host.programs, message)
    report = host.report()
    (finding,) = [one for one in report["findings"] if one["check"] == "driver"]
    assert finding["level"] == "fail"
    assert message in finding["message"]
    assert fix in finding["fix"]
    assert "tiny" in presets_of(report, "ready"), "CPUs still train"
    assert f"FAIL nvidia-smi fails: {message}" in host.text()


def test_an_old_driver_and_an_old_gpu(host: Host) -> None:
    nvidia_smi(host.programs, capability="7.5")
    table = host.programs / "gpus.csv"
    table.write_text(table.read_text().replace("580.159.04", "535.54.03"))
    messages = [one["message"] for one in host.report()["findings"]]
    assert "driver 535.54.03 is too old for CUDA 13, which needs 580 or newer" in messages
    assert "GPU 0 has compute capability 7.5; SGLang's kernels need 8.0" in messages


def test_a_small_gpu_gets_the_settings_that_fit(host: Host) -> None:
    nvidia_smi(host.programs)
    table = host.programs / "gpus.csv"
    table.write_text(table.read_text().replace("143771", "24564"))
    python_with(host, torch="2.11.0", sglang="0.5.17", transformers="5.12.1")
    verdict = next(one for one in host.report()["presets"] if one["preset"] == "135M")
    assert verdict["state"] == "wants" or "does not fit 24 GiB of GPU memory" in verdict["why"]


def test_nothing_can_run_without_pytorch(host: Host) -> None:
    bare = host.folder / "bare.py"
    bare.write_text(
        "import sys\nfrom importlib import metadata\nreal = metadata.version\n"
        "def version(name):\n    if name == 'torch': raise metadata.PackageNotFoundError(name)\n    return real(name)\n"
        "metadata.version = version\n"
    )
    (host.folder / "sitecustomize.py").write_text(bare.read_text())
    host.settings["PYTHONPATH"] = os.pathsep.join([str(host.folder), *filter(None, sys.path)])
    report = host.report(code=1)
    assert not report["can_run"]
    assert {"purpose": "install PyTorch", "command": "make setup"} in report["next"]
