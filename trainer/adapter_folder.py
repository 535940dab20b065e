"""Adapters on disk in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

Standard library only, as the operator side looks at such folders, too.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What the names of an adapter's tensors have before those of the model."""
INSIDE = "adapter"
"""Folder within a checkpoint of a whole model, where the adapter lies that was merged into it."""

_TOKENIZER = ("tokenizer", "special_tokens_map", "added_tokens", "vocab", "merges", "chat_template")
"""Beginnings of the names of a tokenizer's files."""

# What an adapter of another trainer may have and is not merged here, with the values that mean nothing.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "fan_in_fan_out": (None, False),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
    # Of the others most (pissa, olora, corda, loftq) have the adapter belong to what their start left of the base.
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal"),
}


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """What an adapter's folder says of it. Ranks are those of its tensors.

    base: path or name of the model that it belongs to.
    alphas: by regular expressions for the ends of layers' names.
    """

    folder: Path
    base: str
    alpha: float
    rank_stabilised: bool
    alphas: dict[re.Pattern[str], float]

    @classmethod
    def read(cls, folder: Path) -> AdapterFolder:
        """Raises UserError where it is no LoRA adapter in PEFT's format, or one of a kind that is not known here."""
        path = folder / CONFIG
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            found = cls(
                folder,
                str(facts["base_model_name_or_path"] or ""),
                float(facts["lora_alpha"]),
                bool(facts.get("use_rslora")),
                # Keys as PEFT reads them.
                {re.compile(rf"(.*\.)?({k})$"): float(v) for k, v in (facts.get("alpha_pattern") or {}).items()},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, re.error) as error:
            raise UserError(f"{path} does not describe a LoRA adapter: {type(error).__name__}: {error}") from error
        kind = facts.get("peft_type")
        other = [name for name, plain in _PLAIN.items() if facts.get(name) not in plain]
        if kind != "LORA" or other:
            what = f"{other[0]}={facts[other[0]]}" if other else f"peft_type={kind}"
            raise UserError(
                f"{path}: {what} is not known here, where adapters are plain LoRA: merge it with PEFT "
                "(merge_and_unload) and give the folder of the whole model"
            )
        if not (folder / WEIGHTS).is_file():
            raise UserError(f"{folder} is incomplete: {WEIGHTS} is missing: copy or download the adapter again")
        return found

    def scale(self, layer: str, rank: int) -> float:
        """What the adapter of a layer is multiplied by. layer: its name in the model."""
        alpha = next((alpha for pattern, alpha in self.alphas.items() if pattern.match(layer)), self.alpha)
        return float(alpha / (rank**0.5 if self.rank_stabilised else rank))


def tokenizer_files(folder: Path) -> list[Path]:
    """Files of the tokenizer in a folder, by name. An adapter's own replace those of its base."""
    return sorted(file for file in folder.iterdir() if file.is_file() and file.name.startswith(_TOKENIZER))


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder holds an adapter and no whole model."""
    whole = any((folder / f"model.safetensors{end}").is_file() for end in ("", ".index.json"))
    return (folder / CONFIG).is_file() and not whole


def adapter_config(base: str, rank: int, alpha: float, targets: list[str]) -> dict[str, Any]:
    """Content of adapter_config.json, as PEFT and engines read it."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
