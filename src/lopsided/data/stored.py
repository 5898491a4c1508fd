"""Images that are not files of this machine: files behind an address, such as s3://bucket/photos, cells, and bytes.

Cells of a table beside each image, such as age, sex and site, go with its path.

An address is opened through fsspec. Nothing is fetched unless the user names an address. An image is read whole, into
memory, hashed and decoded like a file, and not written to disk. (``simplecache::s3://...`` lets fsspec keep copies.)
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path, PosixPath, PurePosixPath, WindowsPath
from typing import Any, TypeAlias

from lopsided.errors import DataError, LopsidedError, MissingDependencyError, sentence
from lopsided.recipe.blocks import Cells, column_name

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*(::[a-z][a-z0-9+.-]*)*://", re.IGNORECASE)
_PACKAGES = {"s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3"), "gs": ("gcsfs", "gs"), "gcs": ("gcsfs", "gs")}
"""For each kind of address the package that fsspec needs, and the extra that installs it."""


def is_address(data: str | os.PathLike[str]) -> bool:
    """Return whether a text is an address, such as hf://datasets/owner/name.

    >>> is_address("s3://bucket/photos"), is_address("photos/cats"), is_address("C:/photos")
    (True, False, False)
    """
    return _ADDRESS.match(os.fspath(data)) is not None


class Stored(ABC):
    """An image that can be read whole. It is known by its address."""

    address: str
    cells: tuple[str, ...] = ()
    """Cells of a table that stand beside the image (``lopsided.data.stored``)."""

    @abstractmethod
    def read(self) -> bytes:
        """Return the content. Raise an OSError or a DataError if it cannot be read."""

    @property
    def suffix(self) -> str:
        """The end of the name, such as ".png"."""
        return PurePosixPath(self.address).suffix

    def __fspath__(self) -> str:
        return self.address

    def __str__(self) -> str:
        return self.address

    def __hash__(self) -> int:
        return hash(self.address)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stored) and self.address == other.address


ImagePath: TypeAlias = Path | Stored
"""Where an image is."""


class Sent(Stored):
    """An image that another program sent. Its address is a name that this program gave it."""

    def __init__(self, address: str, content: bytes, cells: tuple[str, ...] = ()) -> None:
        self.address, self._content, self.cells = address, content, cells

    def read(self) -> bytes:
        """Return what was sent."""
        return self._content


class RemoteFile(Stored):
    """A file of a file system of fsspec."""

    def __init__(self, system: Any, path: str, address: str) -> None:
        self._system, self._path, self.address = system, path, address

    def read(self) -> bytes:
        """Fetch the file."""
        with reading(self.address):
            return bytes(self._system.cat_file(self._path))


class Place:
    """A file or folder behind an address."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")

    def __str__(self) -> str:
        return self.address

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        try:
            import fsspec

            system, root = fsspec.core.url_to_fs(self.address)
            return system, root.rstrip("/")
        except (ImportError, ValueError) as error:
            protocol = self.address.partition("://")[0].rpartition("::")[2].lower()
            if protocol not in _PACKAGES:
                raise DataError(f"Cannot open {self.address} ({' '.join(str(error).split())}).") from error
            package, extra = _PACKAGES[protocol]
            do = f"Run pip install 'lopsided[{extra}]'."
            raise MissingDependencyError(f"{protocol}:// needs {package}, which is not installed. {do}") from error

    @property
    def name(self) -> str:
        """The last part of the address."""
        return posixpath.basename(self.address.partition("://")[2].rstrip("/")) or self.address

    def is_file(self) -> bool:
        """Return whether a file is there. Raise if nothing is."""
        system, root = self._opened
        with reading(self.address):
            return bool(system.info(root)["type"] == "file")

    def file(self, name: str) -> RemoteFile:
        """Return the file of this name in the folder; of an empty name the file itself."""
        system, root = self._opened
        return RemoteFile(
            system, f"{root}/{name}" if name else root, f"{self.address}/{name}" if name else self.address
        )

    def above(self) -> Place:
        """Return the folder of a file."""
        return Place(self.address.rpartition("/")[0])

    @cached_property
    def names(self) -> list[str]:
        """The names of all files below the folder, sorted. They are listed once."""
        system, root = self._opened
        with reading(self.address):
            found = system.find(root)
        return sorted(posixpath.relpath(path, root) for path in found)

    def open(self, name: str) -> Any:
        """Open a file in the folder, for reading of parts of it."""
        system, root = self._opened
        return system.open(f"{root}/{name}" if name else root, "rb")


@contextmanager
def reading(address: str) -> Iterator[None]:
    """Turn any error of a file system into a DataError: each has exceptions of its own."""
    try:
        yield
    except LopsidedError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{address} does not exist.") from error
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"Cannot read {address} ({reason:.300}).") from error


if sys.platform == "win32":
    _Path = WindowsPath
else:
    _Path = PosixPath


class DescribedPath(_Path):
    """The path of an image in a table, with cells of its row. It is equal to the path without them."""

    cells: Cells = ()

    @classmethod
    def of(cls, path: Path, cells: Sequence[str]) -> DescribedPath:
        """Return a path with its cells."""
        found = cls(path)
        found.cells = tuple(cells)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return DescribedPath.of, (Path(self), self.cells)


def cells_of(path: ImagePath) -> Cells:
    """Return the cells that go with a path; none if it is not that of a table with columns."""
    return path.cells if isinstance(path, DescribedPath | Stored) else ()


def described(path: ImagePath, cells: Sequence[str]) -> ImagePath:
    """Return a path with its cells; unchanged without any."""
    if not cells:
        return path
    if isinstance(path, Stored):
        path.cells = tuple(cells)
        return path
    return DescribedPath.of(path, cells)


def rows_of(where: object, columns: Mapping[str, Sequence[str]], asked: Sequence[str]) -> list[Cells]:
    """Return the cells of the columns that were ``asked`` for, row by row. Raise if a column is missing."""
    names = [column_name(text) for text in asked]
    missing = [name for name in names if name not in columns]
    if missing:
        has = f"{', '.join(columns)} in {where}"
        raise DataError(sentence(f"a table must have the columns {', '.join(names)} beside each image", f"{has:.300}"))
    return list(zip(*(columns[name] for name in names), strict=True))


def no_columns(where: object, asked: Sequence[str]) -> DataError:
    """Return the error that ``where`` is no table with the columns that were ``asked`` for."""
    names = ", ".join(column_name(text) for text in asked)
    must = f"the columns {names} must stand beside each image, in a table (CSV or Parquet) with the column path"
    return DataError(sentence(must, where))
