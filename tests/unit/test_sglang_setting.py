"""Options that SGLang gets because of the GPU and the packages it runs with.

SGLang itself needs a GPU: its packages are files of the same names here.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpuhost import broken_nvidia_smi, nvidia_smi, stand_in
from safetensors.torch import save_file

from trainer.engines import launching, sglang_setting
from trainer.engines.options import MEMORY_SAVER, ServerOptions, Setting
from trainer.engines.process import ServerStartError
from trainer.engines.sglang_dialect import SGLangDialect
from trainer.engines.sglang_setting import GPU, Packages, choose, compiler_environment, look
from trainer.engines.vllm_dialect import VLLMDialect

KNOWN = frozenset({"--attention-backend", "--cuda-graph-backend-prefill", "--disable-prefill-cuda-graph"})
OPTIONS = Path(__file__).parents[1] / "cases" / "sglang" / "options_0.5.17.json"
HOPPER, ADA = 9, 8
FA3 = ("--attention-backend", "fa3")
NO_GRAPHS = "--cuda-graph-backend-prefill=disabled"


def chosen(
    packages: Packages, major: int | None, *given: str, compiles: bool = True, memory: int = 143771, **options: Any
) -> tuple[str, ...]:
    one = ServerOptions(Path(), Path(), flags=given, **options)
    flags, reasons = choose(packages, GPU(major, memory), compiles, one)
    assert bool(flags) == bool(reasons)
    return flags


def test_what_is_chosen() -> None:
    full = Packages("0.5.17", KNOWN, fa3=True)
    assert chosen(full, HOPPER) == (*FA3, NO_GRAPHS)
    assert chosen(Packages("0.5.17", KNOWN), HOPPER) == (NO_GRAPHS,), "its kernels lack FlashAttention 3"
    assert chosen(full, ADA) == (NO_GRAPHS,), "SGLang's own choice"
    assert chosen(full, ADA, compiles=False) == ("--attention-backend", "triton", NO_GRAPHS)
    assert chosen(full, HOPPER, compiles=False) == (*FA3, NO_GRAPHS)
    assert chosen(full, None) == (NO_GRAPHS,), "nvidia-smi does not tell"
    old = Packages("0.5.6", frozenset({"--attention-backend", "--disable-piecewise-cuda-graph"}), fa3=True)
    assert chosen(old, HOPPER) == (*FA3, "--disable-piecewise-cuda-graph")
    assert chosen(Packages(), HOPPER) == (), "nothing is known of this Python"


def test_sglang_knows_every_option_that_it_is_given(tmp_path: Path) -> None:
    """Options and choices as the parser of SGLang 0.5.17 has them, recorded from it."""
    known = json.loads(OPTIONS.read_text(encoding="utf-8"))
    assert known["version"] in SGLangDialect.tried_versions
    everything = ServerOptions(tmp_path, tmp_path, context_length=8, max_running=800, deterministic=True)
    packages = Packages(known["version"], frozenset(known["options"]), fa3=True)
    for major, compiles in ((HOPPER, True), (ADA, False)):
        flags, _ = choose(
            packages,
            GPU(major, 81559),
            compiles,
            replace(everything, deterministic=False, expected=800, prefill_delay_ms=100.0),
        )
        assert len(flags) == 11
        words = [*SGLangDialect().argv(everything, 8000)[2:], *flags, MEMORY_SAVER]
        for word, value in zip(words, [*words[1:], ""], strict=True):
            option, _, attached = word.partition("=")
            assert not word.startswith("--") or option in known["options"], option
            if option in known["choices"]:
                assert (attached or value) in known["choices"][option]


def test_prompts_wait_for_others_where_the_run_asks_for_it(caplog: pytest.LogCaptureFixture) -> None:
    share, most = "--prefill-delayer-queue-min-ratio", "--prefill-delayer-max-delay-ms"
    packages = Packages("0.5.17", frozenset({"--enable-prefill-delayer", share, most}))
    assert chosen(packages, HOPPER) == ()
    assert chosen(packages, HOPPER, prefill_delay_ms=62.5) == ("--enable-prefill-delayer", share, "0.1", most, "62.5")
    assert chosen(packages, HOPPER, share, "0.3", prefill_delay_ms=100.0) == (), "the user has chosen"
    assert not caplog.messages
    assert chosen(Packages("0.5.6", frozenset({"--enable-prefill-delayer"})), HOPPER, prefill_delay_ms=100.0) == ()
    assert "servers.prefill_delay_ms does nothing" in caplog.text


def test_the_float32_output_layer_uses_tensor_cores_where_that_costs_no_precision() -> None:
    packages = Packages("0.5.17", frozenset({"--enable-tf32-matmul"}))
    tf32 = ("--enable-tf32-matmul",)
    assert chosen(packages, ADA) == tf32
    assert chosen(packages, None) == ()
    assert chosen(packages, ADA, fp32_head=False) == (), "there is no float32 in it"
    assert chosen(packages, ADA, deterministic=True) == ()
    assert chosen(packages, ADA, "--dtype", "float32") == ()
    assert chosen(packages, ADA, *tf32) == ()


def test_graphs_reach_as_far_as_the_requests_that_are_expected() -> None:
    packages = Packages("0.5.17", frozenset({"--cuda-graph-max-bs-decode"}))
    assert chosen(packages, HOPPER, expected=257) == ("--cuda-graph-max-bs-decode", "288")
    assert chosen(packages, HOPPER, expected=544) == ("--cuda-graph-max-bs-decode", "544")
    assert chosen(packages, HOPPER, expected=4096) == ("--cuda-graph-max-bs-decode", "640")
    assert chosen(packages, HOPPER, expected=256) == ()
    assert chosen(packages, HOPPER, expected=800, max_running=200) == (), "no more are let in"
    assert chosen(packages, HOPPER, expected=800, memory=24576) == (), "SGLang's own are smaller there, for the memory"
    assert chosen(packages, HOPPER, "--cuda-graph-max-bs-decode=64", expected=800) == ()
    assert chosen(packages, HOPPER, "--disable-cuda-graph", expected=800) == ()


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (("--attention-backend", "flashinfer"), (NO_GRAPHS,)),
        (("--attention-backend=triton",), (NO_GRAPHS,)),
        (("--decode-attention-backend", "triton"), (NO_GRAPHS,)),
        (("--cuda-graph-backend-prefill", "breakable"), FA3),
        (("--cuda-graph-config={}",), FA3),
        (("--disable-prefill-cuda-graph", "--attention-backend", "fa3"), ()),
    ],
)
def test_what_the_user_says_wins(given: tuple[str, ...], left: tuple[str, ...]) -> None:
    assert chosen(Packages("0.5.17", KNOWN, fa3=True), HOPPER, *given) == left


class TestServer:
    """A server as it is started: by an interpreter that writes its command line down, and ends."""

    @pytest.fixture
    def options(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerOptions:
        site = tmp_path / "site"
        for file, text in {
            "sglang/__init__.py": "raise SystemExit('SGLang was imported')",
            "sglang/srt/server_args.py": "class ServerArgs:\n    attention_backend: str = ''\n"
            "    cuda_graph_backend_prefill: str = ''\n",
            "sglang-0.5.17.dist-info/METADATA": "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.17\n",
            "sgl_kernel/__init__.py": "raise SystemExit('the kernels were imported')",
            "sgl_kernel/flash_ops.abi3.so": "",
            "sitecustomize.py": f"import sys\nsys.prefix = {str(tmp_path / 'venv')!r}\n",
            "../venv/cuda/bin/nvcc": "",
        }.items():
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            (site / file).write_text(text)
        (tmp_path / "venv/cuda/bin/nvcc").chmod(0o755)
        model = tmp_path / "model"
        model.mkdir()
        save_file({"embed": torch.zeros(4, 2)}, model / "model.safetensors")
        (model / "config.json").write_text(
            json.dumps({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 9})
        )
        programs = tmp_path / "bin"
        programs.mkdir()
        stand_in(
            programs,
            "python",
            f'case "$*" in *sglang_probe.py*) PYTHONPATH={site} exec {sys.executable} "$@" ;; esac\n'
            f'printf "%s " "$@" CUDA_HOME=$CUDA_HOME PYTHONPATH=$PYTHONPATH >>{tmp_path}/started\nexit 1',
        )
        (programs / "cat").symlink_to(str(shutil.which("cat")))
        monkeypatch.setenv("PATH", str(programs))  # without any nvcc
        for name in ("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(sglang_setting, "SYSTEM_CUDA", tmp_path / "no-cuda")
        monkeypatch.setattr(launching, "_told", set())
        look.cache_clear()
        return ServerOptions(model, tmp_path / "log", python=str(programs / "python"))

    def started(self, options: ServerOptions) -> str:
        with pytest.raises(ServerStartError):
            asyncio.run(launching.launch("sglang", options))
        return (options.log.parent / "started").read_text()

    def test_it_gets_them_before_the_users_and_the_log_says_so_once(
        self, options: ServerOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        nvidia_smi(tmp_path / "bin")
        caplog.set_level(logging.INFO)
        mine = replace(options, flags=("--mine", "1"))
        line = self.started(mine)
        cache = "--radix-cache-backend clusterkit"
        assert line.index(f"--attention-backend fa3 --cuda-graph-backend-prefill=disabled {cache} --mine 1") > 0
        assert f"CUDA_HOME={tmp_path}/venv/cuda " in line, "a driver alone brings no compiler"
        self.started(mine)
        told = [record.getMessage() for record in caplog.records if "fa3" in record.getMessage()]
        assert len(told) == 1
        assert told[0].startswith(
            f"server-0 gets --attention-backend fa3 --cuda-graph-backend-prefill=disabled {cache} "
            "CLUSTERKIT_SGLANG_OUTPUT_LAYER=exact, because of a Hopper"
        )
        assert told[0].endswith("servers.flags (eval: --server-flag) takes others")

    def test_it_finds_the_cache_that_it_is_given(self, options: ServerOptions, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", "/mine")
        line = self.started(options)
        places = line.partition("PYTHONPATH=")[2].strip()
        assert places.endswith(f"{os.pathsep}/mine")
        script = "from importlib.metadata import entry_points\n"
        script += "print(*(one.load() for one in entry_points(group='sglang.srt.plugins')))"
        asked = [sys.executable, "-c", script]
        found = subprocess.run(asked, capture_output=True, text=True, env={"PYTHONPATH": places}, check=True).stdout
        assert found.startswith("<function register")

    def test_a_float32_output_layer_goes_without_copies_unless_it_must_be_deterministic(
        self, options: ServerOptions, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def layer(**mine: Any) -> str:
            given = sglang_setting.setting(replace(options, **mine)).environment
            return given.get("CLUSTERKIT_SGLANG_OUTPUT_LAYER", "SGLang's")

        assert layer() == "exact"
        assert layer(flags=("--disable-radix-cache", "--enable-tf32-matmul")) == "exact", "the cache is another matter"
        assert layer(fp32_head=False) == "SGLang's"
        assert layer(deterministic=True) == "SGLang's"
        assert layer(env={"SGLANG_PLUGINS": "others"}) == "SGLang's"
        assert layer(env={"PYTHONPATH": "/mine"}) == "SGLang's"
        monkeypatch.setenv("CLUSTERKIT_SGLANG_OUTPUT_LAYER", "sglang")
        assert layer() == "sglang", "what the user says wins"

    @pytest.mark.parametrize(
        "mine",
        [
            {"flags": ("--disable-radix-cache",)},
            {"flags": ("--radix-cache-backend=flexkv",)},
            {"flags": ("--enable-int8-mamba-checkpoint",)},  # which refuses any other cache
            {"env": {"SGLANG_PLUGINS": "others"}},
            {"env": {"PYTHONPATH": "/mine"}},
        ],
    )
    def test_a_user_who_chooses_the_cache_or_the_modules_is_left_alone(
        self, options: ServerOptions, mine: dict[str, Any]
    ) -> None:
        assert "--radix-cache-backend clusterkit" not in self.started(replace(options, **mine))

    def test_without_a_driver_that_answers_it_is_started_all_the_same(
        self, options: ServerOptions, tmp_path: Path
    ) -> None:
        broken_nvidia_smi(tmp_path / "bin")
        line = self.started(options)
        assert "--attention-backend" not in line
        assert NO_GRAPHS in line


def test_the_compiler_that_fits_pytorch_is_used_unless_the_user_names_one(tmp_path: Path) -> None:
    wheels, own = tmp_path / "wheels", tmp_path / "own"
    stand_in_program(wheels / "bin" / "nvcc")
    stand_in_program(own / "bin" / "nvcc")
    stand_in_program(tmp_path / "venv" / "ninja")
    packages = Packages(cuda_home=str(wheels), bin=str(tmp_path / "venv"))
    found = compiler_environment(packages, {"PATH": "/nowhere"})
    assert found == {"CUDA_HOME": str(wheels), "PATH": f"{tmp_path}/venv{os.pathsep}/nowhere"}
    assert "CUDA_HOME" not in compiler_environment(packages, {"PATH": "/nowhere", "CUDA_HOME": str(own)})
    assert compiler_environment(packages, {"PATH": str(own / "bin")})["CUDA_HOME"] == str(wheels)
    assert compiler_environment(Packages(), {"PATH": "/nowhere"}) == {}


def test_a_cache_that_must_evict_evicts_a_piece() -> None:
    """The cache is a stand-in: SGLang's own is measured by benchmarks/cache_eviction.py, where its packages are."""
    spec = importlib.util.spec_from_file_location("side", sglang_setting.SGLANG_SIDE / "clusterkit_sglang.py")
    assert spec
    assert spec.loader
    side = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(side)

    @dataclass(frozen=True)
    class Params:
        num_tokens: int
        other: str = "kept"

    class Cache:
        def __init__(self) -> None:
            self.evicted: list[Params] = []

        def evictable_size(self) -> int:
            return 32 * 100

        def evict(self, params: Params) -> str:
            self.evicted.append(params)
            return "SGLang's answer"

    cache = side.evict_in_pieces(Cache())
    assert cache.evict(Params(7)) == "SGLang's answer"
    cache.evict(Params(7000))
    assert cache.evicted == [Params(100), Params(7000)]


def stand_in_program(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    path.chmod(0o755)


def test_a_dialect_without_a_choice_gets_nothing(tmp_path: Path) -> None:
    assert VLLMDialect().adapted(ServerOptions(tmp_path, tmp_path)) == Setting()
