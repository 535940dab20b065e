"""Turns a GGUF checkpoint into a Hugging Face folder that can be trained: `python -m trainer.convert gguf SOURCE OUT`.

Weights are dequantised and stored as bfloat16 safetensors; tokenizer and chat template come from the GGUF's metadata.
The folder appears only after it has been loaded again and compared. A JSON summary goes to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from trainer.errors import InterruptedRunError, RunError, UserError
from trainer.staging import disk_full, staged_folder

PROBE_TOKENS = 16


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits with 0 done, 1 failed, 2 bad usage, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m trainer.convert", description=__doc__)
    formats = parser.add_subparsers(dest="format", required=True)
    gguf = formats.add_parser("gguf", help="GGUF to safetensors bfloat16")
    gguf.add_argument("source", type=Path, help="a .gguf file, or a folder that holds one")
    gguf.add_argument("out", type=Path, help="folder to make; must not exist")
    options = parser.parse_args(arguments)
    try:
        print(json.dumps(convert_gguf(options.source, options.out)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print(f"error: interrupted: {options.out} was not made", file=sys.stderr)
        sys.exit(InterruptedRunError.exit_code)


def convert_gguf(source: Path, out: Path) -> dict[str, Any]:
    """Convert a GGUF file to the folder `out`; returns its architecture and size.

    Raises:
        UserError: no such file, not a GGUF that transformers can read, `out` exists, or a package is missing.
        RunError: the disk is full, or the folder does not hold what the file held.

    """
    file = find_gguf(source)
    _require_packages()
    with staged_folder(out) as staging:
        try:
            model = _read(file)
            tokenizer = _read_tokenizer(file)
            _save(model, tokenizer, staging)
        except Exception as error:
            # safetensors reports a full disk as an error of its own type, which derives from Exception alone.
            if "No space left" in str(error):
                raise disk_full(out.parent) from error
            raise
        _check(model, tokenizer, staging)
    return {
        "path": str(out),
        "architecture": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "chat_template": bool(tokenizer.chat_template),
    }


def find_gguf(source: Path) -> Path:
    """The file itself, or the only .gguf file in a folder. Raises UserError when there is none, or no single one."""
    if not source.exists():
        raise UserError(f"{source}: no such file or folder")
    if source.is_file():
        file = source
    else:
        files = sorted(source.glob("*.gguf"))
        if len(files) != 1:
            found = ", ".join(f.name for f in files) or "none"
            raise UserError(f"{source} must hold exactly one .gguf file (found: {found}): give the file")
        (file,) = files
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise UserError(f"{file} is no GGUF file: it does not begin with the letters GGUF")
    return file


def _require_packages() -> None:
    try:
        import gguf  # noqa: F401, PLC0415
        import safetensors  # noqa: F401, PLC0415
        import torch  # noqa: F401, PLC0415
        import transformers  # noqa: PLC0415
    except ImportError as error:
        raise UserError(f"converting a GGUF file needs {error.name}: pip install 'clusterkit[train,assets]'") from error
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def _read(file: Path) -> Any:
    """The model, dequantised, in bfloat16."""
    import torch  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint  # noqa: PLC0415

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


def _read_tokenizer(file: Path) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (ValueError, KeyError, IndexError, TypeError, NotImplementedError, OSError) as error:
        raise UserError(f"{file} holds no tokenizer that transformers can read ({error})") from error


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _check(model: Any, tokenizer: Any, folder: Path) -> None:
    """Load the folder as training will, compare every weight and the tokenizer, and run a few tokens through it."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

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


if __name__ == "__main__":
    main()
