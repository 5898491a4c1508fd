"""The files of a sweep's records and failures: read, and appended under a lock. Needs no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from lopsided import files
from lopsided.errors import RunError
from lopsided.runs.records import Failure, Record

_Line = TypeVar("_Line", Record, Failure)

LOCK_SECONDS = 60.0
"""How long to wait for the lock of a folder of records, which is held only while a line is written."""


def read_records(path: str | os.PathLike[str]) -> tuple[list[Record], list[str]]:
    """Read a file of records. Return the records, and notes on skipped lines.

    A last line that a crash truncated is skipped, and so are later records of the same cell.
    """
    records, notes, _ = _parse(Record, Path(path))
    first: dict[str, Record] = {}
    for record in records:
        first.setdefault(record.cell, record)
    if len(first) < len(records):
        notes.append(f"Skipped {len(records) - len(first)} records of {path}: their cells have earlier records.")
    return list(first.values()), notes


def read_failures(path: str | os.PathLike[str]) -> list[Failure]:
    """Read a file of failed attempts, oldest first. Return an empty list if the file does not exist."""
    return _parse(Failure, Path(path))[0] if Path(path).exists() else []


def append_records(path: str | os.PathLike[str], *records: Record) -> list[str]:
    """Append the records whose cell has none. Other processes wait meanwhile.

    A truncated last line is removed. Return a note about it.
    """
    with _locked(Path(path).parent):
        there, notes, end = _parse(Record, Path(path)) if Path(path).exists() else ([], [], None)
        cells = {record.cell for record in there}
        lines = [record.to_json() for record in records if record.cell not in cells]
        if lines:
            _append(Path(path), lines, end)
            return notes
    return []


def append_failure(path: str | os.PathLike[str], failure: Failure) -> None:
    """Append a failed attempt. Other processes wait meanwhile."""
    with _locked(Path(path).parent):
        end = _parse(Failure, Path(path))[2] if Path(path).exists() else None
        _append(Path(path), [failure.to_json()], end)


def _append(path: Path, lines: Iterable[str], end: int | None) -> None:
    if end is not None:
        files.cut(path, end)
    for line in lines:
        files.append_line(path, line)


def _parse(kind: type[_Line], path: Path) -> tuple[list[_Line], list[str], int | None]:
    """Return the lines of a file, notes, and the end of the complete lines if a crash truncated the last line."""
    try:
        content = files.read_whole(path)
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}).") from None
    *lines, last = content.split(b"\n")
    found: list[_Line] = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                found.append(kind.from_json(line))
        except RunError as error:
            again = " and start the sweep again. It reads missing records from its run folders"
            do = f"Remove that line{again if kind is Record else ''}."
            raise RunError(f"{path}, line {number}: {error} {do}") from None
    if not last:
        return found, [], None
    try:
        found.append(kind.from_json(last))  # Perhaps only the line break is missing.
    except RunError:
        note = f"Skipped the last line of {path}: it is incomplete."
        return found, [note], len(content) - len(last)
    return found, [], None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the files of a sweep for this process. Wait while another process holds the lock."""
    end = time.monotonic() + LOCK_SECONDS
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(files.lock(folder))
                break
            except RunError as error:
                if error.__cause__ is not None or time.monotonic() >= end:  # An error of the disk has a cause.
                    raise
                time.sleep(0.02)
        yield
