"""A table of the paper with the results of the runs, for a terminal and as Markdown and CSV. Needs no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from lopsided.files import csv_text
from lopsided.paper.claims import BLIND, RULE
from lopsided.paper.compare import Comparison, Entry
from lopsided.paper.protocol import CL, FIGURES, RUNS, WORDS, Setting
from lopsided.reports.wording import clean
from lopsided.runs.answer import MISSING, difference_text, markdown_table, mean_text, runs_text

if TYPE_CHECKING:
    from rich.console import Console

STARS = (
    "* marks an interval that excludes 0. The intervals are not corrected for the number of cells: about one in twenty "
    "excludes 0 by chance. All cells of a scenario are compared with the same runs of CL, so their stars are not "
    "independent: if those runs are lucky or unlucky, all differences move together."
)
"""The meaning of a star, for tables and pages."""

MISPRINT = "misprint"
PUBLISHED = "published"
COLOURS = {"supported": "green", "contradicted": "red", "cannot tell": "yellow"}
CSV_COLUMNS = (
    "scenario",
    "loss",
    "eta",
    "gamma",
    "split",
    "figure",
    "runs",
    "mean",
    "low",
    "high",
    "pairs",
    "difference",
    "difference_low",
    "difference_high",
    "published",
    "published_is_misprint",
)
_DATA = {
    "eta": "Fashion-MNIST tops",
    "gamma": "Fashion-MNIST tops",
    "isic": "Melanoma and dermatofibroma of ISIC 2018",
}
_OVER = {"eta": "over eta (gamma = 0)", "gamma": "over gamma (eta = 0)"}
_NO_CLAIMS = "The paper's claims are about other data, so there are no verdicts for these runs."


@dataclass(frozen=True)
class Block:
    """The part of a table for one figure, as text. Each group of rows is a scenario."""

    title: str
    header: list[str]
    groups: list[list[list[str]]]


def title(comparison: Comparison) -> str:
    """Return the title of the table."""
    name = axis(comparison)
    if comparison.is_of_paper and comparison.table == "isic":
        return _DATA["isic"]
    data = _DATA[comparison.table] if comparison.is_of_paper else " ".join(clean(comparison.source).split())
    return f"{data} {'by loss' if name is None else _OVER[name]}"


def axis(comparison: Comparison) -> str | None:
    """Return "eta" or "gamma" if the columns are its values, or None if the columns are losses."""
    if comparison.table == "isic":
        return None
    other = {"eta": "gamma", "gamma": "eta"}[comparison.table]
    return comparison.table if all(getattr(setting, other) == 0 for setting in comparison.settings) else None


def column_names(comparison: Comparison) -> list[str]:
    """Return the column headers: values of eta or gamma, or names of losses."""
    name = axis(comparison)
    return [str(setting) if name is None else f"{getattr(setting, name):g}" for setting in comparison.settings]


def blocks(comparison: Comparison) -> list[Block]:
    """Return a block per figure. Each scenario has rows of published, test and held-out figures."""
    name, columns = axis(comparison), column_names(comparison)
    if name is not None and columns:
        columns[0] = f"{name} {columns[0]}"
    first = "data" if comparison.table == "isic" else "scenario"
    return [
        Block(
            f"{WORDS[figure]}, per cent",
            [first, "images", *columns],
            [_rows(comparison, scenario, figure) for scenario in comparison.scenarios],
        )
        for figure in FIGURES
    ]


def _rows(comparison: Comparison, scenario: str | None, figure: str) -> list[list[str]]:
    entries = {
        split: [comparison.entry(scenario, setting, split, figure) for setting in comparison.settings]
        for split in comparison.splits
    }
    rows = []
    if comparison.is_of_paper:
        rows.append([PUBLISHED, *(published_text(comparison, scenario, s, figure) for s in comparison.settings)])
    for split, row in entries.items():
        runs = Counter(entry.runs for entry in row if entry is not None)
        usual = runs.most_common(1)[0][0] if runs else 0
        told = f", {runs_text(usual)}" if runs else ""
        rows.append([f"{WORDS[split]}{told}", *(_mean(entry, usual) for entry in row)])
    for split, row in entries.items():
        if CL not in comparison.settings and not any(entry is not None and entry.difference for entry in row):
            continue  # Without CL there are no differences.
        cells = zip(comparison.settings, row, strict=True)
        rows.append(
            [f"{WORDS[split]} - CL", *("" if setting == CL else _difference(entry) for setting, entry in cells)]
        )
    rows = rows or [[MISSING] * (1 + len(comparison.settings))]
    everything = "ISIC" if comparison.is_of_paper else "all images"
    first = everything if scenario is None else scenario
    return [["" if i else first, *row] for i, row in enumerate(rows)]


def published_text(
    comparison: Comparison, scenario: str | None, setting: Setting, figure: str, missing: str = MISSING
) -> str:
    """Return the published figure of a cell as text, "misprint", or ``missing``."""
    if comparison.is_misprint(scenario, setting, figure):
        return MISPRINT
    value = comparison.published(scenario, setting, figure)
    return missing if value is None else f"{value:.2f}"


def _mean(entry: Entry | None, usual: int) -> str:
    """Return a mean with its interval, and with its number of runs if that differs from ``usual``."""
    if entry is None:
        return MISSING
    text = mean_text(entry.mean)
    return text if entry.runs == usual else f"{text} ({entry.runs})"


def _difference(entry: Entry | None) -> str:
    return MISSING if entry is None or entry.difference is None else difference_text(entry.difference)


def notes(comparison: Comparison) -> list[str]:
    """Return notes on the meaning of the numbers, on comparisons with the paper, and on missing cells."""
    has_all = not any(math.isnan(entry.mean.high) for entry in comparison.entries.values())
    found = [
        f"Runs: {runs_text(*comparison.runs)} of each cell; {comparison.protocol}.",
        "Each figure is the mean over runs with Student's 95 % interval."
        f"{'' if has_all else ' One run has no interval, nor have runs that all agree.'}",
    ]
    if any(entry.difference is not None for entry in comparison.entries.values()):
        found.append(f"A difference to CL is the mean difference between runs of the same seed. {STARS}")
    if "held_out" in comparison.splits:
        found.append(
            "Test images are those of the recipe's split, 30 % in the paper. Held-out images are those that the "
            "scenario did not draw. Their accuracy is weighted by the scenario's proportions."
        )
    if comparison.majority is not None:
        vote, beside = f"{comparison.majority:.1f}", ", and a UWA of 50" if comparison.is_of_paper else ""
        found.append(f"Always answering the majority has an accuracy of {vote} on the test images{beside}.")
    if axis(comparison) == "gamma":
        found.append("Of six values of gamma that are equally good, one above 0 comes out best five times in six.")
    for figure in FIGURES:
        inside, number = comparison.agreement(figure)
        if number:
            found.append(
                f"{inside} of {number} published figures of {WORDS[figure]} lie in the 95 % prediction interval for a "
                f"mean of {RUNS} runs like these."
            )
    found += misprint_notes(comparison, FIGURES)
    coverage = comparison.coverage()
    if coverage is not None and coverage[0] < coverage[1]:
        found.append(f"This is a part of the paper's table: {coverage[0]} of its {coverage[1]} cells have a run here.")
    lost = [
        f"{'' if scenario is None else f'{scenario} '}{setting}"
        for scenario in comparison.scenarios
        for setting in comparison.settings
        if not any(comparison.entry(scenario, setting, split, "uwa") for split in comparison.splits)
    ]
    if lost:
        more = f" and {len(lost) - 10} more" if len(lost) > 10 else ""
        verb = "cell has" if len(lost) == 1 else "cells have"
        found.append(f"{len(lost)} {verb} no run ({MISSING}): {', '.join(lost[:10])}{more}.")
    return found


def misprint_notes(comparison: Comparison, figures: Sequence[str]) -> list[str]:
    """Return notes on misprints. Misprints of the table gamma can also appear in other tables."""
    return [
        f"What is published for the {WORDS[figure]} of {scenario} over gamma is a misprint and compared with nothing."
        for figure in figures
        for scenario in comparison.misprints(figure)
    ]


def to_markdown(comparison: Comparison, figures: Sequence[str] = ()) -> str:
    """Return the table with its verdicts as Markdown; ``figures`` are relative paths of pictures to include."""
    parts = [f"# {title(comparison)}", ""]
    for block in blocks(comparison):
        parts += [f"## {block.title}", ""]
        parts += [*markdown_table(block.header, (row for group in block.groups for row in group)), ""]
    parts += [f"{note}\n" for note in notes(comparison)]
    parts += [f"![{title(comparison)}: {name}]({name})\n" for name in figures]
    return "\n".join([*parts, *_verdict_lines(comparison)]).rstrip("\n") + "\n"


def verdicts_to_markdown(comparison: Comparison) -> str:
    """Return the verdicts as Markdown, with every comparison behind them."""
    parts = [f"# Verdicts: {title(comparison)}", "", *_verdict_lines(comparison), "", "## The comparisons", ""]
    rows = [
        [
            verdict.text,
            verdict.where,
            contrast.name,
            f"{contrast.figure.value:+.2f}",
            f"[{contrast.figure.low:+.2f}, {contrast.figure.high:+.2f}]",
            str(len(contrast.seeds)),
        ]
        for verdict in comparison.verdicts
        for contrast in verdict.contrasts
    ]
    header = ["claim", "figure and images", "comparison", "points", "interval of the rule", "runs"]
    return "\n".join([*parts, *markdown_table(header, rows), "", BLIND]) + "\n"


def verdict_rows(comparison: Comparison) -> list[list[str]]:
    """Return claim, figure and images, verdict and reason of each verdict, for a table."""
    return [
        [v.text, v.where, f"**{v.decision}**" if v.decides else v.decision, v.reason()] for v in comparison.verdicts
    ]


def _verdict_lines(comparison: Comparison) -> list[str]:
    if not comparison.is_of_paper:
        return ["## Verdicts", "", _NO_CLAIMS]
    return [
        "## Verdicts",
        "",
        *markdown_table(["claim", "figure and images", "verdict", "because"], verdict_rows(comparison)),
        "",
        "## The rule",
        "",
        *(f"- {sentence}" for sentence in RULE),
    ]


def to_csv(comparison: Comparison) -> str:
    """Return CSV with a line per figure of each cell, with all digits. Cells without a run have empty fields."""
    places = product(comparison.scenarios, comparison.settings, comparison.splits, FIGURES)
    rows = (_csv_row(comparison, *place) for place in places)
    return csv_text([CSV_COLUMNS, *([repr(cell) if isinstance(cell, float) else cell for cell in row] for row in rows)])


def _csv_row(
    comparison: Comparison, scenario: str | None, setting: Setting, split: str, figure: str
) -> Iterator[object]:
    entry = comparison.entry(scenario, setting, split, figure)
    yield from (scenario or "", setting.loss, f"{setting.eta:g}", f"{setting.gamma:g}", split, figure)
    if entry is None:
        yield from (0, "", "", "", 0, "", "", "")
    else:
        for number, value in ((entry.runs, entry.mean), (entry.pairs, entry.difference)):
            three = ("", "", "") if value is None else (value.value, value.low, value.high)
            yield from (number, *("" if isinstance(x, float) and math.isnan(x) else x for x in three))
    published = comparison.published(scenario, setting, figure)
    yield "" if published is None else published
    yield int(comparison.is_misprint(scenario, setting, figure))


def print_table(comparison: Comparison, console: Console) -> None:
    """Print tables, notes and verdicts to a terminal."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    for block in blocks(comparison):
        console.print(Text(f"{title(comparison)}: {block.title}", style="bold"))
        table = Table(box=None, pad_edge=False)
        for i, name in enumerate(block.header):
            table.add_column(name, justify="left" if i < 2 else "right", no_wrap=i < 2)
        for group in block.groups:
            for i, row in enumerate(group):
                is_difference = row[1].endswith("- CL")
                cells = [Text(cell, style="bold" if is_difference and cell.endswith("*") else "") for cell in row]
                dim = "dim" if row[1] == PUBLISHED else ""
                table.add_row(*cells, style=dim, end_section=i == len(group) - 1)
            table.add_row()
        console.print(table)
    _print_list(console, "Notes", notes(comparison))
    if not comparison.is_of_paper:
        console.print(Text(_NO_CLAIMS, style="dim"))
        return
    _print_list(console, "The rule of the verdicts", [*RULE, BLIND])
    console.print(Text("Verdicts on the paper's claims", style="bold"))
    for text in dict.fromkeys(verdict.text for verdict in comparison.verdicts):
        console.print(Text(f"  {text}"))
        for verdict in comparison.verdicts:
            if verdict.text == text:
                style = COLOURS[verdict.decision] + (" bold" if verdict.decides else "")
                line = Text.assemble((verdict.decision, style), f"  {verdict.where}: {verdict.reason()}")
                console.print(Padding(line, (0, 0, 0, 4), expand=False))


def _print_list(console: Console, heading: str, items: Sequence[str]) -> None:
    """Print a heading and items, each with a dash and an indent."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from lopsided.runs.progress import printable

    console.print(Text(heading, style="bold"))
    table = Table(box=None, show_header=False, pad_edge=False)
    for item in items:
        table.add_row("-", Text(printable(item), style="dim"))
    console.print(Padding(table, (0, 0, 0, 2), expand=False))
    console.print()
