"""``lopsided fit`` with an embedded encoder, frozen. tests/runs/test_choice.py: which recipe it takes by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lopsided import cli
from lopsided.cli.output import speed_words
from lopsided.errors import RunError
from lopsided.recipe import Recipe, named_recipe
from lopsided.runs.folder import Run
from tiny_command import Call

PHOTOS = {"cat": 30, "dog": 12}


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    run = tmp_path_factory.mktemp("frozen") / "run"
    small = ["--recipe", "quick", "--quiet", "test=0.3", "--device", "cpu"]
    assert cli.run(["fit", str(photos), "--out", str(run), *small]) == 0
    return run


def notes(run: Path) -> list[str]:
    return [event["text"] for event in Run.open(run).events() if event["event"] == "note"]


def test_the_default_fits_a_regression_on_the_embedded_encoder(frozen: Path) -> None:
    metrics = json.loads((frozen / "metrics.json").read_text())
    assert (metrics["method"], metrics["loss"], metrics["val"]) == ("frozen", "ce", None)
    assert metrics["test"]["figures"]["uwa"]["value"] > 0.9
    card = json.loads((frozen / "model.json").read_text())
    assert (card["encoder"], card["encoder_weights"], card["image_size"]) == (
        "tf_efficientnet_lite0+stages+regions+pixels:1",
        "embedded",
        224,
    )
    assert card["scaling"] == "root"


@pytest.mark.slow
def test_all_other_verbs_take_a_frozen_run(frozen: Path, photos: Path, call: Call, tmp_path: Path) -> None:
    evaluated = call("evaluate", frozen, photos, "--json", "--device", "cpu")
    assert json.loads(evaluated.out)["num_images"] == 42
    predicted = call("predict", frozen, photos, "--out", tmp_path / "answers.csv", "--device", "cpu")
    assert predicted.code == 0
    assert len((tmp_path / "answers.csv").read_text().splitlines()) == 43
    reported = call("report", frozen)
    assert (reported.code, reported.err) == (0, "")
    page = (frozen / "report.html").read_text()
    assert "Frozen features on photos" in page
    assert "mean of logistic and ridge regressions on its features, which were not trained" in page
    resumed = call("fit", "--out", frozen, "--resume", "--json")
    assert json.loads(resumed.out)["method"] == "frozen"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            "epochs=1 --encoder mlp classifier_epochs=1",
            "encoder_training.epochs is set, which has an effect only if an encoder is trained.",
        ),
        ("--encoder mlp image_size=4", "the encoder has no pretrained weights (weights)."),
        ("--encoder mlp weights=none image_size=4", "the encoder has no pretrained weights (weights)."),
        (
            "method=end-to-end encoder_training.loss=ce encoder_training.epochs=1 --encoder mlp",
            "method is set, which has an effect only if an encoder is trained.",
        ),
    ],
)
def test_an_option_that_trains_an_encoder_selects_the_recipe_from_scratch(
    flags: str, reason: str, photos: Path, call: Call, tmp_path: Path
) -> None:
    ended = call("fit", photos, "--out", tmp_path / "run", *flags.split(), "--device", "cpu")
    assert ended.code == 0
    assert notes(tmp_path / "run")[0] == f"Recipe: from-scratch, because {reason}"
    assert f"Recipe: from-scratch, because {reason}\n" in ended.err
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["method"] != "frozen"


def test_a_named_recipe_needs_no_reason_and_refuses_options_without_an_effect(
    photos: Path, call: Call, tmp_path: Path
) -> None:
    ended = call("fit", photos, "--out", tmp_path / "run", "--recipe", "quick", "epochs=3")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == (
        'lopsided: epochs has no effect with method "frozen". Use another recipe, such as '
        "from-scratch, to train an encoder.\n"
    )
    assert not (tmp_path / "run").exists()


def test_joined_encoders_without_weights_are_one_true_sentence(photos: Path, call: Call, tmp_path: Path) -> None:
    two = "tf_efficientnet_lite0+resnet18"
    for flags in ([], ["weights=none"]):
        ended = call("fit", photos, "--out", tmp_path / "run", "--encoder", two, *flags)
        must = f"joined encoders must have pretrained weights, got {two} without weights."
        do = "Give the weights of each with + between them, such as weights=embedded+timm."
        assert (ended.code, ended.err) == (2, f"lopsided: {must} {do}\n")
    ended = call("fit", photos, "--out", tmp_path / "run", "--encoder", "tf_efficientnet_lite0+pixels")
    assert ended.code == 2
    assert ended.err.endswith("without weights. Give its weights, such as weights=embedded.\n")
    ended = call("fit", photos, "--out", tmp_path / "run", "--encoder", two, "weights=embedded")
    assert ended.code == 2
    assert ended.err.splitlines()[-1].startswith("lopsided: --encoder must be one of tf_efficientnet_lite0, ")
    assert ended.err.endswith("got 'resnet18'. Set encoder.name, or use other weights.\n")
    assert not (tmp_path / "run").exists()


def test_weights_of_another_encoder_and_a_truncated_file_are_one_sentence(
    photos: Path, call: Call, tmp_path: Path
) -> None:
    from lopsided.models.pretrained import embedded_file

    content = embedded_file().read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(content[:-1000])
    (tmp_path / "lite.safetensors").write_bytes(content)
    for flags, text in (
        ((f"weights={tmp_path / 'cut.safetensors'}",), "weights must be a readable safetensors file, got "),
        ((f"weights={tmp_path / 'lite.safetensors'}", "--encoder", "resnet18"), "does not fit resnet18: it has no "),
        (("weights=embedded", "--encoder", "resnet18"), "--encoder must be one of tf_efficientnet_lite0, "),
    ):
        ended = call("fit", photos, "--out", tmp_path / "run", *flags, "--quiet")
        assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
        assert text in ended.err
        assert not (tmp_path / "run").exists()


def test_fit_says_what_ten_thousand_new_images_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {"quick": 50.0, "thorough": 10_000 / 23 / 60}
    asked = {named_recipe(name).encoder.views: speed for name, speed in speeds.items()}
    monkeypatch.setattr("lopsided.runs.features.images_per_second", lambda recipe: asked[recipe.encoder.views])
    told = "On this machine, 10,000 new images take about 23 min with this model, and 3 min with quick."
    assert speed_words(named_recipe("thorough")) == [told]
    assert speed_words(named_recipe("fine-tune")) == []
    assert speed_words(named_recipe("few")) == [], "One pass gives its features and those of quick."
    asked[named_recipe("thorough").encoder.views] = 40.0
    assert speed_words(named_recipe("thorough")) == [], "It is not clearly slower."

    def broken(recipe: Recipe) -> float:
        raise RunError("no weights")

    monkeypatch.setattr("lopsided.runs.features.images_per_second", broken)
    assert speed_words(named_recipe("thorough")) == []
