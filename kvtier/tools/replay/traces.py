"""Reads traces of requests: Mooncake's format, Qwen-Bailian's, a plain one, and kvtier's records.

A trace is a file of JSON lines, one request per line, plain or compressed. It may come from
anywhere: ``trace_lines`` reads its lines without trusting them.

Blocks are renumbered, from 0 in order of first appearance, such that equal numbers mean equal
prefixes. Qwen-Bailian names a block by its own tokens only, so one id may follow different
prefixes; no prefix cache could serve one for the other.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, get_args

from kvtier.tools.replay.trace_lines import (
    FORMATS,
    EventKind,
    OnBadLine,
    RecordedRow,
    RecordEvent,
    RequestRow,
    TraceError,
    TraceFile,
    TraceLines,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

REQUESTS_MAX: Final = 10_000_000
REFERENCES_MAX: Final = 200_000_000


class TraceRequest(NamedTuple):
    """One request of a trace."""

    time_s: float  #: since the trace's start
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]  #: of the prompt, head to tail; equal ids are equal prefixes
    ended_s: float | None = None  #: when the answer was complete, if known
    gpu_tokens: int = 0  #: the head of the prompt that the engine's own prefix cache had


class TraceEvent(NamedTuple):
    """An event of a recorded engine that changes the hits of requests."""

    time_s: float  #: since the trace's start; may be negative
    kind: EventKind
    tier: str = ""  #: its name; empty for a reset
    work: str = ""  #: the work that the tier did not do: loads or stores


@dataclass(frozen=True)
class Recorded:
    """The parts of a record besides its requests."""

    events: tuple[TraceEvent, ...] = ()  #: in order of time
    gpu_tokens: int = 0
    loaded_tokens: Mapping[str, int] = field(default_factory=dict)  #: by tier
    computed_tokens: int = 0


@dataclass(frozen=True)
class Trace:
    """Contents of a file."""

    path: Path
    format: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]  #: in order of time
    bad_lines: tuple[tuple[int, str], ...] = ()  #: line and fault; the first thousand
    bad_line_count: int = 0
    out_of_order_count: int = 0  #: requests that follow a later one in the file
    recorded: Recorded | None = None  #: only for a record

    @property
    def name(self) -> str:
        """The trace's name in titles."""
        return self.path.name

    @cached_property
    def references(self) -> int:
        """The number of blocks that all requests reference."""
        return sum(len(request.blocks) for request in self.requests)

    @cached_property
    def distinct_blocks(self) -> int:
        """The number of distinct blocks."""
        return len({block for request in self.requests for block in request.blocks})


def read_trace(
    path: str | Path,
    *,
    format: str = "auto",  # noqa: A002 - the option's name
    block_tokens: int | None = None,
    on_bad_line: OnBadLine = "stop",
    limit: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """Read a trace. Raises ``TraceError`` and nothing else, unless ``on_progress`` does.

    ``auto`` recognises the format by the fields of the first good line. ``limit``: the most
    requests to read. ``on_progress`` is called now and then with the bytes of the file that have
    been read, and its length (0 for a pipe).

    Requests are sorted by time, since servers may log a request when it ends; those that follow a
    later one are counted. Time starts with the earliest.
    """
    if on_bad_line not in get_args(OnBadLine):
        raise TraceError(f"on_bad_line={on_bad_line!r} must be stop or skip.")
    if limit is not None and limit < 1:
        raise TraceError(f"limit={limit} must be at least 1.")
    lines = TraceLines(Path(path), format, block_tokens, skips=on_bad_line == "skip")
    reader = _Reader(lines)
    try:
        with lines.path.open("rb") as file:
            reader.read_untrusted(TraceFile(file), limit, on_progress)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}.") from error
    return reader.finish()


class _Reader:
    """Collects the requests of one file."""

    def __init__(self, lines: TraceLines) -> None:
        self._lines = lines
        self._chain = _Chain()
        self._requests: list[TraceRequest] = []
        self._references = 0
        self._out_of_order = 0
        self._latest = 0.0
        self._gpu_tokens = self._computed_tokens = 0
        self._loaded_tokens: Counter[str] = Counter()
        self._events: list[TraceEvent] = []

    def read_untrusted(
        self,
        file: TraceFile,
        limit: int | None,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        """Read the file's requests; raises ``TraceError`` for a bad line unless it skips."""
        requests_max = REQUESTS_MAX if limit is None else min(limit, REQUESTS_MAX)
        for row in self._lines.read_untrusted(file, on_progress):
            if isinstance(row, RecordEvent):
                self._references += 1  # so that they are bounded, too
                self._events.append(TraceEvent(row.time_s, row.event, row.tier, row.work))
                continue
            self._requests.append(self._request(row))
            if len(self._requests) >= requests_max:
                break
            if self._references > REFERENCES_MAX:
                break
        self._refuse_too_large(limit)

    def finish(self) -> Trace:
        """Return the requests, in order of time."""
        lines = self._lines
        if not self._requests:
            raise lines.holds_no_request()
        requests = self._requests
        if self._out_of_order:
            requests.sort(key=attrgetter("time_s"))
        start = requests[0].time_s
        return Trace(
            path=lines.path,
            format=lines.format_name,
            block_tokens=lines.block_tokens or FORMATS[lines.format_name].block_tokens,
            requests=tuple(_since(start, each) for each in requests),
            bad_lines=tuple(lines.bad_lines),
            bad_line_count=lines.bad_line_count,
            out_of_order_count=self._out_of_order,
            recorded=self._recorded(start) if lines.format_name == "recorded" else None,
        )

    def _recorded(self, start: float) -> Recorded:
        events = sorted(self._events, key=attrgetter("time_s"))
        return Recorded(
            events=tuple(each._replace(time_s=each.time_s - start) for each in events),
            gpu_tokens=self._gpu_tokens,
            loaded_tokens=dict(self._loaded_tokens),
            computed_tokens=self._computed_tokens,
        )

    def _refuse_too_large(self, limit: int | None) -> None:
        cut_short = len(self._requests) >= REQUESTS_MAX and limit != REQUESTS_MAX
        if cut_short or self._references > REFERENCES_MAX:
            raise TraceError(
                f"{self._lines.path}: holds more than {REQUESTS_MAX:,} requests or "
                f"{REFERENCES_MAX:,} block references. Set --limit, the most to read."
            )

    def _request(self, row: RequestRow) -> TraceRequest:
        time_s = self._lines.time_s(row)
        self._references += len(row.hash_ids)
        self._out_of_order += time_s < self._latest
        self._latest = max(self._latest, time_s)
        blocks = self._chain.blocks(row.hash_ids)
        request = TraceRequest(time_s, row.input_length, row.output_length, blocks)
        if not isinstance(row, RecordedRow):
            return request
        self._loaded_tokens.update(row.loaded_tokens)
        self._gpu_tokens += row.gpu_tokens
        self._computed_tokens += row.computed_tokens
        return request._replace(ended_s=row.ended_s, gpu_tokens=row.gpu_tokens)


def _since(start: float, request: TraceRequest) -> TraceRequest:
    """Return the request with times since the trace's start."""
    ended_s = None if request.ended_s is None else request.ended_s - start
    return request._replace(time_s=request.time_s - start, ended_s=ended_s)


class _Chain:
    """Numbers blocks such that equal numbers mean equal prefixes."""

    def __init__(self) -> None:
        self._first: dict[int, int] = {}  # an id's number behind the first prefix that it followed
        self._others: dict[tuple[int, int], int] = {}  # behind any other prefix
        self._parents = array("q")  # by number

    def blocks(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of a request's blocks, given from head to tail."""
        first, parents = self._first, self._parents
        numbers = []
        parent = -1
        for each in ids:
            number = first.get(each)
            if number is None:
                number = first[each] = len(parents)
                parents.append(parent)
            elif parents[number] != parent:
                number = self._others.setdefault((parent, each), len(parents))
                if number == len(parents):
                    parents.append(parent)
            numbers.append(number)
            parent = number
        return tuple(numbers)
