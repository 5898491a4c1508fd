from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lopsided.data.augment import to_float
from lopsided.errors import RunError
from lopsided.inference.engine import Engine
from lopsided.models.encoders import build_encoder
from lopsided.models.heads import ClassifierHead
from lopsided.models.model import Model, ModelCard, average, load_model, save_model

SIDE = 32
BIASES = [(0.5, 0.0), (0.0, 0.0), (-0.2, 0.4)]


def members(encoder: str = "resnet10t", number: int = 3) -> list[tuple[Model, ModelCard]]:
    made = []
    for seed in range(number):
        network, features = build_encoder(encoder, channels=3, image_size=SIDE, seed=seed)
        torch.manual_seed(seed)
        card = ModelCard(
            kind="image", encoder=encoder, channels=3, image_size=SIDE, shape=(3, SIDE, SIDE),
            mean=(0.4 + seed / 10,) * 3, std=(0.2 + seed / 10,) * 3, classes=("cat", "dog"), features=features,
            prior=(0.5, 0.5),
        )  # fmt: skip
        head = ClassifierHead(features, 2)
        made.append((Model(network, head, card.mean, card.std).eval(), card))
    return made


def images(number: int = 5) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (number, 3, SIDE, SIDE), dtype=np.uint8))


def test_the_logits_of_an_ensemble_are_the_mean_of_the_logits_of_its_members() -> None:
    models = members()
    joined, card = average(models, BIASES)
    x = to_float(images())
    with torch.no_grad():
        expected = torch.stack(
            [model(x) + torch.tensor(bias) for (model, _), bias in zip(models, BIASES, strict=True)]
        ).mean(dim=0)
        torch.testing.assert_close(joined(x), expected)
    assert (card.members, card.features, card.prior) == (3, 3 * models[0][1].features, (0.5, 0.5))


@pytest.mark.slow
def test_a_saved_ensemble_loads_and_one_file_of_onnxruntime_computes_all_members(tmp_path: Path) -> None:
    joined, card = average(members(), BIASES)
    card = save_model(tmp_path, joined, card)
    loaded, there = load_model(tmp_path)
    assert there == card
    x = images()
    with torch.no_grad():
        torch.testing.assert_close(loaded(to_float(x)), joined(to_float(x)), rtol=1e-4, atol=1e-5)
    engine = Engine(loaded, card.shape)
    assert engine.is_fast  # The graph joins the members, each with its own mean and deviation.
    with torch.no_grad():
        expected = joined.features(to_float(x)).numpy()
    np.testing.assert_allclose(engine.features(x), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("claimed", [2, 90])
def test_a_card_with_another_number_of_members_is_refused_before_they_are_built(tmp_path: Path, claimed: int) -> None:
    joined, card = average(members("mlp"), BIASES)
    card = save_model(tmp_path, joined, card)
    (tmp_path / "model.json").write_text(card.model_copy(update={"members": claimed}).model_dump_json())
    with pytest.raises(RunError, match=f"must hold the weights of {claimed} encoders, got 3"):
        load_model(tmp_path)


def test_more_members_than_the_limit_are_refused(tmp_path: Path) -> None:
    joined, card = average(members("mlp"), BIASES)
    card = save_model(tmp_path, joined, card)
    (tmp_path / "model.json").write_text(card.model_copy(update={"members": 10**9}).model_dump_json())
    with pytest.raises(RunError, match="is not a valid model card: members"):
        load_model(tmp_path)
