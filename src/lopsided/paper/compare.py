"""Make a table of the paper from the records of a sweep: intervals, paired differences, verdicts. Needs no torch.

An entry is the mean over the runs of one cell, in per cent, with Student's 95 % interval. Its difference to CL uses the
seeds that both losses have: within one protocol and source, runs of one scenario and seed saw the same data.
``claims.py`` has the rule for the verdicts on the paper's claims.

There are two sets of images. ``test`` is the paper's 30 %. ``held_out`` are the images that the scenario did not draw.
The paper's accuracy estimates the held-out accuracy, which is weighted by the scenario's proportions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from lopsided.errors import InputError
from lopsided.evaluation.intervals import Estimate, mean_interval, paired_difference
from lopsided.paper import protocol as paper
from lopsided.paper.claims import Key, Values, Verdict, judge
from lopsided.paper.protocol import CL, FIGURES, RUNS, Setting, check_table, published, published_beside
from lopsided.recipe import Recipe, named_recipe, named_recipes
from lopsided.runs.comparison import SPLITS, source_of, value_of
from lopsided.runs.keys import WITH_WEIGHTS, LossTable, family_of
from lopsided.runs.records import ROUNDING, Record

TEMPERATURE = 0.07
"""The temperature in the paper."""


@dataclass(frozen=True)
class Protocol:
    """The settings that all runs of a table share; losses, scenarios and seeds vary.

    ``family`` is a hash of the recipe fields that are not listed here.
    """

    method: str
    normalization: str | None
    encoder: str
    image_size: int | None
    split: str
    weights: str
    family: str
    epochs: tuple[int, ...]
    temperature: float | None = TEMPERATURE

    @classmethod
    def of(cls, run: Recipe | Record) -> Protocol:
        """Return the protocol of a recipe or of a record."""
        if isinstance(run, Record):
            loss = run.loss
            facts = run.method, loss.get("normalization"), run.encoder, run.image_size, run.split, run.weights
            return cls(*facts, run.family, run.epochs, loss.get("temperature", TEMPERATURE))
        loss = LossTable.of(run.encoder_training.loss)
        return cls(
            run.method,
            loss.get("normalization"),
            run.encoder.name,
            run.data.image_size,
            run.data.split,
            run.encoder.spec.weights_kind,
            family_of(run),
            run.spec.epochs(run),
            loss.get("temperature", TEMPERATURE),
        )

    def is_like(self, other: Protocol) -> bool:
        """Return whether two protocols agree in all but family, epochs and temperature."""
        return replace(self, family=other.family, epochs=other.epochs, temperature=other.temperature) == other

    def __str__(self) -> str:
        size = "its own size" if self.image_size is None else f"{self.image_size} px"
        starts = {"none": "scratch", "embedded": "the embedded weights", "timm": "timm's weights"}
        start = {**starts, "file": "weights of a file"}.get(self.weights, "?")
        by = {"group": "split by group", "random": "split by image"}.get(self.split, f"split {self.split}")
        text = f"{self.encoder} at {size} from {start}, {by}"
        if self.normalization is not None:
            text += f", {self.normalization} normalization"
        if self.temperature != TEMPERATURE:
            text += f", temperature {self.temperature:g}"
        return f"{text}, {' + '.join(map(str, self.epochs))} epochs, recipe {_recipe_name(self.family)}"


@cache
def _recipe_name(family: str) -> str:
    """Return the name of a family's recipe if the package contains it, else the start of the hash."""
    from_scratch = family.partition(WITH_WEIGHTS)[0]
    known = {family_of(named_recipe(name)): name for name in named_recipes()}
    for preset in paper.PRESETS:
        for split in paper.SPLIT_RULES:
            name = f"paper-isic{'' if preset == 'paper' else f' ({preset})'}"
            known.setdefault(family_of(paper.base_recipe("isic", preset=preset, split=split)), name)
    return known.get(from_scratch, from_scratch[:8])


@dataclass(frozen=True)
class Entry:
    """One figure of one cell, in per cent. ``difference`` to CL is in points; None for CL and without pairs."""

    mean: Estimate
    values: Mapping[int, float]
    difference: Estimate | None
    pairs: int
    published: float | None

    @property
    def runs(self) -> int:
        """The number of runs. ``values`` maps the seed of each run to its value."""
        return len(self.values)

    @property
    def differs(self) -> bool:
        """Whether the interval of the difference excludes 0, without correction for the number of entries."""
        return self.difference is not None and self.difference.leaves_out_0

    def expects_published(self, runs: int = RUNS) -> bool | None:
        """Return whether the published figure lies in Student's 95 % prediction interval for the mean of ``runs`` runs.

        Return None if nothing was published or the mean has no interval.
        """
        if self.published is None or math.isnan(self.mean.high):
            return None
        half = (self.mean.high - self.mean.low) / 2
        return abs(self.published - self.mean.value) <= half * math.sqrt(1 + self.runs / runs)


@dataclass(frozen=True)
class Comparison:
    """A table of the paper with the results of the runs. Cells that were not trained have no entry.

    If ``source`` is not the paper's data, there are no published figures and no verdicts.
    """

    table: str
    source: str
    is_of_paper: bool
    protocol: Protocol
    scenarios: tuple[str | None, ...]
    settings: tuple[Setting, ...]
    entries: Mapping[Key, Entry]
    verdicts: tuple[Verdict, ...]
    majority: float | None
    """The accuracy on the test images of always predicting the majority; only for a single scenario."""

    @property
    def splits(self) -> tuple[str, ...]:
        """The sets of images on which at least one run was evaluated."""
        return tuple(split for split in SPLITS if any(key[2] == split for key in self.entries))

    @property
    def runs(self) -> tuple[int, int]:
        """The fewest and the most runs of an entry."""
        counts = [entry.runs for entry in self.entries.values()]
        return (min(counts), max(counts)) if counts else (0, 0)

    def entry(self, scenario: str | None, setting: Setting, split: str, figure: str) -> Entry | None:
        """Return an entry, or None if there is no run."""
        return self.entries.get((scenario, setting, split, figure))

    def published(self, scenario: str | None, setting: Setting, figure: str) -> float | None:
        """Return the published figure of a cell in per cent, whether or not the cell was trained."""
        return published_beside(self.table, scenario, setting, figure) if self.is_of_paper else None

    def is_misprint(self, scenario: str | None, setting: Setting, figure: str) -> bool:
        """Return whether the published figure of a cell is a misprint, so that it is not compared."""
        return self.is_of_paper and paper.is_misprint(self.table, scenario, setting, figure)

    def misprints(self, figure: str) -> list[str]:
        """Return the scenarios whose row has a misprint."""
        rows = [
            scenario for scenario in self.scenarios if any(self.is_misprint(scenario, s, figure) for s in self.settings)
        ]
        return [scenario for scenario in rows if scenario is not None]

    def coverage(self) -> tuple[int, int] | None:
        """Return how many cells of the paper's table have a run, and their total; None for other tables."""
        whole = published(self.table)
        if not self.is_of_paper or not set(self.settings) <= set(whole.settings):
            return None
        return len({key[:2] for key in self.entries}), len(whole.scenarios) * len(whole.settings)

    def agreement(self, figure: str) -> tuple[int, int]:
        """Return how many published figures lie in their prediction interval, and how many were checked.

        They are compared with the test images' figures, which are as noisy as the paper's.
        """
        found = [entry.expects_published() for key, entry in self.entries.items() if key[2:] == ("test", figure)]
        told = [is_inside for is_inside in found if is_inside is not None]
        return sum(told), len(told)

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        return {
            "table": self.table,
            "source": self.source,
            "protocol": str(self.protocol),
            "entries": [
                {
                    "scenario": scenario,
                    "loss": setting.loss,
                    "eta": setting.eta,
                    "gamma": setting.gamma,
                    "split": split,
                    "figure": figure,
                    "runs": entry.runs,
                    "mean": entry.mean.to_dict(),
                    "difference": None if entry.difference is None else entry.difference.to_dict(),
                    "pairs": entry.pairs,
                    "published": entry.published,
                }
                for (scenario, setting, split, figure), entry in self.entries.items()
            ],
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
        }


def select(records: Iterable[Record], table: str, protocol: Protocol) -> list[Record]:
    """Return the records of a table that have this protocol and one of the paper's losses."""
    return [
        record
        for record in records
        if (record.scenario is not None) == (table != "isic") and Setting.of(record) is not None
        if Protocol.of(record) == protocol
    ]


def compare(
    records: Sequence[Record],
    table: str,
    protocol: Protocol,
    *,
    source: str | None = None,
    scenarios: Sequence[str | None] | None = None,
    settings: Sequence[Setting] | None = None,
) -> Comparison:
    """Arrange the records of one protocol as a table of the paper, and give verdicts on its claims.

    ``scenarios`` and ``settings`` select rows and columns; by default all of the paper's that have a run. The verdicts
    use all runs. Runs with other losses than the paper's are ignored. ``source`` replaces the name of the data in the
    records.
    """
    check_table(table)
    whole = published(table)
    own = source_of(records)
    if source is None:
        source = paper.SOURCES[table][0] if own is None else own
    # As far as the records show.
    is_of_paper = source in paper.SOURCES[table] and {record.classes for record in records} <= {paper.CLASSES[table]}
    values = _values(records)
    there = {key[:2] for key in values}
    if scenarios is None:
        scenarios = [name for name in whole.scenarios if any(name == scenario for scenario, _ in there)]
    if settings is None:
        shown = {setting for scenario, setting in there if scenario in scenarios}
        settings = [setting for setting in whole.settings if setting in shown]
    keys = [
        (scenario, setting, split, figure)
        for scenario in scenarios
        for setting in settings
        for split in SPLITS
        for figure in FIGURES
    ]
    votes = [100 * record.test.majority_vote for record in records if record.scenario in scenarios]
    return Comparison(
        table=table,
        source=source,
        is_of_paper=is_of_paper,
        protocol=protocol,
        scenarios=tuple(scenarios),
        settings=tuple(settings),
        entries={key: _entry(values, table if is_of_paper else None, key) for key in keys if values.get(key)},
        verdicts=judge(table, values) if is_of_paper else (),
        majority=math.fsum(votes) / len(votes) if votes and len(scenarios) == 1 else None,
    )


def _entry(values: Values, table: str | None, key: Key) -> Entry:
    """Return one entry; ``table`` is the paper's table to compare it with, if any."""
    scenario, setting, split, figure = key
    own, base = values[key], values.get((scenario, CL, split, figure), {})
    seeds = [] if setting == CL else sorted(set(own) & set(base))
    return Entry(
        mean=mean_interval(list(own.values())),
        values=own,
        difference=paired_difference([own[s] for s in seeds], [base[s] for s in seeds], same=ROUNDING)
        if seeds
        else None,
        pairs=len(seeds),
        published=None if table is None else published_beside(table, scenario, setting, figure),
    )


def _values(records: Iterable[Record]) -> dict[Key, dict[int, float]]:
    """Return each figure in per cent by cell and seed. Raise an error if two runs have the same cell and seed."""
    found: dict[Key, dict[int, float]] = {}
    cells: dict[tuple[str | None, Setting, int], Record] = {}
    for record in sorted(records, key=lambda record: record.seed):
        setting = Setting.of(record)
        if setting is None:
            continue
        other = cells.setdefault((record.scenario, setting, record.seed), record)
        if other is not record:
            two = f"There are two runs of {record.name}, in the cells {other.cell} and {record.cell}."
            raise InputError(f"{two} Their recipes differ: keep the records of one recipe.")
        for split in SPLITS:
            for figure in FIGURES:
                value = value_of(record, split, figure)
                if value is not None:
                    found.setdefault((record.scenario, setting, split, figure), {})[record.seed] = value
    return found
