"""Defines the folder of small files that the protocol uses. Tests have their own."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Folder(ABC):
    """An open folder: once it is removed, every call fails, even if its name is used again.

    Calls raise ``OSError``: ``FileNotFoundError`` if the name, or the folder itself, is gone.
    """

    descriptor: int

    @abstractmethod
    async def names(self) -> list[str]:
        """Return the names in it."""

    @abstractmethod
    async def read(self, name: str) -> bytes:
        """Return a small file's bytes."""

    @abstractmethod
    async def write(self, name: str, data: bytes) -> None:
        """Write a small file in one step: readers see the previous one, or this one."""

    @abstractmethod
    async def make_folder(self, name: str) -> Folder:
        """Create a folder, and open it. Raises ``FileExistsError`` if it exists."""

    @abstractmethod
    async def open_folder(self, name: str) -> Folder:
        """Open a folder."""

    @abstractmethod
    async def remove(self, name: str) -> None:
        """Remove a file."""

    @abstractmethod
    async def remove_folder(self, name: str) -> None:
        """Remove a folder, which must be empty."""


async def ensure_folder(folder: Folder, name: str) -> Folder:
    """Open a folder, and create it if missing."""
    try:
        return await folder.open_folder(name)
    except FileNotFoundError:
        pass
    try:
        return await folder.make_folder(name)
    except FileExistsError:
        return await folder.open_folder(name)


async def clear(parent: Folder, name: str) -> None:
    """Remove a folder and its contents, until nothing can be put there any more.

    Raises ``OSError``, also if others keep adding files.
    """
    try:
        folder = await parent.open_folder(name)
    except FileNotFoundError:
        return
    for each in await folder.names():
        try:
            await folder.remove(each)
        except FileNotFoundError:
            continue
        except (IsADirectoryError, PermissionError):
            await clear(folder, each)
    try:
        await parent.remove_folder(name)
    except FileNotFoundError:
        return
