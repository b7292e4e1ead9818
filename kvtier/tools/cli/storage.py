"""Opens the storage that a command names: a folder, an address, or an entry of secondary_tiers.

Shared by ``ls``, ``fsck``, ``purge`` and ``evict``. The classes under the entry point
``kvtier.offline`` recognize the type of storage.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvtier.errors import ConfigError, StoreFault
from kvtier.plugin_api.offline import unreadable
from kvtier.plugin_api.options import did_you_mean, shown
from kvtier.settings.plugins import offline_classes
from kvtier.tools.answering import ANSWER_S_MAX, check_answers, silent_option
from kvtier.tools.terminal import check_can_report

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvtier.plugin_api.offline import Offline

ENTRY: Final = "{"


@contextmanager
def opened(
    place: str, json_file: str | None, encryption_key_file: str | None = None
) -> Iterator[Offline]:
    """Yield the storage at ``place``; its faults become ``ConfigError``.

    Raises ``Misuse`` at once if the figures could not be written later, or if the storage hangs.
    """
    check_can_report(json_file)
    storage = _storage_at(place)
    if encryption_key_file is not None:
        storage.use_keys(encryption_key_file)
    try:
        yield storage
    except StoreFault as problem:
        reason = str(problem).rstrip(".")
        raise ConfigError(
            f"{storage.place} can't be looked at: {reason}. Check the server, or give an entry "
            "of secondary_tiers with the credentials that it needs."
        ) from problem
    except OSError as problem:
        raise unreadable(storage.place, problem) from problem


def _storage_at(place: str) -> Offline:
    classes = offline_classes()
    if place.lstrip().startswith(ENTRY):
        return _of_entry(place, classes)
    if "://" not in place:
        _check_folder(place, classes)
    try:
        found = [storage for each in classes.values() if (storage := each.at(place))]
    except OSError as problem:
        raise unreadable(place, problem) from problem
    if len(found) != 1:
        by = "by more than one type of tier" if found else "as the storage of a tier"
        fault = f"is {'' if found else 'not '}recognized {by}"
        raise ConfigError(f"{place} {fault}. {_what_to_name(classes)}")
    return found[0]


def _of_entry(place: str, classes: Mapping[str, type[Offline]]) -> Offline:
    try:
        entry = json.loads(place)
    except (ValueError, RecursionError) as problem:
        raise ConfigError(
            f"{place} is no JSON ({problem}). Give one entry of secondary_tiers."
        ) from None
    kind = entry.pop("type", None)
    if not isinstance(kind, str) or kind not in classes:
        meant = did_you_mean(kind, classes) if isinstance(kind, str) else ""
        raise ConfigError(
            f"{shown(place)} is no tier that can be listed.{meant} {_what_to_name(classes)}"
        )
    silent = silent_option(entry)
    if silent is not None:
        raise ConfigError(
            f"{silent}={shown(entry[silent])} has not answered for {ANSWER_S_MAX:g} s: its storage "
            "hangs, or is very slow. Mend the storage, then try again."
        )
    return classes[kind].from_options(entry)


def _check_folder(path: str, classes: Mapping[str, type[Offline]]) -> None:
    """Raise ``ConfigError`` if it is not a folder, or can't be read."""
    check_answers(path)
    try:
        with os.scandir(path):
            return
    except FileNotFoundError:
        fault = "does not exist"
    except NotADirectoryError:
        fault = "is not a folder"
    except (OSError, ValueError) as problem:
        if isinstance(problem, OSError):
            raise unreadable(path, problem) from problem
        fault = f"is no name of a folder ({problem})"
    raise ConfigError(f"{path} {fault}. {_what_to_name(classes)}")


def _what_to_name(classes: Mapping[str, type[Offline]]) -> str:
    return (
        "Name a tier's folder, its address, or its entry of secondary_tiers as JSON. Types that "
        f"can be listed: {', '.join(sorted(classes))}."
    )
