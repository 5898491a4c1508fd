"""The subcommand that trains: fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lopsided.cli import fit_options as options
from lopsided.cli import rules
from lopsided.cli.fit_fields import flag_of, naming_flags, read_changes
from lopsided.cli.fitting import check_auto, fold_engine, joined_ranks, train_recipe
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
from lopsided.cli.sweeping import Address, EngineName, Track, Work, Workers
from lopsided.errors import InputError

if TYPE_CHECKING:
    from lopsided.runs.folder import Run


def fit(
    data: options.Data = None,
    out: options.Out = None,
    recipe: options.RecipeName = None,
    seed: options.Seed = None,
    device: options.Device = None,
    changes: options.Changes = None,
    resume: options.Resume = False,
    loss: options.Loss = None,
    eta: options.Eta = None,
    gamma: options.Gamma = None,
    epochs: options.Epochs = None,
    classifier_epochs: options.ClassifierEpochs = None,
    batch_size: options.BatchSize = None,
    lr: options.LearningRate = None,
    encoder: options.Encoder = None,
    weights: options.Weights = None,
    views: options.Views = None,
    image_size: options.ImageSize = None,
    val: options.Val = None,
    test: options.Test = None,
    split: options.Split = None,
    group: options.Group = None,
    folds: options.Folds = None,
    repeats: options.Repeats = None,
    final: options.Final = None,
    scenario: options.Scenario = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    more: options.More = None,
    skip_unreadable: options.SkipUnreadable = False,
    allow_outside: options.AllowOutside = False,
    decide: options.Decide = None,
    auto: options.Auto = False,
    minutes: options.Minutes = None,
    workers: Workers = None,
    engine: EngineName = None,
    address: Address = None,
    track: Track = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a classifier and evaluate it.

    By default, pretrained encoders turn each image into features, and a
    logistic regression on the features is fitted. This takes seconds to
    minutes and needs no network. Up to 3,000 images go through three
    encoders, mirrored and turned as well where that does not confuse the
    classes (the recipe thorough), more images through one (quick).

    With --loss or --recipe from-scratch, an encoder is trained: first with a
    contrastive loss, then a linear classifier on top. The epoch with the
    lowest class-weighted log loss on the validation split is then kept. The
    test split is evaluated once. Use --set for recipe fields that have no
    option.

    With --folds 5, every image is tested once, by a model that was not
    trained on it. This is the default if a class has fewer than 200 images
    and the encoder is not trained. --workers or --engine ray train several
    folds at once.

    With --auto, several recipes and losses are compared over the same folds,
    the cheapest first, as far as --minutes allow. The run then holds the
    model of the cheapest arm within one standard error of the best, and
    RUN/comparison/report.html says why.

    \b
    Examples:
      lopsided fit photos --out run
      lopsided fit photos --out run --auto --minutes 30
      lopsided fit lesions.csv --group patient --out run
      lopsided fit photos --out run --recipe from-scratch --image-size 64
      lopsided fit photos --out run --loss afcl --folds 5 --workers 2
      lopsided fit photos --out baseline --loss weighted-ce
      lopsided fit photos --out run --val 0.2 --decide "recall:melanoma>=0.95"
      lopsided fit photos --out run --loss afcl --set encoder_training.views=2
      lopsided fit photos --out run --loss afcl --track tensorboard --track mlflow:mlruns
      lopsided fit --out run --resume
      lopsided fit --recipe run/recipe.toml --out again
      torchrun --nproc-per-node 2 -m lopsided fit photos --out run --recipe from-scratch
    """
    given = locals() | {"decide": rules.read_rule(decide), "folds": None if folds == 1 else folds}
    fields = options.fields_of(given)
    recipe = None if recipe == "default" else recipe
    if out is None:
        raise InputError("--out is missing. Name the folder of the run, for example --out run.")
    flags = [(flag_of(name), name, value) for name, value in fields.items()]
    with joined_ranks() as ranks:
        first = ranks is None or ranks.first
        sets = read_changes(changes or (), [("DATA", "data.source", data), *flags])
        asked = fields | ({"data.folds": None} if folds == 1 else {}) | sets
        check_auto(auto, minutes, recipe, loss, folds, repeats, asked.get("data.test"), ranks)
        work = Work(workers, engine, address)
        with naming_flags(fields):
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
        parts.append("There are no figures because no images were held out. Set --test.")
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
