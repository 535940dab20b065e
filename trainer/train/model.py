"""Getting the policy: a Hugging Face checkpoint with our packed attention, and its tokenizer."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from trainer.config_parts import ModelConfig
from trainer.errors import UserError
from trainer.train import attention
from trainer.train.families import check_family


def load_lm(folder: Path, config: ModelConfig, dtype: torch.dtype | None = None) -> Any:
    """Causal LM from a checkpoint folder, whole, in `dtype` (the configured one), ready for packed rows.

    A model that is to be trained is loaded in float32: its weights are then what the optimizer moves.

    Raises:
        UserError: the folder does not hold a causal LM that transformers can load, or that can be trained here, or some
            weights are missing or of another shape.
    """
    with readable(folder):
        _refuse_quantised(folder, AutoConfig.from_pretrained(folder))
        lm, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype or compute_dtype(config),
            attn_implementation=attention.IMPLEMENTATION,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, in words
        )
    check_architecture(lm, folder)
    check_weights(folder, info["missing_keys"], info["mismatched_keys"])
    return prepare_lm(lm)


def empty_lm(folder: Path) -> Any:
    """The causal LM of a checkpoint folder as `load_lm` makes it in float32, with its parameters on the meta device.

    What is computed and not stored (rotary frequencies) is there, in host memory.

    Raises:
        UserError: as `load_lm`, for what can be told without reading weights.
    """
    with readable(folder):
        config = AutoConfig.from_pretrained(folder)
        _refuse_quantised(folder, config)
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attention.IMPLEMENTATION
            )
        lm.generation_config = _generation_config(folder)
    check_architecture(lm, folder)
    computed = [name for name, _ in lm.named_non_persistent_buffers()]
    for name in computed:
        owner, _, leaf = name.rpartition(".")
        module = lm.get_submodule(owner)
        setattr(module, leaf, torch.empty_like(getattr(module, leaf), device="cpu"))
    with torch.no_grad():
        for owner in {name.rpartition(".")[0] for name in computed}:
            lm._init_weights(lm.get_submodule(owner))  # as from_pretrained has them computed
    return prepare_lm(lm.eval())


def describe(folder: Path) -> Any:
    """What a checkpoint folder says of its model, of any class: `config` and `generation_config`.

    Raises:
        UserError: it says nothing that transformers can read.
    """
    with readable(folder):
        return SimpleNamespace(
            config=AutoConfig.from_pretrained(folder).get_text_config(), generation_config=_generation_config(folder)
        )


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Turn what transformers and safetensors say of a folder that they cannot load into words."""
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"model.path={folder} cannot be loaded as a causal language model: {first_line}") from error


def _refuse_quantised(folder: Path, config: Any) -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(
            f"model.path={folder}: its weights are quantised, which is not computed here, as the base of adapters "
            "neither: give the model that it was quantised from. An engine's servers can still generate with it "
            "(clusterkit eval --engine sglang or vllm)"
        )


def check_architecture(lm: Any, folder: Path) -> None:
    """Raise UserError unless the model is one whose log-probs are computed here, and rightly."""
    names = lm.config.architectures or [type(lm).__name__]
    if not any("ForCausalLM" in name for name in names) or not hasattr(getattr(lm, "model", None), "layers"):
        raise UserError(
            f"model.path={folder} is a {names[0]}, and what is trained here is a causal language model "
            "of decoder layers (…ForCausalLM, such as Llama, Qwen2 or Qwen3): give the folder of one"
        )
    check_family(lm, folder)


def check_weights(folder: Path, missing: Collection[str], mismatched: Iterable[Sequence[Any]]) -> None:
    """Raise UserError for weights that a folder lacks, and for those of another shape than the model's.

    mismatched: name, shape in the folder, shape in the model.
    """
    if missing:
        raise UserError(
            f"model.path={folder} lacks {len(missing)} weights, {min(missing)} first: the checkpoint is incomplete; "
            "fetch it again"
        )
    for name, found, wanted in sorted(mismatched, key=lambda entry: str(entry[0])):
        raise UserError(
            f"model.path={folder}: {name} has the shape {list(found)}, and by its config.json it should have "
            f"{list(wanted)}: weights and config.json are of different models; fetch the checkpoint again"
        )


def _generation_config(folder: Path) -> Any:
    """As from_pretrained finds it."""
    try:
        return GenerationConfig.from_pretrained(folder)
    except OSError:
        return GenerationConfig.from_pretrained(folder, config_file_name="config.json", _from_model_config=True)


def compute_dtype(config: ModelConfig) -> torch.dtype:
    """Dtype of forward and backward passes, and of the weights that sample."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]


def prepare_lm(lm: Any) -> Any:
    """Switch off what would make the trained policy differ from the sampled one."""
    lm.config.attention_dropout = 0.0
    for module in lm.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return lm


@torch.no_grad()
def copy_in(lm: Any, dtype: torch.dtype) -> Any:
    """A copy that is not trained, with weights in `dtype`; what is no weight (rotary frequencies) stays as it is."""
    twin = copy.deepcopy(lm)
    twin.requires_grad_(False)
    for parameter in twin.parameters():
        parameter.data = parameter.data.to(dtype)
    return twin


def load_tokenizer(folder: Path) -> Any:
    """Tokenizer of a checkpoint folder. Raises UserError when there is none."""
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model.path={folder} has no tokenizer that can be loaded: {error}") from error


def save_description(lm: Any, dtype: torch.dtype, tokenizer: Any, folder: Path) -> None:
    """Write what a checkpoint folder has beside weights of this dtype: configurations and tokenizer."""
    config = copy.deepcopy(lm.config)
    config.dtype = dtype
    config.architectures = [type(lm).__name__]
    config.save_pretrained(folder)
    if lm.can_generate():
        lm.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def stop_token_ids(lm: Any, tokenizer: Any) -> set[int]:
    """Token ids that end a response: the tokenizer's and the generation config's end tokens."""
    ids: set[int] = set()
    for source in (getattr(lm, "generation_config", None), lm.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    if not ids:
        raise UserError("the model names no end token (eos_token_id): responses could never stop")
    return ids


def context_window(lm: Any, config: ModelConfig) -> int:
    """Longest prompt plus response, in tokens."""
    limit = int(getattr(lm.config, "max_position_embeddings", 0) or 1 << 30)
    return min(limit, config.context_window) if config.context_window else limit
