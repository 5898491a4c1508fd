"""The subcommands that use a trained model: evaluate, predict, export."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lopsided.cli import rules
from lopsided.cli.output import (
    AllowOutside,
    Exclude,
    Include,
    Json,
    Quiet,
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
    from lopsided.runs.run import open_model, open_own_split, open_use, trained_on

    check_out(out, *([] if data is None else [data]))
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
    from lopsided.runs.run import open_model, open_use

    for path in (out, None if out is None else stream.unreadable_path(out)):
        check_out(path, *images)
    elsewhere = cluster_mapper(engine, address, run)
    pairs = Twins()
    patterns = Patterns(include or (), exclude or ())
    total, paths = find_images(images, patterns, pairs, allow_outside=allow_outside)
    _warn_of_twins(pairs)
    model, card = open_model(run, device)
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
    to: Annotated[str, typer.Option(help="Format. Only onnx is available.")] = "onnx",
    out: Annotated[
        Path | None, typer.Option(help="File to write. Default: model.onnx in the run folder.", show_default=False)
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Export a trained model as an ONNX file for other programs.

    The ONNX model takes float32 images of shape (batch, channels, height,
    width) with values in 0..1. It returns logits, probabilities, decision
    scores and the label that the decision rule of the model gives. It includes
    the normalisation; its metadata list the classes and the rule. The export
    is checked: onnxruntime and torch must give the same probabilities and
    labels for one image and for a batch.

    \b
    Examples:
      lopsided export run --to onnx
      lopsided export run --to onnx --out classifier.onnx
    """
    if to != "onnx":
        raise InputError(sentence("--to must be onnx", to))
    from lopsided.inference.export import export_onnx
    from lopsided.runs.run import open_model

    target = run / "model.onnx" if out is None else out
    model, card = open_model(run)
    check_out(target)
    if not quiet:
        say_replaced(target)
        say("exporting and checking; this takes a few seconds")
    result = export_onnx(model, card, target)
    if as_json:
        show_json(result)
    else:
        counts = " and ".join(str(number) for number in result["checked"])
        show(
            f"Written to {result['file']} ({result['bytes'] / 1e6:.1f} MB). onnxruntime agrees with torch on batches "
            f"of {counts} images. The largest difference between two probabilities is {result['difference']:.1g}."
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
