"""Reads a record of an engine's requests, of any length, and keeps the figures of its page.

Requests are summed in bins of equal width. Whenever there are too many bins, two neighbours become
one. A bin begins at a multiple of its width since 1970, so the order of requests does not matter:
in the file they are in the order of their ends, and they count at their arrival.
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import UNSET

from kvtier.tools.replay.trace_lines import RecordedRow, RecordEvent, TraceError
from kvtier.tools.report.axis import BINS_MAX
from kvtier.tools.report.spread import Spread

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.tools.replay.trace_lines import TraceFile, TraceLines

BIN_S_MIN: Final = 0.25
LAST_S: Final = 253_402_300_799
"""The end of the year 9999, in seconds since 1970: no date is later."""

FAULTS_KEPT_MAX: Final = 10_000
RESETS_KEPT_MAX: Final = 10_000


class Bin:
    """Requests that arrived in one interval of time."""

    __slots__ = (
        *("requests", "never_ran", "tokens", "gpu", "computed", "loaded"),
        *("prompt", "answer", "waited", "took"),
    )

    def __init__(self) -> None:
        self.requests = self.never_ran = 0
        self.tokens = self.gpu = self.computed = 0  #: of prompts
        self.loaded: Counter[str] = Counter()  #: tokens, by tier
        self.prompt = Spread()  #: tokens
        self.answer = Spread()  #: tokens
        self.waited = Spread()  #: seconds from a request's arrival until it loaded or ran
        self.took = Spread()  #: seconds from a request's arrival to its end

    def add(self, row: RecordedRow) -> None:
        """Count a request."""
        self.requests += 1
        self.tokens += row.input_length
        self.gpu += row.gpu_tokens
        self.computed += row.computed_tokens
        self.loaded.update(row.loaded_tokens)
        self.prompt.add(row.input_length)
        self.answer.add(row.output_length)
        self.took.add(row.ended_s - row.timestamp)
        if row.started_s is None:
            self.never_ran += 1
        elif row.started_s is not UNSET:
            self.waited.add(row.started_s - row.timestamp)

    def merge(self, other: Bin) -> None:
        """Count all requests of another one, too."""
        self.requests += other.requests
        self.never_ran += other.never_ran
        self.tokens += other.tokens
        self.gpu += other.gpu
        self.computed += other.computed
        self.loaded.update(other.loaded)
        self.prompt.merge(other.prompt)
        self.answer.merge(other.answer)
        self.waited.merge(other.waited)
        self.took.merge(other.took)


class RecordFault(NamedTuple):
    """A period in which a tier did no work of a kind."""

    seconds: float
    from_s: float
    tier: str
    work: str  #: loads or stores
    is_over: bool  #: within the record


class Record:
    """Figures of a record's page. Times are since 1970."""

    def __init__(self) -> None:
        self.all = Bin()
        self.bin_s = BIN_S_MIN
        self.first_s = self.last_s = 0.0  #: the first arrival, and the last event of any kind
        self.resets: list[float] = []
        self.reset_count = 0
        self.fault_count = 0
        self.works: dict[tuple[str, str], float] = {}  #: (tier, work) with faults → their seconds
        self._bins: dict[int, Bin] = {}
        self._faults: list[RecordFault] = []  #: a heap: of too many, the shortest is dropped
        self._down: dict[tuple[str, str], float] = {}  #: since when

    def add(self, row: RecordedRow) -> None:
        """Count a request."""
        at_s = row.timestamp
        self.first_s = min(self.first_s, at_s) if self.all.requests else at_s
        self.last_s = max(self.last_s, at_s, row.ended_s)
        self.all.add(row)
        number = self._number(at_s)
        found = self._bins.get(number)
        if found is None:
            found = self._bins[number] = Bin()
            while len(self._bins) > 2 * BINS_MAX:
                self._halve()
                # The request's own bin may have been merged into another.
                found = self._bins[self._number(at_s)]
        found.add(row)

    def note(self, event: RecordEvent) -> None:
        """Note an event."""
        self.last_s = max(self.last_s, event.time_s)
        work = event.tier, event.work
        if event.event == "reset":
            self.reset_count += 1
            if len(self.resets) < RESETS_KEPT_MAX:
                self.resets.append(event.time_s)
        elif event.event == "tier_down":
            self._down.setdefault(work, event.time_s)
        elif work in self._down:
            self._end_fault(work, event.time_s, is_over=True)

    def finish(self) -> None:
        """End faults that still last, and reduce the bins to the number on a page."""
        for work in list(self._down):
            self._end_fault(work, self.last_s, is_over=False)
        while self._number(self.last_s) - self._number(self.first_s) >= BINS_MAX:
            self._halve()

    @property
    def begins_s(self) -> float:
        """The beginning of the first bin."""
        return self._number(self.first_s) * self.bin_s

    @property
    def bins(self) -> list[Bin]:
        """All bins, including empty ones; available once it is finished."""
        numbers = range(self._number(self.first_s), self._number(self.last_s) + 1)
        nothing = Bin()
        return [self._bins.get(each, nothing) for each in numbers]

    @property
    def faults(self) -> list[RecordFault]:
        """The longest faults, the longest first."""
        return sorted(self._faults, reverse=True)

    def bin_of(self, at_s: float) -> int:
        """Return the position of a moment among the bins."""
        first, last = self._number(self.first_s), self._number(self.last_s)
        return min(max(first, self._number(at_s)), last) - first

    def _number(self, at_s: float) -> int:
        """Return the number of the bin of a moment, from 1970 on."""
        return int(at_s / self.bin_s)

    def _end_fault(self, work: tuple[str, str], at_s: float, *, is_over: bool) -> None:
        from_s = self._down.pop(work)
        seconds = max(0.0, at_s - from_s)
        self.fault_count += 1
        self.works[work] = self.works.get(work, 0.0) + seconds
        fault = RecordFault(seconds, from_s, *work, is_over)
        if len(self._faults) < FAULTS_KEPT_MAX:
            heapq.heappush(self._faults, fault)
        else:
            heapq.heappushpop(self._faults, fault)

    def _halve(self) -> None:
        self.bin_s *= 2
        merged: dict[int, Bin] = {}
        for number, each in self._bins.items():
            if number // 2 in merged:
                merged[number // 2].merge(each)
            else:
                merged[number // 2] = each
        self._bins = merged


def read_record_untrusted(
    file: TraceFile, lines: TraceLines, on_progress: Callable[[int, int], None]
) -> Record:
    """Read a record in bounded memory. Raises ``TraceError``."""
    record = Record()
    for row in lines.read_untrusted(file, on_progress):
        at_s = row.time_s if isinstance(row, RecordEvent) else row.timestamp
        if at_s > LAST_S or (isinstance(row, RecordedRow) and row.ended_s > LAST_S):
            raise TraceError(f"{lines.path}: {at_s:.6g} s are after the year 9999. Mend it.")
        if isinstance(row, RecordEvent):
            record.note(row)
        elif isinstance(row, RecordedRow):
            record.add(row)
    if not record.all.requests:
        raise lines.holds_no_request()
    record.finish()
    return record
