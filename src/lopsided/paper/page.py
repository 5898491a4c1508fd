"""The page of a sweep: figures over eta and gamma, verdicts, paired differences, failures. Needs no torch."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lopsided.errors import InputError, RunError, sentence
from lopsided.paper import page_figures as sweep_figures
from lopsided.paper import tables
from lopsided.paper.claims import BLIND, RULE, WORDS, Verdict
from lopsided.paper.compare import Comparison, Protocol, compare
from lopsided.paper.page_figures import HeatMap, Link, anchor
from lopsided.paper.protocol import CL, FIGURES, Setting
from lopsided.reports.page import render
from lopsided.reports.wording import ETA, GAMMA, MINUS, amount, clean, duration, listed, signed
from lopsided.runs.records import Failure, Record, read_failures, read_records
from lopsided.sweeps.engines import CELLS
from lopsided.sweeps.sweep import FAILURES, RECORDS

_HYPHEN = re.compile(r"(?<![\w.])-(?=\d)")  # Of a negative number.
_KEY = re.compile(r"[\w-]{1,64}")
PAGE = "report.html"
"""A page's name in the folder that it is about."""


@dataclass(frozen=True)
class View:
    """One way to lay out the runs of a protocol: over eta, over gamma, over both, or by loss."""

    heading: str
    axis: str | None
    comparison: Comparison
    settings: tuple[Setting, ...]
    grid: bool = False


def sweep_page(folder: Path, beside: Path | None = None) -> str:
    """Write the page of a sweep; ``beside`` is where it will lie, from which it links to the pages of its runs."""
    try:
        records, notes = read_records(folder / RECORDS) if (folder / RECORDS).exists() else ([], [])
        failures = failed_cells(read_failures(folder / FAILURES), records)
    except OSError as error:
        raise RunError(sentence("a sweep must be readable", f"{folder} ({error.strerror})")) from None
    pages = _find_pages(folder, beside or folder, records)
    groups = [
        _group(number, source, protocol, runs, pages)
        for number, ((source, protocol), runs) in enumerate(by_protocol(records).items(), start=1)
    ]
    return render(
        "sweep.html.j2",
        data={"kind": "sweep"},
        title=f"Sweep {clean(folder.resolve().name)}",
        folder=clean(folder.resolve().name),
        summary=_summary(records, failures),
        warnings=_warnings(records, failures, notes),
        groups=groups,
        failures=[{"name": f.name, "attempts": n, "error": clean(f.error)} for f, n in failures],
        rule=RULE,
        blind=BLIND,
        has_pages=bool(pages),
        eta=ETA,
        gamma=GAMMA,
    )


def by_protocol(records: Iterable[Record]) -> dict[tuple[str, Protocol], list[Record]]:
    """Gather records that may be compared with each other: of one source and one protocol."""
    found: dict[tuple[str, Protocol], list[Record]] = {}
    for record in records:
        found.setdefault((record.source, Protocol.of(record)), []).append(record)
    return found


def failed_cells(failures: Iterable[Failure], records: Iterable[Record]) -> list[tuple[Failure, int]]:
    """Return the last failure of each cell that never came to its end, with the number of attempts."""
    done = {record.cell for record in records}
    open_failures = [failure for failure in failures if failure.cell not in done]
    attempts = Counter(failure.cell for failure in open_failures)
    return [(last, attempts[cell]) for cell, last in {failure.cell: failure for failure in open_failures}.items()]


def _setting(record: Record) -> Setting:
    return Setting(record.eta, record.gamma)


def _find_pages(folder: Path, beside: Path, records: Iterable[Record]) -> dict[str, str]:
    """Return the addresses of those runs' pages that are there, by cell, as seen from ``beside``."""
    cells = {record.cell for record in records if _KEY.fullmatch(record.cell)}  # Not a path that leads elsewhere.
    found = {cell: folder / CELLS / cell / PAGE for cell in cells}
    return {
        cell: quote(os.path.relpath(page, beside).replace(os.sep, "/"))
        for cell, page in found.items()
        if page.is_file()
    }


def _summary(records: Sequence[Record], failures: Sequence[object]) -> str:
    if not records:
        return "No run has come to its end yet."
    scenarios = {record.scenario for record in records if record.scenario is not None}
    settings = {(record.method, record.loss, record.eta, record.gamma) for record in records}
    sources = listed(sorted({clean(record.source) for record in records}))
    parts = [f"{amount(len(records), 'run')} on {sources}: {amount(len(settings), 'loss', 'losses')}"]
    if scenarios:
        parts.append(amount(len(scenarios), "scenario"))
    parts.append(amount(len({record.seed for record in records}), "seed"))
    hours = duration(sum(record.seconds for record in records))
    failed = f" {amount(len(failures), 'cell')} failed." if failures else ""
    return f"{', '.join(parts)}. They took {hours} of training altogether.{failed}"


def _warnings(records: Sequence[Record], failures: Sequence[object], notes: Sequence[str]) -> list[tuple[str, str]]:
    found = []
    if failures:
        found.append((f"{amount(len(failures), 'cell')} failed", "They are listed below with their errors."))
    counts = Counter((record.source, Protocol.of(record), record.scenario, _setting(record)) for record in records)
    single = sum(number == 1 for number in counts.values())
    if single:
        found.append(
            (
                f"{amount(single, 'cell')} with one run only",
                "One run has no interval; how much of a figure is chance cannot be told from it.",
            )
        )
    few = [record for record in records if record.test.minority < 30]
    if few:
        least = min(record.test.minority for record in few)
        found.append(
            (
                f"{amount(len(few), 'run')} with fewer than 30 test images of the rare class",
                f"The fewest are {least}. Their test figures are noisy; held-out images, where there are, say more.",
            )
        )
    return [*found, *((clean(note), "") for note in notes)]


def _group(
    number: int, source: str, protocol: Protocol, records: Sequence[Record], pages: Mapping[str, str]
) -> dict[str, Any]:
    views, trouble = [], ""
    try:
        views = list(_views(records, protocol)) if protocol.method == "two-stage" else []
    except InputError as error:  # Runs that differ in what a record does not tell cannot be laid out; they are listed.
        trouble = str(error)
    cells = {(record.scenario, _setting(record), record.seed): record.cell for record in records}

    def link(*place: Any) -> str:
        return pages.get(cells.get(place, ""), "")

    return {
        "title": clean(source),
        "protocol": str(protocol),
        "verdicts": _verdicts([verdict for view in views for verdict in view.comparison.verdicts]),
        "views": [
            {
                "heading": view.heading,
                "words": _words(view),
                "heat_maps": list(_heat_maps(view, number, link)),
                "lines": [] if view.grid else _lines(view, link),
                "has_published": any(entry.published is not None for entry in view.comparison.entries.values()),
                "splits": [(sweep_figures.STYLES[split], WORDS[split]) for split in view.comparison.splits],
                "differences": list(_differences(view)),
                "notes": tables.notes(view.comparison) if view.comparison.is_of_paper and not view.grid else [],
            }
            for view in views
        ],
        "trouble": clean(trouble),
        "run_groups": list(_run_groups(number, records, pages)),
    }


def _views(records: Sequence[Record], protocol: Protocol) -> Iterator[View]:
    drawn = [record for record in records if record.scenario is not None]
    whole = [record for record in records if record.scenario is None]
    for part, table in ((drawn, "eta"), (drawn, "gamma"), (whole, "isic")):
        if not part:
            continue
        settings = sorted({_setting(record) for record in part})
        scenarios = sorted({record.scenario for record in part}, key=_lopsidedness)
        if table == "isic":
            chosen, axis, heading = settings, None, "By loss"
        else:
            other = "gamma" if table == "eta" else "eta"
            chosen, axis = [setting for setting in settings if getattr(setting, other) == 0], table
            heading = f"Over {ETA}, the weight of the negatives" if table == "eta" else f"Over {GAMMA}, the focus"
            if not chosen or (len(chosen) < 2 and (table == "gamma" or len(settings) > 1)):
                continue
        comparison = compare(part, table, protocol, scenarios=scenarios, settings=chosen)
        yield View(heading, axis, comparison, tuple(chosen))
    both = sorted({_setting(record) for record in drawn if record.eta and record.gamma})
    if both:
        settings = sorted({_setting(record) for record in drawn})
        scenarios = sorted({record.scenario for record in drawn}, key=_lopsidedness)
        comparison = compare(drawn, "eta", protocol, scenarios=scenarios, settings=settings)
        entries = {key: replace(entry, published=None) for key, entry in comparison.entries.items()}
        comparison = replace(comparison, entries=entries, verdicts=())
        yield View(f"Over {ETA} and {GAMMA} together", None, comparison, tuple(settings), grid=True)


def _lopsidedness(scenario: str | None) -> tuple[float, str]:
    first = (scenario or "").partition(":")[0]
    return (float(first) if first.replace(".", "", 1).isdigit() else 0.0, scenario or "")


def _heat_maps(view: View, number: int, link: Link) -> Iterator[HeatMap]:
    comparison = view.comparison
    for figure in FIGURES:
        for split in comparison.splits:
            what = f"{WORDS[figure]} on {WORDS[split]} images, per cent"
            if view.grid:
                etas, gammas = (sorted({getattr(s, name) for s in view.settings}) for name in ("eta", "gamma"))
                for scenario in comparison.scenarios:
                    places = [(f"{eta:g}", [(scenario, Setting(eta, gamma)) for gamma in gammas]) for eta in etas]
                    names = [f"{gamma:g}" for gamma in gammas]
                    caption = f"{scenario}: {what}"
                    corner = f"{ETA} down, {GAMMA} across"
                    yield sweep_figures.heat_map(
                        comparison, places, names, corner, caption, figure, split, number, link
                    )
                continue
            places = [
                (clean(scenario or "all images"), [(scenario, setting) for setting in view.settings])
                for scenario in comparison.scenarios
            ]
            names = [str(s) if view.axis is None else f"{getattr(s, view.axis):g}" for s in view.settings]
            corner = {"eta": ETA, "gamma": GAMMA}.get(view.axis or "", "")
            yield sweep_figures.heat_map(comparison, places, names, corner, what, figure, split, number, link)


def _lines(view: View, link: Link) -> list[dict[str, Any]]:
    return [
        {
            "figure": figure,
            "plots": [
                (
                    clean(scenario or "all images"),
                    sweep_figures.lines(
                        view.comparison,
                        scenario,
                        view.settings,
                        view.axis,
                        figure,
                        sweep_figures.y_range(view.comparison, figure, view.settings),
                        link,
                    ),
                )
                for scenario in view.comparison.scenarios
            ],
        }
        for figure in FIGURES
    ]


def _differences(view: View) -> Iterator[dict[str, Any]]:
    for (scenario, setting, split, figure), entry in view.comparison.entries.items():
        if setting != CL and entry.difference is not None:
            value = entry.difference
            yield {
                "scenario": clean(scenario or "all images"),
                "rank": _lopsidedness(scenario)[0],
                "loss": str(setting),
                "figure": WORDS[figure],
                "split": WORDS[split],
                "pairs": entry.pairs,
                "value": value.value,
                "text": signed(value.value, 1),
                "interval": f"[{signed(value.low, 1)}, {signed(value.high, 1)}]" if not math.isnan(value.low) else "",
                "differs": entry.differs,
            }


def _words(view: View) -> str:
    """Say where a loss is farthest from CL, on the images that say most."""
    comparison = view.comparison
    split = "held_out" if "held_out" in comparison.splits else "test"
    found = [
        (scenario, setting, entry)
        for (scenario, setting, of, figure), entry in comparison.entries.items()
        if of == split and figure == "uwa" and entry.difference is not None and not math.isnan(entry.difference.low)
    ]
    if not found:
        return "No loss has two runs whose seeds CL has, too, and whose differences are not all the same number."
    scenario, setting, entry = max(found, key=lambda item: abs(item[2].difference.value if item[2].difference else 0.0))
    value = entry.difference or entry.mean
    where = "" if scenario is None else f" at {clean(scenario)}"
    clear = sum(entry.differs for _, _, entry in found)
    return (
        f"Farthest from CL in UWA on {WORDS[split]} images is {setting}{where}: {signed(value.value, 1)} points "
        f"[{signed(value.low, 1)}, {signed(value.high, 1)}]. Of {amount(len(found), 'difference')} to CL, "
        f"{clear} {'has an' if clear == 1 else 'have'} {'interval' if clear == 1 else 'intervals'} without 0."
    )


def _verdicts(verdicts: Iterable[Verdict]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Gather what is said of each claim."""
    found: dict[str, list[dict[str, Any]]] = {}
    for verdict in verdicts:
        told = {
            "decision": verdict.decision,
            "style": verdict.decision.replace(" ", "-"),
            "where": verdict.where,
            "reason": _HYPHEN.sub(MINUS, verdict.reason()),
            "decides": verdict.decides,
        }
        found.setdefault(verdict.text, []).append(told)
    return list(found.items())


def _run_groups(number: int, records: Iterable[Record], pages: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the runs of each cell, for the list at the page's end."""
    cells: dict[tuple[float, str, Setting, str], list[Record]] = {}
    for record in records:
        place = (*_lopsidedness(record.scenario), _setting(record), record.loss)
        cells.setdefault(place, []).append(record)
    for (*_, setting, loss), runs in sorted(cells.items(), key=lambda item: item[0]):
        is_contrastive = runs[0].method == "two-stage"
        yield {
            "anchor": anchor(number, runs[0].scenario, setting) if is_contrastive else "",
            "scenario": clean(runs[0].scenario or "all images"),
            "loss": str(setting) if is_contrastive else loss,
            "runs": [
                {"record": run, "link": pages.get(run.cell, ""), "time": duration(run.seconds)}
                for run in sorted(runs, key=lambda run: run.seed)
            ],
        }
