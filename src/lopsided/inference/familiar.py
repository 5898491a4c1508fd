"""The bank of known images of a model: made from the images that it was trained on, and kept beside its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lopsided.errors import RunError
from lopsided.evaluation.typicality import MOST_KNOWN, MOST_SCORES, Bank, codes_of, make_bank, sample_rows
from lopsided.files import atomic_write, read_whole, reading_tensors
from lopsided.seeds import derive_seed

if TYPE_CHECKING:
    from lopsided.data.inputs import Part
    from lopsided.evaluation.typicality import Features
    from lopsided.inference.scorer import Scorer
    from lopsided.models.model import ModelCard

BANK_NAME = "familiar.safetensors"
_FORMS = {"known": (2, "float16"), "centre": (1, "float32"), "spread": (1, "float32"), "scores": (1, "float32"),
          "units": (1, "int32"), "limits": (2, "float32")}  # fmt: skip


def known_images(scorer: Scorer, trained: Part, apart: Part | None, seed: int) -> Bank | None:
    """Return the bank of the training images of a model; None if there are too few to compare with each other.

    ``apart`` are images of other groups that calibrate the typicality if training changed the encoder: it knows the
    training images better than any other. Without them, the training images calibrate it, each left out of the bank.
    """
    rows, judged = sample_rows(trained.labels, derive_seed(seed, "known images"))
    if apart is None:
        chosen = np.union1d(rows, judged)
        part = trained.take(chosen)
        features = _features(scorer, part)
        codes = codes_of(part.groups, features)
        bank, compared = np.searchsorted(chosen, rows), np.searchsorted(chosen, judged)
        known = features[bank]
        others = known if len(rows) == len(judged) == len(chosen) else features[compared]
        return make_bank(known, codes[bank], others, codes[compared], trained.labels[judged])
    _, judged = sample_rows(apart.labels, derive_seed(seed, "calibration images"))
    known, calibrating = _features(scorer, trained.take(rows)), apart.take(judged)
    features = _features(scorer, calibrating)
    codes = codes_of(calibrating.groups, features)
    return make_bank(known, np.full((len(known), codes.shape[1]), -1), features, codes, calibrating.labels)


def _features(scorer: Scorer, part: Part) -> Features:
    return scorer.engine.whole(scorer.engine.scale(scorer.features(part.inputs, part.digests)))


def save_bank(folder: Path, bank: Bank | None, card: ModelCard) -> ModelCard:
    """Write the bank of a model, if it has one. Return the card with the hash of the file."""
    from safetensors.numpy import save

    if bank is None:
        return card.model_copy(update={"familiar": ""})
    content = save({name: np.ascontiguousarray(getattr(bank, name)) for name in _FORMS})
    atomic_write(folder / BANK_NAME, content)
    return card.model_copy(update={"familiar": hashlib.sha256(content).hexdigest()})


def load_bank(folder: Path, card: ModelCard) -> Bank | None:
    """Read the bank of a model; None if the model has none. Raise if it is damaged or belongs to another model."""
    from safetensors.numpy import load

    path = folder / BANK_NAME
    if not card.familiar:
        return None
    try:
        content = read_whole(path, 8 * (MOST_KNOWN + MOST_SCORES) * (card.features + 64))
    except OSError as error:
        why = f"{path}, by which unfamiliar images are recognised, cannot be read ({error.strerror})"
        raise RunError(f"{why}. Restore it, or train the model again.") from error
    if hashlib.sha256(content).hexdigest() != card.familiar:
        raise RunError(
            f"{path} does not belong to model.json: it was changed, or it is the bank of another encoder. Restore it, "
            "or train the model again."
        )
    try:
        with reading_tensors():
            parts = load(content)
        bank = Bank(**{name: parts[name] for name in _FORMS})
    except (ValueError, KeyError) as error:
        raise RunError(f"{path} is not a bank of known images ({error}). Train the model again.") from error
    forms = {name: (getattr(bank, name).ndim, str(getattr(bank, name).dtype)) for name in _FORMS}
    widths = {bank.known.shape[-1], len(bank.centre), len(bank.spread), card.whole_features}
    odd = len(bank.units) != len(bank.scores) or bank.limits.shape[-1] != 2
    if forms != _FORMS or len(widths) > 1 or odd:
        raise RunError(f"{path} does not fit the encoder {card.encoder}. Train the model again.")
    return bank
