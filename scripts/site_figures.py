"""Draw the figures of the pages "Understand" and write their tables into the pages.

    python scripts/site_figures.py            # figures in docs/figures/, tables in docs/understand/
    python scripts/site_figures.py --check    # write nothing; exit with 1 if a table on a page is not the computed one

The intervals are those that lopsided prints, so that a figure of a run can be read off.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np

from lopsided.evaluation.intervals import share_interval
from lopsided.evaluation.threshold_rules import images_for_recall
from lopsided.losses import parity_eta

mpl.use("agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "understand" / "how-many-images.md"
SIZES = (5, 10, 20, 30, 50, 100, 200, 500, 1000)
RECALLS = (0.6, 0.8, 0.9, 0.95)
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


def interval_rows() -> list[str]:
    """Return the table of intervals: for each number of rare images, the interval of some recalls."""
    lines = [
        f"| rare test images | {' | '.join(f'recall {_percent(recall)}' for recall in RECALLS)} |",
        "|---" * 5 + "|",
    ]
    for size in SIZES:
        figures = (share_interval(recall, size, 0.95) for recall in RECALLS)
        lines.append(f"| {size:,} | {' | '.join(f'{100 * f.low:.0f} to {100 * f.high:.0f} %' for f in figures)} |")
    return lines


def difference_rows() -> list[str]:
    """Return the table of the numbers of rare images that tell two recalls apart with a chance of 80 %."""
    lines = ["| true recalls | rare test images for each model |", "|---|---|"]
    for one, other in ((0.70, 0.90), (0.80, 0.90), (0.85, 0.90), (0.88, 0.90)):
        lines.append(f"| {_percent(one)} and {_percent(other)} | {images_to_tell_apart(one, other):,} |")
    return lines


def images_to_tell_apart(one: float, other: float) -> int:
    """Return the size of two independent test sets that show this difference: 5 % level, two sides, power of 80 %."""
    spread = one * (1 - one) + other * (1 - other)
    return math.ceil((1.959964 + 0.841621) ** 2 * spread / (one - other) ** 2)


def recall_rows() -> list[str]:
    """Return the table of the rare images that a claim on the recall needs if all of them are found."""
    lines = [
        "| to claim, with a confidence of 95 %, a recall of at least | rare images, all of them found |",
        "|---|---|",
    ]
    return lines + [f"| {_percent(least)} | {images_for_recall(least)} |" for least in (0.8, 0.9, 0.95, 0.99)]


def draw_intervals(path: Path) -> None:
    """Draw the interval of a recall against the number of rare test images."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    sizes = np.unique(np.geomspace(4, 2000, 120).round())
    for recall, colour in zip(RECALLS, COLOURS, strict=True):
        figures = [share_interval(recall, size, 0.95) for size in sizes]
        low, high = ([100 * getattr(figure, side) for figure in figures] for side in ("low", "high"))
        right.plot(sizes, np.subtract(high, low), color=colour, label=f"recall {_percent(recall)}")
        if recall in (0.6, 0.9):
            left.fill_between(sizes, low, high, color=colour, alpha=0.25)
            left.axhline(100 * recall, color=colour, linewidth=1, label=f"recall {_percent(recall)}")
    left.set(xscale="log", xlabel="rare test images", ylabel="95 % interval of the recall, %", ylim=(0, 100))
    right.set(xscale="log", yscale="log", xlabel="rare test images", ylabel="width of the interval, points")
    right.set_yticks([2, 5, 10, 20, 50], ["2", "5", "10", "20", "50"])
    for axis in (left, right):
        axis.set_xticks([5, 10, 30, 100, 300, 1000], ["5", "10", "30", "100", "300", "1,000"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    _save(fig, path)


def draw_eta_gamma(path: Path) -> None:
    """Draw the focal factor of a positive, and eta of parity against the number of contrast samples."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    p = np.linspace(0, 1, 200)
    for gamma, colour in zip((0, 1, 2, 7), COLOURS, strict=True):
        left.plot(p, (1 - p) ** gamma, color=colour, label=f"gamma {gamma}")
    left.set(xlabel="p of a positive", ylabel="its weight (1 - p)^gamma")
    sizes = np.unique(np.geomspace(16, 4096, 60).round().astype(int))
    right.plot(sizes, [parity_eta(int(size)) for size in sizes], color=COLOURS[0], label="eta of parity")
    right.axhspan(60, 300, color=COLOURS[1], alpha=0.2, label="the paper's 60 to 300")
    right.axvline(128, color="grey", linestyle=":", label="the paper's batch, 128")
    right.set(xscale="log", yscale="log", xlabel="samples in the batch", ylabel="eta")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    _save(fig, path)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _save(fig: plt.Figure, path: Path) -> None:
    fig.tight_layout()
    with mpl.rc_context({"svg.hashsalt": path.stem}):
        fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


def with_tables(text: str) -> str:
    """Return the page with its tables computed anew."""
    for name, rows in (("intervals", interval_rows()), ("recall", recall_rows()), ("apart", difference_rows())):
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        _, _, after = rest.partition(f"<!-- end {name} -->")
        text = f"{before}<!-- {name} -->\n" + "\n".join(rows) + f"\n<!-- end {name} -->{after}"
    return text


def main() -> int:
    """Draw the figures, or check the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    text = PAGE.read_text(encoding="utf-8")
    if parser.parse_args().check:
        return int(with_tables(text) != text)
    PAGE.write_text(with_tables(text), encoding="utf-8")
    draw_intervals(DOCS / "figures" / "how_many_images.svg")
    draw_eta_gamma(DOCS / "figures" / "eta_gamma.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
