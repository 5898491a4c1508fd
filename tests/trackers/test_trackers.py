"""What trackers wrote, read back with TensorBoard's and MLflow's own readers, and from W&B's offline files."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lopsided.data.sources import source_from_arrays
from lopsided.errors import InputError, MissingDependencyError, RunError
from lopsided.facts import Fact, cautions
from lopsided.facts.log import Reporter
from lopsided.ranks import Ranks
from lopsided.recipe import Recipe, entries
from lopsided.runs import tracking
from lopsided.runs.engines import Ended
from lopsided.runs.folder import Run
from lopsided.runs.plan import Cell, train_cell
from lopsided.runs.records import Record
from lopsided.runs.run import Task, run_recipe, settle
from lopsided.runs.sweep import run_sweep
from lopsided.trackers import TrackedRun, Tracker, tracker
from lopsided.trackers.mlflow import MLflow
from lopsided.trackers.tracker import Epoch
from lopsided.trackers.wandb import WandB
from lopsided.training import checkpoint
from reporters import Ending
from tiny_boards import scalars
from tiny_command import command_here
from tiny_sweep import Heard
from wandb_files import read_runs

SMALL = {
    "encoder.name": "mlp-8",
    "encoder_training.epochs": 3,
    "encoder_training.batch_size": 8,
    "classifier.epochs": 2,
    "threads": 1,
    "compare_quick": False,
}
STEPS = {"encoder": [1, 2, 3], "classifier": [4, 5]}


def recipe_of(photos: Path, *track: str, **changes: Any) -> Recipe:
    return Recipe().override(**{**SMALL, "data.source": str(photos), "track": list(track), **changes})


def client(folder: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=folder.as_uri())


def mlflow_runs(folder: Path) -> dict[str, Any]:
    """The runs by name. No two have the same name."""
    found = client(folder)
    runs = found.search_runs([found.get_experiment_by_name("lopsided").experiment_id])
    by_name = {run.info.run_name: run for run in runs}
    assert len(by_name) == len(runs)
    return by_name


def history(folder: Path, run: Any, name: str) -> list[tuple[int, float]]:
    return sorted((point.step, point.value) for point in client(folder).get_metric_history(run.info.run_id, name))


def logged(run: Run) -> list[dict[str, Any]]:
    return [event for event in run.events() if event["event"] == "epoch"]


@pytest.mark.slow
def test_two_trackers_hold_the_epochs_the_recall_of_each_class_and_the_results(photos: Path, tmp_path: Path) -> None:
    runs = tmp_path / "mlruns"
    run = run_recipe(recipe_of(photos, "tensorboard", f"mlflow:{runs}"), tmp_path / "run")
    found = mlflow_runs(runs)["run"]
    points = scalars(run.folder / "tensorboard")
    assert (found.info.status, found.data.params["encoder.name"]) == ("FINISHED", "mlp-8")
    assert found.data.params["encoder_training.loss.name"] == "afcl"
    epochs = logged(run)
    for stage, steps in STEPS.items():
        own = [epoch for epoch in epochs if epoch["stage"] == stage]
        for name in ("loss", "val_uwa"):
            expected = [(step, pytest.approx(epoch[name])) for step, epoch in zip(steps, own, strict=True)]
            assert points[f"{stage}/{name}"] == expected
            assert history(runs, found, f"{stage}/{name}") == expected
    for row, label in enumerate(("cat", "dog")):
        expected = [(step, pytest.approx(epoch["val_recall"][row])) for step, epoch in enumerate(epochs, start=1)]
        assert points[f"val_recall/{label}"] == expected
        assert history(runs, found, f"val_recall/{label}") == expected
    assert run.metrics is not None
    uwa, dog = run.metrics["test"]["figures"]["uwa"], run.metrics["test"]["per_class"][1]["recall"]["value"]
    assert points["test/uwa_low"] == [(5, pytest.approx(uwa["low"]))]
    assert points["test_recall/dog"] == [(5, pytest.approx(dog))]
    assert found.data.metrics["test/uwa_high"] == uwa["high"]
    assert found.data.metrics["test_recall/dog"] == dog
    kept = {file.path for file in client(runs).list_artifacts(found.info.run_id)}
    assert kept == {
        "recipe.toml", "metrics.json", "predictions.csv", "log.jsonl", "model.json", "model.safetensors",
    }  # fmt: skip
    assert any(event.get("text", "").startswith("Tracked by tensorboard, mlflow:") for event in run.events())


def test_a_resumed_run_continues_in_its_trackers_and_no_point_is_there_twice(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "TIMES_AS_LONG", 0.0)  # A checkpoint after each epoch.
    runs, boards = tmp_path / "mlruns", tmp_path / "boards"
    recipe = recipe_of(photos, f"tensorboard:{boards}", f"mlflow:{runs}")
    for stage, error, status in (("encoder", KeyboardInterrupt(), "KILLED"), ("classifier", OSError(), "FAILED")):
        with pytest.raises(type(error)):
            run_recipe(recipe, tmp_path / "run", resume=True, reporter=Ending("epoch", (stage, 2), error=error))
        assert mlflow_runs(runs)["run"].info.status == status
    late = f"mlflow:{tmp_path / 'late'}"  # A tracker that comes later gets the epochs before it, too.
    run = run_recipe(recipe.override(track=[*recipe.track, late]), tmp_path / "run", resume=True)
    assert [epoch["epoch"] for epoch in logged(run)] == [1, 2, 2, 3, 1, 2, 2]
    points, found = scalars(boards / "run"), mlflow_runs(runs)["run"]
    for stage, steps in STEPS.items():
        assert [step for step, _ in points[f"{stage}/loss"]] == steps
        assert [step for step, _ in history(runs, found, f"{stage}/val_uwa")] == steps
        assert history(tmp_path / "late", mlflow_runs(tmp_path / "late")["run"], f"{stage}/loss") == [
            (step, pytest.approx(value)) for step, value in points[f"{stage}/loss"]
        ]
    assert [step for step, _ in points["val_recall/dog"]] == [1, 2, 3, 4, 5]
    assert found.info.status == "FINISHED"


def test_trackers_of_a_run_that_was_killed_after_its_last_file_are_ended_when_it_is_asked_for(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(photos, f"mlflow:{tmp_path / 'mlruns'}")
    with monkeypatch.context() as patch:
        patch.setattr(tracking.Tracking, "finish", lambda self: None)
        run_recipe(recipe, tmp_path / "run")
    assert mlflow_runs(tmp_path / "mlruns")["run"].info.status == "RUNNING"
    for _ in range(2):
        run_recipe(recipe, tmp_path / "run", resume=True)
        found = mlflow_runs(tmp_path / "mlruns")["run"]
        assert found.info.status == "FINISHED"
        assert len(history(tmp_path / "mlruns", found, "test/uwa")) == 1


def test_a_tracker_that_is_added_to_a_finished_run_gets_its_epochs_and_results_once(
    photos: Path, tmp_path: Path
) -> None:
    boards, runs = tmp_path / "boards", tmp_path / "mlruns"
    recipe = recipe_of(photos, **{"encoder_training.epochs": 1, "classifier.epochs": 1})
    run = run_recipe(recipe, tmp_path / "run")
    for track in ([f"tensorboard:{boards}"], [f"tensorboard:{boards}", f"mlflow:{runs}"]):
        for _ in range(2):
            again = run_recipe(recipe.override(track=track), tmp_path / "run", resume=True)
            assert again.metrics == run.metrics
    points, found = scalars(boards / "run"), mlflow_runs(runs)["run"]
    assert [step for step, _ in points["encoder/loss"]] == [1]
    assert len(points["test/uwa"]) == len(history(runs, found, "test/uwa")) == 1
    assert found.info.status == "FINISHED"
    told = [event["text"] for event in run.events() if event.get("text", "").startswith("Tracked by")]
    assert told == [f"Tracked by tensorboard:{boards}.", f"Tracked by mlflow:{runs}."]


def test_folds_are_child_runs_and_sub_folders(photos: Path, tmp_path: Path) -> None:
    runs = tmp_path / "mlruns"
    changes = {"data.folds": 2, "final": "refit", "encoder_training.epochs": 1, "classifier.epochs": 1}
    run = run_recipe(recipe_of(photos, "tensorboard", f"mlflow:{runs}", **changes), tmp_path / "run")
    found = mlflow_runs(runs)
    assert set(found) == {"run", "fold 1", "fold 2", "all"}
    parents = {name: each.data.tags.get("mlflow.parentRunId") for name, each in found.items()}
    parent = found["run"].info.run_id
    assert parents == {"run": None, "fold 1": parent, "fold 2": parent, "all": parent}
    assert {each.info.status for each in found.values()} == {"FINISHED"}
    boards = run.folder / "tensorboard"
    assert {path.name for path in boards.iterdir() if path.is_dir()} == {"fold-1", "fold-2", "all"}
    assert run.metrics is not None
    assert scalars(boards)["test/uwa"] == [(0, pytest.approx(run.metrics["test"]["figures"]["uwa"]["value"]))]
    assert "encoder/loss" not in scalars(boards)
    assert [step for step, _ in scalars(boards / "fold-2")["classifier/loss"]] == [2]


@pytest.fixture
def no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is logged in to W&B, and nothing says where and how it writes."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_PROJECT", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "no-settings"))
    monkeypatch.setenv("WANDB__DISABLE_STATS", "true")  # No look at processors and disks, which a test does not need.


@pytest.mark.slow
@pytest.mark.usefixtures("no_login")
def test_a_run_with_folds_is_a_group_of_offline_runs_in_wandb(photos: Path, tmp_path: Path) -> None:
    changes = {"data.folds": 2, "final": "refit", "encoder_training.epochs": 1, "classifier.epochs": 1}
    run = run_recipe(recipe_of(photos, f"wandb:{tmp_path / 'out'}", **changes), tmp_path / "run")
    found = read_runs(tmp_path / "out" / "wandb")
    assert set(found) == {"run", "fold 1", "fold 2", "all"}
    assert {each.group for each in found.values()} == {found["run"].group}
    assert found["run"].group.startswith("run ")
    assert {name: each.kind for name, each in found.items()} == {
        "run": "folds", "fold 1": "fold", "fold 2": "fold", "all": "fold",
    }  # fmt: skip
    assert {(each.project, each.exit_code) for each in found.values()} == {("lopsided", 0)}
    assert found["run"].config["encoder"]["name"] == "mlp-8"
    fold = Run.open(run.folder / "folds" / "2")
    epochs = logged(fold)
    assert [epoch["stage"] for epoch in epochs] == ["encoder", "classifier"]
    for step, epoch in enumerate(epochs, start=1):
        assert found["fold 2"].points(f"{epoch['stage']}/loss") == [(step, pytest.approx(epoch["loss"]))]
    for row, label in enumerate(("cat", "dog")):
        expected = [(step, pytest.approx(epoch["val_recall"][row])) for step, epoch in enumerate(epochs, start=1)]
        assert found["fold 2"].points(f"val_recall/{label}") == expected
    assert run.metrics is not None
    uwa, dog = run.metrics["test"]["figures"]["uwa"], run.metrics["test"]["per_class"][1]["recall"]["value"]
    assert found["run"].summary["test/uwa_low"] == pytest.approx(uwa["low"])
    assert found["run"].summary["test_recall/dog"] == pytest.approx(dog)
    files = {"recipe.toml", "metrics.json", "predictions.csv", "log.jsonl"}
    assert found["run"].files >= files | {"model.json", "model.safetensors"}
    assert found["fold 2"].files >= files
    assert "model.safetensors" not in found["fold 2"].files
    copies = list((tmp_path / "out" / "wandb").glob("offline-run-*/files/metrics.json"))
    assert (run.folder / "metrics.json").read_bytes() in [copy.read_bytes() for copy in copies]


@pytest.mark.slow
@pytest.mark.usefixtures("no_login")
def test_a_run_that_continues_replaces_its_offline_run_in_wandb_unless_that_was_sent(tmp_path: Path) -> None:
    def start(key: str | None, *history: Epoch) -> tuple[WandB, str]:
        tracker = WandB(str(tmp_path))
        return tracker, tracker.start(TrackedRun("run", tmp_path / "run", recipe="x", key=key, history=history))

    tracker, key = start(None)
    for step in (1, 2):
        tracker.epoch(step, "encoder", {"loss": 1 / step})
        tracker.recall(step, "val", {"dog": step / 4})
    tracker.end(2, "interrupted", {})
    assert read_runs(tmp_path)["run"].exit_code == 255
    tracker, again = start(key, Epoch(1, "encoder", {"loss": 1.0}, {"dog": 0.25}))
    tracker.epoch(2, "encoder", {"loss": 0.25})
    tracker.end(2, "finished", {"test/uwa": 0.5})
    assert again == key
    found = read_runs(tmp_path)["run"]
    assert found.points("encoder/loss") == [(1, 1.0), (2, 0.25)]
    assert found.points("val_recall/dog") == [(1, 0.25)]
    assert (found.summary["test/uwa"], found.exit_code) == (0.5, 0)
    (sent,) = tmp_path.glob("wandb/offline-run-*")
    (sent / f"run-{key}.wandb.synced").touch()
    sent = sent.rename(sent.with_name(f"offline-run-20200101_000000-{key}"))
    elsewhere = tmp_path / "wandb" / "offline-run-20200101_000000-other"
    elsewhere.mkdir()
    start("../" + key)[0].end(0, "failed", {})
    start(key)[0].end(0, "failed", {})
    assert sent.is_dir()
    assert elsewhere.is_dir()


def test_a_sweep_and_its_cells_are_a_group_in_wandb_and_a_run_alone_is_none(tmp_path: Path) -> None:
    from lopsided.trackers.wandb import _place_in_group

    sweep = TrackedRun("sweep", tmp_path / "sweep", parameters={"cells": 2})
    cell = TrackedRun("cell", sweep.folder / "cells" / "a", recipe="x", parent="id", parent_folder=sweep.folder)
    assert _place_in_group(sweep, "id") == {"group": "sweep id", "job_type": "sweep"}
    assert _place_in_group(cell, "other") == {"group": "sweep id", "job_type": "cell"}
    assert _place_in_group(TrackedRun("run", tmp_path / "run", parameters={"data.folds": None}, recipe="x"), "id") == {}


@pytest.mark.usefixtures("no_login")
def test_wandb_is_offline_without_a_login_and_as_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lopsided.trackers.wandb import _mode

    class Settings:
        mode, base_url = "online", "https://figures.example.org"

    assert _mode(Settings) == "offline"
    (tmp_path / "netrc").write_text("machine figures.example.org login user password key\n")
    (tmp_path / "other").write_text("machine example.org login user password key\n")
    for name, mode in (("netrc", "online"), ("other", "offline")):
        (tmp_path / name).chmod(0o600)
        monkeypatch.setenv("NETRC", str(tmp_path / name))
        assert _mode(Settings) == mode
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert _mode(Settings) == "online"
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setattr(Settings, "mode", "disabled")  # As ``wandb disabled`` sets it.
    assert _mode(Settings) == "disabled"


class Inline:
    """An engine that trains the cells in this process."""

    slots = 1

    def open(self, folder: Path, *, models: bool = False) -> None:
        self.folder, self.waiting = folder, list[Cell]()

    def submit(self, cell: Cell) -> None:
        self.waiting.append(cell)

    def wait(self, seconds: float) -> list[Ended]:
        cell = self.waiting.pop()
        line, error = train_cell(cell.recipe.to_toml(), str(self.folder / cell.path), 1)
        return [Ended(cell, Record.from_json(line) if line else None, error)]

    def close(self) -> None:
        pass


def test_cells_of_a_sweep_are_child_runs_and_a_later_command_adds_to_the_same_parent(
    photos: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "mlruns"
    changes = {"encoder_training.epochs": 1, "classifier.epochs": 1}
    base = recipe_of(photos, "tensorboard", f"mlflow:{runs}", **changes)
    cells = [Cell.of(base.override(seed=seed), "mine") for seed in (0, 1)]
    for number in (1, 2):
        assert run_sweep(cells[:number], tmp_path / "sweep", engine=Inline()).failed == []
    found = mlflow_runs(runs)
    parent = found.pop("sweep")
    assert parent.info.status == "FINISHED"
    assert {each.data.tags["mlflow.parentRunId"] for each in found.values()} == {parent.info.run_id}
    assert set(found) == {
        f"all images {cell.recipe.loss.label} seed {cell.recipe.seed} {cell.key[:8]}" for cell in cells
    }
    folders = sorted(path for path in (tmp_path / "sweep" / "tensorboard").iterdir() if path.is_dir())
    assert [len(scalars(folder)["test/uwa"]) for folder in folders] == [1, 1]
    records = [json.loads(line) for line in (tmp_path / "sweep" / "records.jsonl").read_text().splitlines()]
    assert parent.data.params["cells"] == "1"
    assert len(records) == 2
    assert "uwa/mine" in parent.data.metrics
    view, late = Heard(), f"tensorboard:{tmp_path / 'late'}"
    more = [Cell.of(cell.recipe.override(track=[*cell.recipe.track, late]), "mine") for cell in cells]
    assert run_sweep(more, tmp_path / "sweep", engine=Inline(), view=view).skipped == 2
    assert view.notes == [
        f"2 finished cells are not sent to {late}: a tracker receives the cells that are trained from now on."
    ]
    assert not (tmp_path / "late").exists()


@pytest.mark.parametrize("tracker", ["mlflow", "tensorboard", "wandb"])
def test_a_folder_that_cannot_be_written_is_one_warning_and_the_run_is_the_same(
    tracker: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lopsided.runs.progress import Told

    (tmp_path / "file").write_text("not a folder")
    text = f"{tracker}:{tmp_path / 'file' / 'runs'}"
    run = run_recipe(recipe_of(photos, text), tmp_path / "run", reporter=Told())
    said = [line for line in capsys.readouterr().err.splitlines() if "tracker" in line]
    assert len(said) == 1
    assert said[0].startswith(f"warning: The tracker {text} failed and is left out; the run continues without it (")
    assert run.metrics is not None
    assert not any("tracker" in warning for warning in run.metrics["warnings"])
    assert sum("tracker" in event.get("text", "") for event in run.events()) == 1


class Fragile(Tracker):
    """Fails in the method that its place names."""

    calls: list[str] = []  # noqa: RUF012

    def start(self, run: TrackedRun) -> str:
        self._call("start")
        return "key"

    def epoch(self, step: int, stage: str, figures: Mapping[str, float]) -> None:
        self._call("epoch")

    def recall(self, step: int, split: str, recall: Mapping[str, float]) -> None:
        self._call("recall")

    def artifacts(self, paths: Sequence[Path]) -> None:
        self._call("artifacts")

    def end(self, step: int, status: str, figures: Mapping[str, float]) -> None:
        self._call("end")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if Path(self.place or "").name == name:
            raise RuntimeError("broken\nby itself")


@pytest.mark.parametrize("method", ["start", "epoch", "recall", "artifacts", "end"])
def test_an_exception_of_a_tracker_ends_the_tracker_and_not_the_others(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker.TRACKERS, "find", lambda name: Fragile)
    monkeypatch.setattr(Fragile, "calls", [])
    warnings: list[Fact] = []
    trackers = tracking.Trackers([f"fragile:{method}", "fragile:sound"], tmp_path, warnings.append)
    trackers.start(TrackedRun("run", tmp_path))
    trackers.epoch(tracking._epoch(1, {"stage": "encoder", "loss": 1.0, "val_recall": [1.0, None]}, ["a", "b"]))
    trackers.end(1, "finished", {}, {"test": {"a": 1.0}}, [Path(__file__)])
    order = ["start", "epoch", "recall", "recall", "artifacts", "end"]
    assert trackers.running == ["fragile:sound"]
    assert sorted(Fragile.calls) == sorted([*order, *order[: order.index(method) + 1]])
    assert warnings == [cautions.tracker_failed(f"fragile:{method}", "RuntimeError: broken by itself")]


def test_an_unknown_tracker_a_missing_package_and_a_server_are_refused_before_anything_is_written(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        InputError, match=r"^tracker must be one of .tensorboard., .mlflow., .wandb., got 'mlfow'\. Did you mean m"
    ):
        run_recipe(recipe_of(photos, "mlfow"), tmp_path / "run")
    with pytest.raises(InputError, match=r"a folder or sqlite:///FILE, got 'https://.*Set MLFLOW_TRACKING_URI"):
        run_recipe(recipe_of(photos, "mlflow:https://example.org"), tmp_path / "run")
    monkeypatch.setattr(MLflow, "needs", ("no_such_module",))
    with pytest.raises(
        MissingDependencyError, match=r"^--track mlflow needs the package no_such_module, which is not "
    ):
        run_recipe(recipe_of(photos, "mlflow"), tmp_path / "run")
    with pytest.raises(MissingDependencyError, match=r"Run pip install 'lopsided\[mlflow\]'\.$"):
        run_sweep([recipe_of(photos, "mlflow")], tmp_path / "run", engine=Inline())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["", ":place", "mlflow:", "two words", "mlflow:a\nb"])
def test_a_recipe_refuses_what_is_no_tracker(text: str) -> None:
    with pytest.raises(InputError, match=r"^track must be a list of trackers, such as \[\"tensorboard\""):
        Recipe().override(track=[text])


def test_settling_makes_places_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("WANDB_DIR", raising=False)
    texts = ["tensorboard", "tensorboard:logs", "mlflow", "mlflow:mlruns", "mlflow:sqlite:///a.db", "wandb", "wandb:b"]
    expected = ("tensorboard", f"tensorboard:{tmp_path}/logs", f"mlflow:{tmp_path}/mlruns")
    others = (f"mlflow:sqlite:///{tmp_path}/a.db", f"wandb:{tmp_path}", f"wandb:{tmp_path}/b")
    assert settle(Recipe().override(track=texts), "x").track == (*expected, *others)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@localhost:1")
    monkeypatch.setenv("WANDB_DIR", "/elsewhere")
    own = ("mlflow", "wandb")
    assert settle(Recipe().override(track=own), "x").track == own  # No secret gets into a file.


def test_a_key_of_a_damaged_run_folder_does_not_lead_tensorboard_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "run" / "tensorboard").mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "run" / tracking.TRACKERS).write_text(
        json.dumps({"keys": {"tensorboard": "../../elsewhere"}, "ended": False})
    )
    trackers = tracking.Trackers(["tensorboard"], tmp_path / "run", pytest.fail)
    trackers.start(TrackedRun("run", tmp_path / "run"))
    trackers.end(0, "finished", {"test/uwa": 0.5})
    assert not list(elsewhere.iterdir())
    assert scalars(tmp_path / "run" / "tensorboard") == {"test/uwa": [(0, 0.5)]}
    (tmp_path / "run" / tracking.TRACKERS).write_text("[1, 2")
    assert tracking.read_keys(tmp_path / "run") == ({}, False)


def test_class_names_that_mlflow_refuses_get_names_of_their_own(tmp_path: Path) -> None:
    tracker = MLflow(str(tmp_path / "mlruns"))
    tracker.start(TrackedRun("run", tmp_path))
    values = {"naïve": 0.1, "na%ve": 0.2, "a/../b": 0.3, "": 0.4}
    tracker.recall(1, "val", values)
    tracker.end(1, "finished", {})
    found = mlflow_runs(tmp_path / "mlruns")["run"].data.metrics
    assert sorted(found.values()) == [0.1, 0.2, 0.3, 0.4]
    assert found["val_recall/na_ve"] == 0.1


def test_only_the_first_rank_writes_and_tracks(tmp_path: Path) -> None:
    watcher, second = Reporter(), Ranks()
    second.rank = 1
    tracked = Recipe().override(track=["tensorboard"])
    source = source_from_arrays(np.zeros((2, 1, 1), np.uint8))
    with Task(tmp_path, tracked, source, None, False, watcher, second, ()).begun(lambda: False) as found:
        assert found is watcher
    assert not list(tmp_path.iterdir())
    with Task(tmp_path, tracked, source, None, False, watcher, Ranks(), ()).begun(lambda: False) as found:
        assert isinstance(found, tracking.Tracking)
        (tmp_path / "metrics.json").write_text("{}")


def test_a_run_that_fails_before_there_is_something_to_continue_leaves_its_folder_empty(tmp_path: Path) -> None:
    source = source_from_arrays(np.zeros((2, 1, 1), np.uint8))
    task = Task(tmp_path, Recipe(), source, None, False, None, Ranks(), ())
    for kept, left in ((tmp_path, ["recipe.toml"]), (tmp_path / "checkpoint", [])):
        with pytest.raises(RunError), task.begun(kept.exists):
            raise RunError("no memory")
        assert [path.name for path in tmp_path.iterdir()] == left


def blocks(language: str) -> list[str]:
    page = Path(__file__).parents[2] / "docs" / "trackers.md"
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_a_third_tracker_is_one_file_and_one_entry_point(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    info = site / "lopsided_csv-0.1.dist-info"
    info.mkdir(parents=True)
    (site / "csvtracker.py").write_text(blocks("python")[0], encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lopsided-csv\nVersion: 0.1\n")
    (point,) = tomllib.loads(blocks("toml")[0])["project"]["entry-points"]["lopsided.trackers"].items()
    (info / "entry_points.txt").write_text(f"[lopsided.trackers]\n{' = '.join(point)}\nbroken = csvtracker:csv\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(entries, "_points", entries._points.__wrapped__)
    monkeypatch.setattr(tracker.TRACKERS, "_loaded", {})
    monkeypatch.setattr(checkpoint, "TIMES_AS_LONG", 0.0)
    assert tracker.TRACKERS.names() == ["tensorboard", "mlflow", "wandb", "broken", "csv"]
    recipe = recipe_of(photos, "csv")
    with pytest.raises(OSError, match="broken"):
        run_recipe(recipe, tmp_path / "run", reporter=Ending("epoch", ("encoder", 2), error=OSError("broken")))
    run = run_recipe(recipe, tmp_path / "run", resume=True)
    rows = [row.split(",") for row in (run.folder / "figures.csv").read_text().splitlines()]
    last = {(epoch["stage"], epoch["epoch"]): epoch for epoch in logged(run)}
    assert [(int(step), float(value)) for step, name, value in rows if name == "encoder/loss"] == [
        (step, last["encoder", step]["loss"]) for step in (1, 2, 3)
    ]
    assert sum(name == "test_recall/dog" for _, name, _ in rows) == 1
    with pytest.raises(InputError, match=r"^The tracker 'broken' of the package lopsided-csv must be a class derived "):
        tracker.check(["broken"])


def test_a_run_that_cannot_be_continued_leaves_no_tensorboard_that_blocks_its_folder(
    photos: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(photos, "tensorboard", **{"encoder_training.lr": 1e30})
    with pytest.raises(RunError, match=r"NaN|finite"):
        run_recipe(recipe, tmp_path / "run")
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert run_recipe(recipe_of(photos), tmp_path / "run").finished


@pytest.mark.slow
def test_trackers_of_a_recipe_file_are_shown_and_act_only_if_the_user_names_them(photos: Path, tmp_path: Path) -> None:
    gift = tmp_path / "gift.toml"
    gift.write_text(recipe_of(photos, "tensorboard").to_toml())
    fit = ["fit", "--recipe", gift, "--out"]
    ended = command_here(*fit, tmp_path / "silent")
    assert ended.code == 0
    assert "To use them, add --track tensorboard." in ended.err
    assert not (tmp_path / "silent" / "tensorboard").exists()
    ended = command_here(*fit, tmp_path / "asked", "--track", "tensorboard")
    assert "To use them" not in ended.err
    assert (tmp_path / "asked" / "tensorboard").is_dir()
    again = command_here("fit", "--out", tmp_path / "asked", "--resume")  # A folder may be a gift, too.
    assert (again.code, "add --track tensorboard" in again.err) == (0, True)
    compare = ["compare", photos, "--recipe", gift, "--methods", "cl", "--out", tmp_path / "compared", "--seeds", "1"]
    ended = command_here(*compare)
    assert (ended.code, "add --track tensorboard" in ended.err) == (0, True)
    assert not list(tmp_path.glob("compared/**/tensorboard"))


def test_trackers_can_be_named_in_the_environment(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOPSIDED_TRACK", f"tensorboard mlflow:{tmp_path / 'runs'}")
    (tmp_path / "recipe.toml").write_text(recipe_of(photos).to_toml())
    assert command_here("fit", "--recipe", tmp_path / "recipe.toml", "--out", tmp_path / "run").code == 0
    assert (tmp_path / "run" / "tensorboard").is_dir()
    assert mlflow_runs(tmp_path / "runs").keys() == {"run"}


def test_an_mlflow_folder_that_keeps_files_elsewhere_is_left_out(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # Else MLflow takes it only after a tracker ran.
    gift = tmp_path / "gift"
    gift.mkdir()
    client(gift).create_experiment("lopsided", artifact_location="http://127.0.0.1:9/api/2.0/mlflow-artifacts")
    run = run_recipe(recipe_of(photos, f"mlflow:{gift}"), tmp_path / "run")
    assert run.finished
    assert sum("not on this machine" in event.get("text", "") for event in run.events()) == 1
