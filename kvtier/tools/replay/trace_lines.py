"""Reads the lines of a trace of requests, one after the other, in bounded memory.

Their contents are not trusted: every number has a bound, and any line costs bounded memory. At a
bad line, reading stops with its number, or continues and counts it, as requested.
"""

from __future__ import annotations

import gzip
import io
import zlib
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import msgspec

from kvtier.errors import Misuse
from kvtier.tools.replay import zstd_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Set as AbstractSet
    from pathlib import Path

OnBadLine = Literal["stop", "skip"]
EventKind = Literal["reset", "tier_down", "tier_up"]

LINE_BYTES_MAX: Final = 16 * 2**20  #: ids of a prompt of some ten million tokens
TOKENS_MAX: Final = 10**9
ID_MAX: Final = 2**64 - 1  #: a 64-bit hash fits
TIMESTAMP_MAX: Final = 10**14  #: milliseconds since 1970 fit
SPAN_S_MAX: Final = 366 * 24 * 3600
BAD_LINES_KEPT_MAX: Final = 1000
BLOCK_TOKENS_MAX: Final = 2**20
TIERS_MAX: Final = 64  #: names of tiers in a record
TIER_NAME_MAX: Final = 64

LINES_PER_REPORT: Final = 500
GZIP_MAGIC: Final = b"\x1f\x8b"
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"

_DAMAGED: Final = (EOFError, zlib.error, gzip.BadGzipFile, zstd_frames.DamagedZstd)
"""Exceptions of reading a compressed file; EOFError: it is truncated."""


class TraceError(Misuse, ValueError):
    """Raised when a trace cannot be read. The text names file, line and fault."""


_Timestamp = Annotated[float, msgspec.Meta(ge=0, le=TIMESTAMP_MAX)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)]


class RequestRow(msgspec.Struct):
    """A request, by Mooncake's names."""

    timestamp: _Timestamp
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: list[int]


class _QwenBailian(RequestRow):
    chat_id: int
    parent_chat_id: int = -1
    turn: int = 1
    type: str = ""


class _Plain(RequestRow, kw_only=True):
    timestamp: _Timestamp = msgspec.field(name="time_s")
    input_length: _Tokens = msgspec.field(name="tokens")
    hash_ids: list[int] = msgspec.field(name="blocks")
    output_length: _Tokens = msgspec.field(name="output_tokens", default=0)


class RecordedRow(_Plain, kw_only=True):
    """A request of a record."""

    started_s: _Timestamp | msgspec.UnsetType | None = msgspec.UNSET
    ended_s: _Timestamp
    gpu_tokens: _Tokens
    loaded_tokens: dict[str, _Tokens]
    computed_tokens: _Tokens


class RecordEvent(msgspec.Struct):
    """Another line of a record: a header or an event."""

    event: EventKind
    time_s: _Timestamp
    tier: Annotated[str, msgspec.Meta(max_length=TIER_NAME_MAX)] = ""
    work: Literal["", "loads", "stores"] = ""


class _RecordHeader(msgspec.Struct):
    version: Annotated[int, msgspec.Meta(ge=1, le=1)] = msgspec.field(name="kvtier_record")
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=BLOCK_TOKENS_MAX)]


class _Format(NamedTuple):
    """How to read one kind of line."""

    decoder: msgspec.json.Decoder[Any]  #: of a struct with the attributes of ``RequestRow``
    telltale: frozenset[str]  #: a line with all of these is in the first such format
    ids_field: str
    seconds_per_unit: float
    block_tokens: int


FORMATS: Final = {
    "qwen-bailian": _Format(
        msgspec.json.Decoder(_QwenBailian), frozenset({"chat_id", "hash_ids"}), "hash_ids", 1.0, 16
    ),
    "mooncake": _Format(
        msgspec.json.Decoder(RequestRow), frozenset({"hash_ids"}), "hash_ids", 1e-3, 512
    ),
    "plain": _Format(
        msgspec.json.Decoder(_Plain), frozenset({"time_s", "blocks"}), "blocks", 1.0, 16
    ),
    "recorded": _Format(
        msgspec.json.Decoder(RecordedRow), frozenset({"kvtier_record"}), "blocks", 1.0, 16
    ),
}
"""By name. The block sizes are those of the published traces; vLLM's default for the plain one."""

_HEADER_DECODER: Final = msgspec.json.Decoder(_RecordHeader)
HEADER_START: Final = b'{"kvtier_record":'
_EVENT_DECODER: Final = msgspec.json.Decoder(RecordEvent)
_EVENT_START: Final = b'{"event":'
_KEYS_DECODER: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _BadLine(Exception):
    """Fault of one line."""


class _Unreadable(_BadLine):
    """Fault after which nothing can be read."""


class TraceFile:
    """An open trace, plain or compressed, as its content shows. Raises ``TraceError``."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file
        self._size = _size_of(file)
        self._stream: io.BufferedReader | gzip.GzipFile = file
        self._kind = ""
        if file.peek(2)[:2] == GZIP_MAGIC:
            self._stream, self._kind = gzip.GzipFile(fileobj=file), "gzip"
        elif file.peek(4)[:4] == zstd_frames.MAGIC:
            self._stream, self._kind = io.BufferedReader(_zstd(file)), "zstd"

    def progress(self) -> tuple[int, int]:
        """Return the bytes of the file that have been read, and its length: 0 for a pipe."""
        return self._file.raw.tell() if self._size else 0, self._size

    def is_record(self) -> bool:
        """Return whether it begins like a record, without consuming anything."""
        try:
            start = self._stream.peek(len(BYTE_ORDER_MARK + HEADER_START))
        except _DAMAGED:
            return True  # only a trace is compressed; reading it reports the fault
        return start.removeprefix(BYTE_ORDER_MARK).startswith(HEADER_START)

    def read_all_untrusted(self, bytes_max: int) -> bytes:
        """Return the whole file, which is not a trace. Raises ``TraceError``."""
        try:
            text = self._stream.read(bytes_max + 1)
        except _DAMAGED as error:
            raise TraceError(f"{self._file.name}: the {self._kind} file is damaged.") from error
        if len(text) > bytes_max:
            raise TraceError(f"{self._file.name}: is larger than {bytes_max >> 20} MiB.")
        return text.removeprefix(BYTE_ORDER_MARK)

    def lines_untrusted(self) -> Iterator[tuple[int, bytes | _BadLine]]:
        """Yield each line with its number, or its fault, in bounded memory."""
        number = 0
        while True:
            number += 1
            try:
                line = self._stream.readline(LINE_BYTES_MAX + 1)
                if not line:
                    return
                too_long = len(line) > LINE_BYTES_MAX
                while too_long and line and not line.endswith(b"\n"):
                    line = self._stream.readline(LINE_BYTES_MAX)
            except EOFError:
                what = f"the {self._kind} file ends in the middle: it is truncated"
                yield number, _Unreadable(what)
                return
            except _DAMAGED as error:
                what = f"the {self._kind} file is damaged from here on ({error})"
                yield number, _Unreadable(what)
                return
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if too_long:
                yield number, _BadLine(f"it is longer than {LINE_BYTES_MAX >> 20} MiB")
            else:
                yield number, line


def _size_of(file: io.BufferedReader) -> int:
    """Return the file's length, 0 if it has none: a pipe."""
    try:
        end = file.seek(0, io.SEEK_END)
        file.seek(0)
    except OSError:
        return 0
    return end


def _zstd(file: io.BufferedReader) -> zstd_frames.ZstdFrames:
    try:
        return zstd_frames.ZstdFrames(file)
    except zstd_frames.ZstdMissing as missing:
        raise TraceError(f"{file.name}: {missing}") from missing


class TraceLines:
    """Parses the lines of one trace. ``skips``: count bad lines, and continue."""

    def __init__(
        self, path: Path, format_name: str, block_tokens: int | None, *, skips: bool
    ) -> None:
        """``format_name`` may be auto: the first good line shows it. Raises ``TraceError``."""
        _check_arguments(format_name, block_tokens)
        self.path = path
        self.format_name = format_name
        self.block_tokens = block_tokens  #: None: the format's usual value
        self.bad_lines: list[tuple[int, str]] = []
        self.bad_line_count = 0
        self._skips = skips
        self._first_s: float | None = None
        self._tiers: set[str] = set()

    def time_s(self, row: RequestRow) -> float:
        """Return a row's time in seconds."""
        return row.timestamp * FORMATS[self.format_name].seconds_per_unit

    def holds_no_request(self) -> TraceError:
        """Return the exception to raise if no request was found."""
        first = "".join(f" Line {number}: {what}." for number, what in self.bad_lines[:1])
        return TraceError(
            f"{self.path}: holds no request that can be read.{first} "
            "See the trace formats in the reference."
        )

    def read_untrusted(
        self, file: TraceFile, on_progress: Callable[[int, int], None] | None = None
    ) -> Iterator[RequestRow | RecordEvent]:
        """Yield the rows of the file; raises ``TraceError`` for the first bad line unless it skips.

        ``on_progress`` is called now and then with ``file.progress()``.
        """
        for number, line in file.lines_untrusted():
            if on_progress is not None and number % LINES_PER_REPORT == 0:
                on_progress(*file.progress())
            try:
                if isinstance(line, _BadLine):
                    raise line
                found = self._found_untrusted(line)
            except _BadLine as bad:
                self._note(number, str(bad))
                continue
            if found is not None:
                yield found

    def _found_untrusted(self, line: bytes) -> RequestRow | RecordEvent | None:
        if line.isspace():
            return None
        if line.startswith(HEADER_START):
            self._begin_record_untrusted(line)
            return None
        if line.startswith(_EVENT_START):
            return self._event_untrusted(line)
        return self._row_untrusted(line)

    def _begin_record_untrusted(self, line: bytes) -> None:
        """Read the header of a record, which begins each part of the record."""
        header: _RecordHeader = _decode_untrusted(_HEADER_DECODER, line)
        if self.format_name == "auto":
            self.format_name = "recorded"
        if self.block_tokens not in {None, header.block_tokens}:
            raise _BadLine(
                f"the record's blocks have {header.block_tokens} tokens from here on, and "
                f"{self.block_tokens} were recorded before, or set"
            )
        self.block_tokens = header.block_tokens

    def _event_untrusted(self, line: bytes) -> RecordEvent:
        row: RecordEvent = _decode_untrusted(_EVENT_DECODER, line)
        if [bool(row.tier), bool(row.work)] != 2 * [row.event != "reset"]:
            raise _BadLine("a reset has no tier and no work, and other events have both")
        self._know_tiers({row.tier} - {""})
        return row

    def _row_untrusted(self, line: bytes) -> RequestRow:
        if self.format_name == "auto":
            self.format_name = _format_of_untrusted(line)
        kind = FORMATS[self.format_name]
        row: RequestRow = _decode_untrusted(kind.decoder, line)
        _check_ids(row, kind, self.block_tokens or kind.block_tokens)
        time_s = self.time_s(row)
        if self._first_s is None:
            self._first_s = time_s
        if abs(time_s - self._first_s) > SPAN_S_MAX:
            unit = "seconds" if kind.seconds_per_unit == 1 else "milliseconds"
            raise _BadLine(
                f"its time is {time_s:.6g} s, more than a year off the first request's; times of "
                f"this format are in {unit}"
            )
        if isinstance(row, RecordedRow):
            self._check_outcome(row)
        return row

    def _check_outcome(self, row: RecordedRow) -> None:
        if row.gpu_tokens > row.input_length:
            raise _BadLine("gpu_tokens is more than tokens")
        self._know_tiers(row.loaded_tokens.keys())

    def _know_tiers(self, names: AbstractSet[str]) -> None:
        if len(self._tiers | names) > TIERS_MAX:
            raise _BadLine(f"it names more than {TIERS_MAX} tiers, with those before")
        self._tiers |= names

    def _note(self, number: int, what: str) -> None:
        if not self._skips:
            raise TraceError(
                f"{self.path}: line {number}: {what}. Mend it, or skip bad lines: "
                "--on-bad-line skip."
            )
        self.bad_line_count += 1
        if len(self.bad_lines) < BAD_LINES_KEPT_MAX:
            self.bad_lines.append((number, what))


def _check_arguments(name: str, block_tokens: int | None) -> None:
    if name != "auto" and name not in FORMATS:
        raise TraceError(f"format={name!r} is unknown. Choose auto, {', '.join(sorted(FORMATS))}.")
    if block_tokens is not None and not 1 <= block_tokens <= BLOCK_TOKENS_MAX:
        raise TraceError(f"block_tokens={block_tokens} must be within 1 and {BLOCK_TOKENS_MAX}.")


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
            line.decode()  # the decoder does not check the contents of ignored fields
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


def _check_ids(row: RequestRow, kind: _Format, block_tokens: int) -> None:
    """Refuse ids out of range, and a number of them that does not match the prompt.

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
    hint = f"; blocks of {other} tokens would fit: set --block-tokens" if other else ""
    raise _BadLine(
        f"{kind.ids_field} has {len(ids):,} ids, but {tokens:,} tokens make "
        f"{full + (rest > 0):,} blocks of {block_tokens}{hint}"
    )
