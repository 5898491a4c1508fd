"""The subcommands that use a trained model: evaluate, predict, export."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lopsided.cli import rules
from lopsided.cli.options import AllowOutside, Exclude, Include, Json, Quiet, words
from lopsided.cli.output import (
    Terminal,
    check_out,
    figures_table,
    say,
    say_replaced,
    shortened,
    show,
    show_json,
    tell_unreadable,
)
from lopsided.cli.sweeping import Address, EngineName, cluster_mapper
from lopsided.errors import InputError, sentence

if TYPE_CHECKING:
    from lopsided.data.sources.names import Twins
    from lopsided.models.model import Model, ModelCard

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.", show_default=False)]
Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda, cuda:1 or mps.")]
Decide = Annotated[str | None, typer.Option(help=f"{rules.HELP} Default: the rule of the model.", show_default=False)]
Prevalence = Annotated[
    str | None,
    typer.Option(
        help="Class shares where the model is used, for example A=0.02,B=0.98. The probabilities are moved to them.",
        show_default=False,
    ),
]
Views = Annotated[
    str | None,
    typer.Option(
        help="Average the features of views of each image: none, flip, flips, dihedral, or names such as "
        "identity,rot180. Default: the views of the model.",
        show_default=False,
    ),
]
FORMATS = ("onnx", "card", "hub-folder")
BatchSize = Annotated[int, typer.Option(min=1, help="Images per batch.")]


def evaluate(
    run: RunFolder,
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            help="Labelled images: a folder, a table or the name of a source. Default: the test split of the run.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Also write the figures to this JSON file.", show_default=False)
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(help="Table column of related images, such as patient. Widens the intervals.", show_default=False),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Use only this split of the data, or of the run if DATA is missing: train, val or test.",
            show_default=False,
        ),
    ] = None,
    include: Include = None,
    exclude: Exclude = None,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Skip images that cannot be read, and list them.")
    ] = False,
    allow_outside: AllowOutside = False,
    decide: Decide = None,
    prevalence: Prevalence = None,
    views: Views = None,
    batch_size: BatchSize = 64,
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Evaluate a trained model on labelled images, with intervals.

    Every label must be a class of the model. Do not evaluate on the training
    images. Without DATA, the test split of the run is evaluated again: its
    images are opened from where `fit` found them, and the command stops if
    they have changed.

    \b
    Examples:
      lopsided evaluate run other-hospital
      lopsided evaluate run
      lopsided evaluate run lesions.csv --group patient --out figures.json
    """
    import json

    from lopsided import files
    from lopsided.data.sources.names import twins
    from lopsided.evaluation.decision import explain
    from lopsided.inference.evaluate import check_labelled, evaluate_model, list_labelled
    from lopsided.progress import counter
    from lopsided.runs.reopen import open_model, open_own_split, open_use, trained_on

    check_out(out, *([] if data is None else [data]))
    wanted = _views_of(views)
    seed = 0
    if data is None:
        _refuse_without_data(
            {
                "--group": group,
                "--include": include or None,
                "--exclude": exclude or None,
                "--skip-unreadable": skip_unreadable,
                "--allow-outside": allow_outside,
            }
        )
        split = split or "test"
        with counter("checking images", quiet=quiet) as progress:
            source, recipe = open_own_split(run, split, progress)
        model, card = open_model(run, device)
        source, seed = source.relabel(card.classes), recipe.seed
    else:
        source = list_labelled(  # Before the model, whose import of torch takes seconds.
            data,
            group=group,
            split=split,
            skip_unreadable=skip_unreadable,
            allow_outside=allow_outside,
            include=include,
            exclude=exclude,
        )
        model, card = open_model(run, device)
        with counter("checking images", quiet=quiet) as progress:
            source = check_labelled(source, card, skip_unreadable=skip_unreadable, progress=progress)
        _warn_of_twins(twins(source.names))
    card = _look(model, card, wanted, quiet=quiet)
    use = open_use(run, card, rules.read_rule(decide), prevalence)
    own_val = data is None and split == "val"
    if own_val:
        say("warning: the validation split selected the model, so the figures are too high.")
    elif split != "test" and (data is None or trained_on(run, data)):
        say(
            "warning: the model was trained on images of these data, so the figures are too high. "
            "Use the test figures of the run instead."
        )
    with counter("evaluating", quiet=quiet) as progress:
        result = evaluate_model(
            model, card, source, batch_size=batch_size, seed=seed, use=use, fitted_to=own_val, progress=progress
        )
    result = {"run": str(run), **result}
    if not quiet:
        say_replaced(out)
    if out is not None:
        files.atomic_write(out, json.dumps(result, indent=2, allow_nan=False) + "\n")
    if as_json:
        show_json(result)
        return
    for item in result["unreadable"]:
        say(f"skipped unreadable image: {item['name']} ({item['reason']})")
    what = f"{split} split of {run}" if data is None else result["data"]
    rule = " ".join([explain(use.decision, card.classes), *use.decision.notes])
    show(f"{what}: {result['num_images']:,} images\n\n{figures_table(result)}\n\n{rule}")
    if out is not None:
        show(f"\nWritten to {out}.")


def predict(
    run: RunFolder,
    images: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGES...",
            help="Image files, folders of images, and tables with a column path.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="CSV file to write. Default: standard output.", show_default=False)
    ] = None,
    include: Include = None,
    exclude: Exclude = None,
    decide: Decide = None,
    prevalence: Prevalence = None,
    views: Views = None,
    allow_outside: AllowOutside = False,
    batch_size: BatchSize = 64,
    device: Device = "auto",
    engine: EngineName = None,
    address: Address = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Predict the classes of images, with probabilities.

    The CSV has the columns path and predicted, and one column p:CLASS with the
    probability of each class. The decision rule of the model, or --decide,
    decides for the predicted class. It need not be the most probable one. Images that cannot be read are skipped and
    listed on stderr. With --out, they are also listed in *.unreadable.csv next
    to the CSV file. With --json and without --out, each output line is the
    JSON object of one image. --engine ray shares the work among the machines
    of a cluster, which must see the images at the same paths.

    \b
    Examples:
      lopsided predict run photo.jpg
      lopsided predict run inbox --out answers.csv
      lopsided predict run inbox --exclude "*_mask.*" --out answers.csv
      lopsided predict run inbox | sort -t, -k3 -g
    """
    from lopsided.data.sources.names import Patterns, Twins
    from lopsided.evaluation.decision import explain
    from lopsided.inference import predict as stream
    from lopsided.inference.pool import find_images
    from lopsided.progress import counter
    from lopsided.runs.reopen import open_model, open_use

    for path in (out, None if out is None else stream.unreadable_path(out)):
        check_out(path, *images)
    wanted = _views_of(views)
    if wanted is not None and engine == "ray":
        raise InputError(
            "--views cannot be used with --engine ray, whose machines use the views of the model. Remove one."
        )
    elsewhere = cluster_mapper(engine, address, run)
    pairs = Twins()
    patterns = Patterns(include or (), exclude or ())
    total, paths = find_images(images, patterns, pairs, allow_outside=allow_outside)
    _warn_of_twins(pairs)
    model, card = open_model(run, device)
    card = _look(model, card, wanted, quiet=quiet)
    use = open_use(run, card, rules.read_rule(decide), prevalence)
    _warn_of_formulas(card.classes)
    if not quiet and (decide is not None or prevalence is not None):
        say(" ".join([explain(use.decision, card.classes), *use.decision.notes]))
    target = Terminal() if sys.stdout.isatty() else sys.stdout  # Before a cluster redirects the output of Ray.
    with ExitStack() as stack:
        if elsewhere is None:
            answers = stream.predict_images(model, card, paths, batch_size=batch_size, use=use)
        else:
            from lopsided.inference.packs import packs

            mapper = stack.enter_context(elsewhere(None))
            answers = stream.answers_of(mapper(packs(paths)), use)
        progress = stack.enter_context(counter("predicting", quiet=quiet))
        if out is None:
            summary = stream.stream_predictions(answers, card.classes, target, as_json=as_json, decision=use.decision)
            stream.check_any(summary)
        else:
            if not quiet:
                say_replaced(out)
            summary = stream.write_predictions(
                answers, card.classes, out, decision=use.decision, total=total, progress=progress
            )
    tell_unreadable([(str(error.path), error.reason) for error in summary.unreadable], summary.num_unreadable, out)
    if out is not None and as_json:
        show_json({"out": str(out), **summary.to_dict()})
    elif out is not None:
        numbers = ", ".join(f"{number:,} {shortened(name)}" for name, number in summary.predicted.items())
        show(f"{summary.num_predicted:,} images predicted ({numbers}), {summary.num_unreadable:,} unreadable: {out}")


def export(
    run: RunFolder,
    to: Annotated[
        str,
        typer.Option(
            help="Format: onnx, card (a Markdown model card) or hub-folder (a folder that timm and the Hugging Face "
            "hub read).",
            autocompletion=words(*FORMATS),
        ),
    ] = "onnx",
    out: Annotated[
        Path | None,
        typer.Option(
            help="File or folder to write. Default: model.onnx, README.md or hub in the run folder.",
            show_default=False,
        ),
    ] = None,
    views: Views = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Export a trained model for other programs and people.

    onnx: a file that takes float32 images of shape (batch, channels, height,
    width) with values in 0..1. It returns logits, probabilities, decision
    scores and the label that the decision rule of the model gives. It includes
    the normalisation and the views; its metadata list the classes and the
    rule. The export is checked: onnxruntime and torch must give the same
    probabilities and labels for one image and for a batch.

    card: a model card in the format of the Hugging Face hub, with data,
    recipe, figures and intervals, decision rule and limits. What only you can
    say, such as the licence, is marked with "Fill in".

    hub-folder: weights, a config without code, and the card, in a folder that
    timm loads. The export is checked: timm must give the logits of the model.

    \b
    Examples:
      lopsided export run --to onnx
      lopsided export run --to onnx --out classifier.onnx
      lopsided export run --to card
      lopsided export run --to hub-folder --out my-model
    """
    if to not in FORMATS:
        raise InputError(sentence(f"--to must be one of {', '.join(FORMATS)}", to))
    wanted = _views_of(views)
    if to == "onnx":
        _export_onnx(run, out, wanted, quiet, as_json)
        return
    if wanted is not None:
        raise InputError(f"--views has no effect with --to {to}. Leave it out, or use --to onnx.")
    (_export_card if to == "card" else _export_hub)(run, out, quiet, as_json)


def _export_onnx(run: Path, out: Path | None, wanted: tuple[str, ...] | None, quiet: bool, as_json: bool) -> None:
    from lopsided.inference.export import export_onnx
    from lopsided.runs.reopen import open_model

    target = run / "model.onnx" if out is None else out
    model, card = open_model(run)
    card = _look(model, card, wanted, quiet=quiet)
    check_out(target)
    if not quiet:
        say_replaced(target)
        say("exporting and checking; this takes up to a minute")
    result = export_onnx(model, card, target)
    if as_json:
        show_json(result)
    else:
        counts = " and ".join(str(number) for number in result["checked"])
        show(
            f"Written to {result['file']} ({result['bytes'] / 1e6:.1f} MB). onnxruntime agrees with torch on batches "
            f"of {counts} images. The largest difference between two probabilities is {result['difference']:.1g}."
        )


def _views_of(text: str | None) -> tuple[str, ...] | None:
    """Parse --views, before torch is imported."""
    from lopsided.recipe.views import parse_views

    return None if text is None else parse_views(text)


def _look(model: Model, card: ModelCard, views: tuple[str, ...] | None, *, quiet: bool) -> ModelCard:
    """Let a model use other views, and say what they do to its probabilities. Return its card."""
    from lopsided.models.model import with_views
    from lopsided.recipe.views import name_views

    if views is None or views == card.views:
        return card
    if not quiet and card.calibrated_on:
        say(
            f"The model was calibrated with the views {name_views(card.views)}, so its probabilities with --views "
            f"{name_views(views)} may be less well calibrated. fit --views calibrates with views."
        )
    return with_views(model, card, views)


def _export_card(run: Path, out: Path | None, quiet: bool, as_json: bool) -> None:
    from lopsided import files
    from lopsided.inference.hub import README, base_model
    from lopsided.reports.model_card import FILL_IN, model_card
    from lopsided.reports.run_data import open_finished
    from lopsided.runs.reopen import open_model

    open_finished(run)  # Before torch is imported, which takes seconds.
    target = run / README if out is None else out
    check_out(target)
    if target.exists():
        raise InputError(f"{target} exists and may hold your changes. Remove it, or choose another file with --out.")
    _, card = open_model(run)
    text = model_card(run, card.model_dump(mode="json"), base_model=base_model(card))
    files.atomic_write(target, text)
    number = text.count(FILL_IN)
    if as_json:
        show_json({"file": str(target), "fill_in": number})
    else:
        show(f"Written to {target}. {number} places are marked with {FILL_IN}; only you can complete them.")


def _export_hub(run: Path, out: Path | None, quiet: bool, as_json: bool) -> None:
    from lopsided.inference.hub import base_model, check_folder, check_hub, export_hub
    from lopsided.reports.model_card import model_card
    from lopsided.reports.run_data import open_finished
    from lopsided.runs.reopen import open_model

    open_finished(run)
    target = run / "hub" if out is None else out
    check_folder(target)
    model, card = open_model(run, "cpu")
    check_hub(card)
    name = target.absolute().name
    text = model_card(run, card.model_dump(mode="json"), base_model=base_model(card), timm=True, name=name)
    if not quiet:
        say("exporting and checking; this takes a few seconds")
    result = export_hub(model, card, target, text)
    if as_json:
        show_json(result)
    else:
        show(
            f"Written to {target}: {', '.join(result['files'])}. timm gives the logits of the model on "
            f"{result['checked']} images (largest relative difference {result['difference']:.1g}). Complete README.md "
            "before you share the folder."
        )


def _refuse_without_data(options: Mapping[str, object]) -> None:
    """Raise if an option is given that needs DATA."""
    given = next((name for name, value in options.items() if value not in (None, False)), None)
    if given is not None:
        do = "Name the data, or leave the option out: the run's own data are opened as in its recipe."
        raise InputError(f"{given} needs DATA. {do}")


def _warn_of_twins(pairs: Twins) -> None:
    """Warn about images that differ only in the suffix, which may be masks."""
    if pairs.number:
        say(f"warning: {pairs.words()}")


def _warn_of_formulas(classes: Sequence[str]) -> None:
    """Warn about class names that a spreadsheet would read as formulas.

    The CSV keeps these names unchanged, because other programs compare them.
    """
    odd = [name for name in classes if is_formula(name)]
    if odd:
        say(
            f"warning: a spreadsheet may read the class name {shortened(odd[0])!r} as a formula. "
            "Import the columns of the CSV file as text."
        )


def is_formula(text: str) -> bool:
    """Return whether a spreadsheet would read a CSV cell as a formula. A plain number is not a formula.

    >>> is_formula("=1+1"), is_formula("@home"), is_formula("-1"), is_formula("cat")
    (True, True, False, False)
    """
    try:
        float(text)
    except ValueError:
        return text.startswith(("=", "+", "-", "@", "\t", "\r"))
    return False
