"""A table of the paper beside what the runs say, as LaTeX in the paper's shape (booktabs, multirow). Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lopsided.experiments.compare import Comparison
from lopsided.experiments.paper import Setting
from lopsided.experiments.verdicts import WORDS
from lopsided.reports.tables import axis, column_names, title

ORDER = {"accuracy": "Accuracy", "uwa": "UWA"}
"""The paper's order of figures."""

MISSING = "--"
_SPECIAL = str.maketrans({c: f"\\{c}" for c in "&%$#_{}"} | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}"})


def to_latex(comparison: Comparison, label: str) -> str:
    """Write one ``table`` for each set of images; it needs the packages booktabs and multirow.

    Bold is not the highest mean, as in the paper, but what differs from CL over the same seeds.
    """
    lines = [r"% Needs \usepackage{booktabs} and \usepackage{multirow}."]
    for split in comparison.splits:
        body = _by_loss(comparison, split) if comparison.table == "isic" else _by_scenario(comparison, split)
        lines += [
            r"\begin{table}[t]",
            r"    \centering",
            rf"    \caption{{{_caption(comparison, split)}}}",
            rf"    \label{{tab:{label}-{split.replace('_', '-')}}}",
            *(f"    {line}" for line in body),
            r"\end{table}",
        ]
    return "\n".join(lines) + "\n"


def _caption(comparison: Comparison, split: str) -> str:
    low, high = comparison.runs
    runs = f"{low}" if low == high else f"{low} to {high}"
    text = (
        f"{title(comparison)}: accuracy and UWA in per cent on the {WORDS[split]} images, mean and 95 % interval over "
        f"{runs} runs, and the published figures. Bold: the difference to CL over the same seeds has an interval that "
        f"leaves out 0. {comparison.protocol}."
    )
    return escape(text)


def escape(text: str) -> str:
    r"""Write a text so that LaTeX prints it.

    >>> escape("95 % & more")
    '95 \\% \\& more'
    """
    return text.translate(_SPECIAL)


def _by_scenario(comparison: Comparison, split: str) -> Iterator[str]:
    """Yield the tabular of the tables over eta and gamma: scenarios down, values across."""
    number, name = len(comparison.settings), axis(comparison)
    across = "Loss" if name is None else rf"$\{name}$"
    yield rf"\begin{{tabular}}{{{'c' * (number + 2)}}}"
    yield r"    \toprule"
    two_rows = [rf"\multirow{{2}}{{*}}{{{word}}}" for word in ("Scenario", "Metric")]
    yield _row([*two_rows, rf"\multicolumn{{{number}}}{{c}}{{{across}}}"])
    yield rf"    \cmidrule{{3-{number + 2}}}"
    yield _row(["", "", *column_names(comparison)])
    for scenario in comparison.scenarios:
        yield r"    \midrule"
        first = rf"\multirow{{4}}{{*}}{{{scenario}}}"
        for figure, word in ORDER.items():
            means = [_mean(comparison, scenario, setting, split, figure) for setting in comparison.settings]
            yield _row([first, word, *means])
            printed = [_published(comparison, scenario, setting, figure) for setting in comparison.settings]
            yield _row(["", r"\textit{published}", *printed])
            first = ""
    yield r"    \bottomrule"
    yield r"\end{tabular}"


def _by_loss(comparison: Comparison, split: str) -> Iterator[str]:
    """Yield the tabular of the ISIC table: losses down, figures across."""
    yield r"\begin{tabular}{lcccc}"
    yield r"    \toprule"
    yield _row(["Loss function", *(cell for word in ORDER.values() for cell in (word, r"\textit{published}"))])
    yield r"    \midrule"
    for setting in comparison.settings:
        cells = [str(setting)]
        for figure in ORDER:
            cells += [_mean(comparison, None, setting, split, figure), _published(comparison, None, setting, figure)]
        yield _row(cells)
    yield r"    \bottomrule"
    yield r"\end{tabular}"


def _row(cells: list[str]) -> str:
    return f"    {' & '.join(cells)} \\\\".replace("     &", "    &")


def _mean(comparison: Comparison, scenario: str | None, setting: Setting, split: str, figure: str) -> str:
    entry = comparison.entry(scenario, setting, split, figure)
    if entry is None:
        return MISSING
    text = f"{entry.mean.value:.1f}"
    if not math.isnan(entry.mean.high):
        text += rf" \pm {entry.mean.high - entry.mean.value:.1f}"
    return rf"$\mathbf{{{text}}}$" if entry.differs else f"${text}$"


def _published(comparison: Comparison, scenario: str | None, setting: Setting, figure: str) -> str:
    value = comparison.published(scenario, setting, figure)
    return MISSING if value is None else f"{value:.2f}"
