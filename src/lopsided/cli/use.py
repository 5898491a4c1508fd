"""The verbs that use a trained model: evaluate, predict, export."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lopsided.cli.output import (
    AllowOutside,
    Json,
    Quiet,
    Terminal,
    check_out,
    figures_table,
    say,
    shortened,
    show,
    show_json,
)
from lopsided.errors import InputError, sentence

if TYPE_CHECKING:
    from lopsided.inference.predict import Summary

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.", show_default=False)]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Images that go through the model at once.")]


def evaluate(
    run: RunFolder,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA", help="Labelled images: a folder, a table or a source's name.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Also write the figures to this JSON file.", show_default=False)
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(help="A table's column of what belongs together; widens the intervals.", show_default=False),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Only this part of data that come split: train, val, test.", show_default=False)
    ] = None,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Leave out images that cannot be read, and list them.")
    ] = False,
    allow_outside: AllowOutside = False,
    batch_size: BatchSize = 64,
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Evaluate a trained model on labelled images, with intervals.

    The labels must be among the model's classes. Do not evaluate on what the
    model was trained on: `fit` has already set a test split aside, and its
    figures are in the run.

    \b
    Examples:
      lopsided evaluate run other-hospital
      lopsided evaluate run lesions.csv --group patient --out figures.json
    """
    import json

    from lopsided import files
    from lopsided.inference.evaluate import evaluate_model, open_labelled
    from lopsided.progress import counter
    from lopsided.runs.run import open_model, trained_on

    check_out(out, data)
    model, card = open_model(run, device)
    with counter("checking images", quiet=quiet) as progress:
        source = open_labelled(
            data,
            card,
            group=group,
            split=split,
            skip_unreadable=skip_unreadable,
            allow_outside=allow_outside,
            progress=progress,
        )
    if split != "test" and trained_on(run, data):
        say("warning: the model was trained on images of these data, which flatters it; see its test figures instead.")
    with counter("evaluating", quiet=quiet) as progress:
        result = evaluate_model(model, card, source, batch_size=batch_size, progress=progress)
    result = {"run": str(run), **result}
    if out is not None:
        files.atomic_write(out, json.dumps(result, indent=2, allow_nan=False) + "\n")
    if as_json:
        show_json(result)
        return
    for item in result["unreadable"]:
        say(f"unreadable, left out: {item['name']} ({item['reason']})")
    show(f"{result['data']}: {result['num_images']:,} images\n\n{figures_table(result)}")
    if out is not None:
        show(f"\nWritten to {out}.")


def predict(
    run: RunFolder,
    images: Annotated[
        list[str], typer.Argument(metavar="IMAGES...", help="Images, and folders of images.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(help="The CSV file to write; left out: standard output.", show_default=False)
    ] = None,
    batch_size: BatchSize = 64,
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Predict the class of any number of images, with probabilities.

    The CSV has the columns path, predicted, and p: with each class's name.
    Images that cannot be read are listed on stderr and, with --out, in a file
    *.unreadable.csv beside it; the others are predicted all the same. With
    --json and no --out, each image is one JSON object on a line of its own.

    \b
    Examples:
      lopsided predict run photo.jpg
      lopsided predict run inbox --out answers.csv
      lopsided predict run inbox | sort -t, -k3 -g
    """
    from lopsided.inference import predict as stream
    from lopsided.progress import counter
    from lopsided.runs.run import open_model

    for path in (out, None if out is None else stream.unreadable_path(out)):
        check_out(path, *images)
    total, paths = stream.find_images(images)
    model, card = open_model(run, device)
    _warn_of_formulas(card.classes)
    answers = stream.predict_images(model, card, paths, batch_size=batch_size)
    with counter("predicting", quiet=quiet) as progress:
        if out is None:
            target = Terminal() if sys.stdout.isatty() else sys.stdout
            summary = stream.stream_predictions(answers, card.classes, target, as_json=as_json)
            stream.check_any(summary)
        else:
            summary = stream.write_predictions(answers, card.classes, out, total=total, progress=progress)
    _tell_unreadable(summary, out)
    if out is not None and as_json:
        show_json({"out": str(out), **summary.to_dict()})
    elif out is not None:
        numbers = ", ".join(f"{number:,} {shortened(name)}" for name, number in summary.predicted.items())
        show(f"{summary.num_predicted:,} images predicted ({numbers}), {summary.num_unreadable:,} unreadable: {out}")


def export(
    run: RunFolder,
    to: Annotated[str, typer.Option(help="The format; onnx is the one there is.")] = "onnx",
    out: Annotated[
        Path | None, typer.Option(help="The file to write; left out: model.onnx in the run.", show_default=False)
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Export a trained model as one file for another program.

    The ONNX file takes float32 images (batch, channels, height, width) in
    0..1 and returns probabilities; the normalisation is inside, and its
    metadata hold the classes. Success is reported after onnxruntime has given
    the same probabilities as torch, for one image and for many.

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
        say("exporting and checking; this takes some seconds")
    result = export_onnx(model, card, target)
    if as_json:
        show_json(result)
    else:
        counts = " and ".join(str(number) for number in result["checked"])
        show(
            f"Written to {result['file']} ({result['bytes'] / 1e6:.1f} MB). onnxruntime agrees with torch for {counts} "
            f"images; the largest difference of a probability is {result['difference']:.1g}."
        )


def _warn_of_formulas(classes: Sequence[str]) -> None:
    """Say which names a spreadsheet would compute; they are written as they are, because programs compare them."""
    odd = [name for name in classes if is_formula(name)]
    if odd:
        say(
            f"warning: a spreadsheet may take the class {shortened(odd[0])!r} for a formula; "
            "import the columns of the CSV as text."
        )


def is_formula(text: str) -> bool:
    """Whether a spreadsheet that opens a CSV file would compute a cell, and it is not just a number.

    >>> is_formula("=1+1"), is_formula("@home"), is_formula("-1"), is_formula("cat")
    (True, True, False, False)
    """
    try:
        float(text)
    except ValueError:
        return text.startswith(("=", "+", "-", "@", "\t", "\r"))
    return False


def _tell_unreadable(summary: Summary, out: Path | None) -> None:
    from lopsided.inference.predict import unreadable_path

    for error in summary.unreadable:
        say(f"unreadable: {error.path} ({error.reason})")
    more = summary.num_unreadable - len(summary.unreadable)
    if more:
        where = f"; {unreadable_path(out)} lists all" if out is not None else ""
        say(f"and {more:,} more{where}")
