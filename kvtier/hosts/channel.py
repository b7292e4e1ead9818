"""Carries messages between the engine's process and a tier's, over a socket pair.

Posted messages go out with the next ``flush``, as one frame: its length in
four bytes, then the messages in MessagePack. Nothing here ever waits except
``wait``: bytes that the socket doesn't take stay until the next flush.

The scheduler checks several times a step for messages, and usually there are none. A system call
takes 3 to 15 us, so the tier's end counts its sends in a word of memory that both processes map,
and the engine's end reads that.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from kvtier.core import wire
from kvtier.errors import KVTierError
from kvtier.plugin_api.backend import BackendTraits  # noqa: TC001 - msgspec reads it to decode a message

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence

    from kvtier.plugin_api.backend import BackendContext
    from kvtier.settings.runtime_config import TierConfig

T = TypeVar("T")

Level: TypeAlias = Literal["debug", "info", "warning", "error", "critical"]
Fields: TypeAlias = dict[str, str | int | float | bool | None]

_LENGTH: Final = struct.Struct("<I")
_RECEIVE_BYTES: Final = 1 << 16
DRAIN_BYTES_MAX: Final = 1 << 18
"""Most bytes that ``drain`` reads: about 6,000 keys, a millisecond."""

FRAME_MESSAGES_MAX: Final = 16
"""More messages in a frame save nothing, and a frame is decoded as a whole."""


class Setup(NamedTuple):
    """Input of the process at its start, pickled."""

    tier: TierConfig
    context: BackendContext
    slot_count: int
    rests: Mapping[bytes, Sequence[tuple[int, int]]]  #: of ``SlotMemory``


class Begin(wire.Message, frozen=True, gc=False):
    """Open the backend and accept messages."""


class End(wire.Message, frozen=True, gc=False):
    """End the running work, then end."""


class Ready(wire.Message, frozen=True, gc=False):
    """The backend is made, and its place is claimed; it waits for Begin."""

    traits: BackendTraits
    place: str | None
    filesystem: int | None = None


class Refused(wire.Message, frozen=True, gc=False):
    """The backend could not be made. ``is_setting``: because of a bad setting.

    ``is_trouble``: the storage that it names has a fault, which may pass.
    """

    reason: str
    is_setting: bool
    is_trouble: bool = False


class Opened(wire.Message, frozen=True):
    """The backend is open."""

    gauges: dict[str, int]


class Logged(wire.Message, frozen=True):
    """A line for the engine's log."""

    level: Level
    event: str
    fields: Fields


ToTier = (
    Begin
    | End
    | wire.GenerationBegan
    | wire.Probe
    | wire.LoadJob
    | wire.StoreJob
    | wire.TouchKeys
    | wire.RequestEnded
    | wire.RequestOpened
    | wire.RequestClosed
    | wire.PrefixHits
    | wire.BlocksMissing
    | wire.Tick
)
ToEngine = (
    Ready
    | Refused
    | Opened
    | Logged
    | wire.ProbeAnswer
    | wire.JobEnded
    | wire.PresenceChanged
    | wire.BlocksWanted
    | wire.Counted
    | wire.ConnectionChanged
    | wire.PolicyBroke
    | wire.PolicyReturned
    | wire.TierBroke
)


class NoMessage(KVTierError):
    """Raised when the other end sent something else: it is damaged, or of another version."""


class SendCount:
    """Number of sends by the tier's end: a word that both processes map."""

    def __init__(self, descriptor: int) -> None:
        """Map the word. The caller keeps the descriptor."""
        self._word = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("Q")
        self._seen = 0

    @staticmethod
    def new_file() -> int:
        """Return a descriptor of a fresh word, for both processes."""
        descriptor = os.memfd_create("kvtier-sent")
        os.ftruncate(descriptor, mmap.PAGESIZE)
        return descriptor

    def add(self) -> None:
        """Count a send. The tier's end only."""
        self._word[0] += 1

    def has_grown(self) -> bool:
        """Return whether more was sent since the last True. The engine's end only."""
        count = self._word[0]
        if count == self._seen:
            return False
        self._seen = count
        return True


class Channel(Generic[T]):
    """One end of the pair. ``receives``: the union of its message types. One thread at a time.

    ``counted`` counts this end's sends; ``watched`` is the other end's count, if it keeps one.
    """

    def __init__(
        self,
        end: socket.socket,
        receives: Any,  # noqa: ANN401 - a union of types
        *,
        counted: SendCount | None = None,
        watched: SendCount | None = None,
    ) -> None:
        end.settimeout(0.0)
        self._end = end
        self._counted = counted
        self._watched = watched
        self._is_cut_short = False  # the last drain left something
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[list[T]] = msgspec.msgpack.Decoder(list[receives])
        self._posted: list[wire.Message] = []
        self._going = memoryview(b"")  # the rest of the last frame that the socket has not accepted
        self._came = bytearray()
        self.is_ended = False  #: the other end is gone, and all its messages were drained

    def fileno(self) -> int:
        """Return the socket's descriptor, to be waited for."""
        return self._end.fileno()

    def post(self, message: wire.Message) -> None:
        """Queue the message for the next ``flush``."""
        self._posted.append(message)

    @property
    def is_flushed(self) -> bool:
        """Whether all posted messages have been sent."""
        return not (self._posted or self._going)

    @property
    def has_news(self) -> bool:
        """Whether there may be messages: without a system call, if the other end counts."""
        return self._is_cut_short or self._watched is None or self._watched.has_grown()

    @property
    def posted(self) -> int:
        """Number of messages that wait to be sent."""
        return len(self._posted)

    def flush(self) -> bool:
        """Send posted messages, as far as the socket accepts them. True: nothing is left."""
        while True:
            if not self._going:
                if not self._posted:
                    return True
                body = self._encoder.encode(self._posted[:FRAME_MESSAGES_MAX])
                del self._posted[:FRAME_MESSAGES_MAX]
                self._going = memoryview(_LENGTH.pack(len(body)) + body)
            try:
                sent = self._end.send(self._going)
            except BlockingIOError:
                return False
            except OSError:  # the other end is gone: there is no reader left
                self._posted.clear()
                self._going = memoryview(b"")
                return True
            self._going = self._going[sent:]
            if self._counted is not None:
                self._counted.add()

    def drain(self) -> list[T]:
        """Return the received messages, in order. Raises ``NoMessage`` for an invalid one."""
        came = self._came
        enough = len(came) + DRAIN_BYTES_MAX
        self._is_cut_short = False
        while not self.is_ended:
            try:
                piece = self._end.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                piece = b""
            came += piece
            self.is_ended = not piece
            if len(piece) < _RECEIVE_BYTES:
                break
            if len(came) >= enough:
                self._is_cut_short = True
                break
        return self._frames() if came else []

    def _frames(self) -> list[T]:
        messages: list[T] = []
        came, at = self._came, 0
        with memoryview(came) as whole:
            while len(came) - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(whole, at)
                start, end = at + _LENGTH.size, at + _LENGTH.size + length
                if end > len(came):
                    break
                try:
                    messages += self._decoder.decode(whole[start:end])
                except (ValueError, RecursionError) as error:  # invalid UTF-8 is not a DecodeError
                    raise NoMessage(str(error)) from error
                at = end
        del came[:at]
        return messages

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for messages. Return False if none arrived in that time."""
        poll = select.poll()  # unlike select, it takes any descriptor
        poll.register(self._end, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))

    def close(self) -> None:
        """Release the socket. Messages not sent are lost."""
        self._end.close()
