"""``lopsided fit --recipe fine-tune`` and what other verbs do with its runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lopsided.runs.folder import Run
from tiny_command import Call

PHOTOS = {"cat": 30, "dog": 12}
FEW = ("fine_tune.blocks=1", "fine_tune.views=1", "test=0.3", "image_size=64", "--device", "cpu")
STEPS = ("fine_tune.steps=2",)


@pytest.mark.slow
def test_a_field_of_the_section_selects_the_recipe_and_all_verbs_take_the_run(
    photos: Path, call: Call, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = call("fit", photos, "--out", run, "fine_tune.steps=2", *FEW)
    assert ended.code == 0, ended.err
    assert "Recipe: fine-tune, because fine_tune.steps is set.\n" in ended.err
    metrics = json.loads((run / "metrics.json").read_text())
    assert (metrics["method"], metrics["loss"], metrics["val"]) == ("fine-tune", "ce", None)
    assert metrics["test"]["figures"]["uwa"]["value"] > 0.9
    (stage,) = [event for event in Run.open(run).events() if event["event"] == "stage"]
    assert (stage["stage"], stage["epochs"]) == ("fine-tune", 2)  # 29 training images are one step of 32.
    assert call("evaluate", run, photos, "--json", "--device", "cpu").code == 0
    assert call("predict", run, photos, "--out", tmp_path / "answers.csv", "--device", "cpu").code == 0
    assert call("report", run).code == 0
    page = (run / "report.html").read_text()
    assert "logistic regression on its features, then 2 steps of the last block with cross-entropy" in page
    assert json.loads(call("fit", "--out", run, "--resume", "--json").out)["method"] == "fine-tune"


@pytest.mark.slow
def test_the_size_of_a_batch_is_that_of_the_one_stage(photos: Path, call: Call, tmp_path: Path) -> None:
    ended = call("fit", photos, "--out", tmp_path / "run", "--recipe", "fine-tune", "batch_size=16", *FEW, *STEPS)
    assert ended.code == 0, ended.err
    assert Run.open(tmp_path / "run").recipe.encoder_training.batch_size == 16
    (stage,) = [event for event in Run.open(tmp_path / "run").events() if event["event"] == "stage"]
    assert stage["epochs"] == 1  # 29 training images are two steps of 16.


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ("--recipe", "fine-tune", "classifier.batch_size=16"),
            'classifier.batch_size has no effect with method "fine-tune": the classifier starts from a logistic '
            "regression.",
        ),
        (
            ("--recipe", "fine-tune", "epochs=3"),
            "epochs has no effect because fine_tune.steps or fine_tune.minutes is set. Set that field instead, or "
            "add fine_tune.steps=unset.",
        ),
        (
            ("fine_tune.blocks=99",),
            'fine_tune.blocks must be <= 16 for tf_efficientnet_lite0, got 99. Set fine_tune.blocks = "all" to train '
            "the whole encoder.",
        ),
        (
            ("--recipe", "from-scratch", "fine_tune.steps=9"),
            'fine_tune.steps has no effect with method "two-stage". Start from the recipe fine-tune.',
        ),
    ],
)
def test_what_cannot_be_used_is_one_sentence(
    photos: Path, call: Call, tmp_path: Path, flags: tuple[str, ...], text: str
) -> None:
    ended = call("fit", photos, "--out", tmp_path / "run", *flags, "--quiet", "--device", "cpu")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.splitlines()[-1] == f"lopsided: {text}"
