"""Reads an engine's ``/metrics``: the page of one server, which may show several engines."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Final

from prometheus_client.parser import text_string_to_metric_families

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PATH: Final = "/metrics"
ANSWER_S_MAX: Final = 5.0
PAGE_BYTES_MAX: Final = 1 << 26


class NoPage(Exception):
    """A server shows no metrics now. The text says why."""


def page_url(text: str) -> str:
    """Return the address of the page of a server: ``host:port``, or a URL. ``ConfigError``."""
    url = text if "://" in text else f"http://{text}"
    if not url.startswith(("http://", "https://")) or not url.partition("://")[2].strip("/"):
        raise ConfigError(
            f"{text!r} is no address of an engine. Write host:port, or http://host:port/metrics."
        )
    return url if url.partition("://")[2].rstrip("/").count("/") else url.rstrip("/") + PATH


def fetch(url: str) -> Page:
    """Fetch and parse a page. Raises ``NoPage``. Takes about ``ANSWER_S_MAX`` at most."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_S_MAX) as answer:  # noqa: S310 - see page_url
            text = answer.read(PAGE_BYTES_MAX).decode("utf-8", "replace")
    except urllib.error.HTTPError as refused:
        raise NoPage(f"it answers {refused.code} {refused.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise NoPage(str(reason) or type(error).__name__) from None
    return Page(text)


class Page:
    """One page. Raises ``NoPage`` if it is not in a Prometheus format."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    rows = self._samples.setdefault(sample.name, [])
                    rows.append((sample.labels, sample.value))
        except ValueError as error:
            raise NoPage(f"it shows no metrics ({error})") from None

    def series(self, name: str, **labels: str) -> Iterator[tuple[Mapping[str, str], float]]:
        """Yield labels and value of all series of that name that have these labels."""
        for found, value in self._samples.get(name, ()):
            if labels.items() <= found.items():
                yield found, value

    def counters(self, suffix: str) -> list[str]:
        """Return the names of the counters with this ending."""
        ends = f"{suffix}_total"
        return [name.removesuffix("_total") for name in self._samples if name.endswith(ends)]

    def total(self, counter: str, **labels: str) -> float:
        """Return the sum of a counter's series that have these labels."""
        return sum(value for _, value in self.series(f"{counter}_total", **labels))

    def gauge(self, gauge: str, **labels: str) -> float | None:
        """Return the largest of a gauge's series that have these labels; None if there is none."""
        return max((value for _, value in self.series(gauge, **labels)), default=None)

    def histogram(self, histogram: str, **labels: str) -> Histogram:
        """Return a histogram, summed over the series that have these labels."""
        below: dict[float, float] = {}
        for found, value in self.series(f"{histogram}_bucket", **labels):
            bound = float(found["le"])
            below[bound] = below.get(bound, 0.0) + value
        sums = (value for _, value in self.series(f"{histogram}_sum", **labels))
        return Histogram(below, sum(sums))


class Histogram:
    """A histogram: how many observations were at most each bound, and their sum."""

    def __init__(self, below: Mapping[float, float], total: float) -> None:
        self.below = below
        self.total = total

    @property
    def count(self) -> float:
        """The number of observations."""
        return max(self.below.values(), default=0.0)

    def since(self, before: Histogram) -> Histogram:
        """Return the observations since an earlier state of the same histogram."""
        grown = {bound: n - before.below.get(bound, 0.0) for bound, n in self.below.items()}
        return Histogram(grown, self.total - before.total)

    def quantile(self, share: float) -> float | None:
        """Return a quantile, as ``histogram_quantile`` does; None without observations."""
        wanted = share * self.count
        if not wanted:
            return None
        lower = counted = 0.0
        for bound, count in sorted(self.below.items()):
            if count >= wanted:
                if bound == float("inf"):
                    return lower
                return lower + (bound - lower) * (wanted - counted) / (count - counted)
            lower, counted = bound, count
        return lower
