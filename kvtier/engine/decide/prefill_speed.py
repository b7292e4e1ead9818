"""Estimates how fast the engine computes prompts, from its own steps.

A step that computes ``n`` tokens of a request with ``c`` tokens already computed costs about::

    constant + linear * n + quadratic * (n² + 2 n c)

seconds: weights are applied to each token, and each token attends to all before it. All
three terms are fitted to steps by least squares with exponential forgetting, and none may
be negative (Lawson and Hanson, *Solving Least Squares Problems*, chapter 23; with three
parameters each subset of them is tried). Steps that compute no prompt are ignored: an idle engine
seems to take long for one. ``n² + 2 n c`` is ``(n + c)² - c²``, so a prompt costs the same in one
step as in many, except for the constant, which each step adds.

An engine may schedule a step while the one before it runs (async scheduling), so it is not known
beforehand which interval between two steps was the time of which step. Both readings of the
intervals are fitted, and the one with the best recent predictions counts.

Given ``tokens_per_s``, that rate counts, and nothing is learnt.
"""

from __future__ import annotations

from math import inf, log
from typing import Final, NamedTuple, TypeAlias

from kvtier.engine.decide.changes import ChangeDetector, bounded

FORGETTING: Final = 0.9
"""Factor on a step's weight for each later step."""

LAG_MAX: Final = 1
"""In steps: with async scheduling, a step's time is seen one interval later."""

SMALL_SHARE: Final = 1 / 8
"""Share of the largest recent step. The time of a smaller step is mostly the constant, and would
be taken for a change of all three terms: then a long prompt would seem to cost no more."""

ALIKE: Final = 0.01
"""Readings with smaller errors count as equal: while all steps are alike, both may be right."""

OBSERVATIONS_MIN: Final = 3
"""Number of steps that computed prompts from which on the fit counts."""

_TOKENS: Final = 1e3  # features are scaled, so that sums of squares keep their digits
_ATTENTION: Final = 1e6
_SECONDS_MIN: Final = 1e-6
_SINGULAR: Final = 1e-9
_ERROR_MAX: Final = 2.0

_Features: TypeAlias = tuple[float, float, float]
_SUBSETS: Final = ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,))


class Foretold(NamedTuple):
    """The expected and the actual time of a step."""

    expected_s: float
    seconds: float


def _features(tokens: int, attention: int) -> _Features:
    return 1.0, tokens / _TOKENS, attention / _ATTENTION


class PrefillSpeed:
    """The prefill speed of one engine."""

    def __init__(self, tokens_per_s: float | None = None) -> None:
        self._configured = tokens_per_s
        self._fits = [_Fit() for _ in range(LAG_MAX + 1)]  # by lag, in steps
        self._before = [(0, 0)] * LAG_MAX  # tokens and attention of the steps before, latest first
        self._observed = 0
        self._tokens_max = 1.0

    def step(self, tokens: int, attention: int, seconds: float | None) -> Foretold | None:
        """Learn from a step: the work it computed, and ``seconds`` since the step before.

        ``tokens``: prompt tokens computed; ``attention``: the sum of ``n² + 2 n c`` over requests.
        ``seconds`` is None if the engine was idle for some of that time. Steps come in order.
        Steps that compute no prompt may be left out, after ``LAG_MAX`` of them.
        Returns the prediction for the step that has ended now, if it computed a prompt.
        """
        if self._configured is not None:
            return None
        if tokens:
            self._tokens_max = max(0.99 * self._tokens_max, float(tokens))
            if tokens < SMALL_SHARE * self._tokens_max:
                tokens = attention = 0
            self._observed += tokens > 0
        computed = [(tokens, attention), *self._before]
        self._before = computed[:LAG_MAX]
        if seconds is None:
            return None
        foretold = None
        n, attended = computed[self.lag]
        if n and self.is_known:
            foretold = Foretold(self._best().expected(_features(n, attended)), seconds)
        for fit, (n, attended) in zip(self._fits, computed, strict=True):
            if n:
                fit.add(_features(n, attended), seconds)
        return foretold

    @property
    def is_known(self) -> bool:
        """Whether ``rates`` can return an estimate."""
        return self._configured is not None or self._observed >= OBSERVATIONS_MIN

    def rates(self) -> tuple[float, float] | None:
        """Return seconds a token, and seconds for each of ``n² + 2 n c``; None: not known yet."""
        if self._configured is not None:
            return 1 / self._configured, 0.0
        if not self.is_known:
            return None
        constant, linear, quadratic = self._best().coefficients()
        linear = linear / _TOKENS + constant / self._tokens_max
        return (linear, quadratic / _ATTENTION) if linear + quadratic > 0 else None

    @property
    def lag(self) -> int:
        """How many steps later a step's time is seen."""
        return min(range(LAG_MAX + 1), key=lambda lag: self._fits[lag].doubt)

    def _best(self) -> _Fit:
        return self._fits[self.lag]


class _Fit:
    """One reading of the steps: features, and the seconds that they took."""

    def __init__(self) -> None:
        self.error = 0.0  #: of recent predictions: a logarithm
        self._has_foretold = False
        self._subset: tuple[int, ...] = _SUBSETS[0]  # terms above 0 in the last solution
        self._changes = ChangeDetector()
        self._forget()

    @property
    def doubt(self) -> float:
        """Error of its recent predictions; infinite for a fit that has predicted nothing yet."""
        return max(self.error, ALIKE) if self._has_foretold else inf

    def _forget(self) -> None:
        self._weights = 0.0
        self._squares = [[0.0] * 3 for _ in range(3)]  # of features, weighted
        self._products = [0.0] * 3  # features times seconds
        self._solved: tuple[float, float, float] | None = None

    def add(self, features: _Features, seconds: float) -> None:
        """Learn from a step."""
        seconds = max(seconds, _SECONDS_MIN)
        if self._weights > OBSERVATIONS_MIN:
            expected = self.expected(features)
            error = min(_ERROR_MAX, abs(log(seconds / expected)))
            self._has_foretold = True
            self.error = FORGETTING * self.error + (1 - FORGETTING) * error
            anew = self._changes.changed(features, seconds, expected, self._weights)
            if anew:
                self._forget()
                for at, seen in anew:
                    self._add((at[0], at[1], at[2]), seen)
                return
            seconds = bounded(seconds, expected)
        self._add(features, seconds)

    def _add(self, features: _Features, seconds: float) -> None:
        weight = 1 / seconds  # so errors count in proportion: long steps count no more
        self._weights = FORGETTING * self._weights + 1
        for row, feature in enumerate(features):
            weighted = weight * feature
            squares = self._squares[row]
            for column, other in enumerate(features):
                squares[column] = FORGETTING * squares[column] + weighted * other
            self._products[row] = FORGETTING * self._products[row] + weighted * seconds
        self._solved = None

    def expected(self, features: _Features) -> float:
        """Return the expected seconds of a step."""
        solved = self.coefficients()
        return max(_SECONDS_MIN, sum(c * x for c, x in zip(solved, features, strict=True)))

    def coefficients(self) -> tuple[float, float, float]:
        """Return the best three coefficients that are at least 0."""
        if self._solved is None:
            self._solved = self._best()
        return self._solved

    def _best(self) -> _Features:
        candidates: list[_Features] = []
        for subset in (self._subset, *_SUBSETS):
            found = self._solve(subset)
            if found is None:
                continue
            if self._is_best(found, subset):
                self._subset = subset
                return found
            candidates.append(found)
        return min(candidates, key=self._residual, default=(0.0, 0.0, 0.0))

    def _is_best(self, found: _Features, subset: tuple[int, ...]) -> bool:
        """Return whether no zero coefficient would fit better above 0 (Karush-Kuhn-Tucker)."""
        a, b, c = found
        for row in (0, 1, 2):
            if row not in subset:
                x, y, z = self._squares[row]
                if self._products[row] > x * a + y * b + z * c:
                    return False
        return True

    def _residual(self, found: _Features) -> float:
        """Return the sum of squared errors, less a term that is the same for all candidates."""
        fitted = sum(
            found[row] * found[column] * self._squares[row][column]
            for row in range(3)
            for column in range(3)
        )
        return fitted - 2 * sum(a * b for a, b in zip(found, self._products, strict=True))

    def _solve(self, subset: tuple[int, ...]) -> _Features | None:
        """Solve the normal equations for a subset; None: singular, or a solution below 0."""
        rows = [
            [*(self._squares[row][column] for column in subset), self._products[row]]
            for row in subset
        ]
        size = len(subset)
        for pivot in range(size):
            largest = rows[pivot][pivot]
            if largest <= _SINGULAR * self._squares[subset[pivot]][subset[pivot]]:
                return None
            for row in range(size):
                if row != pivot:
                    factor = rows[row][pivot] / largest
                    rows[row] = [
                        a - factor * b for a, b in zip(rows[row], rows[pivot], strict=True)
                    ]
        found = [0.0, 0.0, 0.0]
        for row, place in enumerate(subset):
            found[place] = rows[row][size] / rows[row][row]
        return (found[0], found[1], found[2]) if min(found) >= 0 else None
