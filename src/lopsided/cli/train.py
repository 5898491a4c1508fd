"""The subcommand that trains, fit, and the fields of a recipe that its options set."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lopsided.cli.look import complete_recipe
from lopsided.cli.options import RULES, Json, Quiet, argument, grouped, option
from lopsided.cli.output import (
    StoppedError,
    balanced_words,
    baseline_words,
    decision_words,
    elapsed,
    figures_table,
    fold_words,
    interval,
    next_words,
    say,
    shortened,
    show,
    show_json,
    speed_words,
)
from lopsided.cli.settings import read_arguments, read_changes, read_minutes
from lopsided.cli.sweeping import Track, Workplace, refuse
from lopsided.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from lopsided.runs.engines import Engine
    from lopsided.runs.folder import Run

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
    argument(
        "DATA: a folder with one sub-folder per class (or train, val and test with such sub-folders), a table "
        "(CSV or Parquet) with the columns path and label, or the name of a source. NAME=VALUE: a field of the recipe.",
        metavar="DATA NAME=VALUE",
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
        "Name of a recipe (`lopsided recipes`), or a TOML file. default: few, quick or thorough, by the numbers of "
        "images.",
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
        "Test every image: train this many models, each tested on one fold. 1: one split. Default: 5 with few, "
        "quick and thorough, if a class has fewer than 200 images.",
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
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print all metrics and notes, not only what matters most.")
]


@grouped
def fit(
    words: Words = None,
    *,
    out: Out = None,
    recipe: RecipeName = None,
    loss: Loss = None,
    encoder: Encoder = None,
    group: Group = None,
    folds: Folds = None,
    decide: Decide = None,
    auto: Auto = False,
    more: More = None,
    seed: Seed = None,
    device: Device = None,
    resume: Resume = False,
    work: Workplace,
    track: Track = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a classifier and evaluate it.

    By default, a pretrained encoder turns each image into features, and a
    linear classifier on the features is fitted, in seconds to minutes and
    without a network.

    \b
    Without --recipe, the images decide which recipe is used:
      few       one class, or two of which one is rare
      thorough  at most 3,000 images above 32 pixels, 50 or more of each class
      quick     otherwise

    If a class has fewer than 200 images, every image is tested once, in five
    folds. Without --out, the run is in runs/1, runs/2 and so on.

    With --loss or --recipe from-scratch, an encoder is trained. NAME=VALUE
    sets any field of the recipe; --name VALUE is read as name=VALUE.
    `lopsided recipes NAME` shows them all.

    \b
    Fields, by their full name or its last part:
      focus=melanoma classes=good                            classes
      columns=age,sex,site group_from='{group}_*'            beside an image
      origin=camera          a column: test each camera without training on it
      epochs=20 lr=1e-3 batch_size=64 classifier_epochs=10   training
      eta=0.5 gamma=7 temperature=0.1                        the loss
      weights=timm tta=flips image_size=224                  the encoder
      val=0.2 test=0.3 split=stratified scenario=90:10       the split
      repeats=3 final=ensemble                               folds
      include='*.jpg' skip_unreadable=true allow_outside=true
      encoder_training.views=2 classifier.kind=crt           full names

    \b
    Examples:
      lopsided fit photos
      lopsided fit photos --out run --auto minutes=30
      lopsided fit photos classes=good --out run
      lopsided fit lesions.csv --group patient --out run
      lopsided fit lesions.csv columns=age,sex,site --out run
      lopsided fit photos group_from='{group}_*' --out run
      lopsided fit photos --out run --recipe from-scratch image_size=64
      lopsided fit photos --out run --loss afcl eta=0.5 gamma=7 --folds 5
      lopsided fit photos --out run val=0.2 --decide recall:melanoma=0.95
      lopsided fit --out run --resume
      lopsided fit --recipe run/recipe.toml --out again
      torchrun --nproc-per-node 2 -m lopsided fit photos --out run --loss cl
    """
    from lopsided.data.prepare import Sources
    from lopsided.runs.fitting import named, train_recipe

    given = fields_of(locals())
    with joined_ranks() as ranks, _target(out, ranks, resume=resume) as folder:
        data, texts = read_arguments(words or ())
        minutes, texts = read_minutes(texts) if auto else (None, texts)
        recipe = None if recipe == "default" else recipe
        changes = read_changes(texts, {"data.source": ("DATA", data), **given}, lambda: named(recipe, ranks))
        if auto:
            from lopsided.cli.auto import check_auto, fit_auto

            check_auto(recipe, changes, ranks)
        sources = Sources()
        with changes.named():
            asked = {path: value for path, value in changes.values.items() if path != "data.source"}
            data = changes.values.get("data.source")
            if auto:
                run, already = fit_auto(data, folder, asked, work, minutes=minutes, resume=resume, quiet=quiet)
            else:
                worker = fold_engine(work, ranks)
                with _continued(folder, asked.get("track", ()), ranks):
                    run, already = train_recipe(
                        data,
                        folder,
                        recipe,
                        asked,
                        resume=resume,
                        quiet=quiet or not ranks.first,
                        verbose=verbose,
                        ranks=ranks,
                        engine=worker,
                        sources=sources,
                    )
        if ranks.first:
            from lopsided.reports.thumbnails import keep_shown_pictures

            keep_shown_pictures(run.folder, allow_outside=run.recipe.data.allow_outside, sources=sources)
            if already and not quiet and not auto:
                say(f"The run in {folder} is already finished.")
            if as_json:
                show_json({"run": str(run.folder), **(run.metrics or {})})
            else:
                _show_run(run, verbose=verbose, already=already)


@contextmanager
def _target(out: Path | None, ranks: Ranks, *, resume: bool) -> Iterator[Path]:
    """Yield the folder of the run on all ranks: ``out``, a new one, or with ``resume`` the newest one."""
    from lopsided.runs.folder import folder_of, newest_run

    with ExitStack() as stack:

        def choose() -> str:
            return str(newest_run(finished=False) if resume else stack.enter_context(folder_of(None)))

        yield out if out is not None else Path(ranks.told(choose))


@contextmanager
def _continued(out: Path, track: Sequence[str], ranks: Ranks) -> Iterator[None]:
    """Let an interruption end with the command that continues the run."""
    try:
        yield
    except KeyboardInterrupt:
        if not (out / "recipe.toml").exists():
            raise StoppedError("interrupted. Nothing was written.") from None
        if ranks.size > 1:  # This process does not know the launch command of the other ranks.
            raise StoppedError("interrupted. Continue with the same command and --resume.") from None
        tracked = "".join(f" --track {shlex.quote(text)}" for text in track)
        again = f"lopsided fit --out {shlex.quote(str(out))} --resume{tracked}"
        raise StoppedError(f"interrupted. Continue with: {again}") from None


def _show_run(run: Run, *, verbose: bool, already: bool) -> None:
    """Print what the run found in counts, all metrics if ``verbose``, and the next command."""
    from lopsided.runs.metrics import judged_split

    metrics = run.metrics or {}
    counts, folds = metrics["counts"], metrics.get("folds")
    numbers = ", ".join(f"{sum(classes.values()):,} {split}" for split, classes in counts.items() if classes)
    if folds is not None:
        numbers = f"{folds['folds']} folds of {sum(counts['test'].values()):,}"
    parts = [f"{run.recipe.spec.title(run.recipe)} on {metrics['source']}: {numbers} images"]
    split = judged_split(metrics)
    if split is None:
        parts.append("There are no metrics because no images were held out. Set test=0.15.")
    else:
        lines = [line.words(shortened(line.label)) for line in run.headlines()]
        parts.append("\n".join(filter(None, [*lines, balanced_words(metrics[split])])))
        parts += _details(run, metrics, split) if verbose else []
        parts += speed_words(run.recipe) if metrics.get("baseline") and not already else []
    if metrics["unreadable"]:
        parts.append(f"{len(metrics['unreadable']):,} unreadable images were skipped. metrics.json lists them.")
    training, folder = metrics["seconds"], shlex.quote(str(run.folder))
    if already:
        parts.append(f"{run.folder} was trained in {training:.0f} s.")
    else:
        others = f"{training:.0f} s of training; the rest is start-up, reading images and evaluation"
        parts.append(f"Written to {run.folder} in {max(elapsed(), training):.0f} s ({others}).")
    parts[-1] += f"\nSee the mistakes: lopsided report {folder} --open"
    parts += next_words(run)
    show("\n\n".join(parts))


def _details(run: Run, metrics: Mapping[str, Any], split: str) -> list[str]:
    """Return the tables of a split, how the model decides, and the comparison with quick."""
    folds = metrics.get("folds")
    title = split if folds is None else "all images, each tested by a model that was not trained on it"
    parts = [f"{title}\n{figures_table(metrics[split])}"]
    parts += [*decision_words(metrics, split), *baseline_words(metrics, split)]
    if split == "test" and metrics["val"] is not None and run.recipe.spec.selects_epochs:
        picked = interval(metrics["val"]["figures"]["uwa"])
        parts.append(f"Balanced accuracy on the validation images, which selected the model: {picked}")
    return parts if folds is None else [*parts, fold_words(folds)]


def fold_engine(work: Workplace, ranks: Ranks) -> Engine | None:
    """Return the engine that trains several folds at once, or None if no option asks for it."""
    if work == Workplace():
        return None
    if ranks.size > 1:
        refuse({"--workers": work.workers, "--engine": work.engine}, "trains folds at once", "torchrun")
    return work.make()


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Join the ranks that torchrun started. A single process is alone, and does not import torch for this."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield ALONE
        return
    from lopsided.distributed import joined

    with joined() as ranks:
        yield ranks
