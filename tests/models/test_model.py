from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lopsided import files
from lopsided.errors import DataError, RunError
from lopsided.inference.engine import Engine
from lopsided.inference.scorer import Scorer
from lopsided.models.encoders import build_encoder
from lopsided.models.heads import ClassifierHead
from lopsided.models.model import CARD_NAME, WEIGHTS_NAME, Model, ModelCard, load_model, save_model
from lopsided.models.small_maps import SmallMapConv2d
from tiny import write_model
from training.conftest import stripes


def scored(model: Model, batch: torch.Tensor) -> np.ndarray:
    engine = Engine(model, (), fast=False)
    return engine.probabilities(engine.features(batch))


def make(encoder: str = "test_resnet", **changes: Any) -> tuple[Model, ModelCard]:
    fields: dict[str, Any] = {
        "kind": "image", "encoder": encoder, "channels": 1, "image_size": 8, "shape": (1, 8, 8), "mean": (0.3,),
        "std": (0.2,), "classes": ("many", "few", "zäh"), "features": 96, "prior": (0.6, 0.3, 0.1), **changes,
    }  # fmt: skip
    card = ModelCard(**fields)
    module, features = build_encoder(encoder, channels=1, image_size=8, in_features=card.shape[0])
    return Model(module, ClassifierHead(features, 3), card.mean, card.std, card.kind).eval(), card


def test_a_model_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    model, card = make()
    written = save_model(tmp_path, model, card)
    loaded, read = load_model(tmp_path, fast=False)
    x = torch.rand(4, 1, 8, 8)
    assert torch.equal(loaded(x), model(x))
    assert torch.equal(loaded.features(x), model.features(x))
    assert read == written
    assert read.classes == ("many", "few", "zäh")
    assert not loaded.training


def test_saving_twice_writes_the_same_bytes_and_no_projection(tmp_path: Path) -> None:
    model, card = make()
    for name in ("a", "b"):
        save_model(tmp_path / name, model, card)
    for name in (CARD_NAME, WEIGHTS_NAME):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert {key.split(".")[0] for key in load_file(tmp_path / "a" / WEIGHTS_NAME)} == {"encoder", "classifier"}


def test_inputs_are_normalised_inside() -> None:
    model, _ = make()
    x = torch.rand(4, 1, 8, 8)
    torch.testing.assert_close(model.features(x), model.encoder((x - 0.3) / 0.2))


def test_vectors_are_normalised_in_double_precision() -> None:
    model, _ = make("mlp-4", kind="vector", image_size=None, shape=(2,), mean=(1e9, 0.0), std=(1.0, 1.0))
    x = torch.tensor([[1e9 + 0.5, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(model.features(x), model.encoder(torch.tensor([[0.5, 1.0]])))


def change_card(folder: Path, **changes: object) -> None:
    content = json.loads((folder / CARD_NAME).read_text())
    (folder / CARD_NAME).write_text(json.dumps({**content, **changes}))


def test_a_folder_without_a_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holds no model\.json\. Give the folder of a finished run\."):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"format": 3, "lopsided": "9.1"}, r"must have format 2, got 3\. It was written by lopsided 9\.1; use that"),
        ({"format": None}, r"must have format 2, got None"),
        ({"classes": ["one"]}, r"is not a valid model card: classes: "),
        ({"extra": 1}, r"is not a valid model card: extra: extra inputs are not permitted"),
        (
            {"mean": [0.1, 0.2]},
            r"does not describe valid inputs of a model of kind image: shape \(1, 8, 8\), 2 means and 1 dev",
        ),
        ({"std": [0.0]}, r"does not describe valid inputs of a model of kind image"),
        ({"shape": []}, r"does not describe valid inputs of a model of kind image"),
        ({"encoder": "hf-hub:evil/model"}, r"describes a model that cannot be built: encoder\.name must be a timm"),
        ({"encoder": "lcnet_035"}, r"model\.safetensors does not fit the encoder lcnet_035: "),
        (
            {"classes": ["a", "b"], "prior": [0.5, 0.5]},
            r"model\.safetensors must hold a classifier for 2 classes, got one of shape \(3, ",
        ),
    ],
)
def test_a_card_that_cannot_be_used_is_one_sentence(tmp_path: Path, changes: dict[str, object], text: str) -> None:
    save_model(tmp_path, *make())
    change_card(tmp_path, **changes)
    with pytest.raises(RunError, match=text) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_weights_that_were_cut_or_exchanged_are_noticed(tmp_path: Path) -> None:
    save_model(tmp_path, *make())
    path = tmp_path / WEIGHTS_NAME
    content = path.read_bytes()
    text = r"model\.safetensors does not belong to model\.json: the file was changed or truncated\."
    for other in (content[:-100], content[:-4] + b"\0\0\0\1"):
        path.write_bytes(other)
        with pytest.raises(RunError, match=text):
            load_model(tmp_path)
    path.unlink()
    with pytest.raises(RunError, match=r"model\.safetensors cannot be read \(No such file or directory\)"):
        load_model(tmp_path)
    (tmp_path / CARD_NAME).write_text("{")
    with pytest.raises(RunError, match=r"model\.json is not valid JSON\."):
        load_model(tmp_path)


def test_weights_of_another_kind_of_file_are_refused_even_with_a_fitting_card(tmp_path: Path) -> None:
    import hashlib

    model, card = make()
    save_model(tmp_path, model, card)
    torch.save({}, tmp_path / WEIGHTS_NAME)
    change_card(tmp_path, sha256=hashlib.sha256((tmp_path / WEIGHTS_NAME).read_bytes()).hexdigest())
    with pytest.raises(RunError, match=r"model\.safetensors is not a safetensors file \("):
        load_model(tmp_path)
    save_file({"classifier.weight": model.classifier.weight.detach()}, tmp_path / WEIGHTS_NAME)
    change_card(tmp_path, sha256=hashlib.sha256((tmp_path / WEIGHTS_NAME).read_bytes()).hexdigest())
    with pytest.raises(RunError, match=r"model\.safetensors does not fit the encoder test_resnet: Missing key"):
        load_model(tmp_path)


def test_a_full_disk_leaves_neither_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "_flush", full)
    with pytest.raises(RunError, match=r"^cannot write .*model\.safetensors: no space left on device"):
        save_model(tmp_path, *make())
    assert list(tmp_path.iterdir()) == []


def test_prediction_does_not_depend_on_batches_and_leaves_the_mode_alone() -> None:
    model, card = make()
    model.train()
    images = stripes({"many": 5, "few": 4}).images
    seen: list[tuple[int, int]] = []
    scorer = Scorer(model, card, cached="none", batch_size=4)
    one = scorer.images(images, progress=lambda done, all_: seen.append((done, all_)))
    other = Scorer(model, card, batch_size=100, workers=2).images(images)
    assert model.training
    assert seen == [(4, 9), (8, 9), (9, 9)]
    assert one.shape == (9, 3)
    np.testing.assert_allclose(one, other, rtol=1e-5)
    np.testing.assert_allclose(one.sum(axis=1), 1, rtol=1e-12)
    batch = images.load(np.arange(9), 8, 1)
    assert Engine(model, (), fast=False).features(batch).shape == (9, 96)
    np.testing.assert_allclose(one, scored(model, batch), rtol=1e-5)
    np.testing.assert_allclose(one, scored(model, batch / 255), rtol=1e-5)


def test_images_are_resized_to_the_size_of_the_training_and_others_are_refused() -> None:
    model, card = make()
    larger = stripes({"many": 2, "few": 1}, size=16).images
    assert Scorer(model, card).images(larger).shape == (3, 3)
    oblong = card.model_copy(update={"image_size": None})
    text = r"inputs must have the shape \(1, 8, 8\) that the model was trained on, got \(1, 16, 16\)\."
    with pytest.raises(DataError, match=text):
        Scorer(model, oblong).images(larger)


def test_no_images_have_no_predictions() -> None:
    model, card = make()
    images = stripes({"many": 2, "few": 1}).images.take(np.empty(0, dtype=np.int64))
    assert Scorer(model, card).images(images).shape == (0, 3)


@pytest.mark.slow
def test_a_model_that_is_read_gives_the_numbers_of_the_one_that_was_trained(tmp_path: Path) -> None:
    write_model(tmp_path, encoder="resnet18", image_size=28)
    fast, _ = load_model(tmp_path)
    stock, _ = load_model(tmp_path, fast=False)
    assert any(isinstance(module, SmallMapConv2d) for module in fast.modules())
    assert not any(isinstance(module, SmallMapConv2d) for module in stock.modules())
    x = torch.rand(3, 3, 28, 28)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), stock(x), rtol=1e-4, atol=1e-5)
