"""Keeps what only observes (metrics, events, labels) from reaching vLLM as an exception.

vLLM calls these in each step of its engine, and one exception there ends a
server. It checks what it was given much later, in the process of its front
end: an unknown metric, a wrong number of labels or a counter that falls ends
that one. So each value is checked here, and what is wrong is dropped, counted
(``kvtier:samples_dropped``) and written to the log once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias, TypeVar, TypeVarTuple

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

Drop: TypeAlias = Literal["metrics", "events", "config_info", "counter_fell", "bad_value"]
"""Code that raised (the first three), or a value that is none vLLM would take."""

DROPS: Final[tuple[Drop, ...]] = ("metrics", "events", "config_info", "counter_fell", "bad_value")

VALUE_MAX: Final = 2.0**63
"""vLLM sends values to its front end as MessagePack, which has no larger integers."""


_NUMBER: Final = (int, float)  # a union would be made anew for each value


class GuardedObserver:
    """Counts what was dropped, and writes each kind of it to the log once."""

    def __init__(self) -> None:
        self.sound: set[tuple[type, str, tuple[str, ...]]] = set()  #: series that vLLM takes
        self.dropped: dict[str, int] = dict.fromkeys(DROPS, 0)
        self._said: set[tuple[str, ...]] = set()

    def safely(self, what: Drop, call: Callable[[*Ts], T], *arguments: *Ts) -> T | None:
        """Return what ``call`` does; None if it raises, which is counted."""
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
        """Count a value that vLLM would not take."""
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
    """What is reported in one step: only what ``definitions`` have, and vLLM takes."""

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
        """Tell whether vLLM takes this; drop it if not."""
        if (
            ((kind, metric, label) in self._watch.sound or self._is_defined(kind, metric, label))
            and isinstance(value, _NUMBER)
            and abs(value) < VALUE_MAX  # which neither an infinity nor a NaN is
        ):
            return True
        self._watch.drop("bad_value", metric, (value, label))
        return False

    def _is_defined(
        self, kind: type[OffloadingMetricMetadata], metric: str, label: tuple[str, ...]
    ) -> bool:
        """Tell whether vLLM takes this series; it is asked once for each that it takes."""
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
    """Tell whether a label can be sent. Most are ASCII, which is known without looking."""
    if not isinstance(label, str):
        return False
    return label.isascii() or printable(label) == label
