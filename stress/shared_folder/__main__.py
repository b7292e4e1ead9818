"""Run engines over one bounded folder, kill them at random, and draw its bytes over time.

``python -m stress.shared_folder --blocks 1000000 --minutes 20 --picture FILE``. The folder is
filled with empty files of the right size first, as another engine would have left them. Exits with
1 if the folder ever held more than its capacity and 1 %.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

from kvtier_backends.fs import FsBackend
from kvtier_backends.fs.layout import make_layout
from stress.shared_folder.engines import FolderMeasure, KilledEngines, StoringEngine
from stress.shared_folder.storing import CONTEXT, FILE_BYTES, key_of

ALLOWED: Final = 1.01
_FILLED: Final = 0.95
_DISTINCT: Final = 30  # blocks are drawn from so many times the capacity: few are there already
_OTHERS: Final = 10**9  # numbers of the blocks that are there before
_FULL: Final = 0.99  # of the most that was there: from then on a store needs an eviction


class Sample(NamedTuple):
    """One measurement: seconds since the start, bytes, blocks stored so far."""

    at_s: float
    size: int
    stored: int


def main() -> int:
    """Run, print what was seen, and return the exit status."""
    arguments = _parser().parse_args()
    chance = random.Random(arguments.seed)
    capacity = arguments.blocks * FILE_BYTES
    with tempfile.TemporaryDirectory(prefix="kvtier-shared-", dir=arguments.folder) as folder:
        root = Path(folder, "kv")
        started_s = time.monotonic()
        filled = _fill(root, int(arguments.blocks * _FILLED))
        print(f"{filled:,} files made in {time.monotonic() - started_s:.0f} s", flush=True)
        samples, kills = _run(root, capacity, arguments, chance)
        worst = max(sample.size for sample in samples) / capacity
        print(f"{len(samples)} samples, {len(kills)} kills, {samples[-1].stored:,} blocks stored")
        print(f"highest: {worst:.4f} of the capacity", flush=True)
        before, after = rates(samples)
        print(f"stored a second: {before:,.0f} before it was full, {after:,.0f} after", flush=True)
        if arguments.picture:
            draw(samples, kills, capacity, Path(arguments.picture))
    return int(worst > ALLOWED)


def _run(
    root: Path, capacity: int, arguments: argparse.Namespace, chance: random.Random
) -> tuple[list[Sample], list[float]]:
    blocks = _DISTINCT * arguments.blocks
    seeds = iter(range(10**6))
    samples: list[Sample] = []
    measure = FolderMeasure(root)
    measure.bytes()
    engines = KilledEngines(
        lambda: StoringEngine(root, capacity, next(seeds), blocks),
        arguments.engines,
        arguments.kill_every,
        chance,
    )
    try:
        while (begun_s := time.monotonic() - engines.start_s) < arguments.minutes * 60:
            size = measure.bytes()
            at_s = time.monotonic() - engines.start_s
            samples.append(Sample(at_s, size, engines.stored()))
            print(f"{at_s:6.1f} s {size / capacity:.4f} {samples[-1].stored:,}", flush=True)
            # Measuring a million folders takes a core, which the engines need too.
            time.sleep(max(0.1, at_s - begun_s))
    finally:
        engines.stop()
    return samples, engines.kills_s


def _fill(root: Path, count: int) -> int:
    """Make files of the right size, as another engine has left them."""
    FsBackend.from_options({"root_dir": str(root), "direct": False}, CONTEXT).discard()
    layout = make_layout("kvtier", str(root), CONTEXT)
    for number in range(_OTHERS, _OTHERS + count):
        path = layout.path(key_of(number))
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)  # noqa: PTH103, PTH120 - a million times
        with open(path, "wb") as file:  # noqa: PTH123 - as above
            file.truncate(FILE_BYTES)
    return count


def rates(samples: list[Sample]) -> tuple[float, float]:
    """Return how many blocks were stored a second, from the first one on, until full and after."""
    begun = next((each for each in samples if each.stored), samples[-1])
    most = max(each.size for each in samples)
    full = next(each for each in samples if each.size >= _FULL * most)
    return _rate(begun, full), _rate(full, samples[-1])


def _rate(first: Sample, last: Sample) -> float:
    return (last.stored - first.stored) / max(last.at_s - first.at_s, 1.0)


def draw(samples: list[Sample], kills: list[float], capacity: int, path: Path) -> None:
    """Draw bytes over time, with the kills."""
    import matplotlib as mpl  # noqa: PLC0415 - only for the picture

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415 - as above

    figure, above = plt.subplots(figsize=(8, 3.5), layout="constrained")
    times = [sample.at_s for sample in samples]
    above.plot(times, [100 * sample.size / capacity for sample in samples], label="block files")
    above.axhline(100, color="black", linewidth=0.8, label="capacity_bytes")
    for number, at_s in enumerate(kills):
        label = "an engine is killed" if not number else None
        above.axvline(at_s, color="tab:red", linewidth=0.6, alpha=0.6, label=label)
    above.set(xlabel="seconds", ylabel="% of capacity_bytes", ylim=(0, 110))
    stored = above.twinx()
    stored.plot(
        times,
        [sample.stored / 1000 for sample in samples],
        color="tab:green",
        linestyle="--",
        label="blocks stored (right)",
    )
    stored.set(ylabel="thousand blocks stored", ylim=(0, None))
    lines = [*above.get_legend_handles_labels()[0], *stored.get_legend_handles_labels()[0]]
    above.legend(handles=lines, loc="lower right")
    figure.savefig(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stress.shared_folder", description=__doc__)
    parser.add_argument("--blocks", type=int, default=100_000, help="capacity, in blocks")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--kill-every", type=float, default=15.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", help="where to make the folder (default: the temporary one)")
    parser.add_argument("--picture", metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
