"""Measures what compressing blocks gains, and its cost: on blocks of a model, or on made-up ones.

Each way is timed by the processor time of its thread, so that others on the machine change the
figures little. From them follows what a link of some speed gains where threads compress while
others send: the slower of both limits.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvtier.errors import Misuse
from kvtier.plugin_api.extras import install
from kvtier_backends.fs.offline.inspection import (
    BlockFile,
    FsFolder,
    are_compressed,
    block_bytes_of,
    form_of,
)
from kvtier_backends.shared.compression import BITPLANE_ZSTD, BlockCompressor
from kvtier_backends.shared.record_trailer import Form

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

LINKS_MB_PER_S: Final = (100, 1000)
THREADS: Final = (1, 4)
_ONE: Final = BITPLANE_ZSTD
_EPSILON_S: Final = 1e-9


class Way(NamedTuple):
    """One way to compress a block of 16-bit floats, and to bring it back."""

    name: str
    compress: Callable[[memoryview], memoryview | bytes]
    decompress: Callable[[memoryview | bytes], memoryview | bytes]


@dataclass(frozen=True)
class CompressionFigures:
    """What one way has done. Speeds are of uncompressed bytes, for one thread."""

    way: str
    ratio: float
    compress_mb_per_s: Sequence[float]  #: one a round
    decompress_mb_per_s: Sequence[float]

    @property
    def store_mb_per_s(self) -> float:
        """The median of one thread that compresses."""
        return statistics.median(self.compress_mb_per_s)

    @property
    def load_mb_per_s(self) -> float:
        """The median of one thread that decompresses."""
        return statistics.median(self.decompress_mb_per_s)

    def gain(self, thread_mb_per_s: float, link_mb_per_s: float, threads: int) -> float:
        """Return how many times as fast a link moves blocks. Below 1: it is slower."""
        return min(self.ratio, threads * thread_mb_per_s / link_mb_per_s)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        gains = {
            kind: {
                f"{link}_mb_per_s": {
                    threads: self.gain(speed, link, threads) for threads in THREADS
                }
                for link in LINKS_MB_PER_S
            }
            for kind, speed in (("store", self.store_mb_per_s), ("load", self.load_mb_per_s))
        }
        return {
            "way": self.way,
            "ratio": self.ratio,
            "compress_mb_per_s": list(self.compress_mb_per_s),
            "decompress_mb_per_s": list(self.decompress_mb_per_s),
            "compress_cpu_s_per_gb": 1e3 / self.store_mb_per_s,
            "decompress_cpu_s_per_gb": 1e3 / self.load_mb_per_s,
            "gains": gains,
        }


def blocks_of_folder(path: str, count: int) -> list[memoryview]:
    """Return up to so many blocks of an ``fs`` tier's folder. Raises ``Misuse``."""
    with FsFolder(path) as folder:
        found = list(itertools.islice(_plain_blocks(folder), count))
    if not found:
        raise Misuse(
            f"--folder {path} has no block that is neither compressed nor encrypted. Name the "
            "root_dir of an fs tier that has stored some."
        )
    if len({block.nbytes for block in found}) > 1:
        raise Misuse(f"--folder {path} has blocks of several sizes. Give each model its own.")
    return found


def _plain_blocks(folder: FsFolder) -> Iterator[memoryview]:
    for file in folder.files():
        if not isinstance(file, BlockFile):
            continue
        description = folder.namespaces.get(file.namespace, {})
        size = block_bytes_of(description)
        is_readable = form_of(description) is not Form.ENCRYPTED and not are_compressed(description)
        raw = folder.read(file) if size is not None and is_readable else None
        if raw is not None and len(raw) > (size or 0):
            yield memoryview(raw)[:size]


def measure(
    blocks: Sequence[memoryview], rounds: int, advance: Callable[[], None]
) -> list[CompressionFigures]:
    """Compress and decompress all blocks by each way. Raises ``Misuse`` without zstandard."""
    found = []
    for way in _ways(blocks[0].nbytes):
        compressed = [bytes(way.compress(block)) for block in blocks]
        for block, each in zip(blocks, compressed, strict=True):
            assert bytes(way.decompress(each)) == block, way.name
        size = sum(map(len, compressed))
        raw = sum(block.nbytes for block in blocks)
        speeds: list[tuple[float, float]] = []
        for _ in range(rounds):
            speeds.append(
                (_mb_per_s(way.compress, blocks, raw), _mb_per_s(way.decompress, compressed, raw))
            )
            advance()
        stores, loads = zip(*speeds, strict=True)
        found.append(CompressionFigures(way.name, raw / size, stores, loads))
    return found


def ways_count() -> int:
    """Return how many ways are measured, for a bar of progress."""
    return len(_ways(2))


def _mb_per_s(call: Callable[[Any], object], blocks: Sequence[Any], raw: int) -> float:
    started_s = time.thread_time()
    for block in blocks:
        call(block)
    return raw / max(time.thread_time() - started_s, _EPSILON_S) / 1e6


def _ways(block_bytes: int) -> list[Way]:
    try:
        import zstandard  # noqa: PLC0415 - an extra
    except ImportError:
        raise Misuse(f"this needs a package: {install('compression')}") from None
    zstd, back = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    words = block_bytes // 2

    def planes(block: memoryview) -> bytes:
        return np.ascontiguousarray(np.frombuffer(block, np.uint8).reshape(-1, 2).T).tobytes()

    def together(raw: bytes) -> bytes:
        return np.ascontiguousarray(np.frombuffer(raw, np.uint8).reshape(2, -1).T).tobytes()

    def bits(block: memoryview) -> bytes:
        all_words = np.frombuffer(block, "<u2")
        return b"".join(np.packbits(all_words >> bit & 1).tobytes() for bit in range(16))

    def from_bits(raw: bytes) -> bytes:
        each = np.unpackbits(np.frombuffer(raw, np.uint8).reshape(16, -1), axis=1)[:, :words]
        found = np.zeros(words, "<u2")
        for bit in range(16):
            found |= each[bit].astype("<u2") << bit
        return found.tobytes()

    return [
        _tiers_own(block_bytes),
        Way("zstd 1 alone", zstd.compress, back.decompress),
        Way(
            "both byte planes, zstd 1",
            lambda block: zstd.compress(planes(block)),
            lambda raw: together(back.decompress(raw)),
        ),
        Way(
            "planes of bits, zstd 1",
            lambda block: zstd.compress(bits(block)),
            lambda raw: from_bits(back.decompress(raw)),
        ),
    ]


def _tiers_own(block_bytes: int) -> Way:
    """Return the way that ``compression`` has in a tier."""
    compressor = BlockCompressor(block_bytes)
    memory, block = compressor.borrow(), compressor.borrow()

    def compress(data: memoryview) -> memoryview:
        size = compressor.compress(data, memory)
        return data if size is None else memory[:size]

    def decompress(compressed: memoryview | bytes) -> memoryview | bytes:
        if len(compressed) == block_bytes:
            return compressed
        assert compressor.decompress_untrusted(memoryview(compressed), block)
        return block

    return Way(_ONE, compress, decompress)
