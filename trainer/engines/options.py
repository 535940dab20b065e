"""What an inference server is started with, and what can be found wrong with it before anything is started."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import UserError

MEMORY_SAVER = "--enable-memory-saver"
"""SGLang's option for a server that can give its GPU memory away and take it back."""


WINDOW_IS_ASKED_FOR = ("Qwen2", "Qwen3", "SmolLM3")
"""Classes that have a sliding window only where use_sliding_window says so."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What one server runs with, of either kind.

    model: Hugging Face folder. log: file for its output. name: in messages and for placing keys. gpus: device numbers,
    all of them for one replica (tensor parallel); none: on the CPU (vLLM only). host: address to listen on, loopback or
    private. port: 0 for a free one. version: of the weights in `model`. memory_fraction: of the GPU, for weights and KV
    cache. context_length: of prompt and response together (0: the model's own). max_running: requests sampled at the
    same time (0: the server's own choice). expected: requests that it will get at the same time, as far as is known.
    prefill_delay_ms: for which prompts may wait for others, so that passes over them are fewer (SGLang; 0: not at all).
    fp32_head: logits are computed in float32; in bfloat16 they are rounded by up to 0.06, and the log-probs with them.
    deterministic: responses follow their seed alone, whatever else is in the batch (slower). flags: more options of the
    server's own, last on its command line. env: added to the environment. chats: it is asked in words (OpenAI's chat
    route), not in token ids alone. lora_rank: of the adapters that it will load (0: none), for layers named
    lora_targets (all: every linear layer). lora_versions: of them that are used beside one another. start_seconds:
    until it must answer. hang_seconds: for which it may not answer its host whether it works (0: it is not asked, where
    whoever has requests there finds that out). python: the interpreter that has the server. role: what it is to the
    user.
    """

    model: Path
    log: Path
    name: str = "server-0"
    gpus: tuple[int, ...] = (0,)
    host: str = "127.0.0.1"
    port: int = 0
    version: int = 0
    memory_fraction: float = 0.85
    context_length: int = 0
    max_running: int = 0
    expected: int = 0
    prefill_delay_ms: float = 0.0
    fp32_head: bool = True
    deterministic: bool = False
    chats: bool = False
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    lora_versions: int = 1
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    start_seconds: float = 900.0
    hang_seconds: float = 0.0
    python: str = sys.executable
    role: str = "engine server"


@dataclass(frozen=True, slots=True)
class Setting:
    """What a server is started with beside its options.

    flags: for its command line. reasons: why, a sentence for each. environment: added to its own.
    """

    flags: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def visible_devices(gpus: tuple[int, ...]) -> str:
    """CUDA_VISIBLE_DEVICES for a server: GPUs by their number among those that this process may use.

    Raises:
        UserError: there are fewer.
    """
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return ",".join(map(str, gpus))
    names = [name.strip() for name in allowed.split(",") if name.strip()]
    if gpus and max(gpus) >= len(names):
        raise UserError(
            f"a server is to run on GPU {max(gpus)}, counted from 0, and CUDA_VISIBLE_DEVICES={allowed} allows "
            f"{len(names)}: allow more, or ask for fewer"
        )
    return ",".join(names[gpu] for gpu in gpus)


def check_model(options: ServerOptions) -> None:
    """Find what is wrong with the model folder and the GPUs, from files alone. Raises UserError."""
    try:
        config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{options.model} is no model folder (config.json: {error}): give the folder of a model"
        ) from error
    if not any(options.model.glob("*.safetensors")):
        raise UserError(f"{options.model} holds no .safetensors weights: give the folder of a model with its weights")
    if not config.get("architectures"):
        raise UserError(
            f"{options.model}/config.json names no architecture, so no server can load it: give the folder of a causal "
            "language model, saved with save_pretrained"
        )
    if not any("ForCausalLM" in str(name) for name in config["architectures"]):
        raise UserError(
            f"{options.model} is a {config['architectures'][0]}, which generates no text: give the folder of a causal "
            "language model (…ForCausalLM)"
        )
    size = len(options.gpus)
    if len(set(options.gpus)) != size:
        raise UserError(f"{options.name} needs its GPUs each named once; it was given {list(options.gpus)}")
    check_heads(config, size)


def check_window(kind: str, options: ServerOptions) -> None:
    """See that a server looks through the model's sliding window, as the trainer and transformers do.

    SGLang (0.5.17) does so for Gemma alone; the other classes attend to all of the past there. vLLM does, or refuses to
    start. A window that no conversation can pass changes nothing.

    Raises:
        UserError: the server would generate from another distribution than the model's.
    """
    model = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    name, window = str((model.get("architectures") or [""])[0]), int(model.get("sliding_window") or 0)
    windowed = model.get("use_sliding_window") if name.startswith(WINDOW_IS_ASKED_FOR) else name.startswith("Mistral")
    longest = options.context_length or int(model.get("max_position_embeddings") or 0) or 1 << 30
    if kind == "sglang" and not options.chats and window and windowed and longest > window:
        raise UserError(
            f"{options.model} has a sliding window of {window:,} tokens, and SGLang attends to all of the past in a "
            f"{name}: beyond the window it would generate from another distribution than the model's. Keep prompt and "
            f"response within it (a run's model.context_window={window}), or let vLLM generate (--engine vllm in "
            "evaluations)"
        )


def check_heads(model: Mapping[str, Any], gpus: int) -> None:
    """Raise UserError unless a server's GPUs can share a model's heads. model: its config.json. gpus: 0 for none."""
    heads = int(model.get("num_attention_heads") or 0)
    groups = int(model.get("num_key_value_heads") or heads)
    if gpus and heads % gpus:
        raise UserError(
            f"{gpus} GPUs a server do not divide the model's {heads} attention heads: use a number that does"
        )
    if gpus and groups % gpus and gpus % groups:  # where there are fewer key/value heads than GPUs, each gets a copy
        raise UserError(
            f"{gpus} GPUs a server neither divide the model's {groups} key/value heads nor are a multiple of them: use "
            "a number that does or is"
        )
