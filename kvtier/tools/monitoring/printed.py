"""The files that ``kvtier dashboard`` and ``kvtier alerts`` print: docs/write_monitoring.py."""

from __future__ import annotations

from pathlib import Path
from typing import Final

DASHBOARD: Final = Path(__file__).with_name("dashboard.json")
RULES: Final = Path(__file__).with_name("rules.yaml")
