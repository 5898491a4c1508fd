"""Renew the tables, verdicts and figures of docs/paper-tables.md from the records in results/.

    python scripts/results.py

Each part of the page stands between two marks, which are comments; the rest is written by hand. The commands
that made the records are said in each part; the same commands with ``--records FILE --out FOLDER`` write the tables
as CSV and LaTeX too.
"""

from __future__ import annotations

import csv
import json
import math
import operator
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, variance
from typing import Generic, TypeAlias, TypeVar

import numpy as np
from scipy.optimize import brentq
from scipy.stats import nct, t

from lopsided.errors import InputError
from lopsided.evaluation.intervals import Estimate, mean_interval, paired_difference
from lopsided.paper.claims import BLIND, RULE
from lopsided.paper.compare import Comparison, Protocol, compare, select
from lopsided.paper.figures import write_figures
from lopsided.paper.protocol import CL, FIGURES, RUNS, Plan, Setting, base_recipe, make_plan, published
from lopsided.paper.tables import blocks, notes, title, verdict_rows
from lopsided.recipe import Recipe
from lopsided.runs.answer import MISSING, difference_text, markdown_table, mean_text, runs_text
from lopsided.runs.records import Record, read_records

Name = TypeVar("Name", bound=Hashable)
ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "paper-tables.md"
LESIONS = ROOT / "results" / "isic-lesions.csv"
RUN = ROOT / "results" / "isic-paper.json"
DRAWN = ROOT / "docs" / "figures" / "results"
FOUR = "50:50,90:10,95:5,98:2"
WEIGHTS = "resnet50_imagenet.safetensors"
LOSSES = "cl,acl:300,afcl:0:7,afcl:300:7"
JUDGED = (("test", "uwa"), ("held_out", "uwa"), ("held_out", "auroc"))
BANDS = {
    "50:50 to 65:35": ("50:50", "55:45", "60:40", "65:35"),
    "70:30 to 90:10": ("70:30", "75:25", "80:20", "85:15", "90:10"),
    "95:5": ("95:5",),
    "98:2": ("98:2",),
}


@dataclass(frozen=True)
class Part:
    """One table of the page: where its records are, and the command that made them."""

    name: str
    table: str
    file: str
    protocol: dict[str, str] = field(default_factory=dict)
    scenarios: str | None = None
    losses: str | None = None
    runs: int | None = None
    threads: int | None = None

    @property
    def path(self) -> Path:
        """The file of its records."""
        return ROOT / "results" / self.file

    @property
    def has_records(self) -> bool:
        """Whether there is a run of it; a file may hold those of another part alone."""
        return self.path.exists() and bool(self.records())

    @property
    def command(self) -> str:
        """What makes the records."""
        protocol = {"split-by" if name == "split" else name: value for name, value in self.protocol.items()}
        options = {**protocol, "scenarios": self.scenarios, "losses": self.losses}
        options |= {"runs": self.runs, "threads": self.threads}
        given = [f"--{name} {value}" for name, value in options.items() if value is not None]
        return " ".join(["lopsided reproduce", self.table, "--out SWEEP", *given])

    @property
    def figures(self) -> tuple[str, ...]:
        """The figures that are drawn: none of a single cell."""
        return () if self.losses is not None and "," not in self.losses else FIGURES

    def records(self) -> list[Record]:
        """Return the records that it is made of."""
        kept = select(read_records(self.path)[0], self.table, Protocol.of(self._base()))
        if self.losses is None:
            settings = self._plan().settings
            kept = [record for record in kept if Setting.of(record) in settings]
        return kept

    def comparison(self) -> Comparison:
        """Compare its records."""
        protocol = Protocol.of(self._base())
        if self.losses is None:
            return compare(self.records(), self.table, protocol)
        plan = self._plan()
        return compare(self.records(), self.table, protocol, scenarios=plan.scenarios, settings=plan.settings)

    def _base(self) -> Recipe:
        return base_recipe(self.table, **self.protocol)

    def _plan(self) -> Plan:
        return make_plan(self.table, self._base(), scenarios=self.scenarios, losses=self.losses)


PARTS = (
    Part("eta", "eta", "fmnist.jsonl"),
    Part("gamma", "gamma", "fmnist.jsonl"),
    Part("released", "eta", "fmnist-released.jsonl", {"normalization": "released"}, FOUR, LOSSES),
    Part("isic-image", "isic", "isic-small.jsonl", {"preset": "small"}),
    Part("isic-lesion", "isic", "isic-small.jsonl", {"preset": "small", "split": "lesion"}),
    Part("isic-paper", "isic", "isic-paper.jsonl", {"weights": WEIGHTS}, losses="afcl:300:7", runs=1, threads=2),
)


def write_part(part: Part) -> str:
    """Write one part as Markdown; figures are named, not drawn."""
    return "\n".join(_lines(part, part.comparison(), part.records()))


def told_time(records: Collection[Record]) -> str:
    """Say how long runs took, by the clock: the sum, and the median, which no pause of the machine moves."""
    threads = max(record.threads for record in records)
    cores = "one core" if threads == 1 else f"{threads} cores"
    seconds = [record.seconds for record in records]
    if len(seconds) == 1:
        return f"1 run, {seconds[0] / 60:.0f} minutes of {cores} by the clock"
    hours = f"{math.fsum(seconds) / 3600:.1f} hours of {cores} by the clock"
    return f"{runs_text(len(seconds))}, {hours}; the median run took {median(seconds):.0f} s"


def _lines(part: Part, comparison: Comparison, records: Collection[Record]) -> Iterator[str]:
    yield f"`{part.command}`: {told_time(records)}."
    yield ""
    if part.losses is None:
        yield from markdown_table(["claim", "figure and images", "verdict", "because"], verdict_rows(comparison))
        yield ""
    for figure in part.figures:
        yield f"![{title(comparison)}: {figure}](figures/results/{part.name}-{figure}.svg)"
        yield ""
    for block in blocks(comparison):
        yield f"<details><summary>{title(comparison)}: {block.title}</summary>"
        yield ""
        yield from markdown_table(block.header, (row for group in block.groups for row in group))
        yield ""
        yield "</details>"
        yield ""
    for note in notes(comparison):
        yield note
        yield ""


Runs: TypeAlias = Mapping[tuple[str | None, Setting, int], Record]


def runs_of(part: Part) -> Runs:
    """Return the records of a part by scenario, loss and seed."""
    found = {(run.scenario, Setting.of(run), run.seed): run for run in part.records()}
    return {(scenario, setting, seed): run for (scenario, setting, seed), run in found.items() if setting is not None}


def tops() -> Runs:
    """Return the runs of both tables on Fashion-MNIST, which share those of CL."""
    return {**runs_of(PARTS[0]), **runs_of(PARTS[1])}


def points(run: Record, split: str, figure: str) -> float:
    """Return a figure of a run in per cent."""
    value = getattr(run.test if split == "test" else run.held_out, figure)
    return 100.0 * float(value)


def write_bands() -> str:
    """Write the differences of all losses to CL, averaged over the scenarios of a band, on held-out images."""
    runs = tops()
    settings = sorted({setting for _, setting, _ in runs} - {CL}, key=lambda setting: (setting.gamma, setting.eta))
    rows: dict[str, Sequence[Setting]] = {str(setting): (setting,) for setting in settings}
    rows["mean over eta"] = [setting for setting in settings if setting.eta]
    rows["mean over gamma"] = [setting for setting in settings if setting.gamma]
    cells = [
        [name, *(_band(runs, losses, band, figure) for figure in ("uwa", "auroc") for band in BANDS.values())]
        for name, losses in rows.items()
    ]
    header = ["loss less CL", *(f"{word}, {band}" for word in ("UWA", "AUROC") for band in BANDS)]
    told = f"Both tables together: {told_time(runs.values())}."
    return "\n".join([told, "", *markdown_table(header, cells)])


def _band(runs: Runs, losses: Sequence[Setting], scenarios: Sequence[str], figure: str) -> str:
    """Say one mean difference to CL, over the seeds that have all scenarios of the band for all losses."""
    found = []
    for seed in sorted({seed for _, _, seed in runs}):
        if all((name, loss, seed) in runs for name in scenarios for loss in (*losses, CL)):
            pairs = [(runs[name, loss, seed], runs[name, CL, seed]) for name in scenarios for loss in losses]
            found.append(fmean(points(a, "held_out", figure) - points(b, "held_out", figure) for a, b in pairs))
    return difference_text(mean_interval(found)) if len(found) > 1 else MISSING


def write_rule() -> str:
    """Write the rule of the verdicts and its limits."""
    return "\n".join([*(f"- {text}" for text in RULE), "", BLIND])


WIDE = ("50:50 to 65:35", "70:30 to 90:10")
"""The bands of several scenarios, over which means are taken before they are compared."""


def seed_means(runs: Runs, scenarios: Sequence[str], split: str, figure: str) -> dict[Setting, dict[int, float]]:
    """Return the mean of a figure over scenarios by loss and seed, for the seeds that have all of them."""
    found: dict[Setting, dict[int, float]] = {}
    for setting, seed in sorted({(setting, seed) for _, setting, seed in runs}):
        if all((name, setting, seed) in runs for name in scenarios):
            mean = fmean(points(runs[name, setting, seed], split, figure) for name in scenarios)
            found.setdefault(setting, {})[seed] = mean
    return found


@dataclass(frozen=True)
class Additive(Generic[Name]):
    """All losses in one linear model: the mean of each loss, the deviation of the noise, and its degrees of freedom.

    The model of a value is loss + seed + noise: each loss has a level, each seed moves all losses alike, and the noise
    has the same variance everywhere. So all losses share one estimate of the noise. With L losses and S seeds, it has
    (L - 1)(S - 1) degrees of freedom, instead of the S - 1 of the differences of a single pair.
    """

    means: Mapping[Name, float]
    seeds: int
    deviation: float
    freedom: int

    def contrast(self, weights: Mapping[Name, float], level: float = 0.95) -> Estimate:
        """Return a weighted sum of the means with its interval. The weights must sum to 0, so that seeds cancel."""
        if abs(math.fsum(weights.values())) > 1e-9:
            raise InputError(f"The weights of a contrast must sum to 0, got {math.fsum(weights.values()):g}.")
        value = math.fsum(weight * self.means[name] for name, weight in weights.items())
        error = self.deviation * math.sqrt(math.fsum(weight**2 for weight in weights.values()) / self.seeds)
        half = float(t.ppf((1 + level) / 2, self.freedom)) * error
        return Estimate(value, value - half, value + half)


def fit_additive(values: Mapping[Name, Mapping[int, float]]) -> Additive[Name]:
    """Fit loss + seed to the values of each loss by seed. Seeds that not all losses have are left out."""
    seeds = sorted(set.intersection(*(set(row) for row in values.values()))) if values else []
    if len(values) < 2 or len(seeds) < 2:
        raise InputError(f"A model needs two losses and two seeds at least, got {len(values)} and {len(seeds)}.")
    table = np.array([[row[seed] for seed in seeds] for row in values.values()])
    means = table.mean(axis=1)
    residuals = table - means[:, None] - table.mean(axis=0) + table.mean()
    freedom = (len(values) - 1) * (len(seeds) - 1)
    deviation = math.sqrt(float((residuals**2).sum()) / freedom)
    return Additive(dict(zip(values, means.tolist(), strict=True)), len(seeds), deviation, freedom)


def detectable(runs: int, *, comparisons: int = 1, power: float = 0.8, level: float = 0.95) -> float:
    """Return the smallest effect that paired runs detect with this power, in standard deviations of a difference.

    An effect is detected if Student's interval of the paired differences lies on its side of 0. ``comparisons`` is the
    number for which Bonferroni's correction widens the interval.

    >>> round(detectable(4), 2), round(detectable(100), 2)
    (2.13, 0.28)
    """
    freedom = runs - 1
    limit = float(t.ppf(1 - (1 - level) / 2 / comparisons, freedom))

    def missed(effect: float) -> float:
        return float(nct.cdf(limit, freedom, effect * math.sqrt(runs))) - (1 - power)

    return float(brentq(missed, 0.0, 100.0))


def pooled_contrasts(model: Additive[Setting]) -> dict[str, Estimate]:
    """Return the differences to CL of all losses and of their means, and the difference of the two means."""
    others = sorted(set(model.means) - {CL}, key=lambda setting: (setting.gamma, setting.eta))
    etas, gammas = ([setting for setting in others if getattr(setting, name)] for name in ("eta", "gamma"))
    found = {f"{setting} less CL": model.contrast({setting: 1.0, CL: -1.0}) for setting in others}
    for name, group in (("eta", etas), ("gamma", gammas)):
        found[f"mean over {name} less CL"] = model.contrast({**dict.fromkeys(group, 1 / len(group)), CL: -1.0})
    weights = {**dict.fromkeys(etas, 1 / len(etas)), **dict.fromkeys(gammas, -1 / len(gammas))}
    found["mean over eta less mean over gamma"] = model.contrast(weights)
    return found


def eta_less_gamma(values: Mapping[Setting, Mapping[int, float]]) -> Estimate:
    """Return the mean over eta less the mean over gamma, with Student's interval over the seeds with all losses."""
    seeds = sorted(set.intersection(*(set(row) for row in values.values())))
    groups = ([row for setting, row in values.items() if getattr(setting, name)] for name in ("eta", "gamma"))
    return paired_difference(*([fmean(row[seed] for row in group) for seed in seeds] for group in groups))


def write_pooled() -> str:
    """Write the contrasts of the model loss + seed over the wide bands, on held-out images."""
    runs = tops()
    kinds = [(word, figure, band) for word, figure in (("UWA", "uwa"), ("AUROC", "auroc")) for band in WIDE]
    values = [seed_means(runs, BANDS[band], "held_out", figure) for _, figure, band in kinds]
    models = [fit_additive(each) for each in values]
    columns = [pooled_contrasts(model) for model in models]
    rows = [[name, *(difference_text(column[name]) for column in columns)] for name in columns[0]]
    rows.append(["the same, from seeds alone", *(difference_text(eta_less_gamma(each)) for each in values)])
    rows.append(["deviation of the noise", *(f"{model.deviation:.2f}" for model in models)])
    rows.append(["degrees of freedom", *(str(model.freedom) for model in models)])
    return "\n".join(markdown_table(["contrast", *(f"{word}, {band}" for word, _, band in kinds)], rows))


def write_power() -> str:
    """Write by band the deviation of a difference to CL over seeds, and the effects that four runs detect."""
    runs = tops()
    alone, corrected = detectable(RUNS), detectable(RUNS, comparisons=5)
    rows = []
    for band, scenarios in BANDS.items():
        row = [band]
        for split in ("test", "held_out"):
            values = seed_means(runs, scenarios, split, "uwa")
            gaps = [
                variance(row[seed] - values[CL][seed] for seed in sorted(row.keys() & values[CL].keys()))
                for setting, row in values.items()
                if setting != CL
            ]
            deviation = math.sqrt(fmean(gaps))
            row += [f"{deviation:.1f}", f"{alone * deviation:.1f}", f"{corrected * deviation:.1f}"]
        rows.append(row)
    heads = [f"{word}, {what}" for word in ("test", "held-out") for what in ("deviation", "alone", "one of five")]
    told = f"An effect of {alone:.2f} deviations is detected alone, and one of {corrected:.2f} if five are compared."
    return "\n".join([told, "", *markdown_table(["scenarios", *heads], rows)])


def write_noise() -> str:
    """Write by scenario how far runs of one cell lie apart, how many are blind, and how far off the published lie."""
    runs = tops()
    tables = [part.comparison() for part in PARTS[:2]]
    rows = []
    for scenario in published("eta").scenarios:
        cells: dict[Setting, list[Record]] = {}
        for (name, setting, _), run in runs.items():
            if name == scenario:
                cells.setdefault(setting, []).append(run)
        own = [run for cell in cells.values() for run in cell]
        blind = sum(run.held_out is not None and min(run.held_out.recalls) == 0 for run in own)
        rows.append(
            [
                str(scenario),
                str(len(own)),
                f"{fmean(run.test.minority for run in own):.0f}",
                *(_deviation(cells.values(), *judged) for judged in JUDGED),
                str(blind),
                _published_less_ours(tables, scenario),
            ]
        )
    header = [
        "scenario",
        "runs",
        "rare test images",
        "UWA, test",
        "UWA, held-out",
        "AUROC, held-out",
        "blind",
        "published",
    ]
    return "\n".join(markdown_table(header, rows))


def _published_less_ours(tables: Iterable[Comparison], scenario: str | None) -> str:
    """Say how far the published UWA lies from that of the test images, on the mean over all losses."""
    found = [
        entry.published - entry.mean.value
        for table in tables
        for key, entry in table.entries.items()
        if key[0] == scenario and key[2:] == ("test", "uwa") and entry.published is not None
    ]
    return f"{fmean(found):+.1f}" if found else MISSING


def _deviation(cells: Iterable[Sequence[Record]], split: str, figure: str) -> str:
    """Say the standard deviation of a figure over the runs of a cell, pooled over cells."""
    values = [[points(run, split, figure) for run in cell] for cell in cells if len(cell) > 1]
    squares = math.fsum(variance(cell) * (len(cell) - 1) for cell in values)
    return f"{math.sqrt(squares / sum(len(cell) - 1 for cell in values)):.1f}" if values else MISSING


def write_ranking() -> str:
    """Write the differences of the released losses to CL in AUROC, which tables of the command do not have."""
    runs = runs_of(next(part for part in PARTS if part.name == "released"))
    settings = sorted({setting for _, setting, _ in runs} - {CL})
    rows = [
        [scenario, *(_band(runs, [setting], [scenario], "auroc") for setting in settings)]
        for scenario in FOUR.split(",")
    ]
    return "\n".join(markdown_table(["AUROC less CL", *map(str, settings)], rows))


def write_leak() -> str:
    """Write what a split by image says above one by lesion, for each loss and all of them, and the noise."""
    image, lesion = (runs_of(part) for part in PARTS if part.file == "isic-small.jsonl")
    settings, figures = published("isic").settings, ("uwa", "accuracy", "auroc")
    rows = []
    for name, chosen in [*((str(setting), (setting,)) for setting in settings), ("mean", settings)]:
        cells = []
        for figure in figures:
            by_image, by_lesion = (
                [
                    fmean(points(runs[None, setting, seed], "test", figure) for setting in chosen)
                    for seed in range(RUNS)
                    if all((None, setting, seed) in table for setting in chosen for table in (image, lesion))
                ]
                for runs in (image, lesion)
            )
            if len(by_image) > 1:
                difference = difference_text(paired_difference(by_image, by_lesion))
                cells += [f"{fmean(by_image):.1f}", f"{fmean(by_lesion):.1f}", difference]
            else:
                cells += [MISSING] * 3
        rows.append([name, *cells])
    deviations = ([_over_seeds(runs, figure) for runs in (image, lesion)] for figure in figures)
    rows.append(["deviation over seeds", *(cell for pair in deviations for cell in (*pair, ""))])
    header = [
        "loss",
        *(
            f"{word}{what}"
            for word in ("UWA", "accuracy", "AUROC")
            for what in (", by image", ", by lesion", ", difference")
        ),
    ]
    return "\n".join(markdown_table(header, rows))


def _over_seeds(runs: Runs, figure: str) -> str:
    cells: dict[Setting, list[Record]] = {}
    for (_, setting, _), run in runs.items():
        cells.setdefault(setting, []).append(run)
    return _deviation(cells.values(), "test", figure)


def write_lesions() -> str:
    """Write how images of lesions that training knows did, and others: per seed the mean over the losses."""
    with LESIONS.open(encoding="utf-8", newline="") as file:
        # Of lines without images of a class there is no UWA; such a seed is not complete.
        judged = (line for line in csv.DictReader(file) if int(line["MEL"]) and int(line["DF"]))
        lines = {(line["cell"], line["lesion"]): line for line in judged}
    found: dict[tuple[str, str], dict[int, tuple[float, ...]]] = {}
    rows = []
    for part in (part for part in PARTS if part.file == "isic-small.jsonl"):
        records = part.records()
        for kind in dict.fromkeys(kind for _, kind in lines):
            seeds = _complete(records, lines, kind)
            if seeds:
                means = {seed: tuple(map(fmean, zip(*map(_shares, own), strict=True))) for seed, own in seeds.items()}
                found[part.name, kind] = means
                numbers = (f"{fmean(int(own[0][name]) for own in seeds.values()):.0f}" for name in ("MEL", "DF"))
                figures = map(mean_interval, zip(*means.values(), strict=True))
                rows.append([part.name.replace("isic-", "by "), kind, *numbers, *map(mean_text, figures)])
    for split, kind, one, other in (
        ("by image", "single less several", ("isic-image", "single"), ("isic-image", "several")),
        ("by lesion", "single less several", ("isic-lesion", "single"), ("isic-lesion", "several")),
        ("by image less by lesion", "known less several", ("isic-image", "known"), ("isic-lesion", "several")),
    ):
        more, less = found.get(one, {}), found.get(other, {})
        gaps = [map(operator.sub, more[seed], less[seed]) for seed in sorted(more.keys() & less.keys())]
        if gaps:
            differences = (difference_text(mean_interval(gap)) for gap in zip(*gaps, strict=True))
            rows.append([split, kind, "", "", *differences])
    header = ["split", "lesion", "MEL", "DF", "recall of MEL", "recall of DF", "UWA", "AUROC"]
    return "\n".join(markdown_table(header, rows))


def _complete(
    records: Iterable[Record], lines: Mapping[tuple[str, str], Mapping[str, str]], kind: str
) -> dict[int, list[Mapping[str, str]]]:
    """Return the lines of a kind of lesion by seed, for the seeds that have all losses."""
    own: dict[int, list[Mapping[str, str]]] = {}
    for run in records:
        if (run.cell, kind) in lines:
            own.setdefault(run.seed, []).append(lines[run.cell, kind])
    return {seed: found for seed, found in sorted(own.items()) if len(found) == len(published("isic").settings)}


def _shares(line: Mapping[str, str]) -> tuple[float, ...]:
    """Return both recalls, UWA and AUROC of a line in per cent."""
    recalls = [100 * int(line[f"{name} right"]) / int(line[name]) for name in ("MEL", "DF")]
    return *recalls, fmean(recalls), 100 * float(line["AUROC"])


def parts_of(page: str) -> dict[str, str]:
    """Return what stands between the marks of a page, by name."""
    found = re.findall(r"<!-- ([a-z-]+): begin -->\n(.*?)<!-- \1: end -->", page, flags=re.DOTALL)
    return {name: text.strip("\n") for name, text in found}


def written() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of everything on the page that comes from records, as far as there are any."""
    there = {part.name for part in PARTS if part.has_records}
    for part in PARTS:
        if part.name in there:
            yield part.name, write_part(part)
    for name, needed, write in SUMMARIES:
        if needed <= there:
            yield name, write()


def write_run() -> str:
    """Write the figures of the one run of the full protocol with the intervals of its test images."""
    evaluation = json.loads(RUN.read_text("utf-8"))["test"]
    rows = []
    for word, name in (("UWA", "uwa"), ("accuracy", "accuracy"), ("AUROC", "auroc")):
        value, low, high = (f"{100 * evaluation['figures'][name][part]:.1f}" for part in ("value", "low", "high"))
        rows.append([word, value, f"[{low}, {high}]"])
    for i, row in enumerate(evaluation["per_class"]):
        value, low, high = (f"{100 * row['recall'][part]:.1f}" for part in ("value", "low", "high"))
        right = f"{evaluation['confusion'][i][i]} of {row['support']}"
        rows.append([f"recall of {row['label']}, {right}", value, f"[{low}, {high}]"])
    return "\n".join(markdown_table(["figure", "per cent", "interval"], rows))


SUMMARIES = (
    ("rule", set(), write_rule),
    ("bands", {"eta", "gamma"}, write_bands),
    ("pooled", {"eta", "gamma"}, write_pooled),
    ("power", {"eta", "gamma"}, write_power),
    ("noise", {"eta", "gamma"}, write_noise),
    ("ranking", {"released"}, write_ranking),
    ("leak", {"isic-image", "isic-lesion"}, write_leak),
    ("lesions", {"isic-image", "isic-lesion"}, write_lesions),
    ("run", {"isic-paper"}, write_run),
)


def renewed(page: str) -> str:
    """Return a page with the parts renewed whose marks it has and whose records there are."""
    for name, text in written():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        if begin in page:
            before, rest = page.split(begin, 1)
            page = f"{before}{begin}{text.strip(chr(10))}\n{end}{rest.split(end, 1)[1]}"
    return page


@dataclass(frozen=True)
class Gain:
    """What a loss has above CL in UWA: in the paper, and here over paired seeds, both on test images, in points."""

    name: str
    paper: float
    here: Estimate

    @property
    def verdict(self) -> str:
        """What the interval says about the loss."""
        if self.here.low <= 0 <= self.here.high:
            return "no reliable difference"
        return "above CL" if self.here.value > 0 else "below CL"


def gains() -> list[Gain]:
    """Return the gains of the paper's main settings over CL."""
    found = []
    wanted = [("eta", PARTS[0], scenario, Setting(300.0, 0.0)) for scenario in ("70:30", "80:20", "90:10")]
    wanted += [("gamma", PARTS[1], scenario, Setting(0.0, 7.0)) for scenario in ("70:30", "80:20", "90:10")]
    wanted += [("isic", PARTS[3], None, Setting(300.0, gamma)) for gamma in (0.0, 7.0)]
    for table, part, scenario, setting in wanted:
        paper, runs = published(table), runs_of(part)
        cl, own = (paper.figure(scenario, each, "uwa") for each in (CL, setting))
        assert cl is not None
        assert own is not None
        seeds = [seed for where, each, seed in runs if (where, each) == (scenario, setting)]
        pairs = [
            points(runs[scenario, setting, seed], "test", "uwa") - points(runs[scenario, CL, seed], "test", "uwa")
            for seed in seeds
        ]
        where = "ISIC 2018" if scenario is None else f"T-shirts and shirts, {scenario}"
        found.append(Gain(f"{where}: {setting} less CL", own - cl, mean_interval(pairs)))
    return found


def draw_claims(path: Path) -> None:
    """Draw the gains of the paper and those of our runs with their intervals, one row each."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    rows = gains()
    fig, axis = plt.subplots(figsize=(9.5, 3.6))
    places = [-float(place) - 0.6 * (place >= 3) - 0.6 * (place >= 6) for place in range(len(rows))]
    for row, y in zip(rows, places, strict=True):
        axis.plot([row.here.low, row.here.high], [y, y], color="#0072b2", linewidth=2)
        axis.plot(row.here.value, y, "o", color="#0072b2", label="here: mean of four runs, 95 % interval")
        axis.plot(row.paper, y, "D", color="#d55e00", fillstyle="none", label="paper: mean of four runs, no interval")
        axis.text(20.5, y, row.verdict, va="center", fontsize=8.5, color="#5a626d")
    axis.axvline(0, color="#8f97a1", linewidth=1)
    axis.set_yticks(places, [row.name for row in rows], fontsize=8.5)
    axis.set(xlim=(-15, 20), xlabel="points of balanced accuracy above CL, test images")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    handles = dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True))
    fig.legend(handles.values(), handles.keys(), loc="upper center", ncols=2, fontsize=8.5, frameon=False)
    fig.subplots_adjust(left=0.31, right=0.79, top=0.9, bottom=0.14)
    with mpl.rc_context({"svg.hashsalt": path.stem}):
        fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


def main() -> None:
    """Renew the page and draw its figures."""
    PAGE.write_text(renewed(PAGE.read_text("utf-8")), "utf-8")
    for part in PARTS:
        if part.figures and part.has_records:
            write_figures(part.comparison(), DRAWN, part.name, formats=("svg",))
    draw_claims(DRAWN.parent / "claims.svg")


if __name__ == "__main__":
    main()
