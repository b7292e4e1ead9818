"""Estimates how fast the engine computes prompts, from its own steps.

A step that computes ``n`` tokens of a request with ``c`` tokens already computed costs about
``linear * n + quadratic * (n² + 2 n c)`` seconds: weights are applied to each token, and each token
attends to all before it. Both are fitted to steps (``kvtier/engine/decide/cost_fit.py``).
``n² + 2 n c`` is ``(n + c)² - c²``, so a prompt costs the same in one step as in many. A step's
fixed time is part of ``linear``, so steps much smaller than others are ignored, as are those that
compute no prompt: an idle engine seems to take long for one.

An engine may schedule a step while the one before it runs (async scheduling, the default on GPUs).
Then the interval after a step is the time of the step before, and a short prompt seems to cost
nothing. vLLM gives a manager no configuration that shows this. But steps that compute prompts are
the long ones, so the lag with which they take longest is used.

Rejected: a fit for each lag, using the one that predicts best. While prompts take one step each,
both predict equally well, and noise decides.

Given ``tokens_per_s``, that rate is used, and nothing is learnt.
"""

from __future__ import annotations

from typing import Final

from kvtier.engine.decide.cost_fit import CostFit
from kvtier.engine.decide.load_decision import Rates

FORGETTING: Final = 0.9

LAG_MAX: Final = 1
"""In steps: with async scheduling, a step's time is seen one interval later."""

SMALL_SHARE: Final = 1 / 4
"""Share of the largest recent step. A smaller step's time is mostly the fixed time of any step."""

LONGER: Final = 1.1
"""With another lag, steps must take this many times as long, so that noise does not decide."""

OBSERVATIONS_MIN: Final = 3
"""The fit is used after this many steps that computed prompts."""


class PrefillSpeed:
    """The prefill speed of one engine. ``rates``: the cost of computing; None: not known yet."""

    def __init__(self, tokens_per_s: float | None = None) -> None:
        self._is_configured = tokens_per_s is not None
        self.rates = Rates(1 / tokens_per_s, 0.0) if tokens_per_s is not None else None
        self.lag = 0  #: how many steps later a step's time is seen
        self._fit = CostFit(FORGETTING)
        self._shares = [0.0] * (LAG_MAX + 1)  # by lag: mean of time / (time + expected time)
        self._before = [(0, 0)] * LAG_MAX  # tokens and attention of the steps before, latest first
        self._observed = 0
        self._tokens_max = 1.0

    def step(self, tokens: int, attention: int, seconds: float | None) -> float | None:
        """Learn from a step: the work it computed, and ``seconds`` since the step before.

        ``tokens``: prompt tokens computed; ``attention``: the sum of ``n² + 2 n c`` over requests.
        ``seconds`` is None if the engine was idle for some of that time. Steps come in order.
        Steps that compute no prompt may be left out, after ``LAG_MAX`` of them.
        Returns the time expected of the step that ``seconds`` measures; None: unknown, no prompt.
        """
        if self._is_configured:
            return None
        if tokens:
            self._tokens_max = max(0.99 * self._tokens_max, float(tokens))
            if tokens < SMALL_SHARE * self._tokens_max:
                tokens = attention = 0
        computed = [(tokens, attention), *self._before]
        self._before = computed[:LAG_MAX]
        if seconds is None:
            return None
        for lag, (n, attended) in enumerate(computed):
            if n:
                share = seconds / (seconds + self._fit.seconds(attended, n))
                self._shares[lag] += (1 - FORGETTING) * (share - self._shares[lag])
        n, attended = computed[self.lag]
        if not n:
            return None
        expected = self._fit.seconds(attended, n) if self.rates is not None else None
        self._fit.observe(attended, n, seconds)
        self._observed += 1
        if self._observed >= OBSERVATIONS_MIN:
            self.rates = Rates(self._fit.second, self._fit.first)
        longest = max(self._shares)
        if longest > LONGER * self._shares[self.lag]:
            self.lag = self._shares.index(longest)
            self._fit.restart()
        return expected
