"""The questions of the page "Is it helping?", each with its queries: one definition for all.

The dashboard draws them; ``docs/write_is_it_helping.py`` writes them, and their answers, into the
page. They cover an hour, or a day for slow effects; all engines are added up.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["lines", "stack", "states", "connections", "table"]
"""How a figure is drawn: lines, shares of a whole, states over time, or plain labels."""


class Figure(NamedTuple):
    """One query, as a panel shows it."""

    title: str
    unit: str  #: in Grafana's words
    query: str
    kind: Kind = "lines"


class Question:
    """A question of an operator, and the figures that answer it."""

    def __init__(self, title: str, *figures: Figure) -> None:
        self.title = title
        self.figures = figures


DISK: Final = 'tier="nvme"'
"""The page's example of a tier; the dashboard has its variable there."""

QUESTIONS: Final = (
    Question(
        "How much prefill did it save?",
        Figure(
            "Prefill saved",
            "s",
            """\
sum(increase(kvtier:prefill_saved_seconds_total[1h]))
""",
        ),
        Figure(
            "Share of all prefill that was saved",
            "percentunit",
            """\
  sum(increase(kvtier:prefill_saved_seconds_total[1h]))
/ (
    sum(increase(kvtier:prefill_saved_seconds_total[1h]))
  + sum(increase(kvtier:prefill_seconds_total[1h]))
  )
""",
        ),
    ),
    Question(
        "How long did requests wait for tiers?",
        Figure(
            "Share of requests that waited",
            "percentunit",
            """\
  sum(increase(kvtier:request_wait_seconds_count[1h]))
/ sum(increase(vllm:request_success_total[1h]))
""",
        ),
        Figure(
            "Mean wait",
            "s",
            """\
  sum(increase(kvtier:request_wait_seconds_sum[1h]))
/ sum(increase(kvtier:request_wait_seconds_count[1h]))
""",
        ),
        Figure(
            "99 % waited no longer than",
            "s",
            """\
histogram_quantile(0.99, sum by (le) (rate(kvtier:request_wait_seconds_bucket[1h])))
""",
        ),
    ),
    Question(
        "Where did the prompt tokens come from?",
        Figure(
            "Share of prompt tokens by source",
            "percentunit",
            """\
sum by (source) (
     label_replace(increase(kvtier:loaded_tokens_total[1h]), "source", "$1", "tier", "(.*)")
  or increase(vllm:prompt_tokens_by_source_total{source!="external_kv_transfer"}[1h])
)
/ on () group_left () sum(increase(vllm:prompt_tokens_total[1h]))
""",
            "stack",
        ),
    ),
    Question(
        "Why did requests miss?",
        Figure(
            "Requests by the reason of their first miss",
            "short",
            """\
sum by (reason, tier) (increase(kvtier:misses_total[1h])) > 0
""",
        ),
    ),
    Question(
        "How full is each tier?",
        Figure(
            "Share in use",
            "percentunit",
            """\
max by (tier) (kvtier:tier_used_bytes / kvtier:tier_capacity_bytes)
""",
        ),
    ),
    Question(
        "How fast is each tier?",
        Figure(
            "Half of the loads took no longer than",
            "s",
            """\
histogram_quantile(0.5, sum by (le, tier) (rate(kvtier:tier_load_seconds_bucket[1h])))
""",
        ),
        Figure(
            "99 % of the loads took no longer than",
            "s",
            """\
histogram_quantile(0.99, sum by (le, tier) (rate(kvtier:tier_load_seconds_bucket[1h])))
""",
        ),
        Figure(
            "Speed of one load",
            "Bps",
            """\
  sum by (tier) (rate(kvtier:tier_load_bytes_sum[1h]))
/ sum by (tier) (rate(kvtier:tier_load_seconds_sum[1h]))
""",
        ),
        Figure(
            "Speed of one store",
            "Bps",
            """\
  sum by (tier) (rate(kvtier:tier_store_bytes_sum[1h]))
/ sum by (tier) (rate(kvtier:tier_store_seconds_sum[1h]))
""",
        ),
    ),
    Question(
        "How much is written a day?",
        Figure(
            "Bytes stored in a day",
            "bytes",
            """\
sum by (tier) (increase(vllm:kv_offload_tiering_write_bytes_total[1d]))
""",
        ),
        Figure(
            "Multiple of its capacity written in a day",
            "short",
            """\
  sum by (tier) (
      increase(kvtier:disk_bytes_stored_total[1d])
    + increase(kvtier:disk_bytes_reinserted_total[1d])
    + increase(kvtier:disk_bytes_of_tables_total[1d])
  )
/ sum by (tier) (kvtier:tier_capacity_bytes)
""",
        ),
    ),
    Question(
        "How much of the written data is ever read?",
        Figure(
            "Share of stored blocks that were read, in a day",
            "percentunit",
            """\
  sum by (tier) (increase(kvtier:tier_sampled_reads_total[1d]))
/ sum by (tier) (increase(kvtier:tier_sampled_stores_total[1d]))
""",
        ),
    ),
    Question(
        "How much is loaded for nothing?",
        Figure(
            "Share of loaded blocks evicted unread",
            "percentunit",
            """\
  sum by (tier) (increase(kvtier:tier_loads_wasted_total{tier!="0:primary"}[1h]))
/ sum by (tier) (increase(vllm:kv_offload_tiering_chunk_hits_total[1h]))
""",
        ),
    ),
    Question(
        "Would more DRAM help?",
        Figure(
            "Additional hits of a larger host memory, as a multiple of its hits",
            "short",
            """\
  sum by (times) (increase(kvtier:hits_if_larger_total{tier="0:primary"}[1h]))
/ on () group_left ()
  sum(increase(vllm:kv_offload_tiering_chunk_hits_total{tier="0:primary"}[1h]))
""",
        ),
    ),
    Question(
        "Would a larger disk help?",
        Figure(
            "Additional hits of a larger disk, as a multiple of its hits",
            "short",
            """\
  sum by (tier, times) (increase(kvtier:hits_if_larger_total{tier="nvme"}[1h]))
/ on (tier) group_left ()
  sum by (tier) (increase(vllm:kv_offload_tiering_chunk_hits_total{tier="nvme"}[1h]))
""",
        ),
    ),
    Question(
        "Is a tier sick?",
        Figure(
            "Circuit breakers",
            "short",
            """\
max by (tier, work) (kvtier:tier_breaker_state)
""",
            "states",
        ),
        Figure(
            "Blocks that failed or were damaged",
            "short",
            """\
sum by (tier) (increase(kvtier:tier_failed_total[1h]) + increase(kvtier:tier_damaged_total[1h]))
""",
        ),
    ),
    Question(
        "What was not stored, and why?",
        Figure(
            "Blocks not stored",
            "short",
            """\
sum by (tier, why) (
     label_replace(increase(kvtier:tier_cascades_refused_total[1h]), "why", "not admitted", "", "")
  or label_replace(increase(kvtier:tier_stores_rejected_total[1h]), "why", "no space", "", "")
  or label_replace(increase(kvtier:tier_cascades_dropped_total[1h]), "why", "too late", "", "")
  or label_replace(increase(kvtier:primary_stores_dropped_total[1h]), "why", "no slot", "", "")
)
""",
        ),
    ),
    Question(
        "Are kvtier's decisions right?",
        Figure(
            "Time of loads, divided by the expected time",
            "short",
            """\
  sum by (tier) (increase(kvtier:tier_load_taken_seconds_total[1h]))
/ sum by (tier) (increase(kvtier:tier_load_expected_seconds_total[1h]))
""",
        ),
        Figure(
            "Time of prefill, divided by the expected time",
            "short",
            """\
  sum(increase(kvtier:prefill_seconds_total[1h]))
/ sum(increase(kvtier:prefill_expected_seconds_total[1h]))
""",
        ),
        Figure(
            "Decisions",
            "short",
            """\
sum by (outcome) (increase(kvtier:load_decisions_total[1h]))
""",
        ),
    ),
    Question(
        "Which version and configuration runs where?",
        Figure(
            "Engines",
            "short",
            """\
count by (configuration, tiers, version, vllm) (kvtier:info)
""",
            "table",
        ),
    ),
    Question(
        "What does it cost the scheduler's thread?",
        Figure(
            "Lookups for each request",
            "ms",
            """\
  1000 * sum(increase(vllm:kv_offload_lookup_sync_delay_seconds_sum[1h]))
/ sum(increase(vllm:request_success_total[1h]))
""",
        ),
    ),
)

FIGURES: Final = {figure.title: figure for each in QUESTIONS for figure in each.figures}
"""All of them, by their titles."""
