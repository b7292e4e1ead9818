"""What pages have a reader start with ``make`` and ``python -m`` is there."""

from __future__ import annotations

import re
from importlib.util import find_spec

from pages import in_code_type
from sources import ROOT
from test_docs import PAGES

from tests.support.printed import blocks_in, prose_of

TARGET = re.compile(r"^([\w.-]+(?: [\w.-]+)*):(?!=)", re.MULTILINE)


def printed(pattern: str) -> set[tuple[str, str]]:
    """Return what follows in a command, and the name of its page."""
    found = set()
    for page in PAGES:
        text = page.read_text()
        lines = [line for _, block in blocks_in(text) for line in block.splitlines()]
        for line in [*lines, *in_code_type(prose_of(text))]:
            if match := re.search(rf"^(?:\$ )?(?:[A-Z_]+=\S* )*{pattern}", line):
                found.add((match[1], page.name))
    return found


def test_every_target_is_one_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {name for line in TARGET.findall(makefile) for name in line.split()}
    named = printed(r"make ([a-z][\w.-]*)")
    assert ("demo", "README.md") in named
    assert {(name, page) for name, page in named if name not in targets} == set()


def test_every_program_is_there() -> None:
    named = printed(r"(?:[\w./]*/)?python3? -m ([\w.]+)")
    assert ("stress.bench", "disk-cost.md") in named
    assert {(name, page) for name, page in named if find_spec(name) is None} == set()
