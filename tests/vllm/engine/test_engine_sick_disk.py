"""A disk that hangs, lies, fills up or goes away: the engine recomputes, in time."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from tests.support.patience import PATIENCE_S
from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import engine, kvtier_config
from tests.vllm.support.play import (
    Steps,
    assert_at_rest,
    ours_in_shm,
    own_id,
    play_round,
    prompts_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.one_release  # what a disk does, vLLM never sees

LENGTHS = [640, 640, 640, 640]
BLOCKS = 20  #: in each prompt
FULL_DISK_BLOCKS = 4  #: that the disk that is full holds at most
ROUNDS_MAX = 2 * BLOCKS  #: each brings at least one block back
READ = 'vllm:kv_offload_tiering_read_bytes{tier="1:fs"}'
HANGING = own_id("hanging")
TIMEOUT_S = 0.5  #: for the tier to answer
CLOSE_TIMEOUT_S = 1.0
IMPATIENT = {
    "probe_timeout_s": TIMEOUT_S,
    "promote_timeout_s": TIMEOUT_S,
    "store_timeout_s": TIMEOUT_S,
}


def fs(root: Path | str, **options: Any) -> dict[str, Any]:
    return {"type": "fs", "root_dir": str(root), **options}


def block_files(root: Path | str) -> set[str]:
    return {str(path.relative_to(root)) for path in Path(root).rglob("*.kv")}


def seed(model: str, root: str) -> dict[str, Any]:
    """Fill a folder; tell which files belong to which prompt."""
    told: dict[str, Any] = {"files": [], "tokens": []}
    with engine(model, kvtier_config(secondary_tiers=[fs(root)])) as running:
        for prompt in prompts_of(LENGTHS):
            before = block_files(root)
            told["tokens"].append(play_round(running, [prompt])["tokens"][0])
            told["files"].append(sorted(block_files(root) - before))
    return told


@pytest.fixture(scope="module")
def seeded(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a folder with the blocks of all prompts, and their tokens."""
    folder = tmp_path_factory.mktemp("seeded")
    root = folder / "kv"
    told: dict[str, Any] = run_scenario(
        seed, log_folder=folder / "logs", model=str(llama), root=str(root)
    )
    assert [len(files) for files in told["files"]] == [BLOCKS] * len(LENGTHS)
    return {"root": root, **told}


@pytest.fixture
def root(seeded: dict[str, Any], tmp_path: Path) -> Path:
    """Return a copy of the folder, to be damaged."""
    shutil.copytree(seeded["root"], tmp_path / "kv")
    return tmp_path / "kv"


def hanging(model: str, root: str, hung: list[str]) -> dict[str, Any]:
    """Ask for two prompts whose blocks hang, then for the sound ones."""
    hang_reads(hung)
    config = kvtier_config(
        # Where the patch holds.
        secondary_tiers=[fs(root, isolation="thread", promote_timeout_s=TIMEOUT_S)],
        close_timeout_s=CLOSE_TIMEOUT_S,
        breaker_failures_max=2,
        breaker_pause_s=PATIENCE_S,  # for good
        breaker_pause_s_max=PATIENCE_S,
    )
    told: dict[str, Any] = {"asked": []}
    prompts = prompts_of(LENGTHS)
    with engine(model, config, blocks=120, engine_id=HANGING) as running:
        steps = Steps(running)
        for together in ((0, 1), (2, 3)):
            for number in together:
                steps.add(str(number), prompts[number])
            steps.finish()
            running.idle()
            counts = running.statistics()["tiers"][0]["counts"]
            told["asked"].append([counts["promotion_jobs"], counts["jobs_timed_out"]])
        told["tokens"] = [steps.tokens[str(number)] for number in range(len(prompts))]
        told["statistics"] = running.settle()
        told["metrics"] = running.metrics()
        told["cached"] = list(steps.cached.values())
    told["left"] = ours_in_shm(HANGING)
    told["stalled"] = stalled(model, f"{root}-stalled")
    return told


def hang_reads(files: list[str]) -> None:
    """Have no read of these files return.

    A filesystem that hangs is no help: what waits in the kernel keeps a process from ending.
    """
    from kvtier_backends.fs.files import BlockFiles

    real = BlockFiles._read

    def read(self: BlockFiles, place: Any, name: str, block: Any) -> Any:
        if any(file.endswith(name) for file in files):
            threading.Event().wait()
        return real(self, place, name, block)

    patch.object(BlockFiles, "_read", read).start()


def stalled(model: str, root: str) -> dict[str, Any]:
    """Do the same with a filesystem on which every call hangs, probes and stores too."""
    from kvtier_backends.fs.files import BlockFiles

    def hang(*_: Any) -> Any:
        threading.Event().wait()

    for name in ("exists", "load", "store"):
        patch.object(BlockFiles, name, hang).start()
    tier = fs(root, isolation="thread", **IMPATIENT)  # where the patch holds
    config = kvtier_config(secondary_tiers=[tier], close_timeout_s=CLOSE_TIMEOUT_S)
    with engine(model, config, engine_id=own_id("stalled")) as running:
        return {"rounds": [play_round(running, prompts_of(LENGTHS)) for _ in range(2)]}


def test_a_disk_that_hangs(llama: Path, log_folder: Path, seeded: Any, root: Path) -> None:
    """Some blocks are never read. Requests end all the same, and so does the process.

    How soon is not asked here, where it depends on the machine: without their deadlines,
    which tests with a clock of their own look at, neither would end at all.
    """
    hung = [*seeded["files"][0], *seeded["files"][1]]
    told = run_scenario(hanging, log_folder=log_folder, model=str(llama), root=str(root), hung=hung)

    assert told["tokens"] == seeded["tokens"]
    assert told["cached"] == [0] * len(LENGTHS)  # the sound ones too: the tier's breaker is open
    hung, sound = told["asked"]
    assert sound == hung  # nothing was asked of the tier, so nothing was waited for
    (tier,) = told["statistics"]["tiers"]
    timed_out = tier["counts"]["jobs_timed_out"]
    assert timed_out >= 2  # one a prompt, or more if a probe's answer came amid its lookups
    assert tier["counts"]["breaker_opened"] == 1
    assert tier["breaker"] == "OPEN"
    assert told["metrics"]['kvtier:tier_jobs_timed_out{tier="1:fs"}'] == timed_out
    assert told["metrics"]['kvtier:tier_breaker_opened{tier="1:fs"}'] == 1
    assert told["metrics"]['kvtier:tier_breaker_state{tier="1:fs",work="loads"}'] == 1
    quarantined = told["statistics"]["primary"]["quarantined_slots"]
    # All that was asked of the tier, which may still write to it.
    assert quarantined == tier["counts"]["hits"] - tier["counts"]["promotions_dropped"]
    assert 2 <= quarantined <= 2 * BLOCKS
    assert told["metrics"]['kvtier:primary_slots{state="quarantined"}'] == quarantined
    assert told["statistics"]["primary"]["promotion_slots"] == 0
    assert told["left"] == []

    cold, memory = told["stalled"]["rounds"]
    assert cold["tokens"] == memory["tokens"] == seeded["tokens"]
    assert cold["cached"] == [0] * len(LENGTHS)
    assert memory["cached"] == LENGTHS  # what the disk does is nothing to the memory tier
    assert cold["statistics"]["tiers"][0]["counts"]["probes_timed_out"] > 0


def damage(root: Path, files: list[list[str]]) -> None:
    """Flip a byte of each block of prompt 0, cut those of 1, exchange those of 2; 3 stays."""
    for name in files[0]:
        flipped = bytearray((root / name).read_bytes())
        flipped[len(flipped) // 3] ^= 1
        (root / name).write_bytes(flipped)
    for number, name in enumerate(files[1]):
        with (root / name).open("r+b") as file:
            file.truncate((0, 100, 65_536)[number % 3])
    contents = [(root / name).read_bytes() for name in files[2]]
    for name, content in zip(files[2], [contents[-1], *contents[:-1]], strict=True):
        (root / name).write_bytes(content)


def lying(model: str, root: str, full: str, *, pretend_full: bool) -> dict[str, Any]:
    """Read damaged blocks, mend them, then lose the whole folder, while another tier is full."""
    if pretend_full:
        pretend_no_room(full)
    tiers = [fs(root), fs(full, isolation="thread")]  # where the patch holds
    config = kvtier_config(secondary_tiers=tiers, on_reset="keep")
    prompts = prompts_of(LENGTHS)
    told: dict[str, Any] = {}
    with engine(model, config) as running:
        facade = running.manager().facade

        def from_disk(name: str) -> None:
            facade.reset()
            facade.on_reset_flushed()
            told[name] = play_round(running, prompts)

        def until_whole(name: str) -> None:
            """Play until all comes from disk.

            How many rounds that takes depends on which answers of the tier come in time.
            What is read, and met damaged, is what was promoted at once: the blocks behind
            the first damaged one may not be. And a block that is recomputed while its
            fellows are on their way is stored without them.
            """
            for number in range(ROUNDS_MAX):
                from_disk(f"{name} {number}")
                if told[f"{name} {number}"]["cached"] == LENGTHS:
                    break
            told[name] = told.pop(f"{name} {number}")

        from_disk("damaged")
        until_whole("mended")
        shutil.rmtree(root)
        from_disk("vanished")
        until_whole("renewed")
    return told


def pretend_no_room(folder: str) -> None:
    """Do without a filesystem that is full, where none may be mounted."""
    from kvtier_backends.fs.files import BlockFiles

    real = BlockFiles._write

    def write(self: BlockFiles, at: int, temporary: str, block: Any) -> None:
        if self._layout.base.startswith(folder):
            raise OSError(errno.ENOSPC, "no room", temporary)
        real(self, at, temporary, block)

    patch.object(BlockFiles, "_write", write).start()


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[tuple[Path, bool]]:
    """Return a folder with room for a few blocks, and whether it is a filesystem of its own."""
    folder = tmp_path / "full"
    folder.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k,mode=0700", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, check=False).returncode == 0
    yield folder, mounted
    if mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_lies_fills_up_and_vanishes(
    llama: Path, log_folder: Path, seeded: Any, root: Path, full_disk: tuple[Path, bool]
) -> None:
    """Promise 4: damaged blocks are misses, counted, deleted, and stored anew."""
    full, mounted = full_disk
    (namespace,) = (path for path in root.iterdir() if path.is_dir())
    other = namespace.with_name(f"{namespace.name[:-1]}~")
    shutil.copytree(namespace, other)  # another model's blocks, under the same names
    damage(root, seeded["files"])
    told = run_scenario(
        lying,
        log_folder=log_folder,
        model=str(llama),
        root=str(root),
        full=str(full),
        pretend_full=not mounted,
    )
    for name, each in told.items():
        print(name, each["cached"], each["statistics"]["tiers"][0])
    for name, each in told.items():
        assert each["tokens"] == seeded["tokens"], name
        assert_at_rest(each["statistics"])
    assert told["damaged"]["cached"] == [0, 0, 0, 640]
    disk, small = told["damaged"]["statistics"]["tiers"]
    damaged = disk["counts"]["damaged"]
    assert 2 <= damaged <= 2 * BLOCKS  # those of a wrong length aren't even tried
    assert told["damaged"]["metrics"]['kvtier:tier_damaged{tier="1:fs"}'] == damaged
    assert small["counts"]["stores_rejected"] > 0
    assert told["damaged"]["metrics"]['kvtier:tier_stores_rejected{tier="2:fs"}'] > 0

    assert told["mended"]["cached"] == LENGTHS
    mended = told["mended"]["statistics"]["tiers"][0]["counts"]
    assert mended["damaged"] == 2 * BLOCKS  # all of them, and each once: they were deleted

    vanished = told["vanished"]["statistics"]["tiers"][0]["counts"]
    assert vanished["absent"] > 0
    # The other tier has room for some blocks.
    assert told["vanished"]["metrics"][READ] == told["mended"]["metrics"][READ]
    assert sum(told["vanished"]["cached"]) <= FULL_DISK_BLOCKS * 32
    assert told["renewed"]["cached"] == LENGTHS
    # What the other tier has is not written here again.
    assert len(block_files(root)) >= BLOCKS * len(LENGTHS) - FULL_DISK_BLOCKS
