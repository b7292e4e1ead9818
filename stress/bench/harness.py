"""What all benchmarks have in common: options, turns, medians, ratios and their bars, the report.

A benchmark is a module with ``OPTIONS``, ``measure(asked, report)``, which puts figures into the
report as soon as it has them, and raises ``Misuse`` before, and ``show(report)``, which prints
those that are there, beside the ``options``.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import uuid
from contextlib import contextmanager
from importlib import import_module
from itertools import cycle, permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from kvtier.errors import Misuse
from kvtier.settings.host_memory import SHARED_MEMORY_FOLDER
from kvtier.tools.bench.about import about_machine
from kvtier.tools.bench.tier_command import spread
from kvtier.tools.terminal import check_can_write, write_json
from kvtier.vllm.memory.region import sweep
from stress.children import start_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from stress.children import Part

SEED: Final = 2026
_ENGINE: Final = "stress.bench.driven_engine"
SideT = TypeVar("SideT")

Report = dict[str, Any]


def at_least_one(text: str) -> int:
    """Read a whole number."""
    number = int(float(text)) if "e" in text else int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


def several(text: str) -> tuple[int, ...]:
    """Read whole numbers, in their order, with commas between."""
    return tuple(sorted(set(map(at_least_one, text.split(",")))))


class Option(NamedTuple):
    """An option; ``read`` makes a value of its text."""

    name: str
    default: int | str | None
    help: str
    read: Callable[[str], Any] = str
    choices: tuple[str, ...] | None = None


PATH: Final = Option("--path", tempfile.gettempdir(), "a folder on the disk to be measured")
RUNS: Final = Option("--runs", 5, "number of runs; figures are their medians", at_least_one)
ROUNDS: Final = RUNS._replace(name="--rounds")


def run_benchmark(module: str, prog: str, given: Sequence[str]) -> None:
    """Measure, print the tables, write the file. Raises ``Misuse``."""
    benchmark: Any = import_module(module)
    asked = read_options(benchmark.OPTIONS, prog, given, benchmark.__doc__)
    if asked.json:
        check_can_write(asked.json)
    found: Report = {}
    try:
        benchmark.measure(asked, found)
    finally:  # what was measured before Ctrl-C is shown, too
        if found:
            report = {**about_machine(), "options": vars(asked), **found}
            if "vllm" in sys.modules:  # it is what kvtier was compared with
                report["vllm_version"] = str(sys.modules["vllm"].__version__)
            benchmark.show(report)
            if asked.json:
                write_json(asked.json, report)


def read_options(
    options: Sequence[Option], prog: str, given: Sequence[str], description: str = ""
) -> argparse.Namespace:
    """Read the options of a benchmark, and ``--json``; ends the process if they are wrong."""
    parser = argparse.ArgumentParser(prog, description=description)
    for name, default, text, read, choices in options:
        if default is False:
            parser.add_argument(name, action="store_true", help=text)
        else:
            shown = "" if default is None else " (default: %(default)s)"
            parser.add_argument(
                name, default=default, type=read, choices=choices, help=f"{text}{shown}"
            )
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE, as JSON")
    return parser.parse_args(given)


@contextmanager
def own_folder(place: str | None = None) -> Iterator[Path]:
    """Make a folder in ``place``, which is removed at the end. Raises ``Misuse``."""
    if place is not None and not Path(place).is_dir():
        raise Misuse(f"--path {place} is no folder. Make it first, on the disk to be measured.")
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=place) as folder:
        yield Path(folder)


@contextmanager
def start_engine(folder: Path, job: Mapping[str, Any]) -> Iterator[Part]:
    """Start an engine: see ``driven_engine``. Nothing is left of it when the block is left.

    ``folder``: for the model, which the first one makes, and for what those leave that are killed.
    """
    engine_id = f"bench-{uuid.uuid4()}"
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    job = {"model": str(folder / "model"), "engine_id": engine_id, **job}
    try:
        with start_part(_ENGINE, job, TMPDIR=str(temporary)) as part:
            part.answer()
            yield part
    finally:
        for path in Path(SHARED_MEMORY_FOLDER).glob(f"vllm_offload_{engine_id}*"):
            path.unlink(missing_ok=True)
        sweep(SHARED_MEMORY_FOLDER)


def orders(sides: Sequence[SideT]) -> Iterator[Sequence[SideT]]:
    """Yield in which order sides take their turns: by lot, and each order as often as any other.

    Two sides so alternate in going first, and none of several always follows the same one.
    """
    every = list(permutations(sides))
    random.Random(SEED).shuffle(every)
    return cycle(every)


def medians(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each side."""
    return {side: statistics.median(each) for side, each in values.items()}


def ratio(
    over: Sequence[float],
    under: Sequence[float],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    run_by_run: bool = False,
) -> dict[str, Any]:
    """Return one median over the other, the runs' own ratios, and whether a bar is kept.

    ``run_by_run``: the median of the runs' own ratios instead, for what changes from run to run.
    """
    of_runs = [one / other for one, other in zip(over, under, strict=True)]
    medians_ratio = statistics.median(over) / statistics.median(under)
    found = statistics.median(of_runs) if run_by_run else medians_ratio
    bar, holds = "", None
    if at_least is not None:
        bar, holds = f">= {at_least:.2f}", found >= at_least
    elif at_most is not None:
        bar, holds = f"<= {at_most:.2f}", found <= at_most
    return {"ratio": found, "of_runs": of_runs, "bar": bar, "holds": holds}


def ratio_cells(found: Mapping[str, Any]) -> list[str]:
    """Show a ratio, the range of those of the runs, its bar, and whether it is kept."""
    of_runs = spread(found["of_runs"], 2)
    return [f"{found['ratio']:.2f}", of_runs, found["bar"], yes_or_no(found["holds"])]


def yes_or_no(holds: bool | None) -> str:  # noqa: FBT001 - a figure, not a switch
    """Show whether a bar is kept; None: there is none."""
    return "" if holds is None else "yes" if holds else "NO"
