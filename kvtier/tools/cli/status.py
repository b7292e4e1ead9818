"""``kvtier status``: shows the state of running engines and their tiers, once."""

from __future__ import annotations

import math
import time
from typing import Annotated, Final

from cyclopts import Parameter

from kvtier.errors import Misuse
from kvtier.tools.cli.options import Json

TROUBLE: Final = 1
"""The exit status if a tier is not in use, or an engine does not respond."""

HERE: Final = "127.0.0.1:8000"


def status(
    *urls: Annotated[str, Parameter(metavar="URL")],
    seconds: Annotated[float | None, Parameter(metavar="N")] = None,
    json: Json = None,
) -> int:
    """Show the tiers of running engines, and what to do first.

    Figures are since the start of each engine, or over some seconds. The exit status is 0 if all
    tiers of all engines are in use; 1 if one is not, or if an engine does not respond or has no
    kvtier; and 2 for an invalid address. kvtier top shows the last minute and hour.

    Parameters
    ----------
    urls
        of the engines' servers: host:port, or http://host:port/metrics; by default 127.0.0.1:8000
    seconds
        read twice, N seconds apart, and show the work of the engines in between
    """
    from kvtier.tools.terminal import check_can_report, report, table  # noqa: PLC0415 - heavy imports
    from kvtier.tools.watching import shown  # noqa: PLC0415 - as above
    from kvtier.tools.watching.page import page_url  # noqa: PLC0415 - as above
    from kvtier.tools.watching.scrape import scrape  # noqa: PLC0415 - as above

    if seconds is not None and seconds <= 0:
        raise Misuse(
            f"--seconds {seconds:g} is no time to wait. Write a number above 0, such as 60."
        )
    check_can_report(json)
    pages = [page_url(each) for each in urls or (HERE,)]
    found = scrape(pages)
    engines, title = [(engine, engine) for engine in found.engines], "tokens"
    if seconds is not None:
        began = {engine.name: engine for engine in found.engines}
        _wait(seconds)
        found = scrape(pages)
        engines = [
            (now, now.since(began[now.name]) if now.name in began else now) for now in found.engines
        ]
        title = shown.span(seconds)

    def show() -> None:
        for engine, counted in engines:
            columns, rows = shown.table_of(engine, [(title, counted)])
            print(shown.headline(engine))
            table("", columns, rows, is_dense=True)
            print(*shown.faults_of(engine), shown.advice(engine), sep="\n", end="\n\n")
        for url, why in found.silent.items():
            print(f"{url}: {why}")

    figures = {
        "report": "kvtier status",
        "engines": [
            {**counted.figures(), "advice": shown.advice(engine)} for engine, counted in engines
        ],
        "silent": found.silent,
    }
    report(json, figures, show)
    is_well = not found.silent and all(engine.is_healthy for engine in found.engines)
    return 0 if is_well else TROUBLE


def _wait(seconds: float) -> None:
    """Wait, and show how long it will take."""
    from kvtier.tools.terminal import progress  # noqa: PLC0415 - a heavy import

    ends_at = time.monotonic() + seconds
    with progress("Waiting", math.ceil(seconds)) as shown:
        while (left := ends_at - time.monotonic()) > 0:
            time.sleep(min(1.0, left))
            shown.advance()
