"""Runs a Prometheus server on loopback, and asks it. Debian: ``apt-get install prometheus``."""

from __future__ import annotations

import json
import re
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode
from urllib.request import urlopen

from kvtier.tools.process_group import process_group

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRAPE_S: Final = 1.0
PATIENCE_S: Final = 60.0
TARGET: Final = "vllm.example:8000"
PAGE: Final = Path(__file__).parents[2] / "docs/how-to/is-it-helping.md"
ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that this process has the metrics
    "VLLM_NO_USAGE_STATS": "1",
}
"""Of a process that has an engine, and shows its metrics to Prometheus."""

_CONFIGURED: Final = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_DURATION: Final = re.compile(r"(?<=\[)(\d+)([smhd])(?=\])|^(\d+)([smhd])$")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class Prometheus:
    """A running server."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/api/v1/"

    def ask(self, query: str, at: float) -> list[Any]:
        """Return the series of a query's answer at a time."""
        return list(self._get("query", query=query, time=at)["result"])

    def ask_range(self, query: str, begin: float, end: float, step: float) -> list[Any]:
        """Return the series of a query's answers over a time."""
        answer = self._get("query_range", query=query, start=begin, end=end, step=step)
        return list(answer["result"])

    def alerts(self) -> list[Any]:
        """Return the alerts whose queries find something now: ``pending``, or ``firing``."""
        return list(self._get("alerts")["alerts"])

    def wait_for_scrape(self) -> float:
        """Wait until a scrape has begun after now; return its time."""
        now = time.time()
        while time.time() < now + PATIENCE_S:
            time.sleep(SCRAPE_S / 4)
            for series in self.ask("timestamp(kvtier:info)", time.time()):
                scraped = float(series["value"][1])
                if scraped > now:
                    return scraped
        raise SystemExit("Prometheus has not scraped the engine")

    def _get(self, name: str, **arguments: object) -> Any:  # noqa: ANN401 - as JSON has it
        with urlopen(f"{self._url}{name}?{urlencode(arguments)}") as answer:  # noqa: S310 - ours
            return json.load(answer)["data"]


def faster(text: str, times: float) -> str:
    """Return a query, or a duration, that covers so much less time: at least three scrapes."""

    def shorter(found: re.Match[str]) -> str:
        number, unit = found[1] or found[3], found[2] or found[4]
        seconds = int(number) * _SECONDS[unit]
        return f"{max(3 * SCRAPE_S, seconds / times):.0f}s" if seconds else "0s"

    return _DURATION.sub(shorter, text)


@contextmanager
def prometheus(folder: Path, port: int, rules: Path | None = None) -> Iterator[Prometheus]:
    """Run it as the page "Is it helping?" has it, but with a target of this machine."""
    config = folder / "prometheus.yml"
    scrape = _CONFIGURED.findall(PAGE.read_text())[0]
    config.write_text(
        f"global: {{scrape_interval: {SCRAPE_S:g}s, evaluation_interval: {SCRAPE_S:g}s}}\n"
        f"{f'rule_files: [{rules}]' if rules else ''}\n"
        f"{scrape.replace(TARGET, f'127.0.0.1:{port}')}"
    )
    options = ("--web.listen-address=127.0.0.1:0", f"--storage.tsdb.path={folder / 'data'}")
    command = ["prometheus", f"--config.file={config}", *options]
    log = folder / "prometheus.log"
    with log.open("w") as out, process_group(command, stdout=out, stderr=out) as child:
        deadline = time.monotonic() + PATIENCE_S
        while not (listens := re.search(r'"Listening on" address=(\S+)', log.read_text())):
            if child.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"Prometheus did not start:\n{log.read_text()}")
            time.sleep(0.1)
        yield Prometheus(listens[1])
