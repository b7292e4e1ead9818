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

from kvtier.errors import Misuse
from kvtier.plugin_api.extras import install
from kvtier.plugin_api.sizes import read_bytes
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
from stress.bench.harness import ROUNDS, Option, Report

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
    Option("--blocks", 24, "blocks that are compressed"),
    Option("--block-bytes", "1MiB", "size of the made-up blocks"),
    ROUNDS,
)

LINKS_MB_PER_S: Final = (100, 1000)
THREADS: Final = (1, 4)
_MADE_UP: Final = "made-up keys and values in bfloat16"
_EPSILON_S: Final = 1e-9


class Way(NamedTuple):
    """One way to compress a block of 16-bit floats, and to bring it back."""

    name: str
    compress: Callable[[memoryview], memoryview | bytes]
    decompress: Callable[[memoryview | bytes], memoryview | bytes]


def measure(asked: argparse.Namespace, report: Report) -> None:
    """Compress and decompress all blocks by each way. Raises ``Misuse`` without zstandard."""
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
    """Return what one way has done. Speeds are of uncompressed bytes, for one thread, by round.

    Gains: how many times as fast links move blocks. Below 1: they are slower.
    """
    medians = {"store": statistics.median(compress), "load": statistics.median(decompress)}
    return {
        "way": way,
        "ratio": share,
        "compress_mb_per_s": compress,
        "decompress_mb_per_s": decompress,
        "compress_cpu_s_per_gb": 1e3 / medians["store"],
        "decompress_cpu_s_per_gb": 1e3 / medians["load"],
        "gains": {
            kind: {
                f"{link}_mb_per_s": {
                    threads: min(share, threads * speed / link) for threads in THREADS
                }
                for link in LINKS_MB_PER_S
            }
            for kind, speed in medians.items()
        },
    }


def show(report: Report) -> None:
    """Print the tables."""
    if not report["figures"]:
        return
    columns = ["", "ratio", "compress, MB/s", "CPU s a GB", "decompress, MB/s", "CPU s a GB"]
    rows = [
        [
            each["way"],
            f"{each['ratio']:.3f}",
            f"{statistics.median(each['compress_mb_per_s']):,.0f}",
            f"{each['compress_cpu_s_per_gb']:.2f}",
            f"{statistics.median(each['decompress_mb_per_s']):,.0f}",
            f"{each['decompress_cpu_s_per_gb']:.2f}",
        ]
        for each in report["figures"]
    ]
    table("compressed, losslessly", columns, rows)
    tiers_own = report["figures"][0]
    gains = [
        [f"{kind}, {link:,} MB/s", *(f"{gain:.2f}" for gain in of_link.values())]
        for link in LINKS_MB_PER_S
        for kind, of_kind in tiers_own["gains"].items()
        for of_link in [of_kind[f"{link}_mb_per_s"]]
    ]
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
    size = read_bytes(asked.block_bytes, "--block-bytes")
    if size < 2 or size % 2:
        raise Misuse(f"--block-bytes {size} must be even: floats of 16 bits are compressed.")
    return [memoryview(kv_like(size, seed)) for seed in range(asked.blocks)], _MADE_UP


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

    return Way(BITPLANE_ZSTD, compress, decompress)
