"""Opens a folder: judges its superblock, and truncates or removes segment files."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from kvtier_backends.disk.device import SEGMENT_NAME, Segments, trim_segments
from kvtier_backends.disk.folder.claim import (
    REGION_SLOTS_MIN,
    REGIONS_KEPT_MIN,
    Plan,
    new_superblock,
    plan_folder,
    read_superblock,
    segment_numbers,
    write_superblock,
)
from kvtier_backends.disk.folder.recovery import UNREMARKABLE, Action, Case, folder_case
from kvtier_backends.disk.format import PageRefused, Superblock
from kvtier_backends.disk.opened_files import remove_whatever

if TYPE_CHECKING:
    from collections.abc import Mapping


class Verdict(NamedTuple):
    """The case and layout of a folder, before anything in it is changed."""

    plan: Plan
    superblock: Superblock | None  #: None: the folder starts empty
    case: Case


def judge_folder(
    path: str, capacity_bytes: int, block_bytes: int, tag_bytes: int, region_bytes: int | None
) -> Verdict:
    """Decide the folder's layout: the existing one, if that fits. Raises ``OSError``."""
    wanted = plan_folder(capacity_bytes, block_bytes, tag_bytes, region_bytes)
    try:
        superblock = read_superblock(path)
    except PageRefused as refused:
        return Verdict(wanted, None, folder_case(refused.refusal, layout_fits=False))
    found = plan_folder(capacity_bytes, block_bytes, tag_bytes, superblock.region_bytes)
    found = found._replace(segment_regions=superblock.segment_regions)
    fits = found.geometry.region_bytes == superblock.region_bytes
    if region_bytes is None:
        # Laid out for another capacity or block size, yet good enough to keep its blocks.
        fits = fits and found.regions >= min(REGIONS_KEPT_MIN, wanted.regions)
        fits = fits and found.geometry.slots >= min(REGION_SLOTS_MIN, wanted.geometry.slots)
    else:
        fits = fits and superblock.region_bytes == wanted.geometry.region_bytes
    case = folder_case(None, layout_fits=fits)
    return Verdict(found, superblock, case) if fits else Verdict(wanted, None, case)


def judge_returned_folder(path: str, plan: Plan) -> Verdict:
    """Judge a folder that came back, for a plan that can't be changed any more."""
    try:
        superblock = read_superblock(path)
    except PageRefused as refused:
        return Verdict(plan, None, folder_case(refused.refusal, layout_fits=False))
    fits = superblock.region_bytes == plan.geometry.region_bytes
    fits = fits and superblock.segment_regions == plan.segment_regions
    case = folder_case(None, layout_fits=fits)
    return Verdict(plan, superblock if fits else None, case)


def prepare_folder(path: str, verdict: Verdict) -> tuple[Superblock, Mapping[str, int]]:
    """Prepare the folder as its verdict requires; return its superblock and the counts to add.

    Blocks, and raises ``OSError``.
    """
    counts: Counter[str] = Counter()
    if verdict.case.name not in UNREMARKABLE:
        counts[verdict.case.name] += 1
    numbers = segment_numbers(path)
    if verdict.case.action is Action.START_EMPTY or verdict.superblock is None:
        for number in numbers:
            counts["segments_removed"] += remove_whatever(f"{path}/{SEGMENT_NAME.format(number)}")
        superblock = new_superblock(verdict.plan)
        write_superblock(path, superblock)
        return superblock, counts
    plan = verdict.plan
    segments = Segments(path, plan.geometry.region_bytes, plan.segment_regions)
    cut = trim_segments(segments, plan.regions, highest=max(numbers, default=-1))
    if cut:
        counts["segments_truncated"] += cut
    return verdict.superblock, counts
