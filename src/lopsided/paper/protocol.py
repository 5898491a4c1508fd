"""The paper's experiments: the published tables, and the recipes that repeat them. Needs no torch.

``published.toml`` contains the tables of Vito and Stefanus (2022): ``eta`` and ``gamma`` over eleven scenarios of
Fashion-MNIST tops, and ``isic`` over five losses. One row of figures is a misprint. It is marked and never returned.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from lopsided.errors import InputError, sentence
from lopsided.losses import catalogue
from lopsided.recipe import Recipe, find_recipe, named_recipe
from lopsided.recipe.words import shown, suggest
from lopsided.runs import comparison
from lopsided.runs.comparison_plan import with_scenario
from lopsided.runs.keys import LossTable
from lopsided.runs.records import Record

TABLES = ("eta", "gamma", "isic")
FIGURES = ("uwa", "accuracy")
WORDS = {**comparison.WORDS, "uwa": "UWA"}
"""The words of the paper's tables, which call the balanced accuracy unweighted accuracy, UWA."""
RUNS = 4
"""The number of runs in the paper, here with seeds 0 to 3."""

SOURCES = {
    "eta": ("fashion-mnist-tops", "fashion-mnist"),
    "gamma": ("fashion-mnist-tops", "fashion-mnist"),
    "isic": ("isic2018",),
}
CLASSES = {"eta": ("T-shirt/top", "Shirt"), "gamma": ("T-shirt/top", "Shirt"), "isic": ("MEL", "DF")}
"""The sources and the ordered classes of each table. Published figures and claims hold only for these."""

RECIPES = {"eta": "paper-fmnist", "gamma": "paper-fmnist", "isic": "paper-isic"}
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "small": {"encoder.name": "resnet18", "head.hidden": "auto", "data.image_size": 64},
}
"""The changes that a preset makes to the recipe of the ISIC table."""

LOSSES = ("cl", "fcl", "acl", "afcl")
SPLIT_RULES = {"image": "random", "lesion": "group"}
_LOSS_GRAMMAR = "Write cl, fcl, acl:ETA or afcl:ETA:GAMMA, such as acl:300 or afcl:300:7."


@dataclass(frozen=True, order=True)
class Setting:
    """A contrastive loss, given by eta (in the paper's unit) and gamma.

    >>> [str(Setting(*pair)) for pair in [(0, 0), (0, 1), (300, 0), (300, 7)]]
    ['CL', 'FCL', 'ACL(300)', 'AFCL(300, 7)']
    """

    eta: float
    gamma: float

    @classmethod
    def of(cls, record: Record) -> Setting | None:
        """Return the setting of a run, or None if the paper lacks its loss or its unit of eta."""
        loss: LossTable = record.loss
        if record.method != "two-stage" or loss.name not in LOSSES or loss.get("eta_unit", "absolute") != "absolute":
            return None
        return cls(loss.get("eta", 0.0), loss.get("gamma", 0.0))

    @property
    def loss(self) -> str:
        """The simplest loss with these parameters, so that equal losses have equal recipes."""
        if self.eta == 0 and self.gamma in (0, 1):
            return "fcl" if self.gamma else "cl"
        return "acl" if self.gamma == 0 else "afcl"

    @property
    def table(self) -> dict[str, Any]:
        """The loss for a recipe, with the parameters that it has."""
        known = catalogue.find(self.loss).defaults()
        wanted = {"eta": self.eta, "eta_unit": "absolute", "gamma": self.gamma}
        return {"name": self.loss, **{name: value for name, value in wanted.items() if name in known}}

    def __str__(self) -> str:
        values = {"acl": f"({self.eta:g})", "afcl": f"({self.eta:g}, {self.gamma:g})"}
        return f"{self.loss.upper()}{values.get(self.loss, '')}"


CL = Setting(0.0, 0.0)


def parse_setting(text: str) -> Setting:
    """Read a loss with its parameters.

    >>> parse_setting("afcl:300:7")
    Setting(eta=300.0, gamma=7.0)
    """
    name, *numbers = text.strip().lower().split(":")
    counts = {"cl": 0, "fcl": 0, "acl": 1, "afcl": 2}
    try:
        values = [float(number) + 0.0 for number in numbers]
    except ValueError:
        values = [math.nan]
    if counts.get(name) != len(values) or not all(0 <= value < math.inf for value in values):
        raise InputError(f"{shown(text)} is not a loss with its parameters. {_LOSS_GRAMMAR}")
    if name == "fcl":
        return Setting(0.0, 1.0)
    return Setting(*values, *[0.0] * (2 - len(values)))


@dataclass(frozen=True)
class Published:
    """A published table. ``scenarios`` is (None,) if the table has no scenarios. ``figures`` excludes misprints."""

    name: str
    scenarios: tuple[str | None, ...]
    settings: tuple[Setting, ...]
    figures: Mapping[tuple[str | None, Setting, str], float]
    misprints: frozenset[tuple[str | None, str]]

    def figure(self, scenario: str | None, setting: Setting, figure: str) -> float | None:
        """Return a figure in per cent, or None if the paper has no valid figure."""
        return self.figures.get((scenario, setting, figure))


@cache
def published(table: str) -> Published:
    """Return one of the paper's ``TABLES``.

    >>> published("isic").figure(None, Setting(300.0, 7.0), "uwa")
    74.62
    """
    check_table(table)
    content = tomllib.loads((resources.files("lopsided.paper") / "published.toml").read_text(encoding="utf-8"))[table]
    if table == "isic":
        settings = tuple(
            Setting(float(eta), float(gamma)) for eta, gamma in zip(content["eta"], content["gamma"], strict=True)
        )
        rows: dict[str | None, Any] = {None: content}
    else:
        settings = tuple(setting_of(table, float(value)) for value in content["values"])
        rows = {name: row for name, row in content.items() if name != "values"}
    figures, misprints = {}, set()
    for scenario, row in rows.items():
        for figure in FIGURES:
            if row.get(f"{figure}_misprint"):
                misprints.add((scenario, figure))
                continue
            for setting, value in zip(settings, row[figure], strict=True):
                figures[scenario, setting, figure] = float(value)
    return Published(table, tuple(rows), settings, figures, frozenset(misprints))


def published_beside(table: str, scenario: str | None, setting: Setting, figure: str) -> float | None:
    """Return the published figure of a cell, from this table or the other table over the same scenarios."""
    holding = _holding(table, setting)
    return None if holding is None else holding.figure(scenario, setting, figure)


def is_misprint(table: str, scenario: str | None, setting: Setting, figure: str) -> bool:
    """Return whether the published figure of a cell is a misprint. ``published_beside`` then returns None."""
    holding = _holding(table, setting)
    return holding is not None and (scenario, figure) in holding.misprints


def _holding(table: str, setting: Setting) -> Published | None:
    """Return the published table with a loss: this table, or the other table over the same scenarios."""
    names = [table, *(name for name in ("eta", "gamma") if table not in (name, "isic"))]
    return next((published(name) for name in names if setting in published(name).settings), None)


def setting_of(table: str, value: float) -> Setting:
    """Return the loss of a column of the table ``eta`` or ``gamma``."""
    return Setting(value, 0.0) if table == "eta" else Setting(0.0, value)


def check_table(table: str) -> None:
    """Raise an error unless this is a table of the paper."""
    if table not in TABLES:
        must = f"TABLE must be one of {', '.join(TABLES)}"
        raise InputError(sentence(must, shown(table), suggest(table, TABLES)))


@dataclass(frozen=True)
class Plan:
    """The cells to train for a table: every scenario with every loss, ``runs`` times."""

    table: str
    recipe: Recipe
    scenarios: tuple[str | None, ...]
    settings: tuple[Setting, ...]
    runs: int
    left_out: str = ""

    def cells(self) -> list[Recipe]:
        """Return the recipes, run by run, so that an interrupted sweep has complete tables of fewer runs."""
        return [
            cell_recipe(self.recipe, scenario, setting, seed)
            for seed in range(self.runs)
            for scenario in self.scenarios
            for setting in self.settings
        ]


def base_recipe(
    table: str,
    *,
    recipe: str | os.PathLike[str] | None = None,
    preset: str = "paper",
    split: str = "image",
    data: str | os.PathLike[str] | None = None,
    weights: str | None = None,
    normalization: str | None = None,
) -> Recipe:
    """Return the recipe that all cells of a table share: the paper's recipe, or ``recipe``.

    Three arguments are for the table ``isic``: ``preset``, one of ``PRESETS``; ``split``, "image" or "lesion", the unit
    that is never divided between splits; ``data``, the folder of the images.
    """
    check_table(table)
    base = named_recipe(RECIPES[table]) if recipe is None else find_recipe(os.fspath(recipe))
    if table != "isic":
        for option, value, default in (
            ("--preset", preset, "paper"),
            ("--split-by", split, "image"),
            ("--data", data, None),
        ):
            if value != default:
                raise InputError(f"{option} {value} is for the table isic, not for the table {table}. Remove {option}.")
    for option, value, choices in (("--preset", preset, PRESETS), ("--split-by", split, SPLIT_RULES)):
        if value not in choices:
            must = f"{option} must be one of {', '.join(choices)}"
            raise InputError(sentence(must, shown(value), suggest(value, choices)))
    if table == "isic" and base.data.scenario is not None:
        got = f"data.scenario = {base.data.scenario!r}"
        raise InputError(f"The table isic uses all images, but the recipe has {got}. Remove the scenario.")
    if not base.data.test:
        raise InputError("A table needs test images, but the recipe has data.test = 0. Set it, for example to 0.3.")
    changes: dict[str, Any] = {"encoder_training.loss": "cl", **PRESETS[preset]}  # Each cell sets its own loss.
    if split != "image":
        changes["data.split"] = SPLIT_RULES[split]
    if data is not None:
        changes["data.source"] = os.fspath(data)
    if weights is not None:
        changes["encoder.weights"] = weights
    if normalization is not None:
        changes["encoder_training.loss.normalization"] = normalization
    return base.override(**changes)


def cell_recipe(base: Recipe, scenario: str | None, setting: Setting, seed: int) -> Recipe:
    """Return the recipe of one run. The scenario keeps the total of ``base``."""
    return with_scenario(base, scenario).override(seed=seed, **{"encoder_training.loss": setting.table})


_QUICK: dict[str, tuple[tuple[str | None, ...], tuple[Setting, ...], int]] = {
    "eta": (("60:40", "90:10"), tuple(Setting(eta, 0.0) for eta in (0.0, 120.0, 300.0)), RUNS),
    "gamma": (("50:50", "70:30", "90:10"), (CL, Setting(0.0, 7.0)), RUNS),
    "isic": ((None,), (CL, Setting(300.0, 7.0)), 3),
}
"""The ends of each claim's range: about 10 minutes on two cores, 25 for isic with the preset small."""

_QUICK_LIMITS = {
    "eta": "",
    "gamma": (
        " It can support the claim that a gamma above 0 helps, but not contradict it. It can contradict the claim that "
        "gamma = 0 is best at 50:50, but not support it."
    ),
    "isic": " It can only contradict the claim that AFCL(300, 7) beats CL.",
}


def make_plan(
    table: str,
    recipe: Recipe,
    *,
    scenarios: str | None = None,
    values: str | None = None,
    losses: str | None = None,
    runs: int | None = None,
    quick: bool = False,
) -> Plan:
    """Choose the cells of a table from comma-separated lists; the default is the whole table, or ``--quick``."""
    whole = published(table)
    if values is not None and losses is not None:
        raise InputError("--values and --losses cannot be used together. Remove one of the two options.")
    if table == "isic":
        for option, value, do in (("--scenarios", scenarios, ""), ("--values", values, "Name losses with --losses.")):
            if value is not None:
                raise InputError(f"{option} is for the tables eta and gamma, not for isic. {do or f'Remove {option}.'}")
    rows, columns, number = _QUICK[table] if quick else (whole.scenarios, whole.settings, RUNS)
    if scenarios is not None:
        rows = _chosen_scenarios(scenarios, [name for name in whole.scenarios if name is not None])
    if values is not None:
        columns = _chosen_values(table, values, whole.settings)
    if losses is not None:
        columns = tuple(dict.fromkeys(parse_setting(text) for text in _parts(losses, "--losses")))
    number = number if runs is None else runs
    left_out = _left_out(whole, rows, columns, number) if quick else ""
    if left_out and (rows, columns, number) == _QUICK[table]:
        left_out += _QUICK_LIMITS[table]
    return Plan(table, recipe, rows, columns, number, left_out)


def _parts(text: str, option: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InputError(sentence(f"{option} must be a comma-separated list without empty entries", shown(text)))
    return parts


def _chosen_scenarios(text: str, known: Sequence[str]) -> tuple[str, ...]:
    asked = _parts(text, "--scenarios")
    for name in asked:
        if name not in known:
            must = f"--scenarios must be among {', '.join(known)}"
            raise InputError(sentence(must, shown(name), suggest(name, known)))
    return tuple(name for name in known if name in asked)


def _chosen_values(table: str, text: str, settings: Iterable[Setting]) -> tuple[Setting, ...]:
    known = {getattr(setting, table): setting for setting in settings}
    asked = set()
    for part in _parts(text, "--values"):
        try:
            asked.add(float(part))
        except ValueError:
            asked.add(math.nan)
        if not asked <= set(known):
            must = f"--values must be among {', '.join(f'{value:g}' for value in known)} for the table {table}"
            raise InputError(sentence(must, shown(part), "Name any other loss with --losses, such as acl:600."))
    return tuple(setting for value, setting in known.items() if value in asked)


def _left_out(whole: Published, rows: Sequence[str | None], columns: Sequence[Setting], runs: int) -> str:
    """Return a sentence on the parts of the paper's table that ``--quick`` omits."""
    scenarios = [name for name in whole.scenarios if name is not None and name not in rows]
    settings = [str(setting) for setting in whole.settings if setting not in columns]
    parts = [f"{len(scenarios)} of {len(whole.scenarios)} scenarios ({', '.join(scenarios)})"] if scenarios else []
    if settings:
        parts.append(f"{len(settings)} of {len(whole.settings)} losses ({', '.join(settings)})")
    if runs < RUNS:
        parts.append(f"{RUNS - runs} of {RUNS} runs")
    return f"This quick table omits {' and '.join(parts)}." if parts else ""
