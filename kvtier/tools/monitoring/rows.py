"""The dashboard's rows: faults, a row for each question, and one that repeats for each tier.

``docs/write_monitoring.py`` makes Grafana's JSON of them, ``dashboard.json``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.engine.link.circuit_breaker import BreakerState
from kvtier.plugin_api.backend import Connection
from kvtier.tools.monitoring.promql import narrowed
from kvtier.tools.monitoring.questions import DISK, FIGURES, QUESTIONS, Figure
from kvtier.tools.watching.readings import FAULTS, OF_TIER

if TYPE_CHECKING:
    from collections.abc import Mapping

CHOSEN: Final = {"model_name": '=~"$model"', "instance": '=~"$instance"'}
"""Matchers of the dashboard's variables, in each of its queries."""

STATE_NAMES: Final[Mapping[str, Mapping[int, str]]] = {
    "states": {state.value: state.name.lower().replace("_", "-") for state in BreakerState},
    "connections": {state.value: state.name.lower() for state in Connection},
}
"""Words for the values of figures of these kinds."""

LARGER: Final = 3
"""The most panels of a row in one line; more are in two lines."""

WINDOW: Final = "$window"
"""The variable that replaces the page's hour."""


class Row(NamedTuple):
    """One row of panels. ``for_each``: the variable that it is repeated for."""

    title: str
    figures: tuple[Figure, ...]
    for_each: str = ""


def _named(label: str, queries: Mapping[str, str]) -> str:
    """Return the union of some queries: ``label`` has the name of each."""
    named = (
        f'label_replace({query}, "{label}", "{name}", "", "")' for name, query in queries.items()
    )
    return "   " + "\nor ".join(named) + "\n"


_FAULTS: Final = _named(
    "fault",
    {name: f"sum by (tier) (increase({OF_TIER[name]}_total[1h]))" for name in FAULTS},
)
_CONNECTIONS: Final = "max by (tier, instance) (kvtier:tier_connection_state)\n"
_QUARANTINED: Final = 'sum by (instance) (kvtier:primary_slots{state="quarantined"})\n'
_DEFECTS: Final = _named(
    "what",
    {
        "message handlers that raised": "sum(increase(kvtier:faults_total[1h]))",
        "dropped metrics or events": "sum(increase(kvtier:samples_dropped_total[1h]))",
        "requests not in the record": "sum(increase(kvtier:records_dropped_total[1h]))",
    },
)
_MOVED: Final = _named(
    "way",
    {
        "loaded": "sum by (tier) (rate(vllm:kv_offload_tiering_read_bytes_total[1h]))",
        "stored": "sum by (tier) (rate(vllm:kv_offload_tiering_write_bytes_total[1h]))",
    },
)
_MISSES: Final = "sum by (reason) (increase(kvtier:misses_total[1h]))\n"

WRONG: Final = (
    Figure("Faults of tiers", "short", _FAULTS),
    FIGURES["Circuit breakers"],
    Figure("Connections to servers", "short", _CONNECTIONS, "connections"),
    Figure("Slots held by reads and writes that hang", "short", _QUARANTINED),
    Figure("Defects", "short", _DEFECTS),
)

OF_EACH_TIER: Final = (
    Figure("Bytes loaded and stored a second", "Bps", _MOVED),
    Figure("Requests that miss here, by reason", "short", _MISSES),
    *(
        FIGURES[title]
        for title in (
            "Half of the loads took no longer than",
            "99 % of the loads took no longer than",
            "Share in use",
            "Blocks not stored",
            "Circuit breakers",
        )
    ),
)


def rows() -> tuple[Row, ...]:
    """Return all rows, with the queries that the dashboard has."""
    return (
        Row("What is wrong", tuple(map(_drawn, WRONG))),
        *(Row(each.title, tuple(map(_drawn, each.figures))) for each in QUESTIONS),
        Row("Tier $tier", tuple(map(_of_one_tier, OF_EACH_TIER)), "tier"),
    )


def _drawn(figure: Figure) -> Figure:
    query = figure.query.replace("[1h]", f"[{WINDOW}]").replace(DISK, 'tier=~"$tier"')
    return figure._replace(query=narrowed(query, CHOSEN))


def _of_one_tier(figure: Figure) -> Figure:
    return _drawn(figure._replace(query=narrowed(figure.query, {"tier": '="$tier"'})))


def lines_of(count: int) -> list[int]:
    """Return the number of a row's panels in each of its lines."""
    return [count] if count <= LARGER else [(count + 1) // 2, count // 2]


def filled_in(query: str, tier: str, window: str) -> str:
    """Return a query of the dashboard as Grafana sends it, with all models and instances."""
    values = {"model": ".*", "instance": ".*", "tier": tier, "window": window}
    return re.sub(r"\$(model|instance|tier|window)\b", lambda found: values[found[1]], query)


def legend(query: str) -> str:
    """Return the name under which Grafana shows a series: the labels it is grouped by."""
    grouped = re.search(r"\bby \(([^)]*)\)", query)
    labels = [label.strip() for label in grouped[1].split(",")] if grouped else []
    made = re.findall(r'label_replace\(.*?, "(\w+)", "[^$"]*", "", ""\)', query)
    names = dict.fromkeys([*labels, *made])
    return ", ".join(f"{{{{{name}}}}}" for name in names if name != "le")
