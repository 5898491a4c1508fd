"""The options of ``fit``, and the fields of a recipe that they set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from lopsided.cli.look import complete_recipe
from lopsided.cli.options import RULES, group_from_option, option

TRAIN, RUN = "What to train", "Run"
FIELDS = {
    "seed": "seed",
    "device": "device",
    "encoder_training.loss": "loss",
    "encoder.name": "encoder",
    "data.group": "group",
    "data.group_from": "group_from",
    "data.origin": "source",
    "data.columns": "columns",
    "data.folds": "folds",
    "data.more": "more",
    "data.classes": "normal",
    "decision.rule": "decide",
    "decision.focus": "focus",
    "track": "track",
}
"""The fields of a recipe, each with the parameter of ``fit`` that sets it."""


def complete_loss(incomplete: str) -> list[str]:
    """Return the losses whose name starts with a text, for the shell."""
    from lopsided.losses import catalogue

    return [name for name in catalogue.names() if name.startswith(incomplete)]


def fields_of(given: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return the option and its value, or None, for each field that an option sets."""
    return {
        field: (f"--{name.replace('_', '-')}", None if given[name] == [] else _value(name, given[name]))
        for field, name in FIELDS.items()
    }


def _value(name: str, given: Any) -> Any:
    """Return the value of a field: the classes of --normal are one class, and --columns are names with commas."""
    if name == "columns" and given is not None:
        return [text.strip() for text in given.split(",") if text.strip()]
    return [given] if name == "normal" and given is not None else given


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="DATA NAME=VALUE",
        help="DATA: a folder with one sub-folder per class (or train, val and test with such sub-folders), a table "
        "(CSV or Parquet) with the columns path and label, or the name of a source. NAME=VALUE: a field of the recipe.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    option(RUN, "Folder of the run. It must be new or empty, except with --resume. Default: runs/1, runs/2, ..."),
]
RecipeName = Annotated[
    str | None,
    option(
        TRAIN,
        "Name of a recipe (`lopsided recipes`), or a TOML file. default: quick or thorough, by the number of images.",
        autocompletion=complete_recipe,
    ),
]
Loss = Annotated[
    str | None,
    option(
        TRAIN,
        "Name of a loss (`lopsided losses`), to train an encoder: in two stages with a contrastive loss, end to end "
        "with a classification loss, with the epochs of both stages together.",
        autocompletion=complete_loss,
    ),
]
Encoder = Annotated[str | None, option(TRAIN, "Name of a timm model, for example resnet18.")]
Group = Annotated[
    str | None,
    option(TRAIN, "Table column of groups, such as patient, or parent for folders. A group stays in one split."),
]
Source = Annotated[
    str | None,
    option(TRAIN, "Table column of sources, such as cameras: also test on each one without training on it."),
]
Columns = Annotated[
    str | None,
    option(
        TRAIN,
        "Table columns that the classifier gets beside each image, such as age,sex,site: numbers or categories.",
        metavar="NAMES",
    ),
]
GroupFrom = Annotated[str | None, group_from_option(TRAIN)]
Folds = Annotated[
    int | None,
    option(
        TRAIN,
        "Test every image: train this many models, each tested on one fold. 1: one split. Default: 5 with quick and "
        "thorough, if a class has fewer than 200 images.",
        min=1,
    ),
]
Decide = Annotated[str | None, option(TRAIN, RULES)]
Focus = Annotated[
    str | None,
    option(
        TRAIN,
        "The class that matters: headline, threshold, label check and find follow it. Default: the class that the "
        "rule names, or the rarest one.",
        metavar="CLASS",
    ),
]
Auto = Annotated[
    bool,
    option(
        TRAIN,
        "Compare recipes and losses over folds, the cheapest first, for minutes=60, and train the one to use.",
        "--auto",
    ),
]
More = Annotated[
    list[str] | None,
    option(
        TRAIN,
        "Table of further labelled images for training only, such as the marks of `lopsided find`. Can be repeated.",
        "--more",
        metavar="TABLE",
    ),
]
Normal = Annotated[
    str | None,
    option(TRAIN, "Train with the images of this class alone: what is unlike them is unusual.", metavar="CLASS"),
]
Seed = Annotated[int | None, option(RUN, "Seed of all random numbers.")]
Device = Annotated[str | None, option(RUN, "Device: auto, cpu, cuda, cuda:1 or mps.")]
Resume = Annotated[bool, option(RUN, "Continue the run in --out, or start it if it does not exist.", "--resume")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print all metrics, not only the counts.")]
