"""``python -m stress``: one run of one layer, and its verdict."""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from stress.arguments import Arguments, check_kinds, read_arguments
from stress.failure import Failure
from stress.heard import nothing_on_stderr
from stress.plan import draw_gate_plan, draw_plan
from stress.planted.planting import planted, plants
from stress.record import Record
from stress.supervisor import folder_prefix, supervised
from stress.verdict import print_verdict, write_report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stress.layer import Layer

PLUGINS = Path(__file__).parent / "plugins"
LOG_TAIL_LINES = 30


def main(given: Sequence[str] | None = None) -> int:
    """Run once; returns the exit status."""
    arguments = read_arguments(given)
    sys.path.append(str(PLUGINS))
    layer = _layer(arguments)
    try:
        check_kinds(arguments.faults, [kind.name for kind in layer.kinds])
    except ValueError as problem:
        print(f"stress: {problem}", file=sys.stderr)
        return 2
    if arguments.plant is not None and not _can_plant(arguments):
        return 2
    wanted = arguments.faults
    kinds = [each for each in layer.kinds if wanted is None or each.name in wanted]
    if arguments.gate:
        kinds = [each for each in kinds if each.name not in layer.not_in_the_gate]
        plan, ends = draw_gate_plan(arguments.seed, kinds), "until counts are reached"
        record = Record(arguments.layer, arguments.seed, plan.seconds)
    else:
        seconds, ends = arguments.minutes * 60, f"{arguments.minutes:g} minutes"
        plan = draw_plan(arguments.seed, seconds, kinds)
        record = Record(arguments.layer, arguments.seed, seconds, planned_s=seconds)
    print(
        f"stress: {arguments.layer}, seed {arguments.seed}, {ends}, "
        f"{len(plan.faults)} faults planned",
        flush=True,
    )
    with _folder(arguments) as folder:
        began_s = time.monotonic()
        try:
            with nothing_on_stderr(folder / "stderr"), planted(arguments.plant):
                layer.run(plan, record, folder)
        except Failure as failure:
            record.fail(str(failure), time.monotonic() - began_s)
        except Exception:  # noqa: BLE001 - that nothing raises is a promise too
            record.fail(f"raised:\n{traceback.format_exc()}", time.monotonic() - began_s)
        if record.failure is not None:
            _print_log(folder / "log")
    print_verdict(record)
    if arguments.report is not None:
        write_report(record, arguments.report)
    return 0 if record.failure is None else 1


def _can_plant(arguments: Arguments) -> bool:
    """Tell whether there is such a plant; else say which there are."""
    known = plants()
    if arguments.plant in known:
        return True
    lines = "\n".join(f"  {name:18}{plant.layer}: {plant.what}" for name, plant in known.items())
    print(
        f"stress: --plant takes one of these, with the layer that finds it:\n{lines}",
        file=sys.stderr,
    )
    return False


def _layer(arguments: Arguments) -> Layer:
    """Make the layer: only what it needs is imported."""
    module = import_module(f"stress.{arguments.layer}.layer")
    made: Layer = getattr(module, f"{arguments.layer.title()}Layer")(arguments)
    return made


@contextmanager
def _folder(arguments: Arguments) -> Iterator[Path]:
    if arguments.folder is not None:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        yield arguments.folder
        return
    with tempfile.TemporaryDirectory(prefix=folder_prefix()) as name:
        yield Path(name)


def _print_log(log: Path) -> None:
    if log.exists():
        lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        print("\n".join(["the end of the log:", *lines]), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(supervised(main))
