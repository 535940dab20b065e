"""A model, GPUs or servers that a run cannot use: one message, exit code 2 where starting again cannot help, and
nothing was started in vain. The trainer's own processes, as on a user's machine; it has no GPU and neither engine.
"""

from __future__ import annotations

import importlib.util
import json
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coin
import psutil
import pytest
import torch
from builders import small_parts
from runs import Forks, Trial
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM

from trainer.config import RunConfig
from trainer.errors import UserError
from trainer.launch.local import require_gpus
from trainer.serving import registry

ONE_SERVER_ONE_RANK = {"n_gpus_per_node": 2, "allocation_mode": "sglang:d1+fsdp:d1", "servers.engine": "sglang"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Llama of four heads with its tokenizer."""
    folder = tmp_path / "model"
    parts = small_parts()
    assert parts.lm.config.num_attention_heads == 4
    parts.lm.save_pretrained(folder)
    parts.tokenizer.save_pretrained(folder)
    return folder


def refused(forks: Forks, tmp_path: Path, model: Path, **settings: Any) -> str:
    """What a run says that ends with exit code 2, before it has started a server or a rank."""
    settings = {"model.path": str(model), "agent.template": "memagent", **settings}
    trial = Trial(tmp_path / "runs", tmp_path / "cache", **settings)
    assert forks.run(trial) == 2, trial.said()
    assert registry.read(registry.folder_of(trial.paths.logs)) == []
    assert not trial.records("attempt")
    assert trial.said().count("error: ") == 1
    assert "Traceback" not in trial.said()
    return trial.said()


def without_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def of_another_kind(model: Path) -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertForMaskedLM(BertConfig(**small)).save_pretrained(model)


def without_a_norm(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


def wider_than_its_weights(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (without_weights, "has no weights (model.safetensors"),
        (of_another_kind, "is a BertForMaskedLM, and what is trained here is a causal language model"),
        (without_a_norm, "lacks 1 weights, model.norm.weight first: the checkpoint is incomplete; fetch it again"),
        (wider_than_its_weights, "model.layers.0.mlp.down_proj.weight has the shape [32, 64], and by its config.json"),
    ],
)
def test_a_model_that_cannot_be_trained(
    forks: Forks, tmp_path: Path, model: Path, damage: Callable[[Path], None], says: str, ranks: int
) -> None:
    damage(model)
    assert says in refused(forks, tmp_path, model, **{"train.ranks": ranks})


def test_tensor_parallel_training_that_does_not_divide_the_heads(forks: Forks, tmp_path: Path, model: Path) -> None:
    said = refused(forks, tmp_path, model, n_gpus_per_node=3, allocation_mode="fsdp:d1t3")
    assert (
        "allocation_mode: 3 tensor parallel training ranks do not divide 4 attention heads, 4 key/value heads and 64 "
        "feed-forward columns: choose a t that divides all three"
    ) in said


@pytest.mark.parametrize("mode", ["local", "ray"])
def test_servers_whose_gpus_do_not_divide_the_heads(forks: Forks, tmp_path: Path, model: Path, mode: str) -> None:
    settings = {**ONE_SERVER_ONE_RANK, "n_gpus_per_node": 4, "allocation_mode": "sglang:d1t3+fsdp:d1", "mode": mode}
    said = refused(forks, tmp_path, model, **settings, **{"servers.python": sys.executable if mode == "ray" else "env"})
    assert "3 GPUs a server do not divide the model's 4 attention heads: use a number that does" in said


def test_an_engine_that_is_not_installed(forks: Forks, tmp_path: Path, model: Path) -> None:
    assert importlib.util.find_spec("sglang") is None
    said = refused(forks, tmp_path, model, **ONE_SERVER_ONE_RANK)
    assert re.search(r"SGLang is not installed in \S+: `make gpu` installs it", said)
    (tmp_path / "runs" / "config.yaml").unlink()
    said = refused(forks, tmp_path, model, **{"servers.engine": "vllm", "servers.python": sys.executable})
    assert f"vLLM is not installed in {sys.executable}: " in said


def test_fewer_gpus_than_the_allocation_takes(forks: Forks, tmp_path: Path, model: Path) -> None:
    assert not torch.cuda.is_available()
    said = refused(forks, tmp_path, model, n_gpus_per_node=2, allocation_mode="fsdp:d2")
    assert "this run takes 2 GPUs (n_nodes x n_gpus_per_node), and PyTorch can use 0 here (" in said
    assert "check nvidia-smi, CUDA_VISIBLE_DEVICES and that PyTorch is a CUDA build for this driver" in said


def test_a_driver_that_is_too_old_or_a_gpu_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch would say: neither such a driver nor a single GPU can be had here."""
    config = RunConfig.model_validate({"n_gpus_per_node": 2, "allocation_mode": "fsdp:d2"})
    old = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver.\nMore."

    def init() -> None:
        raise RuntimeError(old)

    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(UserError, match=r"can use 0 here \(The NVIDIA driver .* too old \(found version 11040\)"):
        require_gpus(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"takes 2 GPUs \(n_nodes x n_gpus_per_node\), .* can use 1 here: check"):
        require_gpus(config)


NEVER_HEALTHY = """#!{python}
# In an engine's place: it loads for ever, and says so.
import http.server, sys
class Loading(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
for number in range(1, 6):
    print(f"loading part {{number}} of 6", flush=True)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Loading).serve_forever()
"""


def failed(forks: Forks, tmp_path: Path, engine: Path, **servers: Any) -> tuple[str, Path]:
    """What a run says whose only server is that program, and the server's log; nothing of it is left."""
    trial = Trial(tmp_path / "runs", tmp_path / "cache", **coin.SETTINGS)
    servers = {"python": str(engine), "restarts": 0, "shutdown_on_exit": True, **servers}
    trial.change(**{f"servers.{name}": value for name, value in servers.items()})
    assert forks.run(trial) == 1, trial.said()
    assert "Traceback" not in trial.said()
    folder = registry.folder_of(trial.paths.logs)
    assert not any(registry.process_runs(one.pid) for one in registry.read(folder))
    assert [p.pid for p in psutil.process_iter(["cmdline"]) if str(engine) in (p.info["cmdline"] or [])] == []
    return trial.said(), folder / "server-0.log"


def test_a_server_that_never_becomes_healthy(forks: Forks, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    engine.write_text(NEVER_HEALTHY.format(python=sys.executable))
    engine.chmod(engine.stat().st_mode | stat.S_IXUSR)

    said, log = failed(forks, tmp_path, engine, start_seconds=3.0)

    assert "0 of 1 engine servers answer (server-0 on " in said
    assert re.search(
        r"server-0 was not ready after 3 s \(http://127\.0\.0\.1:\d+/health answered 503\); its log ends with: loading "
        rf"part 3 of 6 \| loading part 4 of 6 \| loading part 5 of 6 \(log: {re.escape(str(log))}\)\. Raise ",
        said,
    ), said


def test_a_server_that_cannot_start_ends_the_run_with_the_reason(forks: Forks, tmp_path: Path) -> None:
    other = tmp_path / "python"  # another interpreter, so nobody has looked into it beforehand; it has no vLLM
    other.symlink_to(Path(sys.executable).resolve())

    said, log = failed(forks, tmp_path, other)

    assert "0 of 1 engine servers answer (server-0 on " in said
    assert "vLLM is not installed in this Python: pip install vllm" in said
    assert f"(log: {log})" in said
