"""What mkdocs.yml adds to the pages: README as the first one, and links to other files as links to the repository."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\(|src=\"|href=\")(?![a-z]+:|#|/)([^)\s\"#]+)")
"""A link of Markdown, or of HTML within it, to a file: where it begins, and the file."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Make README the first page."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to the page where the file is one, else to the repository.

    Raises:
        PluginError: there is no such file.
    """
    folder = "" if page.file.src_uri == "index.md" else "docs"

    def replaced(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri}: there is no {path}")
        if path.startswith("docs/") and files.get_file_from_path(path.removeprefix("docs/")):
            return link[1] + path.removeprefix("docs/")
        return f"{link[1]}{config.repo_url}/blob/main/{path}"

    return LINK.sub(replaced, markdown)
