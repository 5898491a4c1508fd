from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lopsided.data.prepare import Sources
from lopsided.errors import DataError, InputError, RunError
from lopsided.facts import notes
from lopsided.inference.scorer import Predictions
from lopsided.recipe import Recipe
from lopsided.runs.folder import Run
from lopsided.runs.reopen import open_model, trained_on
from lopsided.runs.results import write_tables
from lopsided.runs.run import _made, run_recipe, settle
from reporters import Ending
from tiny import write_photos

SMALL = Recipe().override(
    **{
        "encoder.name": "mlp",
        "encoder_training.epochs": 1,
        "encoder_training.batch_size": 8,
        "classifier.epochs": 1,
        "threads": 1,
    }
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Run:
    return run_recipe(SMALL, tmp_path_factory.mktemp("runs") / "run", data=photos)


def test_settling_makes_paths_absolute_and_leaves_names_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = Recipe().override(**{"encoder.weights": "w.safetensors", "data.source": "mine"})
    assert settle(recipe).data.source == str(tmp_path / "mine")
    assert settle(recipe, "other").data.source == str(tmp_path / "other")
    assert settle(recipe).encoder.weights == str(tmp_path / "w.safetensors")
    assert settle(recipe, "fashion-mnist-tops").data.source == "fashion-mnist-tops"
    assert settle(Recipe(), "x").encoder.weights == "none"
    with pytest.raises(InputError, match=r"^DATA is missing, and the recipe names no source\."):
        settle(Recipe())


def test_a_finished_run_opens_with_all_that_was_written(run: Run) -> None:
    assert run.finished
    assert Run.open(run.folder) == run
    assert {row["split"] for row in run.predictions()} == {"val", "test"}
    assert next(iter(run.events()))["event"] == "start"
    _, card = open_model(run.folder, "cpu")
    assert card.classes == ("cat", "dog")


def test_a_torn_line_of_the_log_is_passed_over(run: Run, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"event": "start"}\n{"event": "ep\n{"event": "end"}\n')
    assert [event["event"] for event in Run(tmp_path, run.recipe, None).events()] == ["start", "end"]


def test_a_folder_without_a_recipe_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^RUN must be the folder of a run, got .*, which has no recipe\.toml\.$"):
        Run.open(tmp_path)
    with pytest.raises(RunError, match=r"which does not exist\.$"):
        Run.open(tmp_path / "gone")


def test_what_a_killed_process_left_without_a_name_does_not_stand_in_the_way(photos: Path, tmp_path: Path) -> None:
    left = tmp_path / ".recipe.toml.12345.tmp"
    left.write_text("half of a rec")
    assert run_recipe(SMALL, tmp_path, data=photos).finished
    assert not left.exists()


def test_a_lock_that_a_process_left_after_its_last_file_is_removed_when_the_run_is_asked_for(
    run: Run, photos: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(run.folder, tmp_path / "run"))
    (folder / ".lock").write_text("left behind by a crash")
    assert run_recipe(SMALL, folder, data=photos, resume=True).finished
    assert not (folder / ".lock").exists()


def test_resume_may_change_what_does_not_decide_the_outcome(run: Run, photos: Path) -> None:
    other = SMALL.override(description="the same", threads=2, **{"data.cache": "none"})
    assert run_recipe(other, run.folder, data=photos, resume=True) == run
    with pytest.raises(RunError, match=r"has seed = 0, but the recipe has 1\."):
        run_recipe(SMALL.override(seed=1), run.folder, data=photos, resume=True)


def test_a_scenario_is_drawn_by_the_runs_seed_unless_every_run_is_to_have_the_same(photos: Path) -> None:
    def names(seed: int, redraw: bool) -> tuple[str, ...]:
        changes = {"data.scenario": "80:20,total=20", "data.redraw": redraw, "data.source": str(photos)}
        source = Sources().open(SMALL.override(seed=seed, **changes))[0]
        assert source.counts() == {"cat": 16, "dog": 4}
        return source.names

    assert names(0, True) == names(0, True)
    assert names(0, True) != names(1, True)
    assert names(0, False) == names(1, False) == names(0, True)


def test_a_scenario_is_drawn_from_the_readable_images(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", {"cat": 12, "dog": 6})
    (folder / "dog" / "000.png").write_bytes(b"")
    recipe = SMALL.override(
        **{"data.source": str(folder), "data.skip_unreadable": True, "data.scenario": "50:50,total=10"}
    )
    source = Sources().open(recipe)[0]
    assert source.counts() == {"cat": 5, "dog": 5}
    assert source.unreadable == (("dog/000.png", "the file is empty"),)


def test_groups_reach_the_split_the_intervals_and_the_predictions(photos: Path, tmp_path: Path) -> None:
    lines = ["path,label,patient"]
    for name, number in (("cat", 20), ("dog", 10)):
        lines += [f"{name}/{i:03d}.png,{name},{name}{i // 2}" for i in range(number)]
    table = photos / "table.csv"
    table.write_text("\n".join(lines))
    finished = run_recipe(SMALL.override(**{"data.group": "patient"}), tmp_path / "run", data=table)
    assert finished.metrics is not None
    groups = {split: set() for split in ("val", "test")}
    for row in finished.predictions():
        name = Path(row["name"])
        assert row["group"] == f"{name.parent.name}{int(name.stem) // 2}"
        groups[row["split"]].add(row["group"])
    assert not groups["val"] & groups["test"]
    assert finished.metrics["test"]["num_groups"] == len(groups["test"])
    assert finished.metrics["leaks"] == {"groups": [], "duplicates": []}


def test_a_leak_is_recorded(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", {"cat": 4, "dog": 4})
    lines = ["path,label,group,split"]
    for name in ("cat", "dog"):
        lines += [f"{name}/{i:03d}.png,{name},{name},{'train' if i < 2 else 'test'}" for i in range(4)]
    (folder / "table.csv").write_text("\n".join(lines))
    (folder / "cat" / "003.png").write_bytes((folder / "cat" / "000.png").read_bytes())
    finished = run_recipe(SMALL.override(**{"data.val": 0.0}), tmp_path / "run", data=folder / "table.csv")
    assert finished.metrics is not None
    assert finished.metrics["leaks"] == {
        "groups": ["cat", "dog"],
        "duplicates": [["cat/000.png", "train", "cat/003.png", "test"]],
    }
    assert finished.metrics["warnings"]


def test_a_run_knows_what_it_was_trained_on(run: Run, photos: Path, tmp_path: Path) -> None:
    assert trained_on(run.folder, photos)
    assert not trained_on(run.folder, tmp_path)
    assert not trained_on(tmp_path, photos)


def test_the_probabilities_in_the_table_are_those_of_the_model_to_nine_digits(run: Run, photos: Path) -> None:
    from lopsided.data.images import FileImages
    from lopsided.inference.scorer import Scorer

    rows = run.predictions()
    model, card = open_model(run.folder, "cpu")
    expected = Scorer(model, card).images(FileImages([photos / row["name"] for row in rows]))
    found = np.array([[float(row["p:cat"]), float(row["p:dog"])] for row in rows])
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_name_that_is_not_utf_8_is_written_back_byte_by_byte(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", {"cat": 8, "dog": 8})
    odd = b"\xff.png"
    for name in ("cat", "dog"):
        for path in sorted((folder / name).iterdir()):
            path.rename(path.with_name(path.stem + odd.decode(errors="surrogateescape")))
    finished = run_recipe(SMALL, tmp_path / "run", data=folder)
    assert odd in (tmp_path / "run" / "predictions.csv").read_bytes()
    assert all((folder / row["name"]).exists() for row in finished.predictions())


def test_the_record_is_json_without_nan(run: Run) -> None:
    def refuse(text: str) -> None:
        raise AssertionError(text)

    assert json.loads((run.folder / "metrics.json").read_text(), parse_constant=refuse) == run.metrics


def write_split(folder: Path, splits: dict[str, int]) -> Path:
    """Cats and dogs in split folders, no two images alike."""
    start = 0
    for split, number in splits.items():
        write_photos(folder / split, {"cat": number, "dog": number}, start=start)
        start += number
    return folder


def test_an_unexpected_error_before_the_first_checkpoint_leaves_nothing(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lopsided.training.methods import Trainer

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Trainer, "run", fail)
    with pytest.raises(ZeroDivisionError):
        run_recipe(SMALL, tmp_path / "deep" / "run", data=photos)
    assert list(tmp_path.iterdir()) == []


def test_a_given_val_split_is_used_for_nothing_when_val_is_0(tmp_path: Path) -> None:
    folder = write_split(tmp_path / "photos", {"train": 6, "val": 3, "test": 2})
    done = run_recipe(SMALL.override(**{"data.val": 0.0, "data.test": 0.0}), tmp_path / "run", data=folder)
    assert done.metrics is not None
    assert done.metrics["val"] is None
    assert done.metrics["counts"]["train"] == {"cat": 6, "dog": 6}
    assert done.metrics["counts"]["test"] == {"cat": 2, "dog": 2}
    assert notes.unused_validation(6) in done.facts()
    used = run_recipe(SMALL, tmp_path / "used", data=folder)
    assert used.metrics is not None
    assert used.metrics["counts"]["val"] == {"cat": 3, "dog": 3}
    assert "unused_validation" not in [fact.kind for fact in used.facts()]


def test_resume_refuses_other_images_under_the_same_names(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", {"cat": 8, "dog": 8})
    with pytest.raises(KeyboardInterrupt):
        run_recipe(SMALL, tmp_path / "run", data=folder, reporter=Ending("stage", "classifier"))
    original = (folder / "cat" / "000.png").read_bytes()
    (folder / "cat" / "000.png").write_bytes((folder / "cat" / "001.png").read_bytes())
    with pytest.raises(RunError, match=r"^The run started with other images, labels or splits\."):
        run_recipe(SMALL, tmp_path / "run", data=folder, resume=True)
    (folder / "cat" / "000.png").write_bytes(original)
    assert run_recipe(SMALL, tmp_path / "run", data=folder, resume=True).finished


def test_what_is_split_otherwise_than_it_comes_need_not_come_split_well(tmp_path: Path) -> None:
    folder = write_split(tmp_path / "photos", {"test": 8})
    recipe = SMALL.override(**{"data.source": str(folder)})
    with pytest.raises(DataError, match=r"^a source with splits must have a train split, got only test in "):
        Sources().open(recipe)
    assert len(Sources().open(recipe.override(**{"data.split": "stratified"}))[0]) == 16


def test_skipping_unreadable_images_must_leave_every_class_in_every_given_split(tmp_path: Path) -> None:
    folder = write_split(tmp_path / "photos", {"train": 4, "test": 1})
    (next((folder / "test" / "dog").iterdir())).write_bytes(b"")
    recipe = SMALL.override(**{"data.source": str(folder), "data.skip_unreadable": True})
    with pytest.raises(DataError, match=r"^labels must be the same in train and test, got 'dog' only in train of "):
        Sources().open(recipe)


def test_skipping_unreadable_images_is_counted_and_takes_in_those_that_are_missing(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", {"cat": 4, "dog": 4})
    rows = [f"{name}/{i:03d}.png,{name}" for name in ("cat", "dog") for i in range(5)]
    (folder / "table.csv").write_text("\n".join(["path,label", *rows]))
    told: list[tuple[int, int]] = []
    recipe = SMALL.override(**{"data.source": str(folder / "table.csv"), "data.skip_unreadable": True})
    source = Sources().open(recipe, lambda done, total: told.append((done, total)))[0]
    assert told == [(i, 10) for i in range(1, 11)]
    assert [name for name, _ in source.unreadable] == ["cat/004.png", "dog/004.png"]


def test_a_recipe_that_cannot_be_read_is_named_and_tells_nothing_about_the_data(
    run: Run, photos: Path, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f"later = 1\n{run.recipe.to_toml()}")
    with pytest.raises(RunError) as caught:
        Run.open(tmp_path)
    assert str(caught.value).startswith(f"recipe {path}: A recipe has no field 'later'.")
    assert "; if another version wrote the run, use that version." in str(caught.value)
    assert not trained_on(tmp_path, photos)


def test_data_are_known_through_a_link_and_in_part(run: Run, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(photos)
    assert trained_on(run.folder, tmp_path / "link")
    assert trained_on(run.folder, photos / "cat")
    assert trained_on(run.folder, photos.parent)
    assert not trained_on(run.folder, photos.with_name("photos2"))
    assert not trained_on(run.folder, "fashion-mnist-tops")


def test_a_run_that_goes_on_with_or_without_fast_paths_says_so(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lopsided.runs import run as runs

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runs, "write_results", stop)
        with pytest.raises(KeyboardInterrupt):
            run_recipe(SMALL, tmp_path / "run", data=photos)
    done = run_recipe(SMALL.override(fast=False), tmp_path / "run", data=photos, resume=True)
    assert notes.changed_machine("fast", "True", "False") in done.facts()


def test_what_the_scenario_left_is_judged_when_the_recipe_asks_for_it(photos: Path, tmp_path: Path) -> None:
    recipe = SMALL.override(**{"data.scenario": "80:20,total=15", "data.held_out": True})
    run = run_recipe(recipe, tmp_path / "run", data=photos)
    drawn = {row["name"] for row in run.predictions() if row["split"] != "held_out"}
    held_out = [row for row in run.predictions() if row["split"] == "held_out"]
    # 20 - 12 cats and 10 - 3 dogs are left.
    assert sorted(row["label"] for row in held_out) == ["cat"] * 7 + ["dog"] * 7
    assert not drawn & {row["name"] for row in held_out}
    assert run.metrics is not None
    right = sum(row["label"] == row["predicted"] for row in held_out)
    assert run.metrics["held_out"]["figures"]["accuracy"]["value"] == pytest.approx(right / 14)
    assert set(run.features()) == {"val", "test"}


def test_the_features_of_a_run_give_its_probabilities(run: Run) -> None:
    model, _ = open_model(run.folder)
    features = run.features()
    for split in ("val", "test"):
        rows = [row for row in run.predictions() if row["split"] == split]
        with torch.no_grad():
            expected = model.classifier(torch.from_numpy(features[split])).double().softmax(dim=1)
        found = [[float(row["p:cat"]), float(row["p:dog"])] for row in rows]
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)


def test_features_are_written_row_by_row_however_they_lie_in_memory(tmp_path: Path) -> None:
    features = np.delete(np.arange(24, dtype=np.float32).reshape(4, 6), [1, 2], axis=1)
    assert not features.flags.c_contiguous
    labels = np.zeros(4, dtype=np.int64)
    part = Predictions(tuple("abcd"), np.full((4, 2), 0.5), labels, labels, features=features)
    write_tables(tmp_path, {"test": part}, ("x", "y"))
    assert Run(tmp_path, Recipe(), None).features()["test"].tolist() == features.tolist()


def test_features_that_cannot_be_read_are_named(run: Run, tmp_path: Path) -> None:
    folder = shutil.copytree(run.folder, tmp_path / "copy")
    (folder / "features.safetensors").write_bytes(b"not that")
    with pytest.raises(RunError, match=r"features\.safetensors must be a readable safetensors file"):
        Run.open(folder).features()


@pytest.mark.parametrize("name", ["log.jsonl", "checkpoint", "notes"])
def test_a_run_folder_with_a_link_in_it_is_not_gone_on_with(name: str, run: Run, photos: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder)
    (folder / "metrics.json").unlink()
    shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink(missing_ok=True)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    (folder / name).symlink_to(mine if name == "checkpoint" else mine / "thesis.txt")
    with pytest.raises(RunError, match="must not contain links"):
        run_recipe(SMALL, folder, data=photos, resume=True)
    assert (mine / "thesis.txt").read_text() == "mine"


def test_a_parent_that_another_process_removes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, removed = Path.mkdir, []

    def mkdir(self: Path, *given: Any, **named: Any) -> None:
        if not removed:
            removed.append(self)
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        original(self, *given, **named)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with _made(tmp_path / "folds" / "2"):
        assert (tmp_path / "folds" / "2").is_dir()
    assert not (tmp_path / "folds").exists()
