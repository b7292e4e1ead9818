"""Messages between the engine's process and a tier's, over a socket pair.

What is posted goes out with the next ``flush``, as one frame: its length in
four bytes, then the messages in MessagePack. Nothing here ever waits but
``wait``: what the socket doesn't take stays until the next flush.
"""

from __future__ import annotations

import select
import struct
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from kvtier import messages as m
from kvtier.backend import BackendTraits  # noqa: TC001 - msgspec reads it to decode a message

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable

    from kvtier.backend import BackendContext
    from kvtier.config import TierConfig

T = TypeVar("T")

Level: TypeAlias = Literal["debug", "info", "warning", "error", "critical"]
Fields: TypeAlias = dict[str, str | int | float | bool | None]

_LENGTH: Final = struct.Struct("<I")
_RECEIVE_BYTES: Final = 1 << 16
TAKE_BYTES_MAX: Final = 1 << 18
"""So much is taken in at a time: about 6,000 keys, a millisecond."""

FRAME_MESSAGES_MAX: Final = 16
"""More in a frame saves nothing, and a frame is taken in as a whole."""


class Setup(NamedTuple):
    """What the process is told at its start, pickled."""

    tier: TierConfig
    context: BackendContext
    slot_count: int


class Begin(m.Message, frozen=True, gc=False):
    """Open the backend and take messages."""


class End(m.Message, frozen=True, gc=False):
    """End what was begun, then end."""


class Ready(m.Message, frozen=True, gc=False):
    """The backend is made, and its place is claimed; it waits for Begin."""

    traits: BackendTraits
    place: str | None


class Refused(m.Message, frozen=True, gc=False):
    """The backend could not be made. ``is_setting``: because of a bad setting."""

    reason: str
    is_setting: bool


class Opened(m.Message, frozen=True, gc=False):
    """The backend is open."""


class Counted(m.Message, frozen=True):
    """What the backend has counted so far."""

    counters: dict[str, int]


class Logged(m.Message, frozen=True):
    """A line for the engine's log."""

    level: Level
    event: str
    fields: Fields


ToTier = Begin | End | m.Probe | m.LoadJob | m.StoreJob | m.TouchKeys | m.RequestEnded | m.Tick
ToEngine = (
    Ready
    | Refused
    | Opened
    | Counted
    | Logged
    | m.ProbeAnswer
    | m.JobEnded
    | m.PresenceChanged
    | m.TierBroke
)


class Channel(Generic[T]):
    """One end of the pair. ``takes``: the union of what it is sent. One thread at a time."""

    def __init__(self, end: socket.socket, takes: Any) -> None:  # noqa: ANN401 - a union of types
        end.settimeout(0.0)
        self._end = end
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[list[T]] = msgspec.msgpack.Decoder(list[takes])
        self._posted: list[m.Message] = []
        self._going = memoryview(b"")  # what the socket has not taken yet of the last frame
        self._came = bytearray()
        self.is_ended = False  #: the other end is gone, and all that came from it was taken

    def fileno(self) -> int:
        """Return the socket's descriptor, to be waited for."""
        return self._end.fileno()

    def post(self, message: m.Message) -> None:
        """Have the message sent with the next ``flush``."""
        self._posted.append(message)

    @property
    def posted(self) -> int:
        """How many messages wait to be sent."""
        return len(self._posted)

    def flush(self) -> bool:
        """Send what was posted, as far as the socket takes it. True: nothing is left."""
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
            except OSError:  # the other end is gone: nobody is left to read it
                self._posted.clear()
                self._going = memoryview(b"")
                return True
            self._going = self._going[sent:]

    def take(self) -> Iterable[T]:
        """Return what has come, in order. Raises ``msgspec.DecodeError`` for what is no message."""
        came = self._came
        enough = len(came) + TAKE_BYTES_MAX
        while not self.is_ended and len(came) < enough:
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
        return self._frames() if came else ()

    def _frames(self) -> list[T]:
        messages: list[T] = []
        came, at = self._came, 0
        with memoryview(came) as whole:
            while len(came) - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(whole, at)
                start, end = at + _LENGTH.size, at + _LENGTH.size + length
                if end > len(came):
                    break
                messages += self._decoder.decode(whole[start:end])
                at = end
        del came[:at]
        return messages

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until something has come. False: nothing has, in all that time."""
        poll = select.poll()  # unlike select, it takes any descriptor
        poll.register(self._end, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))

    def close(self) -> None:
        """Let go of the socket. What was not sent is lost."""
        self._end.close()
