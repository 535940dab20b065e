"""A GGUF checkpoint as a model and a tokenizer of transformers: what `trainer.convert` does with its packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf  # noqa: F401 (transformers reads the file with it; a missing package shows here)
import safetensors  # noqa: F401 (it writes the weights with this)
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from trainer.errors import RunError, UserError

PROBE_TOKENS = 16


def read_model(file: Path) -> Any:
    """The model, dequantised, in bfloat16. Raises UserError for a file that transformers cannot read."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        # from_pretrained(gguf_file=…) would do the same but wants accelerate and marks the model as quantised.
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        content = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16)
    except (ValueError, KeyError, IndexError, TypeError, NotImplementedError, OSError) as error:
        raise UserError(
            f"{file} cannot be read as a GGUF checkpoint ({type(error).__name__}: {error}): download it again, or use "
            "an architecture that transformers reads from GGUF"
        ) from error
    missing, unexpected = model.load_state_dict(content["tensors"], strict=False, assign=True)
    model.tie_weights()
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty or unexpected:
        raise UserError(f"{file} does not fill the model: missing {empty or missing}, unexpected {unexpected}")
    return model.eval()


def read_tokenizer(file: Path) -> Any:
    """The tokenizer in the file's metadata. Raises UserError where there is none that transformers can read."""
    try:
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (ValueError, KeyError, IndexError, TypeError, NotImplementedError, OSError) as error:
        raise UserError(f"{file} holds no tokenizer that transformers can read ({error})") from error


def check(model: Any, tokenizer: Any, folder: Path) -> None:
    """Load the folder as training will, compare every weight and the tokenizer, and run a few tokens through it.

    Raises:
        RunError: the folder does not hold what the file held.
    """
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    expected = model.state_dict()
    different = [name for name, tensor in loaded.state_dict().items() if not torch.equal(tensor, expected[name])]
    if different:
        raise RunError(f"conversion failed: weights differ after loading: {', '.join(different[:3])}")
    again = AutoTokenizer.from_pretrained(folder)
    sample = "The 3 cafés' names: naïve\n\tEnd."
    ids = again(sample)["input_ids"]
    if ids != tokenizer(sample)["input_ids"] or again.chat_template != tokenizer.chat_template:
        raise RunError("conversion failed: the saved tokenizer differs from the one in the GGUF file")
    with torch.inference_mode():
        logits = loaded(input_ids=torch.tensor([ids[:PROBE_TOKENS]])).logits
    if not torch.isfinite(logits).all():
        raise RunError("conversion failed: the model computes numbers that are not finite")
