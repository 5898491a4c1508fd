"""``lopsided fit --recipe adapter`` and all verbs that take its run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lopsided.recipe import Recipe
from tiny_command import Call

PHOTOS = {"cat": 30, "dog": 12}
LIGHT = [
    "adapter.heads=2",
    "adapter.hidden=8",
    "adapter.out=4",
    "epochs=2",
    "test=0.3",
    "--device",
    "cpu",
]


@pytest.mark.slow
def test_all_verbs_take_a_run_with_heads(photos: Path, call: Call, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = call("fit", photos, "--out", run, "--recipe", "adapter", "adapter.blend=0.5", "--loss", "afcl", *LIGHT)
    assert ended.code == 0
    assert ended.out.startswith(f"AFCL heads on frozen features on {photos}: ")
    assert "not calibrated" not in ended.err  # Left-out training images calibrate heads.
    metrics = json.loads((run / "metrics.json").read_text())
    assert (metrics["method"], metrics["loss"], metrics["val"]) == ("adapter", "afcl", None)
    assert Recipe.load(run / "recipe.toml").encoder_training.loss.name == "afcl"
    evaluated = call("evaluate", run, photos, "--json", "--device", "cpu")
    assert json.loads(evaluated.out)["num_images"] == 42
    assert json.loads(evaluated.out)["figures"]["uwa"]["value"] > 0.9
    assert call("predict", run, photos, "--out", tmp_path / "answers.csv", "--device", "cpu").code == 0
    assert len((tmp_path / "answers.csv").read_text().splitlines()) == 43
    reported = call("report", run)
    assert (reported.code, reported.err) == (0, "")
    page = (run / "report.html").read_text()
    assert "AFCL heads on frozen features on photos" in page
    assert "2 heads on its features, which were not trained, with 2 epochs of asymmetric focal contrastive loss" in page
    assert ", averaged with a logistic regression" in page
    resumed = call("fit", "--out", run, "--resume", "--json")
    assert json.loads(resumed.out)["test"] == metrics["test"]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--recipe adapter --loss ce", 'cannot be ce with method "adapter". Use one of cl, fcl, acl, afcl'),
        ("--recipe adapter classifier_epochs=3", 'has no effect with method "adapter".'),
        ("adapter.heads=3", 'adapter.heads has no effect with method "frozen". Use a recipe with heads'),
    ],
)
def test_what_heads_cannot_use_is_one_sentence(flags: str, text: str, photos: Path, call: Call, tmp_path: Path) -> None:
    ended = call("fit", photos, "--out", tmp_path / "run", *flags.split())
    assert (ended.code, ended.out) == (2, "")
    assert text in ended.err
    assert ended.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_the_list_of_recipes_has_the_heads(call: Call) -> None:
    shown = call("recipes").out
    assert "Contrastive heads" in shown
