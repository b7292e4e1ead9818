"""Adds files at the top of the repository to the site: changes, contributing, security.

An mkdocs hook. Their links are written for readers of the repository: those into ``docs`` lead to
pages of the site, and those to files that are not on it become their names.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mkdocs.structure.files import File

from kvtier import __version__

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Files of the repository, and the names of their pages."""

_LINK: Final = re.compile(r"(?<!!)\[([^]]+)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the version into the foot of each page. Called by mkdocs at the start.

    Without a repository there is nothing to edit, and mkdocs would make links that lead nowhere.
    """
    config.copyright = f"kvtier {__version__}, Apache-2.0"
    if not config.repo_url:
        config.edit_uri = None
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages. Called by mkdocs once it has found the others."""
    for name, page in PAGES.items():
        content = with_links_of_the_site((ROOT / name).read_text())
        added = File.generated(config, page, content=content)
        added.edit_uri = posixpath.join("..", name)
        files.append(added)
    return files


def with_links_of_the_site(text: str) -> str:
    """Return a file's Markdown with its links as they are on the site."""
    return _LINK.sub(_link, text)


def _link(link: re.Match[str]) -> str:
    shown, target, anchor = link[1], link[2], link[3] or ""
    if target in PAGES:
        return f"[{shown}]({PAGES[target]}{anchor})"
    if target.startswith("docs/"):
        return f"[{shown}]({target.removeprefix('docs/')}{anchor})"
    return f"`{target}`" if shown.strip("`") == target else f"{shown} (`{target}`)"
