"""``lopsided export --to card`` and ``--to hub-folder``, and ``--track``."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import save_file

from lopsided.models.encoders import build_encoder
from lopsided.runs.folder import Run
from tiny_command import SMALL, Call, names_below


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, which a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_card_has_the_facts_of_the_run_and_marks_what_only_the_user_knows(
    call: Call, run: Path, photos: Path
) -> None:
    ended = call("export", run, "--to", "card")
    assert ended.code == 0
    text = (run / "README.md").read_text(encoding="utf-8")
    metrics = Run.open(run).metrics
    assert metrics is not None
    number = text.count("**Fill in:**")
    assert f"{number} places are marked with **Fill in:**" in ended.out
    assert "# FILL IN the licence of this model: " in text
    card = ModelCard.load(run / "README.md")
    assert (card.data.license, card.data.pipeline_tag) == ("unknown", "image-classification")
    results = {result.metric_type: result for result in card.data.eval_results}
    uwa = metrics["test"]["figures"]["uwa"]
    assert results["balanced_accuracy"].metric_value == round(uwa["value"], 4)
    assert results["balanced_accuracy"].metric_args == {"low": round(uwa["low"], 4), "high": round(uwa["high"], 4)}
    assert (results["balanced_accuracy"].dataset_name, results["balanced_accuracy"].dataset_split) == ("photos", "test")
    counts = [metrics["counts"][split]["dog"] for split in ("train", "val", "test")]
    assert f"| dog | {' | '.join(map(str, counts))} |" in text
    dog = metrics["test"]["per_class"][1]["recall"]
    assert f"{dog['value']:.3f} [{dog['low']:.3f}, {dog['high']:.3f}]" in text
    assert "its share in training (balanced)" in text
    assert 'encoder.name = "mlp"' in text
    assert str(photos.parent) not in text  # Paths of this machine are not for sharing.
    again = call("export", run, "--to", "card")
    assert (again.code, again.out) == (2, "")
    what = f"{run / 'README.md'} exists and may hold your changes."
    assert again.err == f"lopsided: {what} Remove it, or choose another file with --out.\n"


def test_names_of_a_hostile_run_stay_plain_text_in_a_card(call: Call, run: Path) -> None:
    hostile = "<img src=x> | [a](b)"
    for name in ("metrics.json", "model.json"):
        content = (run / name).read_text(encoding="utf-8").replace('"cat"', json.dumps(hostile))
        (run / name).write_text(content, encoding="utf-8")
    assert call("export", run, "--to", "card", "--out", run / "card.md").code == 0
    text = (run / "card.md").read_text(encoding="utf-8")
    assert "<img" not in text.partition("\n---\n")[2].partition("```")[0]
    assert r"| &lt;img src=x> \| \[a\](b) |" in text


@pytest.mark.slow
def test_a_hub_folder_is_loaded_by_timm(call: Call, photos: Path, tmp_path: Path) -> None:
    small = [flag if flag != "mlp" else "test_resnet" for flag in SMALL]
    changes = ["--loss", "ce", "data.channels=1", "compare_quick=false", "--quiet"]
    assert call("fit", photos, "--out", tmp_path / "run", *small, *changes).code == 0
    ended = call("export", tmp_path / "run", "--to", "hub-folder", "--json", "--quiet")
    assert ended.code == 0
    result = json.loads(ended.out)
    hub = tmp_path / "run" / "hub"
    assert result["folder"] == str(hub)
    assert names_below(hub) == result["files"] == ["README.md", "config.json", "lopsided.json", "model.safetensors"]
    card = ModelCard.load(hub / "README.md")
    assert (card.data.library_name, card.data.model_name) == ("timm", "hub")
    code = re.findall(r"```python\n(.*?)```", card.content, flags=re.DOTALL)[0]
    assert 'convert("L")' in code
    timm = pytest.importorskip("timm", minversion="1.0.16")
    model = timm.create_model(f"local-dir:{hub}", pretrained=True)
    assert model.pretrained_cfg["label_names"] == ["cat", "dog"]
    example = next(photos.rglob("*.png"))
    code = code.replace("local-dir:hub", f"local-dir:{hub}").replace('"image.png"', repr(str(example)))
    said: dict[str, object] = {"print": lambda found: said.update(found=found)}
    exec(compile(code, "README.md", "exec"), said)
    predicted = call("predict", tmp_path / "run", example, "--json", "--quiet").out
    assert said["found"] == pytest.approx(json.loads(predicted)["probabilities"], abs=1e-5)


@pytest.mark.slow
def test_the_hub_folder_of_a_frozen_encoder_holds_its_parts_and_says_why(
    call: Call, photos: Path, tmp_path: Path
) -> None:
    encoder, _ = build_encoder("test_resnet", image_size=16)
    save_file(encoder.state_dict(), tmp_path / "own.safetensors")
    network = ["--encoder", "test_resnet", f"weights={tmp_path / 'own.safetensors'}", "image_size=16"]
    fitted = call("fit", photos, "--out", tmp_path / "run", *network, "--folds", "1", "--device", "cpu", "--quiet")
    assert fitted.code == 0
    ended = call("export", tmp_path / "run", "--to", "hub-folder")
    assert ended.code == 0
    assert ended.err.startswith(
        "timm cannot represent scaled features as one model, so the folder holds its parts and an ONNX file."
    )
    assert "timm gives the features of each encoder on 5 images (largest relative difference " in ended.out
    assert ", and onnxruntime the probabilities (largest difference " in ended.out
    assert names_below(tmp_path / "run" / "hub") == [
        "README.md", "classifier.safetensors", "encoders/1-test_resnet/config.json",
        "encoders/1-test_resnet/model.safetensors", "lopsided.json", "model.onnx",
    ]  # fmt: skip
    card = ModelCard.load(tmp_path / "run" / "hub" / "README.md")
    assert (card.data.library_name, card.data.tags[-2:]) == ("onnx", ["timm", "onnx"])
    assert "The encoder has the weights of the file `own.safetensors`." in card.content
    assert str(tmp_path) not in card.content + (tmp_path / "run" / "hub" / "lopsided.json").read_text()


def test_what_cannot_be_exported_is_refused_in_one_sentence(call: Call, run: Path, tmp_path: Path) -> None:
    assert call("export", run, "--to", "coreml").err == (
        "lopsided: --to must be one of onnx, card, hub-folder, got coreml.\n"
    )
    hub = call("export", run, "--to", "hub-folder", "--out", tmp_path / "hub")
    assert hub.code == 2
    assert hub.err.startswith("lopsided: timm cannot represent the encoder mlp, which is not a model of timm. ")
    (run / "metrics.json").unlink()
    for to in ("card", "hub-folder"):
        ended = call("export", run, "--to", to, "--out", tmp_path / "out")
        assert (ended.code, ended.out) == (2, "")
        again = f"Continue it with lopsided fit --out {run} --resume."
        assert ended.err == f"lopsided: The run in {run} is not finished: it has no metrics.json. {again}\n"
    assert not (tmp_path / "hub").exists()
    assert not (tmp_path / "out").exists()


def test_a_tracker_that_is_unknown_or_not_installed_ends_fit_before_training(
    call: Call, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = call("fit", photos, "--out", tmp_path / "run", "--track", "neptune")
    names = '"tensorboard", "mlflow", "wandb"'
    assert (ended.code, ended.err) == (2, f"lopsided: tracker must be one of {names}, got 'neptune'.\n")
    from lopsided.trackers.mlflow import MLflow

    monkeypatch.setattr(MLflow, "needs", ("no_such_module",))
    ended = call("fit", photos, "--out", tmp_path / "run", "--track", "mlflow")
    missing = "--track mlflow needs the package no_such_module, which is not installed."
    assert (ended.code, ended.err) == (2, f"lopsided: {missing} Run pip install 'lopsided[mlflow]'.\n")
    ended = call("compare", photos, "--methods", "ce,cl", "--out", tmp_path / "run", "--track", "mlflow")
    assert (ended.code, ended.err) == (2, f"lopsided: {missing} Run pip install 'lopsided[mlflow]'.\n")
    assert not (tmp_path / "run").exists()


def test_trackers_of_the_command_are_those_of_the_recipe(call: Call, photos: Path, tmp_path: Path) -> None:
    track = ["--track", "tensorboard", f'track=["tensorboard:{tmp_path / "boards"}"]']  # They add up.
    assert call("fit", photos, "--out", tmp_path / "run", *SMALL, *track, "--quiet").code == 0
    assert Run.open(tmp_path / "run").recipe.unused_trackers == ("tensorboard", f"tensorboard:{tmp_path / 'boards'}")
    folders = [tmp_path / "run" / "tensorboard", tmp_path / "boards" / "run"]
    assert [len(list(folder.glob("events.out.tfevents.*"))) for folder in folders] == [1, 1]
