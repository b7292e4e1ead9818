"""Makes a pod's volumes: folders with what a cluster would put there, and with its modes."""

from __future__ import annotations

import os
import subprocess
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from stress.pods import manifests

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from stress.pods.manifests import Mount, Pod
    from stress.pods.root import User

SECRETS: Final = "secrets"
HOST: Final = "host"
FILES: Final = "files"
_KUBECTL: Final = r"""
kubectl() {
    folder=$SECRETS/$4; mkdir -p "$folder"; shift 4
    for each; do
        each=${each#--from-*=}
        case $each in
            *=*) printf '%s' "${each#*=}" > "$folder/${each%%=*}";;
            *) cp "$FILES/$each" "$folder/$each";;
        esac
    done
}
install() { mkdir -p "$HOST${!#}"; chown "$3:$5" "$HOST${!#}"; chmod "$7" "$HOST${!#}"; }
docker() { :; }
"""
"""In place of the commands that the manifests' comments name."""


def make_what_comments_say(
    scenario: str, folder: Path, files: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Run the commands at the head of a manifest, with files in ``folder`` for the cluster's.

    ``files``: texts of the files that the commands make Secrets from, by name.
    """
    (folder / FILES).mkdir()
    for name, text in files.items():
        (folder / FILES / name).write_text(text)
    names = {name.upper(): str(folder / name) for name in (SECRETS, HOST, FILES)}
    subprocess.run(
        ["bash", "-euc", _KUBECTL + manifests.commands(scenario)],
        env={**os.environ, **names},
        check=True,
    )


def make_volumes(pod: Pod, folder: Path, user: User) -> dict[str, Path]:
    """Return a folder for each volume of the pod that is not in memory, by the volume's name."""
    return {
        mount.volume["name"]: _make_volume(pod, mount, folder, user)
        for mount in pod.mounts
        if mount.path != manifests.SHARED_MEMORY
    }


def _make_volume(pod: Pod, mount: Mount, folder: Path, user: User) -> Path:
    volume = mount.volume
    if "hostPath" in volume:
        return folder / HOST / str(volume["hostPath"]["path"]).strip("/")
    made = folder / "volumes" / pod.name / str(volume["name"])
    made.mkdir(parents=True)
    if "secret" in volume:
        secret = folder / SECRETS / volume["secret"]["secretName"]
        whole = [{"key": path.name, "path": path.name} for path in secret.iterdir()]
        for each in volume["secret"].get("items", whole):
            (made / each["path"]).write_bytes((secret / each["key"]).read_bytes())
    _give(made, mount, user)
    return made


def _give(folder: Path, mount: Mount, user: User) -> None:
    """Give a volume the group and mode that kubelet gives it, for a pod with ``fsGroup``."""
    os.chown(folder, 0, user.fs_group)
    folder.chmod(0o2777 if "emptyDir" in mount.volume else 0o2775)
    for each in folder.iterdir() if "secret" in mount.volume else ():
        os.chown(each, 0, user.fs_group)
        each.chmod(mount.volume["secret"]["defaultMode"] | 0o440)
