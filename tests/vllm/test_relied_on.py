"""What the adapter relies on in vLLM is what it was when kvtier was last tested with it."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from tests.vllm.support.relied_on import lines

RELEASE = os.environ.get("KVTIER_TEST_VLLM", "0.32")
LISTED = Path(__file__).with_name(f"relied_on_{RELEASE}.txt")


def test_every_name_and_signature_is_as_it_is_listed() -> None:
    """The lines that differ name what changed: look at each use, then list it anew."""
    before = LISTED.read_text().splitlines()
    changed = [
        line
        for line in difflib.unified_diff(before, lines(), "listed", "installed", n=0, lineterm="")
        if not line.startswith(("---", "+++", "@@"))
    ]
    assert not changed, "\n".join(changed)


def test_what_vllm_promises_nobody_is_little_and_marked() -> None:
    """Each private name is one that a minor release may take away."""
    private = [line for line in LISTED.read_text().splitlines() if line.endswith("  private")]
    names = [line.split("(")[0].split(":")[0].rpartition(".")[2] for line in private]
    assert names
    assert all(name.startswith("_") for name in names)
    assert len(names) <= 5, names  # two of them for hosted p2p tiers, one in 0.33 only
