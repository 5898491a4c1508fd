"""The subcommand that exports a trained model: export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from lopsided.cli.options import Json, Quiet, RunFolder, Tta, option, words
from lopsided.cli.output import check_out, say_replaced, show, show_json


def export(
    run: RunFolder = None,
    to: Annotated[
        str,
        typer.Option(
            help="Format: onnx, card (a Markdown model card) or hub-folder (a folder that timm and the Hugging Face "
            "hub read).",
            autocompletion=words("onnx", "card", "hub-folder"),
        ),
    ] = "onnx",
    out: Annotated[
        Path | None, option(None, "File or folder to write. Default: model.onnx, README.md or hub in the run folder.")
    ] = None,
    tta: Tta = None,
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
    recipe, metrics and intervals, decision rule and limits. What only you can
    say, such as the licence, is marked with "Fill in".

    hub-folder: weights, a config without code, and the card, in a folder that
    timm loads. The export is checked: timm must give the logits of the model.
    A model that timm cannot represent, such as one of joined encoders or with
    views, becomes a folder of parts: one folder for timm per encoder, the
    classifier, and the whole model as an ONNX file. timm must then give the
    features, and onnxruntime the probabilities of the model.

    \b
    Examples:
      lopsided export --to onnx
      lopsided export run --to onnx --out classifier.onnx
      lopsided export run --to card
      lopsided export run --to hub-folder --out my-model
    """
    from lopsided.reports.export import export_run, export_target
    from lopsided.runs.folder import named_or_newest
    from lopsided.runs.progress import counter
    from lopsided.runs.reopen import check_finished

    run = named_or_newest(run, quiet=quiet)
    target = export_target(run, to, out)
    check_finished(run)
    if to != "hub-folder":
        check_out(target)
        if not quiet and to == "onnx":
            say_replaced(target)
    with counter("exporting", quiet=quiet) as progress:
        result = export_run(run, to, out, tta=tta, quiet=quiet, progress=progress)
    if as_json:
        show_json(result)
    else:
        show(_WORDS[to](result))


def _onnx_words(result: Mapping[str, Any]) -> str:
    counts = " and ".join(str(number) for number in result["checked"])
    return (
        f"Written to {result['file']} ({result['bytes'] / 1e6:.1f} MB). onnxruntime agrees with torch on batches "
        f"of {counts} images. The largest difference between two probabilities is {result['difference']:.1g}."
    )


def _card_words(result: Mapping[str, Any]) -> str:
    from lopsided.reports.model_card import FILL_IN

    number = result["fill_in"]
    return f"Written to {result['file']}. {number} places are marked with {FILL_IN}; only you can complete them."


def _hub_words(result: Mapping[str, Any]) -> str:
    parts = "encoders" in result
    what = "features of each encoder" if parts else "logits of the model"
    checked = f"timm gives the {what} on {result['checked']} images"
    checked += f" (largest relative difference {result['difference']:.1g})"
    if parts:
        checked += f", and onnxruntime the probabilities (largest difference {result['onnx_difference']:.1g})"
    files = ", ".join(result["files"])
    return f"Written to {result['folder']}: {files}. {checked}. Complete README.md before you share the folder."


_WORDS = {"onnx": _onnx_words, "card": _card_words, "hub-folder": _hub_words}
