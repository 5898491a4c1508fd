"""The options of ``fit``, in the panels of its help, and the fields of a recipe that they set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from lopsided.cli import rules
from lopsided.cli.look import complete_recipe
from lopsided.cli.options import exclude_option, include_option, option

DATA, LOSS, NETWORK, RUN = "Data", "Loss and training", "Network", "Run"
FIELDS = {
    "seed": "seed",
    "device": "device",
    "encoder_training.loss": "loss",
    "encoder_training.loss.eta": "eta",
    "encoder_training.loss.gamma": "gamma",
    "encoder_training.epochs": "epochs",
    "encoder_training.batch_size": "batch_size",
    "encoder_training.lr": "lr",
    "classifier.epochs": "classifier_epochs",
    "classifier.batch_size": "batch_size",
    "encoder.name": "encoder",
    "encoder.weights": "weights",
    "encoder.views": "views",
    "data.image_size": "image_size",
    "data.val": "val",
    "data.test": "test",
    "data.split": "split",
    "data.group": "group",
    "data.folds": "folds",
    "data.repeats": "repeats",
    "final": "final",
    "data.scenario": "scenario",
    "data.include": "include",
    "data.exclude": "exclude",
    "data.more": "more",
    "data.skip_unreadable": "skip_unreadable",
    "data.allow_outside": "allow_outside",
    "decision.rule": "decide",
    "track": "track",
}
"""The fields of a recipe, each with the parameter of ``fit`` that sets it."""


def complete_loss(incomplete: str) -> list[str]:
    """Return the losses whose name starts with a text, for the shell."""
    from lopsided.losses import catalogue

    return [name for name in catalogue.names() if name.startswith(incomplete)]


def fields_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a recipe that the parameters of ``fit`` set, without options that are not given."""
    values = {field: given[name] for field, name in FIELDS.items()}
    return {field: value for field, value in values.items() if value not in (None, []) and value is not False}


Data = Annotated[
    str | None,
    typer.Argument(
        metavar="DATA",
        help="A folder with one sub-folder per class (or folders train, val and test that contain them), a CSV or "
        "Parquet table with the columns path and label, or the name of a source. Default: data.source of the "
        "recipe.",
        show_default=False,
    ),
]
Out = Annotated[Path | None, option(RUN, "Folder of the run. It must be new or empty, except with --resume.")]
RecipeName = Annotated[
    str | None,
    option(RUN, "Name of a recipe, or a TOML file. Options override its fields.", autocompletion=complete_recipe),
]
Seed = Annotated[int | None, option(RUN, "Seed of all random numbers.")]
Device = Annotated[str | None, option(RUN, "Device: auto, cpu, cuda, cuda:1 or mps.")]
Changes = Annotated[
    list[str] | None,
    option(
        RUN,
        "Set any field of the recipe, for example --set encoder_training.sampler=balanced. Can be repeated.",
        "--set",
        metavar="NAME=VALUE",
    ),
]
Resume = Annotated[bool, option(RUN, "Continue the run in --out, or start it if it does not exist.", "--resume")]
Loss = Annotated[
    str | None,
    option(
        LOSS,
        "Name of a loss, see `lopsided losses`. A contrastive loss trains in two stages. A classification loss "
        "trains end to end, with the epochs of both stages together.",
        autocompletion=complete_loss,
    ),
]
Eta = Annotated[float | None, option(LOSS, "Weight of the negatives (acl and afcl).")]
Gamma = Annotated[float | None, option(LOSS, "Focusing exponent (fcl, afcl and focal).")]
Epochs = Annotated[int | None, option(LOSS, "Number of epochs of the first stage.")]
ClassifierEpochs = Annotated[int | None, option(LOSS, "Number of epochs of the second stage.")]
BatchSize = Annotated[int | None, option(LOSS, "Images per batch in both stages, summed over all ranks.")]
LearningRate = Annotated[float | None, option(LOSS, "Learning rate of the first stage.")]
Encoder = Annotated[str | None, option(NETWORK, "Name of a timm model, for example resnet18.")]
Weights = Annotated[
    str | None, option(NETWORK, "Weights: none, embedded, timm (both pretrained) or a .safetensors file.")
]
Views = Annotated[
    str | None,
    option(
        NETWORK,
        "Views of an image whose features are averaged: none, flip, flips, dihedral, or auto (frozen encoders).",
    ),
]
ImageSize = Annotated[
    int | None,
    option(
        NETWORK,
        "Images are resized to this many pixels per side. Default: the size of the pretrained weights; from "
        "scratch, their own size if all have the same, otherwise 224, or less if they are smaller.",
    ),
]
Val = Annotated[float | None, option(DATA, "Share of validation images, which select the best epoch. 0: use the last.")]
Test = Annotated[float | None, option(DATA, "Share of test images, which are evaluated only once.")]
Split = Annotated[str | None, option(DATA, "Split method: auto, random, stratified, group or given.")]
Group = Annotated[str | None, option(DATA, "Table column of groups, such as patient. A group stays in one split.")]
Folds = Annotated[
    int | None,
    option(
        DATA,
        "Test every image: train this many models, each tested on one fold. 1: one split. Default: 5 with the "
        "recipes quick and thorough, if a class has fewer than 200 images.",
        min=1,
    ),
]
Repeats = Annotated[int | None, option(DATA, "How often to draw and train the folds.", min=1)]
Final = Annotated[
    str | None,
    option(
        DATA,
        "The model of a run with folds: refit (one model of all images) or ensemble (of the models of the folds). "
        "Default: refit if the encoder is frozen or fine_tune.blend is set, otherwise ensemble.",
    ),
]
Scenario = Annotated[
    str | None,
    option(DATA, "Class proportions to draw, for example 90:10 or 90:10,total=1000; a test split of the data stays."),
]
Include = Annotated[list[str] | None, include_option(DATA)]
Exclude = Annotated[list[str] | None, exclude_option(DATA)]
More = Annotated[
    list[str] | None,
    option(
        DATA,
        "Table of further labelled images for training only, such as the marks of `lopsided find`. Can be repeated.",
        "--more",
        metavar="TABLE",
    ),
]
SkipUnreadable = Annotated[
    bool, option(DATA, "Skip images that cannot be read, and list them in the run.", "--skip-unreadable")
]
AllowOutside = Annotated[bool, option(DATA, "Allow a table to name files outside its folder.", "--allow-outside")]
Decide = Annotated[str | None, option(RUN, rules.HELP)]
Auto = Annotated[
    bool,
    option(
        RUN,
        "Compare recipes and losses over folds, the cheapest first, and train the model of the arm to take.",
        "--auto",
    ),
]
Minutes = Annotated[float | None, option(RUN, "With --auto: the time for the comparison; 60 by default.", min=0.0)]
