"""Killed before a write and started again, a run, a prediction and a sweep come to the same end and leave nothing."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killed import predict, run, sweep

from forked import forked
from lopsided.errors import RunError
from lopsided.facts.log import Reporter
from lopsided.paper.page import sweep_page
from lopsided.paper.protocol import Setting
from lopsided.reports.comparison_page import comparison_page
from lopsided.reports.report import write_report
from lopsided.runs.records import append_records, read_records
from lopsided.runs.run import run_recipe
from lopsided.runs.sweep import run_sweep
from tiny_command import names_below
from tiny_sweep import RUN_FILES, Scripted, record_of, tiny_recipe

pytestmark = pytest.mark.slow


def content_of(folder: Path) -> dict[str, Any]:
    """All files of a run; of figures and checkpoint, what does not tell how long it took; of the log, that it is."""
    content: dict[str, Any] = {name: (folder / name).read_bytes() for name in names_below(folder)}
    metrics = json.loads(content["metrics.json"])
    del metrics["seconds"]
    return {**content, "metrics.json": metrics, "log.jsonl": True, "checkpoint/state.safetensors": True}


# Runs.


def test_a_run_killed_before_a_write_ends_with_the_files_of_one_that_was_not(photos: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(photos, epochs=2, threads=1).to_toml()
    assert forked(run, recipe, tmp_path / "whole") == 0
    expected = content_of(tmp_path / "whole")
    killed, fatal = 0, 2
    while forked(run, recipe, tmp_path / str(fatal), fatal) == -signal.SIGKILL:
        assert forked(run, recipe, tmp_path / str(fatal)) == 0
        assert content_of(tmp_path / str(fatal)) == expected, f"killed before write {fatal}"
        killed, fatal = killed + 1, fatal + 29  # Another sort of write each time.
    assert killed >= 4


def test_a_run_with_folds_killed_before_a_write_ends_with_the_files_of_one_that_was_not(
    photos: Path, tmp_path: Path
) -> None:
    def content(folder: Path) -> dict[str, Any]:
        found: dict[str, Any] = {name: (folder / name).read_bytes() for name in names_below(folder)}
        logs = {name: True for name in found if name.endswith("log.jsonl")}
        figures = {n: json.loads(c) | {"seconds": 0} for n, c in found.items() if n.endswith("metrics.json")}
        return {**found, **logs, **figures}

    recipe = tiny_recipe(photos, epochs=1, threads=1, **{"data.folds": 2, "final": "refit"}).to_toml()
    assert forked(run, recipe, tmp_path / "whole") == 0
    expected = content(tmp_path / "whole")
    assert "folds/2/metrics.json" in expected
    killed, fatal = 0, 3
    while forked(run, recipe, tmp_path / str(fatal), fatal) == -signal.SIGKILL:
        assert forked(run, recipe, tmp_path / str(fatal)) == 0
        assert content(tmp_path / str(fatal)) == expected, f"killed before write {fatal}"
        killed, fatal = killed + 1, fatal + 97  # Another sort of write, in another fold, each time.
    assert killed >= 3


@pytest.mark.parametrize(("fast", "threads"), [(False, 1), (True, 2)])
def test_a_run_is_the_same_whatever_its_process_did_before_fresh_and_resumed(
    photos: Path, tmp_path: Path, fast: bool, threads: int
) -> None:
    recipe = tiny_recipe(photos, epochs=2, threads=threads, fast=fast, **{"encoder.name": "test_resnet"})
    other = recipe.override(**{"encoder_training.loss": "cl", "encoder_training.batch_size": 5, "fast": not fast})
    assert forked(run, recipe.to_toml(), tmp_path / "fresh") == 0
    assert forked(run, recipe.to_toml(), tmp_path / "later", 0, other.to_toml()) == 0
    assert forked(run, recipe.to_toml(), tmp_path / "resumed", 48) == -signal.SIGKILL
    assert (tmp_path / "resumed" / "checkpoint" / "state.safetensors").exists()
    assert forked(run, recipe.to_toml(), tmp_path / "resumed") == 0
    run_recipe(recipe, tmp_path / "here")
    expected = content_of(tmp_path / "fresh")
    for name in ("later", "resumed", "here"):
        assert content_of(tmp_path / name) == expected, name


class Asking(Reporter):
    """Asks for something at every step."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.told = folder, list[str]()

    def step(self, loss: float, images: int) -> None:
        with pytest.raises(RunError) as caught:
            write_report(self.folder)
        self.told.append(str(caught.value))


def test_a_report_asked_for_while_a_run_is_in_work_is_a_sentence_and_changes_nothing(
    photos: Path, tmp_path: Path
) -> None:
    recipe, folder = tiny_recipe(photos, epochs=2, threads=1), tmp_path / "asked"
    asking = Asking(folder)
    run_recipe(recipe, folder, reporter=asking)
    run_recipe(recipe, tmp_path / "alone")
    assert content_of(folder) == content_of(tmp_path / "alone")
    assert len(asking.told) > 5
    assert set(asking.told) == {f"The run in {folder} is still running. Wait until it ends."}


# Predictions.


def test_predictions_killed_before_any_write_are_the_old_or_the_new_ones_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    assert forked(predict, tmp_path / "whole") == 0
    expected = {name: (tmp_path / "whole" / name).read_bytes() for name in names_below(tmp_path / "whole")}
    assert sorted(expected) == ["answers.csv", "answers.unreadable.csv"]
    fatal = 1
    while True:
        folder = tmp_path / str(fatal)
        folder.mkdir()
        (folder / "answers.csv").write_text("old")
        code = forked(predict, folder, fatal)
        assert (folder / "answers.csv").read_bytes() in (b"old", expected["answers.csv"])
        if code == 0:
            break
        assert code == -signal.SIGKILL
        predict(folder)
        assert {name: (folder / name).read_bytes() for name in names_below(folder)} == expected
        fatal += 1
    assert fatal >= 8


# Sweeps.


def test_a_sweep_killed_before_a_write_trains_no_recorded_cell_again_and_leaves_no_claim(
    photos: Path, tmp_path: Path
) -> None:
    cells = [tiny_recipe(photos, seed=seed) for seed in range(2)]
    run_sweep(cells, tmp_path / "whole", engine=Scripted())
    expected = names_below(tmp_path / "whole")
    fatal, recorded = 1, set[int]()
    while True:
        folder = tmp_path / str(fatal)
        code = forked(sweep, folder, [recipe.to_toml() for recipe in cells], fatal)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        path = folder / "records.jsonl"
        done = {record.seed for record in read_records(path)[0]} if path.exists() else set[int]()
        engine = Scripted()
        outcome = run_sweep(cells, folder, engine=engine)
        assert outcome.done == [record_of(recipe) for recipe in cells]
        assert set(engine.submitted) == {0, 1} - done
        assert len(path.read_text().splitlines()) == 2
        assert names_below(folder) == expected, f"killed before write {fatal}"
        assert not (folder / "claims").exists()
        recorded |= {len(done)}
        fatal += 2
    assert recorded == {0, 1, 2}
    assert not {name.rpartition("/")[2] for name in expected} & {"model.safetensors", "state.safetensors"}
    assert "model.safetensors" in RUN_FILES


@pytest.mark.parametrize("page", [comparison_page, sweep_page])
@pytest.mark.parametrize(
    "setting", [Setting(0.0, 0.0), Setting(60.0, 0.0), Setting(0.0, 7.0), Setting(60.0, 7.0)], ids=str
)
def test_a_report_asked_for_while_a_sweep_is_in_work_is_a_page_of_what_is_done(
    photos: Path, tmp_path: Path, setting: Setting, page: Callable[[Path, Path], str]
) -> None:
    loss = {"encoder_training.loss": setting.table, "data.scenario": "60:40,total=20"}
    cells = [tiny_recipe(photos, seed=seed, **loss) for seed in range(2)]
    engine, pages = Scripted(slots=1), list[str]()

    def look() -> None:
        write_report(tmp_path, sweep_page=page)
        pages.append((tmp_path / "report.html").read_text())

    engine.before_wait = look
    assert len(run_sweep(cells, tmp_path, engine=engine).done) == 2
    with (tmp_path / "records.jsonl").open("a") as records:
        records.write('{"format":1,"cell":"0')  # What a reader may see of a line that is being written.
    look()
    told = ["No run has come to its end yet.", "1 run on photos", "2 runs on photos"]
    assert [text in written for text, written in zip(told, pages, strict=True)] == [True] * 3
    assert not list(tmp_path.rglob(".*"))


def test_records_written_at_once_are_all_there(photos: Path, tmp_path: Path) -> None:
    records = [record_of(tiny_recipe(photos, seed=seed)) for seed in range(12)]
    threads = [
        threading.Thread(target=lambda part=part: [append_records(tmp_path / "records.jsonl", r) for r in part])
        for part in (records[:8], records[4:], records[::2])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found, notes = read_records(tmp_path / "records.jsonl")
    assert sorted(found, key=lambda record: record.seed) == records
    assert notes == []
