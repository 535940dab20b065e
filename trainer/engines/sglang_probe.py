"""Run by the Python that has SGLang, as a file: print as JSON what its packages are, importing none of them.

version: of SGLang. options: names of its command line's options, as its source has them. fa3: whether its kernels hold
FlashAttention 3. cuda_home: folder of the CUDA compiler that `make gpu` laid out from wheels, empty without one. bin:
folder of the commands that were installed beside this Python.
"""

import json
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path


def files(package: str, pattern: str) -> list[Path]:
    """Files of an installed package; none where there is no such package."""
    found = find_spec(package)
    places = found.submodule_search_locations or () if found else ()
    return [file for place in places for file in sorted(Path(place).glob(pattern))]


def options_of(source: str) -> list[str]:
    """Options by SGLang's server_args.py: fields of ServerArgs, or spelt out where that adds them by hand."""
    body = source.partition("class ServerArgs")[2]
    fields = re.findall(r"^    ([a-z]\w*):", body, re.MULTILINE)
    return sorted({f"--{name.replace('_', '-')}" for name in fields} | set(re.findall(r'"(--[a-z][\w-]*)"', body)))


def main() -> None:
    """Print it."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = ""
    arguments = files("sglang", "srt/server_args.py")
    compiler = Path(sys.prefix, "cuda")
    answer = {
        "version": found,
        "options": options_of(arguments[0].read_text(encoding="utf-8")) if arguments else [],
        "fa3": bool(files("sgl_kernel", "flash_ops*.so")),
        "cuda_home": str(compiler) if (compiler / "bin" / "nvcc").exists() else "",
        "bin": os.path.dirname(sys.executable),  # noqa: PTH120 (not resolved: of the environment, not of its Python)
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
