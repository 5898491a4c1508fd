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

from lopsided.data.images import FileImages, Progress
from lopsided.data.inputs import StreamedInputs
from lopsided.data.listed import Listed
from lopsided.data.prepare import Sources, training_source
from lopsided.data.sources.listing import Listing
from lopsided.data.sources.names import Twins, suggest_names
from lopsided.data.sources.vectors import is_vectors
from lopsided.data.splits import Splits
from lopsided.data.stored import ImagePath, described, is_address
from lopsided.errors import InputError, LopsidedError, RunError, sentence
from lopsided.evaluation.typicality import Bank
from lopsided.facts import Fact, cautions, notes
from lopsided.inference.feature_cache import cache_limit
from lopsided.inference.find import By, Question, Result, Search
from lopsided.inference.neighbours import MOST, Features, Known
from lopsided.inference.pool import PACK, Mapper, find_images, packs
from lopsided.inference.predict import Answer, Use, answers_of, vector_answers
from lopsided.inference.scorer import Scorer
from lopsided.models.model import Model, ModelCard
from lopsided.runs.folder import RECIPE, Run, named_focus
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
        # A pack tells its number and how many of its images are done.
        within = None if count is None else lambda number, done: count(min(number * PACK + done, total), total)
        here = nullcontext(partial(scorer.map, count=within))
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


@dataclass(frozen=True, eq=False)
class Labelled:
    """The labelled images of a run that are files, with their digests. ``problem`` says why there are none."""

    images: FileImages
    labels: tuple[str, ...]
    digests: tuple[str, ...]
    problem: str = ""
    names: tuple[str, ...] = ()


def labelled_images(folder: Path, progress: Progress | None = None) -> Labelled:
    """Open the images of all splits of a run again, from where `fit` found them. Files that are gone are left out."""
    try:
        if not (folder / RECIPE).is_file():
            raise RunError(f"{folder} holds no {RECIPE}, so the images that it was trained on are not known.")
        source = Sources().drawn(Run.open(folder).recipe, more=True)
        source, _ = training_source(source, Splits.of_all(len(source)))
    except LopsidedError as error:
        return Labelled(FileImages([], 3), (), (), str(error))
    images = source.images
    if not isinstance(images, FileImages):
        return Labelled(FileImages([], 3), (), (), f"The images of {source.name} are not files.")
    readable = images.hashed(progress=progress)
    places = {path: row for row, path in enumerate(images.paths)}
    rows = [places[path] for path in readable.paths]
    return Labelled(
        readable,
        tuple(source.classes[source.labels[row]] for row in rows),
        tuple(readable.digest(np.arange(len(readable)))),
        names=tuple(source.names[row] for row in rows),
    )


def digests_of(named: Sequence[str], *, allow_outside: bool = False) -> set[str]:
    """Return the digests of the readable images in files, folders and tables."""
    if not named:
        return set()
    images = FileImages(list(find_images(named, Listed(allow_outside=allow_outside))[1])).hashed()
    return set(images.digest(np.arange(len(images))))


def known_features(
    scorer: Scorer,
    labelled: Labelled,
    label: str,
    like: Sequence[str] = (),
    progress: Progress | None = None,
    *,
    allow_outside: bool = False,
) -> Known:
    """Return the features of known images of a class, and of known images of the other classes.

    ``like`` are files, folders and tables of images of the class; they replace those of the run.
    """
    wanted = labelled.images.take(np.array([i for i, name in enumerate(labelled.labels) if name == label], dtype=int))
    if like:
        wanted = FileImages(list(find_images(like, Listed(allow_outside=allow_outside))[1]), 3)
    if not len(wanted):
        why = labelled.problem or f"The run has no image of {label}."
        raise InputError(f"{why} So there are no known images of {label} to compare with. Name some with --like.")
    others = labelled.images.take(np.array([i for i, name in enumerate(labelled.labels) if name != label], dtype=int))
    parts = [_features(scorer, each, progress) for each in (wanted, others)]
    if not len(parts[0]):
        raise InputError(sentence("the known images must be readable", f"none of {len(wanted):,}"))
    return Known(*parts)


def _features(scorer: Scorer, images: FileImages, progress: Progress | None) -> Features:
    """Return the features of readable images, at most ``MOST`` of them, evenly over their order."""
    rows = np.arange(len(images))
    if len(rows) > MOST:
        rows = np.linspace(0, len(rows) - 1, MOST).round().astype(np.int64)
    images = images.take(rows)
    broken = {index for index, _ in images.unreadable()}
    images = images.take(np.array([row for row in range(len(images)) if row not in broken], dtype=np.int64))
    inputs = StreamedInputs(images, scorer.card.image_size, scorer.card.channels)
    return scorer.engine.compared(scorer.features(inputs, images.digest(np.arange(len(images))), progress))
