"""Runs with method "adapter": contrastive heads on frozen features."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lopsided.data.sources import open_source
from lopsided.errors import InputError
from lopsided.estimator import LopsidedClassifier
from lopsided.evaluation.calibration import carried_prior
from lopsided.inference.engine import Engine
from lopsided.inference.scorer import Scorer
from lopsided.models.encoders import build_encoder
from lopsided.models.model import load_model
from lopsided.models.pretrained import Preprocessing
from lopsided.ranks import Ranks
from lopsided.recipe import Recipe, named_recipe
from lopsided.training.fit import Fitted, fit
from lopsided.training.methods.adapter import Joined, Linear, Rows, Unseen, fit_plain, head_folds
from training.ranks import together

PHOTOS = {"cat": 30, "dog": 9}
SMALL = "test_resnet"
LIGHT = {"adapter.heads": 3, "adapter.hidden": 8, "adapter.out": 4, "encoder_training.epochs": 2}
BLEND = {"adapter.blend": 0.5}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "small.safetensors"
    encoder, _ = build_encoder(SMALL, channels=3, image_size=32, seed=7)
    state = {key: value.contiguous() for key, value in encoder.state_dict().items()}
    save_file(state, path, {"lopsided": Preprocessing(32, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)).to_json()})
    return path


def light(weights: Path, **changes: Any) -> Recipe:
    fields = {"encoder.name": SMALL, "encoder.weights": str(weights), "device": "cpu", "threads": 1, "data.test": 0.3}
    return named_recipe("adapter").override(**fields | LIGHT | BLEND | changes)


def blobs(seed: int = 0, columns: int = 6) -> tuple[np.ndarray, np.ndarray]:
    y = np.repeat([0, 1], [80, 16])
    return np.random.default_rng(seed).normal(size=(len(y), columns)) + 1.5 * y[:, None], y


def test_one_linear_layer_on_all_outputs_is_the_average_of_the_logits() -> None:
    rng = np.random.default_rng(0)
    parts = [Linear(rng.normal(size=(3, width)), rng.normal(size=3)) for width in (5, 2, 2)]
    inputs = [rng.normal(size=(7, part.weight.shape[1])) for part in parts]
    joined = Joined(parts[1:], parts[0], 0.3, [], None, 5)
    expected = 0.3 * parts[0](inputs[0]) + 0.7 * (parts[1](inputs[1]) + parts[2](inputs[2])) / 2
    np.testing.assert_allclose(joined.linear(np.concatenate(inputs, axis=1)), expected)
    alone = Joined(parts[1:], None, 0.3, [], None, 5)
    heads = (parts[1](inputs[1]) + parts[2](inputs[2])) / 2
    np.testing.assert_allclose(alone.linear(np.concatenate(inputs[1:], axis=1)), heads)


def test_left_out_rows_undo_a_wrong_scale_and_a_wrong_bias() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 4000)
    right = np.stack([np.zeros(4000), np.where(labels == 1, 1.0, -1.0) * 2 + 2 * rng.normal(size=4000)], axis=1)
    # A Gaussian score with means -2, 2 and deviation 2 has the logit 2 * 2 / 4 * score = score.
    unseen = Unseen(labels, 2)
    unseen.add(np.arange(4000), 10 * (right + np.array([0.0, 3.0])))
    change = unseen.calibration((0.5, 0.5))
    assert change.temperature == pytest.approx(10, rel=0.15)
    assert change.bias[1] - change.bias[0] == pytest.approx(-3, abs=0.3)
    assert Unseen(labels, 2).calibration((0.5, 0.5)).temperature == 1.0


def test_logits_of_several_heads_for_one_row_are_averaged() -> None:
    labels = np.array([0, 1] * 20)
    logits = np.random.default_rng(0).normal(size=(40, 2))
    twice, once = Unseen(labels, 2), Unseen(labels, 2)
    for factor in (0.5, 1.5):
        twice.add(np.arange(40), factor * logits)
    once.add(np.arange(40), logits)
    assert twice.calibration((0.5, 0.5)) == once.calibration((0.5, 0.5))


def test_each_head_leaves_out_a_fold_and_new_folds_are_drawn_after_the_last_one() -> None:
    x, y = blobs()
    groups = (np.arange(len(y)) // 2).astype(str)
    recipe = named_recipe("adapter").override(**{"regression.folds": 4})
    folds = head_folds(Rows(x.astype(np.float32), y, groups, 2), recipe, 6)
    assert len(folds) == 6
    assert sorted(np.concatenate([rest for _, rest in folds[:4]]).tolist()) == list(range(len(y)))
    for train, rest in folds:
        assert sorted([*train, *rest]) == list(range(len(y)))
        assert not set(groups[train]) & set(groups[rest])
    assert set(folds[4][1].tolist()) not in [set(rest.tolist()) for _, rest in folds[:4]]


def test_without_folds_every_head_gets_all_rows() -> None:
    y = np.array([0] * 10 + [1])
    folds = head_folds(Rows(np.zeros((11, 2), dtype=np.float32), y, None, 2), named_recipe("adapter"), 2)
    assert [(len(train), len(rest)) for train, rest in folds] == [(11, 0), (11, 0)]


def test_the_calibrated_regression_ranks_rows_as_the_plain_one() -> None:
    x, y = blobs(2)
    recipe = named_recipe("adapter").override(**{"encoder.name": "tf_efficientnet_lite0"}, **BLEND)
    linear, fitted = fit_plain(Rows(x.astype(np.float32), y, None, 2), recipe)
    before, after = (x @ w.T + b for w, b in ((fitted.weight, fitted.bias), (linear.weight, linear.bias)))
    order = [np.argsort(logits[:, 1] - logits[:, 0]).tolist() for logits in (before, after)]
    assert order[0] == order[1]
    assert not np.allclose(linear.bias, fitted.bias)


@pytest.mark.parametrize(("loss", "prior"), [("ce", (0.9, 0.1)), ("weighted-ce", (0.5, 0.5))])
def test_the_prior_of_heads_is_that_of_their_regression(loss: str, prior: tuple[float, float]) -> None:
    recipe = named_recipe("adapter").override(**{"classifier.loss": loss, "encoder_training.sampler": "balanced"})
    assert carried_prior(recipe, [90, 10]) == pytest.approx(prior)
    rows = Rows(np.zeros((100, 1), dtype=np.float32), np.repeat([0, 1], [90, 10]), None, 2)
    assert rows.prior(recipe) == pytest.approx(prior)


@pytest.mark.parametrize("blend", [0.0, 0.5])
@pytest.mark.parametrize("loss", ["cl", "fcl", "acl", "afcl"])
def test_vectors_are_learnt_with_every_contrastive_loss(blend: float, loss: str) -> None:
    (x, y), (new, truth) = blobs(0), blobs(1)
    settings = LIGHT | {"encoder_training.epochs": 5, "encoder_training.loss": loss, "adapter.blend": blend}
    model = LopsidedClassifier(recipe="adapter", settings=settings, random_state=0).fit(x, y)
    assert model.score(new, truth) > 0.9
    assert model.transform(new).shape == (len(new), 18 if blend else 12)
    assert len(model.get_feature_names_out()) == model.transform(new).shape[1]
    assert [line["stage"] for line in model.history_] == ["adapter"] * 5


def test_heads_do_not_depend_on_each_other_and_differ_by_seed() -> None:
    x, y = blobs()

    def heads(number: int, seed: int = 0) -> list[np.ndarray]:
        settings = LIGHT | {"adapter.heads": number}
        model = LopsidedClassifier(recipe="adapter", settings=settings, random_state=seed).fit(x, y).model_
        assert model.adapter is not None
        return [head.first.weight.detach().numpy() for head in model.adapter.heads]

    one, two = heads(1), heads(2)
    np.testing.assert_array_equal(one[0], two[0])
    assert not np.allclose(two[0], two[1])
    assert not np.allclose(one[0], heads(1, seed=1)[0])


def test_an_estimator_with_heads_survives_saving(tmp_path: Path) -> None:
    x, y = blobs()
    names = np.array(["many", "few"])[y]
    model = LopsidedClassifier(recipe="adapter", settings=LIGHT | BLEND, random_state=0).fit(x, names)
    model.save(tmp_path / "model")
    again = LopsidedClassifier.load(tmp_path / "model", device="cpu")
    np.testing.assert_array_equal(again.predict_proba(x), model.predict_proba(x))


def run(recipe: Recipe, photos: Path, folder: Path | None = None, **more: Any) -> Fitted:
    return fit(recipe, open_source(photos), folder, **more)


@pytest.mark.slow
def test_a_run_with_heads_is_an_ordinary_model(
    photos: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOPSIDED_CACHE", str(tmp_path / "cache"))
    fitted = run(light(weights), photos, tmp_path / "run")
    model, card = load_model(tmp_path / "run")
    assert card.adapter is not None
    assert (card.features, card.width) == (96, 96 + 3 * 4)
    before = build_encoder(SMALL, channels=3, weights=weights)[0].state_dict()
    assert all(torch.equal(value, before[key]) for key, value in model.encoder.state_dict().items())
    assert fitted.test is not None
    assert fitted.test.features is not None
    assert fitted.test.features.shape[1] == card.width
    p = Scorer(model, card).images(open_source(photos).images.take(fitted.splits.test))
    assert np.abs(p - fitted.test.probabilities).max() < 1e-4
    assert (fitted.test.y_pred == fitted.test.y_true).mean() > 0.9  # The classes differ in brightness.
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines if line["event"] == "epoch"] == [1, 2]
    again = run(light(weights), photos, tmp_path / "run", resume=True)
    assert again.test is not None
    np.testing.assert_array_equal(again.test.probabilities, fitted.test.probabilities)
    assert again.history == fitted.history


@pytest.mark.slow
def test_a_second_arm_on_the_same_images_does_not_run_the_encoder(
    photos: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOPSIDED_CACHE", str(tmp_path / "cache"))
    encoded, right = [], Engine.encode
    monkeypatch.setattr(Engine, "encode", lambda self, batch: encoded.append(len(batch)) or right(self, batch))
    first = named_recipe("quick").override(**{
        "encoder.name": SMALL, "encoder.weights": str(weights), "device": "cpu", "threads": 1, "data.test": 0.3
    })  # fmt: skip
    run(first, photos)
    assert sum(encoded) == 39
    encoded.clear()
    run(light(weights), photos)
    run(light(weights, **{"encoder_training.loss": "cl"}), photos)
    assert encoded == []


@pytest.mark.slow
def test_two_ranks_train_the_same_heads_as_one(photos: Path, weights: Path, tmp_path: Path) -> None:
    (alone,) = together(1, tmp_path / "1", _on_a_rank, weights, photos, tmp_path / "alone", tmp_path / "cache-1")
    both = together(2, tmp_path / "2", _on_a_rank, weights, photos, tmp_path / "both", tmp_path / "cache-2")
    for probabilities, epochs in both:
        np.testing.assert_array_equal(probabilities, alone[0])
        assert epochs == alone[1] == [1, 2]
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("alone", "both")]
    assert models[0] == models[1]


def _on_a_rank(ranks: Ranks, weights: Path, photos: Path, folder: Path, cache: Path) -> tuple[np.ndarray, list[int]]:
    os.environ["LOPSIDED_CACHE"] = str(cache)
    fitted = run(light(weights), photos, folder, ranks=ranks)
    assert fitted.test is not None
    return fitted.test.probabilities, [line["epoch"] for line in fitted.history]


def test_validation_images_calibrate_heads_and_fit_a_rule() -> None:
    x, y = blobs()
    settings = LIGHT | BLEND | {"data.val": 0.3, "decision.rule": "tuned"}
    model = LopsidedClassifier(recipe="adapter", settings=settings, random_state=0).fit(x, y)
    assert model.card_.calibrated_on == 29
    assert model.card_.decision.rule == "tuned"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"adapter.heads": 0}, "adapter.heads must be an integer >= 1 and <= 64, got 0"),
        ({"adapter.heads": 65}, "adapter.heads must be an integer >= 1 and <= 64, got 65"),
        ({"adapter.hidden": 0}, "adapter.hidden must be an integer >= 1"),
        ({"adapter.out": 0}, "adapter.out must be an integer >= 1"),
        ({"adapter.dropout": 1.0}, "adapter.dropout must be"),
        ({"adapter.input_dropout": -0.1}, "adapter.input_dropout must be"),
        ({"adapter.blend": 1.0}, "adapter.blend must be"),
        ({"adapter.head": 3}, "adapter.head"),
        (
            {"encoder_training.loss": "ce"},
            'encoder_training.loss cannot be ce with method "adapter". Use one of cl, fcl, acl, afcl',
        ),
        (
            {"encoder_training.loss": "supmin"},
            'encoder_training.loss cannot be supmin with method "adapter". Use one of cl, fcl, acl, afcl, averaged-cl.',
        ),
        (
            {"classifier.loss": "focal"},
            'classifier.loss cannot be focal with method "adapter". Use one of ce, weighted-ce.',
        ),
        ({"encoder.weights": "none"}, 'encoder.weights cannot be "none" with method "adapter"'),
        ({"augment.rotation": 3.0}, 'augment.rotation has no effect with method "adapter".'),
        (
            {"regression.strength": 0.1},
            "regression.strength must be unset when adapter.blend is 0, got 0.1. Set adapter.blend, or remove",
        ),
        ({"head.out": 8}, 'head.out has no effect with method "adapter".'),
        ({"classifier.epochs": 3}, 'classifier.epochs has no effect with method "adapter".'),
        ({"selection.metric": "last"}, 'selection.metric has no effect with method "adapter".'),
        ({"encoder_training.views": 2}, 'encoder_training.views has no effect with method "adapter".'),
        ({"encoder_training.queue": 2}, 'encoder_training.queue has no effect with method "adapter".'),
        ({"encoder_training.chunk_size": 2}, 'encoder_training.chunk_size has no effect with method "adapter".'),
        ({"encoder_training.batch_norm": "rank"}, 'encoder_training.batch_norm has no effect with method "adapter".'),
    ],
)
def test_fields_out_of_range_or_without_effect_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError) as error:
        named_recipe("adapter").override(**changes)
    assert text in str(error.value)


@pytest.mark.parametrize("name", ["quick", "from-scratch", "fine-tune"])
def test_settings_of_heads_are_refused_without_heads(name: str) -> None:
    with pytest.raises(InputError, match=r"^adapter\.heads has no effect with method .*Use a recipe with heads"):
        named_recipe(name).override(**{"adapter.heads": 3})


def test_a_comparison_leaves_out_settings_that_an_arm_cannot_use() -> None:
    heads, plain, scratch = (named_recipe(name) for name in ("adapter", "quick", "from-scratch"))
    assert [recipe.unused("adapter.heads") is not None for recipe in (heads, plain, scratch)] == [False, True, True]
    assert [recipe.unused("encoder_training.lr") is not None for recipe in (heads, plain, scratch)] == [
        False,
        True,
        False,
    ]
    assert [recipe.unused("augment.rotation") is not None for recipe in (heads, plain, scratch)] == [True, True, False]


def test_settings_of_heads_count_only_for_their_method() -> None:
    for name in ("quick", "from-scratch", "paper-isic"):
        recipe = named_recipe(name)
        changed = Recipe(**recipe.model_dump() | {"adapter": {"heads": 3}})
        assert changed.content_hash() == recipe.content_hash()
        assert not any(path.startswith("adapter.") for path, _, _ in recipe.leaves())
    heads = named_recipe("adapter")
    assert heads.override(**{"adapter.heads": 3}).content_hash() != heads.content_hash()
    assert heads.override(**{"regression.folds": 3}).content_hash() != heads.content_hash()
