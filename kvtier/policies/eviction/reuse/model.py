"""Estimates how soon a block is used again: counts, hazards, and Gittins' index.

For each cohort (``cohorts``) the model counts how many votes *entered* it, and
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
"""Used before any observation: equal in all bins, so the index falls with age as in LRU."""

HAZARD_MAX: Final = 0.9
"""The product of factors may exceed 1."""

VOTES_MAX: Final = 200_000.0
"""Whenever there are this many votes, all are halved: slow forgetting."""

SNAPSHOTS_MAX: Final = 96
"""Snapshots of the entered votes; every second of the older ones goes, so gaps grow with age."""

_STARTS: Final = np.concatenate([[0.0], 2.0 ** (np.arange(AGE_BINS - 1) / 2)])
_WIDTHS: Final = np.diff(np.append(_STARTS, 2.0 ** ((AGE_BINS - 1) / 2)))
_WIDTHS_FROM: Final = [_WIDTHS[start:].tolist() for start in range(AGE_BINS)]

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
        self._kinds: Ints = np.array(self.cohorts.kind_of)
        self._traits: Ints = np.array(self.cohorts.traits_of).T
        self.clear(0.0)

    def clear(self, now: float) -> None:
        """Forget all counts."""
        count = self.cohorts.count
        self._entered = array("d", bytes(8 * count))
        self._returned = array("d", bytes(8 * count * AGE_BINS))
        self._snapshot_times: list[float] = []
        self._snapshots: list[Floats] = []
        self.refresh(now)

    def enter(self, cohort: int) -> None:
        """Count a stretch of blocks placed in ``cohort``."""
        self._entered[cohort] += 1.0

    def come_back(self, cohort: int, gap: float, share: float) -> None:
        """Count that ``share`` of a stretch in ``cohort`` was used again after ``gap``."""
        self._returned[cohort * AGE_BINS + age_bin(gap)] += share

    def index_of(self, cohort: int, age: float) -> float:
        """Return the index of a cohort at an age.

        Computed on demand, and kept until the hazards change: few cohorts are in use.
        """
        if age <= BINS_FROM * 0.5**0.5:
            return self._index_at(cohort, 0)
        at = 2.0 * log2(age / BINS_FROM) + 1.0
        low = int(at)
        if low >= AGE_BINS - 1:
            return self._index_at(cohort, AGE_BINS - 1)
        index = self._index_at(cohort, low)
        return index + (at - low) * (self._index_at(cohort, low + 1) - index)

    def _index_at(self, cohort: int, start: int) -> float:
        """Return the index at the start of a bin: the best ratio, over all bins to end in."""
        index = self._index.get(cohort * AGE_BINS + start)
        if index is None:
            alive, index, gain, cost = 1.0, 0.0, 0.0, 0.0
            hazards = self._hazards[cohort, start:].tolist()
            for hazard, width in zip(hazards, _WIDTHS_FROM[start], strict=True):
                returns = alive * hazard
                gain += returns
                cost += (alive - 0.5 * returns) * width
                alive -= returns
                if gain > index * cost:
                    index = gain / cost
            self._index[cohort * AGE_BINS + start] = index
        return index

    def refresh(self, now: float) -> None:
        """Compute hazards from the counts as they are ``now``. Indices follow in ``index_of``."""
        entered = np.frombuffer(self._entered)
        returned = np.frombuffer(self._returned).reshape(-1, AGE_BINS)
        if entered.sum() > VOTES_MAX:
            entered *= 0.5
            returned *= 0.5
            self._snapshots = [each * 0.5 for each in self._snapshots]
        self._make_snapshot(now, entered)
        seen = np.flatnonzero(entered)  # a few dozen: no other cohort has any count
        self._hazards = self._estimate(
            seen, returned[seen], self._at_risk(now, seen, returned[seen])
        )
        self._index: dict[int, float] = {}  # by cohort and bin

    def _make_snapshot(self, now: float, entered: Floats) -> None:
        self._snapshot_times.append(now)
        self._snapshots.append(entered.copy())
        if len(self._snapshots) > SNAPSHOTS_MAX:
            older = SNAPSHOTS_MAX * 2 // 3
            del self._snapshot_times[1:older:2]
            del self._snapshots[1:older:2]

    def _at_risk(self, now: float, seen: Ints, returned: Floats) -> Floats:
        """Return how many votes have reached each age without having returned.

        A vote can have reached an age only if it entered that long ago.
        """
        taken_at = np.searchsorted(self._snapshot_times, now - _STARTS * BINS_FROM, side="right")
        taken_at[0] = len(self._snapshots)
        none = np.zeros(len(seen))
        old_enough = np.array(
            [self._snapshots[at - 1][seen] if at else none for at in taken_at.tolist()]
        ).T
        share = np.divide(returned, old_enough, out=np.zeros_like(returned), where=old_enough > 0.0)
        alive = np.clip(1.0 - np.cumsum(share, axis=1) + share, 0.02, 1.0)
        at_risk: Floats = np.maximum(old_enough * alive, returned)
        return at_risk

    def _estimate(self, seen: Ints, returned: Floats, at_risk: Floats) -> Floats:
        """Return the hazards of all cohorts from the counts of those ``seen``."""
        overall = (returned.sum(axis=0) + GUESS_VOTES * HAZARD_GUESS) / (
            at_risk.sum(axis=0) + GUESS_VOTES
        )
        kinds = self._kinds[seen]
        of_kind = (_sum_by(kinds, returned, len(self.cohorts.kinds)) + GUESS_VOTES * overall) / (
            _sum_by(kinds, at_risk, len(self.cohorts.kinds)) + GUESS_VOTES
        )
        factor = np.ones(len(self._kinds))
        came_back = returned.sum(axis=1)
        expected = (at_risk * of_kind[kinds]).sum(axis=1)
        labels = self.cohorts.traits
        for trait in (*self._traits, *self._traits):  # twice: each factor shifts the others
            more = np.bincount(trait[seen], came_back, labels) + GUESS_VOTES
            more /= np.bincount(trait[seen], expected * factor[seen], labels) + GUESS_VOTES
            factor *= more[trait]
        guess: Floats = of_kind[self._kinds] * factor[:, np.newaxis]
        # The first trait is the gap before, if there is one: it moves the gap after.
        gap_before = self._traits[0]
        shift = _sum_by(gap_before[seen], returned, labels) + GUESS_VOTES
        shift /= _sum_by(gap_before[seen], at_risk * guess[seen], labels) + GUESS_VOTES
        guess *= shift[gap_before]
        np.minimum(guess, HAZARD_MAX, out=guess)
        hazards = guess
        hazards[seen] = (returned + GUESS_VOTES * guess[seen]) / (at_risk + GUESS_VOTES)
        return np.minimum(hazards, HAZARD_MAX, out=hazards)


def _sum_by(label_of: Ints, table: Floats, labels: int) -> Floats:
    """Return the sum of the rows of each label."""
    places = label_of[:, np.newaxis] * AGE_BINS + np.arange(AGE_BINS)
    sums = np.bincount(places.ravel(), table.ravel(), labels * AGE_BINS).astype(np.float64)
    return sums.reshape(labels, AGE_BINS)
