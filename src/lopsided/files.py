"""Files of a run: written whole or not at all, one event a line, one process at a time. Needs no torch.

A reader sees the old content of a file or the new, never a part, because everything is written under a temporary name
in the same folder and then renamed. Whatever the disk refuses (full, read-only, not permitted) becomes a ``RunError``
that names the file, and the temporary file is removed. What a killed process left under a temporary name is removed by
whoever writes the file next: a temporary file is locked as long as somebody writes it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from lopsided.errors import RunError, sentence

LOCK_NAME = ".lock"
MAX_BYTES = 1 << 28
"""The most bytes of a text that is read at once, as JSON is; weights and tables may be larger."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PATIENCE = 0.2
"""Seconds that a lock may be held by one who only looks at it, or before its owner has written its name there."""

_TEMPORARY = re.compile(r"\.(.+)\.\d+(?:-\d+)?\.tmp", flags=re.DOTALL)
"""The names of temporary files: that of the file, the process, and a number if there are several."""

_PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@contextmanager
def disk_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what the disk says inside the block into a ``RunError`` that names ``path``."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        if error.errno == errno.ELOOP:
            reason = "a link, where a file is to be"
        must, do = f"{os.fspath(path)} must be writable", "Choose another folder or change its permissions."
        if error.errno in _FULL:
            must, do = f"{os.fspath(path)} must fit on the disk", "Free some space."
        raise RunError(sentence(must, reason, do)) from error


@contextmanager
def replacing(path: str | os.PathLike[str], *, wanted: Callable[[], bool] = lambda: True) -> Iterator[Path]:
    """Yield a temporary name to write a file under; at the end of the block it takes the place of ``path``.

    The content reaches the disk before the name does. If the block raises, ``path`` is as it was; if in the end the
    file is not ``wanted``, there is none. A link is replaced itself, and the file that it leads to stays as it was;
    what ``check_replaceable`` refuses is not touched. For programs that want to write a file by name themselves;
    ``atomic_write`` is for content at hand.
    """
    target = Path(path)
    check_replaceable(target)
    remove_leftovers(target.parent, target.name)
    with disk_errors(target), _temporary(target) as temporary:
        yield temporary
        if wanted():
            _flush(temporary)
            os.replace(temporary, target)
        else:
            target.unlink(missing_ok=True)
        _flush(target.parent)


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Raise unless ``path`` is an ordinary file, a link to one, or not there: a device, a pipe and a folder must stay.

    A link directly in /dev is refused, too, whatever it leads to: /dev/stdout may lead to a file.
    """
    what = None
    with disk_errors(path), suppress(FileNotFoundError):
        if os.path.islink(path) and os.path.realpath(os.path.dirname(path)) == "/dev":
            what = "a link of the system"
        elif not stat.S_ISREG(mode := os.stat(path).st_mode):
            what = "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or the like"
    if what is not None:
        must = f"{os.fspath(path)} must be an ordinary file if it is there"
        raise RunError(sentence(must, what, "Choose another name."))


def atomic_write(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file whole or not at all; text is written as UTF-8."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def read_whole(path: str | os.PathLike[str], most: int = MAX_BYTES) -> bytes:
    """Read a file that may come from someone else; a device, a pipe or too many bytes raise an OSError, unread."""
    check_regular(path, most)
    return Path(path).read_bytes()


def check_regular(path: str | os.PathLike[str], most: int | None = None) -> None:
    """Raise an OSError for what is no ordinary file, such as a link to a device without end, or is too large."""
    found = os.stat(path)
    if stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not an ordinary file", os.fspath(path))
    if most is not None and found.st_size > most:
        raise OSError(errno.EFBIG, f"more than {most:,} bytes", os.fspath(path))


@contextmanager
def reading_tensors() -> Iterator[None]:
    """Turn what the reader of safetensors says of a file's content into a ``ValueError``; the disk's errors stay."""
    from safetensors import SafetensorError

    try:
        yield
    # Kinds of numbers that torch or numpy do not have are told in other classes than the library's own.
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ValueError(reason(error)) from error


def make_folder(path: str | os.PathLike[str]) -> Path:
    """Make a folder and those above it; nothing happens when it is there."""
    with disk_errors(path):
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


def check_no_links(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder of which a part lies elsewhere: a stranger's link would have other files written or removed."""
    with disk_errors(folder), suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                must = "a folder that is gone on with must hold no links"
                raise RunError(sentence(must, f"{entry.path}, which is one", "Remove it, or put a copy in its place."))


def remove_leftovers(folder: str | os.PathLike[str], name: str | None = None) -> None:
    """Remove temporary files that killed processes left in a folder, of one file or of all; nobody's else."""
    for path in Path(folder).glob(".*.tmp"):
        found = _TEMPORARY.fullmatch(path.name)
        if found is None or found[1] != (name or found[1]):
            continue
        with suppress(OSError):
            if path.is_symlink():  # No temporary file is one.
                path.unlink()
                continue
            descriptor = _open_plain(path, os.O_RDWR)
            try:
                if _try_lock(descriptor) and _is_at(descriptor, path):
                    path.unlink()
            finally:
                os.close(descriptor)


def cut(path: str | os.PathLike[str], end: int) -> None:
    """Leave only so many bytes of a file."""
    with disk_errors(path), open(path, "rb+", opener=_open_plain) as file:
        file.truncate(end)


def append_line(path: str | os.PathLike[str], text: str) -> None:
    """Append one line, in a single write. A line that a killed process left unfinished stays a line of its own."""
    if "\n" in text:
        raise ValueError(sentence("a line must not contain a line break", repr(text)))
    with disk_errors(path), open(path, "ab+", buffering=0, opener=_open_plain) as file:
        end = file.seek(0, os.SEEK_END)
        torn = False
        if end:
            file.seek(end - 1)
            torn = file.read(1) != b"\n"
        file.write(("\n" * torn + text + "\n").encode())


@contextmanager
def lock(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Keep a folder for this process while the block runs; a second process is refused and told who has it.

    The operating system drops the lock of a process that dies, however it dies, so that a lock file which was left
    behind on this machine is taken over. One that another machine left cannot be judged from here and is refused.
    """
    path = make_folder(folder) / LOCK_NAME
    with _held(path, sign=True):
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()  # Before it is unlocked: whoever opens the name next has a file of their own.


def check_free(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder that ``lock`` would refuse, in the same words; nothing in it is touched."""
    path = Path(folder) / LOCK_NAME
    # Of one that this process could not take, whoever locks the folder will be told.
    if path.is_file() and not path.is_symlink() and os.access(path, os.R_OK | os.W_OK):
        with _held(path, sign=False):
            pass


def remove_left_lock(folder: str | os.PathLike[str]) -> None:
    """Remove the lock file of a killed process, which stops nobody; one that is held stays."""
    if (Path(folder) / LOCK_NAME).exists():
        with suppress(RunError), lock(folder):
            pass


def _open_plain(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file itself: not what a link leads to, nor a pipe or a device."""
    descriptor = os.open(path, flags | _PLAIN, 0o666)
    try:
        _check_plain(descriptor, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check_plain(descriptor: int, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "not an ordinary file", os.fspath(path))


@contextmanager
def _held(path: Path, *, sign: bool) -> Iterator[None]:
    """Hold a lock file inside the block, with this process's name in it if it is to ``sign``, or say who has it."""
    from filelock import FileLock, Timeout

    def check(descriptor: int) -> None:
        _check_plain(descriptor, path)
        owner = _owner(os.read(descriptor, 4096))
        if owner is not None and owner[1] != socket.gethostname():
            raise RunError(_taken(path, owner, alive=False))
        if sign:
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())

    held = FileLock(path, timeout=_PATIENCE, poll_interval=0.005, thread_local=False, on_acquired=check)
    with disk_errors(path):
        try:
            held.acquire()
        except Timeout:
            content = b""
            with suppress(OSError):
                content = path.read_bytes()
            raise RunError(_taken(path, _owner(content), alive=True)) from None
    try:
        yield
    finally:
        held.release()


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one of this name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    return False


def _try_lock(descriptor: int) -> bool:
    from filelock import lock_descriptor  # It takes as long to import as all the rest of this room.

    return lock_descriptor(descriptor, blocking=False)


def reason(error: BaseException) -> str:
    """Say in a few words why content could not be read.

    >>> reason(RecursionError("maximum recursion depth exceeded"))
    'nested too deeply'
    >>> reason(KeyError("format"))
    "no 'format'"
    """
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, KeyError):
        return f"no {error}"
    text = " ".join((getattr(error, "strerror", None) or str(error)).split()).rstrip(".")
    return text[:200] or type(error).__name__


def _owner(content: bytes) -> tuple[int, str] | None:
    try:
        owner = json.loads(content)
        return int(owner["pid"]), str(owner["host"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _taken(path: Path, owner: tuple[int, str] | None, *, alive: bool) -> str:
    who = "another process" if owner is None else f"process {owner[0]} on {owner[1]}"
    do = "Wait for it to end." if alive else f"If that process has ended, remove {path}."
    return sentence("a run folder must be used by one process at a time", f"{path.parent}, held by {who}", do)


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """Make a file beside ``target`` that is locked inside the block, and is gone after it unless it was renamed."""
    path, descriptor = _open_temporary(target)
    try:
        yield path
    finally:
        # While it is still locked, so that what is removed is this process's own.
        if descriptor is None or _is_at(descriptor, path):
            with suppress(OSError):
                path.unlink()
        if descriptor is not None:
            os.close(descriptor)


def _open_temporary(target: Path) -> tuple[Path, int | None]:
    for number in count():  # Other machines, containers and threads may write the same file under the same number.
        more = f"-{number}" if number else ""
        path = target.with_name(f".{target.name}.{os.getpid()}{more}.tmp")
        if sys.platform == "win32":  # An open file can be neither renamed nor removed there.
            return path, None
        try:
            descriptor = _open_plain(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            continue
        try:
            if _try_lock(descriptor) and _is_at(descriptor, path):
                kept, descriptor = descriptor, -1
                return path, kept
        except OSError:  # A file system without locks; nobody can tell there what a killed process left.
            return path, None
        finally:
            if descriptor >= 0:
                os.close(descriptor)
    raise AssertionError("counting ended")


def _flush(path: Path) -> None:
    """Bring a file's content, or a folder's names, to the disk; not every system can do so with folders."""
    flags = os.O_RDONLY
    if path.is_dir():
        if sys.platform == "win32":
            return
        flags |= os.O_DIRECTORY
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
