"""What changes in the last epochs of a stage: class weights, the sampler, and an equal average of the weights.

Only epochs after all changes can be kept. Earlier ones were trained with another prior, or are no average.
"""

from __future__ import annotations

from collections.abc import Iterator

from lopsided.facts import Fact, notes
from lopsided.losses.deferred import first_epoch
from lopsided.recipe import Classifier, EncoderTraining


def deferred_shares(settings: EncoderTraining | Classifier) -> list[float]:
    """Return the shares of the epochs after which classes are weighted or drawn differently."""
    defers = settings.loss.entry.defers
    shares = [] if defers is None else [float(settings.loss.parameters[defers])]
    if isinstance(settings, EncoderTraining):
        shares += [share for share in (settings.reweight_from, settings.resample_from) if share is not None]
    return [share for share in shares if share < 1]


def deferred_epoch(settings: EncoderTraining | Classifier) -> int:
    """Return the first epoch, counted from 0, in which classes are treated as in the last one."""
    return max((first_epoch(share, settings.epochs) for share in deferred_shares(settings)), default=0)


def resampled_epoch(settings: EncoderTraining | Classifier) -> int | None:
    """Return the first epoch whose batches are balanced by deferred re-sampling, or None."""
    if not isinstance(settings, EncoderTraining) or settings.resample_from is None:
        return None
    return first_epoch(settings.resample_from, settings.epochs)


def averaged_epoch(settings: EncoderTraining | Classifier) -> int | None:
    """Return the first epoch whose weights are part of an equal average, or None."""
    if not isinstance(settings, EncoderTraining) or settings.swa_from is None:
        return None
    return first_epoch(settings.swa_from, settings.epochs)


def first_kept(settings: EncoderTraining | Classifier) -> int:
    """Return the first epoch whose weights may become the model."""
    return max(deferred_epoch(settings), averaged_epoch(settings) or 0)


def training_notes(settings: EncoderTraining) -> Iterator[Fact]:
    """Yield a note for each of these settings that is on."""
    if settings.reweight_from is not None:
        yield notes.reweighting(settings.reweight_from, settings.reweight_beta)
    if settings.resample_from is not None:
        yield notes.resampling(settings.resample_from)
    if settings.mixup or settings.cutmix:
        yield notes.mixing(settings.mixup, settings.cutmix)
    if settings.sam_rho:
        yield notes.sharpness(settings.sam_rho)
    if settings.ema:
        yield notes.moving_average(settings.ema)
    if settings.swa_from is not None:
        yield notes.weight_average(settings.swa_from)
