"""What the tests of ``kvtier doctor`` share: a machine, a configuration, and pages of metrics."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

from kvtier.core import metrics
from kvtier.settings.vllm_releases import TESTED, Installed
from kvtier.tools.doctor import examination
from kvtier.tools.doctor.running import CACHE_CONFIG
from kvtier.tools.doctor.subject import DoctorArguments, Machine
from kvtier.tools.watching.readings import OF_PRIMARY, OF_SOURCE, OF_TIER, VLLMS_HITS, VLLMS_QUERIES
from tests.support.http_server import http_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import ExitStack
    from pathlib import Path

    from kvtier.tools.checking.findings import Findings

SPEC = {"spec_name": "KVTierOffloadingSpec", "spec_module_path": "kvtier.vllm"}
BLOCK_BYTES = 1 << 16
KIB = 1 << 10
ON_EXT4 = "27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard\n"
MEMINFO = "MemTotal:       {total} kB\nMemFree:        {free} kB\nMemAvailable:   {free} kB\n"


@dataclass
class Page:
    """What an engine's server shows: a sound engine with a tier, ``nvme``, until it is changed."""

    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)

    @classmethod
    def sound(cls, vllm: str = f"{TESTED[-1]}.0", **cache_config: str) -> Page:
        """Return the page of an engine that has loaded 100,000 tokens, 10,000 a second."""
        page = cls()
        page.set(metrics.INFO.name, version="0.1", vllm=vllm, tiers="nvme", configuration="1")
        given = {"block_size": "16", "num_gpu_blocks": "4", "enable_prefix_caching": "True"}
        page.set(CACHE_CONFIG, **given | cache_config)
        for work in ("probes", "loads", "stores"):
            page.set(metrics.BREAKER.name, 0, tier="nvme", work=work)
        page.count(OF_SOURCE["loaded_tokens"], 100_000, tier="nvme")
        page.count(OF_PRIMARY["prefill_saved_seconds"], 10)
        page.set(f"{metrics.LOAD_BYTES.name}_sum", 100_000 * 4096, tier="nvme")
        page.set(metrics.BYTES_PER_SECOND.name, 20_000 * 4096, tier="nvme", work="loads")
        for tier in ("0:primary", "nvme"):
            page.count(VLLMS_QUERIES, 20_000, tier=tier)
            page.count(VLLMS_HITS, 10_000, tier=tier)
        return page

    def set(self, name: str, value: float = 1, /, **labels: str) -> None:
        """Set a series of this name."""
        every = {"model_name": "org/m", "engine": "0", **labels}
        self.values[name, tuple(every.items())] = value

    def count(self, counter: str, value: float, /, **labels: str) -> None:
        """Set a series of a counter."""
        self.set(f"{counter}_total", value, **labels)

    def tier(self, attribute: str, value: float) -> None:
        """Set one of the tier's counters."""
        self.count(OF_TIER[attribute], value, tier="nvme")

    def __str__(self) -> str:
        """Return the page as Prometheus reads it."""
        lines = []
        for (name, labels), value in self.values.items():
            shown = ",".join(f'{key}="{text}"' for key, text in labels)
            lines.append(f"{name}{{{shown}}} {value}\n")
        return "".join(lines)


class Patient:
    """A sound configuration on a sound machine, until a test spoils something."""

    def __init__(self, folder: Path, stack: ExitStack, s3_endpoint: Callable[[], str]) -> None:
        self.folder = folder
        self.stack = stack
        self.s3_endpoint = s3_endpoint
        self.root = folder / "root"
        self.extra: dict[str, Any] = {**SPEC, "cpu_bytes_to_use": 64 * BLOCK_BYTES}
        self.tiers: list[dict[str, Any]] = [self.disk()]
        self.arguments: dict[str, Any] = {
            "max_model_len": 256,
            "kv_cache_memory_bytes": "1MiB",
            "no_enable_prefix_caching": False,
        }
        self.environment: dict[str, str] = {}
        self.vllm = Installed("vllm", f"{TESTED[0]}.1")
        self.pages: list[Page] = []
        self.urls: list[str] = []
        self.write("proc/self/mountinfo", ON_EXT4)
        self.write("proc/self/cgroup", "0::/\n")
        self.memory(1 << 40)
        (folder / "mount-point").touch()  # so that the folder is not an empty one

    def disk(self, **options: Any) -> dict[str, Any]:
        """Return an entry of a disk tier."""
        place = {"path": str(self.folder / "kv"), "capacity_bytes": "64MiB"}
        return {"type": "disk", "name": "nvme", **place, **options}

    def fs(self, **options: Any) -> dict[str, Any]:
        """Return an entry of an fs tier."""
        return {"type": "fs", "name": "shared", "root_dir": str(self.folder / "kv"), **options}

    def made(self, mode: int) -> Path:
        """Make the tier's folder, with this mode."""
        path = self.folder / "kv"
        path.mkdir()
        path.chmod(mode)
        return path

    def write(self, path: str, text: str) -> None:
        """Write a file below the machine's ``proc`` or ``sys``."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def memory(self, total: int, free: int | None = None) -> None:
        """Give the machine so much memory."""
        free = total if free is None else free
        self.write("proc/meminfo", MEMINFO.format(total=total // KIB, free=free // KIB))

    def mount(self, kind: str, at: str, source: str) -> None:
        """Mount a filesystem, as far as ``proc`` tells."""
        escaped = at.replace(" ", "\\040")
        line = f"36 27 0:32 / {escaped} rw,relatime shared:2 - {kind} {source} rw,vers=4.2\n"
        self.write("proc/self/mountinfo", ON_EXT4 + line)

    def examined(self, *, with_probe: bool = False) -> Findings:
        """Return what the doctor finds."""
        urls = [*self.urls, *(self.stack.enter_context(served(page)) for page in self.pages)]
        return examination.examine(
            {**self.extra, "secondary_tiers": self.tiers},
            urls,
            DoctorArguments(**self.arguments),
            block_bytes=BLOCK_BYTES,
            machine=Machine(self.root, self.environment, self.vllm),
            with_probe=with_probe,
        )


@contextmanager
def served(page: Page) -> Iterator[str]:
    """Serve a page over HTTP until the end of the block; its address is the block's value."""
    text = str(page).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http_server(Handler) as place:
        yield f"http://{place}/metrics"
