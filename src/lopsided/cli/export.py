"""The subcommand that exports a trained model: export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lopsided.cli.options import Json, Quiet, RunFolder, words
from lopsided.cli.output import check_out, say, say_replaced, show, show_json
from lopsided.cli.views import Views, read_views, use_views
from lopsided.errors import InputError, sentence

FORMATS = ("onnx", "card", "hub-folder")


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
    A model that timm cannot represent, such as one of joined encoders or with
    views, becomes a folder of parts: one folder for timm per encoder, the
    classifier, and the whole model as an ONNX file. timm must then give the
    features, and onnxruntime the probabilities of the model.

    \b
    Examples:
      lopsided export run --to onnx
      lopsided export run --to onnx --out classifier.onnx
      lopsided export run --to card
      lopsided export run --to hub-folder --out my-model
    """
    if to not in FORMATS:
        raise InputError(sentence(f"--to must be one of {', '.join(FORMATS)}", to))
    wanted = read_views(views)
    if to == "onnx":
        _export_onnx(run, out, wanted, quiet, as_json)
        return
    if wanted is not None:
        raise InputError(f"--tta has no effect with --to {to}. Leave it out, or use --to onnx.")
    (_export_card if to == "card" else _export_hub)(run, out, quiet, as_json)


def _export_onnx(run: Path, out: Path | None, wanted: tuple[str, ...] | None, quiet: bool, as_json: bool) -> None:
    from lopsided.inference.export import export_onnx
    from lopsided.runs.reopen import open_model

    target = run / "model.onnx" if out is None else out
    model, card = open_model(run, kinds=("image", "vector"))
    card = use_views(model, card, wanted, quiet=quiet)
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
    _, card = open_model(run, kinds=("image", "vector"))
    text = model_card(run, card.model_dump(mode="json"), base_model=base_model(card))
    files.atomic_write(target, text)
    number = text.count(FILL_IN)
    if as_json:
        show_json({"file": str(target), "fill_in": number})
    else:
        show(f"Written to {target}. {number} places are marked with {FILL_IN}; only you can complete them.")


def _export_hub(run: Path, out: Path | None, quiet: bool, as_json: bool) -> None:
    from lopsided.inference.hub import base_model, beyond_timm, check_folder, check_hub, export_hub, part_names
    from lopsided.reports.model_card import model_card
    from lopsided.reports.run_data import open_finished
    from lopsided.runs.reopen import open_model

    open_finished(run)
    target = run / "hub" if out is None else out
    check_folder(target)
    model, card = open_model(run, "cpu", kinds=("image", "vector"))
    check_hub(card)
    name = target.absolute().name
    parts = part_names(card)
    facts = card.model_dump(mode="json")
    text = model_card(run, facts, base_model=base_model(card), timm=True, name=name, parts=parts)
    if not quiet and parts:
        what = (
            f"timm cannot represent {beyond_timm(card)} as one model, so the folder holds its parts and an ONNX file."
        )
        say(f"{what} Exporting and checking takes up to a minute.")
    elif not quiet:
        say("exporting and checking; this takes a few seconds")
    result = export_hub(model, card, target, text)
    if as_json:
        show_json(result)
    else:
        what = "features of each encoder" if parts else "logits of the model"
        checked = f"timm gives the {what} on {result['checked']} images"
        checked += f" (largest relative difference {result['difference']:.1g})"
        if parts:
            checked += f", and onnxruntime the probabilities (largest difference {result['onnx_difference']:.1g})"
        show(
            f"Written to {target}: {', '.join(result['files'])}. {checked}. Complete README.md before you share the "
            "folder."
        )
