"""Use the model of a run, here or on a cluster: predict images, and find those that are most likely of a class."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from lopsided.data.images import Progress
from lopsided.data.listed import Listed
from lopsided.data.sources.listing import Listing
from lopsided.data.sources.names import Twins, suggest_names
from lopsided.data.sources.vectors import is_vectors
from lopsided.data.stored import ImagePath, described, is_address
from lopsided.errors import InputError, sentence
from lopsided.evaluation.typicality import Bank
from lopsided.facts import Fact, cautions, notes
from lopsided.inference.feature_cache import cache_limit
from lopsided.inference.find import By, Question, Result, Search
from lopsided.inference.neighbours import Features, Known
from lopsided.inference.pool import PACK, Mapper, find_images, packs
from lopsided.inference.predict import Answer, Use, answers_of, vector_answers
from lopsided.inference.scorer import Scorer
from lopsided.models.model import Model, ModelCard
from lopsided.runs.folder import named_focus
from lopsided.runs.known import Labelled, digests_of, known_features, labelled_images
from lopsided.runs.progress import Counting
from lopsided.runs.reopen import columns_of, open_familiarity, open_model, open_use

CACHE_SHARE = 0.25
"""Features of a pool are cached if they fill at most this share of the cache. Larger pools would displace others."""

Elsewhere: TypeAlias = Callable[[Known | None], AbstractContextManager[Mapper]]
"""Gives the function that scores packs on other machines, given the known images."""


@dataclass(frozen=True, eq=False)
class Found:
    """A finished search: the result, the model, the class, and facts for the user."""

    result: Result
    card: ModelCard
    label: str
    known: Known | None
    facts: tuple[Fact, ...]


_ALL = Listed()


def find_in_pool(
    run: Path,
    pool: Sequence[str | os.PathLike[str]],
    label: str | None,
    out: Path,
    *,
    by: By = "probability",
    top: int = 500,
    diverse: float = 0.0,
    like: Sequence[str] = (),
    prevalence: str | None = None,
    unfamiliar: str | None = None,
    level: float | None = None,
    listed: Listed = _ALL,
    device: str = "auto",
    elsewhere: Elsewhere | None = None,
    counting: Counting = lambda label: nullcontext(None),
) -> Found:
    """Search a pool of files, folders and tables. The table ``out`` is not written yet, only its journal.

    Images of the run's own data are left out: they are labelled already. ``like`` are known images of the class,
    which are left out as well. Without a ``label`` it is the class that the run follows: that of its recipe, of the
    model's rule, or the rarest one.
    """
    question = Question(0, by, top, diverse)  # Checks the options before the pool is listed.
    _check_asked(pool, by, like, unfamiliar)
    twins = Twins()
    columns = columns_of(run)
    listing = partial(find_images, pool, listed, columns=columns)
    total, _ = listing(twins=twins)
    model, card = open_model(run, device)
    label = choose_class(card, label or named_focus(run))
    use = open_use(run, card, None, prevalence)
    usual = "mark" if card.scores_distance else "drop"  # What is unlike the training images may be what is wanted.
    familiarity = open_familiarity(run, card, unfamiliar, level, usual=usual)
    with counting("reading the images of the run") as count:
        labelled = labelled_images(run, count)
    scorer = Scorer(model, card, bank=None if familiarity is None else familiarity.bank)
    scorer.complete()
    known = None
    if by != "probability":
        with counting("features of known images") as count:
            known = known_features(scorer, labelled, label, like, count, allow_outside=listed.allow_outside)
    named = digests_of(like, allow_outside=listed.allow_outside)
    scorer.known = known
    if not is_cached(total, len(card.views), card.features):
        scorer.shelves = []
    asked = f"{card.sha256} {card.familiar} {label} {'' if known is None else known.key}"
    search = Search(
        Question(card.classes.index(label), by, top, diverse),
        named.union(labelled.digests),
        use if prevalence else None,
        hashlib.sha256(asked.encode(errors="surrogateescape")).hexdigest(),
        familiarity,
    )

    def paths_of_pool() -> Iterator[Path]:
        return (path for path in listing()[1] if isinstance(path, Path))  # There are no others, see above.

    with counting("finding") as count:
        here = nullcontext(partial(scorer.map, count=_within(count, total)))
        with here if elsewhere is None else elsewhere(known) as mapper:
            compared = partial(_compared_features, scorer, columns)
            result = search.run(paths_of_pool, total, out, mapper, features=compared, progress=count)
    facts = list(_facts(question, labelled, known, result, twins, like))
    if familiarity is None:
        facts.append(notes.no_bank())
    return Found(result, card, label, known, tuple(facts))


def _check_asked(pool: Sequence[str | os.PathLike[str]], by: By, like: Sequence[str], unfamiliar: str | None) -> None:
    """Raise for what a search cannot do, before the pool is listed."""
    if like and by == "probability":
        raise InputError("--like names known images, which --by probability does not use. Add --by neighbours or both.")
    if any(map(is_address, (*pool, *like))):
        do = "Copy them here, or write the probabilities with `lopsided predict RUN ADDRESS`."
        raise InputError(f"find shows the images, so they must be files of this machine. {do}")
    vectors = next(filter(is_vectors, pool), None)
    if vectors is not None:
        do = "Write the probabilities of its rows with `lopsided predict RUN TABLE` and sort them."
        raise InputError(f"find looks through images, but {vectors} holds vectors, which nobody can look at. {do}")
    if unfamiliar == "first":
        raise InputError("find lists the most likely images first. Use --unfamiliar mark or drop.")


def _compared_features(scorer: Scorer, columns: Sequence[str], paths: Sequence[Path]) -> Features:
    """Return the features by which images are compared, without the cells beside them."""
    scorer.keep = True
    blank = [""] * len(columns)
    scored = scorer.stream(described(path, blank) for path in paths)
    kept = [scorer.split_views(each.features) for each in scored if each.features is not None]
    return scorer.engine.compared(np.concatenate([scorer.engine.average(views) for views in kept]))


def _within(count: Progress | None, total: int) -> Progress | None:
    """Return what counts the images of a pack, given its number and how many of its images are done."""
    return None if count is None else lambda number, done: count(min(number * PACK + done, total), total)


def is_cached(total: int, views: int, width: int) -> bool:
    """Return whether the features of a pool are cached, given its images, the views and the features of each."""
    return total * views * width * np.dtype(np.float32).itemsize <= CACHE_SHARE * cache_limit()


def choose_class(card: ModelCard, name: str | None) -> str:
    """Return the class of a model with this name. Upper and lower case may differ if the name is clear.

    Without a name it is that of the model's rule, or the rarest one.
    """
    if name is None:
        target = card.decision.target
        return card.classes[card.prior.index(min(card.prior)) if target is None else target]
    if name in card.classes:
        return name
    same = [each for each in card.classes if each.lower() == name.lower()]
    if len(same) == 1:
        return same[0]
    must = f"--class must be one of {', '.join(card.classes)}"
    raise InputError(sentence(must, repr(name), suggest_names([name], card.classes)))


def _facts(
    question: Question, labelled: Labelled, known: Known | None, result: Result, twins: Twins, like: Sequence[str]
) -> Iterator[Fact]:
    yield from twins.cautions()
    if labelled.problem:
        yield cautions.unknown_images(labelled.problem)
    if result.known:
        yield notes.labelled_left_out(result.known, bool(like))
    if result.unfamiliar:
        yield notes.unfamiliar_left_out(result.unfamiliar)
    if known is not None:
        yield notes.known_images(len(known.wanted), len(known.others))
    if result.continued:
        yield notes.earlier_scores(result.continued)
    if len(result.rows) < question.top:
        yield notes.small_pool(len(result.rows), question.top)


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
