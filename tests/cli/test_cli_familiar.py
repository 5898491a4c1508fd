"""Unfamiliar images in ``predict``, ``find`` and ``evaluate``."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

import lopsided
from lopsided import cli
from lopsided.errors import LopsidedError
from lopsided.evaluation.typicality import MOST_KNOWN
from lopsided.inference.familiar import BANK_NAME, load_bank
from lopsided.reports.report import write_run_reports
from lopsided.reports.run_data import shown_images
from lopsided.runs.folder import Run
from lopsided.runs.maps import MAPS, make_maps, read_maps
from lopsided.runs.reopen import open_model
from made_runs import make_run
from tiny import SIZE
from tiny_command import Call

PHOTOS = {"cat": 90, "dog": 30}


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    run = tmp_path_factory.mktemp("frozen") / "run"
    small = ["--recipe", "quick", "--quiet", "--folds", "2", "--device", "cpu", "compare_quick=false"]
    assert cli.run(["fit", str(photos), "--out", str(run), *small]) == 0
    return run


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Charts, lines of a page, and one colour: nothing like the photographs."""
    folder = tmp_path_factory.mktemp("odd") / "odd"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for i in range(3):
        chart = Image.new("RGB", (SIZE, SIZE), "white")
        draw = ImageDraw.Draw(chart)
        for x, height in enumerate(generator.integers(2, SIZE, 4)):
            draw.rectangle((x * SIZE // 4, SIZE - int(height), x * SIZE // 4 + 2, SIZE), fill=(200, 30 * i, 20))
        chart.save(folder / f"chart{i}.png")
        page = Image.new("RGB", (SIZE, SIZE), "white")
        ImageDraw.Draw(page).line((1, 2 + 2 * i, SIZE - 2, 2 + 2 * i), fill="black")
        page.save(folder / f"page{i}.png")
    Image.new("RGB", (SIZE, SIZE), (0, 0, 255)).save(folder / "blue.png")
    return folder


def rows_of(content: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(content)))


def test_predict_marks_charts_and_pages_and_says_how_many(
    call: Call, frozen: Path, odd: Path, other_photos: Path
) -> None:
    ended = call("predict", frozen, other_photos, odd)
    rows = rows_of(ended.out)
    marked = {row["path"] for row in rows if row["unfamiliar"] == "true"}
    assert {str(path) for path in odd.iterdir()} <= marked
    assert len(marked) <= len(list(odd.iterdir())) + 1, "One false alarm is possible."
    assert all(0 < float(row["typicality"]) <= 1 for row in rows)
    assert f"{len(marked)} of 22 images are unlike the training images." in ended.err
    assert "warning: These images differ from the training images (p < 0.001)" in ended.err
    alone = call("predict", frozen, other_photos)
    assert "differ from the training images" not in alone.err


def test_unfamiliar_images_are_left_out_or_come_first(
    call: Call, frozen: Path, odd: Path, other_photos: Path, tmp_path: Path
) -> None:
    marked = rows_of(call("predict", frozen, other_photos, odd).out)
    out = tmp_path / "answers.csv"
    for place in ("drop", "first"):
        assert call("predict", frozen, other_photos, odd, "--out", out, "--unfamiliar", place).code == 0
        unfamiliar = [row for row in marked if row["unfamiliar"] == "true"]
        others = [row for row in marked if row["unfamiliar"] == "false"]
        assert rows_of(out.read_text()) == ([*unfamiliar, *others] if place == "first" else others)
    told = json.loads(call("predict", frozen, odd, "--out", out, "--json", "--quiet").out)
    assert told["unfamiliar"]["number"] == 7
    alone = call("predict", frozen, odd / "blue.png", "--out", tmp_path / "one.csv")
    assert "1 image predicted" in alone.out
    assert "The image is unlike the training images." in alone.err
    lines = call("predict", frozen, odd, other_photos, "--json", "--unfamiliar", "first").out.splitlines()
    assert [json.loads(line)["unfamiliar"] for line in lines] == [True] * len(unfamiliar) + [False] * len(others)


def test_find_leaves_unfamiliar_images_out_unless_they_are_asked_for(
    call: Call, frozen: Path, odd: Path, other_photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "found.csv"
    find = ["find", frozen, other_photos, odd, "--class", "dog", "--out", out, "--no-page"]
    ended = call(*find)
    names = {Path(row["path"]).name for row in rows_of(out.read_text())}
    assert not names & {path.name for path in odd.iterdir()}
    assert "images are unlike the training images and left out" in ended.err
    assert json.loads(call(*find, "--json").out)["unfamiliar"] >= 7
    assert call(*find, "--unfamiliar", "mark").code == 0
    rows = rows_of(out.read_text())
    assert {Path(row["path"]).name for row in rows if row["unfamiliar"] == "true"} >= {p.name for p in odd.iterdir()}
    assert call(*find, "--unfamiliar", "first").err.startswith("lopsided: find lists the most likely images first.")


def test_evaluate_gives_metrics_with_and_without_unfamiliar_images(
    call: Call, frozen: Path, odd: Path, other_photos: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(other_photos, data)
    for path in odd.iterdir():
        shutil.copy(path, data / "cat")
    ended = call("evaluate", frozen, data)
    assert "Without unfamiliar images: 1" in ended.out
    assert "differ from the training images" in ended.err
    result = json.loads(call("evaluate", frozen, data, "--json").out)
    assert result["num_images"] - result["familiar"]["num_images"] == result["unfamiliar"]["number"] >= 7
    assert "familiar" not in json.loads(call("evaluate", frozen, other_photos, "--level", "0.009", "--json").out)


def test_images_of_few_groups_are_no_drift(
    call: Call, frozen: Path, odd: Path, other_photos: Path, tmp_path: Path
) -> None:
    paths = sorted([*other_photos.rglob("*.*"), *odd.iterdir()])
    table = tmp_path / "table.csv"
    table.write_text("path,patient\n" + "".join(f"{path},{path.parent.name}\n" for path in paths))
    images = [table, "--allow-outside"]
    alarm = "warning: These images differ from the training images"
    assert alarm in call("predict", frozen, *images).err
    for groups in (["--group", "patient"], ["--group", "parent"], ["--group-from", "{group}/*"]):
        told = call("predict", frozen, *images, *groups)
        assert told.code == 0
        assert alarm not in told.err, groups
    assert alarm in call("predict", frozen, odd, other_photos, "--group-from", "{group}.png").err
    table.write_text("path,patient\n" + f"{paths[0]},\n")
    for wrong, words in (
        (["--group", "nobody"], "a table must have the columns nobody"),
        (["--group", "patient"], "the column patient must be filled for every image"),
        (["--group", "patient", "--group-from", "{group}_*"], "--group and --group-from both say"),
        (["--group-from", "nobody"], "--group-from must hold {group} once"),
        (["--group-from", "{group}-?.gif"], "every image must have a group by the pattern"),
    ):
        ended = call("predict", frozen, *images, *wrong)
        assert ended.code == 2
        assert words in ended.err
    assert "--group must be parent, or a column of a table" in call("predict", frozen, odd, "--group", "patient").err


@pytest.mark.parametrize("level", ["0", "1", "-0.1", "nan"])
def test_a_level_that_is_no_share_is_refused(call: Call, frozen: Path, other_photos: Path, level: str) -> None:
    for verb in ("predict", "evaluate"):
        ended = call(verb, frozen, other_photos, "--level", level)
        assert ended.code == 2
        assert ended.err.startswith("lopsided: --level must be a share between 0 and 1")
    assert call("predict", frozen, other_photos, "--unfamiliar", "hide").code == 2


def test_a_level_that_the_known_images_do_not_reach_is_told(call: Call, frozen: Path, odd: Path) -> None:
    ended = call("predict", frozen, odd, "--level", "0.001")
    assert "With 120 known images, the lowest level is 0.00826 instead of 0.001" in ended.err
    assert all(row["unfamiliar"] == "true" for row in rows_of(ended.out))


def test_a_model_from_before_says_that_it_has_no_known_images(call: Call, model: Path, other_photos: Path) -> None:
    ended = call("predict", model, other_photos)
    assert ended.code == 0
    assert "The model has no bank of known images" in ended.err
    assert "typicality" not in ended.out.splitlines()[0]
    ended = call("predict", model, other_photos, "--unfamiliar", "drop")
    assert ended.code == 2
    assert "Leave out --unfamiliar and --level" in ended.err


def test_a_bank_of_another_encoder_and_a_missing_one_are_refused(
    call: Call, frozen: Path, finished: Path, other_photos: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(frozen, run)
    shutil.copy(finished / BANK_NAME, run / BANK_NAME)
    ended = call("predict", run, other_photos)
    assert ended.code == 2
    assert "does not belong to model.json: it was changed, or it is the bank of another encoder." in ended.err
    (run / BANK_NAME).unlink()
    assert "cannot be read (No such file or directory)" in call("predict", run, other_photos).err


def test_a_trained_encoder_is_calibrated_by_validation_images(finished: Path) -> None:
    bank = load_bank(finished, open_model(finished, "cpu")[1])
    assert bank is not None
    metrics = json.loads((finished / "metrics.json").read_text())["counts"]
    assert len(bank.scores) == sum(metrics["val"].values())
    assert len(bank.known) == sum(metrics["train"].values()) <= MOST_KNOWN


def test_other_views_have_no_typicality(call: Call, frozen: Path, other_photos: Path) -> None:
    ended = call("predict", frozen, other_photos, "--tta", "flip")
    assert "typicality" not in ended.out


def test_sets_and_abstention_in_predict_and_evaluate(call: Call, frozen: Path, other_photos: Path) -> None:
    ended = call("predict", frozen, other_photos, "--decide", "sets:0.9")
    assert "The thresholds are fitted to out-of-fold images: 90 of cat, 30 of dog." in ended.err
    assert all(set(row["set"].split("|")) <= {"cat", "dog", ""} for row in rows_of(ended.out))
    line = json.loads(call("predict", frozen, other_photos, "--decide", "sets:0.99", "--json").out.splitlines()[0])
    assert "dog" in line["set"], "30 images are too few for 99 %, so that the class is in every set."
    ended = call("evaluate", frozen, other_photos, "--decide", "sets:0.9")
    assert "Images whose set holds their class: cat " in ended.out
    rows = rows_of(call("predict", frozen, other_photos, "--decide", "abstain:0.000001").out)
    assert "ask" in {row["predicted"] for row in rows}
    ended = call("evaluate", frozen, other_photos, "--decide", "abstain:0.2", "--prevalence", "cat=0.9,dog=0.1")
    assert "A person is asked about " in ended.out
    assert "If cat has 90 % and dog has 10 % of the images:" in ended.out
    assert "errors left" in ended.out
    for rule in ("sets:2", "abstain:0"):
        assert call("predict", frozen, other_photos, "--decide", rule).code == 2


def test_predict_writes_a_map_of_each_image(call: Call, frozen: Path, model: Path, odd: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_text("no image")
    ended = call(
        "predict", frozen, odd / "blue.png", tmp_path / "broken.png", odd / "page0.png", "--maps", tmp_path / "maps"
    )
    assert ended.code == 0
    assert sorted(path.name for path in (tmp_path / "maps").iterdir()) == ["00001-blue.jpg", "00003-page0.jpg"]
    ended = call("predict", model, odd, "--maps", tmp_path / "others")
    assert ended.code == 2
    assert "have no positions in the image" in ended.err


def test_a_report_has_maps_of_mistakes_by_default(call: Call, frozen: Path, tmp_path: Path) -> None:
    run = shutil.copytree(frozen, tmp_path / "run")
    table = run / "predictions.csv"
    lines = table.read_text(encoding="utf-8").splitlines(keepends=True)
    lines[1:4] = [line.replace(",cat,cat,", ",dog,cat,").replace(",dog,dog,", ",cat,dog,") for line in lines[1:4]]
    table.write_text("".join(lines), encoding="utf-8")
    wanted = {name for name, _ in shown_images(run)}
    assert wanted
    assert call("report", run, "--no-maps").code == 0
    assert not (run / MAPS).exists()
    assert call("report", run).code == 0
    found = read_maps(run)
    assert found is not None
    assert set(found.names) == wanted
    assert 'class="heat"' in (run / "report.html").read_text(encoding="utf-8")
    (run / MAPS).unlink()
    lopsided.open(run).report(maps=False)
    assert not (run / MAPS).exists()
    lopsided.open(run).report()
    found = read_maps(run)
    assert found is not None
    assert set(found.names) == wanted
    sweep = tmp_path / "sweep"
    cell = shutil.copytree(run, sweep / "cells" / "a")
    (sweep / "sweep.json").write_text('{"format": 1}')
    for maps in (False, True):
        (cell / MAPS).unlink(missing_ok=True)
        assert write_run_reports(sweep, maps=maps).written == 1
        assert (cell / MAPS).exists() == maps
        assert ('class="heat"' in (cell / "report.html").read_text(encoding="utf-8")) == maps
    other = make_run(tmp_path / "other", test=(10, 10), signal=0.5)  # Without its model: no maps, and no error.
    assert call("report", other).code == 0
    assert not (other / MAPS).exists()
    assert call("report", other, "--maps").code == 2


def test_maps_do_not_read_what_a_recipe_allows_itself(frozen: Path, photos: Path, tmp_path: Path) -> None:
    run = shutil.copytree(frozen, tmp_path / "run")
    name, label = next(photos.rglob("*.*")).relative_to(photos).as_posix(), "dog"
    (tmp_path / "given").mkdir()
    table = tmp_path / "given" / "table.csv"
    outside = f"../{photos.name}"
    (tmp_path / photos.name).symlink_to(photos)
    table.write_text(f"path,label\n{outside}/{name},cat\n{outside}/{name},dog\n")
    recipe = Run.open(run).recipe.override(**{"data.source": str(table), "data.allow_outside": True})
    (run / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
    with pytest.raises(LopsidedError, match="--allow-outside"):
        make_maps(run, [(f"{outside}/{name}", label)])
    assert not (run / MAPS).exists()
