"""The records of a sweep: one line of JSON per finished run, and one per failed attempt. Needs no torch.

Their files are read, and appended under a lock.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, Field, PlainValidator, TypeAdapter, ValidationError, WrapValidator

from lopsided import files
from lopsided.data.scenarios import parse_scenario
from lopsided.errors import RunError, sentence
from lopsided.recipe.words import shown
from lopsided.runs.keys import (
    LossTable,
    Treatment,
    added,
    cell_key,
    coordinates,
    data_key,
    proportion,
    source_name,
    treatment_of,
    writable,
)

if TYPE_CHECKING:
    from lopsided.recipe import Recipe
    from lopsided.runs.folder import Run


FORMAT = 2
"""The version of a line. It increases if an older reader could misread a newer line."""
ROUNDING = 2e-3
"""Tolerance, in percentage points, for equal differences between figures that are rounded to five digits."""
_Line = TypeVar("_Line", "Record", "Failure")
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Recall = Annotated[_Share, WrapValidator(lambda value, share: math.nan if value is None else share(value))]
_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, le=2**63 - 1)]


def _check_scenario(text: str) -> str:
    parse_scenario(text)
    return text


_Scenario = Annotated[str, AfterValidator(_check_scenario)]
_Loss = Annotated[LossTable, PlainValidator(LossTable.read)]


@dataclass(frozen=True)
class Scores:
    """The figures of one split of one run. ``recalls`` has the order of the classes; NaN: a class without images."""

    images: _Count
    minority: _Count
    accuracy: _Share
    uwa: _Share
    recalls: tuple[_Recall, ...]
    auroc: _Share | None
    majority_vote: _Share
    rules: tuple[tuple[str, _Share], ...]
    """The UWA of the same model by each of the rules ``plain`` and ``balanced``."""
    log_loss: _Number | None

    @classmethod
    def from_metrics(cls, evaluation: Mapping[str, Any], minority: int) -> Scores:
        """Return the figures of an evaluation in ``metrics.json``; ``minority`` is the index of the rarest class."""
        figures, rows = evaluation["figures"], evaluation["per_class"]
        auroc = figures.get("auroc", {"value": None})["value"]
        log_loss = figures.get("log_loss", {"value": None})["value"]
        recalls = (row["recall"]["value"] for row in rows)
        return cls(
            images=evaluation["num_images"],
            minority=rows[minority]["support"],
            accuracy=_short(figures["accuracy"]["value"]),
            uwa=_short(figures["uwa"]["value"]),
            recalls=tuple(math.nan if recall is None else _short(recall) for recall in recalls),
            auroc=None if auroc is None else _short(auroc),
            majority_vote=_short(evaluation["majority"]["accuracy"]),
            rules=tuple((name, _short(rule["uwa"])) for name, rule in evaluation.get("rules", {}).items()),
            log_loss=None if log_loss is None else _short(log_loss),
        )


@dataclass(frozen=True)
class Fold:
    """The fold that a run was tested on: which one, counted from 1 over all repeats, and of how many.

    ``rest`` and ``rest_minority`` are the numbers of images outside the fold, in total and of the rarest class.
    """

    fold: Annotated[int, Field(ge=1, le=2**63 - 1)]
    folds: Annotated[int, Field(ge=2, le=2**63 - 1)]
    rest: Annotated[int, Field(ge=1, le=2**63 - 1)]
    rest_minority: _Count

    @classmethod
    def of(cls, recipe: Recipe, metrics: Mapping[str, Any], minority: int) -> Fold | None:
        """Return the fold of a run, or None if the run has no folds."""
        fold, folds = recipe.data.fold, recipe.data.folds
        if fold is None or folds is None:
            return None
        rest = added(metrics["counts"]["train"], metrics["counts"].get("val"))
        return cls(fold, folds, sum(rest.values()), rest.get(metrics["classes"][minority], 0))

    @property
    def repeat(self) -> int:
        """The repeat of the folds, from 0."""
        return (self.fold - 1) // self.folds


class Line:
    """What is written as one line of JSON."""

    def to_json(self) -> str:
        """Write one line, without its break."""
        return json.dumps({"format": FORMAT, **_plain(self)}, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, line: str | bytes) -> Self:
        """Read what ``to_json`` wrote."""
        must = f"a line must be a {cls.__name__.lower()} of a sweep"
        try:
            if cls is Failure:  # An error message may hold any bytes. They must not stop a sweep.
                values = json.loads(line.decode(errors="replace") if isinstance(line, bytes) else line)
                line = json.dumps({name: writable(v) if isinstance(v, str) else v for name, v in values.items()})
            written = json.loads(line)["format"]
            if written == FORMAT:
                found: Self = _READERS[cls].validate_json(line, strict=True)
                return found
        except ValidationError as error:
            raise RunError(sentence(must, _place(error))) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            got = line.decode(errors="replace") if isinstance(line, bytes) else line
            raise RunError(sentence(must, shown(got))) from None
        do = "Read it with the version of lopsided that wrote it."
        raise RunError(sentence(f"a line must be of format {FORMAT}", shown(written), do))


@dataclass(frozen=True)
class Record(Line):
    """One finished run; its figures have five digits.

    ``source`` is the name of the source, never a path: isic2018 for any folder with its layout. ``scenario`` has no
    total. ``held_out`` has the figures on the images that the scenario did not draw, if they were requested. ``data``
    is equal for runs that saw the same images. ``family`` differs between recipes that differ in more than loss,
    proportions and seed. ``epochs`` has the epochs of each stage. ``classes`` has the class names in order.
    ``compared_as`` is the name of the run's method in a comparison. ``fold`` is set if the test images are a fold.
    """

    cell: str
    source: str
    scenario: _Scenario | None
    seed: _Count
    method: str
    loss: _Loss
    classifier_loss: _Loss
    encoder: str
    image_size: int | None
    split: str
    weights: str
    test: Scores
    held_out: Scores | None
    seconds: _Number
    threads: int
    lopsided: str
    torch: str
    data: str
    family: str
    epochs: tuple[int, ...]
    classes: tuple[str, ...]
    compared_as: str | None = None
    fold: Fold | None = None

    @classmethod
    def from_run(cls, run: Run) -> Record:
        """Return the record of a finished run."""
        if run.metrics is None:
            raise RunError(f"The run in {run.folder} is not finished. Finish it before recording it.")
        if run.metrics.get("test") is None:
            raise RunError(f"The run in {run.folder} has no test images. Set data.test in its recipe.")
        try:
            record = cls._of(run.recipe, run.metrics)
            _READERS[cls].validate_json(record.to_json(), strict=True)  # Every written line must be readable.
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            why = _place(error) if isinstance(error, ValidationError) else files.reason(error)
            text = f"The metrics of the run in {run.folder} are damaged ({why}). Train the run again, or restore them."
            raise RunError(text) from None
        return record

    @classmethod
    def _of(cls, recipe: Recipe, metrics: Mapping[str, Any]) -> Record:
        minority = _rarest(metrics)
        held_out = metrics.get("held_out")
        method, loss, classifier_loss, family = treatment_of(recipe)
        return cls(
            cell=cell_key(recipe),
            source=source_name(recipe, metrics),
            scenario=proportion(recipe.data.scenario),
            seed=recipe.seed,
            method=method,
            loss=loss,
            classifier_loss=classifier_loss,
            encoder=recipe.encoder.name,
            image_size=recipe.data.image_size,
            split=recipe.data.split,
            weights=recipe.encoder.spec.weights_kind,
            test=Scores.from_metrics(metrics["test"], minority),
            held_out=None if held_out is None else Scores.from_metrics(held_out, minority),
            seconds=_short(metrics["seconds"]),
            threads=metrics["environment"]["threads"],
            lopsided=metrics["lopsided"],
            torch=metrics["environment"]["packages"]["torch"],
            data=data_key(recipe, metrics),
            family=family,
            epochs=recipe.spec.epochs(recipe),
            classes=tuple(map(writable, metrics["classes"])),
            fold=Fold.of(recipe, metrics, minority),
        )

    @property
    def name(self) -> str:
        """The cell in words."""
        fold = None if self.fold is None else self.fold.fold
        return coordinates(self.scenario, self.compared_as or self.loss.label, self.seed, fold)

    @property
    def treatment(self) -> Treatment:
        """The treatment of the run."""
        return self.method, self.loss, self.classifier_loss, self.family


@dataclass(frozen=True)
class Failure(Line):
    """One failed attempt at a cell, with the error message."""

    cell: str
    scenario: str | None
    loss: _Loss
    seed: int
    error: str
    compared_as: str | None = None
    fold: int | None = None

    @classmethod
    def of(cls, recipe: Recipe, error: str, compared_as: str | None = None) -> Failure:
        """Return the failure of a settled recipe. Characters that UTF-8 cannot encode are replaced."""
        loss = LossTable.of(recipe.loss)
        scenario, fold = proportion(recipe.data.scenario), recipe.data.fold
        return cls(cell_key(recipe), scenario, loss, recipe.seed, writable(error), compared_as, fold)

    @property
    def name(self) -> str:
        """The cell in words."""
        return coordinates(self.scenario, self.compared_as or self.loss.label, self.seed, self.fold)


_READERS: dict[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (Record, Failure)}


def _place(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    return f"{shown(first['input'])} at {'.'.join(map(str, first['loc'])) or 'the line'}"


def _plain(value: Any) -> Any:
    if isinstance(value, LossTable):
        return value.to_dict()
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _rarest(metrics: Mapping[str, Any]) -> int:
    """Return the index of the class with the fewest drawn images. If classes tie, the last one wins."""
    parts = [metrics["counts"][split] for split in ("train", "val", "test") if metrics["counts"].get(split)]
    totals = [sum(part.get(name, 0) for part in parts) for name in metrics["classes"]]
    return max(index for index, total in enumerate(totals) if total == min(totals))


LOCK_SECONDS = 60.0
"""How long to wait for the lock of a folder of records, which is held only while a line is written."""


def read_records(path: str | os.PathLike[str]) -> tuple[list[Record], list[str]]:
    """Read a file of records. Return the records, and notes on skipped lines.

    A last line that a crash truncated is skipped, and so are later records of the same cell.
    """
    records, notes, _ = _parse(Record, Path(path))
    first: dict[str, Record] = {}
    for record in records:
        first.setdefault(record.cell, record)
    if len(first) < len(records):
        notes.append(f"Skipped {len(records) - len(first)} records of {path}: their cells have earlier records.")
    return list(first.values()), notes


def read_failures(path: str | os.PathLike[str]) -> list[Failure]:
    """Read a file of failed attempts, oldest first. Return an empty list if the file does not exist."""
    return _parse(Failure, Path(path))[0] if Path(path).exists() else []


def append_records(path: str | os.PathLike[str], *records: Record) -> list[str]:
    """Append the records whose cell has none. Other processes wait meanwhile.

    A truncated last line is removed. Return a note about it.
    """
    with _locked(Path(path).parent):
        there, notes, end = _parse(Record, Path(path)) if Path(path).exists() else ([], [], None)
        cells = {record.cell for record in there}
        lines = [record.to_json() for record in records if record.cell not in cells]
        if lines:
            _append(Path(path), lines, end)
            return notes
    return []


def append_failure(path: str | os.PathLike[str], failure: Failure) -> None:
    """Append a failed attempt. Other processes wait meanwhile."""
    with _locked(Path(path).parent):
        end = _parse(Failure, Path(path))[2] if Path(path).exists() else None
        _append(Path(path), [failure.to_json()], end)


def _append(path: Path, lines: Iterable[str], end: int | None) -> None:
    if end is not None:
        files.cut(path, end)
    for line in lines:
        files.append_line(path, line)


def _parse(kind: type[_Line], path: Path) -> tuple[list[_Line], list[str], int | None]:
    """Return the lines of a file, notes, and the end of the complete lines if a crash truncated the last line."""
    try:
        content = files.read_whole(path)
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}).") from None
    *lines, last = content.split(b"\n")
    found: list[_Line] = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                found.append(kind.from_json(line))
        except RunError as error:
            again = " and start the sweep again. It reads missing records from its run folders"
            do = f"Remove that line{again if kind is Record else ''}."
            raise RunError(f"{path}, line {number}: {error} {do}") from None
    if not last:
        return found, [], None
    try:
        found.append(kind.from_json(last))  # Perhaps only the line break is missing.
    except RunError:
        note = f"Skipped the last line of {path}: it is incomplete."
        return found, [note], len(content) - len(last)
    return found, [], None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the files of a sweep for this process. Wait while another process holds the lock."""
    end = time.monotonic() + LOCK_SECONDS
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(files.lock(folder))
                break
            except RunError as error:
                if error.__cause__ is not None or time.monotonic() >= end:  # An error of the disk has a cause.
                    raise
                time.sleep(0.02)
        yield
