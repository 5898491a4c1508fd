"""Classifier re-training, learnt scales and tau-normalisation, against computations of their own in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lopsided.data.augment import to_float
from lopsided.data.sources import Source
from lopsided.errors import InputError
from lopsided.evaluation.calibration import carried_prior
from lopsided.facts import notes
from lopsided.models.encoders import build_encoder, seeded_init
from lopsided.models.heads import ClassifierHead
from lopsided.models.model import load_model
from lopsided.recipe import Recipe, named_recipe
from lopsided.training.finishers import TAUS, tau_normalised
from lopsided.training.fit import Fitted, fit
from reporters import Ending, Listening
from training.conftest import stripes, tiny

COUNTS = {"many": 50, "some": 24, "few": 12}
SHARES = np.array([50, 24, 12]) / 86
RAW = {"decision__calibration": "none", "compare_quick": False, "data__test": 0.2, "data__val": 0.3}
"""Without calibration, the classifier of the model is the trained one."""


@pytest.fixture(scope="module")
def source() -> Source:
    return stripes(COUNTS)


def recipe(**changes: Any) -> Recipe:
    return tiny(**{"encoder_training__loss": "ce", **RAW, **changes})


@pytest.fixture(scope="module")
def plain(source: Source) -> Fitted:
    return fit(recipe(), source)


def features(fitted: Fitted, source: Source, rows: Any) -> np.ndarray:
    with torch.no_grad():
        return fitted.model.features(to_float(source.images.load(rows, None, 1))).double().numpy()


def assert_same_encoder(one: Fitted, other: Fitted) -> None:
    found, expected = one.model.encoder.state_dict(), other.model.encoder.state_dict()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def head_of(fitted: Fitted) -> tuple[np.ndarray, np.ndarray]:
    head = fitted.model.classifier
    return head.weight.detach().double().numpy(), head.bias.detach().double().numpy()


def test_tau_normalisation_divides_each_row_by_a_power_of_its_length() -> None:
    weight = np.random.default_rng(0).normal(size=(4, 7)) * np.array([[10.0], [1.0], [0.1], [0.0]])
    for tau in (0.0, 0.3, 1.0, 2.0):
        found = tau_normalised(torch.from_numpy(weight), tau).numpy()
        for row, other in zip(weight, found, strict=True):
            length = sum(value * value for value in row) ** 0.5
            np.testing.assert_allclose(other, row / length**tau if length else row, rtol=1e-12)


def test_a_given_tau_changes_the_classifier_alone(plain: Fitted, source: Source) -> None:
    fitted = fit(recipe(classifier__kind="tau-norm", classifier__tau=0.7), source)
    assert_same_encoder(fitted, plain)
    assert without_time(fitted.history) == without_time(plain.history)  # The first stage is judged as ever.
    weight, _ = head_of(plain)
    lengths = np.sqrt((weight**2).sum(axis=1, keepdims=True))
    assert lengths.max() / lengths.min() > 1.02
    found, bias = head_of(fitted)
    np.testing.assert_allclose(found, weight / lengths**0.7, rtol=1e-6)
    assert not bias.any()
    assert fitted.card.prior == pytest.approx((1 / 3,) * 3)
    assert plain.card.prior == pytest.approx(SHARES, abs=0.02)


def without_time(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in ("seconds", "images_per_second")} for row in history]


def test_validation_images_choose_the_first_tau_with_the_best_figure(source: Source) -> None:
    changes = {"selection__metric": "uwa", "encoder_training__epochs": 6}
    base, told = fit(recipe(**changes), source), Listening()
    fitted = fit(recipe(classifier__kind="tau-norm", **changes), source, reporter=told)
    rows = base.splits.val
    x, y, (weight, _) = features(base, source, rows), source.labels[rows], head_of(base)
    figures = []
    for tau in TAUS:
        logits = x @ np.stack([row / np.linalg.norm(row) ** tau for row in weight]).T
        figures.append(np.mean([(logits.argmax(axis=1) == c)[y == c].mean() for c in range(3)]))
    best = TAUS[int(np.argmax(figures))]
    assert notes.tau(best, "uwa", 21) in told.facts
    np.testing.assert_allclose(head_of(fitted)[0], tau_normalised(torch.from_numpy(weight), best).numpy(), rtol=1e-5)


GD = {"classifier__optimizer": "sgd", "classifier__sampler": "plain", "classifier__schedule": "constant",
      "classifier__lr": 0.3, "classifier__epochs": 5, "classifier__batch_size": 1000, "data__val": 0.0}  # fmt: skip
"""One batch of all images per epoch, so that a loop over all images computes the same without the order."""


def descend(loss: Any, parameters: list[torch.Tensor]) -> None:
    """Five steps of gradient descent with momentum 0.9, written out."""
    speeds = [torch.zeros_like(p) for p in parameters]
    for _ in range(5):
        gradients = torch.autograd.grad(loss(), parameters)
        with torch.no_grad():
            for p, speed, gradient in zip(parameters, speeds, gradients, strict=True):
                speed.mul_(0.9).add_(gradient)
                p.sub_(0.3 * speed)


@pytest.mark.parametrize("kind", ["crt", "lws"])
def test_the_second_stage_trains_the_classifier_on_the_encoder_of_the_plain_run(source: Source, kind: str) -> None:
    made = recipe(classifier__kind=kind, **GD)
    base, fitted = fit(made.first_stage(), source), fit(made, source)
    assert_same_encoder(fitted, base)
    rows = base.splits.train
    x, y = torch.from_numpy(features(base, source, rows)), torch.from_numpy(source.labels[rows])
    if kind == "crt":
        with seeded_init(0, "retrained"):
            head = ClassifierHead(x.shape[1], 3).double()
        parameters = [head.weight, head.bias]
        descend(lambda: torch.nn.functional.cross_entropy(head(x), y), parameters)
        expected = [p.detach().numpy() for p in parameters]
    else:
        weight, bias = map(torch.from_numpy, head_of(base))
        scales = torch.ones(3, dtype=torch.float64, requires_grad=True)
        descend(lambda: torch.nn.functional.cross_entropy((x @ weight.T + bias) * scales, y), [scales])
        s = scales.detach().numpy()
        assert np.abs(s - 1).max() > 0.01
        expected = [weight.numpy() * s[:, None], bias.numpy() * s]
    for found, value in zip(head_of(fitted), expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-5)
    assert [row["stage"] for row in fitted.history] == ["end-to-end"] * 3 + ["classifier"] * 5


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, SHARES),
        ({"classifier__kind": "crt"}, np.ones(3)),
        ({"classifier__kind": "lws"}, np.ones(3)),
        ({"classifier__kind": "tau-norm"}, np.ones(3)),
        ({"classifier__kind": "crt", "classifier__sampler": "plain"}, SHARES),
        ({"classifier__kind": "crt", "classifier__sampler": "sqrt"}, np.sqrt(SHARES)),
        ({"classifier__kind": "crt", "classifier__loss": "weighted-ce"}, 1 / SHARES),
        ({"encoder_training__sampler": "balanced"}, np.ones(3)),
        ({"encoder_training__sampler": "balanced", "classifier__kind": "crt", "classifier__sampler": "plain"}, SHARES),
        ({"encoder_training__loss": "cl", "classifier__kind": "tau-norm", "classifier__sampler": "plain"}, np.ones(3)),
    ],
)
def test_the_prior_is_that_of_the_stage_that_makes_the_classifier(
    changes: dict[str, Any], expected: np.ndarray
) -> None:
    made = recipe(**changes)
    np.testing.assert_allclose(carried_prior(made, [50, 24, 12]), expected / expected.sum(), rtol=1e-9)
    if made.method == "end-to-end":
        first = expected if made.classifier.kind == "linear" else (
            np.ones(3) if made.encoder_training.sampler == "balanced" else SHARES
        )  # fmt: skip
        np.testing.assert_allclose(carried_prior(made.first_stage(), [50, 24, 12]), first / first.sum(), rtol=1e-9)


def test_a_cosine_classifier_is_replaced_by_a_linear_one(source: Source, tmp_path: Path) -> None:
    made = recipe(encoder_training__loss="ldam", classifier__kind="crt")
    fitted = fit(made, source, tmp_path / "run")
    assert fitted.card.head == "linear"
    model, _ = load_model(tmp_path / "run")
    assert type(model.classifier) is ClassifierHead
    assert_same_encoder(fitted, fit(made.first_stage(), source))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "epochs"), [("crt", (3, 4, 5)), ("lws", (4, 5)), ("tau-norm", (3,))])
def test_an_interrupted_run_ends_with_the_same_bytes(
    source: Source, tmp_path: Path, kind: str, epochs: tuple[int, ...]
) -> None:
    made = recipe(classifier__kind=kind, decision__calibration="affine")
    fit(made, source, tmp_path / "whole")
    for epoch in epochs:
        folder = tmp_path / str(epoch)
        with pytest.raises(KeyboardInterrupt):
            fit(made, source, folder, reporter=Ending("epoch", nth=epoch))
        fit(made, source, folder, resume=True)
        for name in ("model.safetensors", "model.json"):
            assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["crt", "tau-norm"])
def test_a_fine_tuned_encoder_gets_a_second_stage(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "small.safetensors"
    encoder, _ = build_encoder("test_resnet", channels=1, image_size=16, seed=7)
    save_file({key: value.contiguous() for key, value in encoder.state_dict().items()}, path)
    changes = {"encoder.name": "test_resnet", "encoder.weights": str(path), "augment.normalisation": "half",
               "encoder_training.loss": "ce", "fine_tune.steps": 1, "encoder_training.batch_size": 16,
               "fine_tune.blocks": 1, "fine_tune.blend": 0.0, "data.image_size": 16, "threads": 1,
               "compare_quick": False}  # fmt: skip
    images = stripes({"many": 30, "few": 12}, size=16)
    base = named_recipe("fine-tune").override(**changes)
    made = base.override(**{"classifier.kind": kind, "data.val": 0.3})
    made = made.override(**{"classifier.epochs": 2}) if kind == "crt" else made
    fitted = fit(made, images, tmp_path / "run")
    assert_same_encoder(fitted, fit(base.override(**{"data.val": 0.3}), images))
    if kind == "crt":
        assert [row["stage"] for row in fitted.history] == ["fine-tune", "classifier", "classifier"]
        with pytest.raises(KeyboardInterrupt):
            fit(made, images, tmp_path / "again", reporter=Ending("epoch", nth=3))
        fit(made, images, tmp_path / "again", resume=True)
        names = ("again", "run")
        one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in names)
        assert one == other


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"classifier__tau": 0.5},
            r'classifier\.tau must be unset when classifier\.kind is "linear", got 0\.5\. Set classifier\.kind = ',
        ),
        ({"classifier__kind": "tau-norm", "classifier__tau": 0.0}, r"classifier\.tau must be a finite number > 0 and"),
        ({"classifier__kind": "tau-norm", "classifier__tau": 2.5}, r"classifier\.tau must be a finite number > 0 and"),
        (
            {"classifier__kind": "tau-norm", "data__val": 0.0},
            r"classifier\.tau must be set when data\.val is 0: there are no validation images to choose it by\.$",
        ),
        (
            {"encoder_training__loss": "cl", "classifier__kind": "crt"},
            r'classifier\.kind cannot be "crt" with method "two-stage", whose second stage trains a new classifier '
            r'anyway\. Use "linear" or "tau-norm"\.$',
        ),
        (
            {"encoder_training__loss": "ldam", "classifier__kind": "tau-norm"},
            r'classifier\.kind cannot be "tau-norm" with encoder_training\.loss = ldam, which trains a cosine '
            r'classifier\. Use "crt", or another loss\.$',
        ),
        ({"classifier__kind": "retrain"}, r'classifier\.kind must be one of "linear", "crt", "lws", "tau-norm", got'),
        (
            {"encoder_training__loss": "ce", "method": "end-to-end", "classifier__epochs": 3},
            r'classifier\.epochs has no effect with method "end-to-end" and classifier\.kind "linear"\. Set ',
        ),
    ],
)
def test_second_stages_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        recipe(**changes)


def test_other_methods_have_no_second_stage() -> None:
    text = named_recipe("quick").to_toml().replace('kind = "linear"', 'kind = "crt"')
    message = r'^classifier\.kind cannot be "crt" with method "frozen", whose classifier is a logistic regression\. Use'
    with pytest.raises(InputError, match=message):
        Recipe.from_toml(text)
    with pytest.raises(InputError, match=r'the loss cl, which trains no classifier\. Use "linear"\.$'):
        named_recipe("fine-tune").override(
            **{"encoder_training.loss": "cl", "classifier.kind": "crt", "fine_tune.blend": 0}
        )


def test_the_classifier_of_a_baseline_can_be_trained_again_in_one_command() -> None:
    two, kind = tiny(), {"encoder_training.loss": "ce", "classifier.kind": "crt"}
    made = two.override(**kind, **{"classifier.epochs": 7})
    assert (made.method, made.encoder_training.epochs, made.classifier.epochs) == ("end-to-end", 3, 7)  # One budget.
    assert made.spec.epochs(made) == (3, 7)
    assert two.override(**{"encoder_training.loss": "ce"}).encoder_training.epochs == 5
    assert Recipe.from_toml(made.to_toml()) == made
