from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lopsided.data.sources import Source, open_source
from lopsided.errors import InputError
from lopsided.inference import feature_cache
from lopsided.inference.engine import Engine
from lopsided.inference.scorer import Scorer
from lopsided.models import encoders
from lopsided.models.encoders import build_encoder
from lopsided.models.model import load_model
from lopsided.models.pretrained import Preprocessing
from lopsided.ranks import Ranks
from lopsided.recipe import Recipe, named_recipe
from lopsided.training.fit import fit
from reporters import Listening
from training.ranks import together

PHOTOS = {"cat": 30, "dog": 9}
SMALL = "test_resnet"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of weights for a small encoder, with its own preprocessing."""
    path = tmp_path_factory.mktemp("weights") / "small.safetensors"
    encoder, _ = build_encoder(SMALL, channels=3, image_size=32, seed=7)
    state = {key: value.contiguous() for key, value in encoder.state_dict().items()}
    pixels = Preprocessing(32, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
    save_file(state, path, {"lopsided": pixels.to_json()})
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOPSIDED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def small(weights: Path, **changes: Any) -> Recipe:
    fields = {"encoder.name": SMALL, "encoder.weights": str(weights), "device": "cpu", "threads": 1, "data.test": 0.3}
    return named_recipe("quick").override(**fields | changes)


def source_of(photos: Path) -> Source:
    return open_source(photos)


@pytest.mark.slow
def test_a_frozen_run_is_an_ordinary_model_with_the_preprocessing_of_its_weights(
    photos: Path, weights: Path, cache: Path, tmp_path: Path
) -> None:
    source, told = source_of(photos), Listening()
    fitted = fit(small(weights), source, tmp_path / "run", reporter=told)
    card = fitted.card
    assert (card.image_size, card.channels, card.features) == (32, 3, 96)
    assert (card.mean, card.std) == ((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
    assert fitted.history == []
    assert fitted.val is None
    model, again = load_model(tmp_path / "run")
    assert again == card
    before = build_encoder(SMALL, channels=3, weights=weights)[0].state_dict()
    assert all(torch.equal(value, before[key]) for key, value in model.encoder.state_dict().items())
    assert fitted.test is not None
    p = Scorer(model, card).images(source.images.take(fitted.splits.test))
    assert np.abs(p - fitted.test.probabilities).max() < 1e-4
    assert (fitted.test.probabilities.argmax(axis=1) == fitted.test.y_true).mean() > 0.9  # They differ in brightness.
    assert "chosen_strength" in [fact.kind for fact in told.facts]
    assert not any("epoch" in str(fact) for fact in told.facts)


@pytest.mark.slow
def test_another_run_on_the_same_images_encodes_none(photos: Path, weights: Path, cache: Path, tmp_path: Path) -> None:
    one, other, third = Listening(), Listening(), Listening()
    first = fit(small(weights), source_of(photos), tmp_path / "1", reporter=one)
    again = fit(small(weights), source_of(photos), tmp_path / "2", reporter=other)
    moved = fit(small(weights, seed=1), source_of(photos), tmp_path / "3", reporter=third)
    assert (one.images, other.images, third.images) == (39, 0, 0)
    assert set(moved.splits.test.tolist()) != set(first.splits.test.tolist())
    assert again.test is not None
    assert first.test is not None
    assert np.array_equal(again.test.probabilities, first.test.probabilities)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("1", "2")]
    assert files[0] == files[1]
    smaller = Listening()
    fit(small(weights, **{"data.image_size": 16}), source_of(photos), tmp_path / "4", reporter=smaller)
    assert smaller.images == 39


@pytest.mark.slow
def test_a_run_on_cached_features_makes_no_layers_and_writes_the_same_bytes(
    photos: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = named_recipe("quick").override(**{"device": "cpu", "threads": 1, "data.image_size": 32})
    told = Listening()
    first = fit(recipe, source_of(photos), tmp_path / "1", reporter=told)
    assert told.images == 39
    assert first.model.is_complete
    monkeypatch.setattr(encoders, "build_encoder", None)
    again = fit(recipe, source_of(photos), tmp_path / "2", reporter=told)
    assert told.images == 39
    assert not again.model.is_complete
    for name in ("model.safetensors", "model.json"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


@pytest.mark.slow
def test_a_killed_run_is_resumed_with_the_features_that_were_cached(
    photos: Path, weights: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fit(small(weights), source_of(photos), tmp_path / "whole")
    feature_cache.empty_cache(cache)
    compute, calls = Engine.encode, []

    def dies(engine: Engine, batch: torch.Tensor) -> np.ndarray:
        calls.append(len(batch))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return compute(engine, batch)

    monkeypatch.setattr("lopsided.inference.scorer.BATCH", 8)
    monkeypatch.setattr("lopsided.inference.feature_cache.PACK", 8)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "encode", dies)
        with pytest.raises(KeyboardInterrupt):
            fit(small(weights), source_of(photos), tmp_path / "run")
    told = Listening()
    resumed = fit(small(weights), source_of(photos), tmp_path / "run", resume=True, reporter=told)
    assert told.images == 39 - 16
    assert resumed.test is not None
    assert whole.test is not None
    assert np.array_equal(resumed.test.probabilities, whole.test.probabilities)
    for name in ("model.safetensors", "model.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    done = fit(small(weights), source_of(photos), tmp_path / "run", resume=True)  # It is finished, and is loaded.
    assert done.test is not None
    assert np.array_equal(done.test.probabilities, whole.test.probabilities)


def test_a_full_disk_disables_the_cache_with_a_warning_and_the_run_continues(
    photos: Path, weights: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def write(path: Path, content: bytes) -> None:
        from lopsided.files import disk_errors

        with disk_errors(path):
            full(path, content)

    monkeypatch.setattr(feature_cache, "atomic_write", write)
    told = Listening()
    fitted = fit(small(weights), source_of(photos), tmp_path / "run", reporter=told)
    assert fitted.test is not None
    (problem,) = [fact.values["error"] for fact in told.facts if fact.kind == "not_cached"]
    assert problem.startswith("cannot write ")
    assert problem.endswith("no space left on device. Free some disk space.")


def test_a_cache_folder_that_cannot_be_made_is_a_warning(
    photos: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOPSIDED_CACHE", str(tmp_path / "file" / "cache"))
    told = Listening()
    assert fit(small(weights), source_of(photos), tmp_path / "run", reporter=told).test is not None
    (problem,) = [fact.values["error"] for fact in told.facts if fact.kind == "not_cached"]
    assert problem.startswith("cannot write ")


def test_images_of_one_pixel_and_of_other_sizes_and_grey_ones_are_enlarged_and_repeated(
    weights: Path, cache: Path, tmp_path: Path
) -> None:
    from PIL import Image

    for name, level in (("dark", 20), ("light", 230)):
        (tmp_path / "odd" / name).mkdir(parents=True)
        for i, size in enumerate([(1, 1), (1, 9), (40, 3), (5, 5), (64, 48), (2, 2)]):
            mode = "L" if i % 2 else "RGB"
            Image.new(mode, size, level + i if mode == "L" else (level + i,) * 3).save(
                tmp_path / "odd" / name / f"{i}.png"
            )
    fitted = fit(small(weights), source_of(tmp_path / "odd"), tmp_path / "run")
    assert fitted.card.shape == (3, 32, 32)
    assert fitted.test is not None
    assert np.isfinite(fitted.test.probabilities).all()


def test_the_embedded_encoder_takes_one_pixel(cache: Path, tmp_path: Path) -> None:
    from lopsided.data.sources import source_from_arrays

    pixels = np.array([[[0]], [[255]]] * 6, dtype=np.uint8)
    source = source_from_arrays(pixels, [0, 1] * 6, classes=["black", "white"])
    changes = {"device": "cpu", "threads": 1, "data.test": 0.3}
    fitted = fit(named_recipe("quick").override(**changes), source, tmp_path / "run")
    assert fitted.card.shape == (3, 224, 224)
    assert fitted.test is not None
    assert (fitted.test.probabilities.argmax(axis=1) == fitted.test.y_true).all()


def test_weights_of_another_architecture_are_one_sentence(photos: Path, weights: Path, tmp_path: Path) -> None:
    recipe = small(weights, **{"encoder.name": "lcnet_035"})
    with pytest.raises(InputError, match=r"small\.safetensors does not fit lcnet_035: it has no "):
        fit(recipe, source_of(photos), tmp_path / "run")


def test_the_log_holds_the_path_of_strengths(photos: Path, weights: Path, cache: Path, tmp_path: Path) -> None:
    fit(small(weights), source_of(photos), tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    (path,) = [event for event in events if event["event"] == "regression"]
    assert path["strength"] == min(path["losses"], key=lambda pair: pair[1])[0]
    assert path["folds"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["ce", "weighted-ce"])
def test_the_prior_of_a_frozen_model_is_that_of_its_regression(
    photos: Path, weights: Path, cache: Path, tmp_path: Path, loss: str
) -> None:
    fitted = fit(
        small(weights, **{"classifier.loss": loss, "decision.calibration": "none"}), source_of(photos), tmp_path / "run"
    )
    counts = np.bincount(source_of(photos).labels[fitted.splits.train])
    expected = counts / counts.sum() if loss == "ce" else [0.5, 0.5]
    assert fitted.card.prior == pytest.approx(tuple(expected))
    assert fitted.card.decision.rule == "balanced"
    assert fitted.test is not None
    best = (fitted.test.probabilities / fitted.card.prior).argmax(axis=1)
    assert np.array_equal(fitted.test.y_pred, best)


def test_a_rule_that_is_fitted_to_validation_images_works_with_frozen_features(
    photos: Path, weights: Path, cache: Path, tmp_path: Path
) -> None:
    changes = {"data.val": 0.2, "decision.rule": "tuned"}
    fitted = fit(small(weights, **changes), source_of(photos), tmp_path / "run")
    assert fitted.val is not None
    assert fitted.card.calibrated_on == len(fitted.val.names)
    model, card = load_model(tmp_path / "run")
    p = Scorer(model, card).images(source_of(photos).images.take(fitted.splits.val))
    assert np.abs(p - fitted.val.probabilities).max() < 1e-4


def _on_a_rank(ranks: Ranks, photos: Path, weights: Path, folder: Path, cache: Path) -> np.ndarray:
    os.environ["LOPSIDED_CACHE"] = str(cache)
    own = folder if ranks.first else folder.with_name("unused")
    fitted = fit(small(weights), source_of(photos), own, ranks=ranks)
    assert fitted.test is not None
    return np.concatenate([fitted.test.probabilities, fitted.model.classifier.weight.detach().numpy().T[:12]])


@pytest.mark.slow
def test_two_ranks_share_the_images_and_both_have_the_model_of_one(photos: Path, weights: Path, tmp_path: Path) -> None:
    (alone,) = together(1, tmp_path / "1", _on_a_rank, photos, weights, tmp_path / "alone", tmp_path / "cache-1")
    both = together(2, tmp_path / "2", _on_a_rank, photos, weights, tmp_path / "both", tmp_path / "cache-2")
    for found in both:
        assert np.array_equal(found, alone)
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("alone", "both")]
    assert models[0] == models[1]
    assert not (tmp_path / "unused").exists()
    spaces = feature_cache.list_cache(tmp_path / "cache-2")
    assert [space["images"] for space in spaces] == [39]
