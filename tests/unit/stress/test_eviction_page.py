"""*Eviction*: its commands run as they are printed, and give the hit ratios of its table."""

from __future__ import annotations

import gzip
import re
from itertools import islice
from typing import TYPE_CHECKING

import pytest

from stress.workloads.shapes import SHAPES
from tests.support.printed import DOCS, Reader, commands

if TYPE_CHECKING:
    from pathlib import Path

PAGE = "explanation/eviction.md"
POLICIES = ("lru", "arc", "reuse", "MIN")
Ratios = dict[str, dict[str, str]]  #: by capacity and policy, as the page has them


def in_table() -> dict[str, Ratios]:
    """Return the page's figures of the made-up workloads."""
    found: dict[str, Ratios] = {}
    name = ""
    for line in (DOCS / PAGE).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[1].endswith("%") and set(cells[0]) != {"-"}:
            name = cells[0].split("`")[1] if cells[0] else name
            capacity = cells[1].replace(" ", "")
            found.setdefault(name, {})[capacity] = dict(zip(POLICIES, cells[2:], strict=True))
    return found


def in_output(shown: str, capacities: list[str]) -> Ratios:
    """Return the figures that a replay has printed."""
    found: Ratios = {capacity: {} for capacity in capacities}
    for policy, figures in re.findall(r"^ (lru|arc|reuse|MIN) +(.*)$", shown, re.MULTILINE):
        ratios = [figure.removeprefix("0") for figure in figures.split()]
        for capacity, ratio in zip(capacities, ratios[: len(capacities)], strict=True):
            found[capacity][policy] = ratio
    return found


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    instead = {
        ".venv/bin/python": "python",
        "docs/draw_curves.py": str(DOCS / "draw_curves.py"),
        "conversation_trace.jsonl.gz": "conversation_trace.jsonl.gz --block-tokens 512",
    }
    made = Reader(tmp_path, instead)
    made.run(commands(PAGE, "stress.workloads")[0])
    return made


def test_the_printed_commands_run_and_draw(reader: Reader) -> None:
    """In place of the public trace: the first requests of a made-up one."""
    replay, draw, _, _, swarm, agents = commands(PAGE)
    with (reader.folder / "shapes/agents.jsonl").open("rb") as lines:
        first = b"".join(islice(lines, 250))
    (reader.folder / "conversation_trace.jsonl.gz").write_bytes(gzip.compress(first))
    reader.run(replay)
    reader.run(draw)
    assert (reader.folder / "eviction.png").read_bytes().startswith(b"\x89PNG")
    (found,) = in_output(reader.run(swarm), ["5%"]).values()
    assert found.items() < in_table()["swarm"]["5%"].items()
    assert "\n9,163 requests, 336,203" in reader.run(agents)
    reader.check_all_is_used()


@pytest.mark.long  # half a minute of replays
@pytest.mark.parametrize("shape", SHAPES)
def test_a_replay_gives_the_hit_ratios_of_the_table(shape: str, reader: Reader) -> None:
    (command,) = commands(PAGE, "lru,arc,reuse")
    expected = in_table()[shape]
    capacities = command.rpartition(" ")[2]
    own = command.replace("agents", shape).replace(capacities, ",".join(expected))
    assert in_output(reader.run(own), [*expected]) == expected
