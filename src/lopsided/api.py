"""What the command does, from Python: ``lopsided.fit``, ``lopsided.open`` and the ``Run`` that both return."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
from markupsafe import escape

from lopsided import files
from lopsided.errors import InputError, LopsidedError
from lopsided.recipe import read_values
from lopsided.recipe.views import parse_tta
from lopsided.runs import folder as folders
from lopsided.runs.folder import folder_of, newest_run
from lopsided.runs.metrics import judged_split
from lopsided.runs.progress import Counted, counter

if TYPE_CHECKING:
    from lopsided.data.stored import ImagePath
    from lopsided.evaluation.decision import Decision
    from lopsided.inference.find import By, Row
    from lopsided.inference.predict import Familiarity
    from lopsided.models.model import Model, ModelCard

PathLike = str | os.PathLike[str]
V = TypeVar("V")
_SHOWN = 10
"""Rows of predictions that a notebook shows."""


def fit(
    data: PathLike | None = None,
    *,
    out: PathLike | None = None,
    recipe: PathLike | None = None,
    loss: str | Mapping[str, Any] | None = None,
    encoder: str | None = None,
    group: str | None = None,
    group_from: str | None = None,
    columns: Sequence[str] | None = None,
    folds: int | None = None,
    decide: str | None = None,
    more: PathLike | Sequence[PathLike] | None = None,
    seed: int | None = None,
    device: str | None = None,
    track: str | Sequence[str] | None = None,
    resume: bool = False,
    quiet: bool = False,
    **fields: Any,
) -> Run:
    """Train a classifier and evaluate it, as ``lopsided fit`` does. Return the finished run.

    Args:
        data: A folder with one sub-folder per class, a table with the columns path and label, or the name of a source.
        out: Folder of the run, which must be new or empty, except with ``resume``. None: runs/1, runs/2 and so on.
        recipe: Name of a recipe, or a TOML file. None: few, quick or thorough, by the numbers of images.
        loss: Name of a loss, or a mapping with its ``name`` and parameters, to train an encoder.
        encoder: Name of a timm model.
        group, group_from: Table column of groups, such as patient, or "parent" for folders, or a pattern of names, as
            in the command. A group stays in one split.
        columns: Table columns that the classifier gets beside each image, such as ["age", "sex", "site"].
        folds: Number of folds that test every image; 1: one split.
        decide: Decision rule, such as "recall:melanoma=0.95".
        more: Tables of further labelled images for training only.
        seed: Seed of all random numbers.
        device: "auto", "cpu", "cuda", "cuda:1" or "mps".
        track: Trackers that show the course, such as "tensorboard".
        resume: Continue the run in ``out``, or without ``out`` the newest run.
        quiet: No progress and no notes.
        fields: Other fields of the recipe, by the names that the command takes: ``epochs=20``, ``tta="flips"``,
            ``regression__strength=0.01``. Two underscores stand for a dot.
    """
    from lopsided.data.prepare import Sources
    from lopsided.recipe import find_recipe
    from lopsided.reports.thumbnails import keep_shown_pictures
    from lopsided.runs.fitting import train_recipe

    recipe = None if recipe is None or recipe == "default" else os.fspath(recipe)
    named = {
        "loss": loss,
        "encoder": encoder,
        "data.group": group,
        "data.group_from": group_from,
        "data.columns": columns,
        "folds": folds,
        "decide": decide,
        "data.more": _paths(more),
        "seed": seed,
        "device": device,
        "track": [track] if isinstance(track, str) else track,
    }
    values = {name: value for name, value in named.items() if value is not None} | fields
    changes = read_values(values, lambda: None if recipe is None else find_recipe(recipe))
    changes.resolve()
    source, sources = None if data is None else os.fspath(data), Sources()
    if out is None and resume:
        out = newest_run(finished=False)
    with changes.named(), folder_of(None if out is None else Path(out)) as folder:
        run, _ = train_recipe(source, folder, recipe, changes.values, resume=resume, quiet=quiet, sources=sources)
    keep_shown_pictures(run.folder, allow_outside=run.recipe.data.allow_outside, sources=sources)
    return Run(run.folder, run.recipe, run.metrics, device or "auto")


def open_run(folder: PathLike | None = None, *, device: str = "auto") -> Run:
    """Open the folder of a run; None: the newest finished run in the folder runs."""
    opened = folders.Run.open(newest_run() if folder is None else folder)
    return Run(opened.folder, opened.recipe, opened.metrics, device)


@dataclass(frozen=True, repr=False)
class Run(folders.Run):
    """A run: its ``metrics``, and its model, which predicts, evaluates, finds and is exported.

    ``metrics`` is the content of ``metrics.json``, or None if the run is not finished. ``folder`` and ``recipe`` are
    where it is and what it is. In a terminal and in a notebook a run shows its headline numbers.
    """

    device: str = "auto"
    _opened: dict[str, tuple[Model, ModelCard]] = field(default_factory=dict, repr=False, compare=False)

    def predict(
        self,
        images: Any,
        *,
        decide: str | None = None,
        prevalence: str | None = None,
        tta: str | None = None,
        batch_size: int = 64,
        quiet: bool = True,
    ) -> Predictions:
        """Predict the classes of images, with probabilities.

        ``images`` are paths of files, folders and tables, Pillow images, arrays, or a data frame with a column path.
        ``decide``, ``prevalence`` and ``tta`` are as in ``lopsided predict``.
        """
        from lopsided.data.decoding import UnreadableImageError
        from lopsided.data.given import given_columns, given_images, given_paths
        from lopsided.data.images import FileImages
        from lopsided.data.stored import is_address
        from lopsided.inference.pool import find_images, is_table
        from lopsided.inference.scorer import Scorer
        from lopsided.runs.find import answering
        from lopsided.runs.reopen import open_familiarity, open_use

        named = given_paths(images)
        given = None if named else given_images(images)
        if not named and given is None:
            raise InputError("The images must be paths, Pillow images, arrays, or a data frame with a column path.")
        model, card = self._model(tta, quiet=quiet)
        use = open_use(self.folder, card, decide, prevalence)
        familiarity = open_familiarity(self.folder, card)
        bank = None if familiarity is None else familiarity.bank
        with counter("predicting", quiet=quiet) as progress:
            if given is not None:
                p, _, known = Scorer(model, card, cached="none", bank=bank, batch_size=batch_size).judge(given)
                names = tuple(f"image {place}" for place in range(len(given)))
                return _predictions(card, names, use.probabilities(p), use.decision, {}, known, familiarity)
            columns = [column.name for column in card.beside]
            paths: Iterable[ImagePath] = [Path(path).expanduser() for path in named]
            total = len(named)
            if any(is_address(path) or os.path.isdir(path) or is_table(Path(path)) for path in named):
                total, paths = find_images(named, columns=columns)
            elif columns:
                beside = given_columns(images, columns, FileImages(list(paths)))
                paths = beside.paths if isinstance(beside, FileImages) else paths
            with answering(model, card, paths, use, total=total, batch_size=batch_size, bank=bank) as answers:
                rows = list(_counted(answers, total, progress))
        p = np.full((len(rows), len(card.classes)), np.nan)
        reasons: dict[str, str] = {}
        typicality = np.array([np.nan if typical is None else typical for _, _, typical in rows])
        for place, (path, answer, _) in enumerate(rows):
            if isinstance(answer, UnreadableImageError):
                reasons[str(path)] = answer.reason
            else:
                p[place] = answer
        if reasons:
            first = "{} ({})".format(*next(iter(reasons.items())))
            warnings.warn(f"{len(reasons):,} of {len(rows):,} images are unreadable, the first {first}.", stacklevel=2)
        names = tuple(str(path) for path, _, _ in rows)
        return _predictions(card, names, p, use.decision, reasons, typicality, familiarity)

    def evaluate(
        self,
        data: PathLike | None = None,
        *,
        split: str | None = None,
        group: str | None = None,
        group_from: str | None = None,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        skip_unreadable: bool = False,
        allow_outside: bool = False,
        decide: str | None = None,
        prevalence: str | None = None,
        tta: str | None = None,
        batch_size: int = 64,
        quiet: bool = True,
    ) -> dict[str, Any]:
        """Return metrics with intervals on labelled images; without ``data`` on the test split of the run."""
        from lopsided.data.listed import Tested
        from lopsided.runs.evaluate import evaluate_run

        evaluated = evaluate_run(
            self.folder,
            None if data is None else os.fspath(data),
            split=split,
            listed=Tested(
                include=include,
                exclude=exclude,
                allow_outside=allow_outside,
                group=group,
                group_from=group_from,
                skip_unreadable=skip_unreadable,
            ),
            decide=decide,
            prevalence=prevalence,
            tta=tta,
            batch_size=batch_size,
            device=self.device,
            quiet=quiet,
            counting=partial(counter, quiet=quiet),
        )
        for warning in evaluated.warnings:
            warnings.warn(warning, stacklevel=2)
        return evaluated.result

    def find(
        self,
        pool: PathLike | Sequence[PathLike],
        label: str | None = None,
        *,
        out: PathLike | None = None,
        top: int = 500,
        by: By = "probability",
        like: PathLike | Sequence[PathLike] = (),
        diverse: float = 0.0,
        prevalence: str | None = None,
        allow_outside: bool = False,
        page: bool = True,
        quiet: bool = True,
    ) -> list[Row]:
        """Return the images of a pool that are most likely of a class, the most likely first.

        With ``out``, the CSV file, and the ``page`` to look through and mark next to it, are written as ``lopsided
        find`` does; an interrupted search then continues.
        """
        from lopsided.data.listed import Listed
        from lopsided.reports.find_page import write_search
        from lopsided.runs.find import find_in_pool

        counting = partial(counter, quiet=quiet)
        with nullcontext() if out is not None else tempfile.TemporaryDirectory() as scratch:
            target = Path(out) if out is not None else Path(str(scratch)) / "found.csv"
            with files.lock_output(target):
                found = find_in_pool(
                    self.folder,
                    _paths(pool) or [],
                    label,
                    target,
                    by=by,
                    top=top,
                    diverse=diverse,
                    like=_paths(like) or [],
                    prevalence=prevalence,
                    listed=Listed(allow_outside=allow_outside),
                    device=self.device,
                    counting=counting,
                )
                write_search(found, target, counting, page=page and out is not None)
        for fact in found.facts:
            if fact.is_caution:
                warnings.warn(str(fact), stacklevel=2)
        return found.result.rows

    def report(
        self,
        out: PathLike | None = None,
        *,
        map: str = "pca",
        maps: bool = True,
        allow_outside: bool = False,
        quiet: bool = True,
    ) -> Path:
        """Write the HTML page of the run, by default into its folder, and return its path.

        ``maps`` also shows where the model looked, if it has maps and the images can be read.
        """
        from lopsided.reports.report import make_shown_maps, write_report

        if maps:
            with suppress(LopsidedError), counter("looking where the model looked", quiet=quiet) as progress:
                make_shown_maps(self.folder, allow_outside=allow_outside, progress=progress)
        with counter("making the page", quiet=quiet) as progress:
            page = write_report(self.folder, out, kind=map, allow_outside=allow_outside, progress=progress)
        return page.path

    def export(
        self, to: str = "onnx", out: PathLike | None = None, *, tta: str | None = None, quiet: bool = True
    ) -> Path:
        """Export the model as "onnx", "card" or "hub-folder", and return the file or folder."""
        from lopsided.reports.export import export_run

        with counter("exporting", quiet=quiet) as progress:
            target = None if out is None else Path(out)
            result = export_run(self.folder, to, target, tta=tta, quiet=quiet, progress=progress)
        return Path(result["folder" if to == "hub-folder" else "file"])

    def _model(self, tta: str | None, *, quiet: bool) -> tuple[Model, ModelCard]:
        """Return the model, which is loaded once, with the views of the model or other ones."""
        from lopsided.runs.reopen import open_model, use_views

        views = parse_tta(tta)
        if views is not None:  # These views replace those of the model.
            model, card = open_model(self.folder, self.device)
            return model, use_views(model, card, views, quiet=quiet)
        if self.device not in self._opened:
            self._opened[self.device] = open_model(self.folder, self.device)
        return self._opened[self.device]

    def __repr__(self) -> str:
        numbers = self._headlines()
        told = numbers if isinstance(numbers, str) else ", ".join(f"{name}: {text}" for name, text in numbers.items())
        return f"<{self.recipe.spec.title(self.recipe)} in {self.folder}; {told}>"

    def _repr_html_(self) -> str:
        title = f"<b>{escape(self.recipe.spec.title(self.recipe))}</b> in <code>{escape(str(self.folder))}</code>"
        numbers = self._headlines()
        if isinstance(numbers, str):
            return f"<div>{title}: {numbers}</div>"
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in numbers.items())
        return f"<div>{title}<table>{rows}</table></div>"

    def _headlines(self) -> dict[str, str] | str:
        """Return the three headline numbers, or why there are none."""
        split = None if self.metrics is None else judged_split(self.metrics)
        if self.metrics is None or split is None:
            return "not finished" if self.metrics is None else "no images were held out"
        uwa, rare = self.metrics[split]["figures"]["uwa"], self.headlines()[0]
        span = "" if uwa["low"] is None else f" ({100 * uwa['low']:.0f} to {100 * uwa['high']:.0f} %)"
        share = "" if rare.low is None or rare.high is None else f" ({100 * rare.low:.0f} to {100 * rare.high:.0f} %)"
        return {
            f"found of {rare.label}": f"{rare.found:,} of {rare.images:,}{share}",
            "false alarms": f"{rare.false_alarms:,} among {rare.others:,}",
            "balanced accuracy": "not defined" if uwa["value"] is None else f"{100 * uwa['value']:.1f} %{span}",
        }


@dataclass(frozen=True, eq=False, repr=False)
class Predictions:
    """The classes of images. ``labels`` and the rows of ``probabilities`` are in the order of ``names``.

    The columns of ``probabilities`` are those of ``classes``. An image that cannot be read has the label None and
    probabilities NaN; ``unreadable`` gives the reason. ``typicality`` and ``unfamiliar`` say whether an image is unlike
    the training images; they are None if the model does not know. ``sets`` are the classes that an image may be of,
    with the rule ``sets``.
    """

    names: tuple[str, ...]
    classes: tuple[str, ...]
    labels: tuple[str | None, ...]
    probabilities: npt.NDArray[np.float64]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    typicality: npt.NDArray[np.float64] | None = None
    unfamiliar: npt.NDArray[np.bool_] | None = None
    sets: tuple[tuple[str, ...], ...] | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        counts = Counter("unreadable" if label is None else label for label in self.labels)
        told = ", ".join(f"{number:,} {label}" for label, number in counts.most_common())
        return f"<{len(self):,} predictions: {told or 'none'}>"

    def to_frame(self) -> Any:
        """Return a data frame of pandas with the columns of ``lopsided predict``."""
        import pandas as pd

        columns: dict[str, Any] = {f"p:{name}": self.probabilities[:, i] for i, name in enumerate(self.classes)}
        if self.sets is not None:
            columns["set"] = ["|".join(chosen) for chosen in self.sets]
        if self.typicality is not None:
            columns |= {"typicality": self.typicality, "unfamiliar": self.unfamiliar}
        return pd.DataFrame({"path": list(self.names), "predicted": list(self.labels), **columns})

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in ("image", "predicted", *self.classes))
        lines = zip(self.names[:_SHOWN], self.labels, self.probabilities, strict=False)
        cells = [
            [name, label or self.unreadable.get(name, ""), *(f"{value:.3f}" for value in p)] for name, label, p in lines
        ]
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
        more = f"<div>and {len(self) - _SHOWN:,} more</div>" if len(self) > _SHOWN else ""
        return f"<table><tr>{head}</tr>{body}</table>{more}"


def _predictions(
    card: ModelCard,
    names: tuple[str, ...],
    p: npt.NDArray[np.float64],
    decision: Decision,
    unreadable: Mapping[str, str],
    typicality: npt.NDArray[np.float64] | None,
    familiarity: Familiarity | None,
) -> Predictions:
    labels = tuple(None if np.isnan(row).any() else decision.answer(row, card.classes) for row in p)
    sets = tuple(tuple(decision.set_of(row, card.classes) or ()) for row in p) if decision.sets else None
    if familiarity is None or typicality is None:
        return Predictions(names, card.classes, labels, p, unreadable, sets=sets)
    unfamiliar = familiarity.bank.is_unfamiliar(typicality, familiarity.asked)
    return Predictions(names, card.classes, labels, p, unreadable, typicality, unfamiliar, sets)


def _counted(items: Iterable[V], total: int, progress: Counted | None) -> Iterator[V]:
    """Yield items and count them."""
    for number, item in enumerate(items, start=1):
        yield item
        if progress is not None:
            progress(number, total)


def _paths(values: PathLike | Sequence[PathLike] | None) -> list[str] | None:
    """Return one path or several as texts."""
    if values is None:
        return None
    return [os.fspath(each) for each in ([values] if isinstance(values, str | os.PathLike) else values)]
