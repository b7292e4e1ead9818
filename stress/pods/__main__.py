"""Runs the manifests' engines on this machine: each finds its blocks after a restart.

    python -m stress.pods                          # all of them (ten minutes)
    python -m stress.pods local-nvme --user 1000680000:0   # as a random user of OpenShift's

Needs root, vLLM for the CPU, and no network. Each engine has the arguments, environment, mounts,
user, groups, read-only root and memory limit of its manifest; ``substitutions`` lists all that
differs. Prints what ``kvtier status`` and ``kvtier doctor`` say in the pod, and what the engines
have written where; their logs are in ``build/pods``. Exits with 1 if one does not start, does not
end in order within its grace period, hits nothing after its restart, or does not announce its
tier's blocks where its manifest says that it publishes KV events.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtier.tools.process_group import process_group
from kvtier.tools.watching.page import Page
from stress.control_group import memory_group
from stress.engine.vllm_server import BLOCK_TOKENS, make_model
from stress.failure import Failure
from stress.limits import PATIENCE_S
from stress.own_network import enter_own_network
from stress.pods import manifests
from stress.pods.bucket import bucket_for
from stress.pods.kv_events import subscriber
from stress.pods.root import (
    User,
    as_user,
    command_in_root,
    image_environment,
    why_not_here,
)
from stress.pods.substitutions import (
    PROCESSES_BYTES,
    engine_command,
    engine_environment,
    server_command,
    server_environment,
    shared_memory_bytes,
)
from stress.pods.volumes import make_volumes, make_what_comments_say
from stress.supervisor import folder_prefix, supervised

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stress.pods.bucket import BucketAccess
    from stress.pods.kv_events import Subscriber
    from stress.pods.manifests import Pod

SHOWN_MAX: Final = 20
_LONG_NAME: Final = re.compile(r"[0-9a-f-]{12,}")
PROMPT_TOKENS: Final = (500, 900)
POLL_S: Final = 0.2
STORED: Final = "vllm:kv_offload_store_bytes"
WRITTEN: Final = "vllm:kv_offload_tiering_write_bytes"
READ: Final = "vllm:kv_offload_tiering_read_bytes"


class Running:
    """An engine that runs in its pod's root."""

    def __init__(self, pod: Pod, user: User, process: subprocess.Popen[bytes], log: Path) -> None:
        self._pod = pod
        self._user = user
        self._process = process
        self._log = log
        probe = pod.container["startupProbe"]["httpGet"]
        ports = {each["name"]: each["containerPort"] for each in pod.container["ports"]}
        self._url = f"http://127.0.0.1:{ports[probe['port']]}"
        self._health = probe["path"]

    def call(self, path: str, body: object = None) -> str:
        """Send GET, or POST with a body; returns the answer's text. Raises ``OSError``."""
        request = urllib.request.Request(  # noqa: S310 - loopback
            self._url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:  # noqa: S310 - as above
            text: str = answer.read().decode()
        return text

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait. Raises ``Failure`` if the engine ends meanwhile, or it takes too long."""
        until_s = time.monotonic() + PATIENCE_S
        while not is_so():
            if self._process.poll() is not None or time.monotonic() > until_s:
                log = self._log.read_text(errors="replace")
                raise Failure(f"{self._pod.name}: not {what}\n{log[-6000:]}")
            time.sleep(POLL_S)

    def is_up(self) -> bool:
        """Return whether its startup probe succeeds."""
        try:
            self.call(self._health)
        except OSError:
            return False
        return True

    def complete(self, prompt: list[int], tokens: int = 8) -> list[int]:
        """Return the tokens that follow a prompt."""
        body = {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        found: list[int] = json.loads(self.call("/v1/completions", body))["choices"][0]["token_ids"]
        return found

    def counted(self, name: str) -> float:
        """Return a counter, of all tiers together; a short request has it published."""
        self.complete([3], tokens=1)
        return Page(self.call("/metrics")).total(name)

    def exec(self, *command: str) -> str:
        """Run a command beside it, as ``kubectl exec`` does; returns what it prints."""
        environment = {**image_environment(), **self._pod.environment}
        namespaces = ["--mount", "--pid", "--ipc", "--root", "--wd"]
        done = subprocess.run(
            [
                *("nsenter", f"--target={self._pid}", *namespaces),
                *as_user(self._user, environment, command),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Failure(f"{command} ends with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    @property
    def _pid(self) -> int:
        """The number of the process that is the first in the pod."""
        process = self._process.pid
        return int(Path(f"/proc/{process}/task/{process}/children").read_text().split()[0])

    def end(self) -> str:
        """End it as kubelet does behind ``preStop``; returns what it says of its blocks."""
        began_s = time.monotonic()
        os.kill(self._pid, signal.SIGTERM)
        grace_s = self._pod.spec["terminationGracePeriodSeconds"]
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            raise Failure(f"it runs on {grace_s} s after SIGTERM") from None
        took_s = time.monotonic() - began_s
        said = [line for line in self._log.read_text().splitlines() if "kvtier is closed" in line]
        if not said or "lost_blocks=0" not in said[-1]:
            raise Failure(f"it has not closed its tiers in order: {said}")
        return f"ended in {took_s:.0f} s"


class Deployed:
    """A scenario's pods, and the folders that stand for the cluster's volumes."""

    def __init__(
        self, scenario: str, folder: Path, logs: Path, user: User | None, bucket: BucketAccess
    ) -> None:
        self._logs = logs
        self._s3_endpoint = bucket.endpoint
        self.pods = manifests.pods(scenario)
        self._scenario = scenario
        self._folder = folder
        self._user = user
        make_what_comments_say(scenario, folder, bucket.files)
        self._volumes = {
            pod.name: make_volumes(pod, folder, self.user_of(pod)) for pod in self.pods.values()
        }

    def user_of(self, pod: Pod) -> User:
        """Return the numbers that the pod runs with."""
        return self._user or User.of(pod)

    @contextmanager
    def engine(self, model: Path) -> Iterator[Running]:
        """Run the engine's pod until the end of the block."""
        pod = self.pods["vllm"]
        command = engine_command(pod.container["command"], pod.arguments, self._s3_endpoint)
        shared = shared_memory_bytes(pod)
        with memory_group(shared + PROCESSES_BYTES) as group:
            if group is None:
                print("  no memory limit: this machine lets no control group be made")
            environment = engine_environment(pod)
            with self._run(pod, command, environment, shared, group, model) as process:
                yield Running(pod, self.user_of(pod), process, self._log(pod))

    @contextmanager
    def servers(self) -> Iterator[None]:
        """Run the pods beside the engine until the end of the block; they may listen later."""
        with ExitStack() as stack:
            for pod in self.pods.values():
                if pod.name == "vllm":
                    continue
                command, environment = server_command(pod), server_environment(pod)
                running = self._run(pod, command, environment, 0, None, None)
                stack.enter_context(running)
            yield

    def written(self) -> dict[str, list[str]]:
        """Return what lies in the engine's volumes, two folders deep."""
        found = {}
        for mount in self.pods["vllm"].mounts:
            if mount.path != manifests.SHARED_MEMORY and not mount.is_read_only:
                folder = self._volumes["vllm"][mount.volume["name"]]
                paths = (str(each.relative_to(folder)) for each in folder.rglob("*"))
                found[mount.path] = sorted({_LONG_NAME.sub("...", each) for each in paths})[
                    :SHOWN_MAX
                ]
        return found

    def _log(self, pod: Pod) -> Path:
        return self._logs / f"{self._scenario}-{pod.name}.log"

    @contextmanager
    def _run(
        self,
        pod: Pod,
        command: list[str],
        environment: dict[str, str],
        shared_memory_bytes: int,
        group: Path | None,
        model: Path | None,
    ) -> Iterator[subprocess.Popen[bytes]]:
        with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
            whole = command_in_root(
                pod,
                command,
                environment,
                self._volumes[pod.name],
                user=self.user_of(pod),
                shared_memory_bytes=shared_memory_bytes,
                group=group,
                model=model,
                hosts=manifests.services(self._scenario),
                scratch=Path(scratch),
            )
            with (
                self._log(pod).open("ab") as log,
                # Not unshare's --kill-child alone, which is forgotten as setpriv changes the user.
                process_group(whole, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process,
            ):
                yield process


def wait_for_announced(router: Subscriber | None, engine: Running, blocks: int) -> set[object]:
    """Return the hashes of an engine's blocks, once its KV events have named so many."""
    if router is None:
        return set()
    engine.wait_until(lambda: len(router.stored()) >= blocks, "announced by KV events")
    return router.stored()


def play(scenario: str, folder: Path, logs: Path, user: User | None) -> None:
    """Store with one engine, and hit with the next. Raises ``Failure``."""
    choose = random.Random(scenario)
    prompts = [[choose.randrange(3, 512) for _ in range(count)] for count in PROMPT_TOKENS]
    whole_blocks = sum(count // BLOCK_TOKENS for count in PROMPT_TOKENS)
    model = folder / "model"
    model.mkdir()
    for file in make_model(model, seed=7).iterdir():
        file.chmod(0o644)  # weights are saved for their user alone
    with ExitStack() as stack:
        bucket = stack.enter_context(bucket_for(scenario, folder))
        deployed = Deployed(scenario, folder, logs, user, bucket)
        stack.enter_context(deployed.servers())
        pod = deployed.pods["vllm"]
        with subscriber(pod) as router, deployed.engine(model) as first:
            first.wait_until(first.is_up, "up")
            tokens = [first.complete(prompt) for prompt in prompts]
            first.wait_until(lambda: first.counted(STORED) > 0, "stored in memory")
            first.wait_until(
                lambda: first.counted(WRITTEN) == first.counted(STORED), "stored in its tier"
            )
            written = first.counted(WRITTEN)
            announced = wait_for_announced(router, first, whole_blocks)
            how = first.end()
        with subscriber(pod) as router, deployed.engine(model) as second:
            second.wait_until(second.is_up, "up again")
            again = [second.complete(prompt) for prompt in prompts]
            second.wait_until(lambda: second.counted(READ) >= written, "hit after its restart")
            announced_again = wait_for_announced(router, second, whole_blocks)
            kvtier = ("python", "-m", "kvtier")
            status = second.exec(*kvtier, "status")
            doctor = second.exec(*kvtier, "doctor", "127.0.0.1:8000")
            second.end()
    if again != tokens:
        raise Failure(f"{scenario}: other tokens after the restart: {again}, {tokens}")
    if announced_again != announced:
        raise Failure(f"{scenario}: other KV events after the restart")
    print(f"{scenario}: {whole_blocks} blocks stored, {how}, all hit after the restart", flush=True)
    if router is not None:
        print(f"  KV events of {len(announced)} blocks on {router.topic}, by both", flush=True)
    print(status, doctor, sep="\n", flush=True)
    for path, names in deployed.written().items():
        print(f"  {path}: {', '.join(names)}", flush=True)


def main() -> int:
    """Play the scenarios, in a network of their own: the manifests name ports."""
    scenarios = manifests.scenarios()
    parser = argparse.ArgumentParser("python -m stress.pods", description=__doc__)
    parser.add_argument("scenario", nargs="*", help=f"of {', '.join(scenarios)}; all by default")
    parser.add_argument("--user", metavar="UID:GID", help="in place of the manifest's")
    parser.add_argument("--logs", type=Path, default=Path("build/pods"))
    given = parser.parse_args()
    if why := why_not_here():
        parser.error(why)
    enter_own_network()
    user = None
    if given.user:
        uid, gid = map(int, given.user.split(":"))
        user = User(uid, gid, uid)  # OpenShift's fsGroup is the user's number
    failed = 0
    shutil.rmtree(given.logs, ignore_errors=True)
    given.logs.mkdir(parents=True)
    for scenario in given.scenario or scenarios:
        with tempfile.TemporaryDirectory(prefix=folder_prefix()) as name:
            try:
                play(scenario, Path(name), given.logs, user)
            except (Failure, urllib.error.URLError) as failure:
                print(f"{scenario} failed: {failure}", flush=True)
                failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(supervised(main))
