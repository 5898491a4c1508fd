"""The page of a sweep for the paper: figures over eta and gamma, verdicts, differences, failures. Needs no torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lopsided.errors import InputError
from lopsided.paper import page_figures as sweep_figures
from lopsided.paper import tables
from lopsided.paper.claims import BLIND, RULE, Verdict
from lopsided.paper.compare import Comparison, Protocol, compare
from lopsided.paper.page_figures import HeatMap, Link, anchor
from lopsided.paper.protocol import CL, FIGURES, Setting
from lopsided.recipe.words import amount
from lopsided.reports.page import render
from lopsided.reports.sweep_data import SweepData, read_sweep
from lopsided.reports.wording import ETA, GAMMA, MINUS, clean, signed
from lopsided.runs.comparison import WORDS, lopsidedness
from lopsided.runs.records import Record
from lopsided.runs.sweep import about_sweep

KIND = "reproduce"
"""The kind in ``sweep.json`` of a sweep for one of the paper's tables."""

_HYPHEN = re.compile(r"(?<![\w.])-(?=\d)")  # The hyphen of a negative number.


@dataclass(frozen=True)
class View:
    """One arrangement of the runs of a protocol: over eta, over gamma, over both, or by loss."""

    heading: str
    axis: str | None
    comparison: Comparison
    settings: tuple[Setting, ...]
    grid: bool = False


def is_of_paper(folder: Path) -> bool:
    """Return whether a sweep was made for a table of the paper."""
    return bool(about_sweep(folder).get("kind") == KIND)


def sweep_page(folder: Path, beside: Path | None = None) -> str:
    """Return the HTML page of a sweep. Its links to the pages of the runs are relative to the folder ``beside``."""
    sweep = read_sweep(folder, beside)
    groups = [
        _group(number, source, protocol, runs, sweep)
        for number, ((source, protocol), runs) in enumerate(by_protocol(sweep.records).items(), start=1)
    ]
    losses = {(record.method, Setting.of(record) or record.loss) for record in sweep.records}
    counts = Counter((r.source, Protocol.of(r), r.scenario, Setting.of(r) or r.loss) for r in sweep.records)
    return render(
        "sweep.html.j2",
        data={"kind": "sweep"},
        title=f"Sweep {sweep.name}",
        folder=sweep.name,
        summary=sweep.summary(amount(len(losses), "loss", "losses")),
        warnings=sweep.warnings(sum(number == 1 for number in counts.values())),
        groups=groups,
        failures=sweep.failure_rows(),
        rule=RULE,
        blind=BLIND,
        stars=tables.STARS,
        has_pages=bool(sweep.pages),
        eta=ETA,
        gamma=GAMMA,
    )


def by_protocol(records: Iterable[Record]) -> dict[tuple[str, Protocol], list[Record]]:
    """Group comparable records: the records of one source and one protocol."""
    found: dict[tuple[str, Protocol], list[Record]] = {}
    for record in records:
        found.setdefault((record.source, Protocol.of(record)), []).append(record)
    return found


def _group(number: int, source: str, protocol: Protocol, records: Sequence[Record], sweep: SweepData) -> dict[str, Any]:
    views, trouble = [], ""
    try:
        views = list(_views(records, protocol))
    except InputError as error:  # The runs differ in something that records do not hold. The page only lists them.
        trouble = str(error)
    cells = {(record.scenario, Setting.of(record), record.seed): record.cell for record in records}

    def link(*place: Any) -> str:
        return sweep.pages.get(cells.get(place, ""), "")

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
        "run_groups": list(_run_groups(number, records, sweep)),
    }


def _views(records: Sequence[Record], protocol: Protocol) -> Iterator[View]:
    there = [(record, setting) for record in records if (setting := Setting.of(record)) is not None]
    drawn = [(record, setting) for record, setting in there if record.scenario is not None]
    whole = [(record, setting) for record, setting in there if record.scenario is None]
    for part, table in ((drawn, "eta"), (drawn, "gamma"), (whole, "isic")):
        if not part:
            continue
        settings = sorted({setting for _, setting in part})
        scenarios = sorted({record.scenario for record, _ in part}, key=lopsidedness)
        if table == "isic":
            chosen, axis, heading = settings, None, "By loss"
        else:
            other = "gamma" if table == "eta" else "eta"
            chosen, axis = [setting for setting in settings if getattr(setting, other) == 0], table
            heading = f"Over {ETA}, the weight of the negatives" if table == "eta" else f"Over {GAMMA}, the focus"
            if not chosen or (len(chosen) < 2 and (table == "gamma" or len(settings) > 1)):
                continue
        comparison = compare([r for r, _ in part], table, protocol, scenarios=scenarios, settings=chosen)
        yield View(heading, axis, comparison, tuple(chosen))
    if any(setting.eta and setting.gamma for _, setting in drawn):
        settings = sorted({setting for _, setting in drawn})
        scenarios = sorted({record.scenario for record, _ in drawn}, key=lopsidedness)
        comparison = compare([r for r, _ in drawn], "eta", protocol, scenarios=scenarios, settings=settings)
        entries = {key: replace(entry, published=None) for key, entry in comparison.entries.items()}
        comparison = replace(comparison, entries=entries, verdicts=())
        yield View(f"Over {ETA} and {GAMMA} together", None, comparison, tuple(settings), grid=True)


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
                "rank": lopsidedness(scenario)[0],
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
    """Return a sentence on the largest difference to CL, on held-out images if there are any."""
    comparison = view.comparison
    split = "held_out" if "held_out" in comparison.splits else "test"
    found = [
        (scenario, setting, entry)
        for (scenario, setting, of, figure), entry in comparison.entries.items()
        if of == split and figure == "uwa" and entry.difference is not None and not math.isnan(entry.difference.low)
    ]
    if not found:
        return "No difference to CL has an interval: it needs two runs with seeds of CL and unequal differences."
    scenario, setting, entry = max(found, key=lambda item: abs(item[2].difference.value if item[2].difference else 0.0))
    value = entry.difference or entry.mean
    where = "" if scenario is None else f" at {clean(scenario)}"
    clear = sum(entry.differs for _, _, entry in found)
    return (
        f"{setting}{where} has the largest difference to CL in UWA on {WORDS[split]} images: "
        f"{signed(value.value, 1)} points [{signed(value.low, 1)}, {signed(value.high, 1)}]. "
        f"The interval excludes 0 for {clear} of {amount(len(found), 'difference')} to CL."
    )


def _verdicts(verdicts: Iterable[Verdict]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Group the verdicts by claim."""
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


def _run_groups(number: int, records: Iterable[Record], sweep: SweepData) -> Iterator[dict[str, Any]]:
    """Yield the runs of each cell for the list at the end of the page."""
    cells: dict[tuple[float, str, Setting, str], list[Record]] = {}
    for record in records:
        setting = Setting.of(record)
        place = (*lopsidedness(record.scenario), setting or CL, "" if setting else record.loss.label)
        cells.setdefault(place, []).append(record)
    for (*_, setting, other), runs in sorted(cells.items(), key=lambda item: item[0]):
        yield {
            "anchor": "" if other else anchor(number, runs[0].scenario, setting),
            "scenario": clean(runs[0].scenario or "all images"),
            "what": clean(other) or str(setting),
            "runs": [sweep.run_row(run) for run in sorted(runs, key=lambda run: run.seed)],
        }
