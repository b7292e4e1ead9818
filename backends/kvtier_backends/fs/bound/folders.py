"""What the protocol needs of a folder for small files. Tests have one of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Folder(ABC):
    """An open folder: once it is removed, every call fails, whatever has its name by then.

    Calls raise ``OSError``: ``FileNotFoundError`` where the name, or the folder itself, is gone.
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
        """Write a small file in one step: others see the one before, or this one."""

    @abstractmethod
    async def make_folder(self, name: str) -> Folder:
        """Make a folder, and open it. Raises ``FileExistsError`` if it is there."""

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
    """Open a folder, and make it if it is missing."""
    try:
        return await folder.open_folder(name)
    except FileNotFoundError:
        pass
    try:
        return await folder.make_folder(name)
    except FileExistsError:
        return await folder.open_folder(name)


async def clear(parent: Folder, name: str) -> None:
    """Remove a folder and what is in it, until nothing can be put there any more.

    Raises ``OSError``, also if others put things there all the time.
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
