"""The queries of the page "Is it helping?" have answers, from a Prometheus and a real engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.needs import needs
from tests.support.patience import PATIENCE_S
from tests.vllm.support.children import run_program

ROOT = Path(__file__).parents[3]
ANSWER = re.compile(r"(?<=^```text\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)


@needs("prometheus")
@pytest.mark.long  # half a minute; a page's figures have no place in the gate
def test_every_query_is_answered_and_nothing_else_of_the_page_changes(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/is-it-helping.md").read_text()
    copy = tmp_path / "page.md"
    copy.write_text(ANSWER.sub("", page))
    run_program("-m", "docs.write_is_it_helping", copy, timeout_s=2 * PATIENCE_S)
    answers = ANSWER.findall(copy.read_text())
    assert len(answers) == page.count("```promql\n")
    assert all(answers)
    assert ANSWER.sub("", copy.read_text()) == ANSWER.sub("", page)
