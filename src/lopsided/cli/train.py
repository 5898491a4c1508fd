"""The subcommands that train: demo and fit."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lopsided.cli import rules
from lopsided.cli.look import complete_recipe
from lopsided.cli.output import (
    Json,
    Quiet,
    StoppedError,
    baseline_words,
    decision_words,
    elapsed,
    figures_table,
    fold_words,
    interval,
    say,
    show,
    show_json,
    table,
)
from lopsided.cli.sweeping import Address, EngineName, Track, Workers, make_engine, option, refuse
from lopsided.errors import InputError, RunError

if TYPE_CHECKING:
    from lopsided.distributed import Ranks
    from lopsided.recipe import Recipe
    from lopsided.runs.folds import Parallel
    from lopsided.runs.run import Run

DATA, LOSS, NETWORK, RUN = "Data", "Loss and training", "Network", "Run"
_OPTIONS = {"encoder.name": "--encoder", "classifier.epochs": "--classifier-epochs", "decision.rule": "--decide"}
"""The options whose name is not the last part of their field's name."""


def _complete_loss(incomplete: str) -> list[str]:
    from lopsided.losses import catalogue

    return [name for name in catalogue.names() if name.startswith(incomplete)]


def fit(
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            help="A folder with one sub-folder per class (or folders train, val and test that contain them), a CSV or "
            "Parquet table with the columns path and label, or the name of a source. Default: data.source of the "
            "recipe.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, option(RUN, "Folder of the run. It must be new or empty, except with --resume.")
    ] = None,
    recipe: Annotated[
        str | None,
        option(RUN, "Name of a recipe, or a TOML file. Options override its fields.", autocompletion=complete_recipe),
    ] = None,
    seed: Annotated[int | None, option(RUN, "Seed of all random numbers.")] = None,
    device: Annotated[str | None, option(RUN, "Device: auto, cpu, cuda, cuda:1 or mps.")] = None,
    changes: Annotated[
        list[str] | None,
        option(
            RUN,
            "Set any field of the recipe, for example --set encoder_training.sampler=balanced. Can be repeated.",
            "--set",
            metavar="NAME=VALUE",
        ),
    ] = None,
    resume: Annotated[
        bool, option(RUN, "Continue the run in --out, or start it if it does not exist.", "--resume")
    ] = False,
    loss: Annotated[
        str | None,
        option(
            LOSS,
            "Name of a loss, see `lopsided losses`. A contrastive loss trains in two stages. A classification loss "
            "trains end to end, with the epochs of both stages together.",
            autocompletion=_complete_loss,
        ),
    ] = None,
    eta: Annotated[float | None, option(LOSS, "Weight of the negatives (acl and afcl).")] = None,
    gamma: Annotated[float | None, option(LOSS, "Focusing exponent (fcl, afcl and focal).")] = None,
    epochs: Annotated[int | None, option(LOSS, "Number of epochs of the first stage.")] = None,
    classifier_epochs: Annotated[int | None, option(LOSS, "Number of epochs of the second stage.")] = None,
    batch_size: Annotated[int | None, option(LOSS, "Images per batch in both stages, summed over all ranks.")] = None,
    lr: Annotated[float | None, option(LOSS, "Learning rate of the first stage.")] = None,
    encoder: Annotated[str | None, option(NETWORK, "Name of a timm model, for example resnet18.")] = None,
    weights: Annotated[
        str | None, option(NETWORK, "Weights: none, embedded, timm (both pretrained) or a .safetensors file.")
    ] = None,
    views: Annotated[
        str | None,
        option(NETWORK, "Views of an image whose features are averaged: none, flip, flips or dihedral."),
    ] = None,
    image_size: Annotated[
        int | None,
        option(
            NETWORK,
            "Images are resized to this many pixels per side. Default: the size of the pretrained weights; from "
            "scratch, their own size if all have the same, otherwise 224, or less if they are smaller.",
        ),
    ] = None,
    val: Annotated[
        float | None, option(DATA, "Share of validation images, which select the best epoch. 0: use the last.")
    ] = None,
    test: Annotated[float | None, option(DATA, "Share of test images, which are evaluated only once.")] = None,
    split: Annotated[str | None, option(DATA, "Split method: auto, random, stratified, group or given.")] = None,
    group: Annotated[
        str | None, option(DATA, "Table column of groups, such as patient. A group stays in one split.")
    ] = None,
    folds: Annotated[
        int | None,
        option(
            DATA,
            "Test every image: train this many models, each tested on one fold. 1: one split. Default: 5 with the "
            "default recipe if a class has fewer than 200 images.",
            min=1,
        ),
    ] = None,
    repeats: Annotated[int | None, option(DATA, "How often to draw and train the folds.", min=1)] = None,
    final: Annotated[
        str | None,
        option(
            DATA,
            "The model of a run with folds: refit (one model of all images) or ensemble (of the models of the folds). "
            "Default: refit if the encoder is frozen, otherwise ensemble.",
        ),
    ] = None,
    scenario: Annotated[
        str | None, option(DATA, "Class proportions to draw, for example 90:10 or 90:10,total=1000.")
    ] = None,
    include: Annotated[
        list[str] | None,
        option(
            DATA,
            'Use only images whose name matches, for example "*.jpg". Can be repeated.',
            "--include",
            metavar="PATTERN",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        option(
            DATA,
            'Leave out images whose name matches, for example "*_mask.*". Can be repeated.',
            "--exclude",
            metavar="PATTERN",
        ),
    ] = None,
    more: Annotated[
        list[str] | None,
        option(
            DATA,
            "Table of further labelled images for training only, such as the marks of `lopsided find`. Can be "
            "repeated.",
            "--more",
            metavar="TABLE",
        ),
    ] = None,
    skip_unreadable: Annotated[
        bool, option(DATA, "Skip images that cannot be read, and list them in the run.", "--skip-unreadable")
    ] = False,
    allow_outside: Annotated[
        bool, option(DATA, "Allow a table to name files outside its folder.", "--allow-outside")
    ] = False,
    decide: Annotated[str | None, option(RUN, rules.HELP)] = None,
    auto: Annotated[
        bool,
        option(
            RUN,
            "Compare recipes and losses over folds, the cheapest first, and train the model of the arm to take.",
            "--auto",
        ),
    ] = False,
    minutes: Annotated[
        float | None, option(RUN, "With --auto: the time for the comparison; 60 by default.", min=0.0)
    ] = None,
    workers: Workers = None,
    engine: EngineName = None,
    address: Address = None,
    track: Track = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a classifier and evaluate it.

    By default, a pretrained encoder turns each image into features, and a
    logistic regression on the features is fitted. This takes seconds and
    needs no network. With --loss or --recipe from-scratch, an encoder is
    trained: first with a contrastive loss, then a linear classifier on top.
    The epoch with the lowest class-weighted log loss on the validation
    split is then kept. The test split is evaluated once. Use --set for recipe fields
    that have no option.

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
      torchrun --nproc-per-node 2 -m lopsided fit photos --out run
    """
    flags = {
        "seed": seed,
        "device": device,
        "encoder_training.loss": loss,
        "encoder_training.loss.eta": eta,
        "encoder_training.loss.gamma": gamma,
        "encoder_training.epochs": epochs,
        "encoder_training.batch_size": batch_size,
        "encoder_training.lr": lr,
        "classifier.epochs": classifier_epochs,
        "classifier.batch_size": batch_size,
        "encoder.name": encoder,
        "encoder.weights": weights,
        "encoder.views": views,
        "data.image_size": image_size,
        "data.val": val,
        "data.test": test,
        "data.split": split,
        "data.group": group,
        "data.folds": None if folds == 1 else folds,
        "data.repeats": repeats,
        "final": final,
        "data.scenario": scenario,
        "data.include": include or None,
        "data.exclude": exclude or None,
        "data.more": more or None,
        "data.skip_unreadable": skip_unreadable or None,
        "data.allow_outside": allow_outside or None,
        "decision.rule": rules.read_rule(decide),
        "track": track or None,
    }
    if out is None:
        raise InputError("--out is missing. Name the folder of the run, for example --out run.")
    fields = {name: value for name, value in flags.items() if value is not None}
    options = [(_flag_of(name), name, value) for name, value in fields.items()]
    with _joined() as ranks:
        first = ranks is None or ranks.first
        sets = read_changes(changes or (), [("DATA", "data.source", data), *options])
        asked = fields | ({"data.folds": None} if folds == 1 else {}) | sets
        if minutes is not None and not auto:
            raise InputError("--minutes is the time of a comparison, but --auto is missing. Add --auto.")
        if auto:
            _check_auto({"--recipe": recipe, "--loss": loss}, folds, repeats, asked, ranks)
            from lopsided.cli.auto import fit_auto

            with _naming_flags(fields):
                run, already = fit_auto(
                    data,
                    out,
                    asked,
                    minutes=minutes,
                    resume=resume,
                    quiet=quiet,
                    workers=workers,
                    engine=engine,
                    address=address,
                )
            _show_run(run, as_json, already=already)
            return
        with _naming_flags(fields):
            parallel = _parallel(workers, engine, address, ranks, quiet=quiet)
            silent = quiet or not first
            run, already = _fit(data, out, recipe, asked, resume=resume, quiet=silent, ranks=ranks, parallel=parallel)
        if first:
            if already and not quiet:
                say(f"The run in {out} is already finished.")
            _show_run(run, as_json, already=already)


def _check_auto(
    choices: Mapping[str, str | None],
    folds: int | None,
    repeats: int | None,
    changes: Mapping[str, Any],
    ranks: Ranks | None,
) -> None:
    """Raise an error for options that --auto decides itself."""
    refuse(choices, "chooses what to train", "--auto")
    refuse({"--folds 1": folds == 1 or None}, "trains one split", "--auto")
    refuse({"--test": changes.get("data.test") or None}, "is a share of one split", "--auto")
    refuse({"--repeats": repeats}, "repeats the folds of one recipe", "--auto")
    if ranks is not None:
        raise InputError("--auto cannot be used with torchrun. Use --workers or --engine ray.")


def _parallel(
    workers: int | None, engine: str | None, address: str | None, ranks: Ranks | None, *, quiet: bool
) -> Parallel | None:
    """Return the trainer of several folds at once, or None if no option asks for it."""
    if workers is None and engine is None and address is None:
        return None
    if ranks is not None:
        refuse({"--workers": workers, "--engine": engine, "--address": address}, "trains folds at once", "torchrun")
    from lopsided.sweeps.folds import on_engine

    return on_engine(make_engine(engine or "local", address, workers, None), (lambda text: None) if quiet else say)


def _flag_of(field: str) -> str:
    """Return the option that sets a field of the recipe."""
    return _OPTIONS.get(field, f"--{field.rpartition('.')[2].replace('_', '-')}")


@contextmanager
def _naming_flags(fields: Mapping[str, Any]) -> Iterator[None]:
    """Name the flag instead of the field in an error about a field that was set by a flag."""
    try:
        yield
    except (InputError, RunError) as error:
        text = str(error)
        for name in fields:
            flag = _flag_of(name)
            start = r"(?<![\w.-])" if "." in name else "^"  # A plain word such as seed may have its usual meaning.
            text = re.sub(rf"{start}{re.escape(name)}(?!\w|\.\w)", flag, text)
        if text == str(error):
            raise
        raise type(error)(text) from error


def _check_split(recipe: Recipe, changes: Mapping[str, Any]) -> None:
    """Raise if the split would ignore the groups that the recipe names, or if folds would ignore the test share."""
    how, group = recipe.data.split, recipe.data.group
    if recipe.data.folds is not None and changes.get("data.test"):
        raise InputError(
            f"--folds {recipe.data.folds} and --test {changes['data.test']:g} contradict each other: with folds, every "
            "image is a test image. Leave out one of the two options."
        )
    if group is not None and how in ("random", "stratified"):
        raise InputError(
            f"--split {how} and --group {group} contradict each other: the split would ignore the groups, so images of "
            "one group could be in two splits. Use --split group, or leave out one of the two options."
        )


def read_changes(texts: Iterable[str], options: Iterable[tuple[str, str, Any]]) -> dict[str, Any]:
    """Read the values of --set. Raise an error if another option sets the same field to another value.

    ``options`` holds the name, the field and the value of each other option. A value is None if it is not given.
    """
    from lopsided.recipe import parse_change

    sets = dict(map(parse_change, texts))
    for name, field, value in options:
        for path in (field, f"{field}.name"):
            if value is not None and path in sets and sets[path] != value:
                given = name if value is True else f"{name} {value}"
                other = "unset" if sets[path] is None else json.dumps(sets[path], default=str)
                both = f"{given} and --set {path}={other}"
                raise InputError(f"{both} set the same field to different values. Remove one of the two.")
    return sets


def _fit(
    data: str | None,
    out: Path,
    recipe: str | None,
    changes: Mapping[str, Any],
    *,
    resume: bool,
    quiet: bool,
    ranks: Ranks | None,
    parallel: Parallel | None = None,
) -> tuple[Run, bool]:
    """Return the finished run, and whether it was already finished before this call."""
    text, why = _told(ranks, lambda: _choose(recipe, out, resume, changes))
    from lopsided.recipe import Recipe

    chosen = Recipe.from_toml(text).override(**changes)
    if not resume:
        _check_split(chosen, changes)
    continues = _told(ranks, lambda: resume and (out / "recipe.toml").is_file())
    if recipe is None and not continues and chosen.method == "frozen" and not any(map(_names_encoder, changes)):
        from lopsided.recipe import named_recipe
        from lopsided.runs.choice import choose_recipe

        name, why = _told(ranks, lambda: choose_recipe(chosen, data))
        chosen = named_recipe(name).override(**changes)
    if recipe in (None, "default", "thorough") and not continues:
        chosen, why = _with_folds(chosen, why, data, changes, ranks)
    if parallel is not None and chosen.data.folds is None:
        raise InputError("--workers and --engine train several folds at once, but there are no folds. Use --folds 5.")
    from lopsided.progress import reporter
    from lopsided.runs.run import Run, run_recipe

    already = _told(ranks, lambda: resume and (out / "metrics.json").exists() and Run.open(out).finished)
    try:
        with reporter(quiet=quiet) as watcher:
            checking = watcher.counting("checking images")
            run = run_recipe(
                chosen,
                out,
                data=data,
                resume=resume,
                reporter=watcher,
                progress=checking,
                ranks=ranks,
                why=why,
                parallel=parallel,
            )
    except KeyboardInterrupt:
        if not (out / "recipe.toml").exists():
            raise StoppedError("interrupted. Nothing was written.") from None
        if ranks is not None:  # This process does not know the launch command of the other ranks.
            raise StoppedError("interrupted. Continue with the same command and --resume.") from None
        again = f"lopsided fit --out {shlex.quote(str(out))} --resume"
        raise StoppedError(f"interrupted. Continue with: {again}") from None
    return run, already


def _names_encoder(path: str) -> bool:
    """Return whether a field says which features to compute, so that there is nothing to choose."""
    return path.startswith("encoder.") or path in ("data.image_size", "method")


_SPLIT_FIELDS = ("data.folds", "data.fold", "data.test", "data.val", "data.split")
"""Fields that state how to split the images. If one of them is set, there are no folds by default."""


def _with_folds(
    recipe: Recipe, why: str, data: str | None, changes: Mapping[str, Any], ranks: Ranks | None
) -> tuple[Recipe, str]:
    """Return a recipe with the default folds, if there are any, and the reason."""
    if recipe.method != "frozen" or any(name in changes for name in _SPLIT_FIELDS):
        return recipe, why
    from lopsided.runs.folds import default_folds

    folds, text = _told(ranks, lambda: default_folds(recipe, data))
    why = " ".join(filter(None, [why, text]))
    return (recipe, why) if folds is None else (recipe.override(**{"data.folds": folds}), why)


@contextmanager
def _joined() -> Iterator[Ranks | None]:
    """Join the ranks that torchrun started. Yield None for a single process, without importing torch."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield None
        return
    from lopsided.distributed import joined

    with joined() as ranks:
        yield ranks


def _told(ranks: Ranks | None, make: Callable[[], Any]) -> Any:
    """Return the result of ``make`` on the first rank. Only the first rank reads the run folder."""
    return make() if ranks is None else ranks.told(make)


def demo(
    out: Annotated[Path, typer.Option(help="Folder to write. Finished runs in it are reused.")] = Path("lopsided-demo"),
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare CE, CL, AFCL and the default recipe on included images.

    90 % of the images are T-shirts, 10 % are shirts. CE, CL and AFCL train an
    encoder from scratch. The default recipe uses the embedded encoder.

    The demo takes a few minutes on two cores. After an interruption, the same
    command continues the demo.

    \b
    Examples:
      lopsided demo
      lopsided demo --out /tmp/demo --seed 1
    """
    from lopsided.progress import reporter
    from lopsided.runs.demo import run_demo, summarise

    try:
        with reporter(quiet=quiet) as watcher:
            runs = run_demo(out, seed=seed, reporter=watcher.named)
    except KeyboardInterrupt:
        again = f"lopsided demo --out {shlex.quote(str(out))} --seed {seed}"
        raise StoppedError(f"interrupted. Continue with: {again}") from None
    summary = summarise(runs)
    if as_json:
        show_json({"out": str(out), **summary})
    else:
        show(_demo_words(summary, out))


def _choose(recipe: str | None, out: Path, resume: bool, changes: Mapping[str, Any]) -> tuple[str, str]:
    """Return a recipe as TOML, and the sentence that gives the reason for it; "" if the user named the recipe.

    This is the named recipe, the recipe of the run to resume, or ``default``. If an option has an effect only on the
    training of an encoder, it is ``from-scratch``.
    """
    from lopsided.recipe import FROZEN, find_recipe, is_idle

    if recipe is not None:
        return find_recipe(recipe).to_toml(), ""
    if resume and (out / "recipe.toml").is_file():
        from lopsided.runs.run import Run

        return Run.open(out).recipe.to_toml(), ""
    own = next((path for path in changes if path.startswith("fine_tune.")), None)
    if own is not None or changes.get("method") == "fine-tune":
        return find_recipe("fine-tune").to_toml(), f"Recipe: fine-tune, because {own or 'method'} is set."
    frozen = changes.get("method", "frozen")
    training = next((path for path in changes if is_idle(path, str(frozen))), None)
    if training is None and changes.get("encoder.weights", "none" if "encoder.name" in changes else "") == "none":
        training = "encoder.name"
    if frozen not in FROZEN:
        training = "method"
    if training is not None:
        why = f"Recipe: from-scratch, because {training} is set, which has an effect only if an encoder is trained."
        if training == "encoder.name":
            why = "Recipe: from-scratch, because the encoder has no pretrained weights (--weights)."
        return find_recipe("from-scratch").to_toml(), why
    why = "Recipe: default, because the fields of the encoder are given: a pretrained encoder that is not trained."
    return find_recipe("default").to_toml(), f"{why} Use --recipe from-scratch to train an encoder."


def _show_run(run: Run, as_json: bool, *, already: bool) -> None:
    from lopsided.recipe import FROZEN

    metrics = run.metrics or {}
    if as_json:
        show_json({"run": str(run.folder), **metrics})
        return
    counts, folds = metrics["counts"], metrics.get("folds")
    numbers = ", ".join(f"{sum(classes.values()):,} {split}" for split, classes in counts.items() if classes)
    if folds is not None:
        numbers = f"{folds['folds']} folds of {sum(counts['test'].values()):,}"
    name = "Frozen features" if metrics["method"] == "frozen" else metrics["loss"].upper()
    name = f"{name} heads on frozen features" if metrics["method"] == "adapter" else name
    parts = [f"{name} on {metrics['source']}: {numbers} images"]
    for split in ("test", "val"):
        if metrics[split] is not None:
            title = split if folds is None else "all images, each tested by a model that was not trained on it"
            parts.append(f"{title}\n{figures_table(metrics[split])}")
            parts += decision_words(metrics, split)
            parts += baseline_words(metrics, split)
            break
    else:
        parts.append("There are no figures because no images were held out. Set --test.")
    if metrics["test"] is not None and metrics["val"] is not None and metrics["method"] not in FROZEN:
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


def _demo_words(summary: Mapping[str, Any], out: Path) -> str:
    majority = summary["majority"]
    counts = summary["counts"]
    train = ", ".join(f"{number} {name}" for name, number in counts["train"].items())
    test = ", ".join(f"{number} {name}" for name, number in counts["test"].items())
    rows = [
        [
            run["loss"] if run["loss"] == "default" else run["loss"].upper(),
            interval(run["uwa"]),
            interval(run["accuracy"]),
            f"{run['seconds']:.0f} s",
        ]
        for run in summary["runs"]
    ]
    rows.append([f"always {majority['label']}", f"{majority['uwa']:.3f}", f"{majority['accuracy']:.3f}", ""])
    return "\n\n".join(
        [
            f"Trained on {train}; tested on {test}.",
            table(["loss or recipe", "unweighted accuracy [95 %]", "accuracy [95 %]", "time"], rows),
            f"Written to {out}: one run folder per row, and summary.json. See the mistakes of the default with "
            f"lopsided report {shlex.quote(str(out / 'default'))}.",
        ]
    )
