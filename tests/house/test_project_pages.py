"""The site has the project's own pages, with links that lead somewhere on it."""

from __future__ import annotations

import re

import pytest
from sources import ROOT

from tests.support.docs_scripts import docs_script

PAGES = docs_script("project_pages")


@pytest.mark.parametrize("name", list(PAGES.PAGES))
def test_no_link_of_a_page_leaves_the_site_for_the_repository(name: str) -> None:
    """mkdocs finds the links to pages that are not there; one to a file would be left as it is."""
    text = PAGES.with_links_of_the_site((ROOT / name).read_text())
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert len(targets) > 2
    assert not [each for each in targets if each.startswith("docs/") or not each.endswith(".md")]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[metrics](docs/reference/metrics.md#x)", "[metrics](reference/metrics.md#x)"),
        ("[changes](CHANGELOG.md)", "[changes](changelog.md)"),
        ("[how](CONTRIBUTING.md#soak)", "[how](contributing.md#soak)"),
        ("[tests/README.md](tests/README.md)", "`tests/README.md`"),
        ("[the packages](requirements/debian.list)", "the packages (`requirements/debian.list`)"),
        ("[Chaos](https://example.org/docs/)", "[Chaos](https://example.org/docs/)"),
        ("[below](#rules)", "[below](#rules)"),
    ],
)
def test_links_are_those_of_the_site(before: str, after: str) -> None:
    assert PAGES.with_links_of_the_site(before) == after
