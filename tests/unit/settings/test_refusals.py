"""Whatever stands behind whatever key: the runtime opens and closes, or names key and value.

And ``kvtier check`` says beforehand which of the two it will be.

The keys are those that the code itself lists when it refuses an unknown one, so a new key is
tried from its first day.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import Namespace
from kvtier.plugin_api.options import shown
from kvtier.plugin_api.slot_memory import SlotMemory, machine_memory_bytes
from kvtier.runtime import open_runtime
from kvtier.settings.extra_config import cpu_bytes_to_use, for_vllm, read_settings
from kvtier.tools.checking.configuration import check
from tests.support.examples import examples

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

COMMON = [
    *("type", "locality", "enable_kv_events", "offload_policy", "eviction_policy"),
    *("admission", "probe_timeout_s", "promote_timeout_s", "store_timeout_s"),
]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some values are relative paths, and some of them can be made."""
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))


SPEC = {
    "spec_name": "KVTierOffloadingSpec",
    "spec_module_path": "kvtier.vllm",
    "cpu_bytes_to_use": 1 << 20,
}
SEEN_BY_VLLM = set(SPEC)
"""Of these vLLM or the region takes less than the runtime does."""
SLOTS = 8
BLOCK_BYTES = 4096
TIER_BYTES = 1 << 20

NASTY: list[Any] = [
    *(None, True, 0, -1, 1, 64.0, 0.5, 1e18, 5e-324),
    *(float("nan"), float("inf"), -float("inf")),
    *((1 << 63) - 1, 10**400, 10**5000),
    *("", " ", "0", "8MiB", "7d", "500ms", "1e3", "\u0663GiB", "-1GiB", "999999999999TB"),
    *("a\0b", "/\ud800", "~nobody-of-that-name/kv", "$KVTIER_NOT_SET/kv", "a/b/\0"),
    *("/" + "x" * 5000, "/" + "x/" * 5000, "/dev/null", "{dp_rank}"),
    *([], [None], [{}], {}, {1: 2}, {"policy": None}, {"policy": "all", "threshold": 0.5}),
    {"policy": "second_touch", "remembered_blocks_max": 1 << 62},
    {"load": {"delay_s": float("nan")}},
]
values = (
    strategies.sampled_from(NASTY)
    | strategies.integers()
    | strategies.floats()
    | strategies.text(max_size=20)
)


def known_keys(config: dict[str, Any], tmp_path: Path) -> list[str]:
    """Return the keys that the refusal of an unknown one lists."""
    with pytest.raises(ConfigError, match="Known keys") as refused:
        open_and_close(config, tmp_path)
    return str(refused.value).partition("Known keys: ")[2].rstrip(".").split(", ")


def sound_tier(kind: str, tmp_path: Path) -> dict[str, Any]:
    """Return an entry of ``secondary_tiers`` that works, in a thread: a process takes a second."""
    folder = str(tmp_path / kind)
    needed = {
        "memory": {"capacity_bytes": TIER_BYTES},
        "fs": {"root_dir": folder, "direct": False},
        "disk": {"path": folder, "capacity_bytes": TIER_BYTES, "direct": False},
    }
    return {"type": kind, "isolation": "thread", **needed[kind]}


def open_and_close(config: dict[str, Any], tmp_path: Path) -> None:
    """Do what a start does with a configuration: all of it, without an engine."""
    cpu_bytes_to_use({"cpu_bytes_to_use": 1, **config})
    assert None not in for_vllm(config).values()
    read = read_settings(config, slot_count=SLOTS, block_bytes=BLOCK_BYTES)
    with mmap.mmap(-1, SLOTS * BLOCK_BYTES) as region:
        memory = SlotMemory(memoryview(region), SLOTS, BLOCK_BYTES)
        try:
            namespace = Namespace(facts={"model": "m"}, vllm_fields={"model_name": "m"})
            facade = open_runtime(read, memory, namespace)
            assert facade.close()
        finally:
            memory.release()
    assert tmp_path.is_dir()


def leaves(value: object) -> Iterator[object]:
    """Return the keys and the values of a mapping, and of those in it."""
    if isinstance(value, dict):
        for key, held in value.items():
            yield key
            yield from leaves(held)
    else:
        yield value


def names(refusal: str, key: str, value: object) -> bool:
    """Tell whether a refusal has the key and the value, or what a mapping holds of them."""
    if isinstance(value, dict):
        has_it = any(shown(each) in refusal for each in [value, *leaves(value)])
        return key in refusal and (has_it or "is missing" in refusal)
    if isinstance(value, list):
        return key in refusal
    # Of a missing key there is no value; a text of a tier has its place-holders replaced.
    return key in refusal and (
        value is None or shown(value) in refusal or str(value).replace("{dp_rank}", "0") in refusal
    )


def check_one(config: dict[str, Any], key: str, value: object, tmp_path: Path) -> None:
    looked = check({**SPEC, **config}, block_bytes=BLOCK_BYTES).findings
    refusal = ""
    try:
        open_and_close(config, tmp_path)
    except ConfigError as error:
        refusal = str(error)
    if key not in SEEN_BY_VLLM:
        assert bool(looked.refused) is bool(refusal), f"{refusal} check: {looked.refused}"
    if not refusal:
        return
    assert names(refusal, key, value), f"{key}={shown(value)}: {refusal}"
    assert len(refusal) < 3000
    refusal.encode()  # it goes into a log


SETTINGS = settings(
    max_examples=examples(20),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@SETTINGS
@given(data=strategies.data())
def test_every_key_of_the_runtime_takes_any_value_or_names_it(
    data: strategies.DataObject, tmp_path: Path
) -> None:
    keys = known_keys({"no such key": 1}, tmp_path)
    key = data.draw(strategies.sampled_from(keys) | strategies.text(max_size=8))
    value = data.draw(values)
    check_one({key: value}, shown(key)[1:-1], value, tmp_path)


@pytest.mark.parametrize("kind", ["memory", "fs", "disk"])
@SETTINGS
@given(data=strategies.data())
def test_every_key_of_a_tier_takes_any_value_or_names_it(
    kind: str, data: strategies.DataObject, tmp_path: Path
) -> None:
    sound = sound_tier(kind, tmp_path)
    own = known_keys({"secondary_tiers": [{**sound, "no such key": 1}]}, tmp_path)
    key = data.draw(strategies.sampled_from([*own, *COMMON]))
    value = data.draw(values)
    if key == "capacity_bytes" and isinstance(value, int | float):
        assume(not 1 << 26 < value < 1 << 50)  # these are allocated, or could be
    check_one({"secondary_tiers": [{**sound, key: value}]}, key, value, tmp_path)


def test_the_sound_tiers_are_taken(tmp_path: Path) -> None:
    """Otherwise the refusals would prove nothing."""
    tiers = [sound_tier(kind, tmp_path) for kind in ("memory", "fs", "disk")]
    open_and_close({"secondary_tiers": tiers}, tmp_path)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"close_timeout_s": 1e18}, ("close_timeout_s=1e+18", "at most 1e+06")),
        ({"close_timeout_s": 10**5000}, ("close_timeout_s=<int too large", "at most 1e+06")),
        ({"breaker_pause_s": 61}, ("breaker_pause_s=61", "breaker_pause_s_max=60", "Lower")),
        ({"eviction_policy": "l\0u"}, ("eviction_policy='l\\x00u'", "null byte")),
        ({"eviction_policy": "\ud800"}, ("eviction_policy='\\ud800'", "half a character")),
        ({1: 2}, ("unknown key 1", "value 2")),
        ({"cpu_bytes_to_use": "8 gigs"}, ("cpu_bytes_to_use='8 gigs'", '"8GiB"')),
        ({"cpu_bytes_to_use": float("nan")}, ("cpu_bytes_to_use=nan", "whole number of bytes")),
        ({"block_size": 64, "blocks_per_chunk": 2}, ("block_size=64", "Remove one")),
    ],
)
def test_a_bad_value_of_the_runtime_is_named_with_the_remedy(
    config: dict[Any, Any], parts: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        open_and_close(config, tmp_path)
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("tier", "parts"),
    [
        ({"type": "fs", "root_dir": "/k\0v"}, ("root_dir='/k\\x00v'", "null byte")),
        ({"type": "fs", "root_dir": "/\ud800"}, ("root_dir='/\\ud800'", "half a character")),
        ({"type": "fs", "root_dir": "$NO_SUCH/kv"}, ("'$NO_SUCH/kv'", "NO_SUCH, which is not set")),
        ({"type": "fs", "root_dir": "~nobody-here/kv"}, ("'~nobody-here/kv'", "home folder")),
        ({"type": "disk", "path": "/k\0v", "capacity_bytes": 1 << 20}, ("path='/k\\x00v'", "null")),
        ({"type": "disk", "path": "/kv", "capacity_bytes": "8G"}, ("'8G'", "cannot")),
        ({"type": "memory", "capacity_bytes": 1 << 60}, (f"{1 << 60}", "memory that there are")),
        (
            {"type": "memory", "admission": {"policy": "all", "treshold": 0.5}},
            ("admission", "'treshold'", "0.5"),
        ),
        ({"type": "kvcr"}, ("'kvcr'", "vLLM", "not there yet")),
        ({"type": "obj"}, ("'obj'", "vLLM", '{"type": "vllm", "tier": {"type": "obj"')),
    ],
)
def test_a_bad_value_of_a_tier_is_named_with_the_remedy(
    tier: dict[str, Any], parts: tuple[str, ...], tmp_path: Path
) -> None:
    if tier.get("capacity_bytes") == "8G":
        (tmp_path / "kv").touch()
        tier = {**tier, "path": str(tmp_path / "kv")}
        parts = (str(tmp_path / "kv"), "Name a folder")
    with pytest.raises(ConfigError) as refused:
        open_and_close({"secondary_tiers": [tier]}, tmp_path)
    for part in parts:
        assert part in str(refused.value)


def test_home_and_variables_stand_for_what_a_shell_makes_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KV_TIER", "tier")
    for number, root in enumerate(("~/{0}", "$HOME/{0}", "${{HOME}}/$KV_TIER/{0}")):
        tier = {"type": "fs", "root_dir": root.format(f"kv-{number}"), "direct": False}
        open_and_close({"secondary_tiers": [tier]}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv-0", "kv-1", "tier"]
    assert [path.name for path in (tmp_path / "tier").iterdir()] == ["kv-2"]


def test_null_means_not_given_for_every_key(tmp_path: Path) -> None:
    keys = known_keys({"no such key": 1}, tmp_path)
    config: dict[str, Any] = dict.fromkeys(keys)
    assert read_settings(config, slot_count=8, block_bytes=1) == read_settings(
        {}, slot_count=8, block_bytes=1
    )
    # vLLM takes null for false, for 0, or breaks on it.
    assert for_vllm({**config, "cpu_bytes_to_use": 5}) == {"cpu_bytes_to_use": 5}


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (8 << 30, 8 << 30),
        (float(8 << 30), 8 << 30),
        (0.1 * (1 << 30), 107_374_182),  # what vLLM makes of --kv-offloading-size 0.1
        ("8GiB", 8 << 30),
        ("1.5GB", 1_500_000_000),
        ("200 MB", 200_000_000),
    ],
)
def test_sizes_may_be_whole_floats_and_texts_with_a_unit(written: object, size: int) -> None:
    config = {"cpu_bytes_to_use": written, "sync_load_budget_bytes": 4096.0}
    assert cpu_bytes_to_use(config) == size
    assert for_vllm(config) == {"cpu_bytes_to_use": size, "sync_load_budget_bytes": 4096}
    assert all(type(value) is int for value in for_vllm(config).values())


def test_a_size_of_a_tier_may_be_written_like_one_of_a_command(tmp_path: Path) -> None:
    for written in ("1MiB", float(1 << 20), 1 << 20):
        tier = {**sound_tier("disk", tmp_path), "capacity_bytes": written}
        open_and_close({"secondary_tiers": [tier]}, tmp_path)
    with pytest.raises(ConfigError, match=r"capacity_bytes=1048576\.5 must be a whole number"):
        open_and_close({"secondary_tiers": [{**tier, "capacity_bytes": 1048576.5}]}, tmp_path)


def test_a_memory_tier_may_have_what_there_is() -> None:
    assert (machine_memory_bytes() or 0) > 1 << 28
