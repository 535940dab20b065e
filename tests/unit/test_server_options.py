"""What can be found wrong with a server before it is started, and which GPUs it is given."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from clusterkit.config.resolve import resolve
from trainer.engines.dialects import make_dialect
from trainer.engines.launching import check_options
from trainer.engines.options import MEMORY_SAVER, ServerOptions, check_window, visible_devices
from trainer.errors import UserError
from trainer.serving.host import ServerHost, server_options

CONFIG = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 9}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"embed": torch.zeros(4, 2)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_what_cannot_start_is_said_before_anything_is_started(model: Path, tmp_path: Path) -> None:

    def refused(**changes: Any) -> str:
        options = ServerOptions(**{"model": model, "log": tmp_path / "log", "python": "/bin/true", **changes})
        with pytest.raises(UserError) as caught:
            check_options("sglang", options)
        return str(caught.value)

    check_options("sglang", ServerOptions(model, tmp_path / "log", gpus=(0, 1, 2), python="/bin/true"))
    assert "was given no GPU, and SGLang needs one" in refused(gpus=())
    assert "/no/python is no program: name the interpreter that has SGLang" in refused(python="/no/python")
    assert "SGLang is not installed" in refused(python=sys.executable)
    assert "2 GPUs a server do not divide the model's 9 attention heads" in refused(gpus=(0, 1))
    assert "each named once" in refused(gpus=(1, 1))
    assert "is no model folder" in refused(model=tmp_path / "nothing")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    assert "holds no .safetensors weights" in refused(model=tmp_path / "bare")
    (model / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["BertForMaskedLM"]}))
    assert "is a BertForMaskedLM, which generates no text" in refused()
    (model / "config.json").write_text(json.dumps({"num_attention_heads": 9}))
    assert "names no architecture" in refused()


def test_a_server_prepares_the_layers_that_adapters_are_for_not_embedding_and_output(
    model: Path, tmp_path: Path
) -> None:
    layer = {f"model.layers.0.{name}.weight": torch.zeros(2, 2) for name in ("self_attn.q_proj", "mlp.down_proj")}
    others = {name: torch.zeros(4, 2) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    experts = ("mlp.gate", "mlp.experts.0.up_proj")  # which get no adapters
    others |= {f"model.layers.0.{name}.weight": torch.zeros(2, 2) for name in experts}
    save_file(layer | others | {"model.layers.0.input_layernorm.weight": torch.zeros(2)}, model / "model.safetensors")

    def modules(**lora: Any) -> list[str]:
        settings = ["servers.engine=sglang", "weights.adapters=alone", "model.lora.rank=8"]
        config = resolve("135M", "needles", [*settings, *(f"model.lora.{k}={v}" for k, v in lora.items())]).config
        options = server_options(config, model, tmp_path / "log", "server-0", (0,), "127.0.0.1")
        assert ServerHost("sglang", options, tmp_path, 0).registration.targets == options.lora_targets
        argv = make_dialect("sglang").argv(options, 1)
        return list(argv[argv.index("--lora-target-modules") + 1 :])

    assert modules() == ["down_proj", "q_proj"]
    assert modules(targets="[v_proj]") == ["v_proj"]


@pytest.mark.parametrize(("engine", "flag"), [("vllm", "--max-loras"), ("sglang", "--max-loras-per-batch")])
def test_a_server_has_room_for_the_adapters_of_all_versions_in_use(
    model: Path, tmp_path: Path, engine: Any, flag: str
) -> None:
    def room(staleness: int) -> str:
        settings = [f"servers.engine={engine}", "weights.adapters=alone", "model.lora.rank=8"]
        config = resolve("135M", "needles", [*settings, f"rollout.max_staleness={staleness}"]).config
        options = server_options(config, model, tmp_path / "log", "server-0", (0,), "127.0.0.1")
        argv = make_dialect(engine).argv(options, 1)
        return argv[argv.index(flag) + 1]

    assert (room(0), room(2)) == ("1", "3")


def test_a_server_expects_all_requests_that_may_be_under_way(model: Path, tmp_path: Path) -> None:
    def expected(*settings: str) -> int:
        more = ["rollout.batch_size=16", "rollout.group_size=16", "rollout.share_prefixes=false", "eval.every_steps=0"]
        more += ["eval.num_tasks=20", "eval.final_chunks=[]", *settings]
        config = resolve("135M", "needles", more).config
        return server_options(config, model, tmp_path / "log", "server-0", (0,), "127.0.0.1").expected

    assert expected() == 256
    assert expected("rollout.max_staleness=1") == 512
    assert expected("rollout.max_staleness=1", "rollout.share_prefixes=true") == 32 * 17
    assert expected("eval.every_steps=4") == 256 + 20  # the next step's groups begin beside an evaluation
    # All lines of the closing table at once: the mixture, greedy and sampled, and with a blank memory.
    assert expected("eval.num_tasks=100", "eval.blank_memory=true") == 300


def test_adapters_of_a_rank_that_vllm_does_not_know(model: Path, tmp_path: Path) -> None:
    largest = ServerOptions(model, tmp_path / "log", python="/bin/true", lora_rank=512)
    check_options("vllm", largest)
    with pytest.raises(UserError, match=r"model\.lora\.rank=513: vLLM takes adapters up to rank 512"):
        check_options("vllm", replace(largest, lora_rank=513))


@pytest.mark.parametrize(
    ("name", "settings", "ignored"),
    [
        ("MistralForCausalLM", {"sliding_window": 4096}, True),
        ("MistralForCausalLM", {"sliding_window": None}, False),
        ("Qwen2ForCausalLM", {"sliding_window": 4096, "use_sliding_window": False}, False),
        ("Qwen3ForCausalLM", {"sliding_window": 4096, "use_sliding_window": True}, True),
        ("Gemma3ForCausalLM", {"sliding_window": 512}, False),
        ("LlamaForCausalLM", {}, False),
    ],
)
def test_a_sliding_window_that_the_server_would_leave_out(
    model: Path, tmp_path: Path, name: str, settings: dict[str, Any], ignored: bool
) -> None:
    config = {**CONFIG, "architectures": [name], "max_position_embeddings": 32768, **settings}
    (model / "config.json").write_text(json.dumps(config))

    def check(kind: Any, context: int) -> None:
        check_window(kind, ServerOptions(model, tmp_path / "log", context_length=context))

    check("vllm", 0)
    check("sglang", 4096)
    if ignored:
        for context in (0, 4097):
            with pytest.raises(UserError, match=r"SGLang attends to all of the past .* model\.context_window=4096"):
                check("sglang", context)
        with pytest.raises(UserError, match="a sliding window of 4,096 tokens"):
            check_options("sglang", ServerOptions(model, tmp_path / "log", python="/bin/true"))
    else:
        check("sglang", 0)


def test_a_health_check_does_not_run_the_model_where_its_memory_may_be_away(tmp_path: Path) -> None:
    def environment(*flags: str) -> dict[str, str]:
        return make_dialect("sglang").environment(ServerOptions(tmp_path, tmp_path / "log", gpus=(), flags=flags))

    name = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"
    assert environment(MEMORY_SAVER)[name] == "false"
    assert name not in environment("--attention-backend", "fa3")  # there it shows that the engine still works


@pytest.mark.parametrize(
    ("allowed", "gpus", "expected"),
    [(None, (2, 3), "2,3"), ("4,5,6", (0, 2), "4,6"), ("GPU-ab, GPU-cd", (1,), "GPU-cd"), ("", (), "")],
)
def test_gpus_are_counted_among_those_that_are_allowed(
    monkeypatch: pytest.MonkeyPatch, allowed: str | None, gpus: tuple[int, ...], expected: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if allowed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    assert visible_devices(gpus) == expected


def test_a_gpu_that_is_not_allowed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES=7 allows 1"):
        visible_devices((0, 1))
