"""`make gpu`: what it refuses before it installs anything, and an installation from a folder of wheels.

The wheels are small stand-ins, so that the test needs no network and no GPU; the installers, uv and Python are real.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from gpuhost import NOT_RUNNING, broken_nvidia_smi, first_in_path, nvidia_smi, stand_in
from packaging.utils import canonicalize_name, parse_wheel_filename
from realparts import require

from scripts import gpu_lock

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "scripts" / "gpu.sh"
LOCK = REPOSITORY / "requirements-gpu.txt"
PIN = re.compile(r"([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}")
# Makes the editable install of this repository in place of hatchling: a .pth file and the command.
BACKEND = """
import os, zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    info = "clusterkit-0.0.0.dist-info"
    files = {
        "clusterkit_here.pth": os.getcwd(),
        f"{info}/METADATA": "Metadata-Version: 2.1\\nName: clusterkit\\nVersion: 0.0.0\\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
        f"{info}/entry_points.txt": "[console_scripts]\\nclusterkit = standin.main:main\\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(os.path.join(folder, "clusterkit-0.0.0-py3-none-any.whl"), "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return "clusterkit-0.0.0-py3-none-any.whl"
"""


def make_gpu(bin_folder: Path, venv: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = first_in_path(bin_folder, Path(sys.executable).parent)
    return subprocess.run(
        ["bash", str(SCRIPT), *words],
        env={**os.environ, "PATH": path, "GPU_VENV": str(venv), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def wheel(folder: Path, name: str, files: dict[str, str]) -> str:
    """Write a wheel; returns its line in a lock file."""
    info = f"{name}-1.0.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    file = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    return f"{name}==1.0 --hash=sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}\n"


class TestRefused:
    """Each before anything is installed, in one sentence that says what to do, with exit code 2."""

    def refusal(self, tmp_path: Path, bin_folder: Path) -> str:
        done = make_gpu(bin_folder, tmp_path / "venv")
        assert (done.returncode, done.stdout) == (2, "")
        assert not (tmp_path / "venv").exists()
        (line,) = done.stderr.splitlines()
        return line

    def test_without_a_driver(self, tmp_path: Path) -> None:
        require(shutil.which("nvidia-smi") is None, "needs a machine without nvidia-smi")
        line = self.refusal(tmp_path, tmp_path)
        assert "no NVIDIA driver here" in line
        assert "install NVIDIA's driver 580 or newer" in line

    @pytest.mark.parametrize(
        ("message", "remedy"),
        [
            (NOT_RUNNING, "modprobe nvidia or reboot"),
            ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95", "reboot, and"),
        ],
    )
    def test_with_a_driver_that_does_not_run(self, tmp_path: Path, message: str, remedy: str) -> None:
        broken_nvidia_smi(tmp_path, message)
        line = self.refusal(tmp_path, tmp_path)
        assert message.splitlines()[0] in line
        assert remedy in line

    def test_with_a_driver_that_is_too_old(self, tmp_path: Path) -> None:
        nvidia_smi(tmp_path, cuda="12.8")
        line = self.refusal(tmp_path, tmp_path)
        assert "driver 580.159.04 knows CUDA 12 only" in line
        assert "install NVIDIA's driver 580 or newer" in line

    def test_with_a_gpu_that_is_too_old(self, tmp_path: Path) -> None:
        nvidia_smi(tmp_path, capability="7.5")
        assert "compute capability 7.5, and SGLang's kernels need 8.0" in self.refusal(tmp_path, tmp_path)

    def test_without_room(self, tmp_path: Path) -> None:
        nvidia_smi(tmp_path)
        stand_in(tmp_path, "df", "echo Filesystem; echo '/dev/vda 100000000 92000000 8000000 92% /'")
        line = self.refusal(tmp_path, tmp_path)
        assert re.search(r"need about \d+ GB, and the disk of .*/venv has 8 GB free: make room", line)

    @pytest.mark.parametrize("answers", [("Darwin", "arm64"), ("Linux", "aarch64")])
    def test_on_another_system_or_processor(self, tmp_path: Path, answers: tuple[str, str]) -> None:
        stand_in(tmp_path, "uname", f'[ "$1" = -s ] && echo {answers[0]} || echo {answers[1]}')
        line = self.refusal(tmp_path, tmp_path)
        assert f"this is {answers[0]} on {answers[1]}: make demo trains without a GPU" in line


class TestFromAFolderOfWheels:
    @pytest.fixture
    def host(self, tmp_path: Path) -> tuple[Path, dict[str, str]]:
        """A host with a driver and a compiler; its package manager would say so if it were asked for something."""
        path = first_in_path(Path(sys.executable).parent)
        require(shutil.which("uv", path=path) is not None, "needs uv: make setup")
        programs, wheels = tmp_path / "bin", tmp_path / "wheels"
        programs.mkdir()
        wheels.mkdir()
        nvidia_smi(programs)
        for name, body in {"c++": "", "apt-get": "", "ldconfig": "echo libnuma.so.1"}.items():
            stand_in(programs, name, body)
        lock = tmp_path / "lock.txt"
        lock.write_text(
            "# Three; 3 wheels, 0.0 GB.\n"
            + wheel(wheels, "compiler", {"nvidia/cu13/bin/nvcc": "", "nvidia/cu13/lib/libcudart.so.13": "cudart"})
            + wheel(wheels, "hatchling", {"hatchling/__init__.py": "", "hatchling/build.py": BACKEND})
            + wheel(wheels, "standin", {"standin/__init__.py": "", "standin/main.py": "def main(): print('it runs')\n"})
        )
        version = "{}.{}".format(*sys.version_info[:2])
        settings = {"GPU_LOCK": str(lock), "GPU_WHEELS": str(wheels), "GPU_PYTHON": version}
        return programs, {**settings, "GPU_DISK_GB": "0"}  # of SGLang's and CUDA's wheels, which these are not

    def test_it_is_installed_found_done_and_mended(self, tmp_path: Path, host: tuple[Path, dict[str, str]]) -> None:
        programs, settings = host
        venv = tmp_path / "venv"
        done = make_gpu(programs, venv, **settings)
        assert done.returncode == 0, done.stderr
        command = [str(venv / "bin" / "clusterkit")]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "it runs\n"
        (venv / "mine.txt").write_text("of the user's")
        assert (venv / "cuda" / "bin" / "nvcc").exists()
        assert (venv / "cuda" / "lib64" / "libcudart.so").read_text() == "cudart", "what -lcudart looks for"

        # Nothing is installed again; an interrupted installation, with a package half there, goes on.
        assert make_gpu(programs, venv, **settings).stderr == ""
        next(venv.rglob("standin/main.py")).unlink()
        (venv / ".ready").unlink()
        again = make_gpu(programs, venv, **settings)

        assert again.returncode == 0, again.stderr
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "it runs\n"
        assert (venv / "mine.txt").exists()

    @pytest.mark.parametrize("fault", ["missing", "another build"])
    def test_a_wheel_that_is_not_the_locked_one(
        self, tmp_path: Path, host: tuple[Path, dict[str, str]], fault: str
    ) -> None:
        programs, settings = host
        wheels = Path(settings["GPU_WHEELS"])
        if fault == "missing":
            (wheels / "standin-1.0-py3-none-any.whl").unlink()
        else:
            wheel(wheels, "standin", {"standin/__init__.py": "", "standin/main.py": "def main(): print('other')\n"})
        done = make_gpu(programs, tmp_path / "venv", **settings)
        assert done.returncode == 2
        assert f"gpu: {wheels} lacks a package, or holds another build of it" in done.stderr
        assert not (tmp_path / "venv" / ".ready").exists()

    def test_a_folder_without_uv_where_path_has_none(self, tmp_path: Path, host: tuple[Path, dict[str, str]]) -> None:
        programs, settings = host
        (programs / "python3").symlink_to(sys._base_executable)  # type: ignore[attr-defined]
        require(shutil.which("uv", path="/usr/bin:/bin") is None, "needs a system without uv of its own")
        lock = Path(settings["GPU_LOCK"])
        lock.write_text(f"{lock.read_text()}uv==0.1 --hash=sha256:{'0' * 64}\n")
        path = f"{programs}:/usr/bin:/bin"
        done = make_gpu(programs, tmp_path / "venv", **settings, PATH=path, GPU_TOOLS=str(tmp_path / "tools"))
        assert done.returncode == 2
        assert f"gpu: {settings['GPU_WHEELS']} lacks a package, or holds another build of it" in done.stderr
        assert not (tmp_path / "venv").exists()

    @pytest.mark.parametrize("words", [[], ["wheels"]], ids=["use", "fill"])
    def test_what_is_no_folder(self, tmp_path: Path, host: tuple[Path, dict[str, str]], words: list[str]) -> None:
        programs, settings = host
        (tmp_path / "file").write_text("")
        done = make_gpu(programs, tmp_path / "venv", *words, **{**settings, "GPU_WHEELS": str(tmp_path / "file")})
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2
        assert f"gpu: GPU_WHEELS={tmp_path}/file " in line

    def test_another_python_is_left_alone(self, tmp_path: Path, host: tuple[Path, dict[str, str]]) -> None:
        programs, settings = host
        (tmp_path / "venv" / "bin").mkdir(parents=True)
        (tmp_path / "venv" / "bin" / "python").symlink_to(sys.executable)
        done = make_gpu(programs, tmp_path / "venv", **{**settings, "GPU_PYTHON": "2.7"})
        assert done.returncode == 2
        assert "holds Python" in done.stderr
        assert "move it away, then run make gpu again" in done.stderr


class TestLock:
    """requirements-gpu.txt is made by scripts/gpu_lock.py, which also sees that every package has a wheel that fits."""

    def pins(self) -> dict[str, str]:
        lines = [line for line in LOCK.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        found = [PIN.fullmatch(line) for line in lines]
        assert all(found), "a name, a version and a hash on every line, and no address"
        return {one[1]: one[2] for one in found if one}

    def test_its_versions_are_those_of_the_image(self) -> None:
        text = (REPOSITORY / "images" / "versions.env").read_text(encoding="utf-8")
        image = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
        pins = self.pins()
        assert list(pins) == sorted(map(canonicalize_name, pins))
        for name, variable in {
            "sglang": "SGLANG_VERSION",
            "sglang-kernel": "SGLANG_KERNEL_VERSION",
            "torch": "TORCH_VERSION",
            "transformers": "TRANSFORMERS_VERSION",
        }.items():
            assert pins[name] == image[variable], f"{name}: make gpu-lock"
        assert pins["nvidia-cuda-nvcc"].startswith("13.0."), "the compiler is that of torch's CUDA"
        assert {"uv", "pip", "hatchling", "hatch-vcs", "ninja", "math-verify", "tensorboard"} <= set(pins)

    def test_the_wheel_that_fits_is_the_one_that_is_locked(self) -> None:
        def best(*names: str) -> str:
            wheels = [{"url": f"https://host/a/{name}"} for name in names]
            package = {"name": "one", "version": "1", "wheels": wheels}
            return str(gpu_lock.best_wheel(package, gpu_lock.wheel_tags())["url"]).rpartition("/")[2]

        mac, linux = "one-1-cp312-cp312-macosx_11_0_arm64.whl", "one-1-cp312-cp312-manylinux_2_28_x86_64.whl"
        stable, pure = "one-1-cp39-abi3-manylinux2014_x86_64.whl", "one-1-py3-none-any.whl"
        assert best(pure, mac, stable, linux) == linux
        assert best(pure, mac, stable) == stable
        assert best(mac, pure) == pure
        assert parse_wheel_filename(linux)[0] == "one"
        with pytest.raises(SystemExit, match=r"one 1 has no wheel for Python 3\.12 on Linux x86_64"):
            best(mac, "one-1-cp312-cp312-manylinux_2_39_x86_64.whl", "one-1-cp313-cp313-manylinux_2_28_x86_64.whl")
