"""The page of a sweep of methods: means, differences to any of them, recalls, failures, runs. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from lopsided.evaluation.intervals import Estimate
from lopsided.evaluation.metric_table import is_share
from lopsided.recipe.words import amount
from lopsided.reports import fold_page, svg
from lopsided.reports.page import LIMIT, render
from lopsided.reports.sweep_data import SweepData, read_sweep
from lopsided.reports.wording import clean, duration, signed
from lopsided.runs.answer import MISSING, answer, mean_text, shown_interval, time_text
from lopsided.runs.comparison import COMPARED_METRICS, RECALL, SECONDS, WORDS, Comparison, compare, name_methods
from lopsided.runs.records import Record

MIN_ROOM = 100_000
"""Pictures with a smaller budget in bytes are not tried."""


def comparison_page(
    folder: Path,
    beside: Path | None = None,
    *,
    allow_outside: bool = False,
    tell: Callable[[str], None] = lambda note: None,
) -> str:
    """Write the page of a sweep; ``beside`` is where it will lie, from which it links to the pages of its runs.

    Files that a table names outside its folder become pictures only with ``allow_outside``. ``tell`` gets the reason
    why pictures are missing.
    """
    sweep = read_sweep(folder, beside)
    sources: dict[str, list[Record]] = {}
    for record in sweep.records:
        sources.setdefault(record.source, []).append(record)
    comparisons = [_compare(records, sweep) for records in sources.values()]
    single = sum(
        len(entry.runs) == 1 for each in comparisons for key, entry in each.entries.items() if key[3] == SECONDS
    )
    passed_over = sum(comparison.passed_over for comparison in comparisons)
    warnings = sweep.warnings(single)
    if passed_over:
        why = "An earlier run has the same method, data and seed."
        warnings.append((f"{amount(passed_over, 'run')} ignored", why))
    there = {metric for comparison in comparisons for metric in comparison.metrics}
    methods = {method for comparison in comparisons for method in comparison.methods}
    room = fold_page.PICTURE_LIMIT
    while True:
        images, pictures, notes = _images(folder, comparisons, sources, sweep, room, allow_outside=allow_outside)
        page = render(
            "comparison.html.j2",
            data={"kind": "sweep"},
            pictures=pictures,
            images=images,
            title=_title(comparisons, sweep.name),
            folder=sweep.name,
            summary=sweep.summary(amount(len(methods), "method")),
            warnings=[*warnings, *notes],
            metrics=[(metric, WORDS[metric]) for metric in COMPARED_METRICS if metric in there],
            groups=[
                _group(source, comparison, records, sweep, is_titled=len(comparisons) == 1 and _is_titled(comparison))
                for (source, records), comparison in zip(sources.items(), comparisons, strict=True)
            ],
            has_folds=any(comparison.folds is not None for comparison in comparisons),
            has_seeds=any(comparison.folds is None for comparison in comparisons),
            failures=sweep.failure_rows(),
            has_pages=bool(sweep.pages),
        )
        if room < MIN_ROOM or len(page.encode()) <= LIMIT:
            tell("" if images is None else images["picture_note"])
            return page
        room //= 2


def _images(
    folder: Path,
    comparisons: Sequence[Comparison],
    sources: Mapping[str, list[Record]],
    sweep: SweepData,
    room: int,
    *,
    allow_outside: bool,
) -> tuple[dict[str, Any] | None, str, list[tuple[str, str]]]:
    """Return the sections that show images, the CSS rules of the pictures, and warnings, if the runs are folds.

    They are those of the first source with folds and of its first scenario.
    """
    for number, (comparison, records) in enumerate(zip(comparisons, sources.values(), strict=True), start=1):
        if comparison.folds is None or not comparison.scenarios:
            continue
        scenario = comparison.scenarios[0]
        own = [record for record in records if record.scenario == scenario]
        data, notes = fold_page.read_out_of_fold(folder, own, name_methods(records, sweep.methods))
        warnings = [(note, "") for note in notes]
        if data is None:
            return None, "", warnings
        shown = fold_page.shown_images(data, room, allow_outside=allow_outside)
        found = {
            "group": number,
            "scenario": _scenario(scenario),
            "curves": fold_page.curve_plots(data),
            "pairs": list(fold_page.disagreements(data, shown)),
            "picture_note": clean(shown.note),
        }
        return found, shown.css(), warnings
    return None, "", []


def _compare(records: Sequence[Record], sweep: SweepData) -> Comparison:
    methods = name_methods(records, sweep.methods)
    return compare(records, methods=methods, baseline=sweep.baseline if sweep.baseline in methods.values() else None)


def _is_titled(comparison: Comparison) -> bool:
    """Return whether the answer is the title of a page about one comparison."""
    return len(comparison.scenarios) == 1 and bool(answer(comparison, comparison.scenarios[0]).use())


def _title(comparisons: Sequence[Comparison], name: str) -> str:
    """Return which method to use, or the name of the sweep if there are several answers or none."""
    if len(comparisons) == 1 and _is_titled(comparisons[0]):
        return clean(answer(comparisons[0], comparisons[0].scenarios[0]).use())
    return "Comparison" if name.lower() == "comparison" else f"Comparison {name}"


def _group(
    source: str, comparison: Comparison, records: Sequence[Record], sweep: SweepData, *, is_titled: bool
) -> dict[str, Any]:
    return {
        "title": clean(source),
        "protocol": "all runs" if comparison.folds is None else f"all runs of {comparison.folds} folds",
        "sentences": [
            clean(text)
            for scenario in comparison.scenarios
            for text in answer(comparison, scenario).sentences()[is_titled:]
        ],
        "rule": comparison.rule,
        "runs_are": "runs" if comparison.folds is None else "folds",
        "interval": "Student's 95 % interval" if comparison.folds is None else "a 95 % interval for folds that overlap",
        "methods": [clean(method) for method in comparison.methods],
        "baseline": clean(comparison.baseline),
        "about": [(clean(method), clean(comparison.about.get(method, ""))) for method in comparison.methods],
        "scenarios": [_scenario(scenario) for scenario in comparison.scenarios],
        "classes": [clean(name) for name in comparison.classes],
        "means": list(_means(comparison)),
        "differences": list(_differences(comparison)),
        "recalls": list(_recalls(comparison)),
        "run_groups": list(_run_groups(comparison, records, sweep)),
    }


def _scenario(scenario: str | None) -> str:
    return clean(scenario or "all images")


def _shown(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Yield the sets of images and the metrics that a table is made for."""
    for split in comparison.splits:
        for metric in COMPARED_METRICS:
            if metric in comparison.metrics:
                yield split, metric


def _means(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Yield a table of all methods for each scenario, set of images and metric."""
    for split, metric in _shown(comparison):
        means = [entry.mean for key, entry in comparison.entries.items() if key[2:] == (split, metric)]
        shares = is_share(metric)
        low, high = svg.padded(limit for mean in means for limit in (mean.value, *(_limits(mean, metric) or ())))
        low, high = max(low, 0.0), min(high, 100.0) if shares else high
        where = comparison.images(split)
        unit = ", per cent" if shares else ""
        for scenario in comparison.scenarios:
            yield {
                "metric": metric,
                "split": split,
                "caption": f"{_scenario(scenario)}: {WORDS[metric]} on {where} images{unit}",
                "digits": 1 if shares else 3,
                "low": f"{low:.0f}" if shares else f"{low:.2f}",
                "high": f"{high:.0f}" if shares else f"{high:.2f}",
                "rows": [
                    _mean_row(comparison, scenario, method, split, metric, (low, high)) for method in comparison.methods
                ],
            }


def _mean_row(
    comparison: Comparison, scenario: str | None, method: str, split: str, metric: str, scale: svg.Range
) -> dict[str, Any]:
    entry = comparison.entry(scenario, method, split, metric)
    if entry is None:
        return {"method": clean(method), "mean": None}
    base = comparison.entry(scenario, comparison.baseline, split, metric)
    limits, digits, time = (
        _limits(entry.mean, metric),
        1 if is_share(metric) else 3,
        comparison.entry(scenario, method, "test", SECONDS),
    )
    seconds = math.nan if time is None else time.mean.value
    return {
        "method": clean(method),
        "mean": entry.mean.value,
        "strip": _strip(method, entry.mean, None if base is None else base.mean.value, scale, metric),
        "interval": "" if limits is None else f"[{limits[0]:.{digits}f}, {limits[1]:.{digits}f}]",
        "runs": len(entry.runs),
        "seconds": seconds,
        "time": time_text(seconds) if seconds < 10 else duration(seconds),
    }


def _limits(mean: Estimate, metric: str) -> tuple[float, float] | None:
    """Return the interval of a mean. A share lies between 0 and 100 per cent, a log loss above 0."""
    if is_share(metric):
        return shown_interval(mean)
    return None if math.isnan(mean.high) else (max(mean.low, 0.0), mean.high)


def _strip(method: str, mean: Estimate, base: float | None, scale: svg.Range, metric: str) -> Markup:
    """Draw a mean with its interval on the table's scale, with a mark where the baseline is."""

    def share(value: float) -> float:
        return (value - scale[0]) / (scale[1] - scale[0]) if scale[1] > scale[0] else 0.5

    low, high = _limits(mean, metric) or (mean.value, mean.value)
    label = f"{clean(method)}: {mean_text(mean, metric)}"
    return svg.strip(label, share(mean.value), share(low), share(high), None if base is None else share(base))


def _differences(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Yield a table for each set of images, metric and baseline: methods down, scenarios across."""
    for split, metric in _shown(comparison):
        for number, baseline in enumerate(comparison.methods, start=1):
            yield {
                "metric": metric,
                "split": split,
                "baseline": number,
                "caption": f"{WORDS[metric]} on {comparison.images(split)} images, "
                f"{'points above' if is_share(metric) else 'difference to'} {clean(baseline)}",
                "rows": [
                    (
                        clean(method),
                        [
                            _difference(comparison, scenario, method, split, metric, baseline)
                            for scenario in comparison.scenarios
                        ],
                    )
                    for method in comparison.methods
                    if method != baseline
                ],
            }


def _difference(
    comparison: Comparison, scenario: str | None, method: str, split: str, metric: str, baseline: str
) -> dict[str, Any] | None:
    found = comparison.difference(scenario, method, split, metric, to=baseline)
    if found is None:
        return None
    value, digits = found.estimate, 1 if is_share(metric) else 3
    interval = "" if math.isnan(value.low) else f"[{signed(value.low, digits)}, {signed(value.high, digits)}]"
    return {"text": signed(value.value, digits), "interval": interval, "pairs": found.pairs, "differs": found.differs}


def _recalls(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Yield a table for each scenario and set of images: methods down, classes across."""
    for split in comparison.splits:
        for scenario in comparison.scenarios:
            rows = []
            for method in comparison.methods:
                found = [
                    comparison.entry(scenario, method, split, f"{RECALL}{i}") for i in range(len(comparison.classes))
                ]
                rows.append((clean(method), [MISSING if entry is None else mean_text(entry.mean) for entry in found]))
            yield {
                "split": split,
                "caption": f"{_scenario(scenario)}: recall on {comparison.images(split)} "
                "images, per cent, mean with 95 % interval",
                "rows": rows,
            }


def _run_groups(comparison: Comparison, records: Sequence[Record], sweep: SweepData) -> Iterator[dict[str, Any]]:
    """Yield the runs of each cell, for the list at the page's end."""
    names = name_methods(records, comparison.methods)
    for scenario in comparison.scenarios:
        for treatment, name in names.items():
            own = [record for record in records if (record.scenario, record.treatment) == (scenario, treatment)]
            if own:
                yield {
                    "anchor": "",
                    "scenario": _scenario(scenario),
                    "what": clean(name),
                    "runs": [
                        sweep.run_row(run)
                        for run in sorted(own, key=lambda run: (run.seed, run.fold.fold if run.fold else 0))
                    ],
                }
