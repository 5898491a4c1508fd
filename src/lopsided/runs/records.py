"""The records of a sweep: one line of JSON per finished run, and one per failed attempt. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, PlainValidator, TypeAdapter, ValidationError, WrapValidator

from lopsided import files
from lopsided.data.scenarios import parse_scenario
from lopsided.errors import RunError, sentence
from lopsided.losses import catalogue
from lopsided.recipe import RUNTIME_FIELDS, UNHASHED_FIELDS, WEIGHT_NAMES, hashed_fields
from lopsided.recipe.weights import change_files
from lopsided.recipe.words import shown

if TYPE_CHECKING:
    from lopsided.recipe import LossSettings, Recipe
    from lopsided.runs.run import Run

FORMAT = 2
"""The version of a line. It increases if an older reader could misread a newer line. Format 1 is still readable."""

KEY_LENGTH = 16
WITH_WEIGHTS = "+"
"""Separates the hash of a recipe without weights from the hash of its initial weights."""

ROUNDING = 2e-3
"""Tolerance, in percentage points, for equal differences between figures that are rounded to five digits."""

LOCK_SECONDS = 60.0
"""How long to wait for the lock of a folder of records, which is held only while a line is written."""

VARIED_FIELDS = frozenset({"seed", "data.source", "data.scenario", "data.fold", "encoder.weights"})
VARIED_LOSS = "encoder_training.loss."
"""Fields in which recipes of one family may differ, besides the fields that do not change what is trained."""

BLIND_FIELDS = frozenset(
    {f"data.{name}" for name in ("source", "held_out", "redraw", "image_size", "channels", "skip_unreadable")}
)
"""Fields of the data that do not decide which images are used, or whose effect ``data_key`` includes otherwise."""

_Line = TypeVar("_Line", "Record", "Failure")
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Recall = Annotated[_Share, WrapValidator(lambda value, share: math.nan if value is None else share(value))]
_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, le=2**63 - 1)]


def _check_scenario(text: str) -> str:
    parse_scenario(text)
    return text


_Scenario = Annotated[str, AfterValidator(_check_scenario)]


@dataclass(frozen=True)
class LossTable:
    """A loss with its own parameters, sorted by name. The loss need not be installed."""

    name: str
    parameters: tuple[tuple[str, catalogue.Value], ...] = ()

    @classmethod
    def of(cls, loss: LossSettings) -> LossTable:
        """Return the loss of a recipe."""
        return cls(loss.name, tuple(sorted(loss.parameters.items())))

    @classmethod
    def read(cls, value: object) -> LossTable:
        """Read a table that ``to_dict`` returned."""
        if isinstance(value, LossTable):
            return value
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise ValueError("not the table of a loss")
        parameters = {name: each for name, each in value.items() if name != "name"}
        if not all(isinstance(each, str | int) or _is_finite(each) for each in parameters.values()):
            raise ValueError("a parameter is not a number, a string or a boolean")
        return cls(value["name"], tuple(sorted(parameters.items())))

    def get(self, name: str, default: Any = None) -> Any:
        """Return a parameter, or ``default`` if the loss does not have it."""
        return dict(self.parameters).get(name, default)

    def to_dict(self) -> dict[str, catalogue.Value]:
        """Return the name and the parameters for JSON."""
        return {"name": self.name, **dict(self.parameters)}

    @property
    def label(self) -> str:
        """The loss with the parameters that differ from their defaults."""
        try:
            return catalogue.find(self.name).describe(dict(self.parameters))
        except (catalogue.CatalogueError, ValueError, TypeError):  # Its package is missing or has changed.
            return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.parameters)})"


def _is_finite(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


_Loss = Annotated[LossTable, PlainValidator(LossTable.read)]

Treatment = tuple[str, LossTable, LossTable | None, str | None]
"""Method, both losses and family: all that decides a run except data, seed and proportions."""


def cell_key(recipe: Recipe) -> str:
    """Return the name of a settled recipe's folder in a sweep: the start of its content's hash."""
    return recipe.content_hash()[:KEY_LENGTH]


def family_of(recipe: Recipe) -> str:
    """Return a hash that is equal for recipes that differ only in the encoder's loss, the proportions and the seed.

    The location of the images does not matter, nor the folder of a file of weights or of further labels. With weights,
    a second hash follows that of the recipe without weights.
    """
    kept = {
        path: _without_folders(path, value)
        for path, value in hashed_fields(recipe)
        if path not in UNHASHED_FIELDS | VARIED_FIELDS and not path.startswith(VARIED_LOSS)
    }
    parts = [part.strip() for part in (recipe.data.scenario or "").split(",")]
    kept["total"] = next((part for part in parts if part.startswith("total=")), None)
    name = change_files(recipe.encoder.name, recipe.encoder.weights, lambda path: Path(path).name)
    family = _digest({**kept, "weights": "none"})
    return family if name == "none" else f"{family}{WITH_WEIGHTS}{_digest(name)}"


def treatment_of(recipe: Recipe) -> Treatment:
    """Return the treatment of a recipe: runs of one treatment differ only in data, seed and proportions."""
    losses = LossTable.of(recipe.loss), LossTable.of(recipe.classifier.loss)
    return recipe.method, *losses, family_of(recipe)


def data_key(recipe: Recipe, metrics: Mapping[str, Any]) -> str:
    """Return a hash that is equal for two runs that were trained and tested on the same images.

    It covers the name of the source, the fields that draw and split, the seed if it decides the draw, and the number of
    images of each class in each split, which changes when images are added to a folder. A fold has the same test images
    whatever part of the other images is used for validation, so the key of a fold does not cover that part.
    """
    kept: dict[str, Any] = {
        path: _without_folders(path, value)
        for path, value in hashed_fields(recipe)
        if path.startswith("data.") and path not in RUNTIME_FIELDS | BLIND_FIELDS
    }
    kept["seed"] = recipe.seed if recipe.data.redraw else 0
    counts = metrics["counts"]
    if recipe.data.fold is not None:
        kept.pop("data.val", None)
        counts = {"rest": _added(counts["train"], counts.get("val")), "test": counts["test"]}
    return _digest([_source_name(recipe, metrics), kept, metrics["classes"], counts])


def _without_folders(path: str, value: Any) -> Any:
    """Return the value of a field; of tables of further labels, the file names, which are the same on every machine."""
    return [Path(table).name for table in value] if path == "data.more" and value else value


def _added(first: Mapping[str, int], second: Mapping[str, int] | None) -> dict[str, int]:
    return {name: number + (second or {}).get(name, 0) for name, number in first.items()}


def _source_name(recipe: Recipe, metrics: Mapping[str, Any]) -> str:
    return _writable(metrics.get("source_name", Path(recipe.data.source or "").name))


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:KEY_LENGTH]


def epochs_of(recipe: Recipe) -> tuple[int, ...]:
    """Return the epochs of each stage. A frozen encoder, and one with a budget in steps or minutes, has no epochs."""
    if recipe.method == "frozen":
        return ()
    if recipe.method == "fine-tune" and (recipe.fine_tune.steps or recipe.fine_tune.minutes) is not None:
        return ()
    first = recipe.encoder_training.epochs
    return (first, recipe.classifier.epochs) if recipe.method == "two-stage" or recipe.retrains else (first,)


def coordinates(scenario: str | None, what: str, seed: int, fold: int | None = None) -> str:
    """Name a cell by its scenario, its arm or loss, and its seed or fold.

    >>> coordinates("90:10", "AFCL(eta=300)", 2), coordinates(None, "CL", 0, 6)
    ('90:10 AFCL(eta=300) seed 2', 'all images CL fold 6')
    """
    return f"{scenario or 'all images'} {what} {f'seed {seed}' if fold is None else f'fold {fold}'}"


def proportion(scenario: str | None) -> str | None:
    """Return a scenario without its total.

    >>> proportion("90:10,total=1000")
    '90:10'
    """
    if scenario is None:
        return None
    return ",".join(part.strip() for part in scenario.split(",") if not part.strip().startswith("total="))


@dataclass(frozen=True)
class Figures:
    """The figures of one split of one run. ``recalls`` has the order of the classes; NaN: a class without images."""

    images: _Count
    minority: _Count
    accuracy: _Share
    uwa: _Share
    recalls: tuple[_Recall, ...]
    auroc: _Share | None
    majority_vote: _Share
    rules: tuple[tuple[str, _Share], ...] = ()
    """The UWA of the same model by each of the rules ``plain`` and ``balanced``. Empty in lines of earlier versions."""
    log_loss: _Number | None = None
    """The log loss; None in lines of earlier versions."""

    @classmethod
    def from_metrics(cls, evaluation: Mapping[str, Any], minority: int) -> Figures:
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
        rest = _added(metrics["counts"]["train"], metrics["counts"].get("val"))
        return cls(fold, folds, sum(rest.values()), rest.get(metrics["classes"][minority], 0))

    @property
    def repeat(self) -> int:
        """The repeat of the folds, from 0."""
        return (self.fold - 1) // self.folds


@dataclass(frozen=True)
class Record:
    """One finished run; its figures have five digits.

    ``source`` is the name of the source, never a path: isic2018 for any folder with its layout. ``scenario`` has no
    total. ``held_out`` has the figures on the images that the scenario did not draw, if they were requested. ``data``
    is equal for runs that saw the same images. ``family`` differs between recipes that differ in more than loss,
    proportions and seed. ``epochs`` has the epochs of each stage. ``classes`` has the class names in order. ``arm`` is
    the name of the run's arm in a comparison. ``fold`` is set if the test images are a fold. A line of format 1 has no
    loss of the classifier and may lack the fields after ``data``. Its ``data`` is a hash of source, scenario,
    split and seed.
    """

    cell: str
    source: str
    scenario: _Scenario | None
    seed: _Count
    method: str
    loss: _Loss
    classifier_loss: _Loss | None
    encoder: str
    image_size: int | None
    split: str
    weights: str
    test: Figures
    held_out: Figures | None
    seconds: _Number
    threads: int
    lopsided: str
    torch: str
    data: str
    family: str | None = None
    epochs: tuple[int, ...] | None = None
    classes: tuple[str, ...] | None = None
    arm: str | None = None
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
        weights = recipe.encoder.weights
        method, loss, classifier_loss, family = treatment_of(recipe)
        return cls(
            cell=cell_key(recipe),
            source=_source_name(recipe, metrics),
            scenario=proportion(recipe.data.scenario),
            seed=recipe.seed,
            method=method,
            loss=loss,
            classifier_loss=classifier_loss,
            encoder=recipe.encoder.name,
            image_size=recipe.data.image_size,
            split=recipe.data.split,
            weights=weights if weights in WEIGHT_NAMES else "file",
            test=Figures.from_metrics(metrics["test"], minority),
            held_out=None if held_out is None else Figures.from_metrics(held_out, minority),
            seconds=_short(metrics["seconds"]),
            threads=metrics["environment"]["threads"],
            lopsided=metrics["lopsided"],
            torch=metrics["environment"]["packages"]["torch"],
            data=data_key(recipe, metrics),
            family=family,
            epochs=epochs_of(recipe),
            classes=tuple(map(_writable, metrics["classes"])),
            fold=Fold.of(recipe, metrics, minority),
        )

    @property
    def name(self) -> str:
        """The cell in words."""
        fold = None if self.fold is None else self.fold.fold
        return coordinates(self.scenario, self.arm or self.loss.label, self.seed, fold)

    @property
    def treatment(self) -> Treatment:
        """The treatment of the run."""
        return self.method, self.loss, self.classifier_loss, self.family

    @property
    def is_complete(self) -> bool:
        """Whether the record has all fields. A record of format 1 does not."""
        return self.classifier_loss is not None

    def to_json(self) -> str:
        """Write one line, without its break."""
        return _write(self)

    @classmethod
    def from_json(cls, line: str | bytes) -> Record:
        """Read what ``to_json`` wrote."""
        return _read(cls, line)


@dataclass(frozen=True)
class Failure:
    """One failed attempt at a cell, with the error message."""

    cell: str
    scenario: str | None
    loss: _Loss
    seed: int
    error: str
    arm: str | None = None
    fold: int | None = None

    @classmethod
    def of(cls, recipe: Recipe, error: str, arm: str | None = None) -> Failure:
        """Return the failure of a settled recipe. Characters that UTF-8 cannot encode are replaced."""
        loss = LossTable.of(recipe.loss)
        scenario, fold = proportion(recipe.data.scenario), recipe.data.fold
        return cls(cell_key(recipe), scenario, loss, recipe.seed, _writable(error), arm, fold)

    @property
    def name(self) -> str:
        """The cell in words."""
        return coordinates(self.scenario, self.arm or self.loss.label, self.seed, self.fold)

    def to_json(self) -> str:
        """Write one line, without its break."""
        return _write(self)

    @classmethod
    def from_json(cls, line: str | bytes) -> Failure:
        """Read what ``to_json`` wrote."""
        return _read(cls, line)


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


def append_record(path: str | os.PathLike[str], record: Record) -> list[str]:
    """Append a record unless its cell has one. Other processes wait meanwhile.

    A truncated last line is removed. Return a note about it.
    """
    with _locked(Path(path).parent):
        records, notes, end = _parse(Record, Path(path)) if Path(path).exists() else ([], [], None)
        if all(record.cell != there.cell for there in records):
            _append(Path(path), record.to_json(), end)
            return notes
    return []


def renew_records(path: str | os.PathLike[str], renewed: Mapping[str, Record] | Iterable[Record]) -> None:
    """Replace the records of the same cells and append the others, in one atomic write.

    A mapping replaces the records of the cells that are its keys.
    """
    if not isinstance(renewed, Mapping):
        renewed = {record.cell: record for record in renewed}
    with _locked(Path(path).parent):
        there = _parse(Record, Path(path))[0] if Path(path).exists() else []
        kept = {record.cell: record for record in reversed(there)}  # The first record of a cell counts.
        lines = {**{record.cell: kept[record.cell] for record in there}, **renewed}
        files.atomic_write(path, "".join(f"{record.to_json()}\n" for record in lines.values()))


def append_failure(path: str | os.PathLike[str], failure: Failure) -> None:
    """Append a failed attempt. Other processes wait meanwhile."""
    with _locked(Path(path).parent):
        end = _parse(Failure, Path(path))[2] if Path(path).exists() else None
        _append(Path(path), failure.to_json(), end)


def _append(path: Path, line: str, end: int | None) -> None:
    if end is not None:
        files.cut(path, end)
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
                found.append(_read(kind, line))
        except RunError as error:
            again = " and start the sweep again. It reads missing records from its run folders"
            do = f"Remove that line{again if kind is Record else ''}."
            raise RunError(f"{path}, line {number}: {error} {do}") from None
    if not last:
        return found, [], None
    try:
        found.append(_read(kind, last))  # Perhaps only the line break is missing.
    except RunError:
        note = f"Skipped the last line of {path}: it is incomplete."
        return found, [note], len(content) - len(last)
    return found, [], None


_READERS: dict[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (Record, Failure)}


def _writable(text: str) -> str:
    """Replace lone surrogates, which represent bytes of a file name that are not UTF-8."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read(kind: type[_Line], line: str | bytes) -> _Line:
    must = f"a line must be a {kind.__name__.lower()} of a sweep"
    try:
        if kind is Failure:  # An error message may hold any bytes. They must not stop a sweep.
            text = line.decode(errors="replace") if isinstance(line, bytes) else line
            line = json.dumps(_plain_text(json.loads(text)))
        values = json.loads(line)
        written = values["format"]
        if written == 1:
            line = json.dumps(_from_format_1(values))
        if written in (1, FORMAT):
            found: _Line = _READERS[kind].validate_json(line, strict=True)
            return found
    except ValidationError as error:
        raise RunError(sentence(must, _place(error))) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        got = line.decode(errors="replace") if isinstance(line, bytes) else line
        raise RunError(sentence(must, shown(got))) from None
    do = "Read it with the version of lopsided that wrote it."
    raise RunError(sentence(f"a line must be of format {FORMAT}", shown(written), do))


def _from_format_1(values: dict[str, Any]) -> dict[str, Any]:
    """Convert a line of version 0.1, which has eta, gamma and normalization for every loss.

    A contrastive loss keeps the parameters that it has. Other losses keep none.
    """
    flat = {name: values.get(name) for name in ("eta", "gamma", "normalization") if name in values}
    rest = {name: value for name, value in values.items() if name not in flat}
    try:
        entry = catalogue.find(values["loss"])
        known = set(entry.defaults()) if entry.kind == "contrastive" else set()
    except (catalogue.CatalogueError, KeyError, TypeError):
        known = set(flat)
    rest["loss"] = {"name": values.get("loss"), **{name: value for name, value in flat.items() if name in known}}
    if "source" in values:
        rest["classifier_loss"] = None
        rest["data"] = _digest([values.get(name) for name in ("source", "scenario", "split", "seed")])
    return rest


def _place(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    return f"{shown(first['input'])} at {'.'.join(map(str, first['loc'])) or 'the line'}"


def _write(line: Record | Failure) -> str:
    return json.dumps({"format": FORMAT, **_plain(line)}, separators=(",", ":"), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, LossTable):
        return value.to_dict()
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _plain_text(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: _writable(value) if isinstance(value, str) else value for name, value in values.items()}
    return values


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _rarest(metrics: Mapping[str, Any]) -> int:
    """Return the index of the class with the fewest drawn images. If classes tie, the last one wins."""
    parts = [metrics["counts"][split] for split in ("train", "val", "test") if metrics["counts"].get(split)]
    totals = [sum(part.get(name, 0) for part in parts) for name in metrics["classes"]]
    return max(index for index, total in enumerate(totals) if total == min(totals))


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
