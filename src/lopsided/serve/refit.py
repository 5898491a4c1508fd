"""Train again with the marks, in a process of its own. Earlier runs stay, and any of them can be used again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from threading import RLock
from typing import Any

from lopsided import files
from lopsided.errors import LopsidedError, RunError
from lopsided.recipe import Recipe
from lopsided.runs.folder import FOLDS, METRICS, RECIPE, Run
from lopsided.serve.comparison import compare_runs
from lopsided.serve.journal import GROUP, Journal
from lopsided.serve.limits import RefusedError
from lopsided.serve.model import run_facts

BASE = "0"
"""The id of the run that the server was started with. The others are 1, 2 and so on."""
CURRENT = "current.json"
_NICE = 10
_TAIL = 4000


class Refits:
    """The runs of a work folder: ``runs/1``, ``runs/2``; their tables of marks in ``tables/``."""

    def __init__(self, work: Path, base: Path) -> None:
        self.work, self._base = work, base
        self._lock = RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._number = ""
        self._compared = lru_cache(32)(compare_runs)

    def folder(self, name: str) -> Path:
        """Return the folder of the run with this id. Raise if there is none."""
        if name == BASE:
            return self._base
        if name not in self._numbers():
            raise RefusedError(404, "not_found", "There is no such run.")
        return self.work / "runs" / name

    @property
    def current(self) -> str:
        """The id of the run that answers: the one that was chosen last, if it is there and finished."""
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            name = str(json.loads(files.read_whole(self.work / CURRENT))["run"])
            if name in self._numbers() and _is_finished(self.folder(name)):
                return name
        return BASE

    def finished(self, name: str) -> Path:
        """Return the folder of a finished run."""
        folder = self.folder(name)
        if not _is_finished(folder):
            raise RefusedError(409, "unfinished", "This run is not finished.")
        return folder

    def choose(self, name: str) -> None:
        """Note which run answers, for the next start."""
        files.atomic_write(self.work / CURRENT, json.dumps({"run": name}) + "\n")

    def start(self, journal: Journal) -> dict[str, Any]:
        """Start to train the recipe of the current run with all marks; or continue what was interrupted."""
        with self._lock:
            newest = max(self._numbers(), key=int, default="")
            state = self._state(newest) if newest else "none"
            if state == "running":
                raise RefusedError(409, "running", "A run is being trained already.")
            if state == "stopped":
                return self._run(newest, ["--resume"])
            recipe, marks = Run.open(self.folder(self.current)).recipe, journal.marks("pool")
            if not any(mark.label for mark in marks) and not journal.corrections():
                text = "There is nothing to train with: mark some images of a class, or correct a label."
                raise RefusedError(409, "nothing", text)
            number = str(int(newest or "0") + 1)
            recipe = self._with_tables(recipe, number, journal)
            files.atomic_write(self._table(f"{number}-recipe.toml"), recipe.to_toml())
            files.make_folder(self.work / "runs" / number)
            return self._run(number, ["--recipe", str(self._table(f"{number}-recipe.toml"))])

    def stop(self) -> None:
        """Interrupt the training, which can be continued."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(30)
                if self._process.poll() is None:
                    self._process.kill()
                    self._process.wait()
            self._number = ""

    def status(self) -> dict[str, Any]:
        """Return all runs, and how far the one is that is being trained."""
        with self._lock:
            current = self.current
            runs = [
                {"id": name, "name": title, "current": name == current, **run_facts(self.folder(name))}
                for name, title in [
                    (BASE, f"run {self._base.absolute().name}"),
                    *((number, f"refit {number}") for number in sorted(self._numbers(), key=int)),
                ]
            ]
            found: dict[str, Any] = {"runs": runs}
            newest = max(self._numbers(), key=int, default="")
            if not newest:
                return found | {"state": "none"}
            state = self._state(newest)
            if state == "running":
                return found | {"state": state, "run": newest, **self._progress(self.folder(newest))}
            return (
                found
                | {"state": state, "run": newest}
                | ({} if state == "finished" else {"words": self._last_line(newest)})
            )

    def compare(self, old: str, new: str) -> dict[str, Any]:
        """Compare two runs on the same held-out images."""
        return self._compared(self.folder(old), self.folder(new))

    def _with_tables(self, recipe: Recipe, number: str, journal: Journal) -> Recipe:
        """Return a recipe with the marks as tables, instead of those of earlier runs of this folder."""
        changes: dict[str, Any] = {"data.allow_outside": True}
        parts = {
            "more": journal.marks_table(recipe.data.group or GROUP) if journal.marks("pool") else "",
            "corrections": journal.corrections_table() if journal.corrections() else "",
        }
        for field, text in parts.items():
            tables = [each for each in getattr(recipe.data, field) or () if Path(each).parent != self.work / "tables"]
            if text:
                path = self._table(f"{number}-{field}.csv")
                files.atomic_write(path, text.encode(errors="surrogateescape"))
                tables.append(str(path))
            changes[f"data.{field}"] = tables or None
        return recipe.override(**changes)

    def _table(self, name: str) -> Path:
        return files.make_folder(self.work / "tables") / name

    def _run(self, number: str, further: list[str]) -> dict[str, Any]:
        command = [sys.executable, "-m", "lopsided", "fit", "--out", str(self.work / "runs" / number), *further]
        with (self.work / "runs" / f"{number}.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        if hasattr(os, "setpriority"):  # Those who use the page go first.
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICE)
        self._number = number
        return self.status()

    def _state(self, number: str) -> str:
        """Return what became of the newest training: running, finished, stopped (it can be continued), or failed."""
        folder = self.folder(number)
        if self._process is not None and self._process.poll() is None:
            return "running"
        if _is_finished(folder):
            return "finished"
        try:
            files.check_free(folder)
        except RunError:  # A server that was killed has left it running.
            return "running"
        return "stopped" if self._number != number and (folder / RECIPE).is_file() else "failed"

    def _progress(self, folder: Path) -> dict[str, Any]:
        """Return the number of trainings of a run that are finished, and of all."""
        total = 1
        with suppress(LopsidedError):
            data = Run.open(folder).recipe.data
            total = 1 if data.folds is None else data.folds * data.repeats + 1
        done = sum(1 for _ in (folder / FOLDS).glob(f"*/{METRICS}"))
        return {"done": min(done, total), "total": total, "words": self._last_line(folder.name)}

    def _last_line(self, number: str) -> str:
        """Return what the training said last."""
        try:
            with (self.work / "runs" / f"{number}.log").open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")

    def _numbers(self) -> list[str]:
        found = (path.name for path in (self.work / "runs").glob("*") if path.is_dir())
        return [name for name in found if name.isdecimal() and name.isascii() and str(int(name)) == name != BASE]


def _is_finished(folder: Path) -> bool:
    return (folder / METRICS).is_file()
