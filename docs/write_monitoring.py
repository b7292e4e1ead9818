"""Writes the dashboard, the rules and the table of alerts from ``kvtier/tools/monitoring``.

``kvtier dashboard`` and ``kvtier alerts`` print the files that it writes there: users of kvtier
need neither Grafana's library, whose releases stand in no order, nor one for YAML. After a change
of a query, an alert or a metric::

    python docs/write_monitoring.py

``python docs/write_monitoring.py REPORT.json`` writes the table of faults too, from the report of
``python -m stress.monitored --report REPORT.json``.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import yaml
from grafana_foundation_sdk.builders import common, dashboard, prometheus
from grafana_foundation_sdk.builders.statetimeline import Panel as States
from grafana_foundation_sdk.builders.table import Panel as Table
from grafana_foundation_sdk.builders.timeseries import Panel as Lines
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as words
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    ValueMap,
    ValueMappingResult,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from kvtier.tools.monitoring.alerts import ALERTS, rules
from kvtier.tools.monitoring.printed import DASHBOARD, RULES
from kvtier.tools.monitoring.promql import unknown_in
from kvtier.tools.monitoring.rows import STATE_NAMES, legend, lines_of, rows
from kvtier.tools.watching.shown import sentence

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtier.tools.monitoring.questions import Figure

Panel: TypeAlias = Lines | States | Table

PAGE: Final = Path(__file__).parent / "how-to/watch-metrics.md"
SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
COLUMNS: Final = 24
HEIGHT: Final = 8
COLOURS: Final = ("green", "orange", "yellow", "red")


def made_dashboard() -> str:
    """Return the dashboard as Grafana imports it."""
    made = (
        dashboard.Dashboard("kvtier")
        .uid("kvtier")
        .description("Made by kvtier dashboard. Its questions are those of the page Is it helping?")
        .tags(["kvtier", "vllm"])
        .time("now-6h", "now")
        .refresh("1m")
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
        .with_variable(_values("model", "Model", "label_values(kvtier:info, model_name)"))
        .with_variable(_values("instance", "Server", "label_values(kvtier:info, instance)"))
        .with_variable(_values("tier", "Tier", "label_values(kvtier:tier_breaker_state, tier)"))
        .with_variable(
            dashboard.IntervalVariable("window")
            .label("Window of rates")
            .values("5m,15m,1h,6h,1d")
            .current(VariableOption(selected=True, text="1h", value="1h"))
        )
    )
    number = 0
    for row in rows():
        number += 1
        made.with_row(_repeated(dashboard.Row(row.title).id(number), row.for_each))
        for width, figure in zip(_widths(len(row.figures)), row.figures, strict=True):
            number += 1
            made.with_panel(_panel(figure).id(number).span(width).height(HEIGHT))
    return json.dumps(made.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _values(name: str, label: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(multi=True)
        .include_all(include_all=True)
        .current(VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def _repeated(row: dashboard.Row, variable: str) -> dashboard.Row:
    return row.repeat(variable) if variable else row


def _widths(count: int) -> list[int]:
    """Return the widths of a row's panels, which fill its lines."""
    return [COLUMNS // line for line in lines_of(count) for _ in range(line)]


def _panel(figure: Figure) -> Panel:
    check_names(figure.query)
    query = prometheus.Dataquery().expr(figure.query).ref_id("A").datasource(SOURCE)
    panel: Panel
    if figure.kind == "table":
        query.instant().format(PromQueryFormat.TABLE)
        panel = Table().show_header(show_header=True)
    else:
        query.range().legend_format(legend(figure.query) or figure.title)
        panel = _states(figure) if figure.kind in STATE_NAMES else _lines(figure)
    return panel.title(figure.title).datasource(SOURCE).unit(figure.unit).with_target(query)


def check_names(query: str) -> None:
    """Raise ``SystemExit`` if a query names what no engine has."""
    if unknown := unknown_in(query):
        raise SystemExit(f"no engine has {', '.join(sorted(unknown))}: {query}")


def _states(figure: Figure) -> States:
    shown = STATE_NAMES[figure.kind]
    results = {
        str(value): ValueMappingResult(text=text, color=COLOURS[value], index=value)
        for value, text in shown.items()
    }
    return States().mappings([ValueMap(options=results)]).merge_values(merge_values=True)


def _lines(figure: Figure) -> Lines:
    lines = (
        Lines()
        .min(0)
        .line_width(1)
        .show_points(words.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .show_legend(show_legend=True)
            .display_mode(words.LegendDisplayMode.LIST)
            .placement(words.LegendPlacement.BOTTOM)
        )
        .tooltip(common.VizTooltipOptions().mode(words.TooltipDisplayMode.MULTI))
    )
    if figure.kind == "stack":
        lines.fill_opacity(40).stacking(common.StackingConfig().mode(words.StackingMode.NORMAL))
    return lines


class Written(yaml.SafeDumper):  # type: ignore[misc] # PyYAML has no types
    """Writes queries of several lines as people do."""


def _text(dumper: Written, text: str) -> yaml.Node:
    style = "|" if "\n" in text.rstrip("\n") else None
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text if style else text.rstrip("\n"), style=style
    )


Written.add_representer(str, _text)


def made_rules() -> str:
    """Return the rules as YAML."""
    made = rules()
    for rule in (rule for group in made["groups"] for rule in group["rules"]):
        check_names(rule["expr"])
    text: str = yaml.dump(made, Dumper=Written, sort_keys=False, width=1_000)
    return f"# Made by kvtier alerts.\n{text}"


def made_page(page: str) -> str:
    """Return the page with its table of alerts made anew."""
    return filled(page, "made by docs/write_monitoring.py", _table())


def filled(page: str, mark: str, lines: Iterable[str]) -> str:
    """Return the page with these lines in place of those between a mark and its end."""
    text = "\n".join(lines)
    marked = re.compile(
        rf"^(<!-- {re.escape(mark)} -->\n).*?^(<!-- end -->)$", re.MULTILINE | re.DOTALL
    )
    return marked.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page)


def _table() -> Iterable[str]:
    yield "| alert | severity | it means | for | do |"
    yield "|---|---|---|---|---|"
    for each in ALERTS:
        about = each.about.format(tier="the tier", value=each.limit)
        holds = "" if each.holds == "0s" else _spelt(each.holds)
        about, remedy = map(sentence, (about, each.remedy))
        yield f"| `{each.name}` | {each.severity} | {about} | {holds} | {remedy} |"


def measured_page(page: str, report: dict[str, Any]) -> str:
    """Return the page with its table of faults made of a report."""
    lines = ["| fault | alert | found after | fires after |", "|---|---|---|---|"]
    for fault in report["faults"].values():
        for name in fault["expected"]:
            found = max(1, round(fault["seen_s"][name]))
            holds = "" if report["holds"][name] == "0s" else f"{_spelt(report['holds'][name])} "
            lines.append(f"| {fault['about']} | `{name}` | {found} s | {holds}{found} s |")
    return filled(page, "measured by stress.monitored", lines)


def _spelt(duration: str) -> str:
    return duration.replace("m", " min").replace("h", " h")


def main() -> None:
    """Write all of it."""
    DASHBOARD.write_text(made_dashboard())
    RULES.write_text(made_rules())
    page = made_page(PAGE.read_text())
    for report in sys.argv[1:]:
        page = measured_page(page, json.loads(Path(report).read_text()))
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
