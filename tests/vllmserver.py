"""A real vLLM server on the CPU for tests: which Python has vLLM, a small model that it serves, and its start.

`scripts/vllm_cpu.py` makes the environment. The server answers token ids on the token route (`ServedEngine`), and where
the model folder has a tokenizer also on /v1/completions and /v1/chat/completions.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.realparts import require
from tests.vllmflags import FLAGS
from trainer.engines.http import Server
from trainer.engines.launching import launch
from trainer.engines.options import ServerOptions
from trainer.engines.process import ServerProcess

REPOSITORY = Path(__file__).parents[1]
VOCABULARY = 512
CONTEXT = 4096
START_SECONDS = 400.0
"""A server takes 25 s to start where it has a core of its own."""


def vllm_python() -> str:
    """The interpreter that has vLLM: $CLUSTERKIT_VLLM_PYTHON, else that of .venv-vllm. Skips the test without one."""
    found = os.environ.get("CLUSTERKIT_VLLM_PYTHON") or str(REPOSITORY / ".venv-vllm" / "bin" / "python")
    require(Path(found).exists(), "needs vLLM: run scripts/vllm_cpu.py, or name its Python in CLUSTERKIT_VLLM_PYTHON")
    return found


def vllm_options(model: Path, log: Path, **changes: Any) -> ServerOptions:
    """Options of a server on the CPU in float32 that starts fast. `flags` are added to those."""
    flags = (*FLAGS, *changes.pop("flags", ()))
    # Several threads that wait for each other on busy cores are far slower than one.
    env = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **changes.pop("env", {})}
    return ServerOptions(model, log, gpus=(), python=vllm_python(), flags=flags, env=env, start_seconds=600, **changes)


async def start_vllm(model: Path, log: Path, **changes: Any) -> tuple[Server, ServerProcess]:
    """A running server; the caller stops the process. changes: fields of ServerOptions."""
    return await launch("vllm", vllm_options(model, log, **changes))


def random_qwen2(seed: int) -> Any:
    """A Qwen2 of 1.2 million parameters with random weights: tied head, grouped queries, biases, float32.

    Its next-token distributions are far from uniform, and differ much from one seed to another.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=VOCABULARY,
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=CONTEXT,
                initializer_range=0.1,
                tie_word_embeddings=True,
                eos_token_id=1,
                bos_token_id=None,
                dtype="float32",
            )
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0, 0.2)
    return model.eval()
