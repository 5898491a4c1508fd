"""Commands that write, small enough to be run again for each of their writes, and what must hold after each."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from disk_faults import Disk
from tiny import write_photos
from tiny_command import Ended

OLD = b"what was here before\n"
TINY = ["--encoder", "mlp-8", "epochs=1", "classifier_epochs=1", "batch_size=16", "--device", "cpu"]


def call(*arguments: str | Path) -> Ended:
    """Run the command in this process."""
    from lopsided.cli import run

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([str(argument) for argument in arguments])
    return Ended(code, out.getvalue(), err.getvalue())


@dataclass
class Job:
    """A command that writes below a folder ``work``, with the flags that go on after it broke off.

    ``replaced`` are files that were there before; ``content`` gives all that must be the same in the end.
    """

    name: str
    arguments: Callable[[Path], list[str | Path]]
    content: Callable[[Path], Any]
    again: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    codes: tuple[int, ...] = (2,)
    around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    reference: Any = field(default=None, repr=False)
    operations: list[str] = field(default_factory=list)

    def learn(self, work: Path) -> None:
        """Run the command undisturbed, and keep what it gives and what it writes."""
        self._begin(work)
        with self.around(), Disk(work) as disk:
            ended = call(*self.arguments(work))
        assert ended.code == 0, ended.err
        self.operations, self.reference = disk.operations, self.content(work)
        self._new = {name: (work / name).read_bytes() for name in self.replaced if (work / name).exists()}
        assert leftovers(work) == []

    def disturb(self, work: Path, kind: str, at: int) -> str:
        """Break the command off at a write, check what is left, let it go on, and check what it comes to.

        Returns the sentence that was said.
        """
        self._begin(work)
        with self.around(), Disk(work, kind, at) as disk:
            ended = call(*self.arguments(work))
        where = f"{self.name}, {kind} at {at} of {len(self.operations)}: {disk.operations[at:][:1]}, said {ended.err}"
        said = [line for line in ended.err.splitlines() if not line.startswith("warning: ")]
        if not disk.refused:  # Another number of writes than in the first run.
            assert ended.code == 0, where
            return ""
        assert ended.code in self.codes, where
        assert said, where
        assert "unexpected" not in ended.err, where
        assert "Traceback" not in ended.err, where
        assert said[-1].startswith("lopsided: ") or ended.code != 2, where
        assert said[-1].endswith("."), where
        for name in self.replaced:
            now = (work / name).read_bytes() if (work / name).exists() else None
            assert now in (OLD, self._new.get(name)), where
        if kind != "read-only":
            assert leftovers(work) == [], where
        finished = (work / "run" / "metrics.json").exists()
        with self.around():
            ended = call(*self.arguments(work), *self.again)
        assert ended.code == 0, f"{where}; then {ended.err}"
        assert self.content(work) == self.reference, where
        # Where nothing is left to do nothing is removed either: a lock that is nobody's may stay.
        assert [name for name in leftovers(work) if not (finished and name == ".lock")] == [], where
        return said[-1]

    def _begin(self, work: Path) -> None:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        for name in self.replaced:
            (work / name).write_bytes(OLD)


def leftovers(folder: Path) -> list[str]:
    """Temporary files and locks below a folder."""
    return [path.name for path in folder.rglob(".*") if path.is_file()]


def files_of(folder: Path, *names: str) -> dict[str, bytes]:
    """The bytes of files by name."""
    return {name: (folder / name).read_bytes() for name in names}


def run_content(folder: Path) -> dict[str, Any]:
    """All of a run that does not depend on the clock."""
    there = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    names = sorted(path.relative_to(folder).as_posix() for path in there)  # Hidden ones are looked for elsewhere.
    metrics = json.loads((folder / "metrics.json").read_bytes())
    del metrics["seconds"]
    kept = files_of(folder, "recipe.toml", "predictions.csv", "model.safetensors", "model.json", "features.safetensors")
    return {"names": names, "metrics": metrics, **kept}


def sweep_content(folder: Path) -> dict[str, Any]:
    """All of a sweep that does not depend on the clock."""
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    tables = sorted(path for path in (folder / "tables").rglob("*") if path.is_file())
    return {
        "records": sorted(({**line, "seconds": 0} for line in lines), key=lambda line: str(line["cell"])),
        "tables": {path.relative_to(folder).as_posix(): path.read_bytes() for path in tables},
        "cells": sorted(path.relative_to(folder).as_posix() for path in (folder / "cells").rglob("*")),
    }


class InProcess:
    """An engine that trains cells in this process, where writes can be counted."""

    slots = 1

    def open(self, folder: Path, *, models: bool = False) -> None:
        self.folder, self.cells = folder, []

    def submit(self, cell: Any) -> None:
        self.cells.append(cell)

    def wait(self, seconds: float) -> list[Any]:
        from lopsided.runs.engines import Ended
        from lopsided.runs.plan import CELLS, train_cell
        from lopsided.runs.records import Record

        cells, self.cells = self.cells, []
        found = []
        for cell in cells:
            line, error = train_cell(cell.recipe.to_toml(), str(self.folder / CELLS / cell.key), 1)
            found.append(Ended(cell, Record.from_json(line) if line else None, error))
        return found

    def close(self) -> None:
        pass


@contextmanager
def always_due() -> Iterator[None]:
    """Write a checkpoint after each epoch, however short, so that every run has the same writes."""
    with patch("lopsided.training.checkpoint.TIMES_AS_LONG", 0.0):
        yield


def make_jobs(folder: Path) -> dict[str, Job]:
    """The commands that write, on data and a run below a folder."""
    photos = write_photos(folder / "photos", {"cat": 14, "dog": 8})
    inbox = write_photos(folder / "inbox", {"cat": 2, "dog": 1}, start=50)
    (inbox / "cat" / "broken.png").write_bytes(b"no image")
    run = folder / "run"
    ended = call("fit", photos, "--out", run, *TINY, "--quiet")
    assert ended.code == 0, ended.err
    recipe = folder / "tiny.toml"
    made = (run / "recipe.toml").read_text().replace("# scenario is unset", 'scenario = "50:50,total=12"')
    recipe.write_text(made)

    @contextmanager
    def in_process() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(always_due())
            stack.enter_context(patch("lopsided.cli.sweeping.make_engine", lambda *_: InProcess()))
            yield

    @contextmanager
    def exporting() -> Iterator[None]:
        """Export in no time: what is exported is tested elsewhere."""
        with ExitStack() as stack:
            for name, value in {"_require": None, "_to_onnx": b"a graph", "_check": 0.0}.items():
                stack.enter_context(patch(f"lopsided.inference.export.{name}", lambda *_, value=value: value))
            yield

    @contextmanager
    def small_demo() -> Iterator[None]:
        from lopsided.recipe import Recipe

        base = Recipe.load(recipe).override(**{"data.scenario": None})
        small = {loss: base.override(**{"encoder_training.loss": loss}) for loss in ("ce", "cl")}
        with always_due(), patch("lopsided.runs.demo.demo_recipes", lambda seed: small):
            yield

    jobs = [
        Job(
            "fit",
            lambda work: ["fit", photos, "--out", work / "run", *TINY, "--quiet"],
            lambda work: {k: v for k, v in run_content(work / "run").items() if k != "recipe.toml"},
            again=("--resume",),
            around=always_due,
        ),
        Job(
            "evaluate",
            lambda work: ["evaluate", run, photos, "--out", work / "figures.json", "--quiet"],
            lambda work: files_of(work, "figures.json"),
            replaced=("figures.json",),
        ),
        Job(
            "predict",
            lambda work: ["predict", run, inbox, "--out", work / "answers.csv", "--quiet"],
            lambda work: files_of(work, "answers.csv", "answers.unreadable.csv"),
            replaced=("answers.csv", "answers.unreadable.csv"),
        ),
        Job(
            "predict-readable",
            lambda work: ["predict", run, inbox / "dog", "--out", work / "answers.csv", "--quiet"],
            lambda work: sorted(path.name for path in work.iterdir()),
            replaced=("answers.csv", "answers.unreadable.csv"),
        ),
        Job(
            "report",
            lambda work: ["report", run, "--out", work / "page.html", "--quiet"],
            lambda work: files_of(work, "page.html"),
            replaced=("page.html",),
        ),
        Job(
            "export",
            lambda work: ["export", run, "--out", work / "model.onnx", "--quiet"],
            lambda work: files_of(work, "model.onnx"),
            replaced=("model.onnx",),
            around=exporting,
        ),
        Job(
            "demo",
            lambda work: ["demo", "--losses", "--out", work / "demo", "--quiet"],
            lambda work: [run_content(work / "demo" / loss) for loss in ("ce", "cl")],
            around=small_demo,
        ),
        Job(
            "reproduce",
            lambda work: [
                *("reproduce", "eta", "--out", work / "sweep", "--recipe", recipe, "--quiet"),
                *("--scenarios", "50:50", "--values", "0,300", "--runs", "1"),
            ],
            lambda work: sweep_content(work / "sweep"),
            codes=(1, 2),
            around=in_process,
        ),
    ]  # fmt: skip
    return {job.name: job for job in jobs}
