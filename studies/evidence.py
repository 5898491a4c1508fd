"""Which recipe? The records of the study, of the methods from scratch and of fine-tuning, side by side.

    python studies/evidence.py table        # every method on every data set: balanced accuracy, AUROC, minutes, memory
    python studies/evidence.py against      # what `fit` takes against losses from scratch, on the same draws
    python studies/evidence.py figure       # docs/figures/costs.svg: balanced accuracy against minutes of two cores
    python studies/evidence.py page         # write all tables of docs/recipe-tables.md anew

It computes nothing that is not in ``studies/records``: ``study.jsonl`` (studies/study.py), ``methods.jsonl`` and
its siblings (studies/from_scratch.py), ``fine_tune.jsonl`` (studies/fine_tune.py) and ``costs.jsonl``
(studies/costs.py). A method from scratch or fine-tuned without a line in ``costs.jsonl`` has half the seconds of its
runs, which had one thread each, for its minutes. Peers and ``plain features`` have those of ``quick``, because the
features take almost all of their time, methods without pixels those of their recipe, and heads those of ``adapter`` or
``adapter`` with a blend. Other frozen methods have none.

Draws of the tops are the same images in all records, and differences are paired by draw. On ISIC, the methods from
scratch and ``quick`` are paired by fold of one comparison, with the interval that is corrected for overlapping folds.
``against`` adjusts the intervals for the number of its rows (Bonferroni).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import blend
import costs
import fine_tune
import from_scratch
import lesions
import shared
import study
from lopsided import files
from lopsided.evaluation.intervals import Estimate, mean_interval
from lopsided.evaluation.resampled import fold_overlap

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "recipe-tables.md"
FIGURE = DOCS / "figures" / "costs.svg"
SCRATCH = ("weighted-ce", "cl", "afcl")
"""The losses from scratch that what ``fit`` takes must beat."""
GROUPS = {
    "frozen": "#0072B2",
    "peers": "#999999",
    "heads": "#009E73",
    "fine-tuned": "#CC79A7",
    "from scratch": "#D55E00",
}
SETTINGS = (
    "tops 90:10",
    "tops 95:5",
    "tops 98:2",
    "ten classes",
    "isic",
    "isic by fold",
    "isic, seven classes",
    *(f"isic {n} rare" for n in study.FEW),
)


PANELS = {
    "T-shirts and shirts of Fashion-MNIST, 98:2": ["tops 98:2"],
    "ISIC, melanoma against dermatofibroma": ["isic", "isic by fold"],
}
"""The panels of the figure, and the settings that each shows."""


@dataclass(frozen=True)
class Line:
    """The figures of one method on one draw, in percent."""

    setting: str
    group: str
    method: str
    draw: int
    uwa: float
    auroc: float
    seconds: float | None = None
    overlap: float = 0.0


def gather() -> list[Line]:
    """Return the lines of all records."""
    return [*_study(), *_methods(), *_methods_isic(), *_fine_tuned()]


def _study() -> Iterable[Line]:
    for line in shared.read(study.RECORD):
        name = {"tops": f"tops {line['cell']}", "isic": "isic", "fashion": "ten classes", "few": f"isic {line['cell']}"}
        name["seven"] = "isic, seven classes"
        method = line["method"]
        group = "peers" if method in study.PEERS else "heads" if method.removesuffix(" +") in study.HEADS else "frozen"
        yield Line(name[line["data"]], group, method, line["seed"], line["uwa"], line["auroc"])


def _methods() -> Iterable[Line]:
    for line in from_scratch.read_fashion():
        found = from_scratch.figures(line)
        setting = "ten classes" if line["scenario"].startswith("long-tail") else f"tops {line['scenario']}"
        shown = (found["balanced"], found["auroc"], line["seconds"])
        yield Line(setting, "from scratch", line["compared_as"], line["seed"], *shown)


def _methods_isic() -> Iterable[Line]:
    for line in from_scratch.read(from_scratch.RECORD_ISIC):
        found = from_scratch.figures(line)
        group = "from scratch" if line["weights"] == "none" else "frozen"
        overlap = fold_overlap([line["test"]["images"]], [line["fold"]["rest"]])
        shown = (found["balanced"], found["auroc"], line["seconds"] if group == "from scratch" else None)
        yield Line("isic by fold", group, line["compared_as"], line["fold"]["fold"], *shown, overlap)


def _fine_tuned() -> Iterable[Line]:
    for line in shared.read(fine_tune.RECORD):
        if line["seed"] >= 100 or line["method"] in fine_tune.FROZEN:
            continue
        setting = f"tops {line['scenario']}" if line["data"] == "tops" else "isic"
        draw = line["seed"] if line["data"] == "tops" else int(line["scenario"].split()[1])
        yield Line(setting, "fine-tuned", line["method"], draw, line["uwa"], line["auroc"], 60 * line["minutes"])


def _by_method(lines: Iterable[Line]) -> dict[tuple[str, str], list[Line]]:
    found: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        found.setdefault((line.group, line.method), []).append(line)
    return found


def cost_of(setting: str, method: str, lines: Sequence[Line]) -> tuple[float | None, int | None]:
    """Return minutes of two cores and the peak memory in MiB, where the records have them."""
    data, first = setting.split(maxsplit=1)[0], lines[0].group
    same = "quick" if first == "peers" or method == "plain features" else method.removesuffix(study.WITHOUT)
    if first == "heads":
        same = "adapter blend" if method.endswith("+") else "adapter"
    known = {(line["data"], line["method"]): line for line in shared.read(costs.RECORD)}
    if (line := known.get((data, same))) is not None:
        return line["processor"] / 120, line["memory"]
    seconds = [line.seconds for line in lines if line.seconds is not None]
    return (statistics.median(seconds) / 120 if seconds else None), None


def mean(lines: Sequence[Line], name: str) -> Estimate:
    """Return the mean over draws, or over folds, with its 95 % interval."""
    return mean_interval([getattr(line, name) for line in lines], overlap=statistics.mean(x.overlap for x in lines))


def table() -> str:
    """Return a row for every method and setting, the highest balanced accuracy first."""
    rows, everything = [], gather()
    for setting in SETTINGS:
        found = _by_method(line for line in everything if line.setting == setting)
        for (group, method), lines in sorted(found.items(), key=lambda item: -mean(item[1], "uwa").value):
            minutes, memory = cost_of(setting, method, lines)
            means = [shared.shown(mean(lines, name)) for name in ("uwa", "auroc")]
            costs = ["" if minutes is None else f"{minutes:.1f}", "" if memory is None else f"{memory:,}"]
            rows.append((setting, method, group, len(lines), *means, *costs))
    return shared.table(
        "data | method | kind | runs | balanced accuracy | AUROC | minutes of two cores | peak memory, MiB", rows
    )


def against() -> str:
    """Return the paired differences of the frozen recipes to losses from scratch, adjusted for their number."""
    lines, pairs, rows = gather(), [], []
    for setting in ("tops 90:10", "tops 95:5", "tops 98:2", "ten classes", "isic by fold"):
        methods = {
            method: {x.draw: x for x in own}
            for (_, method), own in _by_method(x for x in lines if x.setting == setting).items()
        }
        for recipe in ("thorough", "quick"):
            for other in SCRATCH:
                both = sorted(methods.get(recipe, {}).keys() & methods.get(other, {}).keys())
                if len(both) > 1:
                    pairs.append((setting, recipe, other, [(methods[recipe][d], methods[other][d]) for d in both]))
    for setting, recipe, other, both in pairs:
        cells = []
        for name in ("uwa", "auroc"):
            gains = [getattr(one, name) - getattr(two, name) for one, two in both]
            overlap = statistics.mean(one.overlap for one, _ in both)
            cells.append(shared.shown(mean_interval(gains, 1 - 0.05 / len(pairs), overlap=overlap), sign=True))
        rows.append((setting, recipe, other, len(both), *cells))
    return shared.table("data | recipe | minus | pairs | balanced accuracy | AUROC", rows)


NAMED = {
    "thorough": ("#0072b2", (8, 6)),
    "quick": ("#0072b2", (8, 6)),
    "weighted-ce": ("#d55e00", (8, 6)),
    "cl": ("#b55f8e", (-18, -16)),
    "afcl": ("#008f68", (8, -4)),
}
"""The methods with a name in the figure: colour, and where the name stands, in points beside the point."""


def draw_figure(path: Path) -> None:
    """Draw balanced accuracy against minutes of two cores for all methods with known costs; five have a name."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(11, 5))
    for axis, (title, settings) in zip(axes, PANELS.items(), strict=True):
        points = sorted(_points(settings), key=lambda point: point[1] in NAMED)
        for _, method, minutes, figure in points:
            shade, place = NAMED.get(method, ("#c3c9d0", None))
            bars = [[figure.value - figure.low], [figure.high - figure.value]]
            size, width = (7, 1.4) if method in NAMED else (4, 0.6)
            axis.errorbar([minutes], [figure.value], bars, fmt="o", markersize=size, color=shade, elinewidth=width)
            if place is not None:
                axis.annotate(
                    method,
                    (minutes, figure.value),
                    xytext=place,
                    textcoords="offset points",
                    color=shade,
                    weight="bold",
                )
        axis.set(xscale="log", title=title, xlabel="minutes of two cores, from images to model")
        axis.set(ylabel="balanced accuracy, %")
        axis.set_xlim(0.12, 8)
        axis.set_xticks([0.2, 0.5, 1, 2, 5], ["0.2", "0.5", "1", "2", "5"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    fig.tight_layout()
    with mpl.rc_context({"svg.hashsalt": path.stem}):
        fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


def _points(settings: Sequence[str]) -> list[tuple[str, str, float, Estimate]]:
    """Return group, method, minutes and balanced accuracy; a method of an earlier setting is not repeated.

    The interval is left out if there are fewer than three runs.
    """
    points, seen, everything = [], set(), gather()
    for setting in settings:
        for (group, method), lines in _by_method(line for line in everything if line.setting == setting).items():
            minutes, _ = cost_of(setting, method, lines)
            if minutes is not None and method not in seen:
                seen.add(method)
                found = mean(lines, "uwa")
                # The interval of two runs would fill the panel.
                alone = replace(found, low=found.value, high=found.value)
                points.append((group, method, minutes, found if len(lines) > 2 else alone))
    return points


BLOCKS: dict[str, Callable[[], str]] = {
    "short": lambda: study.short(study.RECORD),
    "against": against,
    "study": lambda: study.summary(study.RECORD),
    "methods": lambda: from_scratch.table(from_scratch.read_fashion()),
    "eta": lambda: from_scratch.pairs_table(from_scratch.read_fashion()),
    "isic": lambda: from_scratch.isic_table(from_scratch.read(from_scratch.RECORD_ISIC)),
    "blend": lambda: blend.table(shared.read(blend.RECORD)),
    "lesions": lesions.table,
    "all": table,
}
"""The tables of docs/recipe-tables.md by the names that the page gives them."""


def blocks() -> dict[str, str]:
    """Return all tables of the page."""
    return {name: make() for name, make in BLOCKS.items()}


def with_blocks(text: str) -> str:
    """Return a page with its tables computed anew."""
    for name, content in blocks().items():
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        _, _, after = rest.partition(f"<!-- end {name} -->")
        text = f"{before}<!-- {name} -->\n{content}\n<!-- end {name} -->{after}"
    return text


def main() -> None:
    """Print a table, draw the figure, or renew the page."""
    parser = shared.parser(__doc__)
    parser.add_argument("what", choices=["table", "against", "figure", "page"])
    what = parser.parse_args().what
    if what == "figure":
        draw_figure(FIGURE)
    elif what == "page":
        files.atomic_write(PAGE, with_blocks(PAGE.read_text(encoding="utf-8")))
    else:
        print(table() if what == "table" else against())


if __name__ == "__main__":
    main()
