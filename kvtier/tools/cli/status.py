"""``kvtier status``: how running engines and their tiers are, once."""

from __future__ import annotations

from typing import Annotated, Final

from cyclopts import Parameter

from kvtier.tools.cli.options import Json

TROUBLE: Final = 1
"""The exit status if a tier is not in use, or an engine does not answer."""

HERE: Final = "127.0.0.1:8000"


def status(
    *urls: Annotated[str, Parameter(metavar="URL")],
    json: Json = None,
) -> int:
    """Show the tiers of running engines, and what to do first.

    All figures are from the start of each engine on. The exit status is 0 if all tiers of all
    engines are in use; 1 if one is not, if an engine does not answer or has no kvtier; and 2 for an
    address that is none. For rates, see kvtier top.

    Parameters
    ----------
    urls
        of the engines' servers: host:port, or http://host:port/metrics; by default 127.0.0.1:8000
    """
    from kvtier.tools.terminal import check_can_report, report, table  # noqa: PLC0415 - heavy imports
    from kvtier.tools.watching import shown  # noqa: PLC0415 - as above
    from kvtier.tools.watching.page import page_url  # noqa: PLC0415 - as above
    from kvtier.tools.watching.scrape import scrape  # noqa: PLC0415 - as above

    check_can_report(json)
    found = scrape([page_url(each) for each in urls or (HERE,)])

    def show() -> None:
        for engine in found.engines:
            columns, rows = shown.table_of(engine, [("tokens", engine)])
            table(shown.headline(engine), columns, rows)
            print(shown.advice(engine), end="\n\n")
        for url, why in found.silent.items():
            print(f"{url}: {why}")

    figures = {
        "report": "kvtier status",
        "engines": [
            {**engine.figures(), "advice": shown.advice(engine)} for engine in found.engines
        ],
        "silent": found.silent,
    }
    report(json, figures, show)
    is_well = not found.silent and all(engine.is_healthy for engine in found.engines)
    return 0 if is_well else TROUBLE
