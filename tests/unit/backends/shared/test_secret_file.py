"""A file with a secret is read by whoever owns it alone, and no refusal tells what it says."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kvtier.errors import ConfigError
from kvtier_backends.shared.secrets import SECRET_BYTES_MAX, read_secret_file
from tests.support.needs import needs

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "hunter2-hunter2"
SOMEBODY = 12345


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text(SECRET)
    file.chmod(0o600)
    return file


def test_a_file_of_ones_own_is_read(file: Path) -> None:
    assert read_secret_file(str(file)) == SECRET


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_file_that_others_have_a_right_to_is_refused(file: Path, mode: int) -> None:
    if os.geteuid() == 0:
        os.chown(file, SOMEBODY, SOMEBODY)
    file.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_secret_file(str(file))


@needs("root")
@pytest.mark.parametrize("mode", [0o440, 0o640])
def test_a_group_may_read_what_is_roots(file: Path, mode: int) -> None:
    """Such are the files of a Kubernetes Secret, for a pod with fsGroup."""
    file.chmod(mode)
    assert read_secret_file(str(file)) == SECRET


@needs("root")
@pytest.mark.parametrize("mode", [0o444, 0o660, 0o604])
def test_what_is_roots_is_refused_if_all_may_read_it_or_a_group_may_write(
    file: Path, mode: int
) -> None:
    file.chmod(mode)
    with pytest.raises(ConfigError, match="fsGroup"):
        read_secret_file(str(file))


def test_what_is_no_text_is_refused_and_not_shown(file: Path) -> None:
    file.write_bytes(SECRET.encode() + b"\xff")
    with pytest.raises(ConfigError, match="UTF-8") as refused:
        read_secret_file(str(file))
    assert SECRET not in str(refused.value)


def test_no_more_is_read_than_a_secret_has(file: Path) -> None:
    file.write_bytes(b"x" * (SECRET_BYTES_MAX + 1))
    assert len(read_secret_file(str(file))) == SECRET_BYTES_MAX


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert read_secret_file(str(tmp_path / "pipe")) == ""
