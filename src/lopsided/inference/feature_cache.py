"""Features on disk, so that each image goes through a frozen encoder once.

A feature vector is found by the SHA-256 of the image, in a folder for each combination of encoder or feature block,
weights, preprocessing, view and engine. So runs, folds and methods share features, an encoder shares its own with and
without blocks, and a change of any of these never reads an old feature. A folder holds packs: safetensors files with up
to ``PACK`` vectors and their keys. A pack is written under a temporary name, renamed, and never changed. So a kill
leaves no half-written pack, and two writers do not disturb each other. Each pack holds a checksum; a damaged pack is
removed and its features are computed again.

The cache is in ``$LOPSIDED_CACHE``, by default the user's cache folder. If it is larger than its limit, the packs that
were not used for the longest time are removed. A disk error never stops a run; it only disables the cache.

Whoever can write to the cache can change the answers of models, so that it is as trusted as the code: its folder is
made for its owner alone, and one that others may write is refused. Only files that the cache wrote are ever removed:
they have its names, lie in folders with its marker, and are reached through no link.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import PIL

from lopsided import __version__
from lopsided.data.decoding import Header
from lopsided.errors import InputError, RunError, sentence
from lopsided.files import (
    atomic_write,
    check_regular,
    disk_errors,
    make_folder,
    reading_tensors,
    remove_empty,
    remove_leftovers,
)

Features = npt.NDArray[np.float32]
T = TypeVar("T")

FORMAT = 1
GRAPHS = "graphs-1"
"""The folder of the graphs of encoders; see ``engine``."""
PACK = 512
"""Vectors in a pack. A killed run loses at most the vectors of one pack."""
DEFAULT_GIB = 4.0
MARKER = "CACHEDIR.TAG"
"""Marks a folder of the cache; backup programs know this name and leave the folder out."""
_MARK = "Signature: 8a477f597d28d172789f06886806bc55\n# This folder is a cache of lopsided. It can be removed.\n"
_KEY, _SUFFIX = "lopsided", ".safetensors"
_OWN_NAME = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Space:
    """The features of one encoder with one preprocessing. ``facts`` are all values that the features depend on."""

    root: Path
    facts: Mapping[str, Any]
    _index: PackIndex = field(default_factory=lambda: PackIndex(_read_keys), compare=False, repr=False)

    @cached_property
    def folder(self) -> Path:
        """The folder of the packs."""
        text = json.dumps({"format": FORMAT, **self.facts}, sort_keys=True)
        return self.root / f"features-{FORMAT}" / hashlib.sha256(text.encode()).hexdigest()[:32]

    def fetch(
        self, digests: Sequence[str], width: int, into: Features | None = None
    ) -> tuple[Features, npt.NDArray[np.bool_]]:
        """Return an array (n, width) with the features that are in the cache, and which rows these are.

        They are written into a given array of zeros, if there is one.
        """
        features = np.zeros((len(digests), width), dtype=np.float32) if into is None else into
        found = np.zeros(len(digests), dtype=np.bool_)
        keys = [bytes.fromhex(digest) for digest in digests]
        wanted: dict[Path, list[int]] = {}
        for row, path in enumerate(self._index.find(self.folder, keys)):
            if path is not None:
                wanted.setdefault(path, []).append(row)
        for path, rows in wanted.items():
            pack = _read_pack(path, width)
            if pack is None:
                continue
            places = {key: place for place, key in enumerate(pack[0])}
            for row in rows:
                if keys[row] in places:
                    features[row], found[row] = pack[1][places[keys[row]]], True
        return features, found

    def __contains__(self, digest: str) -> bool:
        return self._index.find(self.folder, [bytes.fromhex(digest)]) != [None]

    def everything(self, width: int) -> tuple[npt.NDArray[np.bytes_], Features]:
        """Return all digests in the cache, as sorted bytes, and their rows. This is for short rows only."""
        keys, rows = [np.empty(0, "S32")], [np.empty((0, width), dtype=np.float32)]
        for path in _packs(self.folder):
            pack = _read_pack(path, width)
            if pack is not None:
                keys.append(np.frombuffer(b"".join(pack[0]), "S32"))
                rows.append(pack[1])
        joined, places = np.unique(np.concatenate(keys), return_index=True)
        return joined, np.concatenate(rows)[places]

    def store(self, digests: Sequence[str], features: Features) -> None:
        """Write one pack. Raise a RunError if the disk does not allow it."""
        from safetensors.numpy import save

        keys = np.frombuffer(b"".join(map(bytes.fromhex, digests)), dtype=np.uint8).reshape(len(digests), -1)
        content: dict[str, npt.NDArray[Any]] = {"keys": keys, "features": np.ascontiguousarray(features, np.float32)}
        about = {"format": FORMAT, "sha256": _checksum(content), **self.facts}
        data = save(content, {_KEY: json.dumps(about, sort_keys=True)})
        make_cache_folder(self.folder.parent)
        make_folder(self.folder)
        atomic_write(self.folder / f"{hashlib.sha256(data).hexdigest()[:32]}{_SUFFIX}", data)
        self._index.forget_time()


class Shelf:
    """One kind of rows in the cache, by the SHA-256 of their images. Without a cache, it stays empty.

    ``columns`` are the widths and facts of groups of columns. Each group has a space of its own, so that models share
    the columns that they have in common. Rows are written in packs, and ``flush`` writes the last of them. A disk error
    is no error: ``problem`` says what happened, and nothing is written any more.
    """

    def __init__(self, columns: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        root, widths = cache_root(), [width for width, _ in columns]
        self.root, self.problem = root, None if root is not None else "there is no cache"
        self.width, self._ends = sum(widths), np.cumsum(widths).tolist()
        self.spaces = [] if root is None else [Space(root, facts) for _, facts in columns]
        self._there: list[set[str]] = [set() for _ in self.spaces]
        """Images of which each space has its columns although another space lacks its own."""
        self._waiting: list[tuple[list[str], Features]] = []
        for space in self.spaces:
            tidy(space)

    @property
    def is_begun(self) -> bool:
        """Whether rows were written, now or by an earlier process."""
        return bool(self.spaces) and all(space.folder.is_dir() for space in self.spaces)

    def __contains__(self, digest: str) -> bool:
        return bool(self.spaces) and all(digest in space for space in self.spaces)

    def fetch(self, digests: Sequence[str]) -> tuple[Features, npt.NDArray[np.bool_]]:
        """Return an array (n, width) with the rows that are in the cache, and which rows have all columns."""
        rows, whole = np.zeros((len(digests), self.width), dtype=np.float32), np.zeros(len(digests), dtype=np.bool_)
        if not self.spaces:
            return rows, whole
        parts = zip(self.spaces, self._split(rows), strict=True)
        found = np.stack([space.fetch(digests, columns.shape[1], columns)[1] for space, columns in parts])
        whole = np.logical_and.reduce(found)
        for some, there in zip(found & ~whole, self._there, strict=True):
            there.update(digests[row] for row in np.flatnonzero(some).tolist())
        return rows, whole

    def everything(self) -> tuple[npt.NDArray[np.bytes_], Features]:
        """Return all digests, as sorted bytes, and their rows. This is for few and short columns of one group."""
        if not self.spaces:
            return np.empty(0, "S32"), np.empty((0, self.width), dtype=np.float32)
        (space,) = self.spaces
        return space.everything(self.width)

    def _split(self, rows: Features) -> list[Features]:
        return np.split(rows, self._ends[:-1], axis=1)

    def keep(self, digests: Sequence[str], rows: Features) -> None:
        """Add rows."""
        if self.problem is None and len(digests):
            self._waiting.append((list(digests), np.array(rows, dtype=np.float32)))
            if sum(len(keys) for keys, _ in self._waiting) >= PACK:
                self.flush()

    def flush(self) -> None:
        """Write the rows that wait."""
        waiting, self._waiting = self._waiting, []
        if not waiting or self.root is None:
            return
        digests = [digest for keys, _ in waiting for digest in keys]
        parts = self._split(np.concatenate([rows for _, rows in waiting]))
        try:
            for space, there, columns in zip(self.spaces, self._there, parts, strict=True):
                lacking = [row for row, digest in enumerate(digests) if digest not in there]
                if lacking:
                    space.store([digests[row] for row in lacking], columns[lacking])
            trim(self.root, cache_limit())
        except RunError as error:
            self.problem = str(error)


def cache_root() -> Path | None:
    """Return the folder of the cache; None if the cache is disabled by a limit of 0."""
    if cache_limit() == 0:
        return None
    given = os.environ.get("LOPSIDED_CACHE")
    root = Path(given) if given else None
    with suppress(RuntimeError):  # The user may have no home folder.
        root = root or _user_folder() / "lopsided"
    if root is not None:
        _check_private(root)
    return root


def _check_private(root: Path) -> None:
    """Raise if other users may write to the cache, or if it belongs to one of them."""
    try:
        facts = root.stat()
    except OSError:
        return
    if os.name == "posix" and (facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or facts.st_uid != os.getuid()):
        raise InputError(
            f"Other users can change the cache {root}, and with it the answers of models. Run chmod 700 on it, or set "
            "LOPSIDED_CACHE to a folder of your own."
        )


def make_cache_folder(folder: Path) -> None:
    """Create a folder of the cache below its root, for the owner alone, with the marker that allows to remove files."""
    root = folder.parent
    if not root.exists():
        make_folder(root.parent)
        with disk_errors(root):
            root.mkdir(mode=0o700, exist_ok=True)
    make_folder(folder)
    if not (folder / MARKER).exists():
        atomic_write(folder / MARKER, _MARK)


def cache_limit() -> int:
    """Return the largest size of the cache in bytes, from ``$LOPSIDED_CACHE_GIB``."""
    text = os.environ.get("LOPSIDED_CACHE_GIB", "")
    try:
        number = float(text) if text else DEFAULT_GIB
    except ValueError:
        number = -1.0
    if not (math.isfinite(number) and number >= 0):
        must = "LOPSIDED_CACHE_GIB must be a number >= 0"
        raise InputError(sentence(must, f"{text!r:.80}", "Use 0 to disable the cache."))
    return int(number * 2**30)


def trim(root: Path, limit: int) -> int:
    """Remove the packs that were not used for the longest time until the cache fits. Return their number."""
    sizes: list[tuple[float, int, Path]] = []
    for path in _all_packs(root):
        with suppress(OSError):
            facts = path.stat()
            sizes.append((facts.st_mtime, facts.st_size, path))
    total, removed = sum(size for _, size, _ in sizes), 0
    for _, size, path in sorted(sizes):
        if total <= limit:
            break
        with suppress(OSError):
            path.unlink()
            total, removed = total - size, removed + 1
    return removed


def list_cache(root: Path) -> list[dict[str, Any]]:
    """Describe the content of the cache: encoder, engine, number of images and bytes of each space."""
    found = []
    for folder in _plain_folders(root / f"features-{FORMAT}"):
        number, size = 0, 0
        about: dict[str, Any] = {}
        for path in _packs(folder):
            keys = _read_keys(path)
            about = about or _about(path)
            with suppress(OSError):
                size += path.stat().st_size
            number += len(keys or ())
        if number:
            names = ("encoder", "image_size", *(["view"] if "view" in about else []), "engine")
            whose = " ".join(dict.fromkeys(str(about[name]) for name in ("encoder", "block") if name in about))
            facts = {name: about.get(name) for name in names} | {"encoder": whose}
            found.append({**facts, "images": number, "bytes": size})
    sizes = []
    for path in root.glob(f"{GRAPHS}/*{_SUFFIX}"):
        with suppress(OSError):  # Another process may remove it.
            sizes.append(path.stat().st_size)
    if sizes:
        about = {"encoder": "graphs of encoders", "image_size": None, "engine": "onnxruntime"}
        found.append({**about, "images": 0, "bytes": sum(sizes)})
    return found


def empty_cache(root: Path) -> int:
    """Remove all features, including those of other versions. Return the number of removed bytes."""
    freed = 0
    for path in list(_all_packs(root)):
        try:
            size = path.stat().st_size
            path.unlink()
            freed += size
        except FileNotFoundError:  # Another process was faster.
            continue
        except OSError as error:
            raise RunError(f"cannot remove {path} ({error.strerror}). Change its permissions.") from None
    for folder in _own_folders(root):
        for part in _plain_folders(folder):
            remove_leftovers(part)
            remove_empty(part)
        remove_leftovers(folder)
        if [path.name for path in folder.iterdir()] == [MARKER]:
            (folder / MARKER).unlink()
            folder.rmdir()
    return freed


def tidy(space: Space) -> None:
    """Remove temporary files that killed processes left."""
    if space.folder.is_dir():
        remove_leftovers(space.folder)


def _user_folder() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _own_folders(root: Path) -> list[Path]:
    """Return the folders of all versions that the cache made."""
    folders = [path for pattern in ("features-*", "graphs-*") for path in sorted(root.glob(pattern))]
    return [path for path in folders if not path.is_symlink() and (path / MARKER).is_file()]


def _plain_folders(folder: Path) -> list[Path]:
    """Return the folders of packs below a folder of the cache."""
    return sorted(
        path for path in folder.glob("*") if _OWN_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    )


def _packs(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"*{_SUFFIX}") if not path.name.startswith("."))


def _all_packs(root: Path) -> Iterator[Path]:
    """Yield the packs and graphs of all versions: the size limit counts all of them."""
    for folder in _own_folders(root):
        for part in (folder, *_plain_folders(folder)):
            yield from (path for path in _packs(part) if _OWN_NAME.fullmatch(path.stem) and not path.is_symlink())


def _checksum(content: Mapping[str, npt.NDArray[Any]]) -> str:
    digest = hashlib.sha256(content["keys"].tobytes())
    digest.update(content["features"].tobytes())
    return digest.hexdigest()


def _about(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with suppress(OSError, ValueError, RecursionError), reading_tensors(), safe_open(path, framework="np") as file:
        content = json.loads((file.metadata() or {}).get(_KEY, "{}"))
        return content if isinstance(content, dict) else {}
    return {}


def _read_keys(path: Path) -> list[bytes] | None:
    """Return the keys of a pack, or None if the file is missing or damaged."""
    from safetensors import safe_open

    def read() -> list[bytes] | None:
        check_regular(path)
        with safe_open(path, framework="np") as file:
            keys = file.get_tensor("keys")
        is_right = keys.dtype == np.uint8 and keys.ndim == 2 and keys.shape[1] == hashlib.sha256().digest_size
        return [row.tobytes() for row in keys] if is_right else None

    return read_or_remove(path, read)


def _read_pack(path: Path, width: int) -> tuple[list[bytes], Features] | None:
    """Return keys and features of a pack, or None if the file is missing or damaged."""
    from safetensors.numpy import load

    def read() -> tuple[list[bytes], Features] | None:
        content = load(path.read_bytes())
        keys, features = content["keys"], content["features"]
        if features.shape != (len(keys), width) or features.dtype != np.float32:
            return None
        if _checksum(content) != _about(path).get("sha256") or not np.isfinite(features).all():
            return None
        return [row.tobytes() for row in keys], features

    return read_or_remove(path, read, used=True)


def read_or_remove(path: Path, read: Callable[[], T | None], *, used: bool = False) -> T | None:
    """Return what ``read`` makes of a file of tensors, or None. A damaged file, of which it makes None, is removed.

    ``used``: the time of the file becomes that of its last use.
    """
    try:
        with reading_tensors():
            found = read()
    except OSError:
        return None
    except (ValueError, KeyError):
        found = None
    with suppress(OSError):
        if found is None:
            path.unlink()
        elif used:
            os.utime(path)
    return found


class ReadableImages:
    """The images that this version of Pillow can decode, so that a later run need not check them.

    An image is found by the SHA-256 of its file, so a file that was changed is checked again. A disk error is no error:
    the images are then checked.
    """

    def __init__(self) -> None:
        engine = f"pillow {PIL.__version__}, lopsided {__version__}"  # Both refuse images.
        facts = {
            "encoder": "readable images",
            "holds": "height, width, grey, twelve, paged",
            "image_size": None,
            "engine": engine,
        }
        self._shelf = Shelf([(5, facts)])
        self._keys, self._rows = self._shelf.everything()

    def find(self, digest: str) -> Header | None:
        """Return the header of an image that is known to be readable, otherwise None."""
        (key,) = np.frombuffer(bytes.fromhex(digest), "S32")
        place = int(np.searchsorted(self._keys, key))
        if place == len(self._keys) or self._keys[place] != key:
            return None
        height, width, *others = self._rows[place].tolist()
        return Header((int(height), int(width)), *map(bool, others))

    def add(self, headers: Mapping[str, Header]) -> None:
        """Remember that the images with these digests are readable."""
        new = {digest: header for digest, header in headers.items() if self.find(digest) is None}
        rows = [(*header.size, header.grey, header.twelve, header.paged) for header in new.values()]
        self._shelf.keep(list(new), np.array(rows, dtype=np.float32).reshape(-1, 5))
        self._shelf.flush()


_HEAD = 8
"""Bytes of a digest that the index compares. Of a million images two have the same ones once in 30 million caches; the
pack tells them apart."""

Heads = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int32]


class PackIndex:
    """Finds packs by digests. ``read`` returns the digests of a pack, or None if it cannot be read.

    Digests are in sorted arrays, each at least twice as long as the next, so that a look-up is a few binary searches,
    and a new pack seldom moves many of them. A folder is only listed again if its time has changed.
    """

    def __init__(self, read: Callable[[Path], Sequence[bytes] | None]) -> None:
        self._read, self._lock = read, threading.Lock()
        self._paths: list[Path] = []
        self._numbers: dict[str, int] = {}
        self._alive = np.empty(0, dtype=np.bool_)
        self._levels: list[tuple[Heads, Numbers]] = []
        self._time: int | None = None

    def find(self, folder: Path, digests: Sequence[bytes]) -> list[Path | None]:
        """Return the pack of each digest, or None if it is in no pack."""
        with self._lock:
            self._follow(folder)
            heads = _heads(digests)
            numbers = np.full(len(heads), -1, dtype=np.int32)
            for keys, packs in self._levels:
                places = np.minimum(np.searchsorted(keys, heads), len(keys) - 1)
                hit = (keys[places] == heads) & self._alive[packs[places]]
                numbers[hit] = packs[places[hit]]
        return [None if number < 0 else self._paths[number] for number in numbers.tolist()]

    def forget_time(self) -> None:
        """List the folder at the next look-up. Clocks of file systems are too coarse for what is written at once."""
        self._time = None

    def _follow(self, folder: Path) -> None:
        """Add the packs that are new in the folder, and leave out those that are gone."""
        try:
            time = os.stat(folder).st_mtime_ns
            if time == self._time:
                return
            with os.scandir(folder) as entries:
                names = {entry.name for entry in entries if entry.name.endswith(".safetensors")}
        except OSError:
            time, names = 0, set()
        names = {name for name in names if not name.startswith(".")}
        for name in self._numbers.keys() - names:
            self._alive[self._numbers.pop(name)] = False
        new = sorted(names - self._numbers.keys())
        self._alive = np.concatenate([self._alive, np.ones(len(new), dtype=np.bool_)])
        for name in new:
            self._numbers[name] = number = len(self._paths)
            self._paths.append(folder / name)
            digests = self._read(folder / name)
            if digests:
                heads = np.sort(_heads(digests))
                self._levels.append((heads, np.full(len(heads), number, dtype=np.int32)))
                self._merge()
        self._time = time

    def _merge(self) -> None:
        while len(self._levels) > 1 and 2 * len(self._levels[-1][0]) > len(self._levels[-2][0]):
            (heads, packs), (more_heads, more_packs) = self._levels[-2:]
            heads, packs = np.concatenate([heads, more_heads]), np.concatenate([packs, more_packs])
            order = np.argsort(heads, kind="stable")
            order = order[self._alive[packs[order]]]
            self._levels[-2:] = [(heads[order], packs[order])] if len(order) else []


def _heads(digests: Sequence[bytes]) -> Heads:
    return np.frombuffer(b"".join(digest[:_HEAD] for digest in digests), dtype=np.uint64)
