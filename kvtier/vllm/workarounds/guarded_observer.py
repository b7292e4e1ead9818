"""Keeps exceptions in observability code (metrics, events, labels) from reaching vLLM.

vLLM calls this code in each step of its engine, and one exception there ends a
server. It checks the values much later, in its front-end process: an unknown
metric, a wrong number of labels or a decreasing counter ends that process. So
each value is checked here; invalid values are dropped, counted
(``kvtier:samples_dropped``) and logged once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias, TypeVar, TypeVarTuple, get_args

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
)

from kvtier.plugin_api.log import log, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm.v1.kv_offload.base import OffloadingMetricMetadata

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Drop: TypeAlias = Literal[
    "metrics", "events", "config_info", "reports", "counter_fell", "bad_value"
]
"""Code that raised (the first four), or a value that vLLM would not accept."""

DROPS: Final[tuple[Drop, ...]] = get_args(Drop)

VALUE_MAX: Final = 2.0**63
"""vLLM sends values to its front end as MessagePack, which has no larger integers."""


_NUMBER: Final = (int, float)  # a union would be built again for each value


class GuardedObserver:
    """Counts dropped values, and logs each kind once."""

    def __init__(self) -> None:
        self.sound: set[tuple[type, str, tuple[str, ...]]] = set()  #: series that vLLM accepts
        self.dropped: dict[str, int] = dict.fromkeys(DROPS, 0)
        self._said: set[tuple[str, ...]] = set()

    def safely(self, what: Drop, call: Callable[[*Ts], T], *arguments: *Ts) -> T | None:
        """Return the result of ``call``; if it raises, count and log that, and return None."""
        try:
            return call(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine must go on
            self.dropped[what] += 1
            if self._is_news(what, type(error).__name__):
                log.error(
                    "observing failed, dropping this sample (logged once per kind)",
                    exc_info=True,
                    what=what,
                )
            return None

    def drop(self, what: Drop, metric: str, value: object) -> None:
        """Count a value that vLLM would not accept."""
        self.dropped[what] += 1
        if self._is_news(what, metric):
            log.error(
                "dropping an invalid metric value (logged once per metric)",
                what=what,
                metric=metric,
                value=printable(repr(value)),
            )

    def _is_news(self, *kind: str) -> bool:
        is_news = kind not in self._said
        self._said.add(kind)
        return is_news


class Sample:
    """One step's values: only metrics in ``definitions``, and only values that vLLM accepts."""

    def __init__(
        self, definitions: Mapping[str, OffloadingMetricMetadata], watch: GuardedObserver
    ) -> None:
        self.stats = OffloadingConnectorStats()
        self._definitions = definitions
        self._watch = watch

    def count(self, metric: str, grown: float, label: tuple[str, ...] = ()) -> None:
        """Add to a counter."""
        if self._is_sound(metric, OffloadingCounterMetadata, grown, label):
            if grown >= 0:
                self.stats.increase_counter(metric, grown, label)
            else:
                self._watch.drop("counter_fell", metric, grown)

    def set(self, metric: str, value: float, label: tuple[str, ...] = ()) -> None:
        """Set a gauge."""
        if self._is_sound(metric, OffloadingGaugeMetadata, value, label):
            self.stats.set_gauge(metric, value, label)

    def observe(self, metric: str, value: float, label: tuple[str, ...] = ()) -> None:
        """Add to a histogram."""
        if self._is_sound(metric, OffloadingHistogramMetadata, value, label):
            self.stats.observe_histogram(metric, value, label)

    def _is_sound(
        self,
        metric: str,
        kind: type[OffloadingMetricMetadata],
        value: object,
        label: tuple[str, ...],
    ) -> bool:
        """Return whether vLLM accepts this value; drop it if not."""
        if (
            ((kind, metric, label) in self._watch.sound or self._is_defined(kind, metric, label))
            and isinstance(value, _NUMBER)
            and abs(value) < VALUE_MAX  # False for an infinity and for a NaN
        ):
            return True
        self._watch.drop("bad_value", metric, (value, label))
        return False

    def _is_defined(
        self, kind: type[OffloadingMetricMetadata], metric: str, label: tuple[str, ...]
    ) -> bool:
        """Return whether vLLM accepts this series; an accepted series is checked only once."""
        definition = self._definitions.get(metric)
        if (
            isinstance(definition, kind)
            and len(label) == len(definition.labelnames)
            and all(map(_is_text, label))
        ):
            self._watch.sound.add((kind, metric, label))
            return True
        return False


def _is_text(label: object) -> bool:
    """Return whether a label can be sent. Most are ASCII, which needs no scan."""
    if not isinstance(label, str):
        return False
    return label.isascii() or printable(label) == label
