"""What is kept of the runs of a sweep: one line of JSON a run, and one per attempt that failed. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, WrapValidator

from lopsided import files
from lopsided.data.scenarios import parse_scenario
from lopsided.errors import RunError, sentence
from lopsided.recipe import LATER_FIELDS, RUNTIME_FIELDS
from lopsided.recipe.words import leaves, shown

if TYPE_CHECKING:
    from lopsided.recipe import Recipe
    from lopsided.runs.run import Run

FORMAT = 1
"""The version of a line; it rises when an older reader could misread a newer line."""

KEY_LENGTH = 16
WITH_WEIGHTS = "+"
"""Between the hash of a family's recipe from scratch and that of the weights it starts from."""

ROUNDING = 2e-3
"""Points of per cent by which differences between figures of five digits may differ though they are the same."""

LOCK_SECONDS = 60.0
"""A folder of records is locked for the blink of an append; whoever waits longer than this is told who has it."""

VARIED_FIELDS = frozenset(
    {"seed", "data.source", "data.scenario", "encoder.weights"}
    | {f"encoder_training.{name}" for name in ("loss", "eta", "gamma", "normalization")}
)
"""What the recipes of one family may differ in, beside the fields that do not decide the outcome of a run."""

_Line = TypeVar("_Line", "Record", "Failure")
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Recall = Annotated[_Share, WrapValidator(lambda value, share: math.nan if value is None else share(value))]
_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, le=2**63 - 1)]


def _check_scenario(text: str) -> str:
    parse_scenario(text)
    return text


_Scenario = Annotated[str, AfterValidator(_check_scenario)]


def cell_key(recipe: Recipe) -> str:
    """Return the name of a settled recipe's folder in a sweep: the start of its content's hash."""
    return recipe.content_hash()[:KEY_LENGTH]


def family_of(recipe: Recipe) -> str:
    """Return the name of all recipes that differ in nothing but what a table compares: the start of a hash.

    Those are loss, eta, gamma, normalization, proportions and seed. Where the images lie does not matter, nor the
    folder of a file of weights. The name with weights is that without, and a second hash.
    """
    kept = {
        path: value
        for path, field, value in leaves(recipe)
        if path not in RUNTIME_FIELDS | VARIED_FIELDS and not (path in LATER_FIELDS and value == field.default)
    }
    parts = [part.strip() for part in (recipe.data.scenario or "").split(",")]
    kept["total"] = next((part for part in parts if part.startswith("total=")), None)
    name = Path(recipe.encoder.weights).name
    family = _digest({**kept, "weights": "none"})
    return family if name == "none" else f"{family}{WITH_WEIGHTS}{_digest(name)}"


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:KEY_LENGTH]


def epochs_of(recipe: Recipe) -> tuple[int, ...]:
    """Return the epochs of each stage."""
    first = recipe.encoder_training.epochs
    return (first, recipe.classifier.epochs) if recipe.method == "two-stage" else (first,)


def coordinates(scenario: str | None, loss: str, eta: float, gamma: float, seed: int) -> str:
    """Name a cell in words.

    >>> coordinates("90:10", "afcl", 300.0, 7.0, 2)
    '90:10 afcl eta 300 gamma 7 seed 2'
    """
    return f"{scenario or 'all images'} {loss} eta {eta:g} gamma {gamma:g} seed {seed}"


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
    """The figures of one split of one run; ``recalls`` follow the source's classes, NaN for one without images."""

    images: _Count
    minority: _Count
    accuracy: _Share
    uwa: _Share
    recalls: tuple[_Recall, ...]
    auroc: _Share | None
    majority_vote: _Share

    @classmethod
    def from_metrics(cls, evaluation: Mapping[str, Any], minority: int) -> Figures:
        """Take the figures out of an evaluation in ``metrics.json``; ``minority`` is the index of the rarest class."""
        figures, rows = evaluation["figures"], evaluation["per_class"]
        auroc = figures.get("auroc", {"value": None})["value"]
        recalls = (row["recall"]["value"] for row in rows)
        return cls(
            images=evaluation["num_images"],
            minority=rows[minority]["support"],
            accuracy=_short(figures["accuracy"]["value"]),
            uwa=_short(figures["uwa"]["value"]),
            recalls=tuple(math.nan if recall is None else _short(recall) for recall in recalls),
            auroc=None if auroc is None else _short(auroc),
            majority_vote=_short(evaluation["majority"]["accuracy"]),
        )


@dataclass(frozen=True)
class Record:
    """One finished run; its figures have five digits.

    ``source`` is the name of what was opened, never a path: isic2018 for any folder of its layout. ``scenario`` has no
    total. ``eta`` is in the unit of the run's recipe.
    ``held_out`` are the figures on the images of the pool that the scenario did not draw, if they were asked for.
    ``family`` tells runs apart whose recipes differ in more than what a table compares, ``epochs`` are those of each
    stage, and ``classes`` the names in their order; lines of earlier versions lack some of these.
    """

    cell: str
    source: str
    scenario: _Scenario | None
    method: str
    loss: str
    eta: _Number
    gamma: _Number
    normalization: str
    encoder: str
    image_size: int | None
    split: str
    weights: str
    seed: _Count
    test: Figures
    held_out: Figures | None
    seconds: _Number
    threads: int
    lopsided: str
    torch: str
    family: str | None = None
    epochs: tuple[int, ...] | None = None
    classes: tuple[str, ...] | None = None

    @classmethod
    def from_run(cls, run: Run) -> Record:
        """Take what is to be kept out of the folder of a finished run."""
        if run.metrics is None:
            raise RunError(sentence("a run must be finished before it is recorded", f"{run.folder}, which is not"))
        if run.metrics.get("test") is None:
            do = "Set data.test in its recipe."
            raise RunError(sentence("a recorded run must have test images", f"{run.folder}, which has none", do))
        try:
            record = cls._of(run.recipe, run.metrics)
            _READERS[cls].validate_json(record.to_json(), strict=True)  # What is written must be read again.
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            why = _place(error) if isinstance(error, ValidationError) else files.reason(error)
            must = "the metrics of a recorded run must be as a run writes them"
            raise RunError(sentence(must, f"{run.folder} ({why})", "Train the run again, or restore them.")) from None
        return record

    @classmethod
    def _of(cls, recipe: Recipe, metrics: Mapping[str, Any]) -> Record:
        minority = _rarest(metrics)
        held_out = metrics.get("held_out")
        training, weights = recipe.encoder_training, recipe.encoder.weights
        return cls(
            cell=cell_key(recipe),
            source=_writable(metrics.get("source_name", Path(recipe.data.source or "").name)),
            scenario=proportion(recipe.data.scenario),
            method=recipe.method,
            loss=training.loss,
            eta=training.eta,
            gamma=training.gamma,
            normalization=training.normalization,
            encoder=recipe.encoder.name,
            image_size=recipe.data.image_size,
            split=recipe.data.split,
            weights=weights if weights in ("none", "timm") else "file",
            seed=recipe.seed,
            test=Figures.from_metrics(metrics["test"], minority),
            held_out=None if held_out is None else Figures.from_metrics(held_out, minority),
            seconds=_short(metrics["seconds"]),
            threads=metrics["environment"]["threads"],
            lopsided=metrics["lopsided"],
            torch=metrics["environment"]["packages"]["torch"],
            family=family_of(recipe),
            epochs=epochs_of(recipe),
            classes=tuple(map(_writable, metrics["classes"])),
        )

    @property
    def name(self) -> str:
        """The cell in words."""
        return coordinates(self.scenario, self.loss, self.eta, self.gamma, self.seed)

    @property
    def has_family(self) -> bool:
        """Whether its family is named as ``family_of`` does; earlier versions did not, or mixed the weights in."""
        return self.family is not None and (self.weights == "none" or WITH_WEIGHTS in self.family)

    def to_json(self) -> str:
        """Write one line, without its break."""
        return _write(self)

    @classmethod
    def from_json(cls, line: str | bytes) -> Record:
        """Read what ``to_json`` wrote."""
        return _read(cls, line)


@dataclass(frozen=True)
class Failure:
    """One attempt at a cell that came to nothing, and the sentence that says why."""

    cell: str
    scenario: str | None
    loss: str
    eta: float
    gamma: float
    seed: int
    error: str

    @classmethod
    def of(cls, recipe: Recipe, error: str) -> Failure:
        """Name the cell of a settled recipe, and what went wrong with it, in text that a file can hold."""
        training = recipe.encoder_training
        scenario = proportion(recipe.data.scenario)
        told = _writable(error)
        return cls(cell_key(recipe), scenario, training.loss, training.eta, training.gamma, recipe.seed, told)

    @property
    def name(self) -> str:
        """The cell in words."""
        return coordinates(self.scenario, self.loss, self.eta, self.gamma, self.seed)

    def to_json(self) -> str:
        """Write one line, without its break."""
        return _write(self)

    @classmethod
    def from_json(cls, line: str | bytes) -> Failure:
        """Read what ``to_json`` wrote."""
        return _read(cls, line)


def read_records(path: str | os.PathLike[str]) -> tuple[list[Record], list[str]]:
    """Read a file of records, and say what was passed over: a last line that a crash cut in half, later duplicates."""
    records, notes, _ = _parse(Record, Path(path))
    first: dict[str, Record] = {}
    for record in records:
        first.setdefault(record.cell, record)
    if len(first) < len(records):
        notes.append(f"{len(records) - len(first)} records of {path} were passed over: their cells have earlier ones.")
    return list(first.values()), notes


def read_failures(path: str | os.PathLike[str]) -> list[Failure]:
    """Read a file of failed attempts, oldest first; none if there is no file."""
    return _parse(Failure, Path(path))[0] if Path(path).exists() else []


def append_record(path: str | os.PathLike[str], record: Record) -> list[str]:
    """Add a record unless its cell has one; a line that was cut off is removed, and said. Others wait their turn."""
    with _locked(Path(path).parent):
        records, notes, end = _parse(Record, Path(path)) if Path(path).exists() else ([], [], None)
        if all(record.cell != there.cell for there in records):
            _append(Path(path), record.to_json(), end)
            return notes
    return []


def renew_records(path: str | os.PathLike[str], renewed: Iterable[Record]) -> None:
    """Put records in the place of those of the same cells, and add the others; all at once or not at all."""
    with _locked(Path(path).parent):
        there = _parse(Record, Path(path))[0] if Path(path).exists() else []
        new = {record.cell: record for record in renewed}
        kept = {record.cell: record for record in reversed(there)}  # The first of a cell counts.
        lines = {**{record.cell: kept[record.cell] for record in there}, **new}
        files.atomic_write(path, "".join(f"{record.to_json()}\n" for record in lines.values()))


def append_failure(path: str | os.PathLike[str], failure: Failure) -> None:
    """Add a failed attempt; other processes wait their turn."""
    with _locked(Path(path).parent):
        end = _parse(Failure, Path(path))[2] if Path(path).exists() else None
        _append(Path(path), failure.to_json(), end)


def _append(path: Path, line: str, end: int | None) -> None:
    if end is not None:
        files.cut(path, end)
    files.append_line(path, line)


def _parse(kind: type[_Line], path: Path) -> tuple[list[_Line], list[str], int | None]:
    """Return the lines of a file, notes, and where the whole lines end if a crash cut the last one in half."""
    try:
        content = files.read_whole(path)
    except OSError as error:
        raise RunError(sentence(f"{path.name} must be a readable file", f"{path} ({error.strerror})")) from None
    *lines, last = content.split(b"\n")
    found: list[_Line] = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                found.append(_read(kind, line))
        except RunError as error:
            again = " and start the sweep again, which reads its run folders for what is not recorded"
            do = f"Remove that line{again if kind is Record else ''}."
            raise RunError(f"{path}, line {number}: {error} {do}") from None
    if not last:
        return found, [], None
    try:
        found.append(_read(kind, last))  # Only its line break may be missing.
    except RunError:
        note = f"The last line of {path} was cut off in writing and passed over."
        return found, [note], len(content) - len(last)
    return found, [], None


_READERS: dict[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (Record, Failure)}


def _writable(text: str) -> str:
    """Replace lone surrogates, by which Python stands for bytes of a file name that are no UTF-8."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read(kind: type[_Line], line: str | bytes) -> _Line:
    must = f"a line must be a {kind.__name__.lower()} of a sweep"
    try:
        if kind is Failure:  # Its text is whatever an error said; no byte of it may keep a sweep from going on.
            text = line.decode(errors="replace") if isinstance(line, bytes) else line
            line = json.dumps(_plain_text(json.loads(text)))
        values = json.loads(line)
        written = values["format"]
        if written == FORMAT:
            found: _Line = _READERS[kind].validate_json(line, strict=True)
            return found
    except ValidationError as error:
        raise RunError(sentence(must, _place(error))) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        got = line.decode(errors="replace") if isinstance(line, bytes) else line
        raise RunError(sentence(must, shown(got))) from None
    do = "Read it with the version of lopsided that wrote it."
    raise RunError(sentence(f"a line must be of format {FORMAT}", shown(written), do))


def _place(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    return f"{shown(first['input'])} at {'.'.join(map(str, first['loc'])) or 'the line'}"


def _write(line: Record | Failure) -> str:
    return json.dumps({"format": FORMAT, **_plain(asdict(line))}, separators=(",", ":"), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
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
    """Return the index of the class with the fewest images in the draw, the last of equals."""
    parts = [metrics["counts"][split] for split in ("train", "val", "test") if metrics["counts"].get(split)]
    totals = [sum(part.get(name, 0) for part in parts) for name in metrics["classes"]]
    return max(index for index, total in enumerate(totals) if total == min(totals))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep the files of a sweep for this process, once whoever has them is done with them."""
    end = time.monotonic() + LOCK_SECONDS
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(files.lock(folder))
                break
            except RunError as error:
                if error.__cause__ is not None or time.monotonic() >= end:  # What the disk refuses has a cause.
                    raise
                time.sleep(0.02)
        yield
