"""Reads zstd files, with one frame or many, in bounded memory."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import Misuse
from kvtier.plugin_api.extras import install

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MAGIC: Final = b"\x28\xb5\x2f\xfd"
WINDOW_BYTES_MAX: Final = 1 << 27
PIECE_BYTES: Final = 1024
"""Bytes read at once. Four bytes can expand to 128 KiB, so one piece is at most 32 MiB."""


class ZstdMissing(Misuse):
    """Raised when the library is not installed. Install the one that the text names."""


class DamagedZstd(Exception):
    """The file is damaged from here on."""


class ZstdFrames(io.RawIOBase):
    """The contents of the frames in a file, one after the other.

    The library's own reader treats a truncated frame as the file's end.
    """

    def __init__(self, file: io.BufferedReader) -> None:
        try:
            import zstandard  # noqa: PLC0415 - an extra
        except ImportError:
            raise ZstdMissing(
                f"this file is compressed with zstd. {install('compression')}"
            ) from None
        self._file = file
        self._error = zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
        self._frame: Any = None  # the current one
        self._piece, self._out = b"", memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill the buffer's beginning. Raises ``EOFError`` if the last frame is cut off."""
        while not self._out:
            piece = self._piece or self._file.read(PIECE_BYTES)
            if not piece:
                if self._frame is not None:
                    raise EOFError
                return 0
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            try:
                self._out = memoryview(self._frame.decompress(piece))
            except self._error as error:
                raise DamagedZstd(str(error)) from error
            self._piece = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._out))
        target[:count] = self._out[:count]
        self._out = self._out[count:]
        return count
