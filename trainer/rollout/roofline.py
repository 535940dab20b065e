"""How near the servers' decoding comes to what their GPUs' memory allows.

A token that is sampled reads the keys and values of its context, and, shared with all that are sampled in the same
moment on that server, the weights once. So tokens need at least (W·tokens/b + kv·Σ context) bytes of reading, with b
requests at a time on each server; the share is that over what the GPUs could have read while requests were under way.
Prompts are computed in the same time: the share of a workload with long prompts is low, and that is no fault.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from trainer.hf_folder import tensor_shapes

BYTES = 2
"""Of a weight or cached number: bfloat16."""
# Data-sheet bytes/s by a part of the GPU's name; more special ones stand first.
BANDWIDTH = (
    ("GH200", 4.0e12), ("H200", 4.8e12), ("H100 PCIe", 2.0e12), ("H100 NVL", 3.9e12), ("H100", 3.35e12),
    ("H800", 3.35e12), ("H20", 4.0e12), ("A100-SXM4-80GB", 2.039e12), ("A100 80GB PCIe", 1.935e12), ("A100", 1.555e12),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecodeRoofline:
    """weights: bytes that a decoding step reads of them. kv: bytes in the cache of a token of context. bandwidth:
    bytes/s of one GPU. gpus: of all servers. servers: how many.
    """

    weights: float
    kv: float
    bandwidth: float
    gpus: int
    servers: int

    @classmethod
    def of(cls, model: Path, gpu: str, gpus: int, servers: int) -> DecodeRoofline | None:
        """For a model's folder on GPUs of this name; None where the table lacks them. Raises OSError or ValueError."""
        bandwidth = next((value for part, value in BANDWIDTH if part in gpu), None)
        if bandwidth is None:
            return None
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        shapes = tensor_shapes(model)
        if not config.get("tie_word_embeddings"):  # then it is only looked up in
            shapes = {name: shape for name, shape in shapes.items() if "embed_tokens" not in name}
        heads = config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // heads
        kv = 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * size * BYTES
        return cls(BYTES * sum(map(math.prod, shapes.values())), kv, bandwidth, gpus, servers)

    def share(self, tokens: int, context: float, request_seconds: float, seconds: float) -> float:
        """Share of the roofline. tokens: sampled. context: Σ of their context lengths. request_seconds: Σ over requests
        of the time that each was under way; seconds: in which there was any.
        """
        at_once = max(1.0, request_seconds / seconds / self.servers)
        return (self.weights * tokens / at_once + self.kv * context) / (self.bandwidth * self.gpus * seconds)
