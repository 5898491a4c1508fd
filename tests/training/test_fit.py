from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from example_losses import add_package
from lopsided.data.images import ArrayImages, Indices
from lopsided.data.prepare import data_seed, split_source
from lopsided.data.sources import Source
from lopsided.errors import InputError, RunError
from lopsided.evaluation.metrics import balanced_accuracy
from lopsided.facts.log import Reporter
from lopsided.inference.scorer import Scorer
from lopsided.losses import Objective, Samples
from lopsided.losses.catalogue import Loss, Parameter
from lopsided.losses.contrastive import ContrastiveObjective
from lopsided.models.encoders import MLPEncoder
from lopsided.models.model import CARD_NAME, WEIGHTS_NAME
from lopsided.training.checkpoint import Checkpoint
from lopsided.training.fit import Fitted, fit
from lopsided.training.loop import Loop
from reporters import Listening
from training.conftest import stripes, tiny

PLAIN = {"augment__rotation": 0.0, "augment__horizontal_flip": False}


def weights(fitted: Fitted) -> dict[str, torch.Tensor]:
    return fitted.model.state_dict()


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], prefix: str = "") -> bool:
    return all(torch.equal(value, other[key]) for key, value in one.items() if key.startswith(prefix))


class Watching(ArrayImages):
    """Images that record which images are loaded, and between which reports of the run."""

    def __init__(self, pixels: Any, identities: Indices, seen: list[tuple[str, list[int]]]) -> None:
        super().__init__(pixels)
        self.identities, self.seen = identities, seen

    def take(self, indices: Indices) -> Watching:
        return Watching(self.pixels[indices], self.identities[indices], self.seen)

    def load(self, indices: Indices, *arguments: Any, **options: Any) -> torch.Tensor:
        self.seen.append(("load", self.identities[np.asarray(indices)].tolist()))
        return super().load(indices, *arguments, **options)


class Noting(Reporter):
    def __init__(self, seen: list[tuple[str, list[int]]]) -> None:
        self.seen = seen

    def stage(self, name: str, epochs: int, steps_per_epoch: int) -> None:
        self.seen.append((name, []))

    def epoch(self, index: int, facts: Mapping[str, Any]) -> None:
        self.seen.append(("epoch", []))


def watched(source: Source, **changes: Any) -> tuple[Fitted, list[tuple[str, list[int]]]]:
    seen: list[tuple[str, list[int]]] = []
    assert isinstance(source.images, ArrayImages)
    images = Watching(source.images.pixels, np.arange(len(source)), seen)
    source = Source("watched", images, source.labels, source.classes, source.names)
    return fit(tiny(data__cache="none", **changes), source, reporter=Noting(seen)), seen


def loaded(seen: list[tuple[str, list[int]]]) -> list[int]:
    return sorted(identity for _, identities in seen for identity in identities)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cl", "fcl", "acl", "afcl", "ce", "weighted-ce", "focal"])
def test_every_loss_learns_to_tell_stripes_apart(loss: str) -> None:
    source = stripes({"many": 120, "some": 40, "few": 24})
    changes = {"encoder_training__epochs": 12, "classifier__epochs": 15, "classifier__lr": 0.05, "data__test": 0.25}
    fitted = fit(tiny(encoder_training__loss=loss, **changes, **PLAIN), source)
    assert fitted.test is not None
    assert fitted.card.classes == ("many", "some", "few")
    assert balanced_accuracy(fitted.test.y_true, fitted.test.y_pred) > 0.9
    assert {entry["stage"] for entry in fitted.history} == (
        {"encoder", "classifier"} if loss.endswith("cl") else {"end-to-end"}
    )
    assert all(("anchors_without_positives" in entry) == (entry["stage"] == "encoder") for entry in fitted.history)


@pytest.mark.parametrize(
    "changes",
    [
        {"encoder_training__views": 2},
        {"encoder_training__sampler": "m-per-class", "encoder_training__optimizer": "sgd"},
        {"encoder_training__optimizer": "adamw", "encoder_training__weight_decay": 0.1},
        {"classifier__loss": "focal", "classifier__augment": True, "encoder.name": "test_resnet"},
        {"classifier__loss": "weighted-ce", "encoder_training__schedule": "constant", "data__image_size": 6},
        {"augment__crop": 0.5, "augment__colour": 0.4, "data__channels": 3},
    ],
)
def test_every_way_to_train_gives_finite_figures(source: Source, changes: dict[str, Any]) -> None:
    fitted = fit(tiny(encoder_training__epochs=1, **changes), source)
    assert fitted.test is not None
    assert np.isfinite(fitted.test.probabilities).all()
    assert all(np.isfinite(entry["loss"]) for entry in fitted.history)


def test_a_last_batch_of_one_image_is_left_out_of_the_encoders_training() -> None:
    source = stripes({"many": 28, "few": 5})
    recipe = tiny(**{"encoder.name": "test_resnet"}, data__val=0.0, data__test=0.0, encoder_training__epochs=1)
    heard = Listening()
    fit(recipe, source, reporter=heard)
    assert heard.of("step") == [16, 16] + 2 * [16, 16, 1]


def test_the_same_recipe_gives_the_same_bytes_and_another_seed_others(source: Source, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        fit(tiny(seed=seed), source, tmp_path / name)
    for name in (WEIGHTS_NAME, CARD_NAME):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert (tmp_path / "a" / WEIGHTS_NAME).read_bytes() != (tmp_path / "c" / WEIGHTS_NAME).read_bytes()


def test_a_run_leaves_the_global_state_alone(source: Source) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate(), torch.get_num_threads()
    fit(tiny(threads=torch.get_num_threads() + 1), source)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert random.getstate() == before[2]
    assert torch.get_num_threads() == before[3]


def test_what_a_network_draws_by_itself_follows_from_the_seed(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dropping(MLPEncoder):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.append(torch.nn.Dropout(0.5))

    plain = fit(tiny(), source)
    monkeypatch.setattr("lopsided.models.encoders.MLPEncoder", Dropping)
    runs = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        runs.append(fit(tiny(), source))
    assert same(weights(runs[0]), weights(runs[1]))
    assert not same(weights(runs[0]), weights(plain))


def test_where_images_are_kept_does_not_change_the_model(source: Source) -> None:
    one, other = (fit(tiny(data__cache=cache), source) for cache in ("memory", "none"))
    assert same(weights(one), weights(other))


def test_the_second_stage_leaves_the_encoder_as_it_is() -> None:
    source = stripes({"many": 30, "few": 12})
    network = {"encoder.name": "test_resnet", "encoder_training__epochs": 1}
    short = fit(tiny(classifier__epochs=1, **network), source)
    for augment in (False, True):
        long = fit(tiny(classifier__epochs=3, classifier__augment=augment, **network), source)
        assert same(weights(short), weights(long), "encoder.")
        assert not same(weights(short), weights(long), "classifier.")


def test_the_second_stage_encodes_each_image_once_unless_it_augments(source: Source) -> None:
    for augment, times in ((False, 1), (True, 3)):
        fitted, seen = watched(source, classifier__augment=augment, classifier__epochs=3, classifier__sampler="plain")
        splits = fitted.splits
        begin = next(i for i, (what, _) in enumerate(seen) if what == "classifier")
        last_of_first = max(i for i in range(begin) if seen[i][0] == "epoch")
        end = max(i for i, (what, _) in enumerate(seen) if what == "epoch")
        rows = loaded(seen[last_of_first:end])
        assert rows == sorted([*np.repeat(splits.train, times).tolist(), *splits.val.tolist()])


@pytest.mark.parametrize("loss", ["afcl", "ce"])
def test_the_test_split_is_looked_at_once_and_at_the_end(source: Source, loss: str) -> None:
    fitted, seen = watched(source, encoder_training__loss=loss)
    end = max(i for i, (what, _) in enumerate(seen) if what == "epoch")
    test = set(fitted.splits.test.tolist())
    assert test
    assert not test & set(loaded(seen[: end + 1]))
    assert [row for row in loaded(seen[end:]) if row in test] == sorted(test)


@pytest.mark.parametrize("loss", ["afcl", "ce"])
def test_the_model_of_the_best_validation_epoch_is_taken(loss: str) -> None:
    # Labels without meaning: the figure goes up and down from epoch to epoch.
    source = stripes({"one": 40, "other": 40})
    source = replace(source, labels=np.random.default_rng(3).permutation(source.labels))
    changes = {"classifier__epochs": 8, "encoder_training__epochs": 8, "data__val": 0.3, "classifier__lr": 0.5}
    # Calibration would add biases after the choice, and so change decisions.
    changes |= {"encoder_training__lr": 0.02, "decision__calibration": "none", "selection__metric": "uwa"}
    fitted = fit(tiny(encoder_training__loss=loss, **changes), source)
    assert fitted.val is not None
    figures = [entry["val_uwa"] for entry in fitted.history if entry["stage"] != "encoder"]
    assert balanced_accuracy(fitted.val.y_true, fitted.val.y_pred) == pytest.approx(max(figures))
    assert figures[-1] < max(figures)


def test_the_encoder_of_the_best_epoch_goes_into_the_second_stage(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = replace(source, labels=np.random.default_rng(1).permutation(source.labels))
    encoders, original = [], Loop.epoch

    def recording(self: Loop, *given: Any) -> dict[str, Any]:
        facts = original(self, *given)
        if self.stage.name == "encoder":
            encoders.append({key: value.clone() for key, value in self.stage.module.state_dict().items()})
        return facts

    monkeypatch.setattr(Loop, "epoch", recording)
    fitted = fit(tiny(encoder_training__epochs=8, encoder_training__lr=0.05, data__val=0.3), source)
    figures = [entry["val_log_loss"] for entry in fitted.history if entry["stage"] == "encoder"]
    best = max(i for i, figure in enumerate(figures) if figure == min(figures))
    assert best < 7
    taken = {key: value for key, value in weights(fitted).items() if key.startswith("encoder.")}
    assert [same(taken, encoder) for encoder in encoders] == [i == best for i in range(8)]


def test_without_validation_the_last_model_is_taken(source: Source) -> None:
    fitted = fit(tiny(data__val=0.0), source)
    assert fitted.val is None
    assert len(fitted.history) == 5
    assert not any(name.startswith("val_") for entry in fitted.history for name in entry)
    assert "no_validation_split" in [fact.kind for fact in fitted.cautions]


def test_training_stops_when_patience_runs_out(source: Source) -> None:
    # The learning rate is too small to change anything, so the figure never improves after the first epoch.
    still = {"encoder_training__lr": 1e-12, "classifier__lr": 1e-12}
    fitted = fit(tiny(selection__patience=2, encoder_training__epochs=9, classifier__epochs=9, **still), source)
    assert [entry["stage"] for entry in fitted.history] == ["encoder"] * 3 + ["classifier"] * 3


def test_the_learning_rate_follows_a_cosine_or_stays(source: Source) -> None:
    fitted = fit(tiny(data__test=0.0, data__val=0.0, encoder_training__lr=1.0, classifier__schedule="constant"), source)
    steps = 5  # 72 images in batches of 16
    expected = [0.5 * (1 + np.cos(np.pi * (steps * (epoch + 1) - 1) / (3 * steps))) for epoch in range(3)]
    assert [entry["lr"] for entry in fitted.history[:3]] == pytest.approx(expected)
    assert [entry["lr"] for entry in fitted.history[3:]] == [0.01, 0.01]


def test_anchors_without_positives_are_counted() -> None:
    source = stripes({"many": 10, "single": 1, "pair": 2})
    changes = {"data__val": 0.0, "data__test": 0.0, "encoder_training__epochs": 1}
    assert fit(tiny(**changes), source).history[0]["anchors_without_positives"] == 1 / 13
    assert fit(tiny(encoder_training__views=2, **changes), source).history[0]["anchors_without_positives"] == 0


def test_the_minoritys_share_of_the_loss_is_that_of_its_images() -> None:
    source = stripes({"many": 10, "few": 4})
    recipe = tiny(
        encoder_training__loss="ce", encoder_training__epochs=1, encoder_training__lr=1e-12, data__val=0.0,
        data__test=0.0, **PLAIN,
    )  # fmt: skip
    fitted = fit(recipe, source)
    probabilities = torch.from_numpy(Scorer(fitted.model, fitted.card).images(source.images))
    values = cross_entropy(probabilities.log(), torch.from_numpy(source.labels), reduction="none")
    assert fitted.history[0]["loss"] == pytest.approx(float(values.mean()), rel=1e-5)
    assert fitted.history[0]["minority_loss_share"] == pytest.approx(float(values[10:].sum() / values.sum()), rel=1e-5)


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_place(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, original = [0], ContrastiveObjective.forward

    def breaking(self: ContrastiveObjective, *arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls[0] += 1
        total, parts = original(self, *arguments, **named)
        factor = float("nan") if calls[0] == 6 else 1.0
        return total * factor, parts * factor

    monkeypatch.setattr(ContrastiveObjective, "forward", breaking)
    with pytest.raises(RunError) as caught:  # 50 images: 4 steps per epoch
        fit(tiny(), source, tmp_path / "run")
    path = tmp_path / "run" / "checkpoint" / "state.safetensors"
    assert str(caught.value) == (
        "The loss is not finite: nan in step 2 of epoch 2 of stage encoder. Lower encoder_training.lr. "
        f"The last good checkpoint is {path}, after epoch 1 of stage encoder."
    )
    assert path.exists()
    assert not (tmp_path / "run" / CARD_NAME).exists()
    monkeypatch.undo()
    fit(tiny(), source, tmp_path / "run", resume=True)
    fit(tiny(), source, tmp_path / "whole")
    assert (tmp_path / "run" / WEIGHTS_NAME).read_bytes() == (tmp_path / "whole" / WEIGHTS_NAME).read_bytes()


@pytest.mark.parametrize(("precision", "more"), [("float32", ""), ("bf16", ' Or set precision to "float32".')])
def test_a_first_loss_that_is_not_finite_is_not_put_down_to_the_learning_rate(
    precision: str, more: str, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ContrastiveObjective.forward

    def breaking(self: ContrastiveObjective, *arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        total, parts = original(self, *arguments, **named)
        return total * math.nan, parts * math.nan

    monkeypatch.setattr(ContrastiveObjective, "forward", breaking)
    with pytest.raises(RunError) as caught:
        fit(tiny(precision=precision), source, tmp_path)
    assert str(caught.value) == (
        "The loss is not finite: nan in step 1 of epoch 1 of stage encoder. Check the inputs, encoder.weights and the "
        f"parameters of encoder_training.loss; encoder_training.lr is not the cause.{more}"
    )


class BrokenObjective(Objective):
    def __init__(self, counts: torch.Tensor, width: int, *, where: str) -> None:
        super().__init__(counts, width)
        self.where = where
        if where == "constructor":
            raise ValueError("two classes, please")

    def forward(self, samples: Samples) -> Any:
        assert samples.projections is not None
        if self.where == "forward":
            raise IndexError("no such class")
        return samples.projections.detach().sum(dim=1) if self.where == "gradient" else None


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("constructor", r"constructor \(ValueError: two classes, please\)"),
        ("forward", r"forward \(IndexError: no such class\)"),
        ("nothing", r"forward \(AttributeError: 'NoneType' object has no attribute 'sum'\)"),
        ("gradient", r"gradient \(RuntimeError: .* does not require grad.*\)"),
    ],
)
def test_an_error_inside_a_loss_of_another_package_names_the_loss_and_the_package(
    where: str, told: str, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = (Parameter("where", where, "Where it breaks."),)
    add_package(monkeypatch, Loss("broken", "contrastive", "Broken loss", BrokenObjective, parameters))
    whose = "The loss 'broken' of the package lopsided-broken failed in its"
    with pytest.raises(InputError, match=rf"^{whose} {told}\. Correct that package, or choose another loss\.$"):
        fit(tiny(encoder_training__loss="broken"), source, tmp_path)


def test_an_objective_that_is_none_is_refused(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Any = lambda counts, width: torch.nn.Identity()  # noqa: E731
    add_package(monkeypatch, Loss("broken", "contrastive", "Broken loss", kind))
    with pytest.raises(InputError, match=r"\(TypeError: Identity does not derive from lopsided\.losses\.Objective\)"):
        fit(tiny(encoder_training__loss="broken"), source, tmp_path)


def test_memory_that_runs_out_inside_a_loss_of_another_package_stays_that(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kind(counts: torch.Tensor, width: int) -> Any:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    add_package(monkeypatch, Loss("broken", "contrastive", "Broken loss", kind))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"^\[enforce fail\]"):
        fit(tiny(encoder_training__loss="broken"), source, tmp_path)


def test_weights_that_are_not_finite_are_never_saved(source: Source, tmp_path: Path) -> None:
    recipe = tiny(classifier__lr=1e300, classifier__optimizer="sgd", classifier__batch_size=1000)
    text = r"The weights are not finite: NaN or infinity after epoch 1 of stage classifier\. Lower"
    with pytest.raises(RunError, match=text):
        fit(recipe, source, tmp_path)
    saved = Checkpoint(tmp_path).load()
    assert saved is not None
    assert (saved[0].stage, saved[0].epoch) == ("classifier", 0)
    assert not (tmp_path / WEIGHTS_NAME).exists()


def test_the_log_tells_what_happened_line_by_line(source: Source, tmp_path: Path) -> None:
    fitted = fit(tiny(), source, tmp_path)
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert all("time" in event for event in events)
    assert events[0]["threads"] == 1
    assert events[0]["device"] == "cpu"
    assert events[0]["images"]["train"] == {"many": 42, "few": 8}
    epochs = [{k: v for k, v in e.items() if k not in ("event", "time")} for e in events if e["event"] == "epoch"]
    assert epochs == fitted.history
    assert {"loss", "minority_loss_share", "anchors_without_positives", "lr", "seconds", "images_per_second"} <= set(
        epochs[0]
    )
    assert [event["text"] for event in events if event["event"] == "warning"] == list(map(str, fitted.cautions))
    assert [event["values"]["place"] for event in events if event.get("kind") == "images_read"] == ["memory"]


def test_leaks_are_found_and_warned_about(source: Source) -> None:
    assert isinstance(source.images, ArrayImages)
    splits = split_source(tiny(), source)
    source.images.pixels[splits.test[0]] = source.images.pixels[splits.train[0]]
    fitted = fit(tiny(encoder_training__epochs=1), source)
    assert len(fitted.leaks.duplicates) == 1
    (fact,) = [fact for fact in fitted.cautions if fact.kind == "shared_images"]
    assert (fact.values["images"], fact.values["unit"]) == (1, "split")


def test_splits_follow_the_recipe_and_the_source(source: Source) -> None:
    grouped = Source(
        "g",
        source.images,
        source.labels,
        source.classes,
        source.names,
        groups=np.array([str(i // 3) for i in range(72)]),
    )
    parts = split_source(tiny(), grouped).parts()
    held = [set(grouped.groups[rows]) for _, rows in parts]  # type: ignore[index]
    assert sum(map(len, held)) == len(set.union(*held))
    fixed = tiny(data__redraw=False, seed=5)
    assert (data_seed(fixed), data_seed(tiny(seed=5))) == (0, 5)
    assert np.array_equal(split_source(fixed, source).test, split_source(tiny(seed=0), source).test)


def test_what_cannot_start_leaves_nothing_behind(source: Source, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for changes, text in (
        ({"device": "cuda:99"}, "device must be available on this machine"),
        ({"encoder.name": "resnet81"}, "encoder.name must be a timm model"),
        ({"encoder.weights": "absent.safetensors"}, "encoder.weights must be a readable safetensors file"),
    ):
        with pytest.raises(InputError, match=text):
            fit(tiny(**changes), source, folder)
        assert not folder.exists()


def test_a_run_is_not_written_over_and_not_resumed_with_something_else(source: Source, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fit(tiny(), source, folder)
    with pytest.raises(RunError, match=r"run already holds a run\. Choose another folder, or continue that run with"):
        fit(tiny(), source, folder)
    with pytest.raises(
        RunError, match=r"The run started with another recipe\. Resume it with the same recipe and data"
    ):
        fit(tiny(seed=3), source, folder, resume=True)
    with pytest.raises(RunError, match=r"The run started with other images, labels or splits\. Resume it"):
        fit(tiny(), source.subset(np.arange(1, 72)), folder, resume=True)
    with pytest.raises(RunError, match=r"A run without a folder cannot be resumed\. Give the folder"):
        fit(tiny(), source, resume=True)


def test_what_a_killed_process_left_behind_is_removed(source: Source, tmp_path: Path) -> None:
    (tmp_path / ".model.safetensors.99.tmp").touch()
    fit(tiny(), source, tmp_path, resume=True)
    assert not list(tmp_path.glob(".*"))


def test_weights_that_a_process_killed_at_its_end_left_are_removed_when_the_run_is_read_back(
    source: Source, tmp_path: Path
) -> None:
    fit(tiny(), source, tmp_path)
    for name in ("encoder.safetensors", "chosen-classifier-2.safetensors", ".state.safetensors.7.tmp"):
        (tmp_path / "checkpoint" / name).touch()
    fit(tiny(), source, tmp_path, resume=True)
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["state.safetensors"]


def test_a_finished_run_is_read_back(source: Source, tmp_path: Path) -> None:
    first = fit(tiny(), source, tmp_path)
    content = (tmp_path / WEIGHTS_NAME).read_bytes()
    again = fit(tiny(device="cpu"), source, tmp_path, resume=True)
    assert first.test is not None
    assert again.test is not None
    assert np.array_equal(first.test.probabilities, again.test.probabilities)
    assert (again.history, again.card, again.seconds) == (first.history, first.card, first.seconds)
    assert (tmp_path / WEIGHTS_NAME).read_bytes() == content
