"""Who reads a clock beside the engine's: times of two clocks mean nothing to one another.

An engine's clock is given to it, and need not be the machine's (``kvtier/hosts/machine_time.py``).
Its actors learn the time from messages. A backend is told how long it has, never when that ends.
"""

from __future__ import annotations

import ast

from sources import MODULES, tree_of
from test_rooms import room_of

from tests.rig.stepped_tiers import READ_THE_TIME

CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"}
ROOMS = {"core", "engine", "hosts", "plugin_api", "policies", "runtime", "settings", "tier"}
DURATIONS = "compares times that it has read by itself"
MAY_READ = {
    "kvtier.engine.facade": "the default of the engine's clock; samples of a call's time",
    "kvtier.engine.staged.staged_facade": "the engine's clock, by default; how long it may close",
    "kvtier.runtime": "the default of the engine's clock; how long a start waits",
    "kvtier.hosts.machine_time": "converts what crosses between the engine's clock and the tiers'",
    "kvtier.tier.backend_driver": "when a batch ended, which is converted on its way",
    "kvtier.plugin_api.deadlines": "compares it with a deadline, which was converted on its way",
    "kvtier.plugin_api.run_delays": DURATIONS,
    "kvtier.plugin_api.sizes": "how old a block is, by the storage's clock: shown to people",
    "kvtier.plugin_api.store_turns": DURATIONS,
    "kvtier.core.tier_host": DURATIONS,
    "kvtier.hosts.process_host": DURATIONS,
    "kvtier.hosts.process_main": DURATIONS,
    "kvtier.hosts.restarts": DURATIONS,
    "kvtier.hosts.starting": DURATIONS,
}
CROSSED = {
    "kvtier.hosts.machine_time",
    "kvtier.tier.backend_driver",
    "kvtier.plugin_api.deadlines",
}


WALL_CLOCKS = {"time", "time_ns", "ctime", "gmtime", "localtime", "strftime", "now", "utcnow"}
READ_THE_WALL_CLOCK = {
    "kvtier_backends.posix": "how far a folder's own clock is ahead of it; shown in the log",
    "kvtier_backends.fs.access_times": "whether a time was set a minute ago: wrong, it is set",
    "kvtier_backends.disk.backend": "ages in a folder that one host uses: ttl_s, kvtier ls",
    "kvtier_backends.disk.folder.claim": "when a folder was made, which is shown",
    "kvtier_backends.disk.offline.purge_requests": "until when a request holds, on one host",
    "kvtier_backends.s3.failures": "shown in the log",
}


def readers(rooms: set[str], clocks: set[str]) -> set[str]:
    return {
        module
        for module, path in MODULES.items()
        if room_of(module) in rooms
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        if node.attr in clocks and ast.unparse(node.value) in {"time", "datetime"}
    }


def test_only_these_read_a_clock_beside_the_engines() -> None:
    """A new one says here which times it compares: those of one clock."""
    assert readers(ROOMS, CLOCKS) == set(MAY_READ)


def test_only_these_backends_read_a_clock_that_people_set() -> None:
    """It may be hours from a server's or another host's: nobody's life is told by it."""
    assert readers({"backends"}, WALL_CLOCKS) == set(READ_THE_WALL_CLOCK)


def test_no_clock_is_imported_by_its_name() -> None:
    """The test above would not see it."""
    found = {
        module
        for module, path in MODULES.items()
        if room_of(module) in ROOMS
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.module == "time"
        if CLOCKS & {each.name for each in node.names}
    }
    assert not found


def test_the_rig_gives_its_clock_to_all_that_compare_what_crosses() -> None:
    assert set(READ_THE_TIME) >= CROSSED
