"""``kvtier alerts``: rules for Prometheus."""

from __future__ import annotations


def alerts() -> None:
    """Print alerts and recording rules for Prometheus, as YAML for its rule_files.

    Each alert has a remedy as an annotation. Edit thresholds and times in the printed file.
    """
    from kvtier.tools.monitoring.printed import RULES  # noqa: PLC0415 - not for --help

    print(RULES.read_text(), end="")
