"""``lopsided fit`` with folds, and the other verbs on such a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lopsided import cli
from lopsided.runs.folder import Run
from tiny_command import Call

PHOTOS = {"cat": 20, "dog": 7}
SMALL = (
    "--encoder",
    "mlp-8",
    "--loss",
    "ce",
    "epochs=1",
    "classifier_epochs=1",
    "--device",
    "cpu",
    "--quiet",
)


FROZEN = ("--device", "cpu", "image_size=32", "regression.strength=0.1")
"""The recipe quick without the choice of the strength, which costs most of the time."""


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    run = tmp_path_factory.mktemp("folds") / "run"
    assert cli.run(["fit", str(photos), "--out", str(run), "--folds", "3", *SMALL]) == 0
    return run


def test_every_verb_takes_a_run_with_folds(ensemble: Path, photos: Path, call: Call, tmp_path: Path) -> None:
    shown = call("fit", "--out", ensemble, "--resume", "--quiet", "-v")
    assert "Cross-entropy on" in shown.out
    assert "3 folds of 27 images" in shown.out
    assert "all images, each tested by a model that was not trained on it" in shown.out
    assert "The model is the ensemble of 3 models" in shown.out
    assert "An image costs 3 times as much as with one of them." in shown.out
    predicted = call("predict", ensemble, photos, "--out", tmp_path / "answers.csv", "--device", "cpu")
    assert predicted.code == 0
    assert len((tmp_path / "answers.csv").read_text().splitlines()) == 28
    evaluated = call("evaluate", ensemble, photos, "--json", "--device", "cpu")
    assert json.loads(evaluated.out)["num_images"] == 27
    assert "the model was trained on 27 of these 27 images" in evaluated.err
    reported = call("report", ensemble)
    assert (reported.code, reported.err) == (0, "")


def test_the_test_split_of_folds_is_not_evaluated_again(ensemble: Path, call: Call) -> None:
    ended = call("evaluate", ensemble)
    assert ended.code == 2
    assert "has seen all images of its run" in ended.err


@pytest.mark.slow
def test_an_ensemble_is_exported_as_one_file(ensemble: Path, call: Call, tmp_path: Path) -> None:
    ended = call("export", ensemble, "--out", tmp_path / "model.onnx", "--json", "--quiet")
    assert ended.code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert json.loads(ended.out)["difference"] < 1e-4


@pytest.mark.slow
def test_few_rare_images_are_folded_by_default_and_the_reason_and_the_time_are_given(
    photos: Path, call: Call, tmp_path: Path
) -> None:
    ended = call("fit", photos, "--out", tmp_path / "run", "-v", *FROZEN)
    assert ended.code == 0
    assert "5 folds, because 'dog' has only 7 images: so all of them are tested" in ended.err
    assert "This takes about " in ended.err
    assert "The regression has the strength" in ended.err, "A detail, which -v prints."
    assert "5 folds of 27 images" in ended.out
    assert "The model is trained on all images" in ended.out
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["test"]["num_images"] == 27
    kinds = [fact.kind for fact in Run.open(tmp_path / "run").facts()]
    assert kinds[:3] == ["quick_by_encoder", "folds_by_default", "folds"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--folds", "1"), ("test=0.3",), ("val=0.15",), ("data.folds=unset",)])
def test_one_split_is_an_option_away(photos: Path, call: Call, tmp_path: Path, options: tuple[str, str]) -> None:
    assert call("fit", photos, "--out", tmp_path / "run", *FROZEN, "--quiet", *options).code == 0
    assert "folds" not in json.loads((tmp_path / "run" / "metrics.json").read_text())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--folds", "8"), "got 8 for 7 images of 'dog' in"),
        (("--folds", "3", "test=0.2"), "folds=3 and test=0.2 contradict each other"),
        (("--folds", "3", "split=group"), "Folds by group need groups"),
        (("--folds", "3", "split=given"), '--folds cannot be used with data.split = "given"'),
        (("repeats=2",), "repeats must be 1 when data.folds is unset, got 2. Set data.folds (--folds)."),
        (("--folds", "3", "final=best"), 'final must be one of "auto", "refit", "ensemble", got \'best\''),
        (("--folds", "1", "--workers", "2"), "but there are no folds. Use --folds 5."),
        (("--folds", "3", "--engine", "slurm"), "--engine must be local, ray or ray:ADDRESS, got 'slurm'"),
    ],
)
def test_bad_options_of_folds_are_one_sentence(
    photos: Path, call: Call, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    ended = call("fit", photos, "--out", tmp_path / "run", "--device", "cpu", *options)
    assert ended.code == 2
    assert message in ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "run").exists()


def test_a_run_with_folds_is_repeated_from_its_recipe(ensemble: Path, call: Call, tmp_path: Path) -> None:
    assert call("fit", "--recipe", ensemble / "recipe.toml", "--out", tmp_path / "again", "--quiet").code == 0
    for name in ("model.safetensors", "predictions.csv"):
        assert (tmp_path / "again" / name).read_bytes() == (ensemble / name).read_bytes()
