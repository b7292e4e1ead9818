"""Reads manifests: what Kubernetes would give a pod's only container, and the files beside it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from kvtier.plugin_api.sizes import parse_size

DEPLOY: Final = Path(__file__).parents[2] / "docs/deploy"
KUSTOMIZATION: Final = "kustomization.yaml"
SHARED_MEMORY: Final = "/dev/shm"
_COMMAND: Final = "#   "  #: a comment's lines that are commands are indented


class Mount(NamedTuple):
    """One mount of the container."""

    path: str
    volume: dict[str, Any]  #: as in the pod's ``volumes``
    is_read_only: bool


@dataclass(frozen=True)
class Pod:
    """A pod as its Deployment, StatefulSet or DaemonSet makes it, with one container."""

    owner: dict[str, Any]  #: the document
    kind: str
    spec: dict[str, Any]  #: the pod's
    container: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the document."""
        return str(self.owner["metadata"]["name"])

    @property
    def arguments(self) -> list[str]:
        """The container's arguments."""
        return [str(each) for each in self.container.get("args", [])]

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the manifest gives a value."""
        given = self.container.get("env", [])
        return {each["name"]: each["value"] for each in given if "value" in each}

    @property
    def user(self) -> int:
        """The number of the user."""
        return int(self.spec["securityContext"]["runAsUser"])

    @property
    def group(self) -> int:
        """The number of the user's first group."""
        return int(self.spec["securityContext"]["runAsGroup"])

    @property
    def fs_group(self) -> int:
        """The number of the group that volumes are given."""
        return int(self.spec["securityContext"]["fsGroup"])

    @property
    def memory_limit_bytes(self) -> int:
        """What all of its processes may have, with what lies in memory."""
        return quantity(self.container["resources"]["limits"]["memory"])

    @property
    def mounts(self) -> list[Mount]:
        """The container's mounts, with the volumes that they name. Raises ``KeyError``."""
        volumes = {each["name"]: each for each in self.spec.get("volumes", [])}
        for claim in self.owner["spec"].get("volumeClaimTemplates", []):
            name = claim["metadata"]["name"]
            volumes[name] = {"name": name, "claimTemplate": claim["spec"]}
        return [
            Mount(each["mountPath"], volumes[each["name"]], each.get("readOnly", False))
            for each in self.container["volumeMounts"]
        ]

    def mount(self, path: str) -> Mount:
        """Return the mount at a path. Raises ``StopIteration`` without one."""
        return next(each for each in self.mounts if each.path == path)

    def json_argument(self, option: str) -> dict[str, Any]:
        """Return what an option of vLLM's has as JSON. Raises ``ValueError`` without one."""
        found = json.loads(self.arguments[self.arguments.index(option) + 1])
        assert isinstance(found, dict)
        return found

    @property
    def primary_bytes(self) -> int:
        """``cpu_bytes_to_use`` of its engine."""
        return quantity(self.kv_transfer_config["kv_connector_extra_config"]["cpu_bytes_to_use"])

    @property
    def shared_memory_bytes(self) -> int:
        """The size of its ``/dev/shm``."""
        return quantity(self.mount(SHARED_MEMORY).volume["emptyDir"]["sizeLimit"])

    @property
    def kv_transfer_config(self) -> dict[str, Any]:
        """What vLLM gets as ``--kv-transfer-config``."""
        return self.json_argument("--kv-transfer-config")


def quantity(text: object) -> int:
    """Return the bytes of a quantity of Kubernetes' such as 34Gi. Raises ``ValueError``."""
    written = str(text)
    size = parse_size(f"{written}B" if written.endswith("i") else written)
    if size is None:
        raise ValueError(f"{written!r} is no quantity of bytes")
    return size


def scenarios() -> list[str]:
    """Return the names of the folders that can be applied."""
    return sorted(each.parent.name for each in DEPLOY.glob(f"*/{KUSTOMIZATION}"))


def documents(scenario: str) -> list[dict[str, Any]]:
    """Return all documents that its kustomization names."""
    folder = DEPLOY / scenario
    resources = yaml.safe_load((folder / KUSTOMIZATION).read_text())["resources"]
    return [each for name in resources for each in yaml.safe_load_all((folder / name).read_text())]


def pods(scenario: str) -> dict[str, Pod]:
    """Return a scenario's pods by the names of their owners."""
    found = {}
    for document in documents(scenario):
        template = document["spec"].get("template") if "spec" in document else None
        if template is not None:
            (container,) = template["spec"]["containers"]
            pod = Pod(document, document["kind"], template["spec"], container)
            found[pod.name] = pod
    return found


def services(scenario: str) -> list[str]:
    """Return the names of a scenario's services."""
    return [each["metadata"]["name"] for each in documents(scenario) if each["kind"] == "Service"]


def commands(scenario: str) -> str:
    """Return the commands that the comment at the head of its engine gives, as a script."""
    lines = (DEPLOY / scenario / "engine.yaml").read_text().splitlines()
    head = lines[: next(at for at, line in enumerate(lines) if not line.startswith("#"))]
    return "\n".join(line.removeprefix(_COMMAND) for line in head if line.startswith(_COMMAND))


def secrets_made(scenario: str) -> dict[str, set[str]]:
    """Return the keys of each Secret that those commands make."""
    found: dict[str, set[str]] = {}
    name = ""
    for made, key in re.findall(
        r"create secret generic ([\w-]+)|--from-(?:literal|file)=([\w.-]+)", commands(scenario)
    ):
        name = made or name
        found.setdefault(name, set()).update({key} - {""})
    return found
