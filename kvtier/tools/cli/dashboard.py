"""``kvtier dashboard``: a dashboard for Grafana."""

from __future__ import annotations


def dashboard() -> None:
    """Print a dashboard for Grafana, as JSON to import.

    It shows current faults, the questions of the page "Is it helping?", and each tier. Grafana 10.1
    or later reads it, with a Prometheus that scrapes the engines.
    """
    from kvtier.tools.monitoring.printed import DASHBOARD  # noqa: PLC0415 - not for --help

    print(DASHBOARD.read_text(), end="")
