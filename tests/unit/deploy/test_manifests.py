"""The manifests of ``docs/deploy``: valid for Kubernetes, sound for kvtier, and consistent."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml

from kvtier.plugin_api.sizes import parse_duration
from kvtier.settings.runtime_config import RuntimeConfig
from kvtier.settings.vllm_releases import TESTED
from kvtier.tools.checking.configuration import check
from stress.pods import manifests
from stress.pods.manifests import DEPLOY, SHARED_MEMORY, Pod, quantity
from stress.pods.substitutions import small
from tests.support.needs import require

if TYPE_CHECKING:
    from pathlib import Path

RELEASES = ("1.35", "1.36", "1.37")
SCENARIOS = manifests.scenarios()
HELM = ("production-stack", "llm-d")
GIB = 1 << 30
OF_VLLM_BYTES = 2 * GIB  #: in /dev/shm: its queues and NCCL's; 160 MiB were measured on a CPU
PROCESSES_BYTES = 16 * GIB  #: what an engine's processes have at least
ROUTER_S, WORKERS_S, KILL_S = 60, 15, 5  #: the longest answer, and the rests of end-an-engine.md
SHARING = {"fs", "redis", "s3", "mooncake"}
KEYS = "a" * 64


def values(chart: str) -> dict[str, Any]:
    """Return the values for a chart."""
    found = yaml.safe_load((DEPLOY / f"helm/{chart}.yaml").read_text())
    assert isinstance(found, dict)
    return found


def pod_of_production_stack() -> Pod:
    """Return the pod that the chart makes of the values, as its templates do."""
    spec = values("production-stack")["servingEngineSpec"]
    (model,) = spec["modelSpec"]
    assert model["vllmConfig"]["tensorParallelSize"], "without it the chart mounts no /dev/shm"
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": model["shmSize"]}}
    container = {
        "args": [model["modelURL"], *model["vllmConfig"]["extraArgs"]],
        "env": model["env"],
        "resources": model["resources"],
        "volumeMounts": [*model["extraVolumeMounts"], {"name": "shm", "mountPath": SHARED_MEMORY}],
        "securityContext": spec["containerSecurityContext"],
        "startupProbe": spec["startupProbe"],
        "livenessProbe": spec["livenessProbe"],
    }
    pod = {"securityContext": spec["securityContext"], "volumes": [*model["extraVolumes"], shm]}
    return Pod({"spec": {"strategy": spec["strategy"]}}, "Deployment", pod, container)


def pod_of_llm_d() -> Pod:
    """Return the pod that the chart makes of the values, as its templates do."""
    decode = values("llm-d")["decode"]
    (container,) = decode["containers"]
    pod = {
        **decode["extraConfig"],
        "volumes": decode["volumes"],
        "terminationGracePeriodSeconds": decode["terminationGracePeriodSeconds"],
    }
    whole = {**container, **container["extraConfig"]}
    owner = {"spec": {"strategy": decode["strategy"]}}
    return Pod(owner, "Deployment", pod, whole)


@cache
def engine(name: str) -> Pod:
    """Return the pod of a scenario's engine, or of a chart's values."""
    if name == "production-stack":
        return pod_of_production_stack()
    return pod_of_llm_d() if name == "llm-d" else manifests.pods(name)["vllm"]


def tiers_of(pod: Pod) -> list[dict[str, Any]]:
    """Return its tiers as they are written."""
    tiers: list[dict[str, Any]] = extra_of(pod)["secondary_tiers"]
    return tiers


def extra_of(pod: Pod) -> dict[str, Any]:
    """Return what kvtier reads."""
    extra: dict[str, Any] = pod.kv_transfer_config["kv_connector_extra_config"]
    return extra


def each_engine(test: Any) -> Any:
    """Have a test for each engine."""
    return pytest.mark.parametrize("name", [*SCENARIOS, *HELM])(test)


def each_scenario(test: Any) -> Any:
    """Have a test for each folder that can be applied."""
    return pytest.mark.parametrize("scenario", SCENARIOS)(test)


@pytest.mark.parametrize("release", RELEASES)
@each_scenario
def test_each_release_of_kubernetes_knows_all_fields(scenario: str, release: str) -> None:
    for document in manifests.documents(scenario):
        assert kubernetes_validate.validate(document, release, strict=True) == release


def test_an_unknown_field_would_be_found() -> None:
    document = manifests.documents("local-nvme")[0]
    document["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(document, RELEASES[0], strict=True)


@each_scenario
def test_a_kustomization_names_all_files_of_its_folder(scenario: str) -> None:
    folder = DEPLOY / scenario
    named = yaml.safe_load((folder / manifests.KUSTOMIZATION).read_text())
    assert named.keys() == {"apiVersion", "kind", "resources"}
    there = {path.name for path in folder.iterdir()} - {manifests.KUSTOMIZATION}
    assert set(named["resources"]) == there


@each_engine
def test_kvtier_finds_nothing_in_the_configuration(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the engine would see it, with a folder for each mount and memory for this machine."""
    pod = engine(name)
    if any(tier["type"] == "mooncake" for tier in tiers_of(pod)):
        require("mooncake")
    text = json.dumps(pod.kv_transfer_config)
    for mount in pod.mounts:
        folder = tmp_path / mount.path.strip("/")
        folder.mkdir(parents=True)
        text = text.replace(f'"{mount.path}/', f'"{folder}/')
        for key in keys_of(name, mount):
            (folder / key).write_text(KEYS)
            (folder / key).chmod(0o600)
    for variable, value in pod.environment.items():
        if value.startswith("/etc/kvtier"):
            monkeypatch.setenv(variable, str(tmp_path / value.strip("/")))
            (tmp_path / value.strip("/")).write_text(
                "[default]\naws_access_key_id = A\naws_secret_access_key = B\n"
            )
    found = check(json.loads(small(text))).findings
    assert not found.refused
    about_this_machine = re.compile("is empty, and nothing is mounted there")
    assert not [each for each in found.warned if not about_this_machine.search(each)]
    assert len(found.tiers) == len(tiers_of(pod)) == 1


def keys_of(name: str, mount: manifests.Mount) -> list[str]:
    """Return the names of the files that a Secret has in its mount."""
    secret = mount.volume.get("secret")
    if secret is None:
        return []
    made = manifests.secrets_made(name)[secret["secretName"]]
    items = secret.get("items")
    return sorted(made) if items is None else [each["path"] for each in items]


@each_scenario
def test_all_that_is_mounted_is_defined(scenario: str) -> None:
    """By the scenario's own documents, or by the commands of its comment."""
    kinds = {(each["kind"], each["metadata"]["name"]) for each in manifests.documents(scenario)}
    secrets = manifests.secrets_made(scenario)
    for pod in manifests.pods(scenario).values():
        used = {mount.volume["name"] for mount in pod.mounts}
        assert used == {each["name"] for each in pod.spec["volumes"]} | {
            each["metadata"]["name"] for each in pod.owner["spec"].get("volumeClaimTemplates", [])
        }
        for mount in pod.mounts:
            claim = mount.volume.get("persistentVolumeClaim")
            if claim is not None:
                assert ("PersistentVolumeClaim", claim["claimName"]) in kinds
            if "secret" in mount.volume:
                secret = mount.volume["secret"]
                assert mount.is_read_only
                assert {each["key"] for each in secret.get("items", [])} <= secrets[
                    secret["secretName"]
                ]
    paths = re.findall(r'_file": "([^"]+)"', json.dumps(tiers_of(engine(scenario))))
    files = {
        f"{mount.path}/{key}"
        for mount in engine(scenario).mounts
        for key in keys_of(scenario, mount)
    }
    assert set(paths) <= files


@each_engine
def test_memory_holds_what_lies_in_shared_memory(name: str) -> None:
    """The region of each engine of the pod, what vLLM needs beside it, and the processes."""
    pod = engine(name)
    assert "--data-parallel-size" not in pod.arguments, "each engine would have a region"
    volume = pod.mount(SHARED_MEMORY).volume["emptyDir"]
    assert volume["medium"] == "Memory"
    assert pod.shared_memory_bytes >= pod.primary_bytes + OF_VLLM_BYTES
    assert pod.memory_limit_bytes >= pod.shared_memory_bytes + PROCESSES_BYTES
    resources = pod.container["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    for mount in pod.mounts:
        others = mount.volume.get("emptyDir", {})
        assert "emptyDir" not in mount.volume or "sizeLimit" in others, "it may fill the node"


def test_a_server_has_memory_beyond_its_limit() -> None:
    """For its connections, and for what fragmentation costs."""
    pod = manifests.pods("valkey")["valkey"]
    maxmemory = pod.arguments[pod.arguments.index("--maxmemory") + 1]
    assert maxmemory.endswith("gb")  # 1024 ** 3 bytes, as Valkey counts
    assert pod.memory_limit_bytes >= int(maxmemory.removesuffix("gb")) * GIB * 5 // 4


@pytest.mark.parametrize("name", ["local-nvme", "kv-events", "shared-folder"])
def test_a_tier_fits_into_its_volume(name: str) -> None:
    pod = engine(name)
    (volume,) = (each.volume for each in pod.mounts if each.path == "/kv")
    claim = volume.get("claimTemplate") or next(
        each["spec"]
        for each in manifests.documents(name)
        if each["kind"] == "PersistentVolumeClaim"
    )
    (tier,) = tiers_of(pod)
    assert quantity(tier["capacity_bytes"]) <= quantity(claim["resources"]["requests"]["storage"])


@each_engine
def test_an_engine_has_time_to_end(name: str) -> None:
    """As ``docs/how-to/end-an-engine.md`` says, or what a chart leaves of it."""
    pod = engine(name)
    shutdown_s = int(option_of(pod, "--shutdown-timeout"))
    if name == "production-stack":  # the chart has neither
        assert shutdown_s + KILL_S <= 30
        return
    pre_stop = pod.container["lifecycle"]["preStop"]["exec"]["command"]
    assert pre_stop[0] == "sleep"
    given = extra_of(pod).get("close_timeout_s", RuntimeConfig.close_timeout_s)
    close_s = parse_duration(given) if isinstance(given, str) else given
    assert shutdown_s >= ROUTER_S + 2 * close_s + WORKERS_S
    grace_s = pod.spec["terminationGracePeriodSeconds"]
    assert grace_s >= int(pre_stop[1]) + shutdown_s + KILL_S


def option_of(pod: Pod, option: str) -> str:
    """Return the value of an option that is written with ``=``."""
    (found,) = (each for each in pod.arguments if each.startswith(f"{option}="))
    return found.partition("=")[2]


@each_engine
def test_no_probe_ends_an_engine_that_waits_for_storage(name: str) -> None:
    """vLLM's own health, which no tier changes; and time to load a model."""
    container = engine(name).container
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] == "/health"
    start = container["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 1800
    alive = container["livenessProbe"]
    assert alive["periodSeconds"] * alive["failureThreshold"] >= 60


@pytest.mark.parametrize(
    "pod",
    [pytest.param(pod, id=f"{name}-{pod.name}")
     for name in SCENARIOS for pod in manifests.pods(name).values()]
    + [pytest.param(engine(name), id=name) for name in HELM],
)  # fmt: skip
def test_a_pod_has_no_rights_but_to_its_volumes(pod: Pod) -> None:
    """As the pod security standard ``restricted`` asks, and a read-only root beside."""
    whole = pod.spec["securityContext"]
    assert whole["runAsNonRoot"]
    assert whole["fsGroup"]
    assert whole["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod.container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {mount.path for mount in pod.mounts if not mount.is_read_only}
    assert pod.environment.get("HOME", "/data") in writable
    assert {"/tmp", "/data"} & writable


@each_engine
def test_two_engines_never_have_one_disk(name: str) -> None:
    """A disk tier belongs to one engine: the next one starts when the last has ended."""
    pod = engine(name)
    (tier,) = tiers_of(pod)
    owner = pod.owner["spec"]
    if tier["type"] == "disk":
        is_alone = (
            pod.kind == "StatefulSet"  # a claim for each, and one pod for each name
            or owner.get("strategy") == {"type": "Recreate"}
            or owner.get("updateStrategy", {}).get("rollingUpdate", {}).get("maxSurge") == 0
        )
        assert is_alone
        assert "persistentVolumeClaim" not in pod.mount("/kv").volume or name in HELM
    elif tier["type"] in SHARING:
        assert owner["replicas"] > 1
        assert tier["locality"] == "REMOTE"
        assert tier["auth_key_file"], "whoever writes there could plant blocks"
        assert option_of(pod, "--prefix-caching-hash-algo") == "sha256_cbor"


def test_what_all_engines_have_is_the_same() -> None:
    """Each manifest can be pasted alone, so it stands in each: a change is for all of them."""
    first = engine("local-nvme")
    for name in SCENARIOS:
        pod = engine(name)
        for key in ("image", "command", "startupProbe", "livenessProbe", "readinessProbe",
                    "lifecycle", "resources"):  # fmt: skip
            assert pod.container[key] == first.container[key], (name, key)
        for key in ("securityContext", "enableServiceLinks", "automountServiceAccountToken"):
            assert pod.spec[key] == first.spec[key], (name, key)
        common = [each for each in first.mounts if "emptyDir" in each.volume]
        assert [each for each in pod.mounts if "emptyDir" in each.volume] == common


def test_events_are_what_a_router_reads() -> None:
    for name in ("kv-events", "llm-d"):
        pod = engine(name)
        events = pod.json_argument("--kv-events-config")
        assert events["enable_kv_cache_events"]
        assert extra_of(pod)["self_describing_kv_events"]
        assert all(tier["enable_kv_events"] for tier in tiers_of(pod))
        port = int(events["endpoint"].rpartition(":")[2])
        assert port in {each["containerPort"] for each in pod.container["ports"]}


def test_the_page_links_each_manifest() -> None:
    """Those that it shows are included from the files, which mkdocs checks."""
    page = (DEPLOY.parent / "how-to/run-on-kubernetes.md").read_text()
    for path in [
        *(f"{name}/engine.yaml" for name in SCENARIOS),
        *(f"helm/{name}.yaml" for name in HELM),
    ]:
        assert f"(../deploy/{path})" in page, path


def test_the_newest_tested_release_of_vllm_is_deployed() -> None:
    for name in [*SCENARIOS, "llm-d"]:
        assert engine(name).container["image"].endswith(f":{TESTED[-1]}"), name


def test_a_pod_that_is_not_sound_is_found() -> None:
    """The tests above see a pod's numbers, and not those of another one."""
    pod = engine("local-nvme")
    small = json.loads(json.dumps(pod.spec).replace("34Gi", "32Gi"))
    smaller = replace(pod, spec=small)
    assert smaller.shared_memory_bytes < smaller.primary_bytes + OF_VLLM_BYTES
