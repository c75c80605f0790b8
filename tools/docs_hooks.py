"""Hooks of mkdocs: pages that stand beside docs/ in the repository are pages of the site too, and links find them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {"ARCHITECTURE.md": "architecture.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(\]\()([^)#\s]+)([^)]*\))")


def on_config(config: Any) -> Any:
    config.mdx_configs.setdefault("toc", {})["slugify"] = lambda text, _separator: github_slug(text)
    return config


def github_slug(title: str) -> str:
    """The anchor that GitHub gives a heading: the same links work there and on the site."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def on_files(files: Any, config: Any) -> Any:
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_linked(text, "")))
    for example in sorted((ROOT / "examples").iterdir()):
        if example.is_file():
            files.append(
                File.generated(config, f"examples/{example.name}", content=example.read_text(encoding="utf-8"))
            )
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return _linked(markdown, "docs") if page.file.src_uri not in PAGES.values() else markdown


def _linked(text: str, folder: str) -> str:
    """Links of a file in a folder of the repository, as links of the site."""

    def link(match: re.Match[str]) -> str:
        if "://" in match[2]:
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, match[2]))
        return f"{match[1]}{PAGES.get(path, path.removeprefix('docs/'))}{match[3]}"

    return LINK.sub(link, text)
