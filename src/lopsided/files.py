"""Files of a run: atomic writes, line-by-line logs and folder locks. Does not import torch.

A file is written under a temporary name in the same folder and then renamed, so a reader sees either the old or the
new content. A disk error (full, read-only, not permitted) becomes a ``RunError`` that names the file, and the temporary
file is removed. A temporary file is locked while a process writes it. The next writer of the file removes temporary
files that a killed process left.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lopsided.errors import RunError, sentence

if TYPE_CHECKING:
    from filelock import BaseFileLock

LOCK_NAME = ".lock"
MAX_BYTES = 1 << 28
"""Maximum bytes of a text file that is read at once, such as JSON. Weights and tables may be larger."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PATIENCE = 0.2
"""Seconds to wait for a lock. Another process may hold it briefly to check it, or has not written its name yet."""

_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP}
SIGN_SECONDS = 10.0
"""How often a process renews the time of its lock file, as a sign for other machines."""
STALE_SECONDS = 35.0
"""How long a lock of another machine is watched without a sign before it is taken over."""
LONG_AGO = 600.0
"""Seconds since the last sign after which a lock need not be watched. Clocks of machines differ by less."""
_watched: dict[Path, tuple[int, float]] = {}
"""Locks of other machines: the time of the last sign, and when this process saw it first."""

_TEMPORARY = re.compile(r"\.(.+)\.\d+(?:-\d+)?\.tmp", flags=re.DOTALL)
"""Pattern of temporary names: file name, process id, and a number if there are several."""

_PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@contextmanager
def disk_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an ``OSError`` inside the block into a ``RunError`` that names ``path``."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        if error.errno == errno.ELOOP:
            reason = "it is a symbolic link"
        do = "Free some disk space." if error.errno in _FULL else "Choose another folder or change its permissions."
        raise RunError(f"cannot write {os.fspath(path)}: {reason}. {do}") from error


@contextmanager
def replacing(path: str | os.PathLike[str], *, wanted: Callable[[], bool] = lambda: True) -> Iterator[Path]:
    """Yield a temporary path; at the end of the block, the file written there replaces ``path``.

    The content is flushed to the disk before the rename. If the block raises, ``path`` is unchanged. If ``wanted``
    returns False at the end, ``path`` is removed. A symbolic link is replaced itself; its target is unchanged. A path
    that ``check_replaceable`` refuses is not touched. Use this for code that writes a file by name, and
    ``atomic_write`` for content in memory.
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
    """Raise an error unless ``path`` is a regular file, a link to a regular file, or missing.

    Devices, pipes and folders must not be replaced. A link directly in /dev is always refused, because /dev/stdout may
    point to a regular file.
    """
    what = None
    with disk_errors(path), suppress(FileNotFoundError):
        if os.path.islink(path) and os.path.realpath(os.path.dirname(path)) == "/dev":
            what = "a system link"
        elif not stat.S_ISREG(mode := os.stat(path).st_mode):
            what = "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or another special file"
    if what is not None:
        raise RunError(f"cannot replace {os.fspath(path)}: it is {what}. Choose another name.")


def atomic_write(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file completely or not at all. Text is encoded as UTF-8."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def read_whole(path: str | os.PathLike[str], most: int = MAX_BYTES) -> bytes:
    """Return the content of an untrusted file. Raise an OSError for a special file or too many bytes."""
    check_regular(path, most)
    return Path(path).read_bytes()


def check_regular(path: str | os.PathLike[str], most: int | None = None) -> None:
    """Raise an OSError if a path is not a regular file, such as a link to an endless device, or is too large."""
    found = os.stat(path)
    if stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    if most is not None and found.st_size > most:
        raise OSError(errno.EFBIG, f"more than {most:,} bytes", os.fspath(path))


@contextmanager
def reading_tensors() -> Iterator[None]:
    """Turn errors of the safetensors reader about the content into a ``ValueError``. Disk errors are unchanged."""
    from safetensors import SafetensorError

    try:
        yield
    # Number types that torch or numpy lack raise errors of other classes than SafetensorError.
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ValueError(reason(error)) from error


def remove_empty(*folders: Path) -> None:
    """Remove folders, one after the other, unless they hold something."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def make_folder(path: str | os.PathLike[str]) -> Path:
    """Create a folder and its parents if they are missing."""
    with disk_errors(path):
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


def check_no_links(folder: str | os.PathLike[str]) -> None:
    """Raise an error if a folder contains symbolic links. An untrusted link could redirect writes and removals."""
    with disk_errors(folder), suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                must = "A folder that is continued must not contain links."
                raise RunError(f"{entry.path} is a symbolic link. {must} Remove the link or replace it with a copy.")


def remove_leftovers(folder: str | os.PathLike[str], name: str | None = None) -> None:
    """Remove temporary files of killed processes from a folder: those of the file ``name``, or all."""
    for path in Path(folder).glob(".*.tmp"):
        found = _TEMPORARY.fullmatch(path.name)
        if found is None or found[1] != (name or found[1]):
            continue
        with suppress(OSError):
            if path.is_symlink():  # A temporary file is never a link.
                path.unlink()
                continue
            descriptor = _open_plain(path, os.O_RDWR)
            try:
                if _try_lock(descriptor) and _is_at(descriptor, path):
                    path.unlink()
            finally:
                os.close(descriptor)


def cut(path: str | os.PathLike[str], end: int) -> None:
    """Truncate a file to ``end`` bytes."""
    with disk_errors(path), open(path, "rb+", opener=_open_plain) as file:
        file.truncate(end)


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Return rows as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def json_lines(path: str | os.PathLike[str], most: int | None = None) -> Iterator[Any]:
    """Yield the values of a file with one JSON value per line. Lines that a killed process left unfinished are skipped.

    Raise an OSError for a special file or too many bytes.
    """
    check_regular(path, most)
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(ValueError, RecursionError):
                yield json.loads(line)


def append_line(path: str | os.PathLike[str], text: str, *, flush: bool = False) -> None:
    """Append one line in a single write. An unfinished line of a killed process stays a separate line.

    With ``flush``, the line is on the disk at the end, and survives a loss of power, too.
    """
    if "\n" in text:
        raise ValueError(sentence("a line must not contain a line break", repr(text)))
    with disk_errors(path), open(path, "ab+", buffering=0, opener=_open_plain) as file:
        end = file.seek(0, os.SEEK_END)
        torn = False
        if end:
            file.seek(end - 1)
            torn = file.read(1) != b"\n"
        file.write(("\n" * torn + text + "\n").encode())
        if flush:
            os.fsync(file.fileno())


@contextmanager
def lock(folder: str | os.PathLike[str], *, patient: bool = False) -> Iterator[None]:
    """Lock a folder for this process while the block runs. A second process gets an error that names the owner.

    The operating system releases the lock when a process ends, so an old lock file of this machine is taken over. Not
    every file system tells other machines of a lock, so a process also renews the time of its lock file. An old lock
    file of another machine is taken over if it is watched for ``STALE_SECONDS`` without a sign, over several calls or,
    if the caller is ``patient``, in one.
    """
    path = make_folder(folder) / LOCK_NAME
    with _locked(path, os.fspath(folder), patient):
        yield


@contextmanager
def lock_output(path: str | os.PathLike[str]) -> Iterator[None]:
    """Lock a file that this process is going to write, patiently, as ``lock`` locks a folder."""
    target = Path(path)
    with _locked(target.with_name(f".{target.name}{LOCK_NAME}"), os.fspath(path), patient=True):
        yield


@contextmanager
def _locked(path: Path, what: str, patient: bool) -> Iterator[None]:
    try:
        with _held(path, what, sign=True, patient=patient):
            try:
                with _signs_of_life(path):
                    yield
            finally:
                with suppress(OSError):
                    path.unlink()  # Before unlocking, so that the next process creates a new file.
    except KeyboardInterrupt:  # It may come when the lock is taken and its file not yet to be removed.
        with suppress(OSError):
            if _owner(path.read_bytes()) == (os.getpid(), socket.gethostname()):
                path.unlink()
        raise


@contextmanager
def _signs_of_life(path: Path) -> Iterator[None]:
    """Renew the time of a lock file inside the block."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(SIGN_SECONDS):
            with suppress(OSError):
                os.utime(path)

    threading.Thread(target=renew, name="lopsided-lock", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def check_free(folder: str | os.PathLike[str]) -> None:
    """Raise the error that a patient ``lock`` would raise, without changing the folder."""
    path = Path(folder) / LOCK_NAME
    # If this process cannot open the lock file, lock() reports that later.
    if path.is_file() and not path.is_symlink() and os.access(path, os.R_OK | os.W_OK):
        with _held(path, os.fspath(folder), sign=False, patient=True):
            pass


def remove_left_lock(folder: str | os.PathLike[str]) -> None:
    """Remove the lock file of a killed process. A held lock file stays."""
    if (Path(folder) / LOCK_NAME).exists():
        with suppress(RunError), lock(folder):
            pass


def _open_plain(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file. Refuse links, pipes and devices."""
    descriptor = os.open(path, flags | _PLAIN, 0o666)
    try:
        _check_plain(descriptor, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check_plain(descriptor: int, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


class _WatchedError(RunError):
    """The lock of another machine that has not been watched for long enough."""


@contextmanager
def _held(path: Path, what: str, *, sign: bool, patient: bool = False) -> Iterator[None]:
    """Hold a lock file inside the block, or raise an error that names its owner. ``sign`` writes the new owner."""
    held = _acquired(path, what, sign)
    while held is None:
        if not patient:
            owner = _owner(path.read_bytes())
            raise RunError(_taken(what, owner, f"It is free {STALE_SECONDS:g} s after the last sign of that process."))
        time.sleep(min(0.5, STALE_SECONDS))
        held = _acquired(path, what, sign)
    try:
        yield
    finally:
        held.release()


def _acquired(path: Path, what: str, sign: bool) -> BaseFileLock | None:
    """Return the lock, or None if it may be that of another machine whose process has ended."""
    from filelock import FileLock, Timeout

    def check(descriptor: int) -> None:
        _check_plain(descriptor, path)
        owner = _owner(os.read(descriptor, 4096))
        if owner is not None and owner[1] != socket.gethostname():
            _check_stale(path, what, owner, os.fstat(descriptor).st_mtime_ns)
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
            raise RunError(_taken(what, _owner(content), "Wait for it to end.")) from None
        except _WatchedError:
            return None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            do = "Write to a local disk and copy the result, or mount the file system with locks (Lustre: -o flock)"
            raise RunError(f"cannot lock {what}: its file system has no file locks ({reason(error)}). {do}.") from error
    return held


def _check_stale(path: Path, what: str, owner: tuple[int, str], last_sign: int) -> None:
    """Raise unless the process of another machine that wrote a lock file has given no sign for long enough."""
    if time.time() - last_sign / 1e9 > LONG_AGO:
        return
    before, since = _watched.setdefault(path, (last_sign, time.monotonic()))
    if before != last_sign:
        _watched[path] = last_sign, time.monotonic()
        raise RunError(_taken(what, owner, "Wait for it to end."))
    if time.monotonic() - since < STALE_SECONDS:
        raise _WatchedError


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the file at ``path``."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    return False


def _try_lock(descriptor: int) -> bool:
    from filelock import lock_descriptor  # Imported late because the import is slow.

    return lock_descriptor(descriptor, blocking=False)


def reason(error: BaseException) -> str:
    """Return a short reason why content could not be read.

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


def _taken(what: str, owner: tuple[int, str] | None, advice: str) -> str:
    who = "another process" if owner is None else f"process {owner[0]} on {owner[1]}"
    return f"{what} is in use by {who}. {advice}"


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """Create a locked file next to ``target``. Remove it after the block unless it was renamed."""
    path, descriptor = _open_temporary(target)
    try:
        yield path
    finally:
        # Still locked here, so the removed file is certainly the file of this process.
        if descriptor is None or _is_at(descriptor, path):
            with suppress(OSError):
                path.unlink()
        if descriptor is not None:
            os.close(descriptor)


def _open_temporary(target: Path) -> tuple[Path, int | None]:
    for number in count():  # Other machines, containers and threads may use the same process id.
        more = f"-{number}" if number else ""
        path = target.with_name(f".{target.name}.{os.getpid()}{more}.tmp")
        if sys.platform == "win32":  # Windows cannot rename or remove an open file.
            return path, None
        try:
            descriptor = _open_plain(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            continue
        try:
            if _try_lock(descriptor) and _is_at(descriptor, path):
                kept, descriptor = descriptor, -1
                return path, kept
        except OSError:  # This file system has no locks, so leftovers of killed processes cannot be detected.
            return path, None
        finally:
            if descriptor >= 0:
                os.close(descriptor)
    raise AssertionError("counting ended")


def _flush(path: Path) -> None:
    """Flush the content of a file or the entries of a folder to the disk. Windows cannot flush folders."""
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
