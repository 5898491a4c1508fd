"""The options of ``fit``, and the fields of a recipe that they set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from lopsided.cli.look import complete_recipe
from lopsided.cli.options import RULES, option

TRAIN, RUN = "What to train", "Run"
FIELDS = {
    "seed": "seed",
    "device": "device",
    "encoder_training.loss": "loss",
    "encoder.name": "encoder",
    "data.group": "group",
    "data.folds": "folds",
    "data.more": "more",
    "decision.rule": "decide",
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
        field: (f"--{name.replace('_', '-')}", None if given[name] == [] else given[name])
        for field, name in FIELDS.items()
    }


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
Seed = Annotated[int | None, option(RUN, "Seed of all random numbers.")]
Device = Annotated[str | None, option(RUN, "Device: auto, cpu, cuda, cuda:1 or mps.")]
Resume = Annotated[bool, option(RUN, "Continue the run in --out, or start it if it does not exist.", "--resume")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print all metrics, not only the counts.")]
