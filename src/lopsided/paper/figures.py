"""Figures of a table: UWA and accuracy over eta or gamma, one panel per scenario, as SVG and PNG. Needs no torch.

Filled marks are means with Student's 95 % intervals. Hollow marks are the published figures. The colours are Okabe and
Ito's. The marks also differ in shape, so that the figures can be read without colour vision.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lopsided import files
from lopsided.evaluation.intervals import UNDEFINED
from lopsided.paper.compare import Comparison
from lopsided.paper.protocol import FIGURES, WORDS
from lopsided.paper.tables import axis, column_names, title
from lopsided.runs.answer import shown_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES: dict[str, dict[str, Any]] = {
    "test": {"color": "#0072B2", "marker": "o"},
    "held_out": {"color": "#D55E00", "marker": "s"},
}
PUBLISHED: dict[str, Any] = {"color": "black", "marker": "D", "markerfacecolor": "none"}
COLUMNS = 4
NARROWEST, LEGEND_WIDTH = 4.4, 2.9
"""The sizes of a title and of a legend entry, in inches."""

SVG_AND_PNG: Mapping[str, Mapping[str, Any]] = {"svg": {"metadata": {"Date": None}}, "png": {"dpi": 150}}
"""The formats of figures, and how each is saved."""

FONTS: Any = {"svg.hashsalt": "lopsided", "svg.fonttype": "none", "font.size": 8, "axes.titlesize": 8}


def can_draw() -> bool:
    """Return whether matplotlib is installed, which only the figures need."""
    return find_spec("matplotlib") is not None


def write_figures(
    comparison: Comparison, folder: str | os.PathLike[str], stem: str, *, formats: Sequence[str] = tuple(SVG_AND_PNG)
) -> list[Path]:
    """Write each figure to ``folder`` as ``STEM-uwa.svg``, ``STEM-uwa.png`` and so on. Return the paths."""
    import matplotlib as mpl

    target = files.make_folder(folder)
    written = []
    with mpl.rc_context(FONTS):
        for name in FIGURES:
            drawn = draw(comparison, name)
            for suffix in formats:
                path = target / f"{stem}-{name}.{suffix}"
                with files.replacing(path) as temporary:
                    drawn.savefig(temporary, format=suffix, **SVG_AND_PNG[suffix])
                written.append(path)
    return written


def draw(comparison: Comparison, figure: str) -> Figure:
    """Draw one figure for all scenarios, on a common scale."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    number = max(len(comparison.scenarios), 1)
    columns = min(number, COLUMNS)
    rows = math.ceil(number / columns)
    width = max(2.2 * columns, 0.9 * len(comparison.settings) + 1.5, NARROWEST)
    across = max(1, int(width // LEGEND_WIDTH))
    drawn = Figure(figsize=(width, 1.9 * rows + 1.1 + 0.17 * math.ceil(3 / across)), layout="constrained")
    FigureCanvasAgg(drawn)
    panels = drawn.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel().tolist()
    for panel, scenario in zip(panels, comparison.scenarios, strict=False):
        _draw_panel(panel, comparison, scenario, figure)
    for panel in panels[len(comparison.scenarios) :]:
        panel.set_axis_off()
    for panel in panels[: len(comparison.scenarios)][-columns:]:  # The lowest panel of each column.
        panel.tick_params(labelbottom=True)
        panel.set_xlabel(axis(comparison) or "")
    drawn.suptitle(f"{title(comparison)}: {WORDS[figure]}", fontsize=10, parse_math=False)
    drawn.supylabel(f"{WORDS[figure]}, per cent", fontsize=9)
    handles, labels = _legend(panels)
    drawn.legend(handles, labels, loc="outside lower center", ncols=min(across, max(len(labels), 1)), frameon=False)
    return drawn


def _draw_panel(panel: Axes, comparison: Comparison, scenario: str | None, figure: str) -> None:
    places = range(len(comparison.settings))
    panel.set_title("" if scenario is None else scenario)
    panel.set_xticks(list(places), column_names(comparison), rotation=0 if axis(comparison) or scenario is None else 30)
    panel.grid(axis="y", color="0.9", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    shift = 0.16
    for i, split in enumerate(comparison.splits):
        entries = [comparison.entry(scenario, setting, split, figure) for setting in comparison.settings]
        if not any(entries):
            continue
        # A cell without a run is NaN, so that the line has a gap.
        means = [UNDEFINED if entry is None else entry.mean for entry in entries]
        limits = [shown_interval(mean) or (mean.value, mean.value) for mean in means]
        offset = shift * (2 * i - len(comparison.splits) + 1)
        panel.errorbar(
            [place + offset for place in places],
            [mean.value for mean in means],
            yerr=[
                [mean.value - low for mean, (low, _) in zip(means, limits, strict=True)],
                [high - mean.value for mean, (_, high) in zip(means, limits, strict=True)],
            ],
            label=f"{WORDS[split]} images, mean and 95 % interval",
            linestyle="solid" if axis(comparison) else "none",
            linewidth=1.0,
            elinewidth=1.0,
            capsize=2,
            markersize=3.5,
            **STYLES[split],
        )
    values = [(place, comparison.published(scenario, comparison.settings[place], figure)) for place in places]
    there = [(place, value) for place, value in values if value is not None]
    if there:
        panel.plot(*zip(*there, strict=True), linestyle="none", markersize=4, label="published", **PUBLISHED)


def _legend(panels: list[Axes]) -> tuple[list[Any], list[str]]:
    """Return each kind of mark once, from any panel that has it."""
    found: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)
