"""How many mutants of each file were found, by what, and which of the others need not be."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.mutants.rooms import SLOW

if TYPE_CHECKING:
    from collections.abc import Sequence

EXPLAINED = Path(__file__).with_name("explained.txt")
HEAD = """\
| file | tried | caught | by slow tests only | explained | open | score |
|---|---|---|---|---|---|---|
"""


class Score(NamedTuple):
    """What became of the mutants of a file."""

    file: str
    tried: int
    caught: int
    caught_slowly: int  #: those of ``caught`` that only slow tests have found
    explained: int
    open: tuple[str, ...] = ()  #: survivors without a reason, as lines to print
    kinds: str = ""

    @staticmethod
    def of(file: str, results: Sequence[dict[str, Any]]) -> Score:
        """Count the results of a file."""
        reasons = reasons_of(file)
        survivors = [each for each in results if each["killed_by"] == "survived"]
        open_ones = [each for each in survivors if each["changed"] not in reasons]
        return Score(
            file,
            len(results),
            len(results) - len(survivors),
            sum(each["test"].startswith(SLOW) for each in results),
            len(survivors) - len(open_ones),
            tuple(
                f"    line {each['mutant'][2]}, {each['mutant'][0]}: {each['changed']}"
                for each in open_ones
            ),
            str(dict(Counter(each["killed_by"] for each in results))),
        )

    @staticmethod
    def of_all(scores: Sequence[Score]) -> Score:
        """Add them up."""
        return Score("all", *(sum(each) for each in list(zip(*scores, strict=True))[1:5]))

    @property
    def percent(self) -> float:
        """The score: those that are explained are no mutants."""
        return 100 * self.caught / max(1, self.tried - self.explained)

    def said(self, there: int) -> str:
        """Return lines to print, with each survivor. ``there``: how many mutants there are."""
        first = (
            f"{self.file}: {self.caught} of {self.tried} caught (of {there} there are), "
            f"{self.explained} explained, {len(self.open)} not; {self.kinds}"
        )
        return "\n".join([first, *self.open])

    def row(self) -> str:
        """Return its row of the table."""
        left = self.tried - self.caught - self.explained
        every = (self.tried, self.caught, self.caught_slowly, self.explained, left)
        cells = [f"`{self.file}`", *map(str, every), f"{self.percent:.1f} %"]
        return f"| {' | '.join(cells)} |"


def table(scores: Sequence[Score]) -> str:
    """Return the table that README.md has."""
    return HEAD + "\n".join(each.row() for each in [*scores, Score.of_all(scores)])


def reasons_of(file: str) -> dict[str, str]:
    """Return the reason of each survivor of a file that is none, by what differs."""
    found = {}
    for line in EXPLAINED.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, changed, reason = line.split(" | ")
            if name == file:
                found[changed] = reason
    return found
