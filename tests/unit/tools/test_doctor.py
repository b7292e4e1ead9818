"""``kvtier doctor`` finds each seeded fault, with its remedy, and nothing on sound machines.

A fault is real wherever this machine can have it. What it can't have is the text of a real
machine's ``proc`` and ``sys``, and of a real engine's metrics.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import tempfile
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from kvtier.core import metrics
from kvtier.engine.link.circuit_breaker import BreakerState
from kvtier.plugin_api.backend import BackendContext, Connection, Namespace
from kvtier.settings.plugins import backend_class
from kvtier.settings.runtime_config import TierConfig
from kvtier.settings.vllm_releases import Installed
from kvtier.tools.checking.findings import Findings
from kvtier.tools.checking.rules import RULES, TRIAL_FAILED, Severity
from kvtier.tools.cli import doctor as command
from kvtier.tools.doctor import examination, probe
from kvtier.tools.doctor.servers import look_at_servers
from kvtier.tools.doctor.subject import Machine
from kvtier.tools.watching.readings import OF_PRIMARY, OF_SOURCE, VLLMS_HITS
from kvtier_backends.disk.metrics import METRICS as OF_DISK
from kvtier_backends.shared.metrics import RECORDS
from tests.support.needs import needs
from tests.support.patience import PATIENCE_S, until_true
from tests.support.redis_servers import running as running_redis
from tests.support.s3_server import moto_server, options_for, set_credentials
from tests.unit.backends._media import mount, unmount
from tests.unit.backends.disk._disk import holding, open_disk
from tests.unit.backends.fs._fs import CONTEXT, open_fs
from tests.unit.tools._patient import BLOCK_BYTES, ON_EXT4, Page, Patient, served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.redis_servers import RedisServer
    from tests.unit.tools._shell import Shell

    Spoil = Callable[[Patient], None]

DOCS = Path(__file__).resolve().parents[3] / "docs"
GIB = 1 << 30


class Fault(NamedTuple):
    """One seeded fault: how it is made, the rule that finds it, and words of its remedy."""

    spoil: Spoil
    rule: str
    remedy: str
    marks: tuple[pytest.MarkDecorator, ...] = ()


FAULTS: list[Fault] = []


def fault(rule: str, remedy: str, *marks: pytest.MarkDecorator) -> Callable[[Spoil], Spoil]:
    def register(spoil: Spoil) -> Spoil:
        FAULTS.append(Fault(spoil, rule, remedy, marks))
        return spoil

    return register


# --- the configuration ---


@fault("refused", "Did you mean 'io_depth'?")
def a_misspelt_key(patient: Patient) -> None:
    patient.tiers = [patient.disk(io_dept=4)]


@fault("relative-path", "Write the full path")
def a_path_without_a_root(patient: Patient) -> None:
    patient.tiers = [patient.disk(path="kv")]


@fault("unreachable-address", "an address of this host that they reach")
def an_address_that_is_none(patient: Patient) -> None:
    patient.tiers = [{"type": "mooncake", "master": "10.0.0.1:1", "local_hostname": "0.0.0.0"}]


@fault("nameless-weights", "weights_version")
def streamed_weights(patient: Patient) -> None:
    patient.arguments |= {"model": "s3://bucket/model", "load_format": "runai_streamer"}


@fault("primary-below-gpu-cache", "Raise cpu_bytes_to_use")
def host_memory_below_the_cache_of_two_gpus(patient: Patient) -> None:
    patient.arguments |= {"kv_cache_memory_bytes": "3MiB", "tensor_parallel_size": 2}


@fault("primary-below-gpu-cache", "Raise cpu_bytes_to_use")
def host_memory_below_what_a_running_engine_has(patient: Patient) -> None:
    patient.pages = [Page.sound(num_gpu_blocks="65")]


@fault("primary-below-prompt", "8.1 MiB or more")
def host_memory_below_a_prompt(patient: Patient) -> None:
    patient.arguments["max_model_len"] = 64 * 16 + 1


def with_model(patient: Patient, folder: Path, model: str, tokens: int) -> None:
    """Have the longest prompt said by a model's config alone."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": tokens}))
    (folder / "model.safetensors").touch()
    del patient.arguments["max_model_len"]
    patient.arguments["model"] = model


@fault("primary-below-prompt", "8.1 MiB or more")
def host_memory_below_a_prompt_of_the_model(patient: Patient) -> None:
    with_model(patient, patient.folder / "m", str(patient.folder / "m"), 64 * 16 + 1)


@fault("primary-below-prompt", "8.1 MiB or more")
def host_memory_below_a_prompt_of_a_model_of_the_hub(patient: Patient) -> None:
    cached = patient.folder / "hf/hub/models--org--m"
    with_model(patient, cached / "snapshots/abc123", "org/m", 64 * 16 + 1)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc123")
    patient.environment["HF_HOME"] = str(patient.folder / "hf")


@fault("cascades-below-prompt", "cascade_slots_fraction_max up to 1")
def cascades_below_a_prompt(patient: Patient) -> None:
    patient.extra["cascade_slots_fraction_max"] = 0.2


@fault("prefix-caching-off", "Remove --no-enable-prefix-caching")
def no_prefix_caching(patient: Patient) -> None:
    patient.arguments["no_enable_prefix_caching"] = True


@fault("hash-seed-random", "Set PYTHONHASHSEED")
def a_hash_with_a_seed(patient: Patient) -> None:
    patient.arguments["prefix_caching_hash_algo"] = "xxhash_cbor"


@fault("admits-nothing", "Raise remembered_blocks_max")
def an_admission_that_forgets_a_prompt_before_its_end(patient: Patient) -> None:
    admission = {"policy": "second_touch", "remembered_blocks_max": 15}
    patient.tiers = [patient.disk(admission=admission)]


def with_events(patient: Patient, **config: object) -> None:
    patient.extra["self_describing_kv_events"] = True
    patient.tiers = [patient.disk(enable_kv_events=True)]
    patient.arguments["kv_events_config"] = json.dumps({"enable_kv_cache_events": True, **config})


@fault("events-unreadable", '"publisher" to "zmq"')
def events_that_nothing_publishes(patient: Patient) -> None:
    with_events(patient, publisher="null")


@fault("events-unreadable", '"endpoint" to "tcp://*:5557"')
def events_for_this_host_alone(patient: Patient) -> None:
    with_events(patient, endpoint="tcp://127.0.0.1:5557")


@fault("events-unreadable", '"self_describing_kv_events" to true')
def events_that_do_not_describe_their_blocks(patient: Patient) -> None:
    with_events(patient)
    del patient.extra["self_describing_kv_events"]


# --- the machine ---


@fault("refused", "Lower it")
def a_container_with_less_memory(patient: Patient) -> None:
    patient.write("proc/self/cgroup", "0::/kubepods/pod1\n")
    patient.write("sys/fs/cgroup/kubepods/pod1/memory.max", f"{63 * BLOCK_BYTES}\n")


@fault("refused", "Lower it")
def a_container_of_old_control_groups_with_less_memory(patient: Patient) -> None:
    patient.write("proc/self/cgroup", "4:memory:/docker/1\n1:cpu:/\n0::/\n")
    patient.write("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{63 * BLOCK_BYTES}\n")


@fault("refused", "docker run --shm-size")
def shared_memory_that_is_too_small(patient: Patient) -> None:
    patient.memory(1 << 60)
    patient.extra["cpu_bytes_to_use"] = 1 << 59


@fault("refused", "Lower it")
def engines_that_fit_only_one_by_one(patient: Patient) -> None:
    patient.memory(200 * BLOCK_BYTES)
    patient.arguments["data_parallel_size"] = 4


@fault("memory-in-use", "end what uses the memory")
def memory_that_others_use(patient: Patient) -> None:
    patient.memory(1 << 40, 63 * BLOCK_BYTES)


@fault("vllm-untested", "Install one of these")
def a_release_of_vllm_that_is_not_tested(patient: Patient) -> None:
    patient.vllm = Installed("vllm", "0.99.1")


# --- folders ---


@fault("folder-in-memory", "Name a folder on a disk")
def a_folder_in_shared_memory(patient: Patient) -> None:
    folder = patient.stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
    patient.write("proc/self/mountinfo", Path("/proc/self/mountinfo").read_text())
    patient.tiers = [patient.disk(path=f"{folder}/kv")]


@fault("folder-in-container", "Mount a volume there")
def a_folder_in_a_containers_own_layer(patient: Patient) -> None:
    options = "lowerdir=/var/lib/l/A,upperdir=/var/lib/u/diff,workdir=/var/lib/u/work"
    line = f"612 511 0:75 / / rw,relatime master:209 - overlay overlay rw,{options}\n"
    patient.write("proc/self/mountinfo", line)


@fault("disk-on-network", 'a tier of type "fs"')
def a_disk_tier_on_nfs(patient: Patient) -> None:
    place = patient.folder / "over there"
    place.mkdir()
    patient.mount("nfs4", str(place), "10.0.0.5:/export")
    patient.tiers = [patient.disk(path=f"{place}/kv")]


@fault("no-o-direct", '"direct" to false', needs("mount"))
def a_filesystem_without_o_direct(patient: Patient) -> None:
    place = patient.folder / "ram"
    place.mkdir()
    mount("-t", "ramfs", "ramfs", place)
    patient.stack.callback(unmount, place)
    patient.tiers = [patient.disk(path=f"{place}/kv")]


@fault("capacity-above-filesystem", "Lower it")
def a_capacity_above_the_filesystem(patient: Patient) -> None:
    patient.tiers = [patient.fs(capacity_bytes=1 << 62)]


@fault("capacity-above-free", "lower capacity_bytes")
def a_capacity_above_what_is_free(patient: Patient) -> None:
    usage = os.statvfs(patient.folder)
    within = usage.f_blocks - (usage.f_blocks - usage.f_bavail) // 2
    patient.tiers = [patient.disk(capacity_bytes=within * usage.f_frsize)]


@fault("not-mounted", "mount it first")
def a_disk_that_is_not_mounted(patient: Patient) -> None:
    patient.made(0o700)


@fault("folder-of-another-user", "Run the doctor as the engine's user", needs("root"))
def a_folder_of_another_user(patient: Patient) -> None:
    os.chown(patient.made(0o700), 12345, 12345)


@fault("open-to-planting", "chmod o-w")
def a_folder_that_anyone_may_write_to(patient: Patient) -> None:
    patient.made(0o777)
    patient.tiers = [patient.disk(allow_world_writable=True)]


@fault("listed-by-all", "chmod o-rwx")
def a_folder_that_anyone_may_list(patient: Patient) -> None:
    patient.made(0o755)


@fault("refused", "Stop that first, or name another folder")
def a_folder_that_another_engine_has(patient: Patient) -> None:
    patient.stack.enter_context(holding(patient.folder / "kv"))


@fault("unusable-now", "An engine starts without this tier")
def a_folder_that_another_engine_has_for_a_time(patient: Patient) -> None:
    patient.stack.enter_context(holding(patient.folder / "kv"))
    patient.tiers = [patient.disk(on_unusable="skip")]


@fault("namespaces-apart", "kvtier ls shows all that differs")
def engines_of_one_model_that_share_a_folder_and_nothing_in_it(patient: Patient) -> None:
    async def leave(dtype: str) -> None:
        facts = {"model_name": "org/m", "dtype": dtype}
        async with open_fs(patient.folder / "kv", BackendContext(4096, Namespace(facts), "1:fs")):
            pass

    for dtype in ("bf16", "fp8"):
        asyncio.run(leave(dtype))
    patient.tiers = [patient.fs()]


@fault("other-formats", "kvtier purge removes those")
def blocks_that_another_version_has_left_in_a_shared_folder(patient: Patient) -> None:
    a_folder_that_an_engine_shares(patient)
    (description,) = (patient.folder / "kv").glob("*/config.json")
    found = json.loads(description.read_text())
    description.write_text(json.dumps({**found, "format_version": 2}))


@fault("other-formats", '"layout" to "vllm"')
def the_folder_of_vllms_own_tier(patient: Patient) -> None:
    a_folder_that_an_engine_shares(patient)
    (patient.folder / "kv/org_m_0123456789ab").mkdir()
    (patient.folder / "kv/org_m_0123456789ab/config.json").write_text('{"model_name": "org/m"}')


@fault("other-formats", "go back to that version")
def the_folder_of_kvtiers_tier_where_vllms_is_named(patient: Patient) -> None:
    a_folder_that_an_engine_shares(patient)
    patient.tiers[0]["layout"] = "vllm"


# --- servers ---


def serving(patient: Patient, *settings: str) -> RedisServer:
    server = patient.stack.enter_context(running_redis("valkey", patient.folder / "srv", *settings))
    patient.tiers = [{"type": "redis", "url": server.url, "connect_timeout_s": PATIENCE_S}]
    return server


def bucket(patient: Patient) -> None:
    """Have an S3 tier, in a part of a bucket that is this patient's own."""
    patient.tiers = [{"type": "s3", **options_for(patient.s3_endpoint(), patient.folder.name)}]


def leave_namespaces(patient: Patient, *namespaces: dict[str, object]) -> None:
    """Have an engine of each describe itself on the server, by the tier's own code."""
    (tier,) = patient.tiers

    async def leave(facts: dict[str, object]) -> None:
        options = {key: value for key, value in tier.items() if key != "type"}
        context = BackendContext(BLOCK_BYTES, Namespace(facts), f"1:{tier['type']}")
        backend = backend_class(tier["type"]).from_options(options, context)
        states: list[Connection] = []
        backend.on_connection = states.append
        await backend.open()
        await until_true(lambda: states[-1:] == [Connection.UP], lambda: states)
        await backend.close()

    for facts in namespaces:
        asyncio.run(leave(facts))


BF16, FP8 = ({"model_name": "org/m", "dtype": dtype} for dtype in ("bf16", "fp8"))
OTHER_MODEL = {"model_name": "org/other", "dtype": "fp8"}


@fault("namespaces-apart", "kvtier ls shows all that differs")
def engines_of_one_model_that_share_a_server_and_nothing_there(patient: Patient) -> None:
    serving(patient)
    leave_namespaces(patient, BF16, FP8)


@fault("namespaces-apart", "kvtier ls shows all that differs")
def engines_of_one_model_that_share_a_bucket_and_nothing_there(patient: Patient) -> None:
    bucket(patient)
    leave_namespaces(patient, BF16, FP8)


@fault("trial-failed", "Start the server")
def a_server_that_is_not_there(patient: Patient) -> None:
    serving(patient).kill()


@fault("trial-failed", "let this host reach it")
def a_server_that_wants_a_password(patient: Patient) -> None:
    serving(patient, "--requirepass", "secret")


@fault("trial-failed", "Start the server")
def a_bucket_that_is_not_there(patient: Patient) -> None:
    bucket(patient)
    patient.tiers[0]["url"] = "s3://no-such-bucket/kv"


# --- running engines ---


def running(patient: Patient) -> Page:
    patient.pages = [Page.sound()]
    return patient.pages[0]


@fault("no-engine", "start it")
def an_address_without_a_server(patient: Patient) -> None:
    with served(Page.sound()) as url:
        patient.urls = [url]  # nobody listens any more


@fault("no-engine", "start it")
def a_server_without_kvtier(patient: Patient) -> None:
    patient.pages = [Page()]
    patient.pages[0].set("vllm:num_requests_running", 3)


@fault("tier-not-in-use", "Look at the engine's log")
def a_tier_whose_breaker_is_open(patient: Patient) -> None:
    running(patient).set(metrics.BREAKER.name, BreakerState.OPEN, tier="nvme", work="loads")


@fault("tier-faults", "Look at the log")
def a_tier_that_has_crashed(patient: Patient) -> None:
    running(patient).tier("crashes", 1)


@fault("never-hit", "evicted before it is read")
def a_tier_that_is_never_hit(patient: Patient) -> None:
    page = running(patient)
    page.count(VLLMS_HITS, 0, tier="nvme")
    page.count(metrics.MISSES.name, 7, tier="nvme", reason="evicted")


@fault("evicted-unread", "Raise cpu_bytes_to_use")
def loads_that_are_evicted_before_they_are_read(patient: Patient) -> None:
    running(patient).count(OF_SOURCE["wasted_blocks"], 3_000, tier="nvme")


@fault("too-small", "Raise capacity_bytes")
def a_tier_that_is_too_small(patient: Patient) -> None:
    running(patient).count(OF_SOURCE["hits_if_twice"], 3_000, tier="nvme", times="2")


@fault("stores-dropped", "cascade_slots_fraction_max up to 1")
def blocks_that_left_before_their_tier_had_room(patient: Patient) -> None:
    running(patient).tier("cascades_dropped", 5)


@fault("stores-dropped", "lower cascade_slots_fraction_max")
def blocks_without_a_slot(patient: Patient) -> None:
    running(patient).count(OF_PRIMARY["stores_dropped"], 5)


@fault("stores-dropped", "Remove admission")
def an_admission_that_has_refused_all(patient: Patient) -> None:
    running(patient).tier("cascades_refused", 5)


@fault("other-formats", "Go back to that version")
def blocks_of_another_format(patient: Patient) -> None:
    page = running(patient)
    for series in metrics.backend_series("disk", OF_DISK, "nvme"):
        if series.attribute == "region_other_version":
            page.count(series.metric, 2, tier="nvme", case=series.label[-1])


@fault("unauthenticated", "the same keys")
def blocks_that_no_key_authenticates(patient: Patient) -> None:
    page = running(patient)
    for series in metrics.backend_series("fs", RECORDS, "nvme"):
        page.count(series.metric, 4, tier="nvme")


@fault("slower-than-prefill", "faster storage")
def a_tier_that_is_slower_than_prefill(patient: Patient) -> None:
    page = running(patient)
    page.set(metrics.BYTES_PER_SECOND.name, 9_000 * 4096, tier="nvme", work="loads")


@fault("engines-apart", "the same settings")
def engines_with_one_tier_and_other_hashes(patient: Patient) -> None:
    algorithms = ("sha256", "sha256_cbor")
    patient.pages = [Page.sound(prefix_caching_hash_algo=each) for each in algorithms]


@fault("engines-apart", "Set PYTHONHASHSEED")
def engines_with_one_tier_and_a_seed_each(patient: Patient) -> None:
    patient.pages = [Page.sound(prefix_caching_hash_algo="xxhash") for _ in range(2)]


@fault("prefix-caching-off", "without --no-enable-prefix-caching")
def a_running_engine_without_prefix_caching(patient: Patient) -> None:
    patient.pages = [Page.sound(enable_prefix_caching="False")]


@fault("vllm-untested", "Install one of these")
def a_running_engine_of_a_release_that_is_not_tested(patient: Patient) -> None:
    patient.pages = [Page.sound(vllm="0.99.0")]


# --- what is sound ---


def a_disk(_: Patient) -> None:
    pass


def a_model_whose_prompts_fit(patient: Patient) -> None:
    with_model(patient, patient.folder / "m", str(patient.folder / "m"), 16 * 16)


def a_model_that_does_not_say_its_length(patient: Patient) -> None:
    with_model(patient, patient.folder / "m", str(patient.folder / "m"), 0)


def a_shared_folder_that_is_bounded(patient: Patient) -> None:
    patient.mount("nfs4", str(patient.folder), "10.0.0.5:/export")
    patient.tiers = [patient.fs(capacity_bytes="64MiB", eviction_policy="lru")]
    patient.environment["PYTHONHASHSEED"] = "0"
    patient.arguments["prefix_caching_hash_algo"] = "xxhash"


def a_folder_that_an_engine_has_filled(patient: Patient) -> None:
    async def fill() -> None:
        async with open_disk(patient.folder / "kv") as disk:
            await disk.store(1)
            await disk.come_to_rest()

    asyncio.run(fill())


def a_folder_that_an_engine_shares(patient: Patient) -> None:
    async def leave() -> None:
        async with open_fs(patient.folder / "kv", CONTEXT) as fs:
            await fs.store(1)

    asyncio.run(leave())
    patient.tiers = [patient.fs()]


def a_server_and_a_policy(patient: Patient) -> None:
    serving(patient)
    leave_namespaces(patient, BF16, OTHER_MODEL)
    patient.tiers[0]["admission"] = {"policy": "second_touch"}
    with_them = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557"}
    patient.extra["self_describing_kv_events"] = True
    patient.tiers[0]["enable_kv_events"] = True
    patient.arguments["kv_events_config"] = json.dumps(with_them)


def a_server_whose_user_may_not_list(patient: Patient) -> None:
    serving(patient).ask("ACL", "SETUSER", "default", "-scan")


def a_bucket_of_two_models(patient: Patient) -> None:
    bucket(patient)
    leave_namespaces(patient, BF16, OTHER_MODEL)


def two_engines_that_run(patient: Patient) -> None:
    patient.memory(1 << 40, 0)  # they have it
    patient.pages = [Page.sound(), Page.sound()]


SOUND = (
    a_disk,
    a_model_whose_prompts_fit,
    a_model_that_does_not_say_its_length,
    a_shared_folder_that_is_bounded,
    a_folder_that_an_engine_has_filled,
    a_folder_that_an_engine_shares,
    a_server_and_a_policy,
    a_server_whose_user_may_not_list,
    a_bucket_of_two_models,
    two_engines_that_run,
)


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[Callable[[], str]]:
    """Return what starts a server for all patients, when one of them asks for it."""
    with ExitStack() as running:
        yield cache(lambda: running.enter_context(moto_server()).endpoint)


@pytest.fixture
def patient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_endpoint: Callable[[], str]
) -> Iterator[Patient]:
    monkeypatch.setattr(examination, "WAIT_S", PATIENCE_S)
    monkeypatch.chdir(tmp_path)
    set_credentials()
    with ExitStack() as stack:
        yield Patient(tmp_path, stack, s3_endpoint)


@pytest.mark.parametrize(
    "each", [pytest.param(each, id=each.spoil.__name__, marks=each.marks) for each in FAULTS]
)
def test_a_fault_is_found_with_its_remedy(each: Fault, patient: Patient) -> None:
    each.spoil(patient)
    found = [finding.figures() for finding in patient.examined().found]
    remedies = [finding["remedy"] for finding in found if finding["rule"] == each.rule]
    assert any(each.remedy in remedy for remedy in remedies), found


@pytest.mark.parametrize("spoil", SOUND, ids=lambda spoil: spoil.__name__)
def test_nothing_is_found_where_nothing_is_wrong(spoil: Spoil, patient: Patient) -> None:
    spoil(patient)
    assert patient.examined().found == []


@needs("mount")
def test_a_filesystem_that_reports_no_size_is_not_said_to_be_too_small(patient: Patient) -> None:
    """It was said to have 0 bytes."""
    a_filesystem_without_o_direct(patient)  # on ramfs, which reports none
    assert [each.rule.name for each in patient.examined().found] == ["no-o-direct"]


def test_a_server_that_takes_connections_and_never_answers_is_found(patient: Patient) -> None:
    silent = patient.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    tier = TierConfig("redis", "kv", {"url": f"redis://127.0.0.1:{silent.getsockname()[1]}"})
    findings = Findings()
    look_at_servers([tier], 0.0, findings)  # it never answers, however long the doctor waits
    (found,) = findings.found
    assert (found.rule, "has not answered" in found.what) == (TRIAL_FAILED, True)


def test_what_separates_engines_is_named_and_what_may_not_be_listed_is_no_finding(
    patient: Patient,
) -> None:
    server = serving(patient)
    leave_namespaces(patient, BF16, FP8, OTHER_MODEL)
    (found,) = patient.examined().found
    assert found.what.endswith("has 2 namespaces of org/m, which differ in dtype (bf16, fp8).")
    server.ask("ACL", "SETUSER", "default", "-scan")
    found = patient.examined()
    assert found.found == []
    assert any("give the ACL user +scan" in text for text in found.not_checked)


def test_each_rule_has_a_fault_that_it_finds() -> None:
    assert {each.name for each in RULES} == {each.rule for each in FAULTS}


def test_each_rule_is_on_its_page_and_names_a_section_that_is_there() -> None:
    page = (DOCS / "how-to/run-the-doctor.md").read_text()
    for rule in RULES:
        assert f"| `{rule.name}` | {rule.severity} |" in page
        named, _, section = rule.docs.partition("#")
        titles = re.findall(r"^#+ (.*)$", (DOCS / named).read_text(), re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
        assert section in slugs or not section, rule.docs


def test_the_status_tells_the_worst_and_json_has_all(
    patient: Patient, kvtier: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tools.doctor.subject.ROOT", patient.root)
    machine = Machine(patient.root, {}, None)
    monkeypatch.setattr(examination, "Machine", lambda: machine)
    file = patient.folder / "kv.json"
    extra = {**patient.extra, "secondary_tiers": patient.tiers}
    file.write_text(json.dumps({"kv_transfer_config": extra}))
    assert kvtier("doctor", file)["findings"] == []
    assert "Nothing was found." in kvtier.shown("doctor", json.dumps(extra))
    warned = kvtier("doctor", file, "--no-enable-prefix-caching", status=command.WARNINGS)
    assert warned["counts"] == {"warning": 1}
    assert set(warned["findings"][0]) == {"rule", "severity", "what", "why", "remedy", "docs"}
    patient.write("proc/meminfo", "MemTotal: 1 kB\nMemAvailable: 1 kB\n")
    both = kvtier("doctor", file, "--no-enable-prefix-caching", status=command.ERRORS)
    assert [each["severity"] for each in both["findings"]] == [Severity.ERROR, Severity.WARNING]
    with served(Page.sound()) as url:
        assert kvtier("doctor", url)["findings"] == []
        assert (
            kvtier("doctor", url.removesuffix("/metrics").removeprefix("http://"))["counts"] == {}
        )
    for wrong in ((), (file, file), (patient.folder / "absent.json",), ("{",)):
        assert kvtier.refused("doctor", *wrong).startswith("kvtier doctor: ")
    for wrong in ("{", "[]"):
        assert "--kv-events-config" in kvtier.refused("doctor", file, "--kv-events-config", wrong)


def test_a_probe_measures_each_tier_and_leaves_nothing(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "LEG_BYTES", 16 << 20)
    monkeypatch.setattr(probe, "PROBE_S_MAX", PATIENCE_S)
    folder = patient.made(0o700)
    patient.tiers = [patient.disk(io_depth=1), {"type": "memory", "capacity_bytes": "1MiB"}]
    patient.extra["prefill_tokens_per_s"] = 1_000_000
    found = patient.examined(with_probe=True)
    assert "tier nvme: " in found.noted[0]
    assert "MB/s loaded, in blocks of 65536 bytes" in found.noted[0]
    assert any(text.startswith("how fast 2:memory is") for text in found.not_checked)
    assert list(folder.iterdir()) == []


def test_the_filesystem_of_a_folder_is_the_last_one_mounted_above_it(patient: Patient) -> None:
    line = "40 27 0:40 / /mnt/kv rw - {} source rw\n"
    text = ON_EXT4 + line.format("xfs") + line.format("ceph") + "cut off"
    patient.write("proc/self/mountinfo", text)
    machine = Machine(patient.root, {}, None)
    assert machine.filesystem_of("/mnt/kv/below") == machine.filesystem_of("/mnt/kv") == "ceph"
    assert machine.filesystem_of("/mnt/kv2") == "ext4"
    (patient.root / "proc/self/mountinfo").unlink()
    assert machine.filesystem_of("/mnt/kv") == ""
