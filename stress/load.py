"""The load: requests that share prefixes, as a scheduler would run them, many at once.

Each looks up its prefix until the answer is known, has its hits copied to the GPU, computes and
stores the rest, and ends; some are aborted meanwhile, some end before their copies do. Copies
take some steps, and bytes are compared when a copy begins and again when it ends: a slot that is
read must not change.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from stress.contents import CONVERSATION_BLOCKS, CONVERSATION_KEYS, content_of

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from kvtier.core.statistics import Statistics
    from kvtier.engine.facade import SchedulerFacade
    from kvtier.plugin_api.slot_memory import SlotMemory
    from stress.checker import Checker

REQUESTS_AT_ONCE: Final = 12
COPY_STEPS_MAX: Final = 3
LATE_FRACTION: Final = 0.2
LATE_STEPS_MAX: Final = 40
"""Of copies that are late: a reset, or the end of their request, meets some under way."""

FLUSH_STEPS_MAX: Final = 60
"""What the GPU did before a reset may end late: requests that look up again store anew by then."""

ABORTED_FRACTION: Final = 0.003  #: of waiting requests, a step
ENDS_EARLY_FRACTION: Final = 0.1
CAPPED_FRACTION: Final = 0.1
STORE_FAILS_FRACTION: Final = 0.02
THROWN_BACK_FRACTION: Final = 0.5
IDLE_S: Final = 0.0005
ALL_TIERS: Final = -1
NO_TIERS: Final = 0
NO_TIERS_FRACTION: Final = 0.2
"""Of requests that ask no tier, and store at once: also what they stored before a reset."""

ONE_TIER_FRACTION: Final = 0.1
"""Of requests that ask only one, any: a tier that has all would leave those after it unasked."""


@dataclass
class Request:
    """One request that waits for the answer to its lookups."""

    name: str
    keys: Sequence[bytes]
    tiers: int
    stores: bool = True  #: what it has not found
    waited_s: float = 0.0
    copies: int = 0  #: under way
    has_ended: bool = False


@dataclass
class Copy:
    """Blocks on their way between slots and the GPU."""

    request: Request
    keys: Sequence[bytes]
    slots: Sequence[int]
    epoch: int
    weights: str
    is_load: bool
    due_step: int


@dataclass
class Counts:
    """What the load has done, over all runtimes of a run."""

    requests: int = 0
    decided: int = 0  #: of these, whose lookups were answered
    blocks_read: int = 0
    blocks_stored: int = 0
    lookups: int = 0
    hits: int = 0
    aborted: int = 0
    steps: int = 0
    served_by: Counter[int] = field(default_factory=Counter)  #: tier → blocks that it delivered


class Load:
    """Runs requests on one runtime, until that is closed."""

    def __init__(
        self,
        facade: SchedulerFacade,
        memory: SlotMemory,
        checker: Checker,
        dice: random.Random,
        counts: Counts,
    ) -> None:
        self.counts = counts
        self.weights = ""  #: the name of those that the engine has now
        self.tiers = ALL_TIERS  #: which may serve the requests that begin from now on
        self.aborts = True  #: whether some requests are aborted while they wait
        self._facade = facade
        self._tier_count = len(facade.statistics().tiers)
        self._memory = memory
        self._checker = checker
        self._dice = dice
        self._waiting: list[Request] = []
        self._copies: list[Copy] = []
        self._before_reset: list[Copy] = []
        self._flush_step: int | None = None

    # --- steps ---

    def step(self, requests_max: int = REQUESTS_AT_ONCE) -> Statistics:
        """Run one step of a scheduler. Raises ``Failure``."""
        self.counts.steps += 1
        while len(self._waiting) < requests_max:
            self._begin()
        decided = [request.name for request in list(self._waiting) if self._decide(request)]
        ended = self._end_copies()
        if self._flush_step is not None and self.counts.steps >= self._flush_step:
            self.flush()
        self._facade.on_requests_scheduled(decided)
        self._facade.step_end()
        statistics = self._checker.end_step(self._facade)
        # With nothing to do, a real scheduler waits; a busy one lets other threads run too.
        time.sleep(0.0 if decided or ended else IDLE_S)
        return statistics

    def is_idle(self) -> bool:
        """Tell whether no request and no copy is under way."""
        return not (self._waiting or self._copies or self._before_reset)

    def reset(self, weights: str | None, *, changes_weights: bool) -> None:
        """Reset the runtime, as when the model's weights are replaced. ``None``: by no name."""
        self.flush()
        self._facade.reset(weights_version=weights)
        if changes_weights:
            self.weights = weights or f"{self._dice.random()}"
        self._before_reset, self._copies = self._copies, []
        steps_max = self._dice.choice((COPY_STEPS_MAX, FLUSH_STEPS_MAX))
        self._flush_step = self.counts.steps + self._dice.randrange(steps_max)
        self._throw_back({copy.request.name: copy.request for copy in self._before_reset})

    def _throw_back(self, running: Mapping[str, Request]) -> None:
        """Have running requests look up again by their names, as a reset of vLLM's may do."""
        for request in running.values():
            if not request.has_ended and self._dice.random() < THROWN_BACK_FRACTION:
                request.waited_s = 0.0
                self._waiting.append(request)

    def flush(self) -> None:
        """End what the GPU did before the last reset: late, and nobody else may have noticed."""
        if self._flush_step is None:
            return
        for copy in self._before_reset:
            if copy.is_load:
                self._checker.check_read(
                    f"{copy.request.name} from before a reset", copy.keys, copy.slots, copy.weights
                )
            else:
                self._write(copy, b"\xee")
            if self._dice.random() < 0.5:  # vLLM drops these itself; other callers don't
                self._complete(copy, success=True)
            self._copy_ended(copy)
        self._before_reset = []
        self._flush_step = None
        self._facade.on_reset_flushed()

    def find(self, keys: Sequence[bytes], tiers: int) -> None:
        """Begin a request for exactly these keys, served by these tiers only. It stores nothing."""
        self._add(keys, tiers, stores=False)

    # --- one request ---

    def _begin(self) -> None:
        keys = self._dice.choice(CONVERSATION_KEYS)
        keys = keys[: self._dice.randrange(1, CONVERSATION_BLOCKS)]
        self._add(keys, self._draw_tiers() if self.tiers == ALL_TIERS else self.tiers)

    def _draw_tiers(self) -> int:
        part = self._dice.random()
        if part < NO_TIERS_FRACTION:
            return NO_TIERS
        if part < NO_TIERS_FRACTION + ONE_TIER_FRACTION:
            return 1 << self._dice.randrange(self._tier_count)
        return ALL_TIERS

    def _add(self, keys: Sequence[bytes], tiers: int, *, stores: bool = True) -> None:
        self.counts.requests += 1
        request = Request(f"r{self.counts.requests}", keys, tiers, stores)
        self._facade.on_request_started(request.name, tiers=tiers)
        self._waiting.append(request)

    def _decide(self, request: Request) -> bool:
        """Look up; serve the request if the answer is known. True: it waits no more."""
        hits = self._facade.lookup_prefix(request.keys, request.name)
        if hits is None:
            request.waited_s += self._checker.step_s
            self._checker.check_pending(request.name, request.waited_s)
            if self._dice.random() < ABORTED_FRACTION and self.aborts:
                self.counts.aborted += 1
                self._waiting.remove(request)
                self._end(request)
            return False
        self._waiting.remove(request)
        self.counts.decided += 1
        self.counts.lookups += len(request.keys)
        self.counts.hits += hits
        self.counts.served_by.update(self._facade.load_sources(request.name).values())
        if self._dice.random() < CAPPED_FRACTION:
            hits = self._dice.randrange(hits + 1)  # as by ``max_load_tokens``, or another connector
        self._begin_load(request, request.keys[:hits])
        if request.stores:
            self._begin_store(request, request.keys[hits:])
        if not request.copies or self._dice.random() < ENDS_EARLY_FRACTION:
            self._end(request)
        return True

    def _begin_load(self, request: Request, keys: Sequence[bytes]) -> None:
        if keys:
            slots = self._facade.prepare_load(keys, request.name)
            self._checker.check_read(request.name, keys, slots, self.weights)
            self.counts.blocks_read += len(keys)
            self._add_copy(request, keys, slots, self._facade.epoch, is_load=True)

    def _begin_store(self, request: Request, keys: Sequence[bytes]) -> None:
        grant = self._facade.prepare_store(keys, request.name) if keys else None
        if grant is not None and grant.keys:
            self._add_copy(request, grant.keys, grant.slots, grant.epoch, is_load=False)

    # --- copies ---

    def _add_copy(
        self,
        request: Request,
        keys: Sequence[bytes],
        slots: Sequence[int],
        epoch: int,
        *,
        is_load: bool,
    ) -> None:
        is_late = self._dice.random() < LATE_FRACTION
        steps = self._dice.randrange(LATE_STEPS_MAX if is_late else COPY_STEPS_MAX)
        due_step = self.counts.steps + steps
        request.copies += 1
        self._copies.append(Copy(request, keys, slots, epoch, self.weights, is_load, due_step))

    def _end_copies(self) -> bool:
        """End what is due. True: there was something."""
        due = [copy for copy in self._copies if copy.due_step <= self.counts.steps]
        for copy in due:
            self._copies.remove(copy)
            if copy.is_load:
                self._checker.check_read(
                    f"{copy.request.name} at the end of its load",
                    copy.keys,
                    copy.slots,
                    copy.weights,
                )
            else:
                self._write(copy)
            self._complete(copy, success=self._dice.random() > STORE_FAILS_FRACTION)
            self._copy_ended(copy)
        return bool(due)

    def _write(self, copy: Copy, filler: bytes | None = None) -> None:
        """Write as the GPU would; with ``filler``, what nobody may ever read."""
        for key, slot in zip(copy.keys, copy.slots, strict=True):
            view = self._memory.view(slot)
            view[:] = content_of(key, copy.weights) if filler is None else filler * len(view)

    def _complete(self, copy: Copy, *, success: bool) -> None:
        name = copy.request.name
        if copy.is_load:
            self._facade.complete_load(copy.keys, name, epoch=copy.epoch)
        else:
            self.counts.blocks_stored += len(copy.keys) * success
            self._facade.complete_store(copy.keys, name, success=success, epoch=copy.epoch)

    def _copy_ended(self, copy: Copy) -> None:
        """End the request with its last copy."""
        copy.request.copies -= 1
        if not copy.request.copies and copy.request not in self._waiting:
            self._end(copy.request)

    def _end(self, request: Request) -> None:
        if not request.has_ended:
            request.has_ended = True
            order = request.keys if self._dice.random() < 0.5 else None
            self._facade.on_request_finished(request.name, order)
