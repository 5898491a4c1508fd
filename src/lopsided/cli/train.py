"""The subcommand that trains: fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lopsided.cli import fit_options as options
from lopsided.cli.fitting import check_auto, fold_engine, joined_ranks, named, train_recipe
from lopsided.cli.options import Json, Quiet
from lopsided.cli.output import (
    baseline_words,
    decision_words,
    elapsed,
    figures_table,
    fold_words,
    interval,
    say,
    show,
    show_json,
)
from lopsided.cli.settings import read_arguments, read_changes, read_minutes
from lopsided.cli.sweeping import EngineName, Track, Work, Workers
from lopsided.errors import InputError

if TYPE_CHECKING:
    from lopsided.runs.folder import Run


def fit(
    words: options.Words = None,
    out: options.Out = None,
    recipe: options.RecipeName = None,
    loss: options.Loss = None,
    encoder: options.Encoder = None,
    group: options.Group = None,
    group_from: options.GroupFrom = None,
    folds: options.Folds = None,
    decide: options.Decide = None,
    auto: options.Auto = False,
    more: options.More = None,
    seed: options.Seed = None,
    device: options.Device = None,
    resume: options.Resume = False,
    workers: Workers = None,
    engine: EngineName = None,
    track: Track = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a classifier and evaluate it.

    By default, pretrained encoders turn each image into features, and a
    logistic regression on the features is fitted, in seconds to minutes and
    without a network: three encoders for up to 3,000 images (the recipe
    thorough), one for more (quick). If a class has fewer than 200 images,
    every image is tested once, in five folds.

    With --loss or --recipe from-scratch, an encoder is trained. NAME=VALUE
    sets any field of the recipe. `lopsided recipes NAME` shows them all.

    \b
    Fields, by their full name or its last part:
      epochs=20 lr=1e-3 batch_size=64 classifier_epochs=10   training
      eta=0.5 gamma=7 temperature=0.1                        the loss
      weights=timm tta=flips image_size=224                  the encoder
      val=0.2 test=0.3 split=stratified scenario=90:10       the split
      repeats=3 final=ensemble                               folds
      include='*.jpg' skip_unreadable=true allow_outside=true
      encoder_training.views=2 classifier.kind=crt           full names

    \b
    Examples:
      lopsided fit photos --out run
      lopsided fit photos --out run --auto minutes=30
      lopsided fit lesions.csv --group patient --out run
      lopsided fit photos --group-from '{group}_*' --out run
      lopsided fit photos --out run --recipe from-scratch image_size=64
      lopsided fit photos --out run --loss afcl eta=0.5 gamma=7 --folds 5
      lopsided fit photos --out run val=0.2 --decide recall:melanoma=0.95
      lopsided fit --out run --resume
      lopsided fit --recipe run/recipe.toml --out again
      torchrun --nproc-per-node 2 -m lopsided fit photos --out run --loss cl
    """
    given = options.fields_of(locals())
    data, texts = read_arguments(words or ())
    if out is None:
        raise InputError("--out is missing. Name the folder of the run, for example --out run.")
    with joined_ranks() as ranks:
        first = ranks is None or ranks.first
        minutes, texts = read_minutes(texts) if auto else (None, texts)
        recipe = None if recipe == "default" else recipe
        changes = read_changes(texts, {"data.source": ("DATA", data), **given}, lambda: named(recipe, ranks))
        if auto:
            check_auto(recipe, changes, ranks)
        work = Work(workers, engine)
        with changes.named():
            asked = {path: value for path, value in changes.values.items() if path != "data.source"}
            data = changes.values.get("data.source")
            if auto:
                from lopsided.cli.auto import fit_auto

                run, already = fit_auto(data, out, asked, work, minutes=minutes, resume=resume, quiet=quiet)
            else:
                worker = fold_engine(work, ranks)
                silent = quiet or not first
                run, already = train_recipe(
                    data, out, recipe, asked, resume=resume, quiet=silent, ranks=ranks, engine=worker
                )
        if first:
            if already and not quiet and not auto:
                say(f"The run in {out} is already finished.")
            _show_run(run, as_json, already=already)


def _show_run(run: Run, as_json: bool, *, already: bool) -> None:
    metrics = run.metrics or {}
    if as_json:
        show_json({"run": str(run.folder), **metrics})
        return
    counts, folds = metrics["counts"], metrics.get("folds")
    numbers = ", ".join(f"{sum(classes.values()):,} {split}" for split, classes in counts.items() if classes)
    if folds is not None:
        numbers = f"{folds['folds']} folds of {sum(counts['test'].values()):,}"
    spec = run.recipe.spec
    parts = [f"{spec.title(run.recipe)} on {metrics['source']}: {numbers} images"]
    for split in ("test", "val"):
        if metrics[split] is not None:
            title = split if folds is None else "all images, each tested by a model that was not trained on it"
            parts.append(f"{title}\n{figures_table(metrics[split])}")
            parts += decision_words(metrics, split)
            parts += baseline_words(metrics, split)
            break
    else:
        parts.append("There are no figures because no images were held out. Set test=0.15.")
    if metrics["test"] is not None and metrics["val"] is not None and spec.selects_epochs:
        picked = interval(metrics["val"]["figures"]["uwa"])
        parts.append(f"Unweighted accuracy on the validation images, which selected the model: {picked}")
    if folds is not None:
        parts.append(fold_words(folds))
    if metrics["unreadable"]:
        parts.append(f"{len(metrics['unreadable']):,} unreadable images were skipped. metrics.json lists them.")
    training = metrics["seconds"]
    if already:
        parts.append(f"{run.folder} was trained in {training:.0f} s.")
    else:
        rest = f"{training:.0f} s of training; the rest is start-up, reading images and evaluation"
        parts.append(f"Written to {run.folder} in {max(elapsed(), training):.0f} s ({rest}).")
    show("\n\n".join(parts))
