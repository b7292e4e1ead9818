"""``stress.bench compression``: what compressing blocks gains, and its cost.

On blocks of a model, or on made-up ones. Each way is timed by the processor time of its thread, so
that others on the machine change the figures little. From them follows what a link of some speed
gains where threads compress while others send: the slower of both limits.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import zstandard

from kvtier.errors import Misuse
from kvtier.tools.bench.kv_like import kv_like
from kvtier.tools.terminal import progress, table
from kvtier_backends.fs.offline.inspection import (
    BlockFile,
    FsFolder,
    are_compressed,
    block_bytes_of,
    form_of,
)
from kvtier_backends.shared.compression import BITPLANE_ZSTD, BlockCompressor
from kvtier_backends.shared.record_trailer import Form
from stress.bench.harness import ROUNDS, Option, Report, at_least_one

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

OPTIONS: Final = (
    Option(
        "--folder",
        None,
        "root_dir of an fs tier, without compression or encryption, with blocks of the model that "
        "is asked about. By default, made-up keys and values in bfloat16 are compressed",
    ),
    Option("--blocks", 24, "blocks that are compressed", at_least_one),
    ROUNDS,
)

LINKS_MB_PER_S: Final = (100, 1000)
THREADS: Final = (1, 4)
_MADE_UP: Final = "made-up keys and values in bfloat16"
_MADE_UP_BYTES: Final = 1 << 20  #: of each block
_EPSILON_S: Final = 1e-9


class Way(NamedTuple):
    """One way to compress a block of 16-bit floats, and to bring it back."""

    name: str
    compress: Callable[[memoryview], memoryview | bytes]
    decompress: Callable[[memoryview | bytes], memoryview | bytes]


def measure(asked: argparse.Namespace, report: Report) -> None:
    """Compress and decompress all blocks by each way."""
    blocks, origin = _blocks(asked)
    raw = sum(block.nbytes for block in blocks)
    ways = _ways(blocks[0].nbytes)
    report |= {"origin": origin, "bytes": raw, "blocks": len(blocks), "figures": []}
    with progress("compression", asked.rounds * len(ways)) as shown:
        for way in ways:
            compressed = [bytes(way.compress(block)) for block in blocks]
            for block, each in zip(blocks, compressed, strict=True):
                assert bytes(way.decompress(each)) == block, way.name
            compress, decompress = [], []
            for _ in range(asked.rounds):
                compress.append(_mb_per_s(way.compress, blocks, raw))
                decompress.append(_mb_per_s(way.decompress, compressed, raw))
                shown.advance()
            share = raw / sum(map(len, compressed))
            report["figures"].append(figures(way.name, share, compress, decompress))


def figures(
    way: str, share: float, compress: Sequence[float], decompress: Sequence[float]
) -> dict[str, Any]:
    """Return what one way has done. Speeds are of uncompressed bytes, for one thread.

    Gains: how many times as fast links move blocks, by threads. Below 1: they are slower.
    """
    speeds = {"store": statistics.median(compress), "load": statistics.median(decompress)}
    return {
        "way": way,
        "ratio": share,
        "mb_per_s": speeds,
        "gains": {
            f"{kind}, {link:,} MB/s": [min(share, threads * speed / link) for threads in THREADS]
            for link in LINKS_MB_PER_S
            for kind, speed in speeds.items()
        },
    }


def show(report: Report) -> None:
    """Print the tables."""
    if not report["figures"]:
        return
    rows = []
    for each in report["figures"]:
        speeds = [(f"{mb:,.0f}", f"{1e3 / mb:.2f}") for mb in each["mb_per_s"].values()]
        rows.append([each["way"], f"{each['ratio']:.3f}", *itertools.chain(*speeds)])
    columns = ["", "ratio", "compress, MB/s", "CPU s a GB", "decompress, MB/s", "CPU s a GB"]
    table("compressed, losslessly", columns, rows)
    tiers_own = report["figures"][0]
    gains = [[link, *(f"{gain:.2f}" for gain in of)] for link, of in tiers_own["gains"].items()]
    threads = [f"gain, {count} thread{'s' * (count > 1)}" for count in THREADS]
    table(f"{tiers_own['way']} in front of a link", ["", *threads], gains)
    count = report["blocks"]
    notes = [
        ["blocks", f"{count} of {report['bytes'] // count:,} bytes: {report['origin']}"],
        ["MB/s", "of uncompressed bytes, by one thread's processor time"],
        ["gain", "in MB/s, while some threads compress and others send"],
    ]
    table("", ["", ""], notes)


def _blocks(asked: argparse.Namespace) -> tuple[list[memoryview], str]:
    if asked.folder:
        return _blocks_of_folder(asked.folder, asked.blocks), asked.folder
    return [memoryview(kv_like(_MADE_UP_BYTES, seed)) for seed in range(asked.blocks)], _MADE_UP


def _blocks_of_folder(path: str, count: int) -> list[memoryview]:
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


def _mb_per_s(call: Callable[[Any], object], blocks: Sequence[Any], raw: int) -> float:
    started_s = time.thread_time()
    for block in blocks:
        call(block)
    return raw / max(time.thread_time() - started_s, _EPSILON_S) / 1e6


def _ways(block_bytes: int) -> list[Way]:
    zstd, back = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    words = block_bytes // 2

    def turned(raw: memoryview | bytes, rows: int, columns: int) -> bytes:
        bytes_of = np.frombuffer(raw, np.uint8).reshape(rows, columns)
        return np.ascontiguousarray(bytes_of.T).tobytes()

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
            lambda block: zstd.compress(turned(block, words, 2)),
            lambda raw: turned(back.decompress(raw), 2, words),
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

    return Way(BITPLANE_ZSTD, compress, decompress)
