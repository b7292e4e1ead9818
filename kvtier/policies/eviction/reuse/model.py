"""Estimates how soon a block is used again: counts, hazards, and Gittins' index.

For each cohort (``reuse_cohorts``) the model counts how many votes *entered* it, and
how many *returned* after which gap. A vote is one stretch of blocks placed
together; if a part of it returns, that part of the vote does.

A *hazard* is the chance that a vote returns while its age is in one bin, given
that it had not before. Few cohorts have seen enough to know theirs, so a hazard
is first guessed as a product: of the kind's hazard at that age, and of one
factor for each trait of the cohort, all estimated from everything that shares
them. The cohort's own observations then outweigh the guess in proportion.

The *index* is Gittins': the best ratio, over all horizons, of the chance to
return within it to the time spent in the cache until then. Evicting the block with
the lowest index gets the most hits out of the available room.

Ages stand in bins of half an octave.
"""

from __future__ import annotations

from array import array
from math import log2
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier.policies.eviction.reuse.cohorts import Cohorts

if TYPE_CHECKING:
    from numpy.typing import NDArray

AGE_BINS: Final = 40
"""Up to 2 ** 16.5 units: a day in seconds, 90 turnovers in 1024ths of one."""

BINS_FROM: Final = 0.125
"""Units: a small tier turns over within seconds, and agents return within seconds."""

GUESS_VOTES: Final = 8.0
"""A guess weighs as much as this many votes at risk: enough to tame a bin's noise."""

HAZARD_GUESS: Final = 0.05
"""Used before any observation: alike in each half octave, so the index falls with age as in LRU."""

HAZARD_MAX: Final = 0.9
"""A product of factors may exceed a chance."""

COHORTS_AT_A_TIME: Final = 128
"""Their indices take well below a millisecond."""

VOTES_MAX: Final = 200_000.0
"""Older votes count half whenever there are so many: slow forgetting."""

SNAPSHOTS_MAX: Final = 96
"""Snapshots of the entered votes; every second of the older ones goes, so gaps grow with age."""

_STARTS: Final = np.concatenate([[0.0], 2.0 ** (np.arange(AGE_BINS - 1) / 2)])
_WIDTHS: Final = np.diff(np.append(_STARTS, 2.0 ** ((AGE_BINS - 1) / 2)))

if TYPE_CHECKING:
    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


def age_bin(age: float) -> int:
    """Return the bin of an age."""
    age /= BINS_FROM
    return 0 if age <= 1.0 else min(AGE_BINS - 1, int(2.0 * log2(age)) + 1)


class ReuseModel:
    """Counts which blocks returned when; computes each cohort's index at each age."""

    def __init__(self) -> None:
        self.cohorts = Cohorts()
        count = self.cohorts.count
        self._kinds = _Groups(self.cohorts.kind_of, len(self.cohorts.kinds))
        self._traits = [
            _Groups(list(each), self.cohorts.traits)
            for each in zip(*self.cohorts.traits_of, strict=True)
        ]
        self._rows: Ints = np.arange(count)
        self.clear(0.0)

    def clear(self, now: float) -> None:
        """Forget all counts."""
        count = self.cohorts.count
        self._entered = array("d", bytes(8 * count))
        self._returned = array("d", bytes(8 * count * AGE_BINS))
        self._snapshot_times: list[float] = []
        self._snapshots: list[Floats] = []
        self._index: Floats = np.zeros((count, AGE_BINS))
        self.refresh(now)
        while self.work():
            pass

    def enter(self, cohort: int) -> None:
        """Count a stretch of blocks placed in ``cohort``."""
        self._entered[cohort] += 1.0

    def come_back(self, cohort: int, gap: float, share: float) -> None:
        """Count that ``share`` of a stretch in ``cohort`` was used again after ``gap``."""
        self._returned[cohort * AGE_BINS + age_bin(gap)] += share

    def index_at(self, ages: Floats) -> Floats:
        """Return the index of each cohort at an age of its own."""
        at = 2.0 * np.log2(np.maximum(ages / BINS_FROM, 2.0**-0.5)) + 1.0
        at = np.minimum(at, AGE_BINS - 1.001)
        bins = at.astype(np.int64)
        part = at - bins
        index = self._index
        low: Floats = index[self._rows, bins]
        low += part * (index[self._rows, bins + 1] - low)
        return low

    def index_of(self, cohort: int, age: float) -> float:
        """Return the index of one cohort at an age."""
        at = min(2.0 * log2(max(age / BINS_FROM, 2.0**-0.5)) + 1.0, AGE_BINS - 1.001)
        low = int(at)
        index = self._index[cohort]
        return float(index[low] + (at - low) * (index[low + 1] - index[low]))

    def refresh(self, now: float) -> None:
        """Compute hazards from the counts as they are ``now``.

        The indices follow in steps, by ``work``, so that no call takes long.
        """
        entered = np.frombuffer(self._entered)
        returned = np.frombuffer(self._returned).reshape(-1, AGE_BINS)
        if entered.sum() > VOTES_MAX:
            entered *= 0.5
            returned *= 0.5
            self._snapshots = [each * 0.5 for each in self._snapshots]
        self._make_snapshot(now, entered)
        at_risk = self._at_risk(now, entered, returned)
        hazards = self._hazards(returned, at_risk)
        alive = np.cumprod(1.0 - hazards, axis=1) / (1.0 - hazards)
        self._gains = alive * hazards
        self._costs = (alive - 0.5 * self._gains) * _WIDTHS
        self._done = 0

    def work(self) -> bool:
        """Do a part of the work that ``refresh`` left; return True if there was any."""
        part = slice(self._done, self._done + COHORTS_AT_A_TIME)
        gains = self._gains[part]
        if not len(gains):
            return False
        self._index[part] = _gittins(gains, self._costs[part])
        self._done = part.stop
        return True

    def _make_snapshot(self, now: float, entered: Floats) -> None:
        self._snapshot_times.append(now)
        self._snapshots.append(entered.copy())
        if len(self._snapshots) > SNAPSHOTS_MAX:
            older = SNAPSHOTS_MAX * 2 // 3
            del self._snapshot_times[1:older:2]
            del self._snapshots[1:older:2]

    def _at_risk(self, now: float, entered: Floats, returned: Floats) -> Floats:
        """Return how many votes were seen at each age, not having returned before.

        A vote can have been seen at an age only if it entered that long ago.
        """
        taken_at = np.searchsorted(self._snapshot_times, now - _STARTS * BINS_FROM, side="right")
        none = np.zeros_like(entered)
        old_enough = np.array(
            [self._snapshots[at - 1] if at else none for at in taken_at.tolist()]
        ).T
        old_enough[:, 0] = entered
        share = np.divide(returned, old_enough, out=np.zeros_like(returned), where=old_enough > 0.0)
        alive = np.clip(1.0 - np.cumsum(share, axis=1) + share, 0.02, 1.0)
        at_risk: Floats = np.maximum(old_enough * alive, returned)
        return at_risk

    def _hazards(self, returned: Floats, at_risk: Floats) -> Floats:
        overall = (returned.sum(axis=0) + GUESS_VOTES * HAZARD_GUESS) / (
            at_risk.sum(axis=0) + GUESS_VOTES
        )
        of_kind = (self._kinds.sum(returned) + GUESS_VOTES * overall) / (
            self._kinds.sum(at_risk) + GUESS_VOTES
        )
        guess = of_kind[self._kinds.label_of]
        seen = returned.sum(axis=1)
        for _ in range(2):
            for trait in self._traits:
                expected = (at_risk * guess).sum(axis=1)
                more = np.bincount(trait.label_of, seen, trait.labels) + GUESS_VOTES
                more /= np.bincount(trait.label_of, expected, trait.labels) + GUESS_VOTES
                guess *= more[trait.label_of][:, np.newaxis]
        # The first trait is the gap before, if there is one: it moves the gap after.
        gap_before = self._traits[0]
        more = gap_before.sum(returned) + GUESS_VOTES
        more /= gap_before.sum(at_risk * guess) + GUESS_VOTES
        guess *= more[gap_before.label_of]
        np.minimum(guess, HAZARD_MAX, out=guess)
        hazards: Floats = (returned + GUESS_VOTES * guess) / (at_risk + GUESS_VOTES)
        return np.minimum(hazards, HAZARD_MAX)


class _Groups:
    """Sums rows of a table by their labels."""

    def __init__(self, label_of: list[int], labels: int) -> None:
        self.label_of: Ints = np.array(label_of)
        self.labels = labels
        self._order = np.argsort(self.label_of, kind="stable")
        self._present, self._starts = np.unique(self.label_of[self._order], return_index=True)

    def sum(self, table: Floats) -> Floats:
        """Return the sum of the rows of each label."""
        sums = np.zeros((self.labels, table.shape[1]))
        sums[self._present] = np.add.reduceat(table[self._order], self._starts)
        return sums


def _gittins(gains: Floats, costs: Floats) -> Floats:
    """Return, for each row and bin, the best ratio of gains to costs from there on."""
    rows = len(gains)
    gained = np.zeros((rows, AGE_BINS + 1))
    paid = np.zeros((rows, AGE_BINS + 1))
    np.cumsum(gains, axis=1, out=gained[:, 1:])
    np.cumsum(costs, axis=1, out=paid[:, 1:])
    best = gains / costs
    for horizon in range(2, AGE_BINS + 1):
        ratio = gained[:, horizon:] - gained[:, :-horizon]
        ratio /= paid[:, horizon:] - paid[:, :-horizon]
        np.maximum(best[:, : 1 - horizon], ratio, out=best[:, : 1 - horizon])
    return best
