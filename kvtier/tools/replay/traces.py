"""Reads traces of requests: Mooncake's format, Qwen-Bailian's, a plain one, and kvtier's records.

A trace is a file of JSON lines, one request a line, as it is or compressed. It may
come from anywhere, so nothing in it is trusted: every number has a bound, and a
line costs bounded memory whatever is in it. A bad line is named by its number,
and reading stops, or goes on and counts, as asked.

Blocks are numbered anew, from 0 in order of first appearance, such that equal
numbers mean equal prefixes. Qwen-Bailian names a block by its own tokens only,
so there one id may follow different prefixes; no prefix cache could serve
the one for the other.
"""

from __future__ import annotations

import gzip
import io
import zlib
from array import array
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, get_args

import msgspec

from kvtier.errors import Misuse
from kvtier.tools.replay import zstd_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

OnBadLine = Literal["stop", "skip"]
EventKind = Literal["reset", "tier_down", "tier_up"]

LINE_BYTES_MAX: Final = 16 * 2**20  #: ids of a prompt of some ten million tokens
TOKENS_MAX: Final = 10**9
ID_MAX: Final = 2**64 - 1  #: a 64-bit hash fits
TIMESTAMP_MAX: Final = 10**14  #: milliseconds since 1970 fit
SPAN_S_MAX: Final = 366 * 24 * 3600
REQUESTS_MAX: Final = 10_000_000
REFERENCES_MAX: Final = 200_000_000
BAD_LINES_KEPT_MAX: Final = 1000
BLOCK_TOKENS_MAX: Final = 2**20
TIERS_MAX: Final = 64  #: names of tiers in a record
TIER_NAME_MAX: Final = 64

LINES_PER_REPORT: Final = 500
GZIP_MAGIC: Final = b"\x1f\x8b"
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class TraceError(Misuse, ValueError):
    """Raised when a trace cannot be read. The text names file, line and what is wrong."""


class TraceRequest(NamedTuple):
    """One request of a trace."""

    time_s: float  #: since the trace's start
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]  #: of the prompt, head to tail; equal ids are equal prefixes
    ended_s: float | None = None  #: when the answer was whole, if that is known
    gpu_tokens: int = 0  #: the first of the prompt, which the engine's own prefix cache had


class TraceEvent(NamedTuple):
    """Something that happened to a recorded engine, and changes what requests find."""

    time_s: float  #: since the trace's start; may be negative
    kind: EventKind
    tier: str = ""  #: its name; of a reset: none
    work: str = ""  #: which the tier did not do: loads or stores


@dataclass(frozen=True)
class Recorded:
    """What a record has of the engine's run, besides its requests."""

    events: tuple[TraceEvent, ...] = ()  #: in order of time
    gpu_tokens: int = 0
    loaded_tokens: Mapping[str, int] = field(default_factory=dict)  #: by tier
    computed_tokens: int = 0


@dataclass(frozen=True)
class Trace:
    """What a file held."""

    path: Path
    format: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]  #: in order of time
    bad_lines: tuple[tuple[int, str], ...] = ()  #: line and what is wrong; the first thousand
    bad_line_count: int = 0
    out_of_order_count: int = 0  #: requests that came after a later one in the file
    recorded: Recorded | None = None  #: of a record only

    @property
    def name(self) -> str:
        """What to call the trace in titles."""
        return self.path.name

    @cached_property
    def references(self) -> int:
        """How many blocks all requests ask for, one by one."""
        return sum(len(request.blocks) for request in self.requests)

    @cached_property
    def distinct_blocks(self) -> int:
        """How many different blocks there are."""
        return len({block for request in self.requests for block in request.blocks})


_Timestamp = Annotated[float, msgspec.Meta(ge=0, le=TIMESTAMP_MAX)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)]


class _Mooncake(msgspec.Struct):
    timestamp: _Timestamp
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: list[int]


class _QwenBailian(_Mooncake):
    chat_id: int
    parent_chat_id: int = -1
    turn: int = 1
    type: str = ""


class _Plain(msgspec.Struct):
    timestamp: _Timestamp = msgspec.field(name="time_s")
    input_length: _Tokens = msgspec.field(name="tokens")
    hash_ids: list[int] = msgspec.field(name="blocks")
    output_length: _Tokens = msgspec.field(name="output_tokens", default=0)


class _Recorded(_Plain, kw_only=True):
    ended_s: _Timestamp
    gpu_tokens: _Tokens
    loaded_tokens: dict[str, _Tokens]
    computed_tokens: _Tokens


class _RecordEvent(msgspec.Struct):
    event: EventKind
    time_s: _Timestamp
    tier: Annotated[str, msgspec.Meta(max_length=TIER_NAME_MAX)] = ""
    work: Literal["", "loads", "stores"] = ""


class _RecordHeader(msgspec.Struct):
    version: Annotated[int, msgspec.Meta(ge=1, le=1)] = msgspec.field(name="kvtier_record")
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=BLOCK_TOKENS_MAX)]


class _Format(NamedTuple):
    """How to read one kind of line."""

    decoder: msgspec.json.Decoder[Any]  #: of a struct with the attributes of ``_Mooncake``
    telltale: frozenset[str]  #: a line with all of these is in the first such format
    ids_field: str
    seconds_per_unit: float
    block_tokens: int


FORMATS: Final = {
    "qwen-bailian": _Format(
        msgspec.json.Decoder(_QwenBailian), frozenset({"chat_id", "hash_ids"}), "hash_ids", 1.0, 16
    ),
    "mooncake": _Format(
        msgspec.json.Decoder(_Mooncake), frozenset({"hash_ids"}), "hash_ids", 1e-3, 512
    ),
    "plain": _Format(
        msgspec.json.Decoder(_Plain), frozenset({"time_s", "blocks"}), "blocks", 1.0, 16
    ),
    "recorded": _Format(
        msgspec.json.Decoder(_Recorded), frozenset({"kvtier_record"}), "blocks", 1.0, 16
    ),
}
"""By name. The block sizes are those of the published traces; vLLM's default for the plain one."""

_HEADER_DECODER: Final = msgspec.json.Decoder(_RecordHeader)
_HEADER_START: Final = b'{"kvtier_record":'
_EVENT_DECODER: Final = msgspec.json.Decoder(_RecordEvent)
_EVENT_START: Final = b'{"event":'
_KEYS_DECODER: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _BadLine(Exception):
    """What is wrong with one line."""


class _Unreadable(_BadLine):
    """Nothing can be read after this line."""


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

    ``auto`` tells the format by the fields of the first good line. ``limit``:
    stop after so many requests. ``on_progress`` is called now and then with how many
    bytes of the file have been read, and how many it has (0 for a pipe).

    Requests are sorted by time: servers may log a request when it ends. How
    many stood after a later one is counted. Time starts with the earliest.
    """
    _check_arguments(format, block_tokens, on_bad_line, limit)
    reader = _Reader(Path(path), format, block_tokens, skips=on_bad_line == "skip")
    try:
        with reader.path.open("rb") as file:
            reader.read_untrusted(file, limit, on_progress)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}.") from error
    return reader.finish()


def _check_arguments(
    name: str, block_tokens: int | None, on_bad_line: str, limit: int | None
) -> None:
    if name != "auto" and name not in FORMATS:
        raise TraceError(f"format={name!r} is unknown. Choose auto, {', '.join(sorted(FORMATS))}.")
    if block_tokens is not None and not 1 <= block_tokens <= BLOCK_TOKENS_MAX:
        raise TraceError(f"block_tokens={block_tokens} must be within 1 and {BLOCK_TOKENS_MAX}.")
    if on_bad_line not in get_args(OnBadLine):
        raise TraceError(f"on_bad_line={on_bad_line!r} must be stop or skip.")
    if limit is not None and limit < 1:
        raise TraceError(f"limit={limit} must be at least 1.")


class _Reader:
    """Collects the requests of one file."""

    def __init__(self, path: Path, name: str, block_tokens: int | None, *, skips: bool) -> None:
        self.path = path
        self._format_name = name
        self._block_tokens = block_tokens
        self._skips = skips
        self._chain = _Chain()
        self._requests: list[TraceRequest] = []
        self._references = 0
        self._bad_lines: list[tuple[int, str]] = []
        self._bad_line_count = 0
        self._out_of_order = 0
        self._latest = 0.0
        self._gpu_tokens = self._computed_tokens = 0
        self._loaded_tokens: Counter[str] = Counter()
        self._events: list[TraceEvent] = []

    def read_untrusted(
        self,
        file: io.BufferedReader,
        limit: int | None,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        """Take in the file's requests; raises ``TraceError`` for the first bad line if asked."""
        size = _size_of(file)
        requests_max = REQUESTS_MAX if limit is None else min(limit, REQUESTS_MAX)
        for number, line in _lines_untrusted(file):
            if on_progress is not None and number % LINES_PER_REPORT == 0:
                on_progress(file.raw.tell() if size else 0, size)
            try:
                if isinstance(line, _BadLine):
                    raise line
                if line.isspace():
                    continue
                if line.startswith(_HEADER_START):
                    self._begin_record_untrusted(line)
                    continue
                if line.startswith(_EVENT_START):
                    self._add_event_untrusted(line)
                    continue
                self._requests.append(self._request_untrusted(line))
            except _BadLine as bad:
                self._note(number, str(bad))
                continue
            if len(self._requests) >= requests_max:
                break
            if self._references > REFERENCES_MAX:
                break
        self._refuse_too_large(limit)

    def _begin_record_untrusted(self, line: bytes) -> None:
        """Take in the header of a record; one stands wherever a part of the record begins."""
        header: _RecordHeader = _decode_untrusted(_HEADER_DECODER, line)
        if self._format_name == "auto":
            self._format_name = "recorded"
        if self._block_tokens not in {None, header.block_tokens}:
            raise _BadLine(
                f"the record's blocks have {header.block_tokens} tokens from here on, and "
                f"{self._block_tokens} were recorded before, or set"
            )
        self._block_tokens = header.block_tokens

    def _add_event_untrusted(self, line: bytes) -> None:
        row: _RecordEvent = _decode_untrusted(_EVENT_DECODER, line)
        if [bool(row.tier), bool(row.work)] != 2 * [row.event != "reset"]:
            raise _BadLine("a reset has no tier and no work, and other events have both")
        self._references += 1  # so that they are bounded, too
        self._events.append(TraceEvent(row.time_s, row.event, row.tier, row.work))

    def finish(self) -> Trace:
        """Return what was read, in order of time."""
        if not self._requests:
            first = "".join(f" Line {number}: {what}." for number, what in self._bad_lines[:1])
            raise TraceError(
                f"{self.path}: holds no request that can be read.{first} "
                "See the trace formats in the reference."
            )
        requests = self._requests
        if self._out_of_order:
            requests.sort(key=attrgetter("time_s"))
        start = requests[0].time_s
        kind = FORMATS[self._format_name]
        return Trace(
            path=self.path,
            format=self._format_name,
            block_tokens=self._block_tokens or kind.block_tokens,
            requests=tuple(_since(start, each) for each in requests),
            bad_lines=tuple(self._bad_lines),
            bad_line_count=self._bad_line_count,
            out_of_order_count=self._out_of_order,
            recorded=self._recorded(start) if self._format_name == "recorded" else None,
        )

    def _recorded(self, start: float) -> Recorded:
        events = sorted(self._events, key=attrgetter("time_s"))
        return Recorded(
            events=tuple(each._replace(time_s=each.time_s - start) for each in events),
            gpu_tokens=self._gpu_tokens,
            loaded_tokens=dict(self._loaded_tokens),
            computed_tokens=self._computed_tokens,
        )

    def _note(self, number: int, what: str) -> None:
        if not self._skips:
            raise TraceError(
                f"{self.path}: line {number}: {what}. Mend it, or skip bad lines (on_bad_line)."
            )
        self._bad_line_count += 1
        if len(self._bad_lines) < BAD_LINES_KEPT_MAX:
            self._bad_lines.append((number, what))

    def _refuse_too_large(self, limit: int | None) -> None:
        cut_short = len(self._requests) >= REQUESTS_MAX and limit != REQUESTS_MAX
        if cut_short or self._references > REFERENCES_MAX:
            raise TraceError(
                f"{self.path}: holds more than {REQUESTS_MAX:,} requests or {REFERENCES_MAX:,} "
                "block references. Set a limit on the number of requests."
            )

    def _request_untrusted(self, line: bytes) -> TraceRequest:
        if self._format_name == "auto":
            self._format_name = _format_of_untrusted(line)
        kind = FORMATS[self._format_name]
        row: _Mooncake | _Plain = _decode_untrusted(kind.decoder, line)
        _check_ids(row, kind, self._block_tokens or kind.block_tokens)
        time_s = row.timestamp * kind.seconds_per_unit
        if self._requests and abs(time_s - self._requests[0].time_s) > SPAN_S_MAX:
            raise _BadLine(f"its time is {time_s:.6g} s, more than a year off the first request's")
        self._references += len(row.hash_ids)
        self._out_of_order += time_s < self._latest
        self._latest = max(self._latest, time_s)
        blocks = self._chain.blocks(row.hash_ids)
        request = TraceRequest(time_s, row.input_length, row.output_length, blocks)
        if not isinstance(row, _Recorded):
            return request
        self._add_outcome_untrusted(row)
        return request._replace(ended_s=row.ended_s, gpu_tokens=row.gpu_tokens)

    def _add_outcome_untrusted(self, row: _Recorded) -> None:
        """Add what the engine found of a prompt, and where."""
        if row.gpu_tokens > row.input_length:
            raise _BadLine("gpu_tokens is more than tokens")
        if len(self._loaded_tokens.keys() | row.loaded_tokens.keys()) > TIERS_MAX:
            raise _BadLine(f"loaded_tokens names more than {TIERS_MAX} tiers, with those before")
        self._loaded_tokens.update(row.loaded_tokens)
        self._gpu_tokens += row.gpu_tokens
        self._computed_tokens += row.computed_tokens


def _since(start: float, request: TraceRequest) -> TraceRequest:
    """Return the request with times since the trace's start."""
    ended_s = None if request.ended_s is None else request.ended_s - start
    return request._replace(time_s=request.time_s - start, ended_s=ended_s)


class _Chain:
    """Numbers blocks such that equal numbers mean equal prefixes."""

    def __init__(self) -> None:
        self._first: dict[int, int] = {}  # an id's number after the first prefix it was met with
        self._others: dict[tuple[int, int], int] = {}  # after any other prefix
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


def _size_of(file: io.BufferedReader) -> int:
    """Return the file's length, 0 if it has none: a pipe."""
    try:
        end = file.seek(0, io.SEEK_END)
        file.seek(0)
    except OSError:
        return 0
    return end


def _lines_untrusted(file: io.BufferedReader) -> Iterator[tuple[int, bytes | _BadLine]]:
    """Give each line with its number, or what is wrong with it, in bounded memory."""
    stream: io.BufferedIOBase = file
    kind = "gzip"
    if file.peek(2)[:2] == GZIP_MAGIC:
        stream = gzip.GzipFile(fileobj=file)
    elif file.peek(4)[:4] == zstd_frames.MAGIC:
        stream, kind = io.BufferedReader(_zstd(file)), "zstd"
    number = 0
    while True:
        number += 1
        try:
            line = stream.readline(LINE_BYTES_MAX + 1)
            if not line:
                return
            too_long = len(line) > LINE_BYTES_MAX
            while too_long and line and not line.endswith(b"\n"):
                line = stream.readline(LINE_BYTES_MAX)
        except EOFError:
            yield number, _Unreadable(f"the {kind} file ends in the middle: it is truncated")
            return
        except (zlib.error, gzip.BadGzipFile, zstd_frames.DamagedZstd) as error:
            yield number, _Unreadable(f"the {kind} file is damaged from here on ({error})")
            return
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if too_long:
            yield number, _BadLine(f"it is longer than {LINE_BYTES_MAX >> 20} MiB")
        else:
            yield number, line


def _zstd(file: io.BufferedReader) -> zstd_frames.ZstdFrames:
    try:
        return zstd_frames.ZstdFrames(file)
    except zstd_frames.ZstdMissing as missing:
        raise TraceError(f"{file.name}: {missing}") from missing


def _format_of_untrusted(line: bytes) -> str:
    try:
        fields = _KEYS_DECODER.decode(line).keys()
    except (ValueError, RecursionError) as error:
        raise _BadLine(_diagnosis(error)) from error
    for name, kind in FORMATS.items():
        if kind.telltale <= fields:
            return name
    raise _BadLine(
        "its fields are those of no known format: a request has hash_ids (Mooncake, "
        "Qwen-Bailian), or time_s and blocks (plain)"
    )


def _decode_untrusted(decoder: msgspec.json.Decoder[Any], line: bytes) -> Any:  # noqa: ANN401
    try:
        if not line.isascii():
            line.decode()  # the decoder does not look into fields that nobody asked for
        return decoder.decode(line)
    except (ValueError, RecursionError) as error:
        raise _BadLine(_diagnosis(error)) from error


def _diagnosis(error: Exception) -> str:
    if isinstance(error, msgspec.ValidationError):
        return str(error).replace(" - at `$.", " in `").replace("`$`", "the line")
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return f"it is not JSON ({error})"


def _check_ids(row: _Mooncake | _Plain, kind: _Format, block_tokens: int) -> None:
    """Refuse ids out of range, and a number of them that the prompt does not have.

    Mooncake names the partial block at the end of a prompt, others leave it out.
    """
    ids, tokens = row.hash_ids, row.input_length
    if ids and not (min(ids) >= 0 and max(ids) <= ID_MAX):
        raise _BadLine(f"an id in {kind.ids_field} is negative, or over 64 bits")
    full, rest = divmod(tokens, block_tokens)
    if full <= len(ids) <= full + (rest > 0):
        return
    fitting = (2**bits for bits in range(BLOCK_TOKENS_MAX.bit_length()))
    other = next((size for size in fitting if len(ids) == -(-tokens // size)), None)
    hint = f"; blocks of {other} tokens would fit: set the block size" if other else ""
    raise _BadLine(
        f"{kind.ids_field} has {len(ids):,} ids, but {tokens:,} tokens make "
        f"{full + (rest > 0):,} blocks of {block_tokens}{hint}"
    )
