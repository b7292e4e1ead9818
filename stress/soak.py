"""Soak: real threads, real files, random faults, and every byte checked.

    python stress/soak.py --seconds 60 --seed 8841

One seed picks the load and the faults. Phase one: requests come and go while
tiers fail, stall, lie and fill up, files are damaged and deleted, a tier's
process is stopped and killed, and the primary tier is reset; every block that
is read must hold exactly its bytes, and no lookup may stay None past the
deadlines. Then the faults stop. Phase two: everything must come to rest, with
every slot accounted for.
Exits with 1 and the seed if anything of this is not so.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from msgspec import to_builtins

from kvtier import Namespace, RuntimeConfig, SlotMemory, open_runtime
from kvtier.hosts import process_host
from kvtier.hosts.process_host import TierProcess
from kvtier.hosts.thread_host import TierThread
from kvtier_backends.faults import FaultScript, OperationFaults
from kvtier_backends.memory import MemoryBackend

BLOCK_BYTES = 16 * 1024
SLOTS = 96
STEP_S = 0.001
PROBE_TIMEOUT_S = 0.2
PROMOTE_TIMEOUT_S = 0.5
STORE_TIMEOUT_S = 2.0
PENDING_S_MAX = 300.0
"""Three tiers, each asked and read once, in vain, take some 4 s; the rest is room for a busy
machine. What never ends takes longer."""

REST_S_MAX = 300.0
RESTART_PAUSE_S = 0.05  #: of the disk tier's process: killed often, it would hardly ever run


class Failure(Exception):
    """A promise was broken."""


def key_of(conversation: int, block: int) -> bytes:
    """Name one block of one conversation, in KV-cache group 0."""
    return hashlib.sha256(f"{conversation}:{block}".encode()).digest() + bytes(4)


def content_of(key: bytes) -> bytes:
    """Return the bytes that belong to a key: what every read is compared with."""
    return (key * (BLOCK_BYTES // len(key) + 1))[:BLOCK_BYTES]


class Soak:
    """One run."""

    def __init__(self, seed: int, root: Path) -> None:
        self.random = random.Random(seed)
        self.root = root
        config = RuntimeConfig.from_mapping(
            {
                "breaker_pause_s": 0.1,
                "breaker_pause_s_max": 0.5,
                "lease_timeout_s": 2.0,
                "secondary_tiers": [
                    {
                        "type": "memory",
                        "capacity_bytes": 64 * BLOCK_BYTES,
                        "probe_timeout_s": PROBE_TIMEOUT_S,
                        "promote_timeout_s": PROMOTE_TIMEOUT_S,
                        "store_timeout_s": STORE_TIMEOUT_S,
                    },
                    {
                        "type": "fs",
                        "root_dir": str(root / "fs"),
                        "n_read_threads": 4,
                        "n_write_threads": 4,
                        "probe_timeout_s": PROBE_TIMEOUT_S,
                        "promote_timeout_s": PROMOTE_TIMEOUT_S,
                        "store_timeout_s": STORE_TIMEOUT_S,
                    },
                    {
                        "type": "disk",
                        "path": str(root / "disk"),
                        "capacity_bytes": 512 * BLOCK_BYTES,
                        "probe_timeout_s": PROBE_TIMEOUT_S,
                        "promote_timeout_s": PROMOTE_TIMEOUT_S,
                        "store_timeout_s": STORE_TIMEOUT_S,
                    },
                ],
            },
            slot_count=SLOTS,
            block_bytes=BLOCK_BYTES,
        )
        self.memory = SlotMemory.anonymous(SLOTS, BLOCK_BYTES)
        self.facade = open_runtime(
            config, self.memory, Namespace({"soak": True}), collect_events=True
        )
        # The script breaks what it built, so it looks behind the facade.
        memory, _, disk = self.facade._tiers  # noqa: SLF001
        assert isinstance(memory, TierThread)
        backend = memory._backend  # noqa: SLF001
        assert isinstance(backend, MemoryBackend)
        assert isinstance(disk, TierProcess)
        self.faulty = backend
        self.disk = disk
        pauses = dict.fromkeys(("RESTART_PAUSE_S", "RESTART_PAUSE_S_MAX"), RESTART_PAUSE_S)
        vars(process_host).update(pauses)
        self.requests = 0
        self.read = 0
        self.stored = 0
        self.resets = 0
        self.resident: set[bytes] = set()
        self.counters: dict[str, int | float] = {}  # as they were last seen

    # --- the load ---

    def serve_one(self) -> None:
        """Serve a request: wait for its prefix, read it, compute and store the rest."""
        self.requests += 1
        name = f"r{self.requests}"
        conversation = self.random.randrange(12)
        keys = [key_of(conversation, block) for block in range(self.random.randrange(1, 40))]
        self.facade.on_request_started(name)
        hits = self.wait_for_prefix(keys, name)
        if hits is not None:
            self.read_blocks(keys[:hits], name)
            self.store_blocks(keys[hits:], name)
        self.facade.on_request_finished(name)
        self.step()

    def wait_for_prefix(self, keys: list[bytes], name: str) -> int | None:
        """Look up until the answer is known; None if the request is aborted meanwhile."""
        deadline = time.monotonic() + PENDING_S_MAX
        while (hits := self.facade.lookup_prefix(keys, name)) is None:
            if time.monotonic() > deadline:
                raise Failure(f"{name}: lookups stay None for {PENDING_S_MAX} s")
            if self.random.random() < 0.005:
                return None
            self.step()
        return hits

    def read_blocks(self, keys: list[bytes], name: str) -> None:
        """Read as the GPU would, and compare."""
        slots, epoch = self.facade.prepare_load(keys, name), self.facade.epoch
        for key, slot in zip(keys, slots, strict=True):
            if bytes(self.memory.view(slot)) != content_of(key):
                raise Failure(f"{name}: wrong bytes for {key.hex()} in slot {slot}")
        self.read += len(keys)
        self.facade.complete_load(keys, name, epoch=epoch)

    def store_blocks(self, keys: list[bytes], name: str) -> None:
        """Write as the GPU would."""
        grant = self.facade.prepare_store(keys, name) if keys else None
        if grant is None:
            return
        for key, slot in zip(grant.keys, grant.slots, strict=True):
            self.memory.view(slot)[:] = content_of(key)
        self.stored += len(grant.keys)
        is_written = self.random.random() > 0.02
        self.facade.complete_store(grant.keys, name, success=is_written, epoch=grant.epoch)

    def step(self) -> None:
        """End a step, as long as a small model's."""
        self.facade.step_end()
        self.facade.take_events()
        self.check_counters()
        time.sleep(STEP_S)

    def check_counters(self) -> None:
        """Compare all counters with what they were: one that falls ends a vLLM server."""
        now = self.facade.statistics().counters()
        for name, before in self.counters.items():
            if now[name] < before:
                raise Failure(f"the counter {name} fell from {before} to {now[name]}")
        self.counters = now

    # --- the faults ---

    def stir(self) -> None:
        """Change what goes wrong, or do some harm once."""
        dice = self.random
        for operation in ("probe", "load", "store", "remove"):
            setattr(self.faulty.faults, operation, self.random_faults())
        if dice.random() < 0.5:
            self.harm_files("fs", 0.1)
            self.harm_files("disk", 0.3)
        self.harm_process()
        if dice.random() < 0.2:
            self.resets += 1
            self.facade.reset()
            self.facade.on_reset_flushed()

    def random_faults(self) -> OperationFaults:
        """Pick what one operation of the memory tier does wrong for a while."""
        dice = self.random
        kind = dice.choice(
            ["none", "none", "slow", "hang", "raise", "some", "lie", "short", "full"]
        )
        return OperationFaults(
            delay_s=dice.uniform(0, 2 * PROMOTE_TIMEOUT_S) if kind == "slow" else 0.0,
            hang=kind == "hang",
            calls_max=dice.randrange(1, 4) if kind == "hang" else None,
            error="on fire" if kind == "raise" else None,
            fail_every=dice.randrange(2, 6) if kind == "some" else 0,
            corrupt_every=dice.randrange(1, 6) if kind == "lie" else 0,
            answers_missing=1 if kind == "short" else 0,
            full=kind == "full",
        )

    def harm_process(self) -> None:
        """Kill the disk tier's process, or stop it until the next time."""
        number = self.random.choice([signal.SIGCONT, signal.SIGSTOP, signal.SIGKILL])
        self.signal_process(signal.SIGCONT)
        self.signal_process(number)

    def signal_process(self, number: signal.Signals) -> None:
        """Send the disk tier's process a signal, unless it is gone just now."""
        child = self.disk._child  # noqa: SLF001 - as above
        assert child is not None
        with suppress(ProcessLookupError):
            os.kill(child.process.pid, number)

    def harm_files(self, tier: str, share: float) -> None:
        """Damage, cut or delete some of a tier's files behind its back."""
        for path in (self.root / tier).rglob("*"):
            if path.name == "config.json" or not path.is_file() or self.random.random() > share:
                continue
            try:
                self.harm(path)
            except FileNotFoundError:
                continue  # the tier was quicker

    def harm(self, path: Path) -> None:
        """Do one of three things to a file."""
        kind = self.random.randrange(3)
        if kind == 0:
            path.unlink()
        elif kind == 1:
            os.truncate(path, self.random.randrange(path.stat().st_size + 1))
        else:
            with path.open("r+b") as file:
                file.seek(self.random.randrange(max(1, path.stat().st_size)))
                file.write(bytes([self.random.randrange(256)]))

    # --- the phases ---

    def run(self, seconds: float) -> None:
        """Do both phases."""
        end = time.monotonic() + seconds
        next_stir = 0.0
        while time.monotonic() < end:
            if time.monotonic() > next_stir:
                self.stir()
                next_stir = time.monotonic() + self.random.uniform(0.1, 1.0)
            self.serve_one()
        self.faulty.faults = FaultScript()
        self.signal_process(signal.SIGCONT)
        for _ in range(20):
            self.serve_one()
        self.come_to_rest()

    def come_to_rest(self) -> None:
        """Wait until nothing is in flight but what hangs for good; then count the slots."""
        deadline = time.monotonic() + REST_S_MAX
        while self.facade.has_pending_work():
            if time.monotonic() > deadline:
                raise Failure(f"work is still pending after {REST_S_MAX} s")
            self.step()
        self.facade.step_end()
        now = self.facade.statistics()
        lost = sum(tier.promotion_slots + tier.cascade_slots for tier in now.tiers)
        primary = now.primary
        if primary.free_slots + primary.ready_slots + primary.quarantined_slots != SLOTS:
            raise Failure(f"slots are missing: {primary}")
        if primary.quarantined_slots > lost or primary.promotion_slots or now.faults:
            raise Failure(f"not at rest: {now}")

    def close(self) -> None:
        """End the runtime. Hung calls of the memory tier end with its loop."""
        if not self.facade.close():
            raise Failure("a tier still runs after close")


def main() -> int:
    """Run once; print the seed and what was done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    print(f"soak: seed {seed}, {arguments.seconds:g} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="kvtier-soak-") as root:
        soak = Soak(seed, Path(root))
        try:
            soak.run(arguments.seconds)
            soak.close()
        except Failure as failure:
            print(f"soak: FAILED with seed {seed}: {failure}", file=sys.stderr)
            return 1
    counts = [to_builtins(tier.counts) for tier in soak.facade.statistics().tiers]
    print(
        f"soak: {soak.requests} requests, {soak.stored} blocks stored, {soak.read} read and right"
    )
    for name, tier in zip(("memory", "fs", "disk"), counts, strict=True):
        faults = {
            key: tier[key]
            for key in (
                "damaged",
                "absent",
                "failed",
                "full",
                "jobs_timed_out",
                "breaker_opened",
                "broke",
            )
        }
        print(f"soak: {name}: {faults}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
