"""Names the small files, and the blocks in the manifest.

A block is identified by two numbers: a hash of its path below the root, and its leaf, the folder
that it is in. To find the file again, the leaf is listed, and each name hashed.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import xxhash

SPACE: Final = "kvtier_space"  #: in the root; not a namespace's name: those end in a digest
TERMS: Final = "terms"
REMOVED: Final = "removed"
MANIFEST: Final = "manifest"
LEASE: Final = "lease"
RECEIPT: Final = "receipt"
WANT: Final = "want-"
USES: Final = "uses-"

_TERM = re.compile(r"[0-9]{10}")
_GRANT = re.compile(r"grant-([0-9a-f]{12}-[0-9]+-[0-9]+-[0-9a-f]{8})-([0-9]{1,10})-([0-9]{1,19})")
_FAN = re.compile(r"([0-9a-f_]{3})/([0-9a-f_]{2})(?:_g([0-9]{1,5}))?")
_PADDING: Final = "_"
_NAMESPACE_SHIFT: Final = 40
_DIGITS_SHIFT: Final = 37
_GROUP_SHIFT: Final = 20
_GROUP_MAX: Final = (1 << 17) - 2
_FAN_DIGITS: Final = 5


class GrantName(NamedTuple):
    """The parsed name of a grant's folder."""

    writer: str
    number: int
    size: int  #: bytes of files that may be stored with it

    def __str__(self) -> str:
        return f"grant-{self.writer}-{self.number}-{self.size}"


class Location(NamedTuple):
    """The location of a block."""

    block: int  #: hash of its path
    leaf: int


def term_name(number: int) -> str:
    """Return the folder name of a term."""
    return f"{number:010d}"


def term_numbers(names: list[str]) -> list[int]:
    """Return the numbers of the terms among these names, in order."""
    return sorted(int(name) for name in names if _TERM.fullmatch(name))


def parse_grant_untrusted(name: str) -> GrantName | None:
    """Return the parsed name of a grant's folder, None if it is not one."""
    found = _GRANT.fullmatch(name)
    return GrantName(found[1], int(found[2]), int(found[3])) if found else None


def block_number(blocks_name: str, name: str) -> int:
    """Return the number of a block file, named below its namespace's folder."""
    return xxhash.xxh3_64_intdigest(f"{blocks_name}/{name}".encode(errors="surrogateescape"))


def namespace_number(blocks_name: str) -> int:
    """Return 24 bits that stand for a namespace's folder."""
    return (
        xxhash.xxh3_64_intdigest(blocks_name.encode(errors="surrogateescape")) >> _NAMESPACE_SHIFT
    )


def locate(blocks_name: str, name: str) -> Location | None:
    """Return a block's location, None if no layout has a folder of this name."""
    folder, _, _last = name.rpartition("/")
    leaf = leaf_number(blocks_name, folder)
    return None if leaf is None else Location(block_number(blocks_name, name), leaf)


def leaf_number(blocks_name: str, folder: str) -> int | None:
    """Return the number of a leaf, ``hhh/hh`` or ``hhh/hh_gN`` below a namespace's folder."""
    found = _FAN.fullmatch(folder)
    if found is None:
        return None
    digits = (found[1] + found[2]).rstrip(_PADDING)
    group = 0 if found[3] is None else int(found[3]) + 1
    is_odd = _PADDING in digits or group > _GROUP_MAX
    if is_odd or (found[3] is not None and str(int(found[3])) != found[3]):
        return None
    fan = int(digits, 16) if digits else 0
    return (
        namespace_number(blocks_name) << _NAMESPACE_SHIFT
        | len(digits) << _DIGITS_SHIFT
        | group << _GROUP_SHIFT
        | fan
    )


def leaf_folder(leaf: int) -> tuple[int, str]:
    """Return a leaf's namespace number and its folder: the inverse of ``leaf_number``."""
    count = leaf >> _DIGITS_SHIFT & 7
    group = leaf >> _GROUP_SHIFT & (1 << 17) - 1
    fan = leaf & (1 << _GROUP_SHIFT) - 1
    digits = f"{fan:0{count}x}" if count else ""
    digits = digits.ljust(_FAN_DIGITS, _PADDING)
    suffix = f"_g{group - 1}" if group else ""
    return leaf >> _NAMESPACE_SHIFT, f"{digits[:3]}/{digits[3:5]}{suffix}"
