"""Export the model of a run for other programs and people, from the command and from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lopsided import files
from lopsided.data.images import Progress
from lopsided.errors import InputError, sentence
from lopsided.inference.export import export_onnx
from lopsided.inference.familiar import load_bank
from lopsided.inference.hub import README, base_model, beyond_timm, check_folder, check_hub, export_hub, part_names
from lopsided.recipe.views import parse_tta
from lopsided.reports.model_card import FILL_IN, model_card
from lopsided.reports.run_data import open_finished
from lopsided.runs.progress import Voice
from lopsided.runs.reopen import open_model, use_views

TARGETS = {"onnx": "model.onnx", "card": README, "hub-folder": "hub"}
"""The formats, and the file or folder of each in the folder of a run."""


def export_target(run: Path, to: str, out: Path | None) -> Path:
    """Return the file or folder that an export writes. Raise for an unknown format."""
    if to not in TARGETS:
        raise InputError(sentence(f"--to must be one of {', '.join(TARGETS)}", to))
    return run / TARGETS[to] if out is None else out


def export_run(
    run: Path,
    to: str = "onnx",
    out: Path | None = None,
    *,
    tta: str | None = None,
    quiet: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Export the model of a run. Return what was written and checked, for JSON."""
    target, views = export_target(run, to, out), parse_tta(tta)
    if to != "onnx" and views is not None:
        raise InputError(f"--tta has no effect with --to {to}. Leave it out, or use --to onnx.")
    if to == "onnx":
        model, card = open_model(run, kinds=("image", "vector"))
        card = use_views(model, card, views, quiet=quiet)
        result = export_onnx(model, card, target, progress, load_bank(run, card))
        if not quiet and not result["typicality"]:
            Voice().say("The file has no output typicality: check elsewhere for images of another kind.")
        return result
    open_finished(run)  # Before torch is imported, which takes seconds.
    if to == "card":
        return _export_card(run, target)
    check_folder(target)
    model, card = open_model(run, "cpu", kinds=("image", "vector"))
    check_hub(card)
    parts, facts = part_names(card), card.model_dump(mode="json")
    name = target.absolute().name
    text = model_card(run, facts, base_model=base_model(card), timm=True, name=name, parts=parts)
    if not quiet and parts:
        what = f"timm cannot represent {beyond_timm(card)} as one model"
        Voice().say(f"{what}, so the folder holds its parts and an ONNX file.")
    return export_hub(model, card, target, text, progress)


def _export_card(run: Path, target: Path) -> dict[str, Any]:
    if target.exists():
        raise InputError(f"{target} exists and may hold your changes. Remove it, or choose another file with --out.")
    _, card = open_model(run, kinds=("image", "vector"))
    text = model_card(run, card.model_dump(mode="json"), base_model=base_model(card))
    files.atomic_write(target, text)
    return {"file": str(target), "fill_in": text.count(FILL_IN)}
