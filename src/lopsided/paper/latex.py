"""A table of the paper with the results of the runs, as LaTeX in the paper's layout (booktabs). Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from lopsided.paper.compare import Comparison
from lopsided.paper.protocol import WORDS, Setting
from lopsided.paper.tables import axis, column_names, misprint_notes, published_text, title
from lopsided.runs.answer import is_cut, runs_text, shown_interval

ORDER = {"accuracy": "Accuracy", "uwa": "UWA"}
"""The paper's order of figures."""

MISSING = "--"
_SPECIAL = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\n": " ", "\r": " "}
)


def to_latex(comparison: Comparison, label: str) -> str:
    """Return the tables of each set of images. They need the package booktabs.

    A table over scenarios is split by figure, so that eleven scenarios fit on a page. It spans both columns of a
    two-column page. Bold marks a difference to CL over the same seeds. In the paper, it marks the highest mean.
    """
    lines = [r"% Needs \usepackage{booktabs}."]
    label = re.sub(r"[^\w-]", "-", label)  # A label may come from any file name.
    for split in comparison.splits:
        name = f"{label}-{split.replace('_', '-')}"
        if comparison.table == "isic":
            lines += _table("table", name, _caption(comparison, split, ORDER), _by_loss(comparison, split))
            continue
        for figure in ORDER:
            body = _by_scenario(comparison, split, figure)
            lines += _table("table*", f"{name}-{figure}", _caption(comparison, split, [figure]), body)
    return "\n".join(lines) + "\n"


def _table(environment: str, label: str, caption: str, body: Iterable[str]) -> Iterator[str]:
    yield rf"\begin{{{environment}}}[t]"
    yield r"    \centering"
    yield rf"    \caption{{{caption}}}"
    yield rf"    \label{{tab:{label}}}"
    yield r"    \footnotesize"
    yield r"    \setlength{\tabcolsep}{2.5pt}"
    yield from (f"    {line}" for line in body)
    yield rf"\end{{{environment}}}"


def _caption(comparison: Comparison, split: str, figures: Iterable[str]) -> str:
    named = " and ".join(WORDS[figure] for figure in figures)
    beside = ", and the published figures" if comparison.is_of_paper else ""
    text = (
        f"{title(comparison)}: {named} in per cent on the {WORDS[split]} images, mean and 95 % interval over "
        f"{runs_text(*comparison.runs)}{beside}. Bold: the difference to CL over the same seeds has an interval that "
        f"leaves out 0. {comparison.protocol}."
    )
    return escape(" ".join([text, *misprint_notes(comparison, list(figures))]))


def escape(text: str) -> str:
    r"""Escape a text for LaTeX.

    >>> escape("95 % & more")
    '95 \\% \\& more'
    """
    return text.translate(_SPECIAL)


def _by_scenario(comparison: Comparison, split: str, figure: str) -> Iterator[str]:
    """Yield the tabular of the tables over eta and gamma: scenarios down, values across."""
    number, name = len(comparison.settings), axis(comparison)
    across = "Loss" if name is None else rf"$\{name}$"
    yield rf"\begin{{tabular}}{{{'c' * (number + 2)}}}"
    yield r"    \toprule"
    yield _row(["", "", rf"\multicolumn{{{number}}}{{c}}{{{across}}}"])
    yield rf"    \cmidrule{{3-{number + 2}}}"
    yield _row(["Scenario", "Metric", *column_names(comparison)])
    for scenario in comparison.scenarios:
        yield r"    \midrule"
        means = [_mean(comparison, scenario, setting, split, figure) for setting in comparison.settings]
        yield _row([escape(str(scenario)), ORDER[figure], *means])
        if comparison.is_of_paper:
            printed = [published_text(comparison, scenario, s, figure, MISSING) for s in comparison.settings]
            yield _row(["", r"\textit{published}", *printed])
    yield r"    \bottomrule"
    yield r"\end{tabular}"


def _by_loss(comparison: Comparison, split: str) -> Iterator[str]:
    """Yield the tabular of the ISIC table: losses down, figures across."""
    header, beside = ["Loss function"], [r"\textit{published}"] if comparison.is_of_paper else []
    for word in ORDER.values():
        header += [word, *beside]
    yield rf"\begin{{tabular}}{{l{'c' * (len(header) - 1)}}}"
    yield r"    \toprule"
    yield _row(header)
    yield r"    \midrule"
    for setting in comparison.settings:
        cells = [escape(str(setting))]
        for figure in ORDER:
            cells.append(_mean(comparison, None, setting, split, figure))
            cells += [published_text(comparison, None, setting, figure, MISSING) for _ in beside]
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
    if (limits := shown_interval(entry.mean)) is not None:
        low, high = limits
        cut = rf"\,[{low:.1f}, {high:.1f}]"
        text += cut if is_cut(entry.mean) else rf" \pm {high - entry.mean.value:.1f}"
    return rf"$\mathbf{{{text}}}$" if entry.differs else f"${text}$"
