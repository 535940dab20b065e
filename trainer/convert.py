"""Turns a GGUF checkpoint into a Hugging Face folder that can be trained: `python -m trainer.convert gguf SOURCE OUT`.

Weights are dequantised and stored as bfloat16 safetensors; tokenizer and chat template come from the GGUF's metadata.
The folder appears once it was loaded again and compared. A JSON summary goes to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from trainer.errors import InterruptedRunError, UserError
from trainer.staging import disk_full, staged_folder


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
    try:
        from trainer import gguf_model  # noqa: PLC0415 (seconds of imports, of packages that may be missing)
    except ImportError as error:
        raise UserError(f"converting a GGUF file needs {error.name}: pip install 'clusterkit[train,assets]'") from error
    with staged_folder(out) as staging:
        try:
            model = gguf_model.read_model(file)
            tokenizer = gguf_model.read_tokenizer(file)
            model.save_pretrained(staging)
            tokenizer.save_pretrained(staging)
        except Exception as error:
            # safetensors reports a full disk as an error of its own type, which derives from Exception alone.
            if "No space left" in str(error):
                raise disk_full(out.parent) from error
            raise
        gguf_model.check(model, tokenizer, staging)
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


if __name__ == "__main__":
    main()
