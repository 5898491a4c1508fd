from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from example_losses import add_examples
from lopsided.data.augment import Augment, to_float
from lopsided.data.inputs import MemoryInputs
from lopsided.data.sources import open_source
from lopsided.errors import InputError, RunError
from lopsided.evaluation.calibration import carried_prior
from lopsided.facts import cautions, notes
from lopsided.inference.scorer import Scorer
from lopsided.models.cut import cut_encoder
from lopsided.models.encoders import build_encoder
from lopsided.models.heads import ClassifierHead
from lopsided.models.model import Model, load_model
from lopsided.models.pretrained import Preprocessing
from lopsided.ranks import Ranks
from lopsided.recipe import EncoderTraining, Recipe, named_recipe
from lopsided.training.fit import fit
from lopsided.training.loop import Average
from lopsided.training.methods import fine_tune
from lopsided.training.methods.fine_tune import Activations, fine_tune_sampler, parameter_groups, seeded_views, to_bytes
from lopsided.training.regression import Regression, fit_regression
from reporters import Ending, Listening
from training.ranks import together

PHOTOS = {"cat": 30, "dog": 9}
SMALL = "test_resnet"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "small.safetensors"
    encoder, _ = build_encoder(SMALL, channels=3, image_size=32, seed=7)
    pixels = Preprocessing(32, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
    state = {key: value.contiguous() for key, value in encoder.state_dict().items()}
    save_file(state, path, {"lopsided": pixels.to_json()})
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOPSIDED_CACHE", str(tmp_path / "cache"))


def small(weights: Path, **changes: Any) -> Recipe:
    fields = {
        "encoder.name": SMALL,
        "encoder.weights": str(weights),
        "device": "cpu",
        "threads": 1,
        "data.test": 0.3,
        "encoder_training.batch_size": 8,
        "regression.strength": 0.01,
        "fine_tune.blocks": 2,
        "fine_tune.views": 2,
        "fine_tune.steps": 7,
        "fine_tune.blend": 0.0,
    }
    return named_recipe("fine-tune").override(**fields | changes)


def pretrained(weights: Path) -> dict[str, torch.Tensor]:
    return build_encoder(SMALL, channels=3, image_size=32, weights=weights)[0].state_dict()


# Groups of parameters


def test_rates_fall_from_block_to_block_and_norms_and_biases_have_no_weight_decay() -> None:
    encoder, width = build_encoder(SMALL, channels=3, image_size=32)
    module = nn.ModuleDict({"encoder": encoder, "classifier": ClassifierHead(width, 2)})
    settings = EncoderTraining(lr=0.1, weight_decay=0.02)
    groups = parameter_groups(encoder, module, settings, 0.5)
    found = {id(weight): group for group in groups for weight in group["params"]}
    assert len(found) == sum(len(group["params"]) for group in groups) == len(list(module.parameters()))
    # The stem is block 0, and the four layers of one block each are the blocks 1 to 4.
    for name, scale in (("conv1", 1 / 32), ("layer1", 1 / 16), ("layer2", 1 / 8), ("layer3", 1 / 4), ("layer4", 1 / 2)):
        for weight in encoder.get_submodule(name).parameters():
            group = found[id(weight)]
            assert group["scale"] == pytest.approx(scale)
            assert group["lr"] == pytest.approx(0.1 * scale)
            assert group["weight_decay"] == (0.02 if weight.ndim > 1 else 0.0)
    head = module["classifier"]
    assert (found[id(head.weight)]["scale"], found[id(head.weight)]["weight_decay"]) == (1.0, 0.02)
    assert (found[id(head.bias)]["scale"], found[id(head.bias)]["weight_decay"]) == (1.0, 0.0)


def test_weights_that_are_not_trained_are_in_no_group() -> None:
    encoder, _ = build_encoder(SMALL, channels=3, image_size=32)
    encoder.layer1.requires_grad_(False)
    groups = parameter_groups(encoder, encoder, EncoderTraining(), 0.5)
    found = {id(weight) for group in groups for weight in group["params"]}
    assert not found & {id(weight) for weight in encoder.layer1.parameters()}


def test_the_optimizer_takes_steps_of_the_scaled_rates(photos: Path, weights: Path) -> None:
    """With plain gradient descent and one step, the change of a weight is its rate times its gradient."""
    same = {"encoder_training.optimizer": "sgd", "encoder_training.weight_decay": 0.0, "fine_tune.warmup": 0.0}
    same |= {
        "encoder_training.lr": 1.0,
        "fine_tune.steps": 1,
        "fine_tune.average": 0.0,
        "encoder_training.schedule": "constant",
    }
    changes = []
    for decay in (1.0, 0.5):
        fitted = fit(small(weights, **same, **{"fine_tune.layer_decay": decay}), open_source(photos))
        before = pretrained(weights)
        changes.append({key: value - before[key] for key, value in fitted.model.encoder.state_dict().items()})
    for name, scale in (("layer4.", 0.5), ("layer3.", 0.25)):
        moved = [key for key in changes[0] if key.startswith(name) and changes[0][key].abs().max() > 1e-3]
        assert moved
        for key in moved:
            assert torch.allclose(changes[1][key], scale * changes[0][key], rtol=1e-2, atol=1e-6)


# Moving average


def test_the_moving_average_is_that_of_a_plain_loop_and_can_be_put_in_and_taken_out() -> None:
    module = nn.Linear(2, 1)
    module.bias.requires_grad_(False)
    average = Average(module, 0.9)
    expected, generator = module.weight.detach().clone(), torch.Generator().manual_seed(0)
    for step in range(200):
        with torch.no_grad():
            module.weight.copy_(torch.randn(1, 2, generator=generator))
        average.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * module.weight.detach()
    now = module.weight.detach().clone()
    with average.applied():
        assert torch.allclose(module.weight, expected, atol=1e-6)
    assert torch.equal(module.weight, now)
    other = Average(module, 0.9)
    other.restore(average.tensors())
    assert set(average.tensors()) == {"average.weight"}
    other.apply()
    assert torch.allclose(module.weight, expected, atol=1e-6)
    with pytest.raises(ValueError, match=r"^the average of weight has another shape or dtype$"):
        other.restore({"average.weight": torch.zeros(3)})


# Activations


def kept(shape: tuple[int, ...] = (3, 32, 32), blocks: int = 2) -> tuple[Model, Activations]:
    encoder, width = build_encoder(SMALL, channels=3, image_size=32, seed=3)
    model = Model(encoder, ClassifierHead(width, 2), (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)).eval()
    return model, Activations(model, cut_encoder(encoder, blocks, shape), shape, Ranks(), fast=True)


def test_kept_activations_give_the_features_of_the_whole_encoder() -> None:
    model, activations = kept()
    pixels = torch.randint(0, 256, (70, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    counted: list[tuple[int, int]] = []
    found = activations.compute(MemoryInputs(pixels), lambda *done: counted.append(done))
    assert (found.dtype, tuple(found.shape)) == (torch.float16, (70, 1, 4, 4, 48))
    assert counted == [(64, 70), (70, 70)]
    assert activations.bytes_of(70) == found.numel() * 2
    with torch.no_grad():
        expected = model.features(pixels / 255)
    features = activations.features(found, 32)
    assert (features - expected).abs().max() < 2e-3 * expected.abs().max()
    few = activations.compute(MemoryInputs(pixels), lambda *_: None, rows=np.array([5, 69]))
    assert torch.equal(few, found[[5, 69]])


def test_views_depend_on_the_seed_and_the_image_and_not_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    _, activations = kept()
    pixels = torch.randint(0, 256, (10, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    views = seeded_views(Augment(rotation=20.0, horizontal_flip=True), 5)
    found = activations.compute(MemoryInputs(pixels), lambda *_: None, views=3, augment=views)
    monkeypatch.setattr(fine_tune, "_BATCH", 4)
    again = activations.compute(MemoryInputs(pixels), lambda *_: None, views=3, augment=views)
    assert torch.allclose(found.float(), again.float(), atol=2e-3)
    for one, other in ((0, 1), (1, 2)):
        assert (found[:, one] - found[:, other]).abs().amax(dim=(1, 2, 3)).min() > 0
    whole = to_bytes(views(pixels, 2, 0, 10))
    assert (activations.compute(MemoryInputs(whole), lambda *_: None)[:, 0] - found[:, 2]).abs().max() < 2e-3


def test_a_batch_draws_different_views_of_each_row_and_ranks_draw_the_same() -> None:
    _, activations = kept()
    store = torch.arange(12, dtype=torch.float16).view(4, 3, 1, 1, 1)  # Row r and view v hold the number 3 r + v.
    transform = activations.draw(store, 2)
    rows = torch.tensor([3, 0, 2])
    drawn = transform(rows, torch.Generator().manual_seed(1), 0, 3).flatten().view(3, 2)
    assert torch.equal(drawn // 3, rows[:, None].expand(3, 2).float())
    assert (drawn[:, 0] != drawn[:, 1]).all()
    share = transform(rows[1:], torch.Generator().manual_seed(1), 1, 3).flatten().view(2, 2)
    assert torch.equal(share, drawn[1:])
    seen = {transform(rows[:1], torch.Generator().manual_seed(i), 0, 1).flatten()[0].item() for i in range(40)}
    assert seen == {9.0, 10.0, 11.0}


def test_bytes_are_rounded() -> None:
    assert to_bytes(torch.tensor([0.0, 0.4 / 255, 0.6 / 255, 1.0, 1.01])).tolist() == [0, 0, 1, 255, 255]


def test_activations_that_do_not_fit_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    _, activations = kept()
    monkeypatch.setattr(fine_tune, "free_memory", lambda: 40_000_000)
    size = 4 * 4 * 48 * 2
    assert activations.check(100, 2, 10) == (100 * 2 + 10) * size
    most = 10_000_000 // size // 8
    activations.check(most, 8, 0)
    with pytest.raises(InputError) as caught:
        activations.check(2 * most, 8, 0)
    assert str(caught.value) == (
        f"The activations of 8 views of {2 * most:,} images take 20 MB, but at most 10 MB of the free memory may be "
        "used. Lower fine_tune.views, fine_tune.blocks or data.image_size."
    )


def test_activations_beyond_float16_are_one_sentence() -> None:
    model, activations = kept()
    with torch.no_grad():
        model.encoder.layer2[0].bn2.bias.fill_(1e6)
    broken = Activations(model, activations.cut, (3, 32, 32), Ranks(), fast=False)
    with pytest.raises(RunError, match=r"^Activations of the encoder do not fit into float16.*Set fine_tune\.blocks"):
        broken.compute(MemoryInputs(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)), lambda *_: None)


# Runs


@pytest.mark.parametrize("blocks", [2, "all"])
def test_a_run_changes_only_the_trained_blocks_and_no_statistics(photos: Path, weights: Path, blocks: Any) -> None:
    views = {"fine_tune.views": None} if blocks == "all" else {}
    told = Listening()
    fitted = fit(small(weights, **{"fine_tune.blocks": blocks, **views}), open_source(photos), reporter=told)
    before, after = pretrained(weights), fitted.model.encoder.state_dict()
    trained = ("layer3.", "layer4.") if blocks == 2 else ("conv1", "bn1", "layer")
    for key, value in after.items():
        statistic = key.endswith(("running_mean", "running_var", "num_batches_tracked"))
        assert torch.equal(value, before[key]) == (statistic or not key.startswith(trained)), key
    assert len(told.of("step")) == 7
    assert [line["epoch"] for line in fitted.history] == [1, 2]  # 27 training images are 4 steps.
    assert fitted.val is None


def test_batch_norm_can_be_trained(photos: Path, weights: Path) -> None:
    fitted = fit(small(weights, **{"fine_tune.batch_norm": "train"}), open_source(photos))
    before, after = pretrained(weights), fitted.model.encoder.state_dict()
    assert after["layer4.0.bn1.num_batches_tracked"] == before["layer4.0.bn1.num_batches_tracked"] + 7
    assert not torch.equal(after["layer4.0.bn1.running_mean"], before["layer4.0.bn1.running_mean"])
    assert torch.equal(after["layer2.0.bn1.running_mean"], before["layer2.0.bn1.running_mean"])


@pytest.mark.parametrize(("loss", "val"), [("ce", 0.2), ("cl", 0.2), ("cl", 0.0), ("joint", 0.2)])
def test_any_kind_of_loss_gives_an_ordinary_model(
    photos: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str, val: float
) -> None:
    add_examples(monkeypatch)  # The loss "joint" needs projections and logits.
    source = open_source(photos)
    recipe = small(weights, **{"encoder_training.loss": loss, "data.val": val, "encoder_training.lr": 1e-4})
    fitted = fit(recipe, source, tmp_path / "run")
    model, card = load_model(tmp_path / "run")
    assert fitted.test is not None
    p = Scorer(model, card).images(source.images.take(fitted.splits.test))
    assert np.abs(p - fitted.test.probabilities).max() < 1e-4
    assert (fitted.test.y_pred == fitted.test.y_true).mean() > 0.8  # They differ in brightness.
    assert all(("val_uwa" in line) == bool(val) for line in fitted.history)
    assert (card.calibrated_on > 0) == bool(val)


def test_the_first_classifier_is_the_regression_of_the_default(photos: Path, weights: Path) -> None:
    """With a rate of almost zero, the model is that of the recipe quick, whatever the batches are."""
    common = {
        "encoder.name": SMALL,
        "encoder.weights": str(weights),
        "threads": 1,
        "data.test": 0.3,
    }
    default = fit(named_recipe("quick").override(**common, **{"regression.strength": 0.01}), open_source(photos))
    assert default.test is not None
    for sampler, blend in (("plain", 0.0), ("balanced", 0.0), ("balanced", 0.3)):
        changes = {"encoder_training.sampler": sampler, "fine_tune.blend": blend}
        recipe = small(weights, **{"encoder_training.lr": 1e-12, **changes})
        fitted = fit(recipe, open_source(photos))
        assert fitted.test is not None
        assert np.abs(fitted.test.probabilities - default.test.probabilities).max() < 1e-4


@pytest.mark.parametrize("changes", [{}, {"fine_tune.blocks": "all", "fine_tune.views": None}])
def test_the_classifier_gets_scaled_features_in_training_and_after_it(
    photos: Path, weights: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    lengths, forward = [], ClassifierHead.forward

    def spy(self: ClassifierHead, x: torch.Tensor) -> torch.Tensor:
        lengths.extend(x.detach().norm(dim=1).tolist())
        return forward(self, x)

    monkeypatch.setattr(ClassifierHead, "forward", spy)
    fitted = fit(small(weights, **{"fine_tune.steps": 2, "data.val": 0.3, **changes}), open_source(photos))
    assert (fitted.model.scaling, len(fitted.history)) == ("root", 1)
    assert len(lengths) > 2 * 8 + 2 * len(fitted.splits.val)
    np.testing.assert_allclose(lengths, 1, atol=1e-5)


@pytest.mark.parametrize("loss", ["ce", "cl"])
def test_a_blend_averages_the_regressions_on_the_pretrained_and_the_trained_encoder(
    photos: Path, weights: Path, tmp_path: Path, loss: str
) -> None:
    source, changes = open_source(photos), {"encoder_training.loss": loss, "encoder_training.lr": 3e-3}
    tuned = fit(small(weights, **changes), source).model.encoder.state_dict()
    fitted = fit(small(weights, **changes, **{"fine_tune.blend": 0.25}), source, tmp_path / "run")
    model, card = load_model(tmp_path / "run")
    assert (card.members, card.features, card.prior) == (2, model.classifier.in_features, fitted.card.prior)
    for member, expected in zip(model.encoder.members, (pretrained(weights), tuned), strict=True):
        assert all(torch.equal(value, expected[key]) for key, value in member.state_dict().items())
    log = (tmp_path / "run" / "log.jsonl").read_text()
    assert log.count('"event": "regression"') == 1  # That on the pretrained encoder is fitted twice and told once.
    assert fitted.test is not None
    found = Scorer(model, card).images(source.images.take(fitted.splits.test))
    assert np.abs(found - fitted.test.probabilities).max() < 1e-4
    # By hand: one regression on the scaled features of each encoder, both of the same strength.
    images = source.images.load(np.arange(len(source)), 32, 3)
    train, logits = fitted.splits.train, np.zeros((len(fitted.splits.test), 2))
    for member, share in zip(model.encoder.members, (0.25, 0.75), strict=True):
        alone = Model(member, ClassifierHead(card.features // 2, 2), (0.4, 0.5, 0.6), (0.2, 0.25, 0.3), scaling="root")
        with torch.no_grad():
            features = alone.eval().features(to_float(images)).numpy()
        linear = fit_regression(features[train], source.labels[train], 2, strength=0.01)
        logits += share * (features[fitted.splits.test] @ linear.weight.T + linear.bias)
    assert np.abs(torch.from_numpy(logits).softmax(dim=1).numpy() - found).max() < 1e-3


def test_the_regression_on_the_trained_encoder_has_the_strength_that_folds_chose_before_it(
    photos: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strengths = []

    def spy(*rows: Any, **settings: Any) -> Regression:
        found = fit_regression(*rows, **settings)
        strengths.append((settings["strength"], found.strength))
        return found

    monkeypatch.setattr("lopsided.training.methods.frozen.fit_regression", spy)
    fit(small(weights, **{"fine_tune.blend": 0.5, "regression.strength": None}), open_source(photos))
    first, again, last = strengths  # Before training, and both regressions of the blend.
    assert first == again
    assert first[0] is None
    assert last == (first[1], first[1])


def test_the_prior_is_that_of_the_batches_or_of_the_last_regression(weights: Path) -> None:
    def prior(**changes: Any) -> tuple[float, ...]:
        return carried_prior(small(weights, **changes), [30, 10])

    assert prior() == pytest.approx((0.75, 0.25))
    assert prior(**{"encoder_training.sampler": "balanced"}) == pytest.approx((0.5, 0.5))
    assert prior(**{"encoder_training.sampler": "balanced", "fine_tune.blend": 0.5}) == pytest.approx((0.75, 0.25))
    contrastive = {"encoder_training.loss": "cl", "encoder_training.sampler": "balanced"}
    assert prior(**contrastive) == pytest.approx((0.75, 0.25))
    assert prior(**contrastive, **{"classifier.loss": "weighted-ce"}) == pytest.approx((0.5, 0.5))


# Budget


def test_the_rate_rises_and_then_follows_the_cosine_of_the_steps(photos: Path, weights: Path) -> None:
    recipe = small(weights, **{"fine_tune.steps": 8, "fine_tune.warmup": 0.5, "encoder_training.lr": 1e-4})
    fitted = fit(recipe, open_source(photos))
    # An epoch has 4 steps: the last step of the first one has the full rate, the last one is at 3/4 of the cosine.
    rates = [1e-4, 1e-4 * 0.5 * (1 + np.cos(np.pi * 3 / 4))]
    assert [line["lr"] for line in fitted.history] == pytest.approx(rates)


@pytest.mark.parametrize(("images", "size", "per_epoch"), [(27, 8, 4), (25, 8, 3), (24, 8, 3), (5, 8, 1), (9, 8, 1)])
def test_steps_are_exact_and_batches_of_one_image_are_left_out(
    weights: Path, images: int, size: int, per_epoch: int
) -> None:
    recipe = small(weights, **{"encoder_training.batch_size": size})
    sampler = fine_tune_sampler(recipe, np.arange(images) % 2)
    sampler.limit = 7
    assert len(sampler) == per_epoch
    batches = []
    for epoch in range(-(-7 // per_epoch)):
        sampler.set_epoch(epoch)
        batches += list(sampler)
    assert len(batches) == 7
    assert min(map(len, batches)) > 1


def test_minutes_are_settled_once_and_kept_when_the_run_is_resumed(
    photos: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small(weights, **{"fine_tune.steps": None, "fine_tune.minutes": 10.0})
    calls = []

    def settle(*arguments: Any) -> int:
        found = settled(*arguments)
        calls.append(found)
        return 9

    settled = fine_tune.settle_steps
    monkeypatch.setattr(fine_tune, "settle_steps", settle)
    with pytest.raises(KeyboardInterrupt):
        fit(recipe, open_source(photos), tmp_path / "run", reporter=Ending("step", nth=6))
    with safe_open(tmp_path / "run" / "checkpoint" / "state.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["lopsided"])["steps"] == 9
    told = Listening()
    fit(recipe, open_source(photos), tmp_path / "run", resume=True, reporter=told)
    assert len(calls) == 1
    assert calls[0] > 9  # A step of this encoder takes far less than a minute.
    assert len(told.of("step")) == 9 - 4
    assert notes.fixed_steps(9) in told.facts
    # The trial steps left no trace: the same number of steps gives the same weights.
    fit(small(weights, **{"fine_tune.steps": 9}), open_source(photos), tmp_path / "steps")
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "steps")]
    assert models[0] == models[1]


def test_seconds_become_steps_by_the_median_of_the_trial_steps_and_the_evaluation() -> None:
    class Loop:
        class stage:  # noqa: N801  It stands for an instance.
            trained = nn.Linear(1, 1)
            sampler = range(4)

        def trial(self, steps: int, clock: Any) -> list[float]:
            with torch.no_grad():
                self.stage.trained.weight.fill_(9.0)
            return [50.0, 1.0, 2.0, 3.0, 2.0, 90.0]

    times = iter([0.0, 8.0])
    before = Loop.stage.trained.weight.item()
    found = fine_tune.settle_steps(Loop(), lambda: None, 100.0, lambda: next(times))  # type: ignore[arg-type]
    assert found == 25  # 2 s per step, and 8 s per evaluation of 4 steps.
    assert Loop.stage.trained.weight.item() == before
    assert fine_tune.settle_steps(Loop(), None, -3.0) == 1  # type: ignore[arg-type]


def test_epochs_are_known_only_without_another_budget() -> None:
    from lopsided.training.cautions import falling_cautions

    history = [{"stage": "fine-tune", "epoch": i + 1, "loss": 5.0 - i} for i in range(5)]
    steps = named_recipe("fine-tune")
    epochs = steps.override(**{"fine_tune.steps": None, "encoder_training.epochs": 5})
    assert (steps.spec.epochs(steps), epochs.spec.epochs(epochs)) == ((), (5,))
    assert list(falling_cautions(steps, history)) == []
    assert list(falling_cautions(epochs, history)) == [cautions.falling_loss("fine-tune", 2.0, 1.0, "epochs")]
    second = epochs.override(**{"fine_tune.blend": 0, "classifier.kind": "crt", "classifier.epochs": 2})
    falling = [{"stage": "classifier", "epoch": i + 1, "loss": 3.0 - i} for i in range(2)]
    stages = [fact.values["stage"] for fact in falling_cautions(second, history + falling)]
    assert stages == ["fine-tune", "classifier"]


# Resume and ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"encoder_training.loss": "cl", "data.val": 0.2, "encoder_training.views": 2},
        {"fine_tune.blocks": "all", "fine_tune.views": None, "fine_tune.batch_norm": "train", "fine_tune.blend": 0.5},
    ],
)
def test_a_run_that_is_interrupted_and_resumed_ends_with_the_same_bytes(
    photos: Path, weights: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    recipe = small(weights, **changes, **{"fine_tune.steps": 11})
    fit(recipe, open_source(photos), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fit(recipe, open_source(photos), tmp_path / "run", reporter=Ending("step", nth=7))
    told = Listening()
    fit(recipe, open_source(photos), tmp_path / "run", resume=True, reporter=told)
    assert 4 <= len(told.of("step")) < 11
    for name in ("model.safetensors", "model.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.slow
def test_a_caution_given_before_the_interruption_is_one_of_the_resumed_run(
    photos: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caution, regress = cautions.directed_classes(0.1, 0.6, "tta=none"), fine_tune.regress

    def cautious(trainer: Any, **settings: Any) -> float:
        trainer.log.fact(caution)
        return regress(trainer, **settings)

    monkeypatch.setattr(fine_tune, "regress", cautious)
    recipe = small(weights, **{"fine_tune.steps": 11})
    whole = fit(recipe, open_source(photos), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fit(recipe, open_source(photos), tmp_path / "run", reporter=Ending("step", nth=7))
    told = Listening()
    resumed = fit(recipe, open_source(photos), tmp_path / "run", resume=True, reporter=told)
    assert caution not in told.facts  # The regression is not fitted again.
    assert resumed.cautions == whole.cautions
    assert whole.cautions.count(caution) == 1
    assert fit(recipe, open_source(photos), tmp_path / "run", resume=True).cautions == whole.cautions


def test_a_checkpoint_without_the_number_of_steps_is_refused(photos: Path, weights: Path, tmp_path: Path) -> None:
    recipe = small(weights, **{"fine_tune.steps": None, "fine_tune.minutes": 0.02})
    fit(recipe, open_source(photos), tmp_path / "run")
    path = tmp_path / "run" / "checkpoint" / "state.safetensors"
    with safe_open(path, framework="pt") as file:
        state = json.loads(file.metadata()["lopsided"])
    save_file({}, path, {"lopsided": json.dumps({**state, "steps": None})})
    with pytest.raises(RunError, match=r"^The checkpoint does not fit the recipe: it is at epoch \d+ of 0 in stage"):
        fit(recipe, open_source(photos), tmp_path / "run", resume=True)
    save_file({}, path, {"lopsided": json.dumps({**state, "steps": -1})})
    with pytest.raises(RunError, match=r"steps = -1 is not possible\."):
        fit(recipe, open_source(photos), tmp_path / "run", resume=True)


def _on_a_rank(ranks: Ranks, photos: Path, weights: Path, cache: Path) -> list[np.ndarray]:
    import os

    os.environ["LOPSIDED_CACHE"] = str(cache)
    changes = {"data.val": 0.2, "fine_tune.steps": 3, "fine_tune.blend": 0.5}
    recipe, source = small(weights, **{"encoder_training.loss": "cl", **changes}), open_source(photos)
    state = fit(recipe, source, cache.parent / f"run{ranks.size}", ranks=ranks).model.state_dict()
    again = fit(recipe, source, cache.parent / f"run{ranks.size}", ranks=ranks, resume=True).model.state_dict()
    assert all(torch.equal(again[key], value) for key, value in state.items())
    blocks = [f"encoder.members.1.{name}.0.conv1.weight" for name in ("layer4", "layer1")]
    return [state[key].numpy() for key in (*blocks, "encoder.members.0.layer4.0.conv1.weight", "classifier.weight")]


@pytest.mark.slow
def test_two_ranks_train_the_blocks_of_one(photos: Path, weights: Path, tmp_path: Path) -> None:
    (alone,) = together(1, tmp_path / "1", _on_a_rank, photos, weights, tmp_path / "cache")
    both = together(2, tmp_path / "2", _on_a_rank, photos, weights, tmp_path / "cache")
    assert all(np.array_equal(a, b) for a, b in zip(*both, strict=True))
    assert np.abs(both[0][0] - alone[0]).max() < 1e-3
    assert np.array_equal(both[0][1], alone[1])
    assert np.array_equal(both[0][2], alone[2])


# Refused recipes


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"encoder.weights": "none", "augment.normalisation": "source"},
            'encoder.weights cannot be "none" with method "fine-tune", which needs a pretrained encoder. Start '
            "from --recipe fine-tune, or set encoder.weights, or use the recipe from-scratch.",
        ),
        (
            {"fine_tune.blend": 0.5, "classifier.kind": "tau-norm", "classifier.tau": 1.0},
            'fine_tune.blend must be 0 with classifier.kind = "tau-norm", got 0.5. Set fine_tune.blend = 0, or '
            'classifier.kind = "linear".',
        ),
        (
            {"fine_tune.blend": 0.5, "data.folds": 3, "final": "ensemble"},
            'final cannot be "ensemble" with fine_tune.blend, which gives each model two encoders. Use final = '
            '"refit".',
        ),
        (
            {"fine_tune.minutes": 2.0, "fine_tune.steps": 5},
            "fine_tune.steps and fine_tune.minutes cannot both be set. Remove one of them.",
        ),
        (
            {"fine_tune.blocks": "all", "fine_tune.views": 3},
            'fine_tune.views must be unset when fine_tune.blocks is "all", got 3. Set fine_tune.blocks to a number, or '
            "remove the field.",
        ),
        (
            {"encoder_training.loss": "cl", "encoder_training.views": 4, "fine_tune.views": 3},
            "fine_tune.views must be >= encoder_training.views (4), got 3. A batch holds different views of an image.",
        ),
        (
            {"compile": True},
            "compile must be false when fine_tune.blocks is a number, got true. Set compile = false, or "
            'fine_tune.blocks = "all".',
        ),
        (
            {"classifier.loss": "focal"},
            'classifier.loss cannot be focal with method "fine-tune". Use one of ce, weighted-ce.',
        ),
        (
            {"classifier.epochs": 3},
            'classifier.epochs has no effect with method "fine-tune": the classifier starts from a logistic '
            "regression.",
        ),
        (
            {"encoder_training.epochs": 3},
            "encoder_training.epochs has no effect because fine_tune.steps or fine_tune.minutes is set. Set that field "
            "instead, or add fine_tune.steps=unset.",
        ),
        ({"fine_tune.blocks": 0}, 'fine_tune.blocks must be an integer >= 1 and <= 2147483647 or "all", got 0.'),
        ({"fine_tune.layer_decay": 0.0}, "fine_tune.layer_decay must be a finite number > 0 and <= 1, got 0.0."),
        ({"fine_tune.warmup": 1.0}, "fine_tune.warmup must be a finite number >= 0 and < 1, got 1.0."),
        ({"fine_tune.average": 1.0}, "fine_tune.average must be a finite number >= 0 and < 1, got 1.0."),
        ({"fine_tune.minutes": 0.0}, "fine_tune.minutes must be a finite number > 0, got 0.0."),
    ],
)
def test_what_a_fine_tuning_cannot_use_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError) as caught:
        named_recipe("fine-tune").override(**changes)
    assert str(caught.value) == text


def test_other_methods_refuse_and_do_not_hash_the_section() -> None:
    for name, method in (("quick", "frozen"), ("from-scratch", "two-stage")):
        recipe = named_recipe(name)
        with pytest.raises(InputError) as caught:
            recipe.override(**{"fine_tune.steps": 3})
        text = f'fine_tune.steps has no effect with method "{method}". Start from the recipe fine-tune.'
        assert str(caught.value) == text
        assert recipe.unused("fine_tune.steps") is not None
        other = Recipe(**recipe.model_dump() | {"fine_tune": {"steps": 3}})
        assert other.content_hash() == recipe.content_hash()
    recipe = named_recipe("fine-tune")
    assert recipe.override(**{"fine_tune.steps": 3}).content_hash() != recipe.content_hash()
    assert recipe.override(**{"regression.folds": 3}).content_hash() != recipe.content_hash()
    assert recipe.unused("fine_tune.steps") is None
    assert recipe.unused("classifier.epochs") is not None
    epochs = recipe.override(**{"fine_tune.steps": None, "encoder_training.epochs": 2})
    assert epochs.encoder_training.epochs == 2
    assert epochs.unused("encoder_training.epochs") is None


def test_vectors_cannot_be_fine_tuned() -> None:
    from lopsided import LopsidedClassifier

    x = np.random.default_rng(0).normal(size=(20, 4))
    with pytest.raises(InputError):
        LopsidedClassifier(recipe="fine-tune").fit(x, np.arange(20) % 2)


def test_the_estimator_fine_tunes_images(weights: Path) -> None:
    from lopsided import LopsidedClassifier

    generator = np.random.default_rng(0)
    y = np.arange(24) % 2
    x = np.clip(generator.normal(80 + 90 * y[:, None, None], 20, (24, 16, 16)), 0, 255).astype(np.uint8)
    settings = {
        "encoder.name": SMALL,
        "encoder.weights": str(weights),
        "fine_tune.steps": 2,
        "fine_tune.blocks": 1,
        "fine_tune.views": 1,
    }
    model = LopsidedClassifier(recipe="fine-tune", settings=settings, random_state=0, num_threads=1)
    assert (model.fit(x, y).predict(x) == y).all()
