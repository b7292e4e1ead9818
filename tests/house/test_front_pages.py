"""The pages that a stranger opens first are short, and what they link and promise is there."""

from __future__ import annotations

import re

import pytest
from markdown.extensions.toc import slugify, unique
from sources import ROOT

from kvtier.tools.cli.main import COMMANDS
from tests.support.printed import prose_of

README = (ROOT / "README.md").read_text()
FRONT_PAGES = sorted(path.name for path in ROOT.glob("*.md"))
WORDS_MAX = {"README.md": 700, "CHANGELOG.md": 900}
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


@pytest.mark.parametrize("page", WORDS_MAX)
def test_a_front_page_is_read_in_some_minutes(page: str) -> None:
    assert len((ROOT / page).read_text().split()) <= WORDS_MAX[page]


def anchors(text: str) -> set[str]:
    """Return the names of a page's places, as mkdocs makes them from headings."""
    text = prose_of(text)
    taken: set[str] = set()
    for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        taken.add(unique(slugify(re.sub(r"[`*]|\{.*\}", "", title).strip(), "-"), taken))
    return taken | set(re.findall(r'\bid="([^"]+)"', text))


@pytest.mark.parametrize("page", FRONT_PAGES)
def test_each_link_of_a_front_page_leads_somewhere(page: str) -> None:
    """mkdocs checks those of ``docs``, and no others."""
    links = [match.groups() for match in LINK.finditer((ROOT / page).read_text())]
    own = [(path, anchor) for path, anchor in links if not path.startswith("http")]
    assert own
    for path, anchor in own:
        target = ROOT / (path or page)
        assert target.exists(), path
        assert not anchor or anchor in anchors(target.read_text()), f"{path}#{anchor}"


def test_each_figure_of_the_readme_stands_on_the_page_that_it_links() -> None:
    """Otherwise a new measurement changes one of them, and not the other."""
    claims = [each for each in re.split(r"\n\n|\n- ", README) if re.search(r"\d[.,]\d", each)]
    claims = [each for each in claims if "](docs/explanation/" in each]
    assert len(claims) >= 4
    for claim in claims:
        ((path, _),) = (match.groups() for match in LINK.finditer(claim))
        page = (ROOT / path).read_text()
        figures = re.findall(r"\d+,\d+(?:,\d+)*|\d*\.\d+", re.sub(r"\]\(.*?\)", "", claim))
        assert figures
        assert not [each for each in figures if each not in page], claim


def test_each_command_of_the_readme_exists() -> None:
    commands = set(re.findall(r"`kvtier (\w+)|^\$ kvtier (\w+)", README, re.MULTILINE))
    named = {name for pair in commands for name in pair if name}
    assert {"check", "status"} <= named <= set(COMMANDS)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = set(re.findall(r"(?:`|^\$ )make (\w+)", README, re.MULTILINE))
    assert {"demo", "test"} <= made <= targets
