"""Defines cohorts: the kinds of use that the ``reuse`` policy keeps apart.

Blocks that a request used in the same way, with the same history, are expected
to be used again alike. Each such kind is a *cohort*: it has a number, and
*traits*, over which ``model`` shares its few observations.

Sizes, counts and gaps are distinguished by octaves: their logarithm carries most of
the information, whatever a block holds and however fast the clock runs.
"""

from __future__ import annotations

from typing import Final

TURNS_MAX: Final = 6  #: later turns of a conversation count as this one
USES_MAX: Final = 9  #: levels: one for each of the first uses, then one an octave
GAPS_MAX: Final = 6  #: levels of one octave each
GAP_OCTAVE_FIRST: Final = 4  #: gaps below 2 ** 5 - 1 units are alike: no user types that fast
NEW_MAX: Final = 6  #: octaves of the number of new blocks
OLD_NEW_MAX: Final = 3  #: the same in steps of two, for blocks that are not new themselves
SIZE_MAX: Final = 12  #: octaves of the number of blocks of a first request


def octave(number: int, most: int) -> int:
    """Return the octave of a whole number: 0, 1, 2-3, 4-7 and so on."""
    return min(most, number.bit_length())


def gap_level(gap: float) -> int:
    """Return the level of a gap between two uses."""
    return octave(int(gap) + 1 >> GAP_OCTAVE_FIRST + 1, GAPS_MAX - 1)


def use_level(uses: int) -> int:
    """Return the level of a number of uses, which is at least 1."""
    return uses if uses <= 4 else min(USES_MAX, 2 + uses.bit_length())


class Cohorts:
    """The table of all cohorts: the meaning of each, and its number.

    ``kind_of`` and each row of ``traits_of`` are indexed by cohort. Traits are
    numbered over all kinds; 0 is no trait.
    """

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.kind_of: list[int] = []
        self.traits_of: list[list[int]] = []
        self.turn_of: list[int] = []  #: 0: carries no information about a conversation
        self.uses_of: list[int] = []  #: how many uses, if the number must be guessed
        self.traits = 1
        self.restored = self._add("restored", ())[0]
        self.unordered = self._add("unordered", ())[0]
        self.superseded = self._add("superseded", ())[0]
        self._last = self._add("last", (TURNS_MAX + 1,))
        self._first = self._add("first", (SIZE_MAX + 1,), turn=1)
        self._branch = self._add("branch", (GAPS_MAX, NEW_MAX + 1), turn=1)
        self._turn = self._add("turn", (GAPS_MAX, NEW_MAX + 1, TURNS_MAX + 1))
        self._old = self._add("old", (GAPS_MAX, OLD_NEW_MAX + 1, USES_MAX + 1))
        self._shared = self._add("shared", (GAPS_MAX, OLD_NEW_MAX + 1, USES_MAX + 1))
        for number, cohort in enumerate(self._turn):
            self.turn_of[cohort] = number % (TURNS_MAX + 1)
        for cohorts in (self._old, self._shared):
            for number, cohort in enumerate(cohorts):
                level = number % (USES_MAX + 1)
                self.uses_of[cohort] = level if level <= 4 else 3 << (level - 4)
                if cohorts is self._old:
                    self.turn_of[cohort] = min(TURNS_MAX, self.uses_of[cohort])
        self.first_shared = self._shared[0]
        self.count = len(self.kind_of)

    def last(self, turn: int) -> int:
        """Return the cohort of the last block of a request, which is often not full."""
        return self._last[min(turn, TURNS_MAX)]

    def is_last(self, cohort: int) -> bool:
        """Return whether ``cohort`` is one of those that ``last`` returns."""
        return self._last[0] <= cohort <= self._last[-1]

    def first(self, size: int) -> int:
        """Return the cohort of new blocks of a request that goes on from no known block."""
        return self._first[octave(size, SIZE_MAX)]

    def branch(self, gap: float, new: int) -> int:
        """Return the cohort of ``new`` blocks that leave the middle of an earlier request."""
        return self._branch[gap_level(gap) * (NEW_MAX + 1) + octave(new, NEW_MAX)]

    def turn(self, turn: int, gap: float, new: int) -> int:
        """Return the cohort of ``new`` blocks that follow the end of an earlier request."""
        row = gap_level(gap) * (NEW_MAX + 1) + octave(new, NEW_MAX)
        return self._turn[row * (TURNS_MAX + 1) + min(turn, TURNS_MAX)]

    def used_again(self, uses: int, gap: float, new: int, *, shared: bool) -> int:
        """Return the cohort of blocks that a request with ``new`` blocks below them used again."""
        row = gap_level(gap) * (OLD_NEW_MAX + 1) + octave(new, 2 * OLD_NEW_MAX) // 2
        table = self._shared if shared else self._old
        return table[row * (USES_MAX + 1) + use_level(uses)]

    def _add(self, kind: str, levels: tuple[int, ...], turn: int = 0) -> list[int]:
        """Add the cohorts of one kind: every combination of the levels of its traits."""
        first_traits = [self.traits + sum(levels[:i]) for i in range(len(levels))]
        self.traits += sum(levels)
        size = 1
        for level_count in levels:
            size *= level_count
        first = len(self.kind_of)
        for number in range(size):
            traits: list[int] = []
            rest = number
            for level_count, first_trait in zip(
                reversed(levels), reversed(first_traits), strict=True
            ):
                rest, level = divmod(rest, level_count)
                traits.insert(0, first_trait + level)
            self.traits_of.append([*traits, 0, 0, 0][:3])
            self.kind_of.append(len(self.kinds))
            self.turn_of.append(turn)
            self.uses_of.append(1)
        self.kinds.append(kind)
        return list(range(first, first + size))
