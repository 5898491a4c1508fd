"""A disk that fills up, or becomes read-only, at a chosen write: all that is written below a folder is counted.

``Disk(root, at=k)`` lets the first k operations that write pass and refuses what follows. A disk that is ``"full"``
refuses with ENOSPC what takes room, after half of the bytes were written, and still lets files be removed; one that is
``"read-only"`` refuses every change with EROFS; ``"once"`` refuses one operation and then has room again. Without
``at`` nothing is refused, and ``operations`` tells what was done.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

KINDS = ("full", "read-only", "once")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Disk:
    """Counts, and from some operation on refuses, writes below a folder while the block runs."""

    def __init__(self, root: Path, kind: str = "full", at: int | None = None) -> None:
        assert kind in KINDS
        self.root, self.kind, self.at = os.path.realpath(root), kind, at
        self.operations: list[str] = []
        self.refused = 0
        self._open: dict[int, str] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Disk:
        for name, paths in {"replace": 2, "mkdir": 1, "truncate": 1, "link": 2, "symlink": 2}.items():
            self._wrap(os, name, paths, removes=False)
        for name in ("unlink", "remove", "rmdir"):
            self._wrap(os, name, 1, removes=True)
        for name in ("write", "fsync", "ftruncate"):
            self._wrap_descriptor(name)
        opened, own_open, own_close = os.open, io.open, os.close

        def open_descriptor(path: Any, flags: int, *rest: Any, **more: Any) -> int:
            # What is not there and not to be made is told first, whatever the disk; what is there takes no new room.
            writes = bool(flags & os.O_CREAT) or (bool(flags & _WRITING) and os.path.lexists(path))
            if writes and self._is_below(path):
                self._may("open", path, takes_room=bool(flags & os.O_CREAT))
            descriptor = opened(path, flags, *rest, **more)
            if self._is_below(path):
                self._open[descriptor] = os.fspath(path)
            return descriptor

        def close_descriptor(descriptor: int) -> None:
            self._open.pop(descriptor, None)
            own_close(descriptor)

        def open_file(path: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
            if not set(mode) & set("wax+") or isinstance(path, int) or not self._is_below(path):
                return own_open(path, mode, *rest, **more)
            self._may("open", path)
            return _File(own_open(path, mode, *rest, **more), lambda: self._may("write", path))

        for place, name, other in (
            (os, "open", open_descriptor),
            (os, "close", close_descriptor),
            (io, "open", open_file),
            (builtins, "open", open_file),
        ):
            self._stack.enter_context(patch.object(place, name, other))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _is_below(self, path: Any) -> bool:
        if isinstance(path, int):
            return False
        place = os.path.abspath(os.fspath(path))
        return place == self.root or place.startswith(self.root + os.sep)

    def _may(self, what: str, path: Any, *, takes_room: bool = True) -> None:
        """Raise if the disk refuses this one."""
        if not takes_room and self.kind != "read-only":
            return
        if takes_room:  # Only that is counted, so that every kind has the same places.
            self.operations.append(f"{what} {os.path.relpath(os.fspath(path), self.root)}")
        number = len(self.operations)
        if self.at is None or number <= self.at or (self.kind == "once" and number > self.at + 1):
            return
        if not takes_room and not self.refused:
            return
        self.refused += 1
        code = errno.EROFS if self.kind == "read-only" else errno.ENOSPC
        raise OSError(code, os.strerror(code), os.fspath(path))

    def _wrap(self, place: Any, name: str, paths: int, *, removes: bool) -> None:
        own = getattr(place, name)

        def wrapped(*arguments: Any, **more: Any) -> Any:
            there = name == "mkdir" and os.path.isdir(arguments[0])  # Which a system says first, whatever the disk.
            if self._is_below(arguments[paths - 1]) and not there:
                self._may(name, arguments[paths - 1], takes_room=not removes)
            return own(*arguments, **more)

        self._stack.enter_context(patch.object(place, name, wrapped))

    def _wrap_descriptor(self, name: str) -> None:
        own = getattr(os, name)

        def wrapped(descriptor: int, *rest: Any) -> Any:
            if descriptor in self._open:
                try:
                    self._may(name, self._open[descriptor])
                except OSError:
                    if name == "write":
                        own(descriptor, rest[0][: len(rest[0]) // 2])
                    raise
            return own(descriptor, *rest)

        self._stack.enter_context(patch.object(os, name, wrapped))


class _File:
    """An open file whose writes are asked for first; one that is refused has written half of its bytes.

    Of thousands of small ones the first, second, fourth, eighth and so on are asked for: a figure has very many.
    """

    def __init__(self, file: Any, may: Callable[[], None]) -> None:
        self._file, self._may, self._writes = file, may, 0

    def write(self, content: Any) -> int:
        self._writes += 1
        try:
            if not self._writes & (self._writes - 1):
                self._may()
        except OSError:
            self._file.write(content[: len(content) // 2])
            raise
        return int(self._file.write(content))

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Any:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
