"""What all benchmarks have in common: options, turns, medians and ranges, and the report.

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
from contextlib import contextmanager
from importlib import import_module
from itertools import cycle, permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from kvtier.errors import Misuse
from kvtier.tools.bench.about import about_machine
from kvtier.tools.terminal import check_can_write, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SEED: Final = 2026
SideT = TypeVar("SideT")

Report = dict[str, Any]


class Option(NamedTuple):
    """An option. Its default says what it is: a whole number, a text, or (False) a flag."""

    name: str
    default: int | str | None
    help: str
    least: int = 1  #: of a whole number
    choices: tuple[int | str, ...] | None = None


PATH: Final = Option("--path", tempfile.gettempdir(), "a folder on the disk to be measured")
RUNS: Final = Option("--runs", 5, "number of runs; figures are their medians")
ROUNDS: Final = RUNS._replace(name="--rounds")


def run_benchmark(module: str, prog: str, given: Sequence[str]) -> None:
    """Measure, print the tables, write the file. Raises ``Misuse``."""
    benchmark: Any = import_module(module)
    asked = read_options(benchmark.OPTIONS, prog, given, benchmark.__doc__)
    found: Report = {}
    try:
        benchmark.measure(asked, found)
    finally:  # what was measured before Ctrl-C is shown, too
        if found:
            options = {name: value for name, value in vars(asked).items() if name != "json"}
            report = {**_about(), "options": options, **found}
            benchmark.show(report)
            if asked.json:
                write_json(asked.json, report)


def read_options(
    options: Sequence[Option], prog: str, given: Sequence[str], description: str = ""
) -> argparse.Namespace:
    """Read and check the options of a benchmark, and ``--json``. Raises ``Misuse``."""
    parser = argparse.ArgumentParser(prog, description=description)
    for name, default, text, _, choices in options:
        if default is False:
            parser.add_argument(name, action="store_true", help=text)
        else:
            shown = "" if default is None else " (default: %(default)s)"
            kind = int if isinstance(default, int) else str
            parser.add_argument(
                name, default=default, type=kind, choices=choices, help=f"{text}{shown}"
            )
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE, as JSON")
    asked = parser.parse_args(given)
    for option in options:
        value = getattr(asked, option.name[2:].replace("-", "_"))
        if not isinstance(value, bool) and isinstance(value, int) and value < option.least:
            raise Misuse(f"{option.name} {value} must be at least {option.least}.")
    if asked.json:
        check_can_write(asked.json)
    return asked


def _about() -> dict[str, str | int]:
    about = about_machine()
    if "vllm" in sys.modules:  # it is what kvtier was compared with
        about["vllm_version"] = str(sys.modules["vllm"].__version__)
    return about


@contextmanager
def own_folder(place: str | None = None) -> Iterator[Path]:
    """Make a folder in ``place``, which is removed at the end. Raises ``Misuse``."""
    if place is not None and not Path(place).is_dir():
        raise Misuse(f"--path {place} is no folder. Make it first, on the disk to be measured.")
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=place) as folder:
        yield Path(folder)


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


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Return one median over the other, and how far the runs' own ratios stray."""
    each = [one / other for one, other in zip(ours, theirs, strict=True)]
    return {
        "ratio": statistics.median(ours) / statistics.median(theirs),
        "ratio_min": min(each),
        "ratio_max": max(each),
    }


def spread(values: Sequence[float], digits: int) -> str:
    """Show the smallest and the largest."""
    return f"{min(values):,.{digits}f}..{max(values):,.{digits}f}"


def yes_or_no(holds: bool | None) -> str:  # noqa: FBT001 - a figure, not a switch
    """Show whether a bar is kept; None: there is none."""
    return "" if holds is None else "yes" if holds else "NO"
