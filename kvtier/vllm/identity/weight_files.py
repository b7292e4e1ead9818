"""Identifies a model's weight files by samples: copies agree, and changed weights don't.

Reading all of them would take as long as loading the model. Training, and merging an adapter,
change numbers all over each tensor that they touch, though perhaps only a few in a hundred: so each
tensor of a safetensors file is sampled in several places, at least once a mebibyte. Other files
count as one long tensor. The tensors of models with very many are sampled in fewer places.

A write into a file in place changes its modification time, which reveals each change. That holds
on one machine only: copies of one model differ in it (``WeightFiles.local_digest``).
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.settings.weight_sources import is_weight_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

SAMPLE_BYTES: Final = 4096
STEP_BYTES: Final = 1 << 20
SAMPLES_A_TENSOR_MIN: Final = 4
SAMPLES_MAX: Final = 1 << 17  #: of all files, half a gigabyte; models of more tensors exceed it
_SAMPLES_A_TURN: Final = 256
_THREADS: Final = 16  #: remote storage serves this many at once
_DIGEST_HEX_DIGITS: Final = 32
_HEADER_LENGTH: Final = struct.Struct("<Q")
_HEADER_BYTES_MAX: Final = 100_000_000  #: of the safetensors format


class WeightFiles(NamedTuple):
    """The files of one model."""

    files: int
    size_bytes: int
    digest: str  #: of names, sizes and samples: the same for each copy
    local_digest: str  #: of their times and inodes: a new one after each change


class _Span(NamedTuple):
    """Bytes of a file that are sampled in the same way: a tensor, or the whole file."""

    start: int
    size: int


class _File(NamedTuple):
    name: str
    path: Path
    state: os.stat_result
    head: bytes  #: read as a whole
    spans: Sequence[_Span]


def weight_files(model: Path) -> WeightFiles | None:
    """Sample the weights in a folder, subfolders too, or in one file; None: there are none.

    Reads about 4 KiB of each mebibyte, by several threads. Raises ``OSError``.
    """
    files = [_look_at(name, path) for name, path in _find(model)]
    if not files:
        return None
    known, local = hashlib.sha256(), hashlib.sha256()
    for beside in _beside(files) if model.is_dir() else ():
        known.update(hashlib.sha256(beside).digest())
    places = _places(files)
    descriptors: list[int] = []
    try:
        for file in files:
            descriptors.append(os.open(file.path, os.O_RDONLY | os.O_CLOEXEC))
            known.update(f"{file.name}\0{file.state.st_size}\0".encode("utf-8", "surrogateescape"))
            known.update(hashlib.sha256(file.head).digest())
            local.update(
                f"{file.name}\0{file.state.st_size}\0{file.state.st_mtime_ns}\0"
                f"{file.state.st_ino}\0".encode("utf-8", "surrogateescape")
            )

        def read(turn: Sequence[tuple[int, int, int]]) -> bytes:
            digest = hashlib.sha256()
            for number, at, size in turn:
                digest.update(os.pread(descriptors[number], size, at))
            return digest.digest()

        with ThreadPoolExecutor(_THREADS, "kvtier-weights") as threads:
            for digest in threads.map(read, _turns(places)):
                known.update(digest)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return WeightFiles(
        len(files),
        sum(file.state.st_size for file in files),
        known.hexdigest()[:_DIGEST_HEX_DIGITS],
        local.hexdigest()[:_DIGEST_HEX_DIGITS],
    )


def _find(model: Path) -> list[tuple[str, Path]]:
    """Return the weight files in the order of their names, below the folder."""
    if model.is_file():
        return [(model.name, model)]
    found = []
    seen = set()
    for folder, folders, names in os.walk(model, followlinks=True, onerror=_raise):
        folders[:] = [each for each in folders if not each.startswith(".")]
        real = os.path.realpath(folder)
        if real in seen:  # links may lead in circles
            folders.clear()
            continue
        seen.add(real)
        paths = [Path(folder, name) for name in names]
        found += [(str(path.relative_to(model)), path) for path in paths if is_weight_file(path)]
    return sorted(found)


def _raise(problem: OSError) -> None:
    raise problem


def _look_at(name: str, path: Path) -> _File:
    state = path.stat()
    head, spans = _tensors_of(path, state.st_size) if path.suffix == ".safetensors" else (b"", ())
    return _File(name, path, state, head, spans or [_Span(0, state.st_size)])


def _tensors_of(path: Path, size: int) -> tuple[bytes, Sequence[_Span]]:
    """Return the header and the tensors' spans; both empty if it is not a safetensors file."""
    with path.open("rb") as file:
        length = file.read(_HEADER_LENGTH.size)
        if len(length) < _HEADER_LENGTH.size:
            return b"", ()
        (header_bytes,) = _HEADER_LENGTH.unpack(length)
        start = _HEADER_LENGTH.size + header_bytes
        if header_bytes > _HEADER_BYTES_MAX or start > size:
            return b"", ()
        header = file.read(header_bytes)
    try:
        tensors = [each for name, each in json.loads(header).items() if name != "__metadata__"]
        places = sorted((int(a), int(b)) for a, b in (each["data_offsets"] for each in tensors))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return b"", ()
    spans = [_Span(start + a, b - a) for a, b in places if 0 <= a < b <= size - start]
    return header, spans


def _beside(files: Sequence[_File]) -> Iterator[bytes]:
    """Yield the content of files that decide how weights are used: indexes, and model code."""
    for folder in sorted({file.path.parent for file in files}):
        for name in ("*.index.json", "*.py"):
            for path in sorted(folder.glob(name)):
                yield path.read_bytes()


def _places(files: Sequence[_File]) -> list[tuple[int, int, int]]:
    """Return the samples to read: the file's number, the offset and the size."""
    each, step = SAMPLES_A_TENSOR_MIN, STEP_BYTES
    spans = [span for file in files for span in file.spans]
    if sum(_count(span.size, each, step) for span in spans) > SAMPLES_MAX:
        each = 1
        step = max(step, -(-sum(span.size for span in spans) // (SAMPLES_MAX // 2)))
    return [
        (number, at, size)
        for number, file in enumerate(files)
        for span in file.spans
        for at, size in _samples(span, each, step)
    ]


def _count(size: int, each: int, step: int) -> int:
    return max(each, -(-size // step))


def _samples(span: _Span, each: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield offsets and sizes: the first bytes, the last ones, and evenly between them."""
    count = _count(span.size, each, step)
    if span.size <= count * SAMPLE_BYTES:
        yield span
        return
    room = span.size - SAMPLE_BYTES
    if count == 1:
        yield span.start + room // 2, SAMPLE_BYTES
        return
    for index in range(count):
        yield span.start + room * index // (count - 1), SAMPLE_BYTES


def _turns(places: Iterable[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    rest = iter(places)
    while turn := list(islice(rest, _SAMPLES_A_TURN)):
        yield turn
