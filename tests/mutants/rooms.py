"""Which files are mutated, and which tests are near them, the quickest first."""

from __future__ import annotations

from typing import Final

UNIT: Final = "tests/unit"
MODEL: Final = "tests/model/test_mutations.py::test_without_a_mutation_the_same_examples_pass"
LOG: Final = "backends/kvtier_backends/disk/log"
DISK: Final = f"{UNIT}/backends/disk/test_disk"

SLOW: Final = (
    MODEL,
    f"{UNIT}/engine/test_running_prefixes.py",
    f"{UNIT}/engine/test_admission.py",
    f"{DISK}_index.py::TestIndexSpec",
    "tests/vllm/test_interface.py",
    "tests/vllm/test_connector_leases.py",
    "tests/vllm/test_connector_groups.py",
    "tests/vllm/test_observing.py",
)
"""What takes longer than all others together: run last, and left out by `--quick`."""

ENGINE: Final = (
    f"{UNIT}/engine/test_primary_tier.py",
    f"{UNIT}/engine/test_facade.py",
    f"{UNIT}/engine/test_resets.py",
    f"{UNIT}/engine/test_tier_link.py",
    f"{UNIT}/engine/test_tier_link_limits.py",
    f"{UNIT}/engine/test_lookups.py",
    f"{UNIT}/engine/test_promotions.py",
    f"{UNIT}/engine/test_machines.py",
    f"{UNIT}/engine/test_counters.py",
    f"{UNIT}/engine/test_tier_directory.py",
    f"{UNIT}/engine/test_broken_policies.py",
    f"{UNIT}/engine/test_prefix_plan.py",
    f"{UNIT}/engine/test_store_filter.py",
    f"{UNIT}/tier/test_contents.py",
    f"{UNIT}/engine/test_admission.py",
    f"{UNIT}/engine/test_running_prefixes.py",
    f"{MODEL}[KVTierSpec]",
    f"{MODEL}[KVTierCrowdAfterResetSpec]",
)
INDEX: Final = (
    f"{DISK}_index.py",
    f"{DISK}_tables.py",
    f"{DISK}_region_faults.py",
    f"{DISK}_backend.py",
    f"{MODEL}[KVTierOnDiskSpec]",
)
THE_LOG: Final = (
    f"{DISK}_batches.py",
    f"{DISK}_region_faults.py",
    f"{DISK}_calls.py",
    f"{DISK}_backend.py",
    f"{DISK}_encryption.py",
    f"{DISK}_log.py",
    f"{DISK}_bursts.py",
    f"{DISK}_purge.py::test_a_live_engine_forgets_tells_and_never_finds_them_again",
    f"{MODEL}[KVTierOnDiskSpec]",
    f"{MODEL}[KVTierOnDyingDiskSpec]",
)
RECOVERY: Final = (
    f"{DISK}_recovery.py",
    f"{DISK}_odd_folders.py::test_reads_that_fail_for_a_moment_at_the_start_cost_no_block",
    f"{DISK}_region_faults.py",
    f"{DISK}_backend.py",
    f"{DISK}_damage.py",
    f"{MODEL}[KVTierOnDiskSpec]",
)
MANAGER: Final = (
    "tests/vllm/test_manager.py",
    "tests/vllm/test_manager_lookups.py",
    "tests/vllm/test_manager_loads.py",
    "tests/vllm/test_manager_stores.py",
    "tests/vllm/test_token_order.py",
    "tests/vllm/test_interface.py",
    "tests/vllm/test_connector_leases.py",
    "tests/vllm/test_connector_groups.py",
    "tests/vllm/test_observing.py",
)

ROOMS: Final = {
    "kvtier/engine/primary/primary_tier.py": ENGINE,
    "kvtier/engine/primary/lookups.py": ENGINE,
    "kvtier/engine/primary/promotions.py": ENGINE,
    "kvtier/engine/link/tier_link.py": ENGINE,
    "kvtier/engine/primary/slot_table.py": ENGINE,
    f"{LOG}/index.py": INDEX,
    f"{LOG}/index_words.py": INDEX,
    f"{LOG}/block_log.py": THE_LOG,
    f"{LOG}/appender.py": THE_LOG,
    f"{LOG}/reader.py": THE_LOG,
    f"{LOG}/batches.py": THE_LOG,
    "backends/kvtier_backends/disk/folder/recovery.py": RECOVERY,
    "kvtier/vllm/scheduler/manager.py": MANAGER,
}
