"""The journal of marks: one line for each press of a key, on the disk before the page hears of it.

A line is never changed. To undo a mark is a further line, so that the journal tells who did what and when. A line that
a kill left unfinished is skipped; the person who pressed that key has not been told that it is saved.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import RLock
from typing import Any, Literal

from lopsided import files
from lopsided.errors import RunError, sentence

NAME = "journal.jsonl"
FORMAT = 1
GROUP = "group"
"""The column of groups in a table of marks, unless the recipe names another."""
Task = Literal["pool", "labels"]
"""What a mark is about: an image of the pool, or the label of an image of the run."""


@dataclass(frozen=True)
class Mark:
    """What a person said about an image. ``label`` is its class; empty: it has none after this mark."""

    task: str
    image: str
    path: str
    mark: str
    label: str
    asked: str
    """The class that the question named."""
    who: str
    session: str
    name: str = ""
    """The name of an image of the run in its data."""
    group: str = ""
    columns: str = ""
    """What the columns of the model say beside the image, an object of JSON; empty: it has none."""
    number: int = 0
    time: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What the mark is about."""
        return self.task, self.image


class Journal:
    """The marks of a folder. Several threads may use it; another process is kept out by the lock of the folder."""

    def __init__(self, folder: Path) -> None:
        self.path, self._lock = folder / NAME, RLock()
        self._marks: dict[tuple[str, str], Mark] = {}
        self._next = 1
        for line in self._lines():
            self._replay(line)

    def __len__(self) -> int:
        return len(self._marks)

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._marks

    def get(self, key: tuple[str, str]) -> Mark | None:
        """Return the mark of an image; None if it has none."""
        return self._marks.get(key)

    def marks(self, task: Task | None = None) -> list[Mark]:
        """Return the marks that were not undone, in their order."""
        with self._lock:
            found = sorted(self._marks.values(), key=lambda mark: mark.number)
        return [mark for mark in found if task is None or mark.task == task]

    def add(self, mark: Mark) -> Mark:
        """Write a mark, and return it with its number and time. The image must have none."""
        with self._lock:
            if mark.key in self._marks:
                raise RunError(f"{mark.who} marks an image that is marked already.")
            content = asdict(mark) | {"number": self._next, "time": _now()}
            self._write(content)
            self._replay(content)
            return self._marks[mark.key]

    def undo(self, session: str, who: str) -> Mark | None:
        """Undo the last mark of a session, and return it; None if there is none."""
        with self._lock:
            own = [mark for mark in self.marks() if mark.session == session]
            if not own:
                return None
            content = {"undo": own[-1].number, "who": who, "session": session, "number": self._next, "time": _now()}
            self._write(content)
            self._replay(content)
            return own[-1]

    def counts(self) -> dict[str, Any]:
        """Return how many marks there are, by kind, by person and by class."""
        marks = self.marks()
        return {
            "marks": len(marks),
            "by_mark": dict(Counter(mark.mark for mark in marks)),
            "by_person": dict(Counter(mark.who for mark in marks)),
            "by_label": dict(Counter(mark.label for mark in marks if mark.task == "pool" and mark.label)),
            "corrections": len(self.corrections()),
        }

    def corrections(self) -> list[Mark]:
        """Return the marks that give an image of the run another label than it had."""
        return [mark for mark in self.marks("labels") if mark.label and mark.label != mark.asked]

    def marks_table(self, group: str = GROUP) -> str:
        """Return the pool's marks as the table that ``fit --more`` reads, with groups and columns if there are any."""
        marks = self.marks("pool")
        has_groups = any(each.group for each in marks)
        rows = [
            {"path": each.path, "label": each.label, "mark": each.mark, "who": each.who}
            | ({group: each.group} if has_groups else {})
            | _columns(each)
            for each in marks
        ]
        header = list(dict.fromkeys(["path", "label", "mark", "who", *(name for row in rows for name in row)]))
        return files.csv_text([header, *([row.get(name, "") for name in header] for row in rows)])

    def corrections_table(self) -> str:
        """Return the corrected labels as the table that ``fit corrections=`` reads."""
        rows = ([mark.name, mark.label, mark.asked, mark.who] for mark in self.corrections())
        return files.csv_text([["path", "label", "was", "who"], *rows])

    def _write(self, content: dict[str, Any]) -> None:
        if not self.path.exists():
            files.append_line(self.path, json.dumps({"format": FORMAT}), flush=True)
        files.append_line(self.path, json.dumps(content), flush=True)

    def _replay(self, content: Any) -> None:
        """Take a line into account. A journal is untrusted like any file: what is no mark is skipped."""
        try:
            number = int(content["number"])
            if "undo" in content:
                undone = int(content["undo"])
                self._marks = {key: mark for key, mark in self._marks.items() if mark.number != undone}
            else:
                content = {"group": "", "columns": "", **content}  # Older journals have none.
                texts = {name: content[name] for name in Mark.__dataclass_fields__ if name != "number"}
                if not all(isinstance(value, str) for value in texts.values()):
                    return
                mark = Mark(**texts, number=number)
                self._marks.setdefault(mark.key, mark)
        except (KeyError, TypeError, ValueError, OverflowError):
            return
        self._next = max(self._next, number + 1)

    def _lines(self) -> Iterator[Any]:
        if not self.path.exists():
            return
        try:
            lines = list(files.json_lines(self.path, files.MAX_BYTES))
        except OSError as error:
            raise RunError(f"The journal {self.path} cannot be read ({files.reason(error)}).") from None
        written = lines[0].get("format", FORMAT) if lines and isinstance(lines[0], dict) else FORMAT
        if written != FORMAT:
            raise RunError(sentence(f"a journal must have format {FORMAT}", f"{written} in {self.path}"))
        yield from lines


def _columns(mark: Mark) -> dict[str, str]:
    """Return the columns beside an image. A journal is untrusted like any file."""
    with suppress(ValueError, RecursionError, AttributeError):
        items = json.loads(mark.columns or "{}").items()
        return {name: value for name, value in items if isinstance(value, str) and name not in ("path", "label")}
    return {}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
