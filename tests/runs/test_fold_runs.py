from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lopsided.data.augment import to_float
from lopsided.errors import DataError, InputError, RunError
from lopsided.evaluation.calibration import at_prevalence
from lopsided.facts import notes
from lopsided.recipe import Recipe, named_recipe
from lopsided.reports.run_page import run_page
from lopsided.runs import results
from lopsided.runs.folder import Run
from lopsided.runs.folds import default_folds, fold_recipes, whole_recipe
from lopsided.runs.metrics import check_metrics
from lopsided.runs.records import Record
from lopsided.runs.reopen import open_model, open_own_split, open_use
from lopsided.runs.run import run_recipe
from lopsided.training import baseline
from reporters import Ending
from tiny import write_photos

PHOTOS = {"cat": 30, "dog": 9}
TINY = {
    "encoder.name": "mlp-8",
    "encoder_training.loss": "ce",
    "encoder_training.epochs": 2,
    "encoder_training.batch_size": 16,
    "data.folds": 3,
    "threads": 1,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Run:
    return run_recipe(recipe_of(photos), tmp_path_factory.mktemp("runs") / "run")


def recipe_of(photos: Path, **changes: Any) -> Recipe:
    return Recipe().override(**{"data.source": str(photos), **TINY, **changes})


def frozen_of(photos: Path, **changes: Any) -> Recipe:
    small = {"data.source": str(photos), "data.folds": 3, "data.image_size": 32, "threads": 1}
    small["regression.strength"] = 0.1  # Its choice costs most of the time, and is tested with the regression.
    return named_recipe("quick").override(**{**small, **changes})


def rows_of(run: Run) -> dict[str, dict[str, str]]:
    rows = [row for row in run.predictions() if row["split"] == "test"]
    return {row["name"]: row for row in rows}


def probabilities(rows: Mapping[str, Mapping[str, str]], names: list[str]) -> np.ndarray:
    return np.array([[float(rows[name][f"p:{label}"]) for label in PHOTOS] for name in names])


def files_of(folder: Path) -> dict[str, bytes]:
    """All files of a run, without times."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in ("log.jsonl", ".lock"):
            content = path.read_bytes()
            if path.name == "metrics.json":
                content = json.dumps(json.loads(content) | {"seconds": 0}).encode()
            found[str(path.relative_to(folder))] = content
    return found


def test_every_image_is_tested_once_by_a_fold_that_did_not_train_on_it(trained: Run, photos: Path) -> None:
    assert trained.metrics is not None
    check_metrics(trained.folder / "metrics.json", trained.metrics)
    rows = rows_of(trained)
    assert len(rows) == 39
    assert trained.metrics["test"]["num_images"] == 39
    assert [row["support"] for row in trained.metrics["test"]["per_class"]] == [30, 9]
    seen: list[str] = []
    for fold in (1, 2, 3):
        part = Run.open(trained.folder / "folds" / str(fold))
        assert part.metrics is not None
        own = rows_of(part)
        seen += own
        assert sum(part.metrics["counts"]["test"].values()) == len(own) == 13
        assert sum(sum(part.metrics["counts"][split].values()) for split in ("train", "val")) == 26
    assert sorted(seen) == sorted(rows)


def test_scores_are_those_of_the_folds_moved_to_one_prior(tmp_path: Path, photos: Path) -> None:
    run = run_recipe(recipe_of(photos, **{"decision.calibration": "none"}), tmp_path / "run")
    assert run.metrics is not None
    prior = run.metrics["decision"]["prior"]
    assert prior == pytest.approx([30 / 39, 9 / 39])
    together = rows_of(run)
    for fold in (1, 2, 3):
        part = Run.open(run.folder / "folds" / str(fold))
        assert part.metrics is not None
        own = rows_of(part)
        names = list(own)
        moved = at_prevalence(probabilities(own, names), part.metrics["decision"]["prior"], prior)
        np.testing.assert_allclose(probabilities(together, names), moved, rtol=1e-6)


@pytest.mark.slow
def test_the_ensemble_averages_the_logits_of_the_folds(tmp_path: Path, photos: Path) -> None:
    recipe = recipe_of(photos, **{"decision.calibration": "none"})
    run = run_recipe(recipe, tmp_path / "run")
    model, card = open_model(run.folder, "cpu")
    assert card.members == 3
    assert run.metrics is not None
    assert run.metrics["folds"]["final"] == "ensemble"
    x = to_float(torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, 3, 12, 12), dtype=np.uint8)))
    logits = []
    for fold, part in enumerate(fold_recipes(recipe), start=1):
        run_recipe(part, tmp_path / str(fold))
        own, there = open_model(tmp_path / str(fold), "cpu")
        assert card.prior is not None
        assert there.prior is not None
        with torch.no_grad():
            logits.append(own(x) + torch.tensor(np.log(card.prior) - np.log(there.prior)).float())
    with torch.no_grad():
        torch.testing.assert_close(model(x), torch.stack(logits).mean(dim=0), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_refitted_model_is_that_of_all_images_calibrated_on_out_of_fold_scores(
    tmp_path: Path, photos: Path
) -> None:
    recipe = recipe_of(photos, final="refit", **{"data.val": 0.0})
    run = run_recipe(recipe, tmp_path / "run")
    model, card = open_model(run.folder, "cpu")
    assert (card.members, card.calibrated_on) == (1, 39)
    run_recipe(whole_recipe(recipe), tmp_path / "whole")
    whole, there = open_model(tmp_path / "whole", "cpu")
    assert there.calibrated_on == 0
    x = to_float(torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, 3, 12, 12), dtype=np.uint8)))
    with torch.no_grad():
        change = torch.tensor(card.bias or (0.0, 0.0)) - torch.tensor(there.bias or (0.0, 0.0)) / card.temperature
        torch.testing.assert_close(model(x), whole(x) / card.temperature + change, rtol=1e-4, atol=1e-5)


def test_a_rule_that_is_fitted_needs_no_validation_images_with_folds(tmp_path: Path, photos: Path) -> None:
    recipe = recipe_of(photos, **{"data.val": 0.0, "decision.rule": "recall:dog>=0.8"})
    run = run_recipe(recipe, tmp_path / "run")
    _, card = open_model(run.folder, "cpu")
    assert card.decision.threshold is not None
    assert "9 out-of-fold images of dog" in card.decision.notes[0]
    use = open_use(run.folder, card, "recall:dog>=0.5")  # Another rule is fitted to the out-of-fold predictions.
    lowest = min(probabilities(rows_of(run), [name for name in rows_of(run) if name.startswith("dog")])[:, 1])
    assert use.decision.threshold is not None
    assert use.decision.threshold > lowest
    assert "9 out-of-fold images of dog" in use.decision.notes[0]


@pytest.mark.slow
def test_repeats_give_mean_figures_and_the_folds_of_the_first_repeat(
    tmp_path: Path, photos: Path, trained: Run
) -> None:
    run = run_recipe(recipe_of(photos, **{"data.repeats": 2}), tmp_path / "run")
    assert run.metrics is not None
    assert trained.metrics is not None
    folds = run.metrics["folds"]
    assert [row["repeat"] for row in folds["per_fold"]] == [1, 1, 1, 2, 2, 2]
    assert (folds["members"], run.metrics["test"]["num_images"]) == (3, 39)
    assert rows_of(run) == rows_of(trained)  # The first repeat does not depend on the number of repeats.
    assert "The metrics are means over 2 repeats." in run.metrics["test"]["notes"][-1]
    by_repeat = [
        run_recipe(recipe_of(photos, **{"data.repeats": 2}), tmp_path / "run", resume=True).metrics,
        trained.metrics,
    ]
    assert by_repeat[0] == run.metrics
    assert run.metrics["test"]["confusion"] == trained.metrics["test"]["confusion"]


def test_folds_by_group_keep_groups_together(tmp_path: Path, photos: Path) -> None:
    names = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.png"))
    lines = [f"{photos / name},{name.split('/')[0]},lesion{i // 2}" for i, name in enumerate(names)]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["path,label,group", *lines]))
    run = run_recipe(recipe_of(table, **{"data.allow_outside": True}), tmp_path / "run")
    assert run.metrics is not None
    assert run.metrics["folds"]["by"] == "group"
    assert run.metrics["test"]["num_groups"] == 20
    found: dict[str, set[int]] = {}
    for fold in (1, 2, 3):
        for row in Run.open(run.folder / "folds" / str(fold)).predictions():
            if row["split"] == "test":
                found.setdefault(row["group"], set()).add(fold)
    assert len(found) == 20
    assert all(len(folds) == 1 for folds in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 9, 24])
def test_a_run_that_is_interrupted_anywhere_ends_with_the_same_bytes(
    tmp_path: Path, photos: Path, trained: Run, at: int
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_recipe(recipe_of(photos), tmp_path / "run", reporter=Ending(nth=at))
    assert not (tmp_path / "run" / "metrics.json").exists()
    run_recipe(recipe_of(photos), tmp_path / "run", resume=True)
    assert files_of(tmp_path / "run") == files_of(trained.folder)


@pytest.mark.slow
def test_a_run_that_dies_while_it_writes_its_results_ends_with_the_same_bytes(
    tmp_path: Path, photos: Path, trained: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = results.write_metrics
    for name in ("write_tables", "write_metrics"):
        with monkeypatch.context() as patch:
            patch.setattr(results, name, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                run_recipe(recipe_of(photos), tmp_path / "run", resume=True)
    assert results.write_metrics is written
    run_recipe(recipe_of(photos), tmp_path / "run", resume=True)
    assert files_of(tmp_path / "run") == files_of(trained.folder)


def test_a_finished_run_keeps_the_figures_of_its_folds_and_removes_their_models(trained: Run) -> None:
    assert {path.name for path in (trained.folder / "folds" / "1").iterdir()} == {
        "recipe.toml", "log.jsonl", "metrics.json", "predictions.csv",
    }  # fmt: skip
    assert (trained.folder / "model.safetensors").is_file()


@pytest.mark.slow
def test_images_that_change_between_the_folds_are_noticed(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", PHOTOS)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(recipe_of(photos), tmp_path / "run", reporter=Ending("stage", "fold 2/3 end-to-end"))
    assert (tmp_path / "run" / "folds" / "1" / "metrics.json").exists()
    Image.new("RGB", (12, 12)).save(photos / "cat" / "000.png")
    with pytest.raises(RunError, match=r"have changed since .*folds/1 was trained|started with other images"):
        run_recipe(recipe_of(photos), tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"data.folds": 10}, DataError, "got 10 for 9 images of 'dog' in photos. Use at most 9, or add images."),
        ({"data.split": "group"}, DataError, "Folds by group need groups, but photos has none."),
        ({"decision.rule": "recall:fox>=0.9"}, InputError, "names no class of the model"),
    ],
)
def test_folds_that_cannot_be_made_leave_no_folder(
    tmp_path: Path, photos: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message.replace("(", r"\(")):
        run_recipe(recipe_of(photos, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_images_that_the_scenario_did_not_draw_are_evaluated_with_the_model_of_the_run(tmp_path: Path) -> None:
    drawn = {"data.scenario": "80:20,total=50", "data.held_out": True, "data.source": "fashion-mnist-tops"}
    run = run_recipe(recipe_of(tmp_path, **drawn), tmp_path / "run")
    assert run.metrics is not None
    assert run.metrics["test"]["num_images"] == 50
    supports = [row["support"] for row in run.metrics["held_out"]["per_class"]]
    assert supports[0] == supports[1] > 1000
    assert len([row for row in run.predictions() if row["split"] == "held_out"]) == sum(supports)


@pytest.mark.slow
def test_a_group_with_two_labels_stays_in_one_fold_and_is_named(tmp_path: Path, photos: Path) -> None:
    names = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.png"))
    lines = [f"{photos / name},{name.split('/')[0]},{'both' if i in (0, 38) else i}" for i, name in enumerate(names)]
    (tmp_path / "table.csv").write_text("\n".join(["path,label,group", *lines]))
    run = run_recipe(recipe_of(tmp_path / "table.csv", **{"data.allow_outside": True}), tmp_path / "run")
    assert notes.mixed_groups(1, "both") in run.facts()


def test_the_test_split_of_a_run_with_folds_is_not_evaluated_again_with_its_model(trained: Run) -> None:
    with pytest.raises(RunError, match=r"has seen all images of its run: its folds tested them with other models\."):
        open_own_split(trained.folder, "test")


@pytest.mark.slow
def test_byte_identical_images_are_in_one_fold(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", PHOTOS)
    for number in range(1, 6):
        shutil.copy(photos / "cat" / "000.png", photos / "cat" / f"{number:03d}.png")
    run = run_recipe(recipe_of(photos), tmp_path / "run")
    assert run.metrics is not None
    assert run.metrics["leaks"]["duplicates"] == []
    assert "shared_images" not in [fact.kind for fact in run.facts()]
    copies = [row["fold"] for row in run.predictions() if row["name"] in {f"cat/{i:03d}.png" for i in range(6)}]
    assert len(copies) == 6
    assert len(set(copies)) == 1


def test_a_record_and_a_page_take_a_run_with_folds_as_any_run(trained: Run) -> None:
    record = Record.from_run(trained)
    assert (record.test.images, record.test.minority) == (39, 9)
    page = run_page(trained.folder)
    assert "3 folds tested all 39 images: every metric is out-of-fold" in page
    assert "ensemble of 3 of these models" in page
    assert "39 images, out-of-fold" in page


@pytest.mark.slow
def test_a_frozen_encoder_is_refitted_and_its_probabilities_are_calibrated(tmp_path: Path, photos: Path) -> None:
    run = run_recipe(frozen_of(photos), tmp_path / "run")
    assert run.metrics is not None
    assert run.metrics["folds"]["final"] == "refit"
    assert run.metrics["decision"]["calibrated_on"] == 39
    assert run.features()["test"].shape == (39, 1280 + 2 * 816 + 8 * 112 + 96)
    model, card = open_model(run.folder, "cpu")
    assert card.members == 1
    # The classes differ in brightness, so the model of all images tells them apart.
    pictures = [np.asarray(Image.open(path).resize((32, 32))) for path in sorted(photos.rglob("*.png"))]
    with torch.no_grad():
        p = model(to_float(torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2))).softmax(dim=1).numpy()
    assert (card.decision.decide(p) == [0] * 30 + [1] * 9).mean() > 0.9


# The default


@pytest.mark.slow
def test_the_recipe_quick_is_evaluated_on_the_same_folds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = write_photos(tmp_path / "photos", {"cat": 110, "dog": 40})
    seen: list[tuple[int, int]] = []
    original = baseline.classify_by_quick

    def count(recipe: Recipe, source: Any, splits: Any, *others: Any, **more: Any) -> Any:
        seen.append((len(splits.train), len(splits.test)))
        return original(recipe, source, splits, *others, **more)

    monkeypatch.setattr(baseline, "classify_by_quick", count)
    few = {"data.folds": 4, "data.val": 0.0, "encoder_training.lr": 1e-12}
    run = run_recipe(recipe_of(photos, **few), tmp_path / "run")
    assert sorted(seen) == [(112, 38), (112, 38), (113, 37), (113, 37)]
    assert run.metrics is not None
    found = check_metrics(run.folder / "metrics.json", run.metrics)
    assert found.baseline is not None
    figures = found.baseline.splits["test"]
    rows = list(rows_of(run).values())
    recalls = [np.mean([row["predicted"] == c for row in rows if row["label"] == c]) for c in PHOTOS]
    assert figures.num_images == 150
    assert figures.model_uwa == pytest.approx(np.mean(recalls))
    assert figures.uwa.value is not None
    assert figures.uwa.value > 0.9, "The classes differ in colour."
    (fact,) = [fact for fact in found.facts if fact.kind == "below_baseline"]
    assert fact.values["split"] == "out-of-fold"
    log = (run.folder / "log.jsonl").read_text()
    assert log.count("For comparison, the recipe quick was fitted on the same folds") == 1


def test_without_a_cache_folds_cost_more_and_large_data_have_one_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"{label}{i}.png,{label}" for label, number in (("a", 7_000), ("b", 100)) for i in range(number)]
    (tmp_path / "table.csv").write_text("\n".join(["path,label", *lines]))
    assert default_folds(named_recipe("quick"), str(tmp_path / "table.csv"))[0] == 5
    monkeypatch.setenv("LOPSIDED_CACHE_GIB", "0")
    assert default_folds(named_recipe("quick"), str(tmp_path / "table.csv"))[0] is None


def test_many_classes_count_in_the_time_of_folds(tmp_path: Path) -> None:
    lines = [f"{label}/{i}.png,{label}" for label in range(1000) for i in range(8)]
    (tmp_path / "table.csv").write_text("\n".join(["path,label", *lines]))
    folds, (why,) = default_folds(named_recipe("quick"), str(tmp_path / "table.csv"))
    assert folds is None
    assert why.values["seconds"] > 3600


def test_folds_are_the_default_for_few_rare_images_and_a_frozen_encoder(photos: Path) -> None:
    recipe = frozen_of(photos, **{"data.folds": None})
    folds, (why,) = default_folds(recipe)
    assert folds == 5
    assert why == notes.folds_by_default(5, "dog", 9, 0.15, why.values["seconds"])
    assert default_folds(recipe_of(photos, **{"data.folds": None})) == (None, [])  # It trains an encoder.
    assert default_folds(recipe.override(**{"data.split": "random"})) == (None, [])


@pytest.mark.parametrize(("rare", "folds"), [(1, 5), (2, 2), (4, 4), (6, 5), (199, 5), (200, None)])
def test_the_number_of_folds_follows_from_the_rarest_class(tmp_path: Path, rare: int, folds: int | None) -> None:
    lines = [f"{label}{i}.png,{label}" for label, number in (("a", 300), ("b", rare)) for i in range(number)]
    (tmp_path / "table.csv").write_text("\n".join(["path,label", *lines]))
    assert default_folds(named_recipe("quick"), str(tmp_path / "table.csv"))[0] == folds


@pytest.mark.slow
def test_given_splits_and_long_computations_have_no_folds_by_default(tmp_path: Path) -> None:
    lines = [f"{label}{i}.png,{label},{('train', 'test')[i % 2]}" for label in "ab" for i in range(40)]
    (tmp_path / "given.csv").write_text("\n".join(["path,label,split", *lines]))
    assert default_folds(named_recipe("quick"), str(tmp_path / "given.csv")) == (None, [])
    lines = [f"{label}{i}.png,{label}" for label, number in (("a", 30_000), ("b", 100)) for i in range(number)]
    (tmp_path / "large.csv").write_text("\n".join(["path,label", *lines]))
    folds, (why,) = default_folds(named_recipe("quick"), str(tmp_path / "large.csv"))
    assert folds is None
    assert why == notes.split_by_default("b", 100, why.values["seconds"])


@pytest.mark.slow
@pytest.mark.parametrize("calibration", ["none", "temperature"])
def test_the_prior_of_folds_counts_further_labels_only_if_nothing_moves_the_probabilities(
    calibration: str, photos: Path, tmp_path: Path
) -> None:
    write_photos(tmp_path / "pool", {"cat": 1, "dog": 8}, start=500)
    rows = [f"{path.relative_to(tmp_path)},{path.parent.name}" for path in sorted(tmp_path.glob("pool/*/*.png"))]
    (tmp_path / "marks.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    changes = {"data.folds": 2, "final": "refit", "encoder_training.epochs": 1, "compare_quick": False}
    changes |= {"data.more": [str(tmp_path / "marks.csv")], "decision.calibration": calibration}
    run = run_recipe(recipe_of(photos, **changes), tmp_path / "run")
    counts = [31, 17] if calibration == "none" else [30, 9]
    assert open_model(run.folder, "cpu")[1].prior == pytest.approx([number / sum(counts) for number in counts])
    assert run.metrics is not None
    assert run.metrics["decision"]["prior"] == pytest.approx([number / sum(counts) for number in counts])
