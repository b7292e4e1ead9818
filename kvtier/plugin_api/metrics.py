"""Declares metrics: kind, name, labels and help text, once, beside the number that is counted.

A backend declares its own in ``Backend.metrics``. The exporter's definitions and the tables of
the reference are made from these declarations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Metric:
    """One metric, or one series of it: the name is that of the number, unless one is given."""

    help: str
    name: str = ""  #: without the prefix ``kvtier:``
    labels: tuple[tuple[str, str], ...] = ()  #: of this series, besides the tier's
    in_vllm: bool = False  #: vLLM has a metric for it, which is used instead


@dataclass(frozen=True)
class Counter(Metric):
    """Only grows; from 0 at each ``open`` of a backend, whose lives are added up."""


@dataclass(frozen=True)
class Gauge(Metric):
    """Goes up and down."""


BackendMetric: TypeAlias = Counter | Gauge
"""A metric that a backend may declare."""

CAPACITY_BYTES: Final = Gauge("Bytes that a tier may hold.", name="tier_capacity_bytes")
"""Declare it as ``"capacity_bytes"``, if the tier has a limit ..."""

USED_BYTES: Final = Gauge("Bytes that a tier holds.", name="tier_used_bytes")
"""... and this as ``"used_bytes"``."""


def gauges_in(metrics: Mapping[str, BackendMetric]) -> frozenset[str]:
    """Return the names of the gauges."""
    return frozenset(name for name, metric in metrics.items() if isinstance(metric, Gauge))
