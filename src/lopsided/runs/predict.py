"""Predict images with the model of a run, here or on a cluster, for the command and for Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from lopsided.data.sources.listing import Listing
from lopsided.data.stored import ImagePath
from lopsided.evaluation.typicality import Bank
from lopsided.inference.pool import packs
from lopsided.inference.predict import Answer, Use, answers_of, vector_answers
from lopsided.inference.scorer import Scorer
from lopsided.models.model import Model, ModelCard
from lopsided.runs.find import Elsewhere, is_cached


@contextmanager
def answering(
    model: Model,
    card: ModelCard,
    paths: Iterable[ImagePath],
    use: Use,
    *,
    total: int,
    batch_size: int,
    elsewhere: Elsewhere | None = None,
    tables: Sequence[Listing] = (),
    bank: Bank | None = None,
) -> Iterator[Iterator[Answer]]:
    """Give the answers of this machine, or those of a cluster. ``bank`` adds the typicality of images."""
    if tables:
        yield vector_answers(Scorer(model, card, bank=bank, batch_size=batch_size), tables, use)
    elif elsewhere is None:
        cached = "begun" if is_cached(total, len(card.views), card.features) else "none"
        yield answers_of(Scorer(model, card, cached=cached, bank=bank, batch_size=batch_size).stream(paths), use)
    else:
        with elsewhere(None) as mapper:
            yield answers_of(mapper(packs(paths)), use)
