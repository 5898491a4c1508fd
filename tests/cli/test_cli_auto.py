"""``fit --auto`` from a tiny comparison to a model, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.test_cli_bad_input import assert_refused
from lopsided.runs import auto
from lopsided.runs.engines import ray_engine
from lopsided.runs.folder import Run
from tiny_command import Call, command_here, names_below
from tiny_sweep import HereEngine

PHOTOS = {"cat": 12, "dog": 8}
FLAGS = (
    *("--encoder", "mlp-8", "epochs=2", "classifier_epochs=1", "batch_size=8", "--device", "cpu"),
    *("--folds", "2"),
)
TINY = (*FLAGS, "--workers", "1")


@pytest.mark.slow
def test_the_chosen_model_is_handed_over_with_the_page_that_says_why(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "_METHODS", ("ce", "weighted-ce"))
    out = tmp_path / "run"
    ended = command_here("fit", photos, "--auto", "--out", out, *TINY, "--json")
    assert ended.code == 0, ended.err
    content = json.loads(ended.out)
    assert content["folds"]["folds"] == 2
    run = Run.open(out)
    assert run.recipe.encoder_training.loss.name in ("ce", "weighted-ce")
    assert (out / "model.safetensors").is_file()
    assert (out / "comparison" / "report.html").is_file()
    assert not list((out / "comparison").rglob("model.safetensors"))
    notes = [event["text"] for event in run.events() if event["event"] == "note"]
    assert any("has the highest balanced accuracy" in text for text in notes)
    accuracy = 100 * content["test"]["figures"]["uwa"]["value"]
    judged = next(text for text in notes if "Judged like the run" in text)
    assert f"{run.recipe.encoder_training.loss.name} {accuracy:.1f}" in judged
    lines = (out / "comparison" / "records.jsonl").read_text().splitlines()
    assert len(lines) == 4
    seconds = {json.loads(line)["cell"]: json.loads(line)["seconds"] for line in lines}
    again = command_here("fit", photos, "--auto", "--out", out, *TINY, "--resume", "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out) == content
    assert seconds == {
        json.loads(line)["cell"]: json.loads(line)["seconds"]
        for line in (out / "comparison" / "records.jsonl").read_text().splitlines()
    }


@pytest.mark.slow
def test_a_cluster_is_connected_to_once(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(auto, "_METHODS", ("ce",))
    monkeypatch.setattr(ray_engine, "RayEngine", lambda address, threads: HereEngine(2))
    monkeypatch.setattr(ray_engine, "connect", lambda address, closing: asked.append(address))
    engine = ("--engine", "ray:x:1")
    ended = command_here("fit", photos, "--auto", "--out", tmp_path / "run", *FLAGS, *engine)
    assert ended.code == 0, ended.err
    assert asked == ["x:1"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--auto", "--recipe", "quick"), "--recipe chooses what to train and cannot be used with --auto."),
        (("--auto", "eta=3"), "--auto compares several losses, but eta is a parameter of some. Remove it, or compare"),
        (("--auto", "--loss", "cl"), "--loss chooses what to train and cannot be used with --auto."),
        (
            ("--auto", "--folds", "1"),
            "--auto compares over folds, so there cannot be one split. Remove folds=1 or --auto.",
        ),
        (("--auto", "test=0.2"), "test is a share of one split and cannot be used with --auto."),
        (("--auto", "split=given"), 'data.folds cannot be used with data.split = "given"'),
        (("--auto", "repeats=2"), "repeats repeats the folds of one recipe and cannot be used with --auto."),
        (("--auto", "--decide", "recall:bird>=0.9"), "bird"),
        (("--auto", "minutes=-1"), "minutes must be a number >= 0, got -1."),
        (
            ("--auto", "--folds", "9"),
            "the number of folds must be from 2 to the number of images of every class,",
        ),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_leaves_nothing(
    arguments: tuple[str, ...], told: str, call: Call, photos: Path, tmp_path: Path
) -> None:
    before = names_below(tmp_path)
    assert_refused(call("fit", photos, *arguments, "--out", tmp_path / "run"), told)
    assert names_below(tmp_path) == before


def test_a_folder_that_is_not_empty_and_missing_data_are_refused(call: Call, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert_refused(call("fit", photos, "--auto", "--out", out), f"The folder {out} is not empty. Choose another")
    assert_refused(call("fit", "--auto", "--out", tmp_path / "new"), "DATA is missing. Write lopsided fit DATA --auto")


@pytest.mark.parametrize("minutes", ["inf", "nan", "-1", "soon"])
def test_minutes_are_a_finite_number(minutes: str, call: Call, tmp_path: Path) -> None:
    ended = call("fit", "photos", "--auto", f"minutes={minutes}", "--out", tmp_path / "run")
    assert ended.code == 2
    assert f"minutes must be a number >= 0, got {minutes}" in ended.err
