"""Prometheus rules: alerts, each with its remedy, and records of slow queries.

None of the alerts is about a failing request: a failing tier costs hits. ``warning`` is for hits
that are being lost and for broken storage; ``info`` is for a configuration that could be better.
Remedies of faults are those of ``kvtier status`` and ``kvtier doctor``.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, TypeAlias

from kvtier.engine.account.read_share import EVERY
from kvtier.tools.doctor.running import QUERIES_MIN, WASTED_MIN, WASTED_SHARE
from kvtier.tools.monitoring.questions import FIGURES
from kvtier.tools.watching.readings import FAULTS
from kvtier.tools.watching.shown import WORN_A_DAY, sentence

Severity: TypeAlias = Literal["warning", "info"]

CRASHES_MIN: Final = 3
"""Crashes in half an hour that raise an alert: a single one is over after a second or two."""

REJECTED_SHARE: Final = 0.1
"""Share of rejected stores that raises an alert: an evicting tier may be full for moments."""

SAMPLED_MIN: Final = 1_000
"""Fewest sampled stores (of 16,000 blocks) for which the share of those read is judged."""

READ_SHARE: Final = 0.02
"""Below this share, 50 blocks are written for one that is read."""

ABANDONED_SHARE: Final = 0.1
"""Share of slow loads that raises an alert: storage that is briefly busy delays fewer."""

DECISIONS_MIN: Final = 100
COMPUTED_SHARE: Final = 0.5
"""Share of requests, of those whose blocks a tier has, for which computing is faster."""


class Alert(NamedTuple):
    """One alert, for each tier or engine that its query finds."""

    name: str
    about: str  #: the fact, as a clause about ``{tier}``, with ``{value}``
    query: str
    holds: str  #: how long the query must match
    severity: Severity
    remedy: str
    limit: str = ""  #: the threshold, in readable form

    def rule(self) -> dict[str, Any]:
        """Return the alert in Prometheus's format."""
        where = "{{ $labels.instance }}, engine {{ $labels.engine }}"
        about = self.about.format(
            tier="tier {{ $labels.tier }}", value="{{ $value | humanizePercentage }}"
        )
        return {
            "alert": self.name,
            "expr": self.query,
            "for": self.holds,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": f"{where}: {about}.",
                "remedy": sentence(self.remedy),
            },
        }


ALERTS: Final = (
    # Restarts are tried for ever, 10 s apart at most: after five minutes an operator must look.
    Alert(
        "KvtierTierDisabled",
        "{tier} is disabled: its code raised, its process ended, or it can't be opened",
        "max without (work) (kvtier:tier_breaker_state) == 3\n",
        "5m",
        "warning",
        FAULTS["crashes"].remedy,
    ),
    # A breaker that opens for a blip closes within seconds. Half-open counts: a failing tier
    # alternates between open and half-open.
    Alert(
        "KvtierTierBypassed",
        "{tier} fails or hangs, and is bypassed",
        "0 < max without (work) (kvtier:tier_breaker_state) < 3\n",
        "5m",
        "warning",
        FAULTS["breaker_opened"].remedy,
    ),
    Alert(
        "KvtierTierCrashes",
        "{tier} keeps crashing",
        f"increase(kvtier:tier_crashes_total[30m]) >= {CRASHES_MIN}\n",
        "0s",
        "warning",
        FAULTS["crashes"].remedy,
    ),
    # Servers restart and fail over within a few minutes.
    Alert(
        "KvtierServerGone",
        "{tier} cannot reach its server",
        "kvtier:tier_connection_state > 0\n",
        "5m",
        "warning",
        FAULTS["connections_lost"].remedy,
    ),
    # The next five: faults that end by themselves within ten minutes need no operator.
    Alert(
        "KvtierStorageFull",
        "{tier} has no room for {value} of the blocks sent to it",
        f"""\
  increase(kvtier:tier_stores_rejected_total[10m])
/ (
    increase(kvtier:tier_stores_rejected_total[10m])
  + {EVERY} * increase(kvtier:tier_sampled_stores_total[10m])
  )
> {REJECTED_SHARE:g}
""",
        "10m",
        "warning",
        FAULTS["stores_rejected"].remedy,
        f"more than {100 * REJECTED_SHARE:g} %",
    ),
    Alert(
        "KvtierStorageFails",
        "loads or stores of {tier} fail at the storage",
        "increase(kvtier:tier_failed_total[10m]) > 0\n",
        "10m",
        "warning",
        FAULTS["failed"].remedy,
    ),
    Alert(
        "KvtierStorageHangs",
        "loads or stores of {tier} hang",
        "increase(kvtier:tier_jobs_timed_out_total[10m]) > 0\n",
        "10m",
        "warning",
        FAULTS["jobs_timed_out"].remedy,
    ),
    Alert(
        "KvtierTierStalls",
        "{value} of the blocks wanted from {tier} took longer to load than to compute, and "
        "requests went on without them",
        f"""\
  increase(kvtier:tier_loads_abandoned_total[10m])
/ increase(vllm:kv_offload_tiering_chunk_hits_total[10m])
> {ABANDONED_SHARE:g}
""",
        "10m",
        "warning",
        "look at the storage, and at its other users",
        f"more than {100 * ABANDONED_SHARE:g} %",
    ),
    Alert(
        "KvtierMemoryHeld",
        "slots of host memory are held by reads or writes that hang",
        'kvtier:primary_slots{state="quarantined"} > 0\n',
        "10m",
        "warning",
        "kill the tier's process (kvtier-TIER in ps), or restart the engine if it is a thread",
    ),
    # One is enough: storage that returns wrong bytes will do so again.
    Alert(
        "KvtierBlocksDamaged",
        "blocks of {tier} failed their check; none was served",
        "increase(kvtier:tier_damaged_total[1h]) > 0\n",
        "0s",
        "warning",
        FAULTS["damaged"].remedy,
    ),
    Alert(
        "KvtierBlocksUnauthenticated",
        "some blocks of {tier} match none of its keys; none of these was served",
        'increase({__name__=~"kvtier:.+_unauthenticated_total"}[1h]) > 0\n',
        "0s",
        "warning",
        "give all engines the same keys; if they have them, check who can write to the storage",
    ),
    Alert(
        "KvtierDefect",
        "a message handler of kvtier raised an exception, which is a defect",
        "increase(kvtier:faults_total[1h]) > 0\n",
        "0s",
        "warning",
        "report the log",
    ),
    Alert(
        "KvtierRecordsDropped",
        "requests are missing from the record",
        "increase(kvtier:records_dropped_total[1h]) > 0\n",
        "0s",
        "info",
        "check that the record's file can be written, and fast enough",
    ),
    # A day that is not over yet counts less than it will.
    Alert(
        "KvtierDriveWears",
        "{tier} wears its drive out: it writes {value} of its capacity a day",
        f"""\
  (
      increase(kvtier:disk_bytes_stored_total[1d])
    + increase(kvtier:disk_bytes_reinserted_total[1d])
    + increase(kvtier:disk_bytes_of_tables_total[1d])
  )
/ kvtier:tier_capacity_bytes
> {WORN_A_DAY:g}
""",
        "1h",
        "info",
        'set "admission": "second_touch", or make the tier larger',
        f"more than {100 * WORN_A_DAY:g} %",
    ),
    Alert(
        "KvtierStoresForNothing",
        "of the blocks that {tier} stores, {value} are ever read",
        f"""\
increase(kvtier:tier_sampled_reads_total[1d]) / increase(kvtier:tier_sampled_stores_total[1d])
< {READ_SHARE:g}
and increase(kvtier:tier_sampled_stores_total[1d]) > {SAMPLED_MIN}
""",
        "1h",
        "info",
        'make the tier larger, set "admission": "second_touch", or remove the tier',
        f"less than {100 * READ_SHARE:g} %",
    ),
    # All tiers together: a tier whose blocks a faster tier has too is seldom hit, which is no
    # fault.
    Alert(
        "KvtierNeverHits",
        "none of the blocks that were looked up in tiers was found",
        f"""\
  sum without (tier) (
    increase(vllm:kv_offload_tiering_chunk_hits_total{{tier!="0:primary"}}[1d])
  )
== 0
and
  sum without (tier) (
    increase(vllm:kv_offload_tiering_chunk_queries_total{{tier!="0:primary"}}[1d])
  )
> {QUERIES_MIN}
""",
        "1h",
        "info",
        "run kvtier doctor with the configuration: engines must hash alike, and prompts repeat",
    ),
    Alert(
        "KvtierLoadsForNothing",
        "of the blocks loaded from {tier}, {value} were evicted before a request read them",
        f"""\
  increase(kvtier:tier_loads_wasted_total{{tier!="0:primary"}}[1h])
/ increase(vllm:kv_offload_tiering_chunk_hits_total[1h])
> {WASTED_SHARE:g}
and increase(kvtier:tier_loads_wasted_total[1h]) > {WASTED_MIN}
""",
        "1h",
        "info",
        "raise cpu_bytes_to_use",
        f"more than {100 * WASTED_SHARE:g} %",
    ),
    Alert(
        "KvtierSlowerThanPrefill",
        "for {value} of the requests with blocks in tiers, computing is faster than loading",
        f"""\
  sum without (outcome) (increase(kvtier:load_decisions_total{{outcome=~"recompute|cut"}}[1h]))
/ sum without (outcome) (increase(kvtier:load_decisions_total[1h]))
> {COMPUTED_SHARE:g}
and sum without (outcome) (increase(kvtier:load_decisions_total[1h])) > {DECISIONS_MIN}
""",
        "1h",
        "info",
        "use faster storage, or remove the tier; kvtier doctor --probe measures it",
        f"more than {100 * COMPUTED_SHARE:g} %",
    ),
)

RECORDED: Final = {
    "kvtier_prefill_saved:ratio1h": "Share of all prefill that was saved",
    "kvtier_prompt_tokens:ratio1h": "Share of prompt tokens by source",
    "kvtier_requests_waited:ratio1h": "Share of requests that waited",
    "tier:kvtier_capacity_writes:ratio1d": "Multiple of its capacity written in a day",
    "tier:kvtier_stores_read:ratio1d": "Share of stored blocks that were read, in a day",
}
"""Figures of "Is it helping?" to keep for longer than samples: titles by name."""


def rules() -> dict[str, Any]:
    """Return the file of rules, in Prometheus's format."""
    recorded = [{"record": name, "expr": FIGURES[title].query} for name, title in RECORDED.items()]
    return {
        "groups": [
            {"name": "kvtier", "rules": [alert.rule() for alert in ALERTS]},
            # Each reads an hour or a day of every series, so it is evaluated rarely.
            {"name": "kvtier-records", "interval": "5m", "rules": recorded},
        ]
    }
