"""How much memory there is, and is free: the machine's, or what control groups leave of it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, strategies

from kvtier.plugin_api.machine import free_memory_bytes, machine_memory_bytes
from stress.control_group import memory_group
from tests.support.needs import GROUP_LIMIT_BYTES, needs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MIB = 1 << 20
MEMINFO = "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:    8388608 kB\n"
TOTAL, AVAILABLE = 16 << 30, 8 << 30
HUGE = str((1 << 63) - 4096)  #: what the first version says where there is no limit

V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


def plant(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def v2(folder: str, limit: str, used: int, cached: int) -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 7\ninactive_file {cached}\nactive_file 0\nslab 9\n",
    }


def v1(folder: str, limit: str, used: int, cached: int) -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": (
            f"inactive_file 1\nactive_file 1\ntotal_inactive_file 0\ntotal_active_file {cached}\n"
        ),
    }


CASES = {
    "none": ("0::/\n", {}, TOTAL, AVAILABLE),
    "a container, version 2": (
        "0::/\n",
        v2(V2, "1048576000", 700 * MIB, 100 * MIB),
        1000 * MIB,
        400 * MIB,
    ),
    "a service, version 2": (
        "0::/system.slice/vllm.service\n",
        v2(f"{V2}/system.slice/vllm.service", "1048576000", 700 * MIB, 100 * MIB),
        1000 * MIB,
        400 * MIB,
    ),
    "the group above has less": (
        "0::/pods/a\n",
        v2(f"{V2}/pods/a", "max", 0, 0) | v2(f"{V2}/pods", str(500 * MIB), 450 * MIB, 0),
        500 * MIB,
        50 * MIB,
    ),
    "the smallest limit is not the fullest group": (
        "0::/a/b\n",
        v2(f"{V2}/a/b", str(500 * MIB), 0, 0) | v2(f"{V2}/a", str(600 * MIB), 599 * MIB, 0),
        500 * MIB,
        1 * MIB,
    ),
    "a container of the first version, that sees the host's path": (
        "4:memory:/docker/0123\n3:cpu:/docker/0123\n0::/\n",
        v1(V1, str(1000 * MIB), 700 * MIB, 100 * MIB),
        1000 * MIB,
        400 * MIB,
    ),
    "a group of the first version": (
        "4:memory:/jobs/7\n",
        v1(f"{V1}/jobs/7", str(1000 * MIB), 700 * MIB, 100 * MIB) | v1(V1, HUGE, 9 << 30, 0),
        1000 * MIB,
        400 * MIB,
    ),
    "version 2 beside the first": (
        "1:cpu:/\n0::/a\n",
        v2(f"{V2}/unified/a", str(300 * MIB), 0, 0),
        300 * MIB,
        300 * MIB,
    ),
    "another kernel's files": (
        "0::/\n",
        {f"{V2}/memory.max": str(300 * MIB)},
        300 * MIB,
        300 * MIB,
    ),
    "a limit that is none": ("0::/\n", v2(V2, "-1", 0, 0), TOTAL, AVAILABLE),
    "more is used than allowed": (
        "0::/\n",
        v2(V2, str(300 * MIB), 400 * MIB, 0),
        300 * MIB,
        0,
    ),
}


@pytest.mark.parametrize(("groups", "files", "most", "free"), CASES.values(), ids=CASES)
def test_the_least_of_the_machine_and_all_groups_counts(
    tmp_path: Path, groups: str, files: dict[str, str], most: int, free: int
) -> None:
    plant(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": groups, **files})
    assert machine_memory_bytes(tmp_path) == most
    assert free_memory_bytes(tmp_path) == free


def test_where_nothing_tells_nothing_is_known(tmp_path: Path) -> None:
    assert machine_memory_bytes(tmp_path) is None
    assert free_memory_bytes(tmp_path) is None


texts = (
    strategies.sampled_from(["", "max", "0", "-1", "x", "\n", "0::/../..", "::", "4:memory:"])
    | strategies.text()
)


@given(strategies.lists(texts, min_size=5, max_size=5))
def test_odd_files_raise_nothing(tmp_path_factory: pytest.TempPathFactory, odd: list[str]) -> None:
    root = tmp_path_factory.mktemp("odd")
    names = ["proc/meminfo", "proc/self/cgroup", f"{V2}/memory.max", f"{V2}/memory.current"]
    for name, text in zip([*names, f"{V2}/memory.stat"], odd, strict=True):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    machine_memory_bytes(root)
    free_memory_bytes(root)


IN_A_GROUP = f"""
import os, sys
for folder in sys.argv[1:]:
    with open(os.path.join(folder, "cgroup.procs"), "w") as file:
        file.write(str(os.getpid()))
from kvtier.plugin_api.machine import free_memory_bytes, machine_memory_bytes
taken = b"x" * {128 * MIB}
print(machine_memory_bytes(), free_memory_bytes())
"""


@needs("control group")
def test_a_real_group_s_limit_is_found() -> None:
    with memory_group(GROUP_LIMIT_BYTES) as folder:
        run = subprocess.run(
            [sys.executable, "-c", IN_A_GROUP, str(folder)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    most, free = map(int, run.stdout.split())
    assert most == GROUP_LIMIT_BYTES
    assert 0 < free <= GROUP_LIMIT_BYTES - 128 * MIB


def test_this_machine_has_memory() -> None:
    assert (machine_memory_bytes() or 0) >= (free_memory_bytes() or 0) > 0
