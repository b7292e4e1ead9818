"""The command line of ``python -m stress``, checked before anything starts."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LAYERS: Final = ("runtime", "filesystem", "remote", "engine")
MINUTES_MAX: Final = 7 * 24 * 60.0
SEEDS: Final = 10**6
GATE_SEED: Final = 20  #: an even one: the engine layer changes weights


@dataclass(frozen=True)
class Arguments:
    """What was asked for."""

    minutes: float
    seed: int
    layer: str
    faults: tuple[str, ...] | None  #: kinds; None: all
    clients: int | None  #: None: as many as the layer usually has
    report: Path | None  #: a folder for the JSON and the page
    folder: Path | None  #: where tiers and logs are kept afterwards
    plant: str | None = None  #: a fault of kvtier's to put back
    gate: bool = False  #: as in ``make test``: counts end the run


def read_arguments(arguments: Sequence[str] | None = None) -> Arguments:
    """Read the command line; ends the process with a message and status 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m stress",
        description="Soak kvtier under faults that a seed picks. Exit status 1, with the seed, "
        "if a promise was broken.",
    )
    parser.add_argument(
        "--minutes", type=_minutes, default=None, help="of faults, 1 if not given; the rest beside"
    )
    parser.add_argument(
        "--gate",
        action="store_true",
        help="as in `make test`: faults come after so many requests, and the run ends when each "
        "has hit something and enough was read from each tier. The seed is 20 unless it is given, "
        "limits are patient, and nothing depends on how fast the machine is",
    )
    parser.add_argument("--seed", type=_seed, default=None, help="of load and faults; else drawn")
    parser.add_argument("--layer", choices=LAYERS, default="runtime", help="what is soaked")
    parser.add_argument(
        "--faults", default=None, help="kinds of faults, with commas between; or 'none'; else all"
    )
    parser.add_argument(
        "--clients", type=_clients, help="of the engine layer; if not given 64, in the gate 12"
    )
    parser.add_argument("--report", type=Path, help="write report.json and report.html there")
    parser.add_argument("--folder", type=Path, help="an empty folder: keep logs and tiers there")
    parser.add_argument(
        "--plant",
        metavar="NAME",
        help="put back a fault that kvtier once had, which the run must find; 'list' names them",
    )
    given = parser.parse_args(arguments)
    if given.gate and given.minutes is not None:
        parser.error("--gate and --minutes: counts end the run, or the clock; name one")
    seed = given.seed
    if seed is None:
        seed = GATE_SEED if given.gate else random.SystemRandom().randrange(SEEDS)
    if given.folder is not None and given.folder.exists() and any(given.folder.iterdir()):
        parser.error(f"--folder {given.folder}: it is not empty; name another")
    return Arguments(
        given.minutes or 1.0,
        seed,
        given.layer,
        _kinds(given.faults),
        given.clients,
        given.report,
        given.folder,
        given.plant,
        given.gate,
    )


def check_kinds(wanted: tuple[str, ...] | None, known: Iterable[str]) -> None:
    """Raise ``ValueError`` for a kind that the layer doesn't know."""
    names = sorted(set(known))
    unknown = sorted(set(wanted or ()) - set(names))
    if unknown:
        raise ValueError(
            f"--faults {','.join(unknown)}: this layer has no such faults; it has "
            f"{', '.join(names)}"
        )


def _kinds(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    return () if text == "none" else tuple(text.split(","))


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes <= MINUTES_MAX:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0, and at most {MINUTES_MAX:g}")
    return minutes


def _seed(text: str) -> int:
    seed = int(text)
    if seed < 0:
        raise argparse.ArgumentTypeError(f"{text}: must not be negative")
    return seed


def _clients(text: str) -> int:
    clients = int(text)
    if not 1 <= clients <= 1024:
        raise argparse.ArgumentTypeError(f"{text}: must be from 1 to 1024")
    return clients
