"""Read a sweep folder for a page: records, failed cells, links to the pages of runs. Needs no torch."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lopsided.errors import RunError, sentence
from lopsided.recipe.words import amount
from lopsided.reports.wording import clean, duration, listed
from lopsided.runs.plan import CELLS
from lopsided.runs.records import Failure, Record, read_failures, read_records
from lopsided.runs.sweep import FAILURES, RECORDS, about_sweep

PAGE = "report.html"
"""A page's name in the folder that it is about."""

FEW = 30
"""With fewer test images of the rare class, a page warns."""

_KEY = re.compile(r"[\w-]{1,64}")


@dataclass(frozen=True)
class SweepData:
    """The records of a sweep, notes from reading them, failed cells with the number of attempts, and pages of runs."""

    name: str
    records: Sequence[Record]
    notes: Sequence[str]
    failures: Sequence[tuple[Failure, int]]
    pages: Mapping[str, str]
    """The addresses of those runs' pages that are there, by cell."""
    methods: Sequence[str] = ()
    baseline: str | None = None
    """The names of the methods and of the baseline, if the sweep is a comparison."""

    def summary(self, what: str) -> str:
        """Return the number of runs and their duration; ``what`` is the number of methods or losses in words."""
        if not self.records:
            return "No run has come to its end yet."
        scenarios = {record.scenario for record in self.records if record.scenario is not None}
        sources = listed(sorted({clean(record.source) for record in self.records}))
        parts = [f"{amount(len(self.records), 'run')} on {sources}: {what}"]
        if scenarios:
            parts.append(amount(len(scenarios), "scenario"))
        folds = {record.fold.fold for record in self.records if record.fold is not None}
        seeds = len({record.seed for record in self.records})
        parts.append(amount(len(folds), "fold") if folds else amount(seeds, "seed"))
        hours = duration(sum(record.seconds for record in self.records))
        failed = f" {amount(len(self.failures), 'cell')} failed." if self.failures else ""
        return f"{', '.join(parts)}. They took {hours} of training altogether.{failed}"

    def warnings(self, single: int) -> list[tuple[str, str]]:
        """Return warnings with reasons; ``single`` is the number of cells with one run."""
        failed, tested = len(self.failures), [(_tested(r), r.fold is not None) for r in self.records]
        folded, few = ([n for n, of_fold in tested if n < FEW and of_fold is folds] for folds in (True, False))
        found = []
        if failed:
            found.append((f"{amount(failed, 'cell')} failed", "They are listed below with their errors."))
        if single:
            why = "One run has no interval; how much of it is chance is unknown."
            found.append((f"{amount(single, 'cell')} with one run only", why))
        if folded:
            what = f"Only {amount(min(folded), 'image')} of the rare class"
            found.append((what, "All folds together test no more than these: see how wide the intervals are."))
        if few:
            what = f"{amount(len(few), 'run')} with fewer than {FEW} test images of the rare class"
            why = "Their test figures are noisy; held-out images, where there are, say more."
            found.append((what, f"The fewest are {min(few)}. {why}"))
        return [*found, *((clean(note), "") for note in self.notes)]

    def failure_rows(self) -> list[dict[str, Any]]:
        """Return the failed cells for a table."""
        return [{"name": clean(f.name), "attempts": n, "error": clean(f.error)} for f, n in self.failures]

    def run_row(self, record: Record) -> dict[str, Any]:
        """Return one run for the list at a page's end."""
        place = record.seed if record.fold is None else record.fold.fold
        link = self.pages.get(record.cell, "")
        return {"record": record, "place": place, "link": link, "time": duration(record.seconds)}


def read_sweep(folder: Path, beside: Path | None = None) -> SweepData:
    """Read a sweep folder; ``beside`` is where its page will lie, from which it links to the pages of its runs."""
    try:
        records, notes = read_records(folder / RECORDS) if (folder / RECORDS).exists() else ([], [])
        failures = failed_cells(read_failures(folder / FAILURES), records)
    except OSError as error:
        raise RunError(sentence("a sweep must be readable", f"{folder} ({error.strerror})")) from None
    name, pages = clean(folder.resolve().name), _find_pages(folder, beside or folder, records)
    about = about_sweep(folder)
    methods, baseline = about.get("methods"), about.get("baseline")
    known = [method for method in methods if isinstance(method, str)] if isinstance(methods, list) else []
    return SweepData(name, records, notes, failures, pages, known, baseline if baseline in known else None)


def failed_cells(failures: Iterable[Failure], records: Iterable[Record]) -> list[tuple[Failure, int]]:
    """Return the last failure of each cell that never came to its end, with the number of attempts."""
    done = {record.cell for record in records}
    open_failures = [failure for failure in failures if failure.cell not in done]
    attempts = Counter(failure.cell for failure in open_failures)
    return [(last, attempts[cell]) for cell, last in {failure.cell: failure for failure in open_failures}.items()]


def _tested(record: Record) -> int:
    """Return the number of test images of the rarest class, over all folds if the run is a fold."""
    return record.test.minority + (0 if record.fold is None else record.fold.rest_minority)


def is_key(cell: str) -> bool:
    """Return whether a cell is the name of a folder, not a path that leads elsewhere."""
    return _KEY.fullmatch(cell) is not None


def _find_pages(folder: Path, beside: Path, records: Iterable[Record]) -> dict[str, str]:
    """Return the addresses of those runs' pages that are there, by cell, as seen from ``beside``."""
    cells = {record.cell for record in records if is_key(record.cell)}
    found = {cell: folder / CELLS / cell / PAGE for cell in cells}
    return {
        cell: quote(os.path.relpath(page, beside).replace(os.sep, "/"))
        for cell, page in found.items()
        if page.is_file()
    }
