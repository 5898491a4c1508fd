"""Class weights and balanced batches that begin late in training, and which epochs can then be kept."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.nn.functional import normalize

from lopsided.data.samplers import BatchSampler
from lopsided.errors import InputError
from lopsided.evaluation.calibration import carried_prior
from lopsided.facts.log import LOG_NAME, Reporter
from lopsided.losses import catalogue
from lopsided.losses.deferred import ReweightedObjective
from lopsided.losses.objective import Objective, Samples
from lopsided.losses.reference import reference_loss
from lopsided.models.model import WEIGHTS_NAME
from lopsided.ranks import Ranks
from lopsided.recipe import Recipe
from lopsided.training import checkpoint
from lopsided.training.checkpoint import Checkpoint
from lopsided.training.fit import fit
from lopsided.training.loop import Loop, Stage, first_kept
from reporters import Ending
from training.conftest import stripes, tiny
from training.ranks import in_threads
from training.test_step import DEVICE, LABELS, make_stage

COUNTS = [6, 3, 1]
Y = torch.tensor([0, 0, 1, 0, 2, 1])
BETA = 0.99


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def reweighted(name: str, defer: float = 0.5, **parameters: Any) -> ReweightedObjective:
    entry, counts = catalogue.find(name), torch.tensor(COUNTS)
    inner = entry.load()(counts, 5, **{**entry.defaults(), **parameters})
    return ReweightedObjective(inner, counts, 5, defer=defer, beta=BETA).double()


def effective(y: Tensor) -> list[float]:
    """(1 - beta) / (1 - beta^n) of each sample, as a loop."""
    return [(1 - BETA) / (1 - BETA ** COUNTS[int(c)]) for c in y]


def losses_of(name: str, x: Tensor) -> Tensor:
    """The loss of each sample, from the formulas."""
    if name == "ce":
        return torch.stack([-row[c] + torch.log(sum(v.exp() for v in row)) for row, c in zip(x, Y, strict=True)])
    return reference_loss(normalize(x, dim=1), Y, eta=300.0, gamma=2.0, reduction="none")


@pytest.mark.parametrize(("name", "field"), [("ce", "logits"), ("afcl", "projections")])
def test_the_last_epochs_minimise_the_weighted_mean_and_the_first_ones_the_plain_mean(name: str, field: str) -> None:
    parameters = {"eta": 300.0, "eta_unit": "absolute"} if name == "afcl" else {}
    objective, x = reweighted(name, **parameters), drawn(6, 3).requires_grad_()
    values, weights = losses_of(name, x), effective(Y)
    weighted = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    for epoch, expected in ((4, values.mean()), (5, weighted), (9, weighted)):
        found = objective(Samples(Y, Y, **{field: x}, epoch=epoch, epochs=10))
        total = found[0] if isinstance(found, tuple) else found.sum()
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-8)  # The weights are stored in float32.
        got, wanted = (torch.autograd.grad(value, x, retain_graph=True)[0] for value in (total, expected))
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)


def test_an_objective_with_a_sum_alone_cannot_be_weighted() -> None:
    class Total(Objective):
        def forward(self, samples: Samples) -> tuple[Tensor, Tensor]:
            return samples.y.sum(), samples.y

    objective = ReweightedObjective(Total(torch.tensor(COUNTS), 5), torch.tensor(COUNTS), 5, defer=0.0)
    with pytest.raises(TypeError, match=r"^Total has no graph for each part; define its method apart$"):
        objective(Samples(Y, Y))


def test_every_loss_that_says_so_can_be_weighted_and_take_soft_labels() -> None:
    for entry in catalogue.losses():
        assert not entry.soft_labels or entry.kind == "classification"
        if entry.class_weights:
            x = drawn(6, 3)
            samples = Samples(Y, Y, logits=x, projections=x)
            assert entry.load()(torch.tensor(COUNTS), 3, **entry.defaults()).double().apart(samples).shape == (6,)
    assert {entry.name for entry in catalogue.losses(("classification",))} == {
        entry.name for entry in catalogue.losses() if entry.soft_labels
    }


def test_the_sampler_draws_classes_equally_from_an_epoch_on() -> None:
    labels = np.array([0] * 30 + [1] * 6)
    for kind in ("plain", "sqrt"):
        before, sampler = BatchSampler(labels, 6, kind=kind, seed=3), BatchSampler(labels, 6, kind=kind, seed=3)
        balanced = BatchSampler(labels, 6, kind="balanced", seed=3)
        sampler.balanced_from = 2
        for epoch, like in ((1, before), (2, balanced), (5, balanced)):
            sampler.set_epoch(epoch)
            like.set_epoch(epoch)
            np.testing.assert_array_equal(np.concatenate(list(sampler)), np.concatenate(list(like)))


@pytest.mark.parametrize(
    ("changes", "late", "early"),
    [
        ({"loss": "ce", "resample_from": 0.8}, (1 / 3, 1 / 3, 1 / 3), (0.6, 0.3, 0.1)),
        ({"loss": "ce", "reweight_from": 0.8, "reweight_beta": 1.0}, (1 / 3, 1 / 3, 1 / 3), (0.6, 0.3, 0.1)),
        ({"loss": "focal", "reweight_from": 0.0, "reweight_beta": 1.0}, (1 / 3, 1 / 3, 1 / 3), (1 / 3, 1 / 3, 1 / 3)),
        ({"loss": {"name": "ldam", "beta": 1.0}}, (1 / 3, 1 / 3, 1 / 3), (0.6, 0.3, 0.1)),
    ],
)
def test_the_prior_of_the_model_is_that_of_the_last_epochs(
    changes: dict[str, Any], late: tuple[float, ...], early: tuple[float, ...]
) -> None:
    recipe = Recipe().override(**{f"encoder_training.{name}": value for name, value in changes.items()})
    assert carried_prior(recipe, COUNTS) == pytest.approx(late)
    assert carried_prior(recipe, COUNTS, early=True) == pytest.approx(early)


def test_images_without_information_get_the_prior_of_weighted_smooth_labels() -> None:
    changes = {"loss": "label-aware-smoothing", "reweight_from": 0.5, "reweight_beta": BETA}
    recipe = Recipe().override(**{f"encoder_training.{name}": value for name, value in changes.items()})
    objective, y = reweighted("label-aware-smoothing"), torch.repeat_interleave(torch.arange(3), torch.tensor(COUNTS))

    def total(bias: np.ndarray) -> float:
        logits = torch.from_numpy(bias).expand(len(y), 3)
        return float(objective(Samples(y, y, logits=logits, epoch=9, epochs=10)).sum())

    bias = minimize(total, np.zeros(3), method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-13}).x
    np.testing.assert_allclose(np.exp(bias) / np.exp(bias).sum(), carried_prior(recipe, COUNTS), atol=1e-4)


def test_only_epochs_after_all_changes_are_kept() -> None:
    changes = {"loss": "ce", "epochs": 30, "reweight_from": 0.5, "resample_from": 0.8, "swa_from": 0.9}
    for names, first in (((), 0), (("reweight_from",), 15), (("reweight_from", "resample_from"), 24), (changes, 27)):
        chosen = {"loss": "ce", "epochs": 30} | {name: changes[name] for name in names}
        recipe = Recipe().override(
            method="end-to-end", **{f"encoder_training.{name}": value for name, value in chosen.items()}
        )
        assert first_kept(recipe.encoder_training) == first
    ldam = Recipe().override(**{"method": "end-to-end", "encoder_training.loss": "ldam", "encoder_training.epochs": 10})
    assert first_kept(ldam.encoder_training) == 8
    assert first_kept(ldam.override(**{"encoder_training.loss.defer": 1.0}).encoder_training) == 0


# Whole trainings

ALL_ON = {
    "reweight_from": 0.5,
    "resample_from": 0.5,
    "mixup": 0.4,
    "cutmix": 1.0,
    "sam_rho": 0.05,
    "ema": 0.9,
}
TRAININGS: dict[str, dict[str, Any]] = {
    "batch norm": {"encoder": "test_resnet", "loss": "ce", **ALL_ON},
    "own batch norm": {"encoder": "test_resnet", "loss": "ce", "batch_norm": "rank", **ALL_ON},
    "chunks": {"encoder": "mlp-16", "loss": "ldam", "chunk_size": 2, "mixup": 1.0, "cutmix": 1.0, "sam_rho": 0.1},
    "contrast": {"encoder": "mlp-16", "loss": "afcl", "queue": 20, "reweight_from": 0.5, "sam_rho": 0.1},
    "equal average": {"encoder": "test_resnet", "loss": "weighted-ce", "swa_from": 0.0, "optimizer": "sgd"},
    "equal average, own batch norm": {"encoder": "test_resnet", "loss": "ce", "batch_norm": "rank", "swa_from": 0.0},
}


def stages(number: int, settings: dict[str, Any]) -> list[Stage]:
    """Equal stages. They are made before ranks start: ranks that are threads share torch's global generator."""
    return [make_stage(rotation=0.0, epochs=2, **settings) for _ in range(number)]


def trained(ranks: Ranks, made: list[Stage]) -> dict[str, Tensor]:
    """Two epochs of batches of 5, 5 and 3 in double precision: all that is saved, and the averaged model."""
    stage = made[ranks.rank]
    stage.sampler = BatchSampler(LABELS, 5, seed=0)
    stage.average = stage.settings.ema
    if stage.settings.reweight_from is not None:
        counts = torch.from_numpy(np.bincount(LABELS))
        stage.objective = ReweightedObjective(stage.objective, counts, 6, defer=stage.settings.reweight_from).double()
    loop = Loop(stage, device=DEVICE, seed=3, num_classes=3, minority=2, reporter=Reporter(), ranks=ranks)
    facts = [loop.epoch(index, Checkpoint(None)) for index in range(2)]
    figures = {f"{name}{i}": torch.tensor(facts[i][name]) for i in range(2) for name in ("loss", "minority_loss_share")}
    with loop.averaged(1):
        model = {f"model.{name}": value.clone() for name, value in stage.module.state_dict().items()}
    return {**{name: value.clone() for name, value in loop.tensors().items()}, **figures, **model}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAININGS)
def test_several_ranks_end_with_the_weights_averages_and_figures_of_one(kind: str) -> None:
    alone = trained(Ranks(), stages(1, TRAININGS[kind]))
    first, second, third = in_threads(3, trained, stages(3, TRAININGS[kind]))
    for rank in (first, second, third):
        assert rank.keys() == alone.keys()
        for key, value in alone.items():
            if "own" in kind:  # Ranks compute other statistics than one process, but all of them have the same model.
                assert torch.equal(rank[key], first[key]), key
            else:
                torch.testing.assert_close(rank[key], value, rtol=1e-6, atol=1e-8, msg=lambda m, k=key: f"{k}: {m}")


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / LOG_NAME).read_text().splitlines()]
    return [event for event in found if event["event"] == kind]


RUNS: dict[str, dict[str, Any]] = {
    "ema": {**ALL_ON, "loss": "ce", "epochs": 4},
    "swa": {"loss": "ce", "swa_from": 0.5, "reweight_from": 0.25, "epochs": 4},
    "swa without validation": {"loss": "focal", "swa_from": 0.5, "epochs": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_an_interrupted_run_ends_with_the_same_bytes(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "TIMES_AS_LONG", 0.0)  # Every epoch is saved.
    settings = {f"encoder_training__{name}": value for name, value in RUNS[kind].items()}
    recipe = tiny(
        method="end-to-end", encoder__name="test_resnet", compare_quick=False, selection__metric="uwa",
        data__val=0.0 if "without" in kind else 0.15, **settings,
    )  # fmt: skip
    source = stripes({"many": 40, "few": 12})
    whole = fit(recipe, source, tmp_path / "whole")
    folder = tmp_path / "run"
    with pytest.raises(InterruptedError):
        fit(recipe, source, folder, reporter=Ending("epoch", nth=4, error=InterruptedError()))
    again = fit(recipe, source, folder, resume=True)
    assert (folder / WEIGHTS_NAME).read_bytes() == (tmp_path / "whole" / WEIGHTS_NAME).read_bytes()
    assert [line["loss"] for line in again.history] == [line["loss"] for line in whole.history]
    kept = [event["values"] for event in events(tmp_path / "whole", "note") if event["kind"] == "kept_epoch"]
    if "without" not in kind:
        assert kept[0]["epoch"] > 2  # Epochs 1 and 2 came before the changes.


@pytest.mark.parametrize(("val", "passes"), [(0.0, 1), (0.2, 4)])
def test_the_statistics_of_an_equal_average_are_computed_only_where_they_are_used(
    val: float, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each computation is a pass over all images: one per judged epoch, or one at the end if none is judged."""
    seen: list[int] = []
    monkeypatch.setattr(Loop, "_recompute_statistics", lambda _, index: seen.append(index))
    recipe = tiny(
        method="end-to-end", encoder_training__loss="ce", encoder_training__epochs=4, encoder_training__swa_from=0.0,
        compare_quick=False, data__val=val, selection__metric="uwa",
    )  # fmt: skip
    fit(recipe, stripes({"many": 20, "few": 8}))
    assert len(seen) == passes


def test_a_run_says_what_is_on(tmp_path: Path) -> None:
    settings = {f"encoder_training__{name}": value for name, value in ALL_ON.items()}
    recipe = tiny(
        method="end-to-end", encoder_training__loss="ce", encoder_training__epochs=1, compare_quick=False, **settings
    )
    fit(recipe, stripes({"many": 20, "few": 8}), tmp_path / "run")
    said = {event["kind"]: event["values"] for event in events(tmp_path / "run", "note")}
    assert said["reweighting"] == {"after": 0.5, "beta": 0.9999}
    assert said["resampling"] == {"after": 0.5}
    assert said["mixing"] == {"mixup": 0.4, "cutmix": 1.0}
    assert said["sharpness"] == {"rho": 0.05}
    assert said["moving_average"] == {"decay": 0.9}


CE = {"encoder_training.loss": "ce"}
CLASSIFYING = "ce, weighted-ce, focal, logit-adjusted, class-balanced, label-aware-smoothing, ldam"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"mixup": 0.2},
            "encoder_training.mixup must be 0 with the loss afcl, got 0.2. That loss cannot take soft labels. "
            f"Use one of {CLASSIFYING}.",
        ),
        (
            {"loss": "bcl", "cutmix": 1.0},
            "encoder_training.cutmix must be 0 with the loss bcl, got 1.0. That loss cannot take soft labels. "
            f"Use one of {CLASSIFYING}.",
        ),
        (
            {"loss": "ldam", "reweight_from": 0.8},
            "encoder_training.reweight_from must be unset with the loss ldam, got 0.8. This loss defers weights "
            "itself. Set encoder_training.loss.defer.",
        ),
        (
            {"loss": "weighted-ce", "reweight_from": 0.8},
            "encoder_training.reweight_from must be unset with the loss weighted-ce, got 0.8. It already treats "
            "classes differently, or cannot be weighted. Use encoder_training.resample_from, or one of cl, fcl, "
            "acl, afcl, averaged-cl, ce, focal, label-aware-smoothing.",
        ),
        (
            {"reweight_beta": 0.9},
            "encoder_training.reweight_beta must be 0.9999 when encoder_training.reweight_from is unset, got 0.9. Set "
            "encoder_training.reweight_from, such as 0.8.",
        ),
        (
            {"sampler": "balanced", "resample_from": 0.8},
            'encoder_training.resample_from must be unset with the sampler "balanced", got 0.8. That sampler already '
            'draws classes equally. Set encoder_training.sampler = "plain".',
        ),
        (
            {"ema": 0.9, "swa_from": 0.5},
            "encoder_training.ema and encoder_training.swa_from cannot both be set. Use one average of the weights.",
        ),
        (
            {"loss": "ldam", "swa_from": 0.5},
            "encoder_training.swa_from must be >= encoder_training.loss.defer (0.8), got 0.5. The average must not mix "
            "epochs with different class weights.",
        ),
        ({"reweight_from": 1.0}, "encoder_training.reweight_from must be a finite number >= 0 and < 1, got 1.0."),
        (
            {"reweight_from": 0.5, "reweight_beta": 1.1},
            "encoder_training.reweight_beta must be a finite number >= 0 and <= 1, got 1.1.",
        ),
        ({"resample_from": -0.1}, "encoder_training.resample_from must be a finite number >= 0 and < 1, got -0.1."),
        ({**CE, "mixup": 101.0}, "encoder_training.mixup must be a finite number >= 0 and <= 100, got 101.0."),
        ({**CE, "cutmix": -1.0}, "encoder_training.cutmix must be a finite number >= 0 and <= 100, got -1.0."),
        ({"sam_rho": math.inf}, "encoder_training.sam_rho must be a finite number >= 0, got inf."),
        ({"sam_rho": -0.05}, "encoder_training.sam_rho must be a finite number >= 0, got -0.05."),
        ({"ema": 1.0}, "encoder_training.ema must be a finite number >= 0 and < 1, got 1.0."),
        ({"swa_from": 1.0}, "encoder_training.swa_from must be a finite number >= 0 and < 1, got 1.0."),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(changes: dict[str, Any], text: str) -> None:
    named = {name if "." in name else f"encoder_training.{name}": value for name, value in changes.items()}
    with pytest.raises(InputError) as caught:
        Recipe().override(**named)
    assert str(caught.value) == text


def test_fine_tuning_has_its_own_moving_average_and_keeps_no_images_of_frozen_blocks() -> None:
    base: dict[str, Any] = {"method": "fine-tune", "encoder.weights": "embedded", "encoder_training.loss": "ce"}
    for changes, text in (
        (
            {"encoder_training.ema": 0.9},
            'encoder_training.ema must be 0 with method "fine-tune", got 0.9. Set fine_tune.average instead.',
        ),
        (
            {"encoder_training.swa_from": 0.5},
            "fine_tune.average must be 0 with encoder_training.swa_from, got 0.99. Set fine_tune.average = 0, or "
            "remove encoder_training.swa_from.",
        ),
        (
            {"encoder_training.mixup": 0.2, "fine_tune.blocks": 1},
            "encoder_training.mixup must be 0 when fine_tune.blocks is a number, got 0.2. Activations are kept instead "
            'of images. Set fine_tune.blocks = "all".',
        ),
    ):
        with pytest.raises(InputError) as caught:
            Recipe().override(**base, **changes)
        assert str(caught.value) == text
    with pytest.raises(InputError, match=r'^encoder_training.sam_rho has no effect with method "adapter"'):
        Recipe().override(**{"method": "adapter", "encoder.weights": "embedded", "encoder_training.sam_rho": 0.1})


def test_hashes_of_older_records_stay_valid() -> None:
    recipe = Recipe()
    assert recipe.override(**{"encoder_training.sam_rho": 0.0}).content_hash() == recipe.content_hash()
    changed = recipe.override(**{"encoder_training.sam_rho": 0.1})
    assert changed.content_hash() != recipe.content_hash()
    assert Recipe.from_toml(changed.to_toml()) == changed
