"""Writes the blocks that are likely to be used again.

The chance comes from the statistics of the eviction policy ``reuse``: a conversation
that went on for eight turns mostly goes on, a first prompt mostly doesn't. The
predictor here is such a policy of its own, over the blocks that were offered
to the tier, whether they were written or not.

If written bytes are the scarce resource (an SSD lasts for so many), give a budget
instead of a threshold: the threshold then follows the offered blocks, so that the
likeliest ones use up the budget.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from kvtier.plugin_api.admission_policy import AdmissionContext, AdmissionPolicy
from kvtier.policies.eviction.reuse.policy import ReusePolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.plugin_api.keys import Key, RequestId
    from kvtier.plugin_api.options import Options

THRESHOLD: Final = 0.35
"""The default. On a trace of conversations it saves a quarter of the writes at 3 points of hits."""

DAY_S: Final = 86_400.0

BUDGET_MEMORY_S: Final = 3_600.0
"""Blocks offered an hour ago count a third as much as now, in finding the threshold."""

BURST_S: Final = 3_600.0
"""How long the budget may be saved up."""

CHANCE_STEPS: Final = 100


class _Budget:
    """Finds the threshold at which the offered blocks use up a budget of blocks per second."""

    def __init__(self, blocks_a_second: float) -> None:
        self._rate = blocks_a_second
        self._saved = blocks_a_second * BURST_S
        self._offered = [0.0] * (CHANCE_STEPS + 1)  # blocks by chance, older ones count less
        self._since: float | None = None
        self._now = 0.0

    def pass_time(self, now: float) -> None:
        """Add to the savings, and let older offers count less."""
        if self._since is None:
            self._since = self._now = now
        passed = max(0.0, now - self._now)
        self._now = now
        self._saved = min(self._rate * BURST_S, self._saved + self._rate * passed)
        kept = 1.0 - min(1.0, passed / BUDGET_MEMORY_S)
        self._offered = [blocks * kept for blocks in self._offered]

    def offer(self, chances: Sequence[float]) -> None:
        """Count blocks that are offered with these chances."""
        for chance in chances:
            self._offered[int(chance * CHANCE_STEPS)] += 1.0

    def spend(self) -> bool:
        """Take a block out of the budget. False: it is used up."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True

    def threshold(self) -> float:
        """Return the lowest chance at which the budget has room for the offered blocks."""
        since = self._now if self._since is None else self._since
        seconds = min(max(self._now - since, 1.0), BUDGET_MEMORY_S)
        room = self._rate * seconds
        for step in range(CHANCE_STEPS, -1, -1):
            room -= self._offered[step]
            if room < 0:
                return (step + 1) / CHANCE_STEPS
        return 0.0


class PredictedReuseAdmission(AdmissionPolicy):
    """Options: ``threshold`` or ``write_bytes_per_day_max``; ``remembered_blocks_max``."""

    def __init__(self, options: Options, context: AdmissionContext) -> None:
        self._threshold = options.number("threshold", THRESHOLD, maximum=1.0)
        self._budget: _Budget | None = None
        if options.has("write_bytes_per_day_max"):
            if options.has("threshold"):
                raise options.error(
                    "threshold",
                    self._threshold,
                    "does not go together with write_bytes_per_day_max, which sets its own. "
                    "Remove one of the two",
                )
            bytes_per_day = options.size("write_bytes_per_day_max", minimum=context.block_bytes)
            self._budget = _Budget(bytes_per_day / DAY_S / context.block_bytes)
        else:
            options.allow("write_bytes_per_day_max")
        self._remembered_blocks_max = context.remembered_blocks_max(options)
        options.finish()
        self._offered = ReusePolicy(self._remembered_blocks_max)
        self._refused: OrderedDict[Key, None] = OrderedDict()

    def admit(self, keys: Sequence[Key], request: RequestId) -> list[bool]:
        """See ``AdmissionPolicy.admit``."""
        chances = self._offered.chance_of_reuse(keys, request)
        self._remember(keys, request)
        if self._budget is None:
            admitted = [chance >= self._threshold for chance in chances]
        else:
            self._budget.offer(chances)
            threshold = self._budget.threshold()
            admitted = [chance >= threshold and self._budget.spend() for chance in chances]
        for key, may in zip(keys, admitted, strict=True):
            if may:
                self._refused.pop(key, None)
            else:
                self._refused[key] = None
                self._refused.move_to_end(key)
        while len(self._refused) > self._remembered_blocks_max:
            self._refused.popitem(last=False)
        return admitted

    def touch(self, keys: Sequence[Key], request: RequestId) -> None:
        """See ``AdmissionPolicy.touch``: the blocks a request goes on from determine its chance."""
        self._offered.touch(keys, request)

    def end_request(self, request: RequestId, order: Sequence[Key] | None) -> list[Key]:
        """See ``AdmissionPolicy.end_request``. Refused blocks may have become likelier."""
        refused = [key for key in order or () if key in self._refused]
        wanted: list[Key] = []
        if refused:
            threshold = self._threshold if self._budget is None else self._budget.threshold()
            chances = self._offered.chance_of_reuse(refused, request)
            wanted = [k for k, chance in zip(refused, chances, strict=True) if chance >= threshold]
        self._offered.end_request(request, order)
        return wanted

    def pass_time(self, now: float) -> None:
        """See ``AdmissionPolicy.pass_time``."""
        self._offered.pass_time(now)
        if self._budget is not None:
            self._budget.pass_time(now)

    def _remember(self, keys: Sequence[Key], request: RequestId) -> None:
        surplus = len(self._offered) + len(keys) - self._remembered_blocks_max
        if surplus > 0:
            self._offered.choose_victims(surplus, frozenset(keys))
        self._offered.admit(keys, request, held=False)
