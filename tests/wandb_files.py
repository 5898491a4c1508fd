"""A reader of W&B's offline files, which hold one protocol buffer per event in the log format of LevelDB.

The package wandb had a reader of its own until version 0.30; its messages are those of ``wandb.proto`` in all versions.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK, FILE_HEADER, HEADER = 32768, 7, struct.Struct("<IHB")
FULL, LAST = 1, 4


@dataclass
class WandBRun:
    """What ``wandb sync`` would send."""

    name: str = ""
    group: str = ""
    kind: str = ""
    project: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)
    exit_code: int | None = None

    def points(self, name: str) -> list[tuple[int, float]]:
        return [(row["_step"], row[name]) for row in self.history if name in row]


def read_runs(folder: Path) -> dict[str, WandBRun]:
    """The offline runs below a folder by name, as soon as all have ended. No two have the same name.

    A process of W&B writes the files, and is not done when ``finish`` returns.
    """
    end = time.monotonic() + 60
    runs = [read_run(path) for path in folder.rglob("*.wandb")]
    while any(run.exit_code is None for run in runs) and time.monotonic() < end:
        time.sleep(0.02)
        runs = [read_run(path) for path in folder.rglob("*.wandb")]
    by_name = {run.name: run for run in runs}
    assert len(by_name) == len(runs)
    return by_name


def read_run(path: Path) -> WandBRun:
    from wandb.proto.wandb_internal_pb2 import Record

    found = WandBRun()
    for data in messages(path.read_bytes()):
        record = Record.FromString(data)
        match record.WhichOneof("record_type"):
            case "run":
                run = record.run
                found.name, found.group, found.kind = run.display_name, run.run_group, run.job_type
                found.project, found.config = run.project, values(run.config.update)
            case "history":
                found.history.append(values(record.history.item))
            case "summary":
                found.summary |= values(record.summary.update)
            case "files":
                found.files |= {each.path for each in record.files.files}
            case "exit":
                found.exit_code = record.exit.exit_code
    return found


def values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def messages(content: bytes) -> Iterator[bytes]:
    """Yield the messages of a file. A message is one piece, or several of which the last is marked."""
    position, message = FILE_HEADER, b""
    while position + HEADER.size <= len(content):
        left = BLOCK - position % BLOCK
        if left < HEADER.size:
            position += left
            continue
        _, length, kind = HEADER.unpack_from(content, position)
        position += HEADER.size
        message += content[position : position + length]
        position += length
        if kind in (FULL, LAST):
            yield message
            message = b""
