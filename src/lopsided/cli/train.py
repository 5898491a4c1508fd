"""The verbs that train: demo and fit."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lopsided.cli.look import complete_recipe
from lopsided.cli.output import Json, Quiet, StoppedError, figures_table, interval, say, show, show_json, table
from lopsided.errors import InputError, sentence

if TYPE_CHECKING:
    from lopsided.distributed import Ranks
    from lopsided.recipe import Recipe
    from lopsided.runs.run import Run

DATA, LOSS, NETWORK, RUN = "Data", "Loss and training", "Network", "Run"


def _complete_loss(incomplete: str) -> list[str]:
    from lopsided.losses import catalogue

    return [name for name in catalogue.names() if name.startswith(incomplete)]


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    # In Annotated the first argument is a name, whatever typer's signature calls it.
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


def fit(
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            help="A folder with one sub-folder per class (or such folders under train, val and test), a CSV or Parquet "
            "table with columns path and label, or a source's name. Left out: what the recipe names.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, _option(RUN, "The folder to write; new or empty, unless resumed.")] = None,
    recipe: Annotated[
        str | None,
        _option(RUN, "A recipe's name or TOML file; flags replace its fields.", autocompletion=complete_recipe),
    ] = None,
    seed: Annotated[int | None, _option(RUN, "Every random choice follows from it.")] = None,
    device: Annotated[str | None, _option(RUN, "auto, cpu, cuda, cuda:1 or mps.")] = None,
    changes: Annotated[
        list[str] | None,
        _option(
            RUN,
            "Set any field of the recipe, such as --set encoder_training.sampler=balanced; may be repeated.",
            "--set",
            metavar="NAME=VALUE",
        ),
    ] = None,
    resume: Annotated[
        bool, _option(RUN, "Continue the run in --out; start it if it is not there.", "--resume")
    ] = False,
    loss: Annotated[
        str | None,
        _option(
            LOSS,
            "A loss of `lopsided losses`. A contrastive one trains in two stages; one for classification trains end to "
            "end, with as many epochs as both stages together.",
            autocompletion=_complete_loss,
        ),
    ] = None,
    eta: Annotated[float | None, _option(LOSS, "Weight of the negatives, in acl and afcl.")] = None,
    gamma: Annotated[float | None, _option(LOSS, "Focusing exponent, in fcl, afcl and focal.")] = None,
    epochs: Annotated[int | None, _option(LOSS, "Passes over the training images, first stage.")] = None,
    classifier_epochs: Annotated[int | None, _option(LOSS, "Passes of the second stage.")] = None,
    batch_size: Annotated[int | None, _option(LOSS, "Images in a batch, in both stages, over all ranks.")] = None,
    lr: Annotated[float | None, _option(LOSS, "Learning rate of the first stage.")] = None,
    encoder: Annotated[str | None, _option(NETWORK, "Any timm model, such as resnet18.")] = None,
    weights: Annotated[str | None, _option(NETWORK, "none, timm, or a .safetensors file to start from.")] = None,
    image_size: Annotated[int | None, _option(NETWORK, "Side in pixels to which images are resized.")] = None,
    val: Annotated[
        float | None, _option(DATA, "Share of images by which the model is picked; 0: the last one.")
    ] = None,
    test: Annotated[float | None, _option(DATA, "Share of images that is held out and looked at once.")] = None,
    split: Annotated[str | None, _option(DATA, "auto, random, stratified, group or given.")] = None,
    group: Annotated[str | None, _option(DATA, "A table's column of what must not be parted, such as patient.")] = None,
    scenario: Annotated[str | None, _option(DATA, "Proportions to draw, such as 90:10 or 90:10,total=1000.")] = None,
    skip_unreadable: Annotated[
        bool, _option(DATA, "Leave out images that cannot be read, and list them in the run.", "--skip-unreadable")
    ] = False,
    allow_outside: Annotated[
        bool, _option(DATA, "Let a table name files outside its own folder.", "--allow-outside")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a classifier and say how good it is.

    Two stages: an encoder with a contrastive loss, then a linear classifier
    on it. The model is picked by unweighted accuracy on a validation split;
    the test split is looked at once. What has no flag is set with --set.

    \b
    Examples:
      lopsided fit photos --out run --image-size 64
      lopsided fit lesions.csv --group patient --out run --weights timm
      lopsided fit photos --out baseline --loss weighted-ce
      lopsided fit photos --out run --loss afcl --set encoder_training.views=2
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
        "data.image_size": image_size,
        "data.val": val,
        "data.test": test,
        "data.split": split,
        "data.group": group,
        "data.scenario": scenario,
        "data.skip_unreadable": skip_unreadable or None,
        "data.allow_outside": allow_outside or None,
    }
    if out is None:
        raise InputError(sentence("--out must name the folder of the run", "none", "Such as --out run."))
    fields = {name: value for name, value in flags.items() if value is not None}
    with _joined() as ranks:
        first = ranks is None or ranks.first
        fields |= _changes(changes or ())
        run, already = _fit(data, out, recipe, fields, resume=resume, quiet=quiet or not first, ranks=ranks)
        if first:
            if already and not quiet:
                say(f"{out} is finished; nothing was left to do.")
            _show_run(run, as_json)


def _changes(texts: Iterable[str]) -> dict[str, Any]:
    from lopsided.recipe import parse_change

    return dict(map(parse_change, texts))


def _fit(
    data: str | None,
    out: Path,
    recipe: str | None,
    changes: Mapping[str, Any],
    *,
    resume: bool,
    quiet: bool,
    ranks: Ranks | None,
) -> tuple[Run, bool]:
    """The finished run, and whether it was before."""
    text = _told(ranks, lambda: _choose(recipe, out, resume).to_toml())
    from lopsided.recipe import Recipe

    chosen = Recipe.from_toml(text).override(**changes)
    from lopsided.progress import reporter
    from lopsided.runs.run import Run, run_recipe

    already = _told(ranks, lambda: resume and (out / "metrics.json").exists() and Run.open(out).finished)
    try:
        with reporter(quiet=quiet) as watcher:
            checking = watcher.counting("checking images")
            run = run_recipe(chosen, out, data=data, resume=resume, reporter=watcher, progress=checking, ranks=ranks)
    except KeyboardInterrupt:
        if not (out / "recipe.toml").exists():
            raise StoppedError("interrupted; nothing was written.") from None
        if ranks is not None:  # How the others were started is not known here.
            raise StoppedError("interrupted. Continue with the same command and --resume.") from None
        again = f"lopsided fit --out {shlex.quote(str(out))} --resume"
        raise StoppedError(f"interrupted. Continue with: {again}") from None
    return run, already


@contextmanager
def _joined() -> Iterator[Ranks | None]:
    """Join the other ranks that torchrun started; None for a process alone, which needs no torch to be told so."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield None
        return
    from lopsided.distributed import joined

    with joined() as ranks:
        yield ranks


def _told(ranks: Ranks | None, make: Callable[[], Any]) -> Any:
    """What ``make`` gives on the first rank, the only one that looks into the run's folder."""
    return make() if ranks is None else ranks.told(make)


def demo(
    out: Annotated[Path, typer.Option(help="The folder to write; finished runs in it are kept.")] = Path(
        "lopsided-demo"
    ),
    seed: Annotated[int, typer.Option(help="Every random choice follows from it.")] = 0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """See CE, CL and AFCL side by side: nine T-shirts to one shirt, embedded.

    Takes a few minutes on two cores. Interrupted, it continues where it was
    when it is started again.

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


def _choose(recipe: str | None, out: Path, resume: bool) -> Recipe:
    """The recipe to start from: the named one, that of the run to resume, or the default."""
    from lopsided.recipe import find_recipe

    if recipe is None and resume and (out / "recipe.toml").is_file():
        from lopsided.runs.run import Run

        return Run.open(out).recipe
    return find_recipe(recipe or "default")


def _show_run(run: Run, as_json: bool) -> None:
    metrics = run.metrics or {}
    if as_json:
        show_json({"run": str(run.folder), **metrics})
        return
    counts = metrics["counts"]
    numbers = ", ".join(f"{sum(classes.values()):,} {split}" for split, classes in counts.items() if classes)
    parts = [f"{metrics['loss'].upper()} on {metrics['source']}: {numbers} images"]
    for split in ("test", "val"):
        if metrics[split] is not None:
            parts.append(f"{split}\n{figures_table(metrics[split])}")
            break
    else:
        parts.append("No image was held out, so there is no figure; set --test.")
    if metrics["test"] is not None and metrics["val"] is not None:
        picked = interval(metrics["val"]["figures"]["uwa"])
        parts.append(f"Unweighted accuracy on the validation images, by which the model was picked: {picked}")
    if metrics["unreadable"]:
        parts.append(f"{len(metrics['unreadable']):,} unreadable images were left out; metrics.json lists them.")
    parts.append(f"Written to {run.folder} in {metrics['seconds']:.0f} s.")
    show("\n\n".join(parts))


def _demo_words(summary: Mapping[str, Any], out: Path) -> str:
    majority = summary["majority"]
    counts = summary["counts"]
    train = ", ".join(f"{number} {name}" for name, number in counts["train"].items())
    test = ", ".join(f"{number} {name}" for name, number in counts["test"].items())
    rows = [
        [run["loss"].upper(), interval(run["uwa"]), interval(run["accuracy"]), f"{run['seconds']:.0f} s"]
        for run in summary["runs"]
    ]
    rows.append([f"always {majority['label']}", f"{majority['uwa']:.3f}", f"{majority['accuracy']:.3f}", ""])
    return "\n\n".join(
        [
            f"Trained on {train}; tested on {test}.",
            table(["loss", "unweighted accuracy [95 %]", "accuracy [95 %]", "time"], rows),
            f"Written to {out}: one run folder per loss, and summary.json.",
        ]
    )
