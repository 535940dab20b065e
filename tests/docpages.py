"""The command lines of README and of the pages under docs/, as a reader would type them."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
README = REPOSITORY / "README.md"
PAGES = [README, *sorted((REPOSITORY / "docs").glob("*.md"))]
WAYS = re.compile(r"[…·|]|\[(?=[A-Z-])")
"""In a command that stands for several: something left out, alternatives, `[--option]`."""
COMMENT = re.compile(r"\s+#\s|\s{3,}|\s[|>&]\s")


def lines_of_code(text: str) -> list[str]:
    """The lines of code blocks that begin with `clusterkit`, also of another environment, or `make`."""
    text = text.replace("\\\n", " ")
    fenced = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    command = r"((?:\.venv-gpu/bin/)?clusterkit .*|make .*)$"
    return [*re.findall(r"^ {4}" + command, text, re.MULTILINE), *re.findall(r"^" + command, fenced, re.MULTILINE)]


def literal(lines: list[str]) -> list[str]:
    """Those that can be typed as they stand, each once, without what explains them."""
    typed = dict.fromkeys(COMMENT.split(re.sub(r"\\\s+", "", line))[0].strip() for line in lines)
    return [line for line in typed if not WAYS.search(line)]


def quick_start(page: Path) -> str:
    """All of README; of a page what stands before its first section."""
    text = page.read_text(encoding="utf-8")
    return text if page == README else text.partition("\n## ")[0]
